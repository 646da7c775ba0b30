"""`Preprocess`: from source images to network pixels, and which source pixels each of those reads."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from patchguard.errors import InputError, nearest
from patchguard.geometry.field import Axis, Field, compose
from patchguard.geometry.resize import Mode, resize_matrix, support

Images = Float[Tensor, "batch channels height width"]
Result = Float[Tensor, "batch channels rows columns"]


def _require_integers(step: object, names: tuple[str, ...], least: int) -> None:
    for name in names:
        value = getattr(step, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"`{name}` of {type(step).__name__} must be a whole number, {least} or more; got {value!r}."
            )


@final
@dataclass(frozen=True, kw_only=True)
class Resize:
    """Resize to `height` x `width`, or to `shorter` pixels on the shorter side (the longer one rounded down).

    Rule.  y = R x Cᵀ clamped to [0, 1], with the matrices of `resize_matrix` for rows and columns.

    `antialias=True` follows Pillow's `resize`: columns first, clamped in between, but without its rounding to
    8 bits. `antialias=False` follows torch's `interpolate`. Bicubic weights may be negative, hence the clamp;
    it acts on each pixel alone and so adds nothing to what a pixel reads. Pixels must be finite.
    """

    kind: ClassVar[str] = "resize"

    height: int | None = None
    width: int | None = None
    shorter: int | None = None
    mode: Mode = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.shorter is None:
            _require_integers(self, ("height", "width"), 1)
        elif self.height is None and self.width is None:
            _require_integers(self, ("shorter",), 1)
        else:
            raise InputError("Resize takes `height` and `width`, or `shorter`; got both. Leave one of them out.")
        if self.mode not in ("nearest", "bilinear", "bicubic"):
            hint = nearest(str(self.mode), ["nearest", "bilinear", "bicubic"])
            raise InputError(f"`mode` of Resize must be nearest, bilinear or bicubic; got {self.mode!r}. {hint}")
        if not isinstance(self.antialias, bool):
            raise InputError(f"`antialias` of Resize must be true or false; got {self.antialias!r}.")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the result for an image of `height` x `width`."""
        if self.height is not None and self.width is not None:
            return self.height, self.width
        assert self.shorter is not None
        short = min(height, width)
        return self.shorter * height // short, self.shorter * width // short

    def support(self, height: int, width: int) -> Field:
        """Return which pixels of the input each pixel of the result reads."""
        rows, columns = self.output_size(height, width)
        return Field(
            support(resize_matrix(height, rows, self.mode, self.antialias)),
            support(resize_matrix(width, columns, self.mode, self.antialias)),
        )

    def __call__(self, images: Images) -> Result:
        """Return the resized images, in the type of `images`."""
        height, width = images.shape[-2:]
        rows, columns = self.output_size(height, width)
        if (rows, columns) == (height, width):
            return images.clamp(0, 1)
        # Half precision would round pixels to 8 to 11 bits twice over.
        exact = images if images.dtype in (torch.float32, torch.float64) else images.float()
        result = exact @ self._matrix(width, columns, exact).T
        if self.antialias:
            result = result.clamp(0, 1)
        result = self._matrix(height, rows, exact) @ result
        return result.clamp(0, 1).to(images.dtype)

    def _matrix(self, before: int, after: int, like: Tensor) -> Float[Tensor, "after before"]:
        # Only the array is kept between calls: a kept tensor would carry over the mode (inference, export) it
        # met.
        matrix = resize_matrix(before, after, self.mode, self.antialias)
        return torch.tensor(matrix, dtype=like.dtype).to(like.device)


