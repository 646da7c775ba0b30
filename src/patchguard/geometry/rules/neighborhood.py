"""Rules for operations that read neighbors along rows and columns: convolution, pooling, padding, crops."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
from jaxtyping import Int64

from patchguard.geometry.rules.layout import (
    Call,
    Dimension,
    Layout,
    RuleError,
    UnrunnableError,
    channel_dimension,
    describe,
    only_channels,
    position_factor,
    size_of,
)

Indices = Int64[np.ndarray, "_"]
# Row i holds the indices that result i reads; two axes have their own numbers of results and taps.
Taps = Int64[np.ndarray, "_ _"]
# The taps of one axis, given its number, the size of the input along it and the size of the result.
AxisTaps = Callable[[int, int, int], Taps]


def read_taps(dimension: Dimension, size: int, taps: Callable[[], Taps]) -> Dimension:
    """Return the dimension of `size` whose index i reads the indices taps()[i, :] of `dimension`.

    The taps are asked for only where the dimension holds rows or columns: a batch may have any number of
    images, and channels are mixed anyway.
    """
    if only_channels(dimension):
        return channel_dimension(size)
    return (position_factor(dimension).gather(taps()),)


def window_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Taps:
    """Return, for each of `size` results, the indices under a kernel that starts at -padding."""
    first = np.arange(size, dtype=np.int64)[:, None] * stride - padding
    return first + np.arange(kernel, dtype=np.int64)[None, :] * dilation


def any_window_meets_input(count: int, size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Return whether any of `size` windows of `window_taps` holds one of the indices 0, ..., count - 1."""
    for offset in range(-padding, kernel * dilation - padding, dilation):
        first = max(0, -(offset // stride))  # the first window whose tap is not left of index 0
        if first < size and first * stride + offset < count:
            return True
    return False


def convolve(call: Call) -> Layout:
    """Slide a kernel over the trailing dimensions; mix the channels."""
    layout = call.only_input()
    if call.get("transposed"):
        raise RuleError("is a transposed convolution, which has no rule; use upsampling and a plain convolution")
    kernel = call.arguments["weight"].shape[2:]
    axes = len(kernel)
    if len(layout.dimensions) != axes + 2 or not only_channels(layout.dimensions[1]):
        raise RuleError(f"mixes {describe(layout.dimensions[1])}; it needs images x channels x rows x columns")
    stride = call.per_axis(call.get("stride"), axes)
    dilation = call.per_axis(call.get("dilation"), axes)
    if isinstance(call.get("padding"), str):
        same = call.get("padding") == "same"
        padding = [spread * (size - 1) // 2 if same else 0 for size, spread in zip(kernel, dilation, strict=True)]
    else:
        padding = call.per_axis(call.get("padding"), axes)
    windows = list(zip(kernel, stride, padding, dilation, strict=True))
    mixed = layout.replace(1, channel_dimension(call.shape[1]))
    result = read_trailing_taps(mixed, call.shape[2:], lambda axis, _, size: window_taps(size, *windows[axis]))
    for window, count, size in zip(windows, layout.shape[2:], call.shape[2:], strict=True):
        if not any_window_meets_input(count, size, *window):
            # Such a call computes nothing, and with channels_last it ends the process inside torch's CPU library.
            raise UnrunnableError(
                "has only windows that lie wholly in the padding; use less padding or a smaller stride"
            )
    return result


def read_trailing_taps(layout: Layout, shape: Sequence[int], taps: AxisTaps) -> Layout:
    """Return the layout whose last dimensions have `shape` and read those of `layout` through `taps`."""
    dimensions = list(layout.dimensions)
    for axis, size in enumerate(shape):
        index = axis - len(shape)
        count = size_of(dimensions[index])
        dimensions[index] = read_taps(dimensions[index], size, partial(taps, axis, count, size))
    return Layout(tuple(dimensions))


def pool(call: Call) -> Layout | tuple[Layout, ...]:
    """Maximum or mean under a sliding window over the trailing dimensions."""
    layout = call.only_input()
    axes = call.axes
    kernel = call.per_axis(call.get("kernel_size"), axes)
    stride = call.per_axis(call.get("stride") or kernel, axes)
    padding = call.per_axis(call.get("padding"), axes)
    dilation = call.per_axis(call.get("dilation") or 1, axes)
    windows = list(zip(kernel, stride, padding, dilation, strict=True))
    # The sizes come from the graph and so count a last window that `ceil_mode` lets hang over the border.
    result = read_trailing_taps(layout, call.shape[-axes:], lambda axis, _, size: window_taps(size, *windows[axis]))
    return result if len(call.shapes) == 1 else (result,) * len(call.shapes)


def adaptive_pool(call: Call) -> Layout | tuple[Layout, ...]:
    """Pool to a given number of windows: result i reads floor(i n / m), ..., ceil((i + 1) n / m) - 1."""
    layout = call.only_input()

    def taps(axis: int, count: int, size: int) -> Taps:
        if size == 1 < count:
            raise RuleError(f"pools over all {describe(layout.dimensions[axis - call.axes])}")
        index = np.arange(size, dtype=np.int64)
        return span_taps(index * count // size, -(-(index + 1) * count // size) - 1)

    result = read_trailing_taps(layout, call.shape[-call.axes :], taps)
    return result if len(call.shapes) == 1 else (result,) * len(call.shapes)


def span_taps(first: Int64[np.ndarray, " n"], last: Int64[np.ndarray, " n"]) -> Taps:
    """Return the taps first[i], ..., last[i]; shorter rows repeat their last tap."""
    widest = int((last - first).max()) + 1
    return np.asarray(np.minimum(first[:, None] + np.arange(widest, dtype=np.int64), last[:, None]))


def upsample(call: Call) -> Layout:
    """Interpolation: result i reads a few neighbors of its place in the input, clamped to the border.

    Kernels do not agree on that place. Some scale by the given factor, some by the two sizes; those for the
    mode `nearest` take i or i // 2, whatever the factor, where the result has the size of the input or twice
    that; and they round to single precision. So result i is taken to read all that one of them may read.
    """
    layout = call.only_input()
    factors = call.get("scale_factors") or [call.get("scales_h"), call.get("scales_w")]
    before, after = (1, 2) if "cubic" in call.name else (0, 1) if "linear" in call.name else (0, 0)
    corners = bool(call.get("align_corners"))
    centers = not corners and (before + after > 0 or "exact" in call.name)

    def taps(axis: int, count: int, size: int) -> Taps:
        factor = factors[axis]
        steps = [Fraction(count - 1, max(size - 1, 1)) if corners else Fraction(count, size)]
        if factor is not None and factor > 0 and not corners:
            steps.append(1 / Fraction(factor))
        ends = [bound_floor(step, count, size, centers=centers, interpolates=before + after > 0) for step in steps]
        first = np.min([low for low, _ in ends], axis=0) - before
        last = np.max([high for _, high in ends], axis=0) + after
        return np.asarray(np.clip(span_taps(first, last), 0, count - 1))

    return read_trailing_taps(layout, call.shape[-call.axes :], taps)


def bound_floor(step: Fraction, count: int, size: int, *, centers: bool, interpolates: bool) -> tuple[Indices, Indices]:
    """Return the lowest and the highest index that a kernel may take for the floor of a result's place.

    Result i has its place at i step, or at (i + 1/2) step if `centers`, from where a kernel that interpolates
    goes back by 1/2. A kernel computes it in single precision: where that rounds, it may floor to either side
    of an integer.
    """
    index = np.arange(size, dtype=np.float64) + (0.5 if centers else 0.0)
    scaled = index * float(step)
    exact = Fraction(float(np.float32(float(step)))) == step and bool(np.all(scaled.astype(np.float32) == scaled))
    doubt = 0.0 if exact else 1e-6 * (count + 1)
    # Places beyond the border are clamped by every kernel; here early, before they overflow an integer.
    place = np.clip(scaled - (0.5 if centers and interpolates else 0.0), -4, count + 4)
    return np.floor(place - doubt).astype(np.int64), np.floor(place + doubt).astype(np.int64)


def reflect(index: Int64[np.ndarray, " n"], size: int) -> Int64[np.ndarray, " n"]:
    """Return indices mirrored at the first and last entry."""
    return np.asarray((size - 1) - np.abs((size - 1) - np.abs(index)))


def border_taps(name: str, before: int, size: int, after: int) -> Taps:
    """Return what each entry of a padded axis copies; `name` is that of the operation or of its mode."""
    index = np.arange(-before, size + after, dtype=np.int64)
    if "refle" in name:
        index = reflect(index, size)
    elif "repli" in name:
        index = np.clip(index, 0, size - 1)
    elif "constant" not in name:
        raise RuleError("copies positions from the opposite border")
    return np.asarray(index[:, None])


def pad(call: Call) -> Layout:
    """Add entries at the borders: constant ones read nothing, mirrored and repeated ones what they copy."""
    layout = call.only_input()
    name = call.get("mode") or call.name
    amounts = [int(amount) for amount in call.get("pad", "padding")]
    dimensions = list(layout.dimensions)
    for back, (before, after) in enumerate(zip(amounts[0::2], amounts[1::2], strict=True), start=1):
        size = size_of(dimensions[-back])
        taps = partial(border_taps, name, before, size, after)
        if before or after:
            dimensions[-back] = read_taps(dimensions[-back], before + size + after, taps)
    return Layout(tuple(dimensions))


def take_entries(layout: Layout, index: int, entries: range) -> Layout:
    """Return the layout after keeping `entries` of one dimension."""
    dimension = layout.dimensions[index]
    if entries == range(size_of(dimension)):
        return layout
    taken = read_taps(dimension, len(entries), lambda: np.array(entries, dtype=np.int64)[:, None])
    return layout.replace(index, taken)


def slice_entries(call: Call) -> Layout:
    """Keep every `step`-th entry from `start` to `end` of one dimension."""
    layout = call.only_input()
    index = call.get("dim")
    entries = range(layout.shape[index])[call.get("start") : call.get("end") : call.get("step")]
    return take_entries(layout, index, entries)


def narrow(call: Call) -> Layout:
    """Keep `length` entries from `start`."""
    layout = call.only_input()
    entries = range(layout.shape[call.get("dim")])
    start = entries[call.get("start")]
    return take_entries(layout, call.get("dim"), range(start, start + call.get("length")))


def flip(call: Call) -> Layout:
    """Reverse the order of entries."""
    layout = call.only_input()
    for index in call.get("dims"):
        layout = take_entries(layout, index, range(layout.shape[index])[::-1])
    return layout


def split(call: Call) -> tuple[Layout, ...]:
    """Cut one dimension into consecutive pieces."""
    layout = call.only_input()
    index = (call.get("dim") or 0) % len(layout.dimensions)
    pieces: list[Layout] = []
    start = 0
    for shape in call.shapes:
        pieces.append(take_entries(layout, index, range(start, start + shape[index])))
        start += shape[index]
    return tuple(pieces)
