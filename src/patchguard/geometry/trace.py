"""`derive_field`: the field of a network from its exported graph, operation by operation, or why there is none."""

import operator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from patchguard.errors import InputError, NoFieldError
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.rules import neighborhood, pointwise
from patchguard.geometry.rules.layout import (
    Call,
    Constant,
    Layout,
    Rule,
    RuleError,
    UnrunnableError,
    describe,
    only_channels,
)

_ENTRY_BY_ENTRY = """
    abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone contiguous cos cosh detach
    detach_ div elu eq erf erfc exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod
    frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu
    lerp lift_fresh_copy log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply ne neg negative
    pow reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinh
    softplus softshrink sqrt square sub subtract tan tanh threshold to _to_copy true_divide trunc
    where xlogy
"""
_OVER_CHANNELS = (
    "all amax amin any argmax argmin linalg_vector_norm logsumexp max mean min norm prod std sum var var_mean"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ENTRY_BY_ENTRY.split(), pointwise.elementwise),
    **dict.fromkeys(("prelu", "_prelu_kernel"), pointwise.first_input_elementwise),
    "dropout": pointwise.dropout,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten"), pointwise.view),
    **dict.fromkeys(("permute", "transpose", "t"), pointwise.permute),
    "expand": pointwise.expand,
    "select": pointwise.select,
    "squeeze": pointwise.squeeze,
    "unsqueeze": pointwise.unsqueeze,
    **dict.fromkeys(("cat", "concat"), pointwise.cat),
    "stack": pointwise.stack,
    **dict.fromkeys(("convolution", "conv1d", "conv2d"), neighborhood.convolve),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool2d_with_indices"), neighborhood.pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d"), neighborhood.pool),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d"), neighborhood.adaptive_pool),
    "adaptive_max_pool2d": neighborhood.adaptive_pool,
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), neighborhood.upsample),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d"), neighborhood.upsample),
    **dict.fromkeys(("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d"), neighborhood.pad),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d"), neighborhood.pad),
    "slice": neighborhood.slice_entries,
    "narrow": neighborhood.narrow,
    "flip": neighborhood.flip,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), neighborhood.split),
    **dict.fromkeys(_OVER_CHANNELS.split(), pointwise.reduce),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), pointwise.softmax),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), pointwise.layer_norm),
    **dict.fromkeys(("batch_norm", "native_batch_norm", "_native_batch_norm_legit"), pointwise.batch_norm),
    "_native_batch_norm_legit_no_training": pointwise.batch_norm,
    "linear": pointwise.linear,
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm"), pointwise.matmul),
}

_MIXERS = {
    "instance_norm": "normalizes with statistics over all rows and columns",
    "group_norm": "normalizes with statistics over all rows and columns",
    "native_group_norm": "normalizes with statistics over all rows and columns",
    "scaled_dot_product_attention": "lets every position attend to every other",
    "multi_head_attention_forward": "lets every position attend to every other",
}
_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_CHECKS = {"_assert_tensor_metadata", "_assert_scalar"}

# Operations that may take the number of images as a size: they give every image the same.
_TAKES_SIZES = {
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "full",
    "zeros",
    "ones",
    "new_full",
    "new_zeros",
    "new_ones",
}
# Operations that keep a constant the same for every image.
_KEEPS_IMAGES_EQUAL = {*_ENTRY_BY_ENTRY.split(), *_SHAPE_ONLY, "expand", "unsqueeze", "permute", "transpose"}

# A prime in place of the number of images. Every size in a graph is a whole number or a multiple of the number of
# images, and no whole number here is a multiple of this prime: sizes that agree, or divide each other, for this number
# of images do so for every other number.
IMAGES = 1_000_003


