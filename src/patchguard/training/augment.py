"""Random crops, flips and holes, drawn and applied on the device of the images."""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Draws:
    """Random numbers, one row per image, for the images `part` of a batch of `batch`.

    They are drawn for the whole batch, so that processes that share it see what one process alone would see.
    """

    generator: torch.Generator
    batch: int
    part: slice

    def whole(self, high: int, columns: int = 1) -> Int64[Tensor, "part columns"]:
        """Return whole numbers from 0 to below `high`."""
        size = (self.batch, columns)
        return torch.randint(high, size, generator=self.generator, device=self.generator.device)[self.part]

    def evenly(self, low: float, high: float) -> Float[Tensor, " part"]:
        """Return numbers between `low` and `high`."""
        drawn = torch.rand(self.batch, generator=self.generator, device=self.generator.device)
        return (low + (high - low) * drawn)[self.part]


def augmented(
    images: UInt8[Tensor, "batch 3 height width"],
    draws: Draws,
    *,
    pad: int = 0,
    flip: bool = False,
    cutout: int = 0,
) -> Float[Tensor, "batch 3 height width"]:
    """Return images as pixels in [0, 1], each shifted, mirrored and punched at random.

    Rule.  A shift by up to `pad` pixels per axis, filled up by reflection; left and right swapped with probability one
           half where `flip`; a square of `cutout` pixels, centred anywhere and cut off at the border, set to mid-grey.

    The result has its channels last in memory.
    """
    batch, _, height, width = images.shape
    rows = _reflected(torch.arange(height, device=images.device) + draws.whole(2 * pad + 1) - pad, height)
    columns = _reflected(torch.arange(width, device=images.device) + draws.whole(2 * pad + 1) - pad, width)
    if flip:
        columns = torch.where(draws.whole(2) == 1, columns.flip(1), columns)
    number = torch.arange(batch, device=images.device).view(-1, 1, 1)
    # A slice between two index tensors puts the channels last: batch, height, width, 3.
    pixels = images[number, :, rows.unsqueeze(2), columns.unsqueeze(1)].float() / 255
    if cutout > 0:
        down = _within(height, draws.whole(height), cutout)
        along = _within(width, draws.whole(width), cutout)
        pixels = torch.where((down.unsqueeze(2) & along.unsqueeze(1)).unsqueeze(3), 0.5, pixels)
    return pixels.permute(0, 3, 1, 2)


def resized_crop(
    images: UInt8[Tensor, "batch 3 height width"],
    draws: Draws,
    *,
    area: tuple[float, float],
    flip: bool = False,
    ratio: float = 4 / 3,
) -> Float[Tensor, "batch 3 height width"]:
    """Return, of each image, a random crop blown up to the full size, as pixels in [0, 1].

    Rule.  The crop covers a share of the area drawn evenly from `area`; its width over its height, drawn evenly in the
           logarithm, lies between 1 / `ratio` and `ratio`; sides end at the image's. Its place is drawn evenly. Left
           and right are swapped with probability one half where `flip`. Pixels between pixels are interpolated.
    """
    share, shape = draws.evenly(*area), torch.exp(draws.evenly(-math.log(ratio), math.log(ratio)))
    tall, wide = (share / shape).sqrt().clamp(max=1), (share * shape).sqrt().clamp(max=1)
    # Coordinates run from -1 to 1: a crop of relative size s can be centred anywhere in [s - 1, 1 - s].
    down, along = draws.evenly(-1.0, 1.0) * (1 - tall), draws.evenly(-1.0, 1.0) * (1 - wide)
    mirror = torch.where(draws.evenly(0.0, 1.0) < 0.5, -1.0, 1.0) if flip else torch.ones_like(wide)
    nothing = torch.zeros_like(wide)
    affine = torch.stack([wide * mirror, nothing, along, nothing, tall, down], 1).view(len(images), 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)


def recoloured(
    pixels: Float[Tensor, "batch 3 height width"], draws: Draws, strength: float
) -> Float[Tensor, "batch 3 height width"]:
    """Return images with other colours.

    Rule.  Drawn per image, evenly: saturation (distance from grey) and contrast (distance from the mean) are multiplied
           by 1 - `strength` to 1 + `strength`; brightness moves by up to half of `strength`. Ends at [0, 1].
    """

    def drawn(low: float, high: float) -> Float[Tensor, "batch 1 1 1"]:
        return draws.evenly(low, high).view(-1, 1, 1, 1)

    grey = pixels.mean(1, keepdim=True)
    pixels = grey + drawn(1 - strength, 1 + strength) * (pixels - grey)
    mean = pixels.mean((1, 2, 3), keepdim=True)
    pixels = mean + drawn(1 - strength, 1 + strength) * (pixels - mean) + drawn(-strength / 2, strength / 2)
    return pixels.clamp(0, 1)


def mixed(
    pixels: Float[Tensor, "batch 3 height width"],
    target: Int64[Tensor, " batch"],
    draws: Draws,
    *,
    classes: int,
    most: float,
) -> tuple[Float[Tensor, "batch 3 height width"], Float[Tensor, "batch classes"]]:
    """Return images in which another one shines through, and the distribution of their labels.

    Rule.  Drawn per image, evenly from 0 to `most`: the share of the image that stands as far from the end of the batch
           as this one from its start, in the pixels and in the label.
    """
    share = draws.evenly(0.0, most)
    labels = F.one_hot(target, classes).float()
    return (
        torch.lerp(pixels, pixels.flip(0), share.view(-1, 1, 1, 1)),
        torch.lerp(labels, labels.flip(0), share.unsqueeze(1)),
    )


def quarter(
    pixels: Float[Tensor, "batch channels height width"], seed: int
) -> Float[Tensor, "batch channels rows columns"]:
    """Return a square of half the height and width, at one place of all images that is drawn with `seed`."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: slices need numbers, and a GPU would have to be asked
    half = [size // 2 for size in pixels.shape[2:]]
    top, left = (
        int(torch.randint(size - part + 1, (), generator=generator))
        for size, part in zip(pixels.shape[2:], half, strict=True)
    )
    return pixels[..., top : top + half[0], left : left + half[1]]


def _reflected(place: Int64[Tensor, "batch size"], size: int) -> Int64[Tensor, "batch size"]:
    """Return the pixel that a place outside the image mirrors; the border pixel itself is not repeated."""
    turned = place.abs()
    return torch.where(turned >= size, 2 * (size - 1) - turned, turned)


def _within(size: int, centre: Tensor, length: int) -> Tensor:
    """Return which pixels of each image lie in the interval of `length` around `centre`."""
    start = centre - length // 2
    place = torch.arange(size, device=centre.device)
    return (place >= start) & (place < start + length)
