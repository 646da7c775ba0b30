"""`Layout`: where images and positions lie inside a tensor, and which pixels each position reads.

Inside a network the rows and columns of the image travel: a permute moves them to other dimensions, a view
merges them with the batch. So every dimension of a tensor is described as a product of factors, slowest
first, and each factor runs over the images of the batch, over rows, over columns, or over channels.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Int64

Kind = Literal["image", "row", "column", "channel"]
Intervals = Int64[np.ndarray, "positions"]

# The empty interval: neutral under the minimum of lower and the maximum of upper ends.
NOTHING_LOW = 2**62
NOTHING_HIGH = -1


class RuleError(Exception):
    """Why the pixels that a tensor reads cannot be bounded; the graph walk adds the layer's name."""


class UnrunnableError(RuleError):
    """Why an operation must not even run."""


@final
@dataclass(frozen=True, eq=False)
class Factor:
    """`size` indices of one kind. Row or column i reads pixels low[i], ..., high[i] along its axis.

    For images and channels `low` and `high` are empty arrays.
    """

    kind: Kind
    size: int
    low: Intervals
    high: Intervals

    def gather(self, indices: Int64[np.ndarray, "positions taps"]) -> "Factor":
        """Return the factor whose position i reads what the positions indices[i, :] of this one read.

        An index outside 0, ..., size - 1 is padding and reads nothing.
        """
        inside = (indices >= 0) & (indices < self.size)
        safe = np.where(inside, indices, 0)
        low = np.where(inside, self.low[safe], NOTHING_LOW).min(axis=1)
        high = np.where(inside, self.high[safe], NOTHING_HIGH).max(axis=1)
        return Factor(self.kind, len(indices), low, high)

    def union(self, other: "Factor") -> "Factor":
        """Return the factor whose position i reads what position i of either reads."""
        return Factor(self.kind, self.size, np.minimum(self.low, other.low), np.maximum(self.high, other.high))


Dimension = tuple[Factor, ...]
_NO_INTERVALS = np.empty(0, dtype=np.int64)


def channel_dimension(size: int) -> Dimension:
    """Return a dimension of `size` channels; one channel needs no factor."""
    return () if size == 1 else (Factor("channel", size, _NO_INTERVALS, _NO_INTERVALS),)


def image_dimension(size: int) -> Dimension:
    """Return a dimension that runs over the images of a batch."""
    return (Factor("image", size, _NO_INTERVALS, _NO_INTERVALS),)


def pixel_dimension(kind: Literal["row", "column"], size: int) -> Dimension:
    """Return a dimension of `size` pixels that read themselves."""
    own = np.arange(size, dtype=np.int64)
    return (Factor(kind, size, own, own),)


def blank_positions(like: Factor, size: int) -> Factor:
    """Return `size` positions of the kind of `like` that read nothing."""
    low = np.full(size, NOTHING_LOW, dtype=np.int64)
    return Factor(like.kind, size, low, np.full(size, NOTHING_HIGH, dtype=np.int64))


def size_of(dimension: Dimension) -> int:
    """Return the number of indices of a dimension."""
    return math.prod(factor.size for factor in dimension)


def only_channels(dimension: Dimension) -> bool:
    """Return whether a dimension holds neither images nor positions, so that mixing along it is harmless."""
    return all(factor.kind == "channel" for factor in dimension)


def describe(dimension: Dimension) -> str:
    """Return what a dimension runs over, in words."""
    words = {"image": "images of the batch", "row": "rows", "column": "columns", "channel": "channels"}
    return " and ".join(words[factor.kind] for factor in dimension) or "nothing"


