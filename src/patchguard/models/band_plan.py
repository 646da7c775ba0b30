"""Which columns of every layer a band can change, and how to lay them side by side. No weights here.

A band of pixels changes a few columns of the first layer's output and a few more of every later one;
elsewhere each layer holds what it computes from the empty image. Those columns, band after band, form one
long strip per layer. The strip of a layer is convolved like one tall image: between two bands lie columns
that do not differ from the empty image, so that no band sees its neighbor.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Int64

Interval = tuple[int, int]
Crops = list[list[Interval]]
Indices = Int64[np.ndarray, "_positions"]

# A strip copies its columns once per block, which full images do not. It must save this much to be worth it.
COPYING = 1.1


@final
class Layer(NamedTuple):
    """Geometry of a convolution or pooling along either axis, and its multiply-adds per output position."""

    kernel: int
    stride: int
    padding: int
    multiply_adds: int = 0

    def outputs(self, size: int) -> int:
        """Return how many positions it makes from `size`."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def changed(self, crops: Crops, size: int) -> Crops:
        """Return, per band, the intervals of output columns that read a column of its `crops`.

        `size` columns go in. Intervals that touch are merged, so that what is left never meets within a
        layer.
        """
        last = self.outputs(size) - 1
        return [
            _merge_intervals(
                (
                    max(0, -((self.kernel - 1 - self.padding - low) // self.stride)),
                    min(last, (high + self.padding) // self.stride),
                )
                for low, high in intervals
            )
            for intervals in crops
        ]


@final
class Block(NamedTuple):
    """A residual block: the layers of its main branch, and of its shortcut unless that is the identity."""

    main: tuple[Layer, ...]
    shortcut: Layer | None

    @property
    def stride(self) -> int:
        """Input columns per output column."""
        return math.prod(layer.stride for layer in self.main)


@final
class Architecture(NamedTuple):
    """All geometry of a ResNet; `head` counts the multiply-adds of its linear layer."""

    stem: Layer
    pool: Layer | None
    blocks: tuple[Block, ...]
    head: int


@final
@dataclass(frozen=True, eq=False)
class Strip:
    """Position i of a strip holds column `column[i]` of the layer, as band `band[i]` changes it.

    A gap has `column[i] == size`, one past the last column. `zero` is a position that equals the empty image.
    """

    band: Indices
    column: Indices
    size: int
    zero: int

    def positions(self, band: Indices, column: Indices, bands: int) -> Indices:
        """Return where (band, column) lies in this strip, `zero` for what the strip does not hold."""
        where = np.full((bands, self.size + 1), self.zero, dtype=np.int64)
        is_column = self.column < self.size
        where[self.band[is_column], self.column[is_column]] = np.flatnonzero(is_column)
        positions: Indices = where[band, np.minimum(column, self.size)]
        return positions


@final
@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Indices for one block: `source` into the strip before it, `before` and `after` into its columns.

    `before` has `stride` positions for every one of `after`, the strip that leaves the block. Gaps point to
    the last column; `gaps` are their positions in `after`. The last three are multiply-adds, with the meaning
    they have in `Plan`.
    """

    source: Indices
    before: Indices
    after: Indices
    gaps: Indices
    plain: int
    fast: int
    least: int


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """How to evaluate bands: the stem on equal windows, `blocks` on strips, all other blocks on full images.

    `pixels` picks the columns of the image for all windows, one past the last for a column of zeros; `stem`
    and `pooled` pick the same windows' columns of the stem's convolution and of its result. `full` picks all
    columns of all bands from the last strip. Multiply-adds are those of all bands of one image: `plain` on
    full images, `fast` with this plan, `least` if every layer computed exactly the columns that a band
    changes.
    """

    windows: int
    pixels: Indices
    stem: Indices
    pooled: Indices
    blocks: tuple[BlockPlan, ...]
    full: Indices
    plain: int
    fast: int
    least: int


@lru_cache(maxsize=64)
def plan_bands(architecture: Architecture, size: int, across: int, starts: tuple[int, ...], band: int) -> Plan:
    """Plan the evaluation of bands of `band` columns that begin at `starts` in images of `size` columns.

    `across` is the other side of the image. A band that runs past the last column goes on at the first.
    """
    stem, pool = architecture.stem, architecture.pool
    crops: Crops = [_band(start, band, size) for start in starts]
    crops, inner, rows = stem.changed(crops, size), stem.outputs(size), stem.outputs(across)
    plain = stem.multiply_adds * rows * inner * len(starts)
    least = stem.multiply_adds * rows * _length(crops)
    if pool is not None:
        crops, columns = pool.changed(crops, inner), pool.outputs(inner)
    else:
        columns = inner
    strip, owner, window = _windows(crops, columns)
    pooled = np.clip(window, 0, columns - 1)
    if pool is not None:
        window = _inputs(window, pool)
    fast = stem.multiply_adds * rows * window.size
    pixels = _pixels(_inputs(window, stem), owner, starts, band, size)
    stem_columns = np.where((window >= 0) & (window < inner), window, inner)

    rows = rows if pool is None else pool.outputs(rows)
    blocks: list[BlockPlan] = []
    strips, sizes = [strip], [columns]
    for block in architecture.blocks:
        planned, strip, crops = _plan_block(block, strips[-1], crops, sizes[-1], rows, len(starts))
        blocks.append(planned)
        strips.append(strip)
        sizes.append(strip.size)
        for layer in block.main:
            rows = layer.outputs(rows)

    # Strips pay as long as they are short; from then on every block runs on full images.
    gains = [0.0, *(planned.plain - COPYING * planned.fast for planned in blocks)]
    on_strips = int(np.argmax(np.cumsum(gains)))
    head = architecture.head * len(starts)
    every = np.divmod(np.arange(len(starts) * sizes[on_strips], dtype=np.int64), sizes[on_strips])
    return Plan(
        windows=len(owner),
        pixels=pixels.ravel(),
        stem=stem_columns.ravel(),
        pooled=pooled.ravel(),
        blocks=tuple(blocks[:on_strips]),
        full=strips[on_strips].positions(*every, len(starts)),
        plain=plain + head + sum(planned.plain for planned in blocks),
        fast=fast
        + head
        + sum(planned.fast for planned in blocks[:on_strips])
        + sum(planned.plain for planned in blocks[on_strips:]),
        least=least + head + sum(planned.least for planned in blocks),
    )


def _plan_block(
    block: Block, source: Strip, crops: Crops, columns: int, rows: int, bands: int
) -> tuple[BlockPlan, Strip, Crops]:
    """Return the plan of one block, the strip that leaves it and the columns that the bands change there."""
    layers: list[tuple[Layer, int, int]] = []  # with its output positions: per full image, changed by all bands
    inputs, entering, entering_rows = columns, crops, rows
    for layer in block.main:
        crops, columns, rows = layer.changed(crops, columns), layer.outputs(columns), layer.outputs(rows)
        layers.append((layer, columns * rows, _length(crops) * rows))
    if block.shortcut is not None:
        changed = _length(block.shortcut.changed(entering, inputs))
        layers.append((block.shortcut, columns * rows, changed * rows))
    strip = lay_out(crops, columns)
    before = (strip.column[:, None] * block.stride + np.arange(block.stride)).ravel()

    fast, stride, height = 0, 1, entering_rows
    for layer in block.main:
        stride, height = stride * layer.stride, layer.outputs(height)
        fast += layer.multiply_adds * height * (len(before) // stride)
    if block.shortcut is not None:
        fast += block.shortcut.multiply_adds * rows * len(strip.column)
    planned = BlockPlan(
        source=source.positions(np.repeat(strip.band, block.stride), before, bands),
        before=np.minimum(before, inputs - 1),
        after=np.minimum(strip.column, columns - 1),
        gaps=np.flatnonzero(strip.column == columns),
        plain=sum(layer.multiply_adds * full * bands for layer, full, _ in layers),
        fast=fast,
        least=sum(layer.multiply_adds * changed for layer, _, changed in layers),
    )
    return planned, strip, crops


def lay_out(crops: Crops, size: int) -> Strip:
    """Return a strip of the intervals `crops[band]` of a layer of `size` columns.

    The outermost columns of an interval enter a block unchanged and so keep its neighbors in the strip
    apart, unless the border of the image cut it. There, and at the end, goes a gap.
    """
    bands: list[int] = []
    columns: list[int] = []
    for band, low, high in _few_gaps(crops, size):
        if columns and (low == 0 or columns[-1] == size - 1):
            bands.append(band)
            columns.append(size)
        bands.extend([band] * (high - low + 1))
        columns.extend(range(low, high + 1))
    bands.append(0)
    columns.append(size)
    return Strip(np.array(bands, dtype=np.int64), np.array(columns, dtype=np.int64), size=size, zero=len(columns) - 1)


def _few_gaps(crops: Crops, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (band, low, high) so that an interval cut on the right precedes one cut on the left.

    The two share one gap.
    """
    kinds: dict[tuple[bool, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for band, intervals in enumerate(crops):
        for low, high in intervals:
            kinds[low == 0, high == size - 1].append((band, low, high))
    yield from kinds[False, False]
    for pair in zip_longest(kinds[False, True], kinds[True, False]):
        yield from (interval for interval in pair if interval is not None)
    yield from kinds[True, True]


def _windows(crops: Crops, size: int) -> tuple[Strip, Indices, Int64[np.ndarray, "windows width"]]:
    """Return one window per interval, all as wide as the widest, and one more that no band changes.

    They come as a strip without gaps between them, the band of each window (-1 for the last), and their
    columns.
    """
    intervals = [(band, low, high) for band, pieces in enumerate(crops) for low, high in pieces]
    owner, low, high = np.array([*intervals, (-1, 0, -1)], dtype=np.int64).T
    width = int((high - low).max()) + 1
    window = low[:, None] + np.arange(width)
    strip = Strip(
        band=np.repeat(np.maximum(owner, 0), width),
        column=np.where(window <= high[:, None], window, size).ravel(),
        size=size,
        zero=(len(owner) - 1) * width,
    )
    return strip, owner, window


def _inputs(window: Int64[np.ndarray, "windows width"], layer: Layer) -> Int64[np.ndarray, "windows inputs"]:
    """Return the columns that `layer` reads for the columns of each window."""
    width = (window.shape[1] - 1) * layer.stride + layer.kernel
    return window[:, :1] * layer.stride - layer.padding + np.arange(width)


def _pixels(
    window: Int64[np.ndarray, "windows width"], owner: Indices, starts: tuple[int, ...], band: int, size: int
) -> Int64[np.ndarray, "windows width"]:
    """Return `window` where it shows a pixel of its owner's band; elsewhere `size`, a column of zeros."""
    offset = (window - np.array(starts, dtype=np.int64)[owner, None]) % size
    shown = (window >= 0) & (window < size) & (offset < band) & (owner[:, None] >= 0)
    return np.where(shown, window, size)


def _band(start: int, band: int, size: int) -> list[Interval]:
    """Return the one or two intervals of pixels that a band shows."""
    stop = start + band - 1
    if stop < size:
        return [(start, stop)]
    return _merge_intervals([(0, stop - size), (start, size - 1)])


def _merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals` as disjoint intervals in order, those that touch merged to one."""
    merged: list[Interval] = []
    for low, high in sorted(interval for interval in intervals if interval[0] <= interval[1]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _length(crops: Crops) -> int:
    return sum(high - low + 1 for intervals in crops for low, high in intervals)