def derive_field(
    program: ExportedProgram, module: nn.Module, height: int, width: int
) -> tuple[Field, tuple[tuple[str, Field], ...]]:
    """Return which pixels of a `height` x `width` image each cell of the program's output (B, K, U, V) can read.

    The same follows for every layer on the way, by name. `program` is functional, with a symbolic number of images;
    `module` is the network it was exported from, only used to name layers.
    """
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        names = ", ".join((*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()))
        raise InputError(
            "`module` must not write to its input or its buffers, where one image would reach the next; "
            f"it writes to {names}. Write to a copy."
        )
    inputs = {spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values: dict[Node, Any] = {}
    layers: list[tuple[str, Field]] = []
    for node in program.graph.nodes:
        try:
            if node.op == "placeholder" and node.name in inputs:
                values[node] = Layout.of_images(IMAGES, _shapes(node)[0][1], height, width)
            elif node.op == "output":
                return _cells(_resolve(node.args[0], values), height, width), tuple(layers)
            elif node.op in ("placeholder", "get_attr"):
                values[node] = Constant(_shapes(node)[0])
            elif isinstance(node.meta.get("val"), (int, torch.SymInt)):
                values[node] = _size(node.meta["val"])
            else:
                values[node] = result = _result(node, values)
                if isinstance(result, Layout):
                    layers.append((_layer(node, module), _positions(result, height, width)))
        except RuleError as refusal:
            error = InputError if isinstance(refusal, UnrunnableError) else NoFieldError
            raise error(
                f"the field of {_layer(node, module)} cannot be bounded: {_operation(node)} {refusal}. "
                "Use layers that read a bounded neighborhood, or show the network bands of the image (`Ablation`)."
            ) from None
    raise AssertionError("an exported graph ends with its output")


def _result(node: Node, values: dict[Node, Any]) -> Any:
    arguments = _arguments(node, values)
    if node.target is operator.getitem:
        sequence, index = arguments.values()
        if isinstance(sequence, Constant) or index >= len(sequence):
            raise RuleError("reads a result that has no rule")
        return sequence[index]
    name = _name(node)
    if name in _CHECKS:
        return None
    shapes = _shapes(node)
    call = Call(name, arguments, shapes)
    if name not in _TAKES_SIZES and any(
        isinstance(each.meta.get("val"), torch.SymInt) for each in node.all_input_nodes
    ):
        raise RuleError("computes with the number of images in the batch")
    if name in _SHAPE_ONLY or not call.inputs():
        return _constant(node, call)
    if name in _MIXERS:
        raise RuleError(_MIXERS[name])
    if name not in RULES:
        raise RuleError("has no rule, so it may mix positions")
    result = RULES[name](call)
    for layout, shape in zip(result if isinstance(result, tuple) else (result,), shapes, strict=False):
        if layout.shape != shape:
            raise RuleError(f"gives {shape} where its rule expects {layout.shape}")
        factors = [factor for dimension in layout.dimensions for factor in dimension]
        if any(factor.size % IMAGES == 0 for factor in factors if factor.kind != "image"):
            raise RuleError("counts its channels by the number of images in the batch")
    return result


def _constant(node: Node, call: Call) -> Constant | tuple[Constant, ...]:
    """Return a tensor that does not depend on any image, nor on the place or the number of images in the batch."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        raise RuleError("has no rule")
    if torch.Tag.nondeterministic_seeded in node.target.tags or "empty" in call.name:
        raise RuleError("gives another result in every call")
    flat = [entry for value in call.arguments.values() for entry in (value if isinstance(value, list) else [value])]
    spread = [entry for entry in flat if isinstance(entry, Constant) and any(n % IMAGES == 0 for n in entry.shape if n)]
    if spread and call.name not in _KEEPS_IMAGES_EQUAL:
        raise RuleError("computes with the number of images in the batch")
    constants = tuple(Constant(shape) for shape in call.shapes)
    return constants if isinstance(node.meta["val"], (list, tuple)) else constants[0]


def _resolve(argument: Any, values: dict[Node, Any]) -> Any:
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, (list, tuple)):
        return [_resolve(entry, values) for entry in argument]
    return argument


def _arguments(node: Node, values: dict[Node, Any]) -> dict[str, Any]:
    """Return the arguments of a call under the names that the operation's schema gives them."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(index): _resolve(argument, values) for index, argument in enumerate(node.args)}
    named: dict[str, Any] = {}
    for index, parameter in enumerate(node.target._schema.arguments):
        default = node.kwargs.get(parameter.name, parameter.default_value)
        named[parameter.name] = _resolve(node.args[index] if index < len(node.args) else default, values)
    return named


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    shapes: list[tuple[int, ...]] = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise RuleError("turns tensors into something else, which has no rule")
        shapes.append(tuple(_size(size) for size in tensor.shape))
    return tuple(shapes)


def _size(size: int | torch.SymInt) -> int:
    """Return a size in the graph, with `IMAGES` for the number of images; refuse any but multiples of it."""
    if isinstance(size, int):
        if size and size % IMAGES == 0:
            raise RuleError(
                f"has a dimension of {size} entries, a multiple of {IMAGES}, which stands for the images here"
            )
        return size
    symbols = size.node.expr.free_symbols
    if not symbols:
        return _size(int(size.node.expr))
    symbol = next(iter(symbols))
    factor, rest = size.node.expr.as_independent(symbol, as_Add=False)
    if len(symbols) > 1 or rest != symbol or not factor.is_Integer or not str(symbol).startswith("s"):
        raise RuleError("gives a tensor whose shape depends on the image, or on the number of images in another way")
    return _size(int(factor)) * IMAGES


def _name(node: Node) -> str:
    """Return the operation's plain name, `conv2d` for `aten.conv2d.default`; others keep their prefix."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return str(node.target.overloadpacket).removeprefix("aten.")
    return str(node.target)


def _operation(node: Node) -> str:
    return "its result" if node.op == "output" else f"`{_name(node)}`"


def _layer(node: Node, module: nn.Module) -> str:
    """Return the layer that an operation belongs to: its path in the network and its class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", type(module).__name__)
    kind = str(getattr(kind, "__name__", kind)).rsplit(".", 1)[-1]
    path = str(path).removeprefix("L['self']").lstrip(".")
    return f"layer `{path}` ({kind})" if path else f"`{kind}`"


def _positions(layout: Layout, height: int, width: int) -> Field:
    """Return which pixels each row and column of a tensor reads, wherever in its shape they lie."""
    factors = {factor.kind: factor for dimension in layout.dimensions for factor in dimension}
    rows, columns = factors["row"], factors["column"]
    return Field(Axis.from_bounds(rows.low, rows.high, height), Axis.from_bounds(columns.low, columns.high, width))


def _cells(outputs: Any, height: int, width: int) -> Field:
    if len(outputs) != 1 or not isinstance(outputs[0], (Layout, Constant)):
        raise RuleError(f"holds {len(outputs)} values where one tensor of local logits (B, K, U, V) is wanted")
    layout = outputs[0]
    if isinstance(layout, Constant):
        raise RuleError("does not depend on the image")
    words = [describe(dimension) for dimension in layout.dimensions]
    wanted = ["images of the batch", "channels", "rows", "columns"]
    if len(words) != 4 or not only_channels(layout.dimensions[1]) or [words[0], *words[2:]] != [wanted[0], *wanted[2:]]:
        raise RuleError(f"runs over ({', '.join(words)}) where local logits run over ({', '.join(wanted)})")
    return _positions(layout, height, width)
