"""The fast path of `window_sums.heaviest`: products of sorted intervals, where masks that overlap alike are neighbors.

For a window rows R x columns C and a mask R' x C', let X be the prefix sums, along the columns, of the rows R and R'
share. The mask's sum outside the window is S(v) - (X[min(b, b')] - X[max(a, a')]) for C = [a, b), C' = [a', b'): a
term of the mask alone plus a term of the window alone, in each of four cases. In sorted order the masks of one case
are neighbors, so the maximum over a case is a range maximum. Only the row overlaps are enumerated. Maps are laid out
(columns, rows, maps), so that a look-up along the columns copies long runs of memory.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from patchguard.geometry.windows import Interval, Windows

SMALL = 2**14  # below this many entries the number of calls costs more than the work
Place: TypeAlias = slice | Tensor


def nothing(dtype: torch.dtype) -> int:
    """Return the maximum over no mask: below all sums, and far enough from the end to be added to."""
    return -(2**62) if dtype == torch.int64 else -(2**30)


@dataclass(frozen=True)
class Ranges:
    """Maxima over one range of neighbors per window: a few look-ups in a table of power-of-two maxima."""

    pad: int
    level: int
    picks: tuple[Place, ...]

    def __call__(self, keys: Tensor) -> Tensor:
        """Return the maxima of `keys` along its first axis."""
        padding = keys.new_full((self.pad, *keys.shape[1:]), nothing(keys.dtype))
        keys = torch.cat([padding, keys, padding])
        for step in range(self.level):
            keys = torch.maximum(keys[: -(2**step)], keys[2**step :])
        largest = take(keys, 0, self.picks[0])
        for pick in self.picks[1:]:
            largest = torch.maximum(largest, take(keys, 0, pick))
        return largest


@dataclass(frozen=True)
class _Plan:
    """Index tables for one pair of products of intervals; see the comment above."""

    shared: tuple[tuple[Tensor, Tensor], ...]  # pieces of the shared rows: start, stop, each (steps, window rows)
    mask_row: Tensor  # steps, window rows
    column: Place  # unrolled mask columns -> mask column
    mask: tuple[Place, Place]  # a', b' of the unrolled mask columns, as places in X
    window: tuple[Place, Place, Place]  # a, b, a + circumference
    cases: dict[str, Ranges]
    apart_rows: Ranges | None
    apart_columns: Ranges | None


def heaviest_of_product(
    maps: Tensor, sums: Tensor, masks: Windows, windows: Windows, fill: int, elements: int
) -> Tensor:
    """Return `overlap.heaviest` of maps with the given sums over the masks; intermediates have about `elements`."""
    plan = _plan(masks, windows, maps.device)
    steps, height = plan.mask_row.shape
    count, width = maps.shape[0], len(windows.columns)
    total = sums.view(count, len(masks.rows), len(masks.columns)).permute(2, 1, 0).contiguous()
    own = take(total, 0, plan.column)  # unrolled mask columns, mask rows, maps
    largest = maps.new_full((width, height, count), nothing(maps.dtype))
    if plan.apart_rows is not None:
        largest = torch.maximum(largest, plan.apart_rows(total.amax(0)))
    if plan.apart_columns is not None:
        largest = torch.maximum(largest, plan.apart_columns(own.amax(1)).unsqueeze(1))
    table = integral_image(maps - fill if fill else maps, masks.wrap, copies=3).permute(2, 1, 0).contiguous()
    some = max(1, elements // (count * height * max(own.shape[0], table.shape[0])))
    for first in range(0, steps, some):
        here = slice(first, first + some)
        prefix = table.new_zeros(())
        for start, stop in plan.shared:  # X: places, steps * window rows, maps
            prefix = prefix + table.index_select(1, stop[here].reshape(-1))
            prefix = prefix - table.index_select(1, start[here].reshape(-1))
        best = _best_of_cases(plan, prefix, own.index_select(1, plan.mask_row[here].reshape(-1)), width)
        largest = torch.maximum(largest, best.view(width, -1, height, count).amax(1))
    return largest.permute(2, 1, 0).reshape(count, -1)


def _best_of_cases(plan: _Plan, prefix: Tensor, own: Tensor, width: int) -> Tensor:
    """Max over the masks that share columns with the window, of S(v) - (X[min(b, b')] - X[max(a, a')])."""
    start, stop = (take(prefix, 0, place) for place in plan.mask)  # X[a'], X[b']
    a, b, end = (take(prefix, 0, place) for place in plan.window)
    largest = own.new_full((width, *own.shape[1:]), nothing(own.dtype))
    for case, among in plan.cases.items():
        if case == "left":  # a' < a < b' <= b
            best = among(own - stop) + a
        elif case == "right":  # a <= a' < b < b'
            best = among(own + start) - b
        elif case == "holds":  # a' < a, b < b'
            best = among(own) + (a - b)
        elif case == "within":  # a <= a', b' <= b
            best = among(own - stop + start)
        else:  # "around": the two cover the circle, so the mask holds everything outside the window
            best = among(own - stop + start) + (end - b)
        largest = torch.maximum(largest, best)
    return largest


@lru_cache(maxsize=64)
def _plan(masks: Windows, windows: Windows, device: torch.device) -> _Plan:
    cells, around = masks.grid[1], masks.wrap[1]
    shifts = (-cells, 0, cells) if around else (0,)
    unrolled = [(j, a + shift, b + shift) for shift in shifts for j, (a, b) in enumerate(masks.columns)]
    unrolled = [each for each in unrolled if not around or (each[1] >= -cells and each[2] <= 2 * cells)]
    column, start, stop = (np.array(each) for each in zip(*unrolled, strict=True))
    a, b = np.array(windows.columns).T[:, :, None]
    meets = (start < b) & (stop > a)
    both = meets & (start < b - cells) if around else np.zeros_like(meets)  # meets the window at both ends
    ends = meets & (stop > a + cells) if around else both  # the same masks, seen from the other end
    plain = meets & ~both & ~ends
    cases = {
        "left": plain & (start < a) & (stop <= b),
        "right": plain & (start >= a) & (stop > b),
        "holds": plain & (start < a) & (stop > b),
        "within": plain & (start >= a) & (stop <= b),
        "around": both,
    }
    # Apart: on a circle each mask once, by the copy that starts at or after the window's end.
    apart = (start >= b) & (stop <= a + cells) if around else ~meets
    origin = cells if around else 0

    def place(where: np.ndarray) -> Place:
        return place_of(where.reshape(-1) + origin, device)

    steps, shared = _shared_rows(masks, windows)
    return _Plan(
        shared=tuple((torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in shared),
        mask_row=torch.from_numpy(steps).to(device),
        column=place_of(column, device),
        mask=(place(start), place(stop)),
        window=(place(a), place(b), place(a + cells if around else b)),
        cases={name: ranges(mark, device) for name, mark in cases.items() if mark.any()},
        apart_rows=_apart_rows(masks, windows, device),
        apart_columns=ranges(apart, device) if apart.any() else None,
    )


def _shared_rows(masks: Windows, windows: Windows) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """For each window row interval, the mask row intervals that meet it, padded by repetition, and what they share."""
    size, around = masks.grid[0], masks.wrap[0]
    mine, theirs = np.array(masks.rows), np.array(windows.rows)
    pieces = []
    for shift in (0, size, 2 * size) if around else (0,):
        origin = size if around else 0
        begin = np.maximum(mine[None, :, 0] + shift, theirs[:, :1] + origin)
        end = np.minimum(mine[None, :, 1] + shift, theirs[:, 1:] + origin).clip(max=3 * size if around else size)
        pieces.append((begin, np.maximum(begin, end)))
    meets = np.any([end > begin for begin, end in pieces], axis=0)
    steps = max(1, int(meets.sum(1).max()))
    # Any mask may stand in for padding: the formula holds for masks that share no row, too.
    order = np.argsort(~meets, axis=1, kind="stable")[:, :steps].T  # steps, window rows
    rows = np.arange(len(theirs))[None]
    used = [(begin[rows, order], end[rows, order]) for begin, end in pieces]
    return order, [piece for piece in used if (piece[1] > piece[0]).any()] or used[:1]


def _apart_rows(masks: Windows, windows: Windows, device: torch.device) -> Ranges | None:
    size = masks.grid[0]
    mine, theirs = np.array(masks.rows), np.array(windows.rows)
    lead = (mine[None, :, 0] - theirs[:, :1]) % size  # from the window's start to the mask's start
    apart = (lead >= (theirs[:, 1:] - theirs[:, :1])) & (lead + (mine[:, 1] - mine[:, 0])[None] <= size)
    return ranges(apart, device) if apart.any() else None


def ranges(mark: np.ndarray, device: torch.device) -> Ranges:
    """Plan maxima over the marked columns of each row; a row's marks may be up to two runs of neighbors."""
    length = mark.shape[1]
    runs: list[list[tuple[int, int]]] = []
    for row in mark:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        runs.append([(int(s), int(e)) for s, e in edges.reshape(-1, 2)])
    pad = max((e - s for row in runs for s, e in row), default=1)
    # A run that touches an end of the list may reach into the padding: equal lengths need fewer look-ups.
    runs = [[(e - pad, e) if s == 0 else (s, s + pad) if e == length else (s, e) for s, e in row] for row in runs]
    level = int(np.log2(min(e - s for row in runs for s, e in row)))
    block = 2**level
    picks = [[min(s + k, e - block) for s, e in row for k in range(0, e - s, block)] for row in runs]
    most = max(len(row) for row in picks)
    filled = [row + [row[-1] if row else -pad] * (most - len(row)) for row in picks]
    places: np.ndarray = np.unique(np.array(filled).T + pad, axis=0)
    return Ranges(pad=pad, level=level, picks=tuple(place_of(each, device) for each in places))


