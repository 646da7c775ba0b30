"""Where patches go: at random, where the gradient or the loss is large, or at the window a certificate fears most."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import Draws, Places
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.windows import Interval, Windows
from patchguard.patch import Patch

PLACES = 0  # the purpose of these draws

Search = Literal["random", "occlusion", "gradient", "certificate"]


def random_places(draws: Draws, patch: Patch, height: int, width: int, number: int = 0) -> Places:
    """Return one uniformly drawn place for every rectangle of every image; `number` tells several tries apart."""
    share = draws.uniform((PLACES, number), patch.count, 2).double()
    room = torch.tensor([height - patch.height + 1, width - patch.width + 1], device=draws.device)
    return torch.minimum((share * room).long(), room - 1)


def weight_inside(weights: Float[Tensor, "batch height width"], patch: Patch) -> Float[Tensor, "batch top left"]:
    """Return the sum of `weights` inside the rectangle at every position."""
    table = torch.nn.functional.pad(weights.double(), (1, 0, 1, 0)).cumsum(1).cumsum(2)
    h, w = patch.height, patch.width
    return (table[:, h:, w:] - table[:, :-h, w:] - table[:, h:, :-w] + table[:, :-h, :-w]).float()


def heaviest_places(
    weights: Float[Tensor, "batch height width"], patch: Patch, locations: int, stride: int
) -> list[Places]:
    """Return places for `locations` tries, the heaviest first: all positions on a stride, ranked by what they hold."""
    return highest_places(weight_inside(weights, patch), patch, locations, stride)


def highest_places(found: Float[Tensor, "batch top left"], patch: Patch, locations: int, stride: int) -> list[Places]:
    """Return places for `locations` tries, the highest first: all positions on a stride, ranked by `found`.

    Neither the first rectangles of the tries nor the several ones of one try overlap, as far as there is room: beside
    a heavy place lie others that differ from it in nothing.
    """
    allowed = torch.zeros(found.shape[1:], dtype=torch.bool, device=found.device)
    allowed[::stride, ::stride] = True
    free = allowed.expand(len(found), -1, -1)
    tries = []
    for _ in range(min(locations, int(allowed.sum()))):
        first = _best(found, free)
        tries.append(_joined(first, found, allowed, patch))
        free = _apart(free, first, patch)
    return tries


def _joined(first: Tensor, found: Tensor, allowed: Tensor, patch: Patch) -> Places:
    """The first rectangle and the heaviest further ones that do not overlap those before."""
    chosen = [first]
    free = allowed.expand(len(found), -1, -1)
    for _ in range(patch.count - 1):
        free = _apart(free, chosen[-1], patch)
        chosen.append(_best(found, free))
    return torch.stack(chosen, 1)


def _apart(free: Tensor, place: Tensor, patch: Patch) -> Bool[Tensor, "batch top left"]:
    """What is free and does not overlap a rectangle at `place`; where nothing is, all but the place itself."""
    top = torch.arange(free.shape[1], device=free.device).view(1, -1, 1)
    left = torch.arange(free.shape[2], device=free.device).view(1, 1, -1)
    down, along = (top - place[:, 0].view(-1, 1, 1)).abs(), (left - place[:, 1].view(-1, 1, 1)).abs()
    found = free
    for height, width in ((1, 1), (patch.height, patch.width)):
        apart = free & ((down >= height) | (along >= width))
        found = torch.where(apart.flatten(1).any(1).view(-1, 1, 1), apart, found)
    return found


def _best(found: Tensor, allowed: Tensor) -> Int64[Tensor, "batch 2"]:
    flat = found.masked_fill(~allowed, -torch.inf).flatten(1).argmax(1)
    return torch.stack([flat // found.shape[2], flat % found.shape[2]], 1)


def window_places(
    boxes: Int64[Tensor, "batch *count"],
    windows: Windows,
    field: Field,
    patch: Patch,
    weights: Callable[[], Float[Tensor, "batch height width"]],
) -> Places:
    """Return, per image, positions from which a rectangle reaches all of the named boxes; of several the heaviest.

    `weights` is only called where some box is reached from several positions.
    """
    numbers = boxes.reshape(len(boxes), -1)
    numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, patch.count - numbers.shape[1])], 1)
    device = boxes.device
    top = torch.from_numpy(_reaching(field.rows, windows.rows, windows.grid[0], patch.height)).to(device)
    left = torch.from_numpy(_reaching(field.columns, windows.columns, windows.grid[1], patch.width)).to(device)
    if windows.pairs is None:
        row, column = numbers // len(windows.columns), numbers % len(windows.columns)
    else:
        row, column = torch.tensor(windows.pairs, device=device)[numbers].unbind(-1)
    only = int(top.sum(1).max()) == 1 and int(left.sum(1).max()) == 1
    found = top.new_zeros(len(boxes), top.shape[1], left.shape[1]).float()
    found = found if only else weight_inside(weights(), patch)
    places = [_best(found, top[row[:, each], :, None] & left[column[:, each], None, :]) for each in range(patch.count)]
    return torch.stack(places, 1)


@lru_cache(maxsize=64)
def _reaching(axis: Axis, intervals: tuple[Interval, ...], cells: int, length: int) -> Bool[np.ndarray, "some places"]:
    """From which positions `length` pixels touch most cells of each interval: all of them, where that is possible."""
    touched = touched_from(axis, length).astype(np.int64)  # places, cells
    wanted = np.zeros((len(intervals), cells), dtype=np.int64)
    for number, (start, stop) in enumerate(intervals):
        wanted[number, np.arange(start, stop) % cells] = 1
    shared = wanted @ touched.T
    return np.asarray(shared == shared.max(1, keepdims=True))


@lru_cache(maxsize=64)
def touched_from(axis: Axis, length: int) -> Bool[np.ndarray, "places cells"]:
    """Return which cells `length` pixels touch, from every position along one axis; kept, as every batch asks."""
    return axis.touched_cells_by_position(length)


def owned_cells(places: Places, field: Field, patch: Patch) -> Bool[Tensor, "batch rows columns"]:
    """Return which cells the rectangles at `places` touch together."""
    rows = torch.from_numpy(touched_from(field.rows, patch.height)).to(places.device)[places[..., 0]]
    columns = torch.from_numpy(touched_from(field.columns, patch.width)).to(places.device)[places[..., 1]]
    return (rows[..., :, None] & columns[..., None, :]).any(1)
