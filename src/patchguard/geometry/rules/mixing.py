"""Rules for operations that mix along whole dimensions: reductions, normalisation, matrix products."""

from patchguard.geometry.rules.call import Call
from patchguard.geometry.rules.layout import Dimension, Layout, Refused, channels, join, only_channels, reducible
from patchguard.geometry.rules.shaping import elementwise


def reduction(call: Call) -> Layout | tuple[Layout, ...]:
    """Sum, mean, maximum, ... over channels. Without a dimension it runs over everything and is refused."""
    if "other" in call.arguments:
        return elementwise(call)
    layout = call.only()
    dim = call.get("dim")
    every = list(range(len(layout.dimensions)))
    chosen = reducible(layout, every if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim)
    results: list[Layout] = []
    for shape in call.shapes:
        keeps = len(shape) == len(layout.dimensions)
        dimensions = ((() if index in chosen else layout.dimensions[index]) for index in every)
        results.append(Layout(tuple(d for index, d in enumerate(dimensions) if keeps or index not in chosen)))
    return results[0] if len(results) == 1 else tuple(results)


def along_channels(call: Call) -> Layout:
    """Softmax and running sums: an entry depends on those that differ from it only in the channel."""
    layout = call.only()
    reducible(layout, [call.get("dim")])
    return layout


def layer_norm(call: Call) -> Layout | tuple[Layout, ...]:
    """Normalisation with statistics over the last dimensions, which must be channels."""
    layout = call.only()
    chosen = reducible(layout, range(-len(call.get("normalized_shape")), 0))
    if len(call.shapes) == 1:
        return layout
    kept = (() if index in chosen else dimension for index, dimension in enumerate(layout.dimensions))
    statistics = Layout(tuple(kept))
    return layout, statistics, statistics


def batch_norm(call: Call) -> Layout | tuple[Layout, ...]:
    """Normalisation with stored statistics: an affine map per channel."""
    if call.get("training") or call.get("running_mean") is None or call.get("running_var") is None:
        raise Refused(
            "normalises with statistics of the batch, which mix all positions and images; "
            "store running statistics and call it in evaluation mode"
        )
    layout = call.only()
    # The further results, saved statistics, are empty here; nothing may read them.
    return layout if len(call.shapes) == 1 else (layout,)


def linear(call: Call) -> Layout:
    """Mix the channels of the last dimension with constant weights."""
    layout = call.only()
    reducible(layout, [-1])
    return layout.replacing(-1, channels(call.shape[-1]))


def matrix_product(call: Call) -> Layout:
    """Contract the last dimension of one tensor with the last but one of another; both must hold channels."""
    operands = list(call.arguments.values())
    summand = operands.pop(0) if call.name in ("addmm", "baddbmm") else None
    first, second = operands[:2]
    rank = len(call.shape)
    if any(len(factor.shape) < 2 for factor in (first, second)):
        raise Refused("multiplies vectors, which has no rule")
    both = isinstance(first, Layout) and isinstance(second, Layout)
    if both and not only_channels(first.dimensions[-2]) and not only_channels(second.dimensions[-1]):
        raise Refused("pairs every position with every other")
    terms = [summand] if isinstance(summand, Layout) else []
    for factor, contracted, free in ((first, -1, -2), (second, -2, -1)):
        if isinstance(factor, Layout):
            reducible(factor, [contracted])
            dimensions: list[Dimension] = [*factor.dimensions[:-2], (), ()]
            dimensions[free] = factor.dimensions[free]
            terms.append(Layout(((),) * (rank - len(dimensions)) + tuple(dimensions)))
    # An entry of the result belongs to one position, so both factors must bring it in the same place.
    return join(terms, call.shape)
