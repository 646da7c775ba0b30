"""`audit`: rewrite one patch at a time and check that no cell changes outside its field."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.patch import Patch
from patchguard.runtime import device_and_dtype, eval_mode

# An irregular axis has no stride to take residues of: at most this many positions are tried, chosen at random.
_MOST_STARTS = 64
_MOST_LEAKS = 10


@final
@dataclass(frozen=True)
class Leak:
    """Cell (u, v) changed by `change` when `box` = (top, left, height, width), outside its field, was rewritten."""

    cell: tuple[int, int]
    box: tuple[int, int, int, int]
    change: float


@final
@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    `trials` boxes were rewritten, of `possible` ones. `moved` counts the cells that changed inside the field; at 0 the
    audit shows nothing. `drift` is the largest change outside; `leaks` are the worst changes above `tolerance`, largest
    first.
    """

    grid: tuple[int, int]
    size: tuple[int, int]
    stride: tuple[int | None, int | None]
    trials: int
    possible: int
    moved: int
    drift: float
    tolerance: float
    leaks: tuple[Leak, ...]

    @property
    def passed(self) -> bool:
        """Whether cells changed, and none outside its field by more than the tolerance."""
        return not self.leaks and self.moved > 0


@torch.no_grad()
def audit(
    module: Callable[[Tensor], Tensor],
    field: Field,
    *,
    image: Float[Tensor, "3 height width"] | None = None,
    patches: Sequence[Patch] | None = None,
    tolerance: float = 0.0,
    batch: int = 16,
    seed: int = 0,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Rewrite one box of pixels at a time and compare every cell outside its reach with the clean image's.

    `module` maps images (B, 3, H, W) to local logits (B, K, U, V): a network, or a whole pipeline from source
    pixels. It runs in evaluation mode on the device and in the precision of `image`, or else of its own first
    tensor. Boxes: for every patch (by default 1 x 1 and a quarter of the image) and per axis, both borders
    and one position of every residue modulo the stride. Contents: 0, 1 and noise on a noise image (or
    `image`), 1 on black, 0 on white. `most` is about how many boxes are rewritten in all; the contents take turns at
    leaving some out. `progress` is told how many are done, and of how many.

    Each changed image is compared with the untouched one at the same place of a batch of the same size, so a
    kernel that works on one image after the other, in a fixed order, gives equal bits outside the field: the
    default tolerance is 0. Convolutions by Winograd tiles or Fourier transforms mix neighbors and cancel
    them again up to rounding; for these, `drift` says what a certificate must tolerate, and `tolerance`
    accepts it here.
    """
    height, width = field.source
    if image is not None and image.shape[1:] != (height, width):
        raise InputError(f"`image` must have the field's {height} x {width} pixels; got {tuple(image.shape)}.")
    if not tolerance >= 0 or batch < 1:
        raise InputError(f"`tolerance` must be at least 0 and `batch` at least 1; got {tolerance} and {batch}.")
    if most is not None and most < 1:
        raise InputError(f"`most` must be a number of boxes of at least 1, or None for all; got {most}.")
    device, dtype = device_and_dtype(module) if image is None else (image.device, image.dtype)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(3, height, width, generator=generator)
    natural = noise if image is None else image.cpu().float()
    scenes = [
        (natural, "0"),
        (natural, "1"),
        (natural, "noise"),
        (torch.zeros_like(noise), "1"),
        (torch.ones_like(noise), "0"),
    ]
    if patches is None:
        patches = (Patch(1), Patch(max(height // 4, 1), max(width // 4, 1)))

    every = [_boxes(field, patches, generator) for _ in scenes]
    chosen = [_choose(boxes, most, number, len(scenes)) for number, boxes in enumerate(every)]
    possible, total = (sum(map(len, each)) for each in (every, chosen))
    trials = moved = 0
    drift = 0.0
    leaks: list[Leak] = []
    with eval_mode(module):
        for (background, content), scene in zip(scenes, chosen, strict=True):
            clean = background.to(device, dtype).expand(min(batch, len(scene)), -1, -1, -1).contiguous()
            expected = _local_logits(module, clean, field)
            for boxes in _batches(scene, batch):
                rewritten = torch.stack([_rewrite(background, box, content, generator) for box in boxes])
                changed = clean.clone()
                changed[: len(boxes)] = rewritten.to(device, dtype)
                change = _cell_changes(_local_logits(module, changed, field), expected)[: len(boxes)].cpu().numpy()
                inside = np.stack([field.touched_cells(box) for box in boxes])
                moved += int(np.count_nonzero(change[inside]))
                change[inside] = 0
                drift = max(drift, float(change.max()))
                for trial, row, column in np.argwhere(change > tolerance).tolist():
                    leaks.append(Leak((row, column), boxes[trial], float(change[trial, row, column])))
                leaks = sorted(leaks, key=lambda leak: -leak.change)[:_MOST_LEAKS]
                trials += len(boxes)
                progress(trials, total)
    return Audit(field.grid, field.size, field.stride, trials, possible, moved, drift, tolerance, tuple(leaks))


def _choose(
    boxes: list[tuple[int, int, int, int]], most: int | None, number: int, scenes: int
) -> list[tuple[int, int, int, int]]:
    """Return the part of `most` boxes that scene `number` rewrites, evenly spaced; each scene begins elsewhere."""
    count = len(boxes) if most is None else min(len(boxes), -(-most // scenes))
    first = number * len(boxes) // (count * scenes)
    return [boxes[(first + index * len(boxes) // count) % len(boxes)] for index in range(count)]


def _local_logits(module: Callable[[Tensor], Tensor], images: Float[Tensor, "b 3 h w"], field: Field) -> Tensor:
    local_logits = module(images)
    if local_logits.ndim != 4 or tuple(local_logits.shape[2:]) != field.grid or len(local_logits) != len(images):
        raise InputError(
            f"`module` must give local logits (B, K, {field.grid[0]}, {field.grid[1]}), one per cell of its "
            f"field; got {tuple(local_logits.shape)} for {len(images)} images."
        )
    return local_logits


def _cell_changes(
    changed: Float[Tensor, "b classes rows columns"], expected: Float[Tensor, "b classes rows columns"]
) -> Float[Tensor, "b rows columns"]:
    """Return the largest change of each cell over its classes; into or out of NaN is infinite."""
    same = (changed == expected) | (changed.isnan() & expected.isnan())
    distance = (changed.double() - expected.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(same, 0.0, distance).amax(dim=1)


def _rewrite(
    background: Float[Tensor, "3 h w"],
    box: tuple[int, int, int, int],
    content: str,
    generator: torch.Generator,
) -> Float[Tensor, "3 h w"]:
    top, left, height, width = box
    filling = torch.rand(3, height, width, generator=generator) if content == "noise" else float(content)
    result = background.clone()
    result[:, top : top + height, left : left + width] = filling
    return result


def _boxes(field: Field, patches: Sequence[Patch], generator: torch.Generator) -> list[tuple[int, int, int, int]]:
    """Pair the starts along both axes at random, so that each start of either axis occurs at least once."""
    boxes: list[tuple[int, int, int, int]] = []
    for patch in patches:
        patch.check_fits(*field.source)
        rows = _starts(field.rows, patch.height, generator)
        columns = _starts(field.columns, patch.width, generator)
        count = max(len(rows), len(columns))
        order = torch.randperm(count, generator=generator).tolist()
        for index, other in enumerate(order):
            boxes.append((rows[index % len(rows)], columns[other % len(columns)], patch.height, patch.width))
    return boxes


def _starts(axis: Axis, length: int, generator: torch.Generator) -> list[int]:
    """Return both borders and one start of each residue modulo the stride, for a patch of `length` pixels."""
    last = axis.size - length
    if min(axis.lengths) == axis.size:  # every cell reads the whole axis: no start is outside a field
        return sorted({0, last})
    stride = axis.stride or axis.size
    residues = torch.randperm(min(stride, last + 1), generator=generator).tolist()
    if not axis.stride:
        residues = residues[:_MOST_STARTS]
    starts = {0, last}
    for residue in residues:
        choices = range(residue, last + 1, stride)
        starts.add(choices[int(torch.randint(len(choices), (), generator=generator))])
    return sorted(starts)


def _batches(boxes: list[tuple[int, int, int, int]], size: int) -> Iterator[list[tuple[int, int, int, int]]]:
    for start in range(0, len(boxes), size):
        yield boxes[start : start + size]
