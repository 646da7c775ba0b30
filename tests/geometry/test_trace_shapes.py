"""Sizes in a graph: what is no multiple of the number of images is refused, and so is a rule off its shape."""

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from patchguard.errors import InputError
from patchguard.geometry import trace
from patchguard.geometry.program import trace_field
from patchguard.geometry.rules.layout import Call, Layout, RuleError


def make_symbol(shapes: ShapeEnv, name: str) -> torch.SymInt:
    symbol = shapes.create_symbol(6, source=ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shapes.create_symintnode(symbol, hint=6)
    assert isinstance(size, torch.SymInt)
    return size


def test_only_multiples_of_the_number_of_images_are_sizes() -> None:
    shapes = ShapeEnv()
    images, other, counted = make_symbol(shapes, "a"), make_symbol(shapes, "b"), shapes.create_unbacked_symint()
    assert [trace._size(size) for size in (0, 5, images, 3 * images)] == [0, 5, trace.IMAGES, 3 * trace.IMAGES]
    for size in (images + 1, images // 2, images * images, images * other, images + other, counted, 2 * counted):
        with pytest.raises(RuleError, match="depends on the image, or on the number of images in another way"):
            trace._size(size)
    for size in (trace.IMAGES, 2 * trace.IMAGES):
        with pytest.raises(RuleError, match="which stands for the images here"):
            trace._size(size)


def test_a_size_that_turned_out_to_be_a_number_is_that_number() -> None:
    shapes = ShapeEnv()
    known = {number: torch.SymInt(SymNode(sympy.Integer(number), shapes, int, number)) for number in (5, trace.IMAGES)}
    assert trace._size(known[5]) == 5
    with pytest.raises(RuleError, match="which stands for the images here"):
        trace._size(known[trace.IMAGES])


@torch.library.custom_op("patchguard_tests::shade", mutates_args=())
def shade(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone()


shade.register_fake(torch.empty_like)


class Shaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * shade(self.weight)


def test_an_operation_of_another_library_has_no_rule_even_on_constants() -> None:
    with pytest.raises(InputError, match=r"shade.* has no rule"):
        trace_field(Shaded(), (4, 5))


def test_a_rule_that_expects_another_shape_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_a_row(call: Call) -> Layout:
        images, channels, (rows,), columns = call.only_input().dimensions
        return Layout((images, channels, (type(rows)("row", 3, rows.low[:3], rows.high[:3]),), columns))

    assert trace_field(nn.ReLU(), (4, 5)).grid == (4, 5)
    monkeypatch.setitem(trace.RULES, "relu", drop_a_row)
    with pytest.raises(InputError, match=r"`relu` gives .*3, 4, 5\) where its rule expects .*3, 3, 5\)"):
        trace_field(nn.ReLU(), (4, 5))
