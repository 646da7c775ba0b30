"""Rules for operations that work entry by entry, or only move entries to another place in the tensor."""

import numpy as np

from patchguard.geometry.rules.layout import (
    Call,
    Dimension,
    Factor,
    Layout,
    RuleError,
    blank_positions,
    channel_dimension,
    describe,
    join,
    only_channels,
    position_factor,
    require_channels,
)


def elementwise(call: Call) -> Layout:
    """Entry i of the result depends on entry i of every argument, after broadcasting."""
    return join(call.inputs(), call.shape)


def first_input_elementwise(call: Call) -> Layout:
    """Entry i of the result depends on entry i of the first argument and on constants."""
    layout = call.only_input()
    if layout.shape != call.shape:
        raise RuleError("changes the shape")
    return layout


def dropout(call: Call) -> Layout:
    """Dropout that is switched off."""
    if call.get("train", "training"):
        raise RuleError("drops entries at random")
    return first_input_elementwise(call)


def cat(call: Call) -> Layout:
    """Put tensors behind each other along one dimension."""
    parts = call.get("tensors")
    index = call.get("dim") % len(call.shape)
    pieces: list[Dimension] = []
    sides: list[Layout] = []
    along = call.inputs()[0].dimensions[index]
    for part in parts:
        if isinstance(part, Layout):
            pieces.append(part.dimensions[index])
            sides.append(part)
        else:
            size = part.shape[index]
            pieces.append(
                channel_dimension(size) if only_channels(along) else (blank_positions(position_factor(along), size),)
            )
    if all(only_channels(piece) for piece in pieces):
        whole = channel_dimension(call.shape[index])
    else:
        factors = [position_factor(piece) for piece in pieces]
        if len({factor.kind for factor in factors}) > 1:
            raise RuleError("puts rows behind columns")
        low = np.concatenate([factor.low for factor in factors])
        whole = (Factor(factors[0].kind, len(low), low, np.concatenate([factor.high for factor in factors])),)
    # Along the other dimensions the parts share positions, which now read what any part reads there.
    aligned = [side.replace(index, whole) for side in sides]
    return join(aligned, call.shape)


def stack(call: Call) -> Layout:
    """Put tensors behind each other along a new dimension of channels."""
    index = call.get("dim") % len(call.shape)
    layout = join(call.inputs(), call.shape[:index] + call.shape[index + 1 :])
    return Layout((*layout.dimensions[:index], channel_dimension(call.shape[index]), *layout.dimensions[index:]))


def view(call: Call) -> Layout:
    """Keep the entries and their order under another shape."""
    if "dtype" in call.arguments:
        raise RuleError("reads the bits of its input as another type")
    return call.only_input().view(call.shape)


def permute(call: Call) -> Layout:
    """Reorder the dimensions."""
    layout = call.only_input()
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


def expand(call: Call) -> Layout:
    """Repeat single channels."""
    return call.only_input().expand(call.shape)


def select(call: Call) -> Layout:
    """Keep one channel and drop the dimension."""
    layout = call.only_input()
    index = call.get("dim") % len(layout.dimensions)
    if not only_channels(layout.dimensions[index]):
        raise RuleError(f"picks one of the {describe(layout.dimensions[index])}; slice instead, which keeps positions")
    return Layout(layout.dimensions[:index] + layout.dimensions[index + 1 :])


def squeeze(call: Call) -> Layout:
    """Drop dimensions of one channel."""
    layout = call.only_input()
    dim = call.get("dim")
    count = len(layout.dimensions)
    indices = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    for index in indices:
        if any(factor.kind == "image" for factor in layout.dimensions[index]):
            raise RuleError("drops the images of a batch of one; name the dimensions to drop")
    dropped = require_channels(layout, [index for index in indices if layout.shape[index] == 1])
    return Layout(tuple(d for index, d in enumerate(layout.dimensions) if index not in dropped))


def unsqueeze(call: Call) -> Layout:
    """Add a dimension of one channel."""
    layout = call.only_input()
    index = call.get("dim") % len(call.shape)
    return Layout((*layout.dimensions[:index], (), *layout.dimensions[index:]))


# -- channels ----------------------------------------------------------------------------------------------------------


def reduce(call: Call) -> Layout | tuple[Layout, ...]:
    """Sum, mean, maximum, ... over channels. Without a dimension it runs over everything and is refused."""
    if "other" in call.arguments:
        return elementwise(call)
    layout = call.only_input()
    dim = call.get("dim")
    every = list(range(len(layout.dimensions)))
    reduced = require_channels(layout, every if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim)
    results: list[Layout] = []
    for shape in call.shapes:
        keeps = len(shape) == len(layout.dimensions)
        dimensions = ((() if index in reduced else layout.dimensions[index]) for index in every)
        results.append(Layout(tuple(d for index, d in enumerate(dimensions) if keeps or index not in reduced)))
    return results[0] if len(results) == 1 else tuple(results)


def softmax(call: Call) -> Layout:
    """Softmax and running sums: an entry depends on those that differ from it only in the channel."""
    layout = call.only_input()
    require_channels(layout, [call.get("dim")])
    return layout


def layer_norm(call: Call) -> Layout | tuple[Layout, ...]:
    """Normalization with statistics over the last dimensions, which must be channels."""
    layout = call.only_input()
    reduced = require_channels(layout, range(-len(call.get("normalized_shape")), 0))
    if len(call.shapes) == 1:
        return layout
    dimensions = (() if index in reduced else dimension for index, dimension in enumerate(layout.dimensions))
    statistics = Layout(tuple(dimensions))
    return layout, statistics, statistics


def batch_norm(call: Call) -> Layout | tuple[Layout, ...]:
    """Normalization with stored statistics: an affine map per channel."""
    if call.get("training") or call.get("running_mean") is None or call.get("running_var") is None:
        raise RuleError(
            "normalizes with statistics of the batch, which mix all positions and images; "
            "store running statistics and call it in evaluation mode"
        )
    layout = call.only_input()
    # The further results, saved statistics, are empty here; nothing may read them.
    return layout if len(call.shapes) == 1 else (layout,)


def linear(call: Call) -> Layout:
    """Mix the channels of the last dimension with constant weights."""
    layout = call.only_input()
    require_channels(layout, [-1])
    return layout.replace(-1, channel_dimension(call.shape[-1]))


def matmul(call: Call) -> Layout:
    """Contract the last dimension of one tensor with the last but one of another; both must hold channels."""
    operands = list(call.arguments.values())
    summand = operands.pop(0) if call.name in ("addmm", "baddbmm") else None
    first, second = operands[:2]
    rank = len(call.shape)
    if any(len(factor.shape) < 2 for factor in (first, second)):
        raise RuleError("multiplies vectors, which has no rule")
    both = isinstance(first, Layout) and isinstance(second, Layout)
    if both and not only_channels(first.dimensions[-2]) and not only_channels(second.dimensions[-1]):
        raise RuleError("pairs every position with every other")
    terms = [summand] if isinstance(summand, Layout) else []
    for factor, contracted, free in ((first, -1, -2), (second, -2, -1)):
        if isinstance(factor, Layout):
            require_channels(factor, [contracted])
            dimensions: list[Dimension] = [*factor.dimensions[:-2], (), ()]
            dimensions[free] = factor.dimensions[free]
            terms.append(Layout(((),) * (rank - len(dimensions)) + tuple(dimensions)))
    # An entry of the result belongs to one position, so both factors must bring it in the same place.
    return join(terms, call.shape)
