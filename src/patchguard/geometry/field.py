"""`Field`: which source pixels each cell reads, as one interval per cell and axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import numpy as np
from jaxtyping import Bool, Int64

from patchguard.errors import InputError


@final
@dataclass(frozen=True)
class Axis:
    """Along one axis, cell i reads source pixels starts[i], ..., starts[i] + lengths[i] - 1.

    An interval that runs past the end goes on at pixel 0 (modulo `size`); a length of 0 says that the cell
    reads nothing. `wrap` says that the cells themselves lie on a circle: the last one is a neighbor of the
    first.

    >>> axis = Axis(starts=(0, 8, 16), lengths=(17, 17, 17), size=33)
    >>> axis.touched_cells(16, 1).tolist()
    [True, True, True]
    >>> axis.field_size, axis.stride
    (17, 8)
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int
    wrap: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"`size` of an axis must be at least 1 pixel; got {self.size}.")
        if not self.starts or len(self.starts) != len(self.lengths):
            raise InputError(
                "`starts` and `lengths` must have one entry per cell and at least one cell; got "
                f"{len(self.starts)} starts and {len(self.lengths)} lengths."
            )
        for cell, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if not 0 <= start < self.size or not 0 <= length <= self.size:
                raise InputError(
                    f"the interval of cell {cell} must start inside the {self.size} pixels of its axis and "
                    f"hold 0 to {self.size} of them; got start {start}, length {length}."
                )

    @classmethod
    def identity(cls, size: int) -> "Axis":
        """Return the axis whose cell i reads pixel i."""
        return cls(starts=tuple(range(size)), lengths=(1,) * size, size=size)

    @classmethod
    def from_bounds(cls, low: Int64[np.ndarray, "cells"], high: Int64[np.ndarray, "cells"], size: int) -> "Axis":
        """Return the axis with the closed intervals low[i], ..., high[i]; high[i] < low[i] reads nothing."""
        empty = high < low
        return cls(
            starts=tuple(np.where(empty, 0, low).tolist()),
            lengths=tuple(np.where(empty, 0, high - low + 1).tolist()),
            size=size,
        )

    @property
    def cells(self) -> int:
        """Cells along this axis."""
        return len(self.starts)

    @property
    def field_size(self) -> int:
        """Pixels that the cell with the longest interval reads."""
        return max(self.lengths)

    @property
    def stride(self) -> int | None:
        """Pixels from one cell to the next, or None where the cells are not evenly spaced.

        Cells that a border cuts short are left out: only those of full length must be evenly spaced
        neighbors.
        """
        full = np.flatnonzero(self._lengths == self.field_size)
        steps = np.diff(self._starts[full]) % self.size
        regular = len(steps) > 0 and np.all(np.diff(full) == 1) and np.all(steps == steps[0])
        return int(steps[0]) if regular and steps[0] > 0 else None

    @property
    def runs_past_the_end(self) -> bool:
        """Whether some cell's interval goes on at pixel 0."""
        return bool(np.any(self._starts + self._lengths > self.size))

    @cached_property
    def _starts(self) -> Int64[np.ndarray, "cells"]:
        return np.array(self.starts, dtype=np.int64)

    @cached_property
    def _lengths(self) -> Int64[np.ndarray, "cells"]:
        return np.array(self.lengths, dtype=np.int64)

    def touched_cells(self, start: int, length: int) -> Bool[np.ndarray, "cells"]:
        """Return, per cell, whether it reads one of the pixels start, ..., start + length - 1.

        These pixels must lie inside the axis: what they belong to, a patch, does not wrap around.
        """
        if length < 1 or start < 0 or start + length > self.size:
            raise InputError(
                f"`start` and `length` must name pixels of the axis, 0 to {self.size - 1}; got {length} from {start}."
            )
        stops = self._starts + self._lengths
        straight = (self._starts < start + length) & (stops > start)
        return np.asarray((straight | (stops - self.size > start)) & (self._lengths > 0))

    def touched_cells_by_position(self, length: int) -> Bool[np.ndarray, "positions cells"]:
        """Return the same for `length` pixels from every position inside the axis."""
        return np.stack([self.touched_cells(start, length) for start in range(self.size - length + 1)])

    def is_covered_by(self, length: int) -> bool:
        """Return whether `length` pixels, from some position, touch every cell that reads anything."""
        return bool((self.touched_cells_by_position(length) | (self._lengths == 0)).all(1).any())


