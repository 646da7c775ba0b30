"""Rules for operations that work entry by entry, or only move entries to another place in the tensor."""

import numpy as np

from patchguard.geometry.rules.call import Call
from patchguard.geometry.rules.layout import (
    Dimension,
    Factor,
    Layout,
    Refused,
    blank,
    channels,
    describe,
    join,
    only_channels,
    positions,
    reducible,
)


def elementwise(call: Call) -> Layout:
    """Entry i of the result depends on entry i of every argument, after broadcasting."""
    return join(call.layouts(), call.shape)


def unchanged(call: Call) -> Layout:
    """Entry i of the result depends on entry i of the first argument and on constants."""
    layout = call.only()
    if layout.shape != call.shape:
        raise Refused("changes the shape")
    return layout


def dropout(call: Call) -> Layout:
    """Dropout that is switched off."""
    if call.get("train", "training"):
        raise Refused("drops entries at random")
    return unchanged(call)


def concatenation(call: Call) -> Layout:
    """Put tensors behind each other along one dimension."""
    parts = call.get("tensors")
    index = call.get("dim") % len(call.shape)
    pieces: list[Dimension] = []
    sides: list[Layout] = []
    along = call.layouts()[0].dimensions[index]
    for part in parts:
        if isinstance(part, Layout):
            pieces.append(part.dimensions[index])
            sides.append(part)
        else:
            size = part.shape[index]
            pieces.append(channels(size) if only_channels(along) else (blank(positions(along), size),))
    if all(only_channels(piece) for piece in pieces):
        whole = channels(call.shape[index])
    else:
        factors = [positions(piece) for piece in pieces]
        if len({factor.kind for factor in factors}) > 1:
            raise Refused("puts rows behind columns")
        low = np.concatenate([factor.low for factor in factors])
        whole = (Factor(factors[0].kind, len(low), low, np.concatenate([factor.high for factor in factors])),)
    # Along the other dimensions the parts share positions, which now read what any part reads there.
    aligned = [side.replacing(index, whole) for side in sides]
    return join(aligned, call.shape)


def stacking(call: Call) -> Layout:
    """Put tensors behind each other along a new dimension of channels."""
    index = call.get("dim") % len(call.shape)
    layout = join(call.layouts(), call.shape[:index] + call.shape[index + 1 :])
    return Layout((*layout.dimensions[:index], channels(call.shape[index]), *layout.dimensions[index:]))


def view(call: Call) -> Layout:
    """Keep the entries and their order under another shape."""
    if "dtype" in call.arguments:
        raise Refused("reads the bits of its input as another type")
    return call.only().viewed(call.shape)


def permutation(call: Call) -> Layout:
    """Reorder the dimensions."""
    layout = call.only()
    count = len(layout.dimensions)
    order = list(range(count))
    if call.name == "permute":
        order = [index % count for index in call.get("dims")]
    elif call.name == "t":
        order.reverse()
    else:
        first, second = call.get("dim0") % count, call.get("dim1") % count
        order[first], order[second] = second, first
    return Layout(tuple(layout.dimensions[index] for index in order))


def expansion(call: Call) -> Layout:
    """Repeat single channels."""
    return call.only().expanded(call.shape)


def selection(call: Call) -> Layout:
    """Keep one channel and drop the dimension."""
    layout = call.only()
    index = call.get("dim") % len(layout.dimensions)
    if not only_channels(layout.dimensions[index]):
        raise Refused(f"picks one of the {describe(layout.dimensions[index])}; slice instead, which keeps positions")
    return Layout(layout.dimensions[:index] + layout.dimensions[index + 1 :])


def squeezing(call: Call) -> Layout:
    """Drop dimensions of one channel."""
    layout = call.only()
    dim = call.get("dim")
    count = len(layout.dimensions)
    asked = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    for index in asked:
        if any(factor.kind == "image" for factor in layout.dimensions[index]):
            raise Refused("drops the images of a batch of one; name the dimensions to drop")
    dropped = reducible(layout, [index for index in asked if layout.shape[index] == 1])
    return Layout(tuple(d for index, d in enumerate(layout.dimensions) if index not in dropped))


def unsqueezing(call: Call) -> Layout:
    """Add a dimension of one channel."""
    layout = call.only()
    index = call.get("dim") % len(call.shape)
    return Layout((*layout.dimensions[:index], (), *layout.dimensions[index:]))
