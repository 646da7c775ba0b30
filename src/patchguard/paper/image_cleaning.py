"""Empirical defenses, for comparison: they clean an image before a network sees it, and prove nothing.

    cleaned = Cleaned(guard, LocalGradientSmoothing())
    cleaned.predict(images).label           # a label, as of any guard
    cleaned.certify(images, Patch(5))       # InputError: there is no certificate

* `LocalGradientSmoothing`: M. Naseer, S. Khan, F. Porikli, "Local gradients smoothing: defense against localized
  adversarial attacks", WACV 2019. Darkens what changes much from pixel to pixel.
* `DigitalWatermarking`: J. Hayes, "On visible adversarial perturbations & digital watermarking", CVPR workshops 2018
  (the blind defense). Paints over the region that the answer depends on most.

Both were published with attacks that do not know them. An attack that does takes the gradient through the cleaning:
`Cleaned.differentiable_logits`, which an attack uses as it uses a guard's.
"""

import math
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from patchguard.data.images import validate_images
from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.guard import Images, Prediction
from patchguard.guards.local import PIXELS_AT_ONCE, LocalGuard
from patchguard.models.base import LocalModel
from patchguard.runtime import device_and_dtype, full_precision

LEAK = 0.1  # fraction of the gradient that passes where the rule lets none through, as in the attacks
PUBLISHED_SIDE = 224  # pixels that the published window sizes are for; smaller images get smaller windows
SURROGATES = ("chain", "smooth")

Map = Float[Tensor, "batch height width"]
Region = Bool[Tensor, "batch height width"]