@final
@dataclass(frozen=True)
class Field:
    """Cell (u, v) reads the source pixels in (interval u of `rows`) x (interval v of `columns`), no others.

    >>> axis = Axis(starts=(0, 2), lengths=(3, 3), size=5)
    >>> Field(axis, axis).grid
    (2, 2)
    """

    rows: Axis
    columns: Axis

    @classmethod
    def identity(cls, height: int, width: int) -> "Field":
        """Return the field of an image: every pixel reads itself."""
        return cls(Axis.identity(height), Axis.identity(width))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells (U, V)."""
        return self.rows.cells, self.columns.cells

    @property
    def source(self) -> tuple[int, int]:
        """Height and width of the source image in pixels."""
        return self.rows.size, self.columns.size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the largest box that a cell reads."""
        return self.rows.field_size, self.columns.field_size

    @property
    def stride(self) -> tuple[int | None, int | None]:
        """Pixels from one cell to the next, per axis; None where they are not evenly spaced."""
        return self.rows.stride, self.columns.stride

    def touched_cells(self, box: tuple[int, int, int, int]) -> Bool[np.ndarray, "rows columns"]:
        """Return, per cell, whether it reads a pixel of `box` = (top, left, height, width)."""
        top, left, height, width = box
        rows = self.rows.touched_cells(top, height)
        columns = self.columns.touched_cells(left, width)
        return np.asarray(rows[:, None] & columns[None, :])

    def is_covered_by(self, height: int, width: int) -> bool:
        """Return whether a patch of this size, from some position, touches every cell that reads anything."""
        return self.rows.is_covered_by(height) and self.columns.is_covered_by(width)


def compose(field: Field, support: Field) -> Field:
    """Return the field of `field`'s cells in the source pixels of `support`.

    `field` says which pixels of an intermediate image each cell reads, `support` which source pixels each of
    those reads. A cell then reads the union of the supports of its pixels, here the smallest interval that
    holds it.
    """
    if field.source != support.grid:
        raise InputError(
            f"`support` must describe the {field.source[0]} x {field.source[1]} pixels that the cells read; "
            f"it describes {support.grid[0]} x {support.grid[1]}. Use one image size for both."
        )
    return Field(_compose_axis(field.rows, support.rows), _compose_axis(field.columns, support.columns))


def _compose_axis(cells: Axis, support: Axis) -> Axis:
    if support.wrap or support.runs_past_the_end:
        raise InputError("`support` must not wrap around: compose bands after the preprocessing, not before it.")
    starts: list[int] = []
    lengths: list[int] = []
    for start, length in zip(cells.starts, cells.lengths, strict=True):
        low, high = _hull(support, range(start, min(start + length, cells.size)))
        again_low, again_high = _hull(support, range(max(start + length - cells.size, 0)))
        if high < low:
            low, high = again_low, again_high
        elif again_low <= again_high:
            # An arc that leaves over the last pixel and comes back at pixel 0; at most once around.
            low, high = (low, support.size + again_high) if again_high < low else (0, support.size - 1)
        starts.append(low if low <= high else 0)
        lengths.append(max(high - low + 1, 0))
    return Axis(tuple(starts), tuple(lengths), support.size, wrap=cells.wrap)


def _hull(support: Axis, pixels: Sequence[int]) -> tuple[int, int]:
    """Return the first and last source pixel that some of `pixels` reads; (0, -1) if there is none."""
    read = [(support.starts[i], support.starts[i] + support.lengths[i] - 1) for i in pixels if support.lengths[i]]
    if not read:
        return 0, -1
    return min(low for low, _ in read), max(high for _, high in read)


@lru_cache(maxsize=4096)
def middle_position(axis: Axis, length: int, start: int, stop: int) -> int:
    """Return the middle one of the positions from which `length` pixels touch the cells start .. stop - 1 only."""
    cells = np.zeros(axis.cells, dtype=bool)
    cells[np.arange(start, stop) % axis.cells] = True
    touched = axis.touched_cells_by_position(length)
    inside = (touched & ~cells).sum(1) == 0
    score = np.where(inside, (touched & cells).sum(1), -1)
    best = np.flatnonzero(score == score.max())
    return int(best[len(best) // 2])
