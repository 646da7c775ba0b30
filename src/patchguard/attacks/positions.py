"""Where patches go: at random, where the gradient or the loss is largest, or where a certificate is weakest."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import Draws, Positions
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.windows import Interval, Windows
from patchguard.patch import Patch

POSITIONS = 0  # the purpose of these draws

Search = Literal["random", "occlusion", "gradient", "certificate"]


def random_positions(draws: Draws, patch: Patch, height: int, width: int, number: int = 0) -> Positions:
    """Return one uniformly drawn position for every rectangle of every image; `number` tells attempts apart."""
    fraction = draws.uniform((POSITIONS, number), patch.count, 2).double()
    room = torch.tensor([height - patch.height + 1, width - patch.width + 1], device=draws.device)
    return torch.minimum((fraction * room).long(), room - 1)


def sum_inside(saliency: Float[Tensor, "batch height width"], patch: Patch) -> Float[Tensor, "batch top left"]:
    """Return the sum of `saliency` inside the rectangle at every position."""
    table = torch.nn.functional.pad(saliency.double(), (1, 0, 1, 0)).cumsum(1).cumsum(2)
    h, w = patch.height, patch.width
    return (table[:, h:, w:] - table[:, :-h, w:] - table[:, h:, :-w] + table[:, :-h, :-w]).float()


def salient_positions(
    saliency: Float[Tensor, "batch height width"], patch: Patch, locations: int, stride: int
) -> list[Positions]:
    """Return positions for `locations` attempts, the most salient first, among those on a stride."""
    return top_positions(sum_inside(saliency, patch), patch, locations, stride)


def top_positions(
    scores: Float[Tensor, "batch top left"], patch: Patch, locations: int, stride: int
) -> list[Positions]:
    """Return positions for `locations` attempts, the highest score first, among those on a stride.

    As far as there is room, the first rectangles of the attempts do not overlap, nor do the rectangles of one attempt:
    the neighbors of a good position are as good, and nothing new.
    """
    allowed = torch.zeros(scores.shape[1:], dtype=torch.bool, device=scores.device)
    allowed[::stride, ::stride] = True
    free = allowed.expand(len(scores), -1, -1)
    attempts = []
    for _ in range(min(locations, int(allowed.sum()))):
        first = _argmax(scores, free)
        attempts.append(_add_rectangles(first, scores, allowed, patch))
        free = _exclude_overlaps(free, first, patch)
    return attempts


def _add_rectangles(first: Tensor, scores: Tensor, allowed: Tensor, patch: Patch) -> Positions:
    """Return the first rectangle and the best further ones that do not overlap those before."""
    corners = [first]
    free = allowed.expand(len(scores), -1, -1)
    for _ in range(patch.count - 1):
        free = _exclude_overlaps(free, corners[-1], patch)
        corners.append(_argmax(scores, free))
    return torch.stack(corners, 1)


def _exclude_overlaps(free: Tensor, corner: Tensor, patch: Patch) -> Bool[Tensor, "batch top left"]:
    """Return the free positions that do not overlap a rectangle at `corner`; if none are left, all but the corner."""
    top = torch.arange(free.shape[1], device=free.device).view(1, -1, 1)
    left = torch.arange(free.shape[2], device=free.device).view(1, 1, -1)
    down, along = (top - corner[:, 0].view(-1, 1, 1)).abs(), (left - corner[:, 1].view(-1, 1, 1)).abs()
    remaining = free
    for height, width in ((1, 1), (patch.height, patch.width)):
        apart = free & ((down >= height) | (along >= width))
        remaining = torch.where(apart.flatten(1).any(1).view(-1, 1, 1), apart, remaining)
    return remaining


def _argmax(scores: Tensor, allowed: Tensor) -> Int64[Tensor, "batch 2"]:
    flat = scores.masked_fill(~allowed, -torch.inf).flatten(1).argmax(1)
    return torch.stack([flat // scores.shape[2], flat % scores.shape[2]], 1)


def positions_reaching(
    boxes: Int64[Tensor, "batch *count"],
    windows: Windows,
    field: Field,
    patch: Patch,
    saliency: Callable[[], Float[Tensor, "batch height width"]],
) -> Positions:
    """Return, per image, positions from which a rectangle reaches all of the given boxes; of several the most salient.

    `saliency` is only called where some box is reached from several positions.
    """
    numbers = boxes.reshape(len(boxes), -1)
    numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, patch.count - numbers.shape[1])], 1)
    device = boxes.device
    top = torch.from_numpy(_starts_reaching(field.rows, windows.rows, windows.grid[0], patch.height)).to(device)
    left = torch.from_numpy(_starts_reaching(field.columns, windows.columns, windows.grid[1], patch.width)).to(device)
    if windows.pairs is None:
        row, column = numbers // len(windows.columns), numbers % len(windows.columns)
    else:
        row, column = torch.tensor(windows.pairs, device=device)[numbers].unbind(-1)
    unique = int(top.sum(1).max()) == 1 and int(left.sum(1).max()) == 1
    scores = top.new_zeros(len(boxes), top.shape[1], left.shape[1]).float()
    scores = scores if unique else sum_inside(saliency(), patch)
    corners = [
        _argmax(scores, top[row[:, each], :, None] & left[column[:, each], None, :]) for each in range(patch.count)
    ]
    return torch.stack(corners, 1)


@lru_cache(maxsize=64)
def _starts_reaching(axis: Axis, intervals: tuple[Interval, ...], cells: int, length: int) -> Bool[np.ndarray, "_ _"]:
    """Return from which positions `length` pixels touch the most cells of each interval: all, where possible."""
    touched = touched_cells_by_position(axis, length).astype(np.int64)  # positions, cells
    wanted = np.zeros((len(intervals), cells), dtype=np.int64)
    for number, (start, stop) in enumerate(intervals):
        wanted[number, np.arange(start, stop) % cells] = 1
    shared = wanted @ touched.T
    return np.asarray(shared == shared.max(1, keepdims=True))


@lru_cache(maxsize=64)
def touched_cells_by_position(axis: Axis, length: int) -> Bool[np.ndarray, "positions cells"]:
    """Return which cells `length` pixels touch from every position of an axis; cached, since every batch asks."""
    return axis.touched_cells_by_position(length)


def owned_cells(positions: Positions, field: Field, patch: Patch) -> Bool[Tensor, "batch rows columns"]:
    """Return which cells the rectangles at `positions` touch together."""
    rows, columns = (
        torch.from_numpy(touched_cells_by_position(axis, length)).to(positions.device)[positions[..., each]]
        for each, (axis, length) in enumerate(((field.rows, patch.height), (field.columns, patch.width)))
    )
    return (rows[..., :, None] & columns[..., None, :]).any(1)
