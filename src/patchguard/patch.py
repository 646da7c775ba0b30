"""`Patch`: the threat. A rectangle of source pixels that may show anything, anywhere in the image."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, final

from patchguard.errors import InputError

Space: TypeAlias = Literal["source", "input"]  # where a patch lies: in the image as it came, or as the network sees it


@final
@dataclass(frozen=True, slots=True)
class Patch:
    """`count` rectangles of `height` x `width` source pixels, each at any position inside the image.

    >>> Patch(5)
    Patch(height=5, width=5, count=1)
    >>> Patch(24, 88).area
    2112
    """

    height: int
    width: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.width == 0:
            object.__setattr__(self, "width", self.height)
        for name in ("height", "width", "count"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"`{name}` of a patch must be a whole number of at least 1; got {value!r}.")

    @classmethod
    def of_area(cls, area: float | Fraction, *, height: int, width: int) -> "Patch":
        """Return the smallest square p x p with p * p >= area * height * width.

        >>> Patch.of_area(0.02, height=224, width=224)
        Patch(height=32, width=32, count=1)
        """
        # The decimal the user wrote, not its binary neighbor: 0.04 of 100 x 100 is 20 x 20, not 21 x 21.
        share = area if isinstance(area, Fraction) else Fraction(repr(float(area)))
        if not 0 < share <= 1:
            raise InputError(
                f"`area` must be a share of the image above 0 and at most 1; got {area}. Write 2 % as 0.02."
            )
        if height < 1 or width < 1:
            raise InputError(f"the image must have at least one pixel; got {height} x {width}.")
        pixels = math.ceil(share * height * width)
        patch = cls(math.isqrt(pixels - 1) + 1)
        patch.check_fits(height, width)
        return patch

    @property
    def area(self) -> int:
        """Pixels of one rectangle."""
        return self.height * self.width

    def merged(self, *, height: int, width: int) -> "Patch":
        """Return the one rectangle, at most `height` x `width`, that contains all `count` patches.

        This is the paper's simplest answer to several patches that are known to lie within one region.
        """
        box = Patch(height, width)
        if height < self.height or width < self.width:
            raise InputError(
                f"a {height} x {width} box cannot contain a {self.height} x {self.width} patch. Give a larger box."
            )
        return box

    def check_fits(self, height: int, width: int) -> None:
        """Raise unless one rectangle fits into an image of `height` x `width` pixels."""
        if self.height > height or self.width > width:
            raise InputError(
                f"`patch` must fit the image; got {self.height} x {self.width} for an image of "
                f"{height} x {width} pixels. Give a smaller patch."
            )