@final
@dataclass(frozen=True, kw_only=True)
class Crop:
    """Keep the `height` x `width` pixels whose first row is `top` and first column `left`."""

    kind: ClassVar[str] = "crop"

    top: int
    left: int
    height: int
    width: int

    def __post_init__(self) -> None:
        _require_integers(self, ("top", "left"), 0)
        _require_integers(self, ("height", "width"), 1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the result; raise if the image is too small."""
        if self.top + self.height > height or self.left + self.width > width:
            raise InputError(
                f"images must be at least {self.top + self.height} x {self.left + self.width} pixels to be "
                f"cropped; got {height} x {width}. Resize or pad them first."
            )
        return self.height, self.width

    def support(self, height: int, width: int) -> Field:
        """Return which pixels of the input each pixel of the result reads."""
        self.output_size(height, width)
        return Field(_shift_axis(self.top, self.height, height), _shift_axis(self.left, self.width, width))

    def __call__(self, images: Images) -> Result:
        """Return the cropped images."""
        self.output_size(*images.shape[-2:])
        return images[..., self.top : self.top + self.height, self.left : self.left + self.width]


@final
@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """Keep the `height` x `width` pixels in the middle; of two middles the one with an even start."""

    kind: ClassVar[str] = "center_crop"

    height: int
    width: int

    def __post_init__(self) -> None:
        _require_integers(self, ("height", "width"), 1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the result; raise if the image is too small."""
        return self._crop(height, width).output_size(height, width)

    def support(self, height: int, width: int) -> Field:
        """Return which pixels of the input each pixel of the result reads."""
        return self._crop(height, width).support(height, width)

    def __call__(self, images: Images) -> Result:
        """Return the cropped images."""
        return self._crop(*images.shape[-2:])(images)

    def _crop(self, height: int, width: int) -> Crop:
        top, left = (max(round(spare / 2), 0) for spare in (height - self.height, width - self.width))
        return Crop(top=top, left=left, height=self.height, width=self.width)


@final
@dataclass(frozen=True, kw_only=True)
class Pad:
    """Surround the image with pixels of one `value`, which read nothing."""

    kind: ClassVar[str] = "pad"

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    value: float = 0.0

    def __post_init__(self) -> None:
        _require_integers(self, ("top", "bottom", "left", "right"), 0)
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not 0 <= self.value <= 1:
            raise InputError(f"`value` of Pad must be a pixel value in [0, 1]; got {self.value!r}.")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the result for an image of `height` x `width`."""
        return height + self.top + self.bottom, width + self.left + self.right

    def support(self, height: int, width: int) -> Field:
        """Return which pixels of the input each pixel of the result reads."""
        rows, columns = self.output_size(height, width)
        return Field(_shift_axis(-self.top, rows, height), _shift_axis(-self.left, columns, width))

    def __call__(self, images: Images) -> Result:
        """Return the padded images."""
        return functional.pad(images, (self.left, self.right, self.top, self.bottom), value=float(self.value))


def _shift_axis(first: int, cells: int, size: int) -> Axis:
    """Return the axis whose cell i reads pixel first + i, or nothing where there is no such pixel."""
    pixels = range(first, first + cells)
    inside = [0 <= pixel < size for pixel in pixels]
    starts = tuple(pixel if there else 0 for pixel, there in zip(pixels, inside, strict=True))
    return Axis(starts, tuple(int(there) for there in inside), size)


Step = Resize | Crop | CenterCrop | Pad
_KINDS: dict[str, type[Step]] = {step.kind: step for step in (Resize, Crop, CenterCrop, Pad)}


@final
@dataclass(frozen=True)
class Preprocess:
    """A chain of steps from source images to network pixels. Without steps, images stay as they are.

    The one implementation for training, prediction, certificates and attacks: differentiable, and on the
    device of the images.

    >>> chain = Preprocess((Resize(shorter=256), CenterCrop(height=224, width=224)))
    >>> chain.output_size(375, 500)
    (224, 224)
    """

    steps: tuple[Step, ...] = ()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the network's image for a source image of `height` x `width`."""
        for step in self.steps:
            height, width = step.output_size(height, width)
        return height, width

    def support(self, height: int, width: int) -> Field:
        """Return which pixels of a `height` x `width` source image each network pixel reads."""
        if height < 1 or width < 1:
            raise InputError(f"images must have at least one pixel; got {height} x {width}.")
        whole = Field.identity(height, width)
        for step in self.steps:
            whole = compose(step.support(*whole.grid), whole)
        return whole

    def __call__(self, images: Images) -> Result:
        """Return the network's images for source images with pixels in [0, 1]."""
        result = images
        for step in self.steps:
            result = step(result)
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the chain as an object that JSON can hold."""
        return {"steps": [{"kind": step.kind, **asdict(step)} for step in self.steps]}

    @classmethod
    def from_json(cls, value: object) -> "Preprocess":
        """Return the chain that `to_json` wrote; refuse anything else."""
        if not isinstance(value, dict) or set(value) != {"steps"} or not isinstance(value["steps"], list):
            raise InputError(f'`preprocess` must be an object with the one entry "steps", a list; got {value!r}.')
        return cls(tuple(_read_step(entry) for entry in value["steps"]))


def _read_step(entry: object) -> Step:
    kind = _KINDS.get(str(entry.get("kind"))) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or kind is None:
        known = ", ".join(_KINDS)
        raise InputError(f"a preprocessing step must have a `kind` out of {known}; got {entry!r}.")
    settings = {name: value for name, value in entry.items() if name != "kind"}
    names = [field.name for field in fields(kind)]
    if set(settings) != set(names):
        raise InputError(
            f"the preprocessing step {entry['kind']} must have exactly the settings {', '.join(names)}; "
            f"got {', '.join(map(str, settings)) or 'none'}."
        )
    return kind(**settings)
