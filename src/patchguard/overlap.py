"""Exact sums of integer maps over windows, outside windows, and over the masks that overlap them.

Everything here is integer arithmetic on maps (maps, rows, columns). Boxes are summed from integral images; unions of
several boxes (`Windows.count > 1`) and very small grids are written out cell by cell.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.errors import InputError
from patchguard.windows import Interval, Windows, contains

NOTHING = -(2**62)  # the maximum over no mask
SMALL = 2**14  # below this the number of calls costs more than the work
LARGEST_WORK = 2**38  # multiply-adds of one enumeration over unions; beyond this it would not finish


def _elements(device: torch.device) -> int:
    """Size of one intermediate: on a CPU it stays in the cache, on an accelerator it fills the machine."""
    return 2**16 if device.type == "cpu" else 2**24


def sums(values: Int64[Tensor, "*maps rows columns"], windows: Windows) -> Int64[Tensor, "*maps regions"]:
    """Return, for each region w, the sum of `values` over w."""
    maps = values.reshape(-1, *values.shape[-2:])
    if windows.count > 1 or windows.regions * maps[0].numel() <= SMALL:
        return _over_cells(maps, _owned(windows, values.device)).view(*values.shape[:-2], -1)
    table = _integral(maps, windows.wrap)
    if windows.pairs is None:
        (top, bottom), (left, right) = _edges(windows, values.device)
        bands = _take(table, 1, bottom) - _take(table, 1, top)
        found = _take(bands, 2, right) - _take(bands, 2, left)
    else:
        found = _corners(table, *_boxes(windows, values.device))
    return found.reshape(*values.shape[:-2], -1)


def heaviest(
    values: Int64[Tensor, "*maps rows columns"], masks: Windows, windows: Windows, fill: int = 0
) -> Int64[Tensor, "*maps regions"]:
    """Return, for each window w, ``max over masks v of the sum over v`` once every cell of w holds `fill`.

    With ``fill = 0`` this is max_v sum(v outside w); the attack that erases a class leaves just that.
    """
    masks = _on_the_same_circle(masks, windows)
    maps = values.reshape(-1, *values.shape[-2:])
    if masks.regions * windows.regions * maps[0].numel() <= 8 * SMALL:
        left, shared = _left_over(masks, windows, values.device)
        found = (_over_cells(maps, left).view(-1, *shared.shape) + fill * shared).amax(-1)
    elif masks.count == windows.count == 1 and _sorted(masks) and masks.pairs is windows.pairs is None:
        some = max(1, _elements(maps.device) // windows.regions)
        parts = [_heaviest_product(maps[k : k + some], masks, windows, fill) for k in range(0, len(maps), some)]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
    else:
        found = maps.new_empty(maps.shape[0], windows.regions)
        for here, left, shared in overlaps(maps, masks, windows):
            found[:, here] = (left + fill * shared).amax(-1)
    return found.view(*values.shape[:-2], -1)


def overlaps(
    maps: Int64[Tensor, "maps rows columns"], masks: Windows, windows: Windows
) -> Iterator[tuple[slice, Int64[Tensor, "maps some masks"], Int64[Tensor, "some masks"]]]:
    """Yield, for some regions w at a time: which, the sum over v outside w, and how many cells v and w share.

    This enumerates all pairs: the slow path, for what has no faster one.
    """
    masks = _on_the_same_circle(masks, windows)
    check_work(masks, windows)
    some = max(1, 2**22 // (maps.shape[0] * max(masks.regions, maps[0].numel())))
    total = sums(maps, masks).unsqueeze(1)
    if masks.count == windows.count == 1:
        table, unit = (_integral(each, masks.wrap, copies=3) for each in (maps, torch.ones_like(maps[:1])))
    else:
        mine, theirs = (torch.from_numpy(each.cells).to(maps.device).double() for each in (masks, windows))
    for first in range(0, windows.regions, some):
        here = slice(first, min(first + some, windows.regions))
        if masks.count == windows.count == 1:
            pieces = _pieces(masks, windows, here, maps.device)
            inside, shared = (torch.stack([_corners(each, *p) for p in pieces]).sum(0) for each in (table, unit))
            yield here, total - inside, shared[0]
        else:  # written out cell by cell
            inside = (maps.flatten(1).unsqueeze(1).double() * theirs[here]) @ mine.mT
            yield here, total - inside.long(), (theirs[here] @ mine.mT).long()


def best_cover(per_mask: Int64[Tensor, "maps masks"], masks: Windows, windows: Windows) -> Tensor:
    """Return, for each window, the largest entry among the masks that cover it (`NOTHING` if none does)."""
    if masks == windows and masks.equal_boxes:
        return per_mask  # equal boxes cover only themselves
    if masks.count == windows.count == 1 and masks.pairs is windows.pairs is None:
        grid = per_mask.view(-1, len(masks.rows), len(masks.columns))
        grid = _best_along(grid.mT, masks.rows, windows.rows, masks.grid[0]).mT
        grid = _best_along(grid, masks.columns, windows.columns, masks.grid[1])
        return grid.flatten(1)
    ones = per_mask.new_ones(1, *masks.grid)
    areas = torch.from_numpy(windows.areas).to(per_mask.device).unsqueeze(1)
    found = per_mask.new_empty(per_mask.shape[0], windows.regions)
    for here, _, shared in overlaps(ones, masks, windows):
        covering = shared == areas[here]
        for image, entries in enumerate(per_mask):
            found[image, here] = torch.where(covering, entries, NOTHING).amax(1)
    return found


def check_work(masks: Windows, windows: Windows) -> None:
    """Raise where an enumeration of (mask, window) pairs would not finish."""
    cells = 1 if masks.count == windows.count == 1 else masks.grid[0] * masks.grid[1]
    if masks.regions * windows.regions * cells > LARGEST_WORK:
        raise InputError(
            f"{masks.regions:.3g} masks against {windows.regions:.3g} attacked regions are too many to enumerate. "
            "Use fewer patches, a coarser grid, or a defense with a position-free certificate (`spatial=False`)."
        )


def _on_the_same_circle(masks: Windows, windows: Windows) -> Windows:
    """Return the masks on an axis that wraps wherever the windows' does: a line is a circle nobody goes around."""
    wrap = (masks.wrap[0] or windows.wrap[0], masks.wrap[1] or windows.wrap[1])
    return masks if masks.wrap == wrap else replace(masks, wrap=wrap)


