"""Exact sums of integer maps over windows, outside windows, and over the masks that overlap them.

Everything here is integer arithmetic on maps (maps, rows, columns), of 64 bits, or of 32 where the caller knows that
sums stay far below their end. Boxes are summed from integral images; unions of several boxes (`Windows.count > 1`) and
very small grids are written out cell by cell.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from patchguard.defenses.window_products import (
    SMALL,
    Place,
    Ranges,
    heaviest_of_product,
    integral_image,
    is_sorted,
    nothing,
    place_of,
    ranges,
    take,
)
from patchguard.errors import InputError
from patchguard.geometry.windows import Interval, Windows, contains

LARGEST_WORK = 2**38  # multiply-adds of one enumeration over unions; beyond this it would not finish


def _elements(device: torch.device) -> int:
    """Size of one intermediate: on a CPU it stays in the cache, on an accelerator it fills the machine."""
    return 2**16 if device.type == "cpu" else 2**24


def _is_accelerator(device: torch.device) -> bool:
    """Whether matrix products in double precision beat scans by far."""
    return device.type != "cpu"


def sums(
    values: Int[Tensor, "*maps rows columns"], windows: Windows, table: Tensor | None = None
) -> Int[Tensor, "*maps regions"]:
    """Return, for each region w, the sum of `values` over w; `table` is their `integral_image`, if it is at hand."""
    maps = values.reshape(-1, *values.shape[-2:])
    if windows.count > 1 or windows.regions * maps[0].numel() <= SMALL:
        return _over_cells(maps, _owned_cells(windows, values.device)).view(*values.shape[:-2], -1)
    if windows.pairs is None and _is_accelerator(values.device):
        rows, columns = _indicators(windows, values.device)
        return (rows @ (maps.double() @ columns)).to(maps.dtype).reshape(*values.shape[:-2], -1)
    if table is None:
        table = integral_image(maps, windows.wrap)
    if windows.pairs is None:
        (top, bottom), (left, right) = _edges(windows, values.device)
        bands = take(table, 1, bottom) - take(table, 1, top)
        totals = take(bands, 2, right) - take(bands, 2, left)
    else:
        totals = _corners(table, *_boxes(windows, values.device))
    return totals.reshape(*values.shape[:-2], -1)


def heaviest(
    values: Int[Tensor, "*maps rows columns"], masks: Windows, windows: Windows, fill: int = 0
) -> Int[Tensor, "*maps regions"]:
    """Return, for each window w, ``max over masks v of the sum over v`` once every cell of w holds `fill`.

    With ``fill = 0`` this is max_v sum(v outside w); the attack that erases a class leaves just that.
    """
    masks = _on_the_same_circle(masks, windows)
    maps = values.reshape(-1, *values.shape[-2:])
    if masks.regions * windows.regions * maps[0].numel() <= 8 * SMALL:
        left, shared = _left_over(masks, windows, values.device)
        largest = (_over_cells(maps, left).view(-1, *shared.shape) + fill * shared).amax(-1)
    elif masks.count == windows.count == 1 and is_sorted(masks) and masks.pairs is windows.pairs is None:
        some = max(1, _elements(maps.device) // windows.regions)
        total = sums(maps, masks)
        parts = [
            heaviest_of_product(maps[k : k + some], total[k : k + some], masks, windows, fill, _elements(maps.device))
            for k in range(0, len(maps), some)
        ]
        largest = torch.cat(parts) if len(parts) > 1 else parts[0]
    else:
        largest = maps.new_empty(maps.shape[0], windows.regions)
        for here, left, shared in overlaps(maps, masks, windows):
            largest[:, here] = (left + fill * shared).amax(-1)
    return largest.view(*values.shape[:-2], -1)


def heaviest_union(values: Int[Tensor, "maps rows columns"], windows: Windows) -> Int[Tensor, " maps"]:
    """Return ``max over regions w of the sum over w``, for unions of several boxes: `sums(values, windows).amax(1)`.

    Their sums are many, and compared as they come, in float64, where they are exact.
    """
    return (values.flatten(1).double() @ _owned_cells(windows, values.device).mT).amax(1).to(values.dtype)


def overlaps(
    maps: Int[Tensor, "maps rows columns"], masks: Windows, windows: Windows
) -> Iterator[tuple[slice, Int[Tensor, "maps some masks"], Int[Tensor, "some masks"]]]:
    """Yield, for some regions w at a time: which, the sum over v outside w, and how many cells v and w share.

    This enumerates all pairs: the slow path, for what has no faster one.
    """
    masks = _on_the_same_circle(masks, windows)
    check_work(masks, windows)
    some = max(1, 2**22 // (maps.shape[0] * max(masks.regions, maps[0].numel())))
    total = sums(maps, masks).unsqueeze(1)
    if masks.count == windows.count == 1:
        table, unit = (integral_image(each, masks.wrap, copies=3) for each in (maps, torch.ones_like(maps[:1])))
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


def best_cover(per_mask: Int[Tensor, "maps masks"], masks: Windows, windows: Windows) -> Tensor:
    """Return, for each window, the largest entry among the masks that cover it (`nothing` if none does)."""
    if masks == windows and masks.equal_boxes:
        return per_mask  # equal boxes cover only themselves
    if masks.count == windows.count == 1 and masks.pairs is windows.pairs is None:
        # Maps come last: a look-up along the first axis then copies long runs of memory.
        grid = per_mask.view(-1, len(masks.rows), len(masks.columns)).permute(1, 2, 0)
        grid = _best_along(grid, masks.rows, windows.rows, masks.grid[0]).transpose(0, 1)
        grid = _best_along(grid, masks.columns, windows.columns, masks.grid[1])
        return grid.permute(2, 1, 0).reshape(len(per_mask), -1)
    ones = per_mask.new_ones(1, *masks.grid)
    areas = torch.from_numpy(windows.areas).to(per_mask.device).unsqueeze(1)
    best = per_mask.new_empty(per_mask.shape[0], windows.regions)
    for here, _, shared in overlaps(ones, masks, windows):
        covering = shared == areas[here]
        for image, entries in enumerate(per_mask):
            best[image, here] = torch.where(covering, entries, nothing(entries.dtype)).amax(1)
    return best


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


@lru_cache(maxsize=64)
def _edges(windows: Windows, device: torch.device) -> tuple[tuple[Place, Place], tuple[Place, Place]]:
    """Starts and stops of the row intervals and of the column intervals."""
    (top, bottom), (left, right) = np.array(windows.rows).T, np.array(windows.columns).T
    return (place_of(top, device), place_of(bottom, device)), (place_of(left, device), place_of(right, device))


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
        pieces = []
        for shift in (0, size, 2 * size):  # the window stands in the middle of three copies of the circle
            begin = torch.maximum(start + shift, low + size)
            end = torch.minimum(stop + shift, high + size).clamp(max=3 * size)
            pieces.append((begin, torch.maximum(begin, end)))
        return pieces

    return [(a, b, c, d) for a, b in along(0) for c, d in along(1)]


def _over_cells(maps: Tensor, owned: Tensor) -> Tensor:
    # float64 is exact here: sums of evidence stay below 2^50, sums of what defenses add to it below 2^53.
    return (maps.flatten(1).double() @ owned.mT).to(maps.dtype)


@lru_cache(maxsize=64)
def _indicators(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which rows each row interval holds, and (transposed) which columns each column interval holds."""
    pieces = []
    for intervals, size in zip((windows.rows, windows.columns), windows.grid, strict=True):
        lead = (np.arange(size)[None] - np.array(intervals)[:, :1]) % size
        pieces.append(torch.from_numpy(lead < np.diff(np.array(intervals))).to(device).double())
    return pieces[0], pieces[1].mT.contiguous()


def _owned_cells(windows: Windows, device: torch.device) -> Tensor:
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


@lru_cache(maxsize=64)
def _holders(
    outer: tuple[Interval, ...], inner: tuple[Interval, ...], size: int, device: torch.device
) -> Ranges | None:
    held = contains(np.array(outer)[None], np.array(inner)[:, None], size)
    return ranges(held, device) if held.any() else None


def _best_along(grid: Tensor, outer: tuple[Interval, ...], inner: tuple[Interval, ...], size: int) -> Tensor:
    """The largest entry, along the first axis, among the intervals that hold each inner one."""
    holders = _holders(outer, inner, size, grid.device)
    if holders is None:
        return grid.new_full((len(inner), *grid.shape[1:]), nothing(grid.dtype))
    return holders(grid)
