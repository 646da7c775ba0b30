"""Random crops, flips, cutout, color jitter and mixup, drawn and applied on the device of the images."""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class BatchRandom:
    """Random numbers, one row per image, for the images `part` of a batch of `batch_size`.

    They are drawn for the whole batch, so that processes that share it see what one process alone would see.
    """

    generator: torch.Generator
    batch_size: int
    part: slice

    def integers(self, high: int, columns: int = 1) -> Int64[Tensor, "part columns"]:
        """Return whole numbers from 0 to below `high`."""
        size = (self.batch_size, columns)
        return torch.randint(high, size, generator=self.generator, device=self.generator.device)[self.part]

    def uniform(self, low: float, high: float) -> Float[Tensor, " part"]:
        """Return numbers between `low` and `high`."""
        values = torch.rand(self.batch_size, generator=self.generator, device=self.generator.device)
        return (low + (high - low) * values)[self.part]


def augment(
    images: UInt8[Tensor, "batch 3 height width"],
    random: BatchRandom,
    *,
    padding: int = 0,
    flip: bool = False,
    cutout: int = 0,
) -> Float[Tensor, "batch 3 height width"]:
    """Return images as pixels in [0, 1], each shifted, flipped and with a square cut out at random.

    Rule.  A shift by up to `padding` pixels per axis, filled up by reflection; left and right swapped with probability
           one half where `flip`; a square of `cutout` pixels, centered anywhere and cut off at the border, set to gray.

    The result has its channels last in memory.
    """
    batch, _, height, width = images.shape
    rows = _reflect(torch.arange(height, device=images.device) + random.integers(2 * padding + 1) - padding, height)
    columns = _reflect(torch.arange(width, device=images.device) + random.integers(2 * padding + 1) - padding, width)
    if flip:
        columns = torch.where(random.integers(2) == 1, columns.flip(1), columns)
    number = torch.arange(batch, device=images.device).view(-1, 1, 1)
    # A slice between two index tensors puts the channels last: batch, height, width, 3.
    pixels = images[number, :, rows.unsqueeze(2), columns.unsqueeze(1)].float() / 255
    if cutout > 0:
        in_rows = _select_interval(height, random.integers(height), cutout)
        in_columns = _select_interval(width, random.integers(width), cutout)
        pixels = torch.where((in_rows.unsqueeze(2) & in_columns.unsqueeze(1)).unsqueeze(3), 0.5, pixels)
    return pixels.permute(0, 3, 1, 2)


def random_resized_crop(
    images: UInt8[Tensor, "batch 3 height width"],
    random: BatchRandom,
    *,
    scale: tuple[float, float],
    flip: bool = False,
    ratio: float = 4 / 3,
) -> Float[Tensor, "batch 3 height width"]:
    """Return a random crop of each image, enlarged to the full size, as pixels in [0, 1].

    Rule.  The crop covers a fraction of the area drawn uniformly from `scale`; its aspect ratio, drawn uniformly in the
           logarithm, lies between 1 / `ratio` and `ratio`; sides end at the image's. Its position is uniform. Left and
           right are swapped with probability one half where `flip`. Pixels are interpolated bilinearly.
    """
    area, aspect = random.uniform(*scale), torch.exp(random.uniform(-math.log(ratio), math.log(ratio)))
    height, width = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)
    # Coordinates run from -1 to 1: a crop of relative size s can be centered anywhere in [s - 1, 1 - s].
    y, x = random.uniform(-1.0, 1.0) * (1 - height), random.uniform(-1.0, 1.0) * (1 - width)
    mirror = torch.where(random.uniform(0.0, 1.0) < 0.5, -1.0, 1.0) if flip else torch.ones_like(width)
    zero = torch.zeros_like(width)
    affine = torch.stack([width * mirror, zero, x, zero, height, y], 1).view(len(images), 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)


def color_jitter(
    pixels: Float[Tensor, "batch 3 height width"], random: BatchRandom, strength: float
) -> Float[Tensor, "batch 3 height width"]:
    """Return images with other saturation, contrast and brightness.

    Rule.  Drawn per image, uniformly: saturation (distance from gray) and contrast (distance from the mean) are
           multiplied by 1 - `strength` to 1 + `strength`; brightness moves by up to half of `strength`. Clamped to
           [0, 1].
    """

    def uniform(low: float, high: float) -> Float[Tensor, "batch 1 1 1"]:
        return random.uniform(low, high).view(-1, 1, 1, 1)

    gray = pixels.mean(1, keepdim=True)
    pixels = gray + uniform(1 - strength, 1 + strength) * (pixels - gray)
    mean = pixels.mean((1, 2, 3), keepdim=True)
    pixels = mean + uniform(1 - strength, 1 + strength) * (pixels - mean) + uniform(-strength / 2, strength / 2)
    return pixels.clamp(0, 1)


def mixup(
    pixels: Float[Tensor, "batch 3 height width"],
    target: Int64[Tensor, " batch"],
    random: BatchRandom,
    *,
    classes: int,
    strength: float,
) -> tuple[Float[Tensor, "batch 3 height width"], Float[Tensor, "batch classes"]]:
    """Return images blended with another one of the batch, and their label distributions.

    Rule.  Image i is blended with image n - 1 - i of the n images; the weight of the other one, in pixels and in
           labels, is drawn per image, uniformly from 0 to `strength`.
    """
    weight = random.uniform(0.0, strength)
    labels = F.one_hot(target, classes).float()
    return (
        torch.lerp(pixels, pixels.flip(0), weight.view(-1, 1, 1, 1)),
        torch.lerp(labels, labels.flip(0), weight.unsqueeze(1)),
    )


def crop_quarter(
    pixels: Float[Tensor, "batch channels height width"], seed: int
) -> Float[Tensor, "batch channels rows columns"]:
    """Return a crop of half the height and width, at one random position for all images."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: slices need numbers, without a wait for the GPU
    half = [size // 2 for size in pixels.shape[2:]]
    top, left = (
        int(torch.randint(size - part + 1, (), generator=generator))
        for size, part in zip(pixels.shape[2:], half, strict=True)
    )
    return pixels[..., top : top + half[0], left : left + half[1]]


def _reflect(index: Int64[Tensor, "batch size"], size: int) -> Int64[Tensor, "batch size"]:
    """Return the pixel that an index outside the image mirrors; the border pixel itself is not repeated."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _select_interval(size: int, center: Tensor, length: int) -> Tensor:
    """Return which pixels of each image lie in the interval of `length` around `center`."""
    start = center - length // 2
    index = torch.arange(size, device=center.device)
    return (index >= start) & (index < start + length)