# -- integral images ---------------------------------------------------------------------------------------------------


def _integral(maps: Tensor, wrap: tuple[bool, bool], copies: int = 2) -> Tensor:
    """Return prefix sums with a leading zero row and column; a wrapped axis is unrolled `copies` times."""
    tiled = maps.repeat(1, *(copies if around else 1 for around in wrap)) if any(wrap) else maps
    table = maps.new_empty(tiled.shape[0], tiled.shape[1] + 1, tiled.shape[2] + 1)
    table[:, 0] = 0
    table[:, 1:, 0] = 0
    torch.cumsum(tiled, 2, out=table[:, 1:, 1:])
    if tiled.numel() < SMALL:
        torch.cumsum(table, 1, out=table)
    else:  # row by row beats one strided cumsum: each step adds whole rows
        for row in range(2, table.shape[1]):
            table[:, row] += table[:, row - 1]
    return table


def _corners(table: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Sum over the boxes [a, b) x [c, d)."""
    flat, width = table.flatten(1), table.shape[2]

    def at(row: Tensor, column: Tensor) -> Tensor:
        where = row * width + column
        return flat.index_select(1, where.reshape(-1)).view(-1, *where.shape)

    return at(b, d) - at(a, d) - at(b, c) + at(a, c)


@lru_cache(maxsize=64)
def _boxes(windows: Windows, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(windows.boxes).to(device).unbind(1))


_Place: TypeAlias = slice | Tensor


def _place(where: np.ndarray, device: torch.device) -> _Place:
    """Indices along one axis; as a slice where they are consecutive, since a view costs nothing."""
    first = int(where[0])
    if np.array_equal(where, np.arange(first, first + len(where))):
        return slice(first, first + len(where))
    return torch.from_numpy(where).to(device)


def _take(values: Tensor, dim: int, place: _Place) -> Tensor:
    if isinstance(place, slice):
        return values.narrow(dim, place.start, place.stop - place.start)
    return values.index_select(dim, place)


@lru_cache(maxsize=64)
def _edges(windows: Windows, device: torch.device) -> tuple[tuple[_Place, _Place], tuple[_Place, _Place]]:
    """Starts and stops of the row intervals and of the column intervals."""
    (top, bottom), (left, right) = np.array(windows.rows).T, np.array(windows.columns).T
    return (_place(top, device), _place(bottom, device)), (_place(left, device), _place(right, device))


def _pieces(
    masks: Windows, windows: Windows, here: slice, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Boxes that make up (v and w) for each pair: one, or up to two per axis that wraps around."""
    mine, theirs = _boxes(masks, device), tuple(each[here, None] for each in _boxes(windows, device))

    def along(axis: int) -> list[tuple[Tensor, Tensor]]:
        size = masks.grid[axis]
        start, stop, low, high = mine[2 * axis], mine[2 * axis + 1], theirs[2 * axis], theirs[2 * axis + 1]
        if not masks.wrap[axis]:
            begin = torch.maximum(start, low)
            return [(begin, torch.maximum(begin, torch.minimum(stop, high)))]
        found = []
        for shift in (0, size, 2 * size):  # the window stands in the middle of three copies of the circle
            begin = torch.maximum(start + shift, low + size)
            end = torch.minimum(stop + shift, high + size).clamp(max=3 * size)
            found.append((begin, torch.maximum(begin, end)))
        return found

    return [(a, b, c, d) for a, b in along(0) for c, d in along(1)]


def _over_cells(maps: Tensor, owned: Tensor) -> Tensor:
    # float64 is exact here: sums of evidence stay below 2^50, sums of what defenses add to it below 2^53.
    return (maps.flatten(1).double() @ owned.mT).long()


def _owned(windows: Windows, device: torch.device) -> Tensor:
    if windows.regions * windows.grid[0] * windows.grid[1] <= 2**20:
        return _small_owned(windows, device)
    return torch.from_numpy(windows.cells).to(device).double()  # too large to keep


@lru_cache(maxsize=64)
def _small_owned(windows: Windows, device: torch.device) -> Tensor:
    return torch.from_numpy(windows.cells).to(device).double()


@lru_cache(maxsize=16)
def _left_over(masks: Windows, windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Written out for small grids: the cells of v outside w, and how many v and w share, for every pair."""
    mine, theirs = (torch.from_numpy(each.cells).to(device) for each in (masks, windows))
    shared = (mine & theirs.unsqueeze(1)).sum(-1)
    return (mine & ~theirs.unsqueeze(1)).double().flatten(0, 1), shared


# -- the fast path: products of sorted intervals -----------------------------------------------------------------------
#
# For a window rows R x columns C and a mask R' x C', let X be the prefix sums, along the columns, of the rows R and R'
# share. The mask's sum outside the window is S(v) - (X[min(b, b')] - X[max(a, a')]) for C = [a, b), C' = [a', b'): a
# term of the mask alone plus a term of the window alone, in each of four cases. In sorted order the masks of one case
# are neighbours, so the maximum over a case is a range maximum. Only the row overlaps are enumerated. Maps are laid out
# (columns, rows, maps), so that a look-up along the columns copies long runs of memory.


@dataclass(frozen=True)
class _Ranges:
    """Maxima over one range of neighbours per window: a few look-ups in a table of power-of-two maxima."""

    pad: int
    level: int
    picks: tuple[_Place, ...]

    def __call__(self, keys: Tensor) -> Tensor:
        padding = keys.new_full((self.pad, *keys.shape[1:]), NOTHING)
        keys = torch.cat([padding, keys, padding])
        for step in range(self.level):
            keys = torch.maximum(keys[: -(2**step)], keys[2**step :])
        found = _take(keys, 0, self.picks[0])
        for pick in self.picks[1:]:
            found = torch.maximum(found, _take(keys, 0, pick))
        return found


@dataclass(frozen=True)
class _Plan:
    """Index tables for one pair of products of intervals; see the comment above."""

    shared: tuple[tuple[Tensor, Tensor], ...]  # pieces of the shared rows: start, stop, each (steps, window rows)
    mask_row: Tensor  # steps, window rows
    column: _Place  # unrolled mask columns -> mask column
    mask: tuple[_Place, _Place]  # a', b' of the unrolled mask columns, as places in X
    window: tuple[_Place, _Place, _Place]  # a, b, a + circumference
    cases: dict[str, _Ranges]
    apart_rows: _Ranges | None
    apart_columns: _Ranges | None


def _heaviest_product(maps: Tensor, masks: Windows, windows: Windows, fill: int) -> Tensor:
    plan = _plan(masks, windows, maps.device)
    steps, height = plan.mask_row.shape
    count, width = maps.shape[0], len(windows.columns)
    total = sums(maps, masks).view(count, len(masks.rows), len(masks.columns)).permute(2, 1, 0).contiguous()
    own = _take(total, 0, plan.column)  # unrolled mask columns, mask rows, maps
    found = maps.new_full((width, height, count), NOTHING)
    if plan.apart_rows is not None:
        found = torch.maximum(found, plan.apart_rows(total.amax(0)))
    if plan.apart_columns is not None:
        found = torch.maximum(found, plan.apart_columns(own.amax(1)).unsqueeze(1))
    table = _integral(maps - fill if fill else maps, masks.wrap, copies=3).permute(2, 1, 0).contiguous()
    some = max(1, _elements(maps.device) // (count * height * max(own.shape[0], table.shape[0])))
    for first in range(0, steps, some):
        here = slice(first, first + some)
        prefix = table.new_zeros(())
        for start, stop in plan.shared:  # X: places, steps * window rows, maps
            prefix = prefix + table.index_select(1, stop[here].reshape(-1))
            prefix = prefix - table.index_select(1, start[here].reshape(-1))
        best = _best_of_cases(plan, prefix, own.index_select(1, plan.mask_row[here].reshape(-1)), width)
        found = torch.maximum(found, best.view(width, -1, height, count).amax(1))
    return found.permute(2, 1, 0).reshape(count, -1)


def _best_of_cases(plan: _Plan, prefix: Tensor, own: Tensor, width: int) -> Tensor:
    """Max over the masks that share columns with the window, of S(v) - (X[min(b, b')] - X[max(a, a')])."""
    start, stop = (_take(prefix, 0, place) for place in plan.mask)  # X[a'], X[b']
    a, b, end = (_take(prefix, 0, place) for place in plan.window)
    found = own.new_full((width, *own.shape[1:]), NOTHING)
    for case, ranges in plan.cases.items():
        if case == "left":  # a' < a < b' <= b
            best = ranges(own - stop) + a
        elif case == "right":  # a <= a' < b < b'
            best = ranges(own + start) - b
        elif case == "holds":  # a' < a, b < b'
            best = ranges(own) + (a - b)
        elif case == "within":  # a <= a', b' <= b
            best = ranges(own - stop + start)
        else:  # "around": the two cover the circle, so the mask holds everything outside the window
            best = ranges(own - stop + start) + (end - b)
        found = torch.maximum(found, best)
    return found


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

    def place(where: np.ndarray) -> _Place:
        return _place(where.reshape(-1) + origin, device)

    steps, shared = _shared_rows(masks, windows)
    return _Plan(
        shared=tuple((torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in shared),
        mask_row=torch.from_numpy(steps).to(device),
        column=_place(column, device),
        mask=(place(start), place(stop)),
        window=(place(a), place(b), place(a + cells if around else b)),
        cases={name: _ranges(mark, device) for name, mark in cases.items() if mark.any()},
        apart_rows=_apart_rows(masks, windows, device),
        apart_columns=_ranges(apart, device) if apart.any() else None,
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


def _apart_rows(masks: Windows, windows: Windows, device: torch.device) -> _Ranges | None:
    size = masks.grid[0]
    mine, theirs = np.array(masks.rows), np.array(windows.rows)
    lead = (mine[None, :, 0] - theirs[:, :1]) % size  # from the window's start to the mask's start
    apart = (lead >= (theirs[:, 1:] - theirs[:, :1])) & (lead + (mine[:, 1] - mine[:, 0])[None] <= size)
    return _ranges(apart, device) if apart.any() else None


def _ranges(mark: np.ndarray, device: torch.device) -> _Ranges:
    """Plan maxima over the marked columns of each row; a row's marks may be up to two runs of neighbours."""
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
    return _Ranges(pad=pad, level=level, picks=tuple(_place(each, device) for each in places))


@lru_cache(maxsize=256)
def _sorted(windows: Windows) -> bool:
    """Whether starts and stops both increase along each axis: true of sliding and of maximal windows."""

    def increasing(intervals: tuple[Interval, ...]) -> bool:
        return all(a < c and b < d for (a, b), (c, d) in pairwise(intervals))

    return windows.pairs is None and increasing(windows.rows) and increasing(windows.columns)


@lru_cache(maxsize=64)
def _holders(outer: tuple[Interval, ...], inner: tuple[Interval, ...], size: int) -> tuple[Tensor, Tensor]:
    held = contains(np.array(outer)[None], np.array(inner)[:, None], size)
    most = max(1, int(held.sum(1).max()))
    order = np.argsort(~held, axis=1, kind="stable")[:, :most]
    return torch.from_numpy(order.T.copy()), torch.from_numpy(np.take_along_axis(held, order, 1).T.copy())


def _best_along(grid: Tensor, outer: tuple[Interval, ...], inner: tuple[Interval, ...], size: int) -> Tensor:
    order, held = (each.to(grid.device) for each in _holders(outer, inner, size))
    found = torch.full_like(grid[..., :1], NOTHING).expand(*grid.shape[:-1], len(inner))
    for pick, valid in zip(order, held, strict=True):
        found = torch.maximum(found, torch.where(valid, grid.index_select(-1, pick), NOTHING))
    return found