def position_factor(dimension: Dimension) -> Factor:
    """Return the one factor of a dimension that consists of rows or of columns alone."""
    if len(dimension) != 1 or dimension[0].kind not in ("row", "column"):
        raise RuleError(f"moves along a dimension that runs over {describe(dimension)}, not over rows or columns alone")
    return dimension[0]


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """The factors of every dimension of one tensor that depends on the image.

    An entry of the tensor whose index picks image b, row i and column j depends only on the pixels of image b
    in (interval i of the row factor) x (interval j of the column factor). This needs exactly one factor of
    each of the three kinds: a tensor with two row factors would hold pairs of positions, one without any a
    mix of all rows.
    """

    dimensions: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        kinds = [factor.kind for dimension in self.dimensions for factor in dimension]
        for kind in ("image", "row", "column"):
            if kinds.count(kind) > 1:
                raise RuleError(f"pairs every {kind} with every other {kind}")
            if kind not in kinds:
                raise RuleError(f"drops the {kind} that its result belongs to")

    @classmethod
    def of_images(cls, count: int, channels: int, height: int, width: int) -> "Layout":
        """Return the layout of a batch of images, in which every pixel reads itself."""
        sides = (pixel_dimension("row", height), pixel_dimension("column", width))
        return cls((image_dimension(count), channel_dimension(channels), *sides))

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(size_of(dimension) for dimension in self.dimensions)

    def replace(self, index: int, dimension: Dimension) -> "Layout":
        """Return the layout with another dimension at `index`."""
        dimensions = list(self.dimensions)
        dimensions[index] = dimension
        return Layout(tuple(dimensions))

    def expand(self, shape: Sequence[int]) -> "Layout":
        """Return the layout broadcast to `shape`: single channels are repeated, positions never."""
        missing = len(shape) - len(self.dimensions)
        dimensions: list[Dimension] = []
        for dimension, size in zip(((),) * missing + self.dimensions, shape, strict=True):
            if size_of(dimension) == size:
                dimensions.append(dimension)
            elif dimension == ():
                dimensions.append(channel_dimension(size))
            else:
                raise RuleError(f"spreads a single position over all {size} {describe(dimension)}")
        return Layout(tuple(dimensions))

    def view(self, shape: Sequence[int]) -> "Layout":
        """Return the layout of the same entries, in the same order, under another shape."""
        if self.shape == tuple(shape):
            return self
        if math.prod(self.shape) != math.prod(shape):
            raise RuleError("changes the number of entries")
        if 0 in shape:
            raise RuleError("gives a tensor without entries")
        left = _merge_channels([factor for dimension in self.dimensions for factor in dimension])
        dimensions: list[Dimension] = []
        for size in shape:
            taken: list[Factor] = []
            if size == 1 and left and left[0].size == 1:
                taken.append(left.pop(0))
            have = 1
            while have < size:
                factor = left.pop(0)
                wanted = size // have
                if factor.kind == "channel" and factor.size > wanted and factor.size % wanted == 0:
                    left[:0] = channel_dimension(factor.size // wanted)
                    factor = channel_dimension(wanted)[0]
                if wanted % factor.size:
                    raise RuleError(f"cuts its {describe((factor,))} into pieces of another shape")
                taken.append(factor)
                have *= factor.size
            dimensions.append(tuple(_merge_channels(taken)))
        if left:
            dimensions[-1] = (*dimensions[-1], *left)
        return Layout(tuple(dimensions))


def _merge_channels(factors: Sequence[Factor]) -> list[Factor]:
    merged: list[Factor] = []
    for factor in factors:
        if merged and factor.kind == merged[-1].kind == "channel":
            merged[-1:] = channel_dimension(merged[-1].size * factor.size)
        else:
            merged.append(factor)
    return merged


def merge_dimensions(first: Dimension, second: Dimension) -> Dimension:
    """Return the dimension whose index i depends on index i of both."""
    if [(factor.kind, factor.size) for factor in first] != [(factor.kind, factor.size) for factor in second]:
        raise RuleError(f"combines {describe(first)} with {describe(second)}")
    return tuple(
        one if one.kind in ("image", "channel") else one.union(two) for one, two in zip(first, second, strict=True)
    )


def join(layouts: Sequence[Layout], shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor of `shape` whose entry i depends on entry i of each, broadcast."""
    result, *others = [layout.expand(shape) for layout in layouts]
    for other in others:
        dimensions = zip(result.dimensions, other.dimensions, strict=True)
        result = Layout(tuple(merge_dimensions(one, two) for one, two in dimensions))
    return result


def require_channels(layout: Layout, indices: Sequence[int]) -> set[int]:
    """Return the dimensions named by `indices`, after checking that they hold channels only."""
    chosen = {index % len(layout.dimensions) for index in indices}
    for index in sorted(chosen):
        if not only_channels(layout.dimensions[index]):
            raise RuleError(f"computes over all {describe(layout.dimensions[index])}")
    return chosen


# -- one operation of the graph ----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the image: a parameter, a buffer, or made from those."""

    shape: tuple[int, ...]


@final
@dataclass(frozen=True, eq=False)
class Call:
    """One operation: its arguments by the names in its schema, and the shape of each tensor it returns."""

    name: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    def get(self, *names: str) -> Any:
        """Return the first of these arguments that the operation has, or None."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)

    def inputs(self) -> list[Layout]:
        """Return every argument, or member of a list argument, that depends on the image."""
        flat: list[Any] = []
        for value in self.arguments.values():
            flat.extend(value if isinstance(value, (list, tuple)) else [value])
        return [value for value in flat if isinstance(value, Layout)]

    def only_input(self) -> Layout:
        """Return the first argument, after checking that no other one depends on the image."""
        first = next(iter(self.arguments.values()))
        if not isinstance(first, Layout) or len(self.inputs()) != 1:
            raise RuleError("takes weights or settings that depend on the image")
        return first

    @property
    def axes(self) -> int:
        """The number of axes that the operation's name ends with: 2 for `avg_pool2d`."""
        digits = re.findall(r"([123])d", self.name)
        if not digits:
            raise RuleError("has no rule for its number of axes")
        return int(digits[-1])

    def per_axis(self, value: Any, axes: int) -> list[int]:
        """Return an argument as one integer for each of `axes` axes; one value stands for all."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        return [int(entry) for entry in (values * axes if len(values) == 1 else values)]


Rule = Callable[[Call], Layout | tuple[Layout, ...]]