@lru_cache(maxsize=256)
def is_sorted(windows: Windows) -> bool:
    """Whether starts and stops both increase along each axis: true of sliding and of maximal windows."""

    def increasing(intervals: tuple[Interval, ...]) -> bool:
        return all(a < c and b < d for (a, b), (c, d) in pairwise(intervals))

    return windows.pairs is None and increasing(windows.rows) and increasing(windows.columns)


# -- integral images, and look-ups along one axis that cost nothing where they are consecutive -------------------------


def integral_image(maps: Tensor, wrap: tuple[bool, bool], copies: int = 2) -> Tensor:
    """Return prefix sums with a leading zero row and column; a wrapped axis is unrolled `copies` times."""
    tiled = maps.repeat(1, *(copies if around else 1 for around in wrap)) if any(wrap) else maps
    table = maps.new_empty(tiled.shape[0], tiled.shape[1] + 1, tiled.shape[2] + 1)
    table[:, 0] = 0
    table[:, 1:, 0] = 0
    table[:, 1:, 1:] = tiled.cumsum(2, dtype=maps.dtype)
    if tiled.numel() < SMALL:
        torch.cumsum(table, 1, dtype=maps.dtype, out=table)
    else:  # row by row beats one strided cumsum: each step adds whole rows
        for row in range(2, table.shape[1]):
            table[:, row] += table[:, row - 1]
    return table


def place_of(where: np.ndarray, device: torch.device) -> Place:
    """Indices along one axis; as a slice where they are consecutive, since a view costs nothing."""
    first = int(where[0])
    if np.array_equal(where, np.arange(first, first + len(where))):
        return slice(first, first + len(where))
    return torch.from_numpy(where).to(device)


def take(values: Tensor, dim: int, place: Place) -> Tensor:
    """Return the entries at `place` along one axis."""
    if isinstance(place, slice):
        return values.narrow(dim, place.start, place.stop - place.start)
    return values.index_select(dim, place)
