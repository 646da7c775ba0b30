"""Convolutions at the edge: those that read nothing but padding are refused, all others run in Guard's layout."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from helpers.field_rules import Layer, check_field, derive_layout, refusal_reason
from torch import nn
from torch.nn import functional

from patchguard.errors import InputError
from patchguard.geometry.rules.layout import Call, Constant, Layout, RuleError
from patchguard.geometry.rules.neighborhood import any_window_meets_input, convolve, window_taps
from patchguard.models import wrap

ONLY_PADDING = "has only windows that lie wholly in the padding"


def test_a_convolution_that_reads_only_padding_is_refused() -> None:
    # Windows start at -3, -1 and 1 and read every second column: none of them holds column 0.
    layer = nn.Conv2d(3, 2, 2, stride=(3, 2), padding=(0, 3), dilation=(1, 2))
    with pytest.raises(InputError, match=f"`conv2d` {ONLY_PADDING}"):
        wrap(layer, classes=2).field(5, 1)


def test_rows_and_single_axes_are_held_to_the_same() -> None:
    assert ONLY_PADDING in refusal_reason(nn.Conv2d(3, 2, 1, stride=(2, 1), padding=(1, 0)), (1, 5))
    flat = nn.Conv1d(3, 2, 1, stride=2, padding=1)
    assert ONLY_PADDING in refusal_reason(Layer(lambda x, f: f(x.permute(0, 2, 1, 3).flatten(0, 1)), flat), (4, 1))


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(3, 2, 7, stride=2, padding=3), (1, 1)),
        (nn.Conv2d(3, 2, 3, stride=2, padding=1), (1, 2)),
        (nn.Conv2d(3, 2, 1, padding=1), (1, 1)),
        (nn.Conv2d(3, 2, 3, padding=2, dilation=2), (1, 1)),
        (nn.Conv2d(3, 2, 1, stride=2), (1, 2)),
    ],
)
def test_small_images_may_meet_large_kernels(layer: nn.Module, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    check_field(layer, size, exact=True)


def test_whether_a_window_meets_the_input_agrees_with_all_its_taps() -> None:
    answers = []
    for count, kernel, stride, padding, dilation in product((1, 2, 5), (1, 2, 3), (1, 2, 3), range(5), (1, 2, 3)):
        size = (count + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if size > 0:
            taps = window_taps(size, kernel, stride, padding, dilation)
            answers.append(bool(((taps >= 0) & (taps < count)).any()))
            assert any_window_meets_input(count, size, kernel, stride, padding, dilation) == answers[-1]
    assert 10 < answers.count(False) < answers.count(True)


# Run apart: where the rule lets a wrong one through, torch's CPU library ends the process.
MANY = """
import random
import torch
from torch import nn
from patchguard.geometry.rules.layout import Call, Constant, Layout, RuleError
from patchguard.geometry.rules.neighborhood import convolve

chance = random.Random(0)
accepted = refused = 0
with torch.no_grad():
    while accepted + refused < 500:
        size = chance.randint(1, 9), chance.randint(1, 3)
        kernel, dilation = ((chance.randint(1, 3), chance.randint(1, 2)) for _ in range(2))
        stride, padding = ((chance.randint(low, 3), chance.randint(low, 3)) for low in (1, 0))
        inside, outside = chance.choice([1, 3, 8]), chance.choice([1, 2, 16])
        layer = nn.Conv2d(inside, outside, kernel, stride, padding, dilation).eval()
        axes = zip(size, kernel, stride, padding, dilation)
        shape = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
        if min(shape) < 1:
            continue
        image = Layout.of_images(7, inside, size[0], size[1])
        names = {"input": image, "weight": Constant(tuple(layer.weight.shape)), "stride": list(stride)}
        names |= {"padding": list(padding), "dilation": list(dilation)}
        try:
            convolve(Call("conv2d", names, ((7, outside, *shape),)))
        except RuleError:
            refused += 1
            continue
        accepted += 1
        for batch in (1, 2, 3):
            layer(torch.rand(batch, inside, *size).contiguous(memory_format=torch.channels_last))
print(accepted, refused)
"""


def test_every_convolution_that_is_not_refused_runs_with_its_channels_last() -> None:
    run = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    accepted, refused = map(int, run.stdout.split())
    assert accepted > 400
    assert refused > 20


def test_a_kernel_from_the_image_is_refused() -> None:
    message = "takes weights or settings that depend on the image"
    assert refusal_reason(Layer(lambda x: functional.conv2d(x, x)), (4, 5)) == message
    assert refusal_reason(Layer(lambda x: functional.conv2d(torch.ones(2, 3, 9, 9), x)), (4, 5)) == message


def test_a_kernel_over_images_or_merged_positions_is_refused() -> None:
    layer = nn.Conv2d(3, 3, 1)
    assert "images of the batch" in refusal_reason(Layer(lambda x, f: f(x.permute(2, 1, 0, 3)), layer), (4, 5))
    assert "images of the batch" in refusal_reason(Layer(lambda x, f: f(x.permute(3, 1, 2, 0)), layer), (4, 5))
    rows = nn.Conv2d(4, 4, 1)
    assert "mixes rows" in refusal_reason(Layer(lambda x, f: f(x.transpose(1, 2)), rows), (4, 5))


def test_a_convolution_along_one_axis_reads_rows_or_columns() -> None:
    torch.manual_seed(0)

    def along_columns(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        batch, _, rows, _ = x.shape
        lines = layer(x.permute(0, 2, 1, 3).flatten(0, 1))  # (batch rows, channels, columns)
        return lines.view(batch, rows, *lines.shape[1:]).permute(0, 2, 1, 3)

    network = Layer(along_columns, nn.Conv1d(3, 2, 3, stride=2, padding=1, dilation=2))
    check_field(network, (4, 9), exact=True)
    assert derive_layout(network, (4, 9)).shape[2:] == (4, 4)


def test_a_transposed_convolution_has_no_rule() -> None:
    arguments = {"input": Layout.of_images(7, 3, 5, 6), "weight": Constant((3, 2, 1, 1)), "bias": None}
    arguments |= {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False}
    assert convolve(Call("convolution", arguments, ((7, 2, 5, 6),))).shape == (7, 2, 5, 6)
    with pytest.raises(RuleError, match="is a transposed convolution"):
        convolve(Call("convolution", arguments | {"transposed": True}, ((7, 2, 5, 6),)))
