"""Rules for operations that read neighbours along rows and columns: convolution, pooling, padding, crops."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from patchguard.tracing.call import Call
from patchguard.tracing.layout import (
    Dimension,
    Layout,
    Refused,
    channels,
    describe,
    only_channels,
    positions,
    size_of,
)

# Row i holds the indices that result i reads; two axes have their own numbers of results and taps.
Taps = Int64[np.ndarray, "_ _"]


def windowed(dimension: Dimension, taps: Taps) -> Dimension:
    """Return the dimension whose index i reads the indices taps[i, :] of `dimension`."""
    if only_channels(dimension):
        return channels(len(taps))
    return (positions(dimension).taking(taps),)


def sliding(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Taps:
    """Return, for each of `size` results, the indices under a kernel that starts at -padding."""
    first = np.arange(size, dtype=np.int64)[:, None] * stride - padding
    return first + np.arange(kernel, dtype=np.int64)[None, :] * dilation


def convolution(call: Call) -> Layout:
    """Slide a kernel over the trailing dimensions; mix the channels."""
    layout = call.only()
    if call.get("transposed"):
        raise Refused("is a transposed convolution, which has no rule; use upsampling and a plain convolution")
    kernel = call.arguments["weight"].shape[2:]
    axes = len(kernel)
    if len(layout.dimensions) != axes + 2 or not only_channels(layout.dimensions[1]):
        raise Refused(f"mixes {describe(layout.dimensions[1])}; it needs images x channels x rows x columns")
    stride = call.per_axis(call.get("stride"), axes)
    dilation = call.per_axis(call.get("dilation"), axes)
    if isinstance(call.get("padding"), str):
        same = call.get("padding") == "same"
        padding = [spread * (size - 1) // 2 if same else 0 for size, spread in zip(kernel, dilation, strict=True)]
    else:
        padding = call.per_axis(call.get("padding"), axes)
    dimensions = [layout.dimensions[0], channels(call.shape[1])]
    for axis in range(axes):
        taps = sliding(call.shape[2 + axis], kernel[axis], stride[axis], padding[axis], dilation[axis])
        dimensions.append(windowed(layout.dimensions[2 + axis], taps))
    return Layout(tuple(dimensions))


def trailing(layout: Layout, taps: Sequence[Taps]) -> Layout:
    """Return the layout after reading the last dimensions through `taps`, one per dimension."""
    kept = layout.dimensions[: -len(taps)]
    read = zip(layout.dimensions[-len(taps) :], taps, strict=True)
    return Layout((*kept, *(windowed(dimension, indices) for dimension, indices in read)))


def pooling(call: Call) -> Layout | tuple[Layout, ...]:
    """Maximum or mean under a sliding window over the trailing dimensions."""
    layout = call.only()
    axes = call.axes
    kernel = call.per_axis(call.get("kernel_size"), axes)
    stride = call.per_axis(call.get("stride") or kernel, axes)
    padding = call.per_axis(call.get("padding"), axes)
    dilation = call.per_axis(call.get("dilation") or 1, axes)
    # The sizes come from the graph and so count a last window that `ceil_mode` lets hang over the border.
    windows = zip(call.shape[-axes:], kernel, stride, padding, dilation, strict=True)
    result = trailing(layout, [sliding(*window) for window in windows])
    return result if len(call.shapes) == 1 else (result,) * len(call.shapes)


def adaptive_pooling(call: Call) -> Layout | tuple[Layout, ...]:
    """Pool to a given number of windows: result i reads floor(i n / m), ..., ceil((i + 1) n / m) - 1."""
    layout = call.only()
    axes = call.axes
    taps = []
    for size, dimension in zip(call.shape[-axes:], layout.dimensions[-axes:], strict=True):
        count = size_of(dimension)
        if size == 1 < count and not only_channels(dimension):
            raise Refused(f"pools over all {describe(dimension)}")
        start = [i * count // size for i in range(size)]
        stop = [-(-(i + 1) * count // size) for i in range(size)]
        kernel = max(last - first for first, last in zip(start, stop, strict=True))
        windows = zip(start, stop, strict=True)
        taps.append(np.array([[x if x < last else -1 for x in range(s, s + kernel)] for s, last in windows], np.int64))
    result = trailing(layout, taps)
    return result if len(call.shapes) == 1 else (result,) * len(call.shapes)


def upsampling(call: Call) -> Layout:
    """Interpolation: result i reads a few neighbours of its place in the input, clamped to the border.

    A neighbour that a kernel loads but weighs with 0 does not count.
    """
    layout = call.only()
    given = call.get("scale_factors")
    if given is None:
        given = [call.get("scales")] if call.axes == 1 else [call.get("scales_h"), call.get("scales_w")]
    before, after = (1, 2) if "cubic" in call.name else (0, 1) if "linear" in call.name else (0, 0)
    taps = []
    axes = call.axes
    for size, dimension, factor in zip(call.shape[-axes:], layout.dimensions[-axes:], given, strict=True):
        count = size_of(dimension)
        index = np.arange(size, dtype=np.float64)
        if call.get("align_corners"):
            scale, shift = (count - 1) / (size - 1) if size > 1 else 0.0, 0.0
        else:
            scale = 1 / factor if factor else count / size
            shift = 0.5 if before + after or "exact" in call.name else 0.0
        scaled = (index + shift) * scale
        place = scaled - (shift if before + after else 0.0)
        # Kernels compute in single precision: where that rounds, they may floor either way at an integer.
        rounds = np.float32(scale) != scale or np.any(scaled.astype(np.float32) != scaled)
        doubt = 1e-6 * (count + 1) if rounds else 0.0
        first = np.floor(place - doubt).astype(np.int64) - before
        last = np.floor(place + doubt).astype(np.int64) + after
        widest = int((last - first).max()) + 1
        taps.append(np.clip(np.minimum(first[:, None] + np.arange(widest), last[:, None]), 0, count - 1))
    return trailing(layout, taps)


def reflected(index: Int64[np.ndarray, " n"], size: int) -> Int64[np.ndarray, " n"]:
    """Return indices mirrored at the first and last entry."""
    return np.asarray((size - 1) - np.abs((size - 1) - np.abs(index)))


def padding(call: Call) -> Layout:
    """Add entries at the borders: constant ones read nothing, mirrored and repeated ones what they copy."""
    layout = call.only()
    name = call.get("mode") or call.name
    amounts = [int(amount) for amount in call.get("pad", "padding")]
    dimensions = list(layout.dimensions)
    for back, (before, after) in enumerate(zip(amounts[0::2], amounts[1::2], strict=True), start=1):
        size = size_of(dimensions[-back])
        index = np.arange(-before, size + after, dtype=np.int64)
        if "refle" in name:
            index = reflected(index, size)
        elif "repli" in name:
            index = np.clip(index, 0, size - 1)
        elif "constant" not in name:
            raise Refused("copies positions from the opposite border")
        if before or after:
            dimensions[-back] = windowed(dimensions[-back], index[:, None])
    return Layout(tuple(dimensions))


def sliced(layout: Layout, index: int, entries: range) -> Layout:
    """Return the layout after keeping `entries` of one dimension."""
    dimension = layout.dimensions[index]
    if entries == range(size_of(dimension)):
        return layout
    return layout.replacing(index, windowed(dimension, np.array(entries, dtype=np.int64)[:, None]))


def slicing(call: Call) -> Layout:
    """Keep every `step`-th entry from `start` to `end` of one dimension."""
    layout = call.only()
    index = call.get("dim")
    entries = range(layout.shape[index])[call.get("start") : call.get("end") : call.get("step")]
    return sliced(layout, index, entries)


def narrowing(call: Call) -> Layout:
    """Keep `length` entries from `start`."""
    layout = call.only()
    entries = range(layout.shape[call.get("dim")])
    start = entries[call.get("start")]
    return sliced(layout, call.get("dim"), range(start, start + call.get("length")))


def flipping(call: Call) -> Layout:
    """Reverse the order of entries."""
    layout = call.only()
    for index in call.get("dims"):
        layout = sliced(layout, index, range(layout.shape[index])[::-1])
    return layout


def splitting(call: Call) -> tuple[Layout, ...]:
    """Cut one dimension into consecutive pieces."""
    layout = call.only()
    index = (call.get("dim") or 0) % len(layout.dimensions)
    pieces: list[Layout] = []
    start = 0
    for shape in call.shapes:
        pieces.append(sliced(layout, index, range(start, start + shape[index])))
        start += shape[index]
    return tuple(pieces)
