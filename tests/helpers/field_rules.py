"""The rules alone, without the seconds that an export takes; and what a network really reads, by changing pixels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from patchguard.geometry.rules.layout import (
    Call,
    Constant,
    Layout,
    RuleError,
)
from patchguard.geometry.trace import RULES

IMAGES = 1_000_003  # a prime: no view mistakes so many images for channels or positions


class Layer(nn.Module):
    """A function as a layer, with the parts that it needs."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def derive_layout(network: nn.Module, size: tuple[int, int]) -> Layout:
    """What the network's output reads of IMAGES images of `size`, by the rule of each operation in turn."""
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            example = torch.empty(IMAGES, 3, *size, dtype=torch.float64)
        graph = make_fx(network.double().eval(), tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(
            example
        ).graph
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            result: Layout = values[node.args[0]]
            return result
        if node.op == "placeholder":
            values[node] = Layout.of_images(IMAGES, 3, size[0], size[1])
        elif node.op == "get_attr":
            values[node] = Constant(tuple(node.meta["val"].shape))
        else:
            values[node] = _apply_rule(node, values)
    raise AssertionError("a graph ends with its output")


def _apply_rule(node: Node, values: dict[Node, Any]) -> Any:
    if not isinstance(node.target, torch._ops.OpOverload):  # getitem
        return values[node.args[0]][node.args[1]]
    outputs = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    shapes = tuple(tuple(output.shape) for output in outputs)
    name = str(node.target.overloadpacket).removeprefix("aten.")
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False))
    arguments = {
        argument.name: _value(given.get(argument.name, node.kwargs.get(argument.name, argument.default_value)), values)
        for argument in node.target._schema.arguments
    }
    call = Call(name, arguments, shapes)
    if name.endswith("_like") or not call.inputs():
        return Constant(shapes[0])
    result = RULES[name](call)
    for layout, shape in zip(result if isinstance(result, tuple) else (result,), shapes, strict=False):
        assert layout.shape == shape, name
    return result


def _value(argument: Any, values: dict[Node, Any]) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_value(entry, values) for entry in argument]
    return values[argument] if isinstance(argument, Node) else argument


def allowed_pixels(network: nn.Module, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of pixels each row of cells may read by the rules, and the same for columns."""
    _, _, (rows,), (columns,) = derive_layout(network, size).dimensions
    assert (rows.kind, columns.kind) == ("row", "column")
    return tuple(
        (factor.low[:, None] <= np.arange(count)) & (np.arange(count) <= factor.high[:, None])
        for factor, count in zip((rows, columns), size, strict=True)
    )


def observed_pixels(
    network: nn.Module, size: tuple[int, int], layout: torch.memory_format
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of cells really move with which rows of pixels, in double precision; the same for columns."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with torch.no_grad():
        for axis, count in enumerate(size):
            moved = False
            for strength in (1.0, 30.0):
                base, other = (torch.randn(1, 3, *size, generator=generator, dtype=torch.float64) for _ in range(2))
                changed = base.repeat(count, 1, 1, 1)
                for index in range(count):
                    changed[index].select(axis + 1, index).copy_(strength * other[0].select(axis + 1, index))
                before, after = (network(x.contiguous(memory_format=layout)).double() for x in (base, changed))
                moved = moved | ((after - before).abs().amax((1, 3 - axis)) > 1e-9).numpy().T
            found.append(moved)
    return found[0], found[1]


def check_field(network: nn.Module, size: tuple[int, int], *, exact: bool = False) -> None:
    """No cell moves with a pixel outside its box; if `exact`, the first and last pixel of every box move it."""
    may = allowed_pixels(network, size)
    for layout in (torch.contiguous_format, torch.channels_last):
        for allowed, moved in zip(may, observed_pixels(network, size, layout), strict=True):
            assert moved.any()
            assert not (moved & ~allowed).any()
            if exact:
                upward, downward = (np.maximum.accumulate(moved[:, ::step], axis=1)[:, ::step] for step in (1, -1))
                assert ((upward & downward) == allowed).all()


def check_batch_rows(network: nn.Module, size: tuple[int, int]) -> None:
    """Each row of a batch of 1, 2, 3 or 4 images is what the network gives for that image alone."""
    network.double().eval()
    batch = torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        alone = torch.cat([network(image[None]) for image in batch])
        assert alone.shape[0] == 4
        for count in (1, 2, 3, 4):
            together = network(batch[:count].contiguous(memory_format=torch.channels_last))
            torch.testing.assert_close(together, alone[:count], rtol=1e-9, atol=1e-9)


def refusal_reason(network: nn.Module, size: tuple[int, int]) -> str:
    """Why the rules refuse the network."""
    try:
        derive_layout(network, size)
    except RuleError as reason:
        return str(reason)
    raise AssertionError("not refused")
