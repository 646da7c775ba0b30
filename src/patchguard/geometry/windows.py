"""`Windows`: the boxes of cells that a patch can own, or that a defense masks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
from jaxtyping import Bool, Int64

from patchguard.errors import InputError
from patchguard.patch import Patch

if TYPE_CHECKING:
    from patchguard.geometry.field import Axis, Field

Interval: TypeAlias = tuple[int, int]
"""(start, stop): the cells start, ..., stop - 1, modulo the axis length where `stop` runs past it."""

LARGEST_TABLE = 2**26  # entries of a table over (regions, cells); beyond this an enumeration would not finish


@final
@dataclass(frozen=True)
class Windows:
    """Boxes of cells: every row interval crossed with every column interval, or only the listed `pairs`.

    An axis may wrap around (column bands on a circle). Box number ``i * len(columns) + j`` is
    ``rows[i] x columns[j]``; with `pairs`, box number ``p`` is ``rows[pairs[p][0]] x columns[pairs[p][1]]``.

    A *region* is what one attack owns or one mask hides: a union of `count` different boxes (of all boxes
    where there are fewer). With ``count == 1`` regions and boxes are the same.

    >>> len(Windows.sliding(grid=(26, 26), size=(6, 6)))
    441
    >>> len(Windows.sliding(grid=(1, 299), size=(1, 66), wrap=(False, True)))
    299
    """

    grid: tuple[int, int]
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    pairs: tuple[tuple[int, int], ...] | None = None
    wrap: tuple[bool, bool] = (False, False)
    count: int = 1

    def __post_init__(self) -> None:
        whole = all(isinstance(size, Integral) and not isinstance(size, bool) for size in self.grid)
        if not whole or len(self.grid) != 2 or len(self.wrap) != 2 or min(self.grid) < 1:
            raise InputError(
                f"`grid` must be two sizes of at least 1, `wrap` two booleans; got {self.grid}, {self.wrap}."
            )
        object.__setattr__(self, "grid", tuple(int(size) for size in self.grid))
        object.__setattr__(self, "wrap", tuple(bool(wraps) for wraps in self.wrap))
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise InputError(f"`count` must be a whole number of at least 1; got {self.count!r}.")
        for axis, name in enumerate(("rows", "columns")):
            intervals = tuple(self._normalize(axis, interval) for interval in getattr(self, name))
            distinct = tuple(dict.fromkeys(intervals))
            object.__setattr__(self, name, distinct if self.pairs is None else intervals)
        if self.pairs is not None and not all(
            0 <= i < len(self.rows) and 0 <= j < len(self.columns) for i, j in self.pairs
        ):
            raise InputError("`pairs` must index `rows` and `columns`. Build such windows with `from_boxes`.")
        if len(self) == 0:
            raise InputError("`windows` must hold at least one box; got none.")

    def _normalize(self, axis: int, interval: Interval) -> Interval:
        start, stop = interval
        size = self.grid[axis]
        if not (0 <= start < size and 1 <= stop - start <= size and (self.wrap[axis] or stop <= size)):
            raise InputError(
                f"an interval must be (start, stop) with 0 <= start < stop inside {size} cells"
                f"{' of a circle' if self.wrap[axis] else ''}; got {(start, stop)}."
            )
        return (0, size) if stop - start == size else (start, stop)

    @classmethod
    def sliding(
        cls,
        *,
        grid: tuple[int, int],
        size: tuple[int, int],
        wrap: tuple[bool, bool] = (False, False),
        count: int = 1,
    ) -> "Windows":
        """Return all boxes of `size` cells; on a wrapped axis they start at every cell of the circle."""
        intervals = []
        for cells, length, wraps in zip(grid, size, wrap, strict=True):
            if not 1 <= length <= cells:
                raise InputError(f"`size` must lie between 1 and the grid's {cells} cells; got {length}.")
            starts = range(cells) if wraps and length < cells else range(cells - length + 1)
            intervals.append(tuple((start, start + length) for start in starts))
        return cls(grid=grid, rows=intervals[0], columns=intervals[1], wrap=wrap, count=count)

    @classmethod
    def from_boxes(
        cls,
        boxes: Iterable[Sequence[int]] | Int64[np.ndarray, "boxes 4"],
        *,
        grid: tuple[int, int],
        wrap: tuple[bool, bool] = (False, False),
        count: int = 1,
    ) -> "Windows":
        """Return arbitrary boxes (row start, row stop, column start, column stop); slower to sum over."""
        listed = list(dict.fromkeys((int(a), int(b), int(c), int(d)) for a, b, c, d in boxes))
        rows = sorted({(a, b) for a, b, _, _ in listed})
        columns = sorted({(c, d) for _, _, c, d in listed})
        pairs = tuple((rows.index((a, b)), columns.index((c, d))) for a, b, c, d in listed)
        return cls(
            grid=grid, rows=tuple(rows), columns=tuple(columns), pairs=pairs, wrap=wrap, count=count
        ).drop_redundant_pairs()

    @classmethod
    def reached_by(cls, patch: Patch, field: "Field") -> "Windows":
        """Return the maximal boxes of cells that a patch at some position of the source image can touch.

        The rows a patch touches depend only on its row position, the columns only on its column position, so
        the boxes are a product. Where the touched cells of one axis are not contiguous (they are for every
        ordinary network), their hull is taken. A patch that no cell sees still owns one cell: harmless.
        """
        patch.check_fits(field.rows.size, field.columns.size)
        rows = _touched_intervals(field.rows, patch.height)
        columns = _touched_intervals(field.columns, patch.width)
        return cls(
            grid=(len(field.rows.starts), len(field.columns.starts)),
            rows=rows,
            columns=columns,
            wrap=(field.rows.wrap, field.columns.wrap),
            count=patch.count,
        ).maximal()

    def drop_redundant_pairs(self) -> "Windows":
        """Drop `pairs` where they list every row interval with every column interval in order."""
        full = tuple((i, j) for i in range(len(self.rows)) for j in range(len(self.columns)))
        return replace(self, pairs=None) if self.pairs == full else self

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns) if self.pairs is None else len(self.pairs)

    @cached_property
    def boxes(self) -> Int64[np.ndarray, "boxes 4"]:
        """Each box as (row start, row stop, column start, column stop)."""
        pairs = self.pairs or [(i, j) for i in range(len(self.rows)) for j in range(len(self.columns))]
        return np.array([(*self.rows[i], *self.columns[j]) for i, j in pairs], dtype=np.int64)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Windows key the caches of index tables, and are looked up many times per call.
        return hash((self.grid, self.rows, self.columns, self.pairs, self.wrap, self.count))

    @cached_property
    def regions(self) -> int:
        """How many unions of `count` boxes there are."""
        return math.comb(len(self), min(self.count, len(self)))

    @cached_property
    def members(self) -> Int64[np.ndarray, "regions count"]:
        """The boxes of each region, by number."""
        self._check_enumerable(min(self.count, len(self)))
        members = combinations(range(len(self)), min(self.count, len(self)))
        return np.array(list(members), dtype=np.int64)

    @cached_property
    def areas(self) -> Int64[np.ndarray, " regions"]:
        """How many cells each region has."""
        if self.count == 1:
            top, bottom, left, right = self.boxes.T
            return np.asarray((bottom - top) * (right - left))
        return np.asarray(self.cells.sum(1, dtype=np.int64))

    @cached_property
    def equal_boxes(self) -> bool:
        """Whether regions are single boxes of one size, so that no box lies in another."""
        return self.count == 1 and self.pairs is None and len(set(self.areas.tolist())) == 1

    @cached_property
    def largest_area(self) -> int:
        """The most cells one region can have; never enumerates regions that are too many."""
        boxes = replace(self, count=1).areas
        if self.count == 1:
            return int(boxes.max())
        if self.regions * self.grid[0] * self.grid[1] <= LARGEST_TABLE:
            return int(self.areas.max())
        largest = np.sort(boxes)[::-1][: self.count]
        return min(int(largest.sum()), self.grid[0] * self.grid[1])

    @cached_property
    def cells(self) -> Bool[np.ndarray, "regions cells"]:
        """Which cells (row by row) each region owns. Only enumerations over unions of boxes need this."""
        self._check_enumerable(self.grid[0] * self.grid[1])
        owned = np.stack([self.box_cells(number) for number in range(len(self))])
        cells = owned[self.members[:, 0]]
        for column in self.members.T[1:]:
            cells |= owned[column]
        return np.asarray(cells)

    def box_cells(self, number: int) -> Bool[np.ndarray, " cells"]:
        """Which cells (row by row) box `number` owns."""
        owned = np.zeros(self.grid, dtype=bool)
        a, b, c, d = self.boxes[number]
        owned[np.ix_(np.arange(a, b) % self.grid[0], np.arange(c, d) % self.grid[1])] = True
        return owned.reshape(-1)

    def _check_enumerable(self, width: int) -> None:
        if self.regions * width > LARGEST_TABLE:
            raise InputError(
                f"{self.count} windows out of {len(self)} make {self.regions:.3g} unions, too many to enumerate. "
                "Use fewer patches, larger cells, or a defense with a position-free certificate (`spatial=False`)."
            )

    def maximal(self) -> "Windows":
        """Return the boxes that lie in no other box: an attack that owns more can only do more."""
        if self.pairs is None:
            return replace(
                self,
                rows=_keep_maximal(self.rows, self.grid[0]),
                columns=_keep_maximal(self.columns, self.grid[1]),
            )
        boxes = np.unique(self.boxes, axis=0)
        inside = contains(boxes[:, None, :2], boxes[None, :, :2], self.grid[0]) & contains(
            boxes[:, None, 2:], boxes[None, :, 2:], self.grid[1]
        )  # [p, q]: box p holds box q
        np.fill_diagonal(inside, False)
        return Windows.from_boxes(boxes[~inside.any(axis=0)], grid=self.grid, wrap=self.wrap, count=self.count)

    def cover(self, windows: "Windows") -> bool:
        """Whether each region of `windows` lies in some region of these masks (never a false yes)."""
        return _cover(self, windows)


@lru_cache(maxsize=256)
def _cover(masks: Windows, windows: Windows) -> bool:
    if masks.count < windows.count:
        return False
    if masks.pairs is None and windows.pairs is None:
        return all(
            contains(np.array(mask_part)[None], np.array(window_part)[:, None], size).any(1).all()
            for mask_part, window_part, size in (
                (masks.rows, windows.rows, masks.grid[0]),
                (masks.columns, windows.columns, masks.grid[1]),
            )
        )
    mask_part, window_part = masks.boxes[None], windows.boxes[:, None]
    inside = contains(mask_part[..., :2], window_part[..., :2], masks.grid[0]) & contains(
        mask_part[..., 2:], window_part[..., 2:], masks.grid[1]
    )
    return bool(inside.any(1).all())


def contains(
    outer: Int64[np.ndarray, "*#shape 2"], inner: Int64[np.ndarray, "*#shape 2"], size: int
) -> Bool[np.ndarray, "*shape"]:
    """Whether the interval `outer` holds `inner`, both on a circle of `size` cells.

    A line is the circle whose intervals never wrap, so this serves both.
    """
    lead = (inner[..., 0] - outer[..., 0]) % size  # cells from the start of outer to the start of inner
    length, whole = inner[..., 1] - inner[..., 0], outer[..., 1] - outer[..., 0]
    return np.asarray((whole == size) | (lead + length <= whole))


def _keep_maximal(intervals: tuple[Interval, ...], size: int) -> tuple[Interval, ...]:
    distinct = np.array(sorted(set(intervals)))
    inside = contains(distinct[:, None], distinct[None], size)
    np.fill_diagonal(inside, False)
    return tuple((int(a), int(b)) for a, b in distinct[~inside.any(axis=0)])


def _touched_intervals(axis: "Axis", length: int) -> tuple[Interval, ...]:
    """Hull, in cells, of what `length` pixels touch, for each position along one axis."""
    cells = len(axis.starts)
    intervals: dict[Interval, None] = {}
    for position in range(axis.size - length + 1):
        hit = np.flatnonzero(axis.touched_cells(position, length))
        if hit.size == 0:
            continue
        start, stop = int(hit[0]), int(hit[-1]) + 1
        if axis.wrap and stop - start > hit.size:
            # On a circle the hull starts after the longest run of untouched cells.
            gaps = np.diff(np.append(hit, hit[0] + cells))
            last = int(gaps.argmax())
            start = int(hit[(last + 1) % hit.size])
            stop = start + cells - int(gaps[last]) + 1
        intervals[(start, stop)] = None
    return tuple(intervals) or ((0, 1),)
