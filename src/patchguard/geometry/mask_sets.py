"""`MaskSet`: boxes of source pixels such that every position of a patch lies inside one of them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import numpy as np
from jaxtyping import Bool, Int64

from patchguard.errors import InputError
from patchguard.guard import Box
from patchguard.patch import Patch

MOST_PER_AXIS = 32
MOST_MASKS = 1024  # a proof asks about all pairs: half a million passes of the classifier per image


@final
@dataclass(frozen=True)
class MaskSet:
    """Masks on images of one size (height, width): each hides the pixels of one box (top, left, height, width).

    A set *covers* a patch if the patch, at every position inside the image, lies within some mask. That is never
    assumed: `covers` tries every position.

    >>> masks = MaskSet.covering((224, 224), Patch(32), 6)
    >>> len(masks.boxes), masks.boxes[0], masks.boxes[-1], masks.covers(Patch(32)), masks.covers(Patch(33))
    (36, (0, 0, 64, 64), (160, 160, 64, 64), True, False)
    """

    size: tuple[int, int]
    boxes: tuple[Box, ...]
    per_axis: int = 6  # masks along each axis when the set is refitted to another patch or size

    def __post_init__(self) -> None:
        _validate_per_axis(self.per_axis)
        height, width = self.size
        if not 1 <= len(self.boxes) <= MOST_MASKS or len(set(self.boxes)) != len(self.boxes):
            raise InputError(
                f"`boxes` must be from 1 to {MOST_MASKS} masks, each of them once; got {len(self.boxes)}. "
                "Take fewer masks along each axis, or a smaller area."
            )
        for box in self.boxes:
            top, left, rows, columns = box
            if min(top, left) < 0 or min(rows, columns) < 1 or top + rows > height or left + columns > width:
                raise InputError(f"`boxes` must lie inside images of {height} x {width} pixels; got {box}.")

    @classmethod
    def covering(cls, size: tuple[int, int], patch: Patch, per_axis: int = 6) -> "MaskSet":
        """Return a set with up to `per_axis` masks along each axis that covers the patch.

        Along an axis of n pixels, for a patch side p: the stride is s = ceil((n - p + 1) / per_axis), the side of a
        mask m = min(p + s - 1, n), and masks start at 0, s, 2 s, ... up to n - m, and at n - m. Neighboring starts
        differ by at most s, so a patch that starts at t lies in the mask that starts last up to t.
        """
        _validate_per_axis(per_axis)
        patch.check_fits(*size)
        if patch.count != 1:
            raise InputError(
                f"`patch` must be a single one for masks on pixels; got {patch.count}. "
                "Merge them into one rectangle where they lie close together: patch.merged(height=..., width=...)."
            )
        (tops, rows), (lefts, columns) = (
            _place_masks(length, side, per_axis) for length, side in zip(size, (patch.height, patch.width), strict=True)
        )
        return cls(size, tuple((top, left, rows, columns) for top in tops for left in lefts), per_axis)

    @classmethod
    def of_area(cls, size: tuple[int, int], area: int, per_axis: int = 6) -> "MaskSet":
        """Return a set that covers every rectangle of at most `area` pixels: one covering set per largest shape.

        >>> masks = MaskSet.of_area((32, 32), 16, 3)
        >>> masks.covers(Patch(4)), masks.covers(Patch(1, 16)), masks.covers(Patch(16, 1)), masks.covers(Patch(2, 8))
        (True, True, True, True)
        """
        height, width = size
        if isinstance(area, bool) or not isinstance(area, int) or area < 1:
            raise InputError(f"`area` must be a whole number of pixels of at least 1; got {area!r}.")
        shapes = [(rows, min(width, area // rows)) for rows in range(1, min(height, area) + 1)]
        largest = [shape for shape, taller in zip(shapes, [*shapes[1:], (0, 0)], strict=True) if shape[1] > taller[1]]
        sets = [cls.covering(size, Patch(*shape), per_axis) for shape in largest]
        return cls(size, tuple(dict.fromkeys(box for each in sets for box in each.boxes)), per_axis)

    def covers(self, patch: Patch) -> bool:
        """Whether the patch lies inside some mask at every position; all positions are tried."""
        fits = patch.height <= self.size[0] and patch.width <= self.size[1]
        return fits and patch.count == 1 and bool(self.positions(patch).covering.any(1).all())

    def positions(self, patch: Patch) -> "Positions":
        """Return which masks cover the patch at each of its positions."""
        return _find_positions(self.size, self.boxes, patch)

    @cached_property
    def pixels(self) -> Bool[np.ndarray, "masks height width"]:
        """Which pixels each mask hides."""
        hidden = np.zeros((len(self.boxes), *self.size), dtype=bool)
        for number, (top, left, rows, columns) in enumerate(self.boxes):
            hidden[number, top : top + rows, left : left + columns] = True
        return hidden


@final
@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a patch, one for all that the same masks cover; `number` counts positions along the image's rows."""

    covering: Bool[np.ndarray, "positions masks"]
    number: Int64[np.ndarray, " positions"]


@lru_cache(maxsize=128)
def _find_positions(size: tuple[int, int], boxes: tuple[Box, ...], patch: Patch) -> Positions:
    """Try every row and every column: a mask covers the patch where it covers it along both axes."""
    axes = []
    for length, side, start, extent in zip(
        size, (patch.height, patch.width), *np.array(boxes).T.reshape(2, 2, -1), strict=True
    ):
        first = np.arange(length - side + 1)[:, None]
        inside = (start <= first) & (first + side <= start + extent)  # positions along this axis, masks
        axes.append(np.unique(inside, axis=0, return_index=True))
    (down, top), (along, left) = axes
    covering = (down[:, None] & along[None]).reshape(-1, len(boxes))
    number = (top[:, None] * (size[1] - patch.width + 1) + left[None]).reshape(-1)
    return Positions(covering, number)


def _place_masks(length: int, patch: int, per_axis: int) -> tuple[list[int], int]:
    """Return the starts of masks along one axis, and their side."""
    stride = -(-(length - patch + 1) // per_axis)
    side = min(patch + stride - 1, length)
    return sorted({*range(0, length - side + 1, stride), length - side}), side


def _validate_per_axis(per_axis: int) -> None:
    if isinstance(per_axis, bool) or not isinstance(per_axis, int) or not 1 <= per_axis <= MOST_PER_AXIS:
        raise InputError(
            f"`masks` must be a whole number from 1 to {MOST_PER_AXIS}, along each axis; got {per_axis!r}."
        )