@runtime_checkable
class Cleaning(Protocol):
    """Something that takes a patch out of images, or tries to. Equal images are cleaned equally in every batch."""

    def __call__(self, images: Images, guard: LocalGuard[Any]) -> Images:
        """Return the cleaned images, with pixels in [0, 1]."""
        ...

    def differentiable(self, images: Images, guard: LocalGuard[Any]) -> Images:
        """Return the same pixels, with a gradient that an attack can follow also where the true one is zero."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Cleaned:
    """A guard behind a cleaning of its images: a victim for attacks, without any certificate."""

    guard: LocalGuard[Any]
    cleaning: Cleaning

    @property
    def model(self) -> LocalModel:
        """The network behind the cleaning."""
        return self.guard.model

    @property
    def evidence(self) -> Evidence:
        """What the guard makes of local logits."""
        return self.guard.evidence

    @property
    def defense(self) -> Defense[Any]:
        """How the guard adds up evidence."""
        return self.guard.defense

    def predict(self, images: Images) -> Prediction:
        """Return the guard's label of each cleaned image."""
        validate_images(images)
        device = device_and_dtype(self.model)[0]
        pixels = images.shape[-2] * images.shape[-1]
        parts = torch.split(images, max(1, PIXELS_AT_ONCE.get(device.type, PIXELS_AT_ONCE["cuda"]) // pixels))
        with full_precision(device):
            cleaned = [self.cleaning(part.to(device), self.guard).to(images.device) for part in parts]
        return self.guard.predict(torch.cat(cleaned))

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return the guard's local logits of the cleaned images; gradients flow to `images` through the cleaning."""
        return self.guard.differentiable_logits(self.cleaning.differentiable(images, self.guard))

    def certify(self, *arguments: object, **settings: object) -> NoReturn:
        """Refuse: a cleaned image can be anything."""
        raise InputError(
            f"{type(self.cleaning).__name__} has no certificate: it cleans by a heuristic that reads the whole image, "
            "so one patch may change every pixel that the network sees. Certify the guard behind it: `cleaned.guard`."
        )


def _zero_with_gradient(value: Tensor) -> Tensor:
    """Return zero, with the gradient of `value`."""
    return value - value.detach()


# -- local gradient smoothing ------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class LocalGradientSmoothing:
    r"""Darken regions of high frequency.

    Rule.  x'(p) = x(p) (1 - min(1, `strength` g(p) m(p))), where g is the magnitude of the first differences of x, all
           colors together, scaled to [0, 1] image by image, and m(p) = 1 if p lies in a block of `window` x `window`
           pixels in which the mean of g exceeds `threshold`. Neighboring blocks share `overlap` pixels.

    The numbers are the published ones, which are for images of about 300 pixels; `fitted` shrinks the blocks for small
    images.

    `surrogate` is what an attack sees. "chain": the rule's own gradient; where the product above is cut at 1, so that a
    pixel is black, a tenth of the gradient passes, and tells the attack to smooth what is cut. "smooth": that of the
    cleaned pixels, averaged over 3 x 3 of them (BPDA with a low pass): it makes patches that change little from pixel
    to pixel, and so are let through. Neither is always better: an attacker tries both.
    """

    window: int = 15
    overlap: int = 5
    threshold: float = 0.1
    strength: float = 2.3
    surrogate: str = "chain"

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.window:
            raise InputError(f"`overlap` must lie between 0 and {self.window - 1}, below `window`; got {self.overlap}.")
        if not (0 <= self.threshold < 1 and self.strength > 0):
            raise InputError(
                f"`threshold` must lie in [0, 1) and `strength` above 0; got {self.threshold} and {self.strength}."
            )
        if self.surrogate not in SURROGATES:
            raise InputError(f"`surrogate` must be one of {', '.join(SURROGATES)}; got {self.surrogate!r}.")

    @classmethod
    def fitted(cls, height: int, width: int) -> "LocalGradientSmoothing":
        """Return the published setting, with blocks in proportion where an image is smaller than 224 pixels."""
        scale = min(1.0, min(height, width) / PUBLISHED_SIDE)
        return cls(window=max(3, round(15 * scale)), overlap=max(1, round(5 * scale)))

    def __call__(self, images: Images, guard: LocalGuard[Any] | None = None) -> Images:
        """Return the darkened images."""
        with torch.no_grad():
            return self.darken(images)

    def differentiable(self, images: Images, guard: LocalGuard[Any] | None = None) -> Images:
        """Return the same, with the gradient of the surrogate."""
        if self.surrogate == "chain":
            return self.darken(images, leak=LEAK)
        return self(images) + _zero_with_gradient(functional.avg_pool2d(images, 3, stride=1, padding=1))

    def darken(self, images: Images, leak: float = 0.0) -> Images:
        """Apply the rule; a fraction `leak` of the gradient passes where the product is cut."""
        magnitude = gradient_magnitude(images)
        low, high = magnitude.amin((1, 2), keepdim=True), magnitude.amax((1, 2), keepdim=True)
        spread = high - low
        flat = spread == 0
        scaled = torch.where(flat, 0.0, (magnitude - low) / torch.where(flat, 1.0, spread))
        busy = busy_blocks(scaled.detach(), window=self.window, overlap=self.overlap, threshold=self.threshold)
        wanted = self.strength * scaled * busy
        cut = wanted.clamp(max=1.0)
        if leak > 0:
            cut = cut + leak * _zero_with_gradient(wanted - cut)
        return images * (1 - cut.unsqueeze(1))


def gradient_magnitude(images: Images) -> Map:
    """Return the length of the first differences to the right and down, all colors together; 0 beyond the border."""
    right = functional.pad(images[..., :, 1:] - images[..., :, :-1], (0, 1, 0, 0))
    down = functional.pad(images[..., 1:, :] - images[..., :-1, :], (0, 0, 0, 1))
    # The norm has gradient 0 at 0, where a square root would have none.
    length: Tensor = torch.linalg.vector_norm(torch.cat([right, down], dim=1), dim=1)
    return length


def busy_blocks(values: Map, *, window: int, overlap: int, threshold: float) -> Map:
    """Return 1 for pixels in some block with a mean above `threshold`, else 0. The last block ends with the image."""
    height, width = values.shape[1:]
    rows, columns = min(window, height), min(window, width)
    means = functional.avg_pool2d(values.unsqueeze(1), (rows, columns), stride=1).squeeze(1)
    tops, lefts = ([*range(0, last, window - overlap), last] for last in (height - rows, width - columns))
    busy = (means[:, tops][:, :, lefts] > threshold).to(values.dtype)
    with torch.autocast(values.device.type, enabled=False):
        touched = _members(height, rows, tops).to(values) @ busy @ _members(width, columns, lefts).to(values).T
    return (touched > 0).to(values.dtype)


def _members(length: int, window: int, starts: list[int]) -> Float[Tensor, "length blocks"]:
    """Return which pixels of a line lie in which block."""
    offsets = torch.arange(length).unsqueeze(1) - torch.tensor(starts)
    return ((offsets >= 0) & (offsets < window)).float()


# -- digital watermarking ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class DigitalWatermarking:
    r"""Find the dense region that the answer depends on most, and paint over it from its surroundings.

    Rule.  1. s(p) = how much pixel p speaks for the guard's own label, by guided backpropagation.
           2. Keep the `fraction` of the pixels with the largest s.
           3. Close gaps and drop what is thin: dilate by `radius`, erode by 2 `radius`, dilate by 2 `radius`.
           4. Fill what is left from the pixels around it.

    The publication gives these steps; the sizes, and how step 4 fills, are ours. `fitted` takes a radius in proportion
    to the image. Neither the choice of the region nor its filling has a useful gradient: `differentiable` hands that of
    the cleaned pixels straight on to the images (BPDA: A. Athalye, N. Carlini, D. Wagner, "Obfuscated gradients give a
    false sense of security", ICML 2018).
    """

    fraction: float = 0.05
    radius: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise InputError(f"`fraction` of the pixels must lie between 0 and 1; got {self.fraction}.")
        if self.radius < 1:
            raise InputError(f"`radius` must be a whole number of pixels, 1 or more; got {self.radius}.")

    @classmethod
    def fitted(cls, height: int, width: int) -> "DigitalWatermarking":
        """Return the setting for images of this size: a radius of 3 pixels at 224."""
        return cls(radius=max(1, round(3 * min(height, width) / PUBLISHED_SIDE)))

    def __call__(self, images: Images, guard: LocalGuard[Any]) -> Images:
        """Return the images with the region painted over."""
        region = dense_region(saliency(guard, images), fraction=self.fraction, radius=self.radius)
        with torch.no_grad():
            return inpaint(images, region)

    def differentiable(self, images: Images, guard: LocalGuard[Any]) -> Images:
        """Return the same; its gradient is handed straight on."""
        return self(images.detach(), guard) + _zero_with_gradient(images)


def saliency(guard: LocalGuard[Any], images: Images) -> Map:
    """Return how much each pixel speaks for the guard's own label, by guided backpropagation: its largest color.

    J. T. Springenberg et al., "Striving for simplicity: the all convolutional net", ICLR workshop 2015: the gradient of
    the label's score, of which every ReLU on the way back lets only positive parts through.
    """
    with torch.enable_grad():
        moving = images.detach().clone().requires_grad_()
        with _GuidedReLUs():
            scores = guard.differentiable_logits(moving).mean((2, 3))
        (gradient,) = torch.autograd.grad(scores.amax(1).sum(), moving)
    return gradient.abs().amax(1)


class _GuidedReLU(torch.autograd.Function):
    """A ReLU whose gradient is that of guided backpropagation."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs > 0)
        return inputs.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        guided: Tensor = gradient.clamp(min=0) * positive
        return guided


@final
class _GuidedReLUs(TorchFunctionMode):
    """Inside, every ReLU is a guided one, in whatever network: as a module, a function, or in place."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        if function in (functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
            return _GuidedReLU.apply(arguments[0])  # type: ignore[no-untyped-call]
        return function(*arguments, **(settings or {}))


def dense_region(values: Map, *, fraction: float, radius: int) -> Region:
    """Return where the largest `fraction` of the values lies densely: thresholded, closed, opened."""
    count = max(1, math.floor(fraction * values[0].numel()))
    least = values.flatten(1).topk(count, dim=1).values[:, -1].view(-1, 1, 1)
    region = ((values >= least) & (values > 0)).to(values.dtype)
    eroded = -_dilate(-_dilate(region, radius), 2 * radius)
    return _dilate(eroded, 2 * radius) > 0


def _dilate(region: Map, radius: int) -> Map:
    """Return the largest value in the square of `radius` around each pixel, clipped at the border."""
    return functional.max_pool2d(region.unsqueeze(1), 2 * radius + 1, stride=1, padding=radius).squeeze(1)


def inpaint(images: Images, region: Region) -> Images:
    """Return images whose `region` is filled from its surroundings, smoothly; all else stays bit by bit.

    Coarser and coarser means of the known pixels are taken, down to one pixel; then each unknown pixel takes the
    interpolated value of the next coarser level. An image that is all unknown becomes gray.
    """
    known = (~region).unsqueeze(1).to(images.dtype)
    return torch.where(region.unsqueeze(1), _fill(images * known, known), images).clamp(0, 1)


def _fill(sums: Tensor, weight: Tensor) -> Tensor:
    """Return `sums / weight` where there is weight, and what the coarser levels say elsewhere."""
    height, width = sums.shape[-2:]
    if height == width == 1:
        coarse = torch.full_like(sums, 0.5)
    else:
        # Both are averaged over the same pixels, fewer at the border, so that their quotient stays a mean.
        coarse = _fill(*(functional.avg_pool2d(each, 2, ceil_mode=True) for each in (sums, weight)))
        coarse = functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    some = weight > 0
    return torch.where(some, sums / torch.where(some, weight, 1.0), coarse)
