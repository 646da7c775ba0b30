"""The rule for upsampling against torch's own kernels: what they read, in every mode, layout and at every size."""

import math
import random

import numpy as np
import pytest
import torch
from helpers.field_rules import Layer, check_field, derive_layout
from torch import nn
from torch.nn import functional

from patchguard.defenses import ClippedSum
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.rules.layout import Call, Layout
from patchguard.geometry.rules.neighborhood import upsample
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

OPERATIONS = {
    "nearest": "upsample_nearest2d",
    "nearest-exact": "_upsample_nearest_exact2d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
}
TAPS = {"nearest": 1, "nearest-exact": 1, "bilinear": 2, "bicubic": 4}
MODES = [("nearest", None), ("nearest-exact", None)]
MODES += [(mode, corners) for mode in ("bilinear", "bicubic") for corners in (False, True)]


def kernel_reads(count: int, mode: str, corners: bool | None, layout: torch.memory_format, **to: object) -> np.ndarray:
    """Which of `count` rows each row of the result reads: channel c of the input is 1 in row c and 0 elsewhere."""
    marked = torch.eye(count).view(1, count, count, 1).contiguous(memory_format=layout)
    result = functional.interpolate(marked, mode=mode, align_corners=corners, **to)  # type: ignore[arg-type]
    return np.asarray((result[0, :, :, 0].T != 0).numpy())


Axis = tuple[int, int, float | None]  # rows of the input, rows of the result, the factor if one was given


def rule_reads(mode: str, corners: bool | None, *axes: Axis) -> list[np.ndarray]:
    """The same by the rule, for rows and columns of one call; a single axis stands for both."""
    (height, rows, tall), (width, columns, wide) = axes if len(axes) == 2 else axes * 2
    image = Layout.of_images(5, 3, height, width)
    arguments = {"input": image, "align_corners": corners, "scales_h": tall, "scales_w": wide}
    *_, (row,), (column,) = upsample(Call(OPERATIONS[mode], arguments, ((5, 3, rows, columns),))).dimensions
    both = zip((row, column), (np.arange(height), np.arange(width)), strict=True)
    return [(factor.low[:, None] <= pixel) & (pixel <= factor.high[:, None]) for factor, pixel in both]


def factors(chance: random.Random, count: int) -> float:
    """A factor that gives at least one row: any, one that nearly doubles or copies, a ratio, or a short decimal."""
    while True:
        factor = chance.choice(
            [
                chance.uniform(0.1, 4.0),
                chance.uniform(2.0, 2 + 1 / count),
                chance.uniform(1.0, 1 + 1 / count),
                chance.randint(1, 12) / chance.randint(1, 12),
                round(chance.uniform(0.2, 4.0), 2),
            ]
        )
        if math.floor(count * factor) >= 1:
            return factor


def random_axis(chance: random.Random) -> Axis:
    count = chance.choice([chance.randint(1, 12), chance.randint(13, 70)])
    if chance.random() < 0.7:
        factor = factors(chance, count)
        return count, math.floor(count * factor), factor
    return count, chance.choice([chance.randint(1, 2 * count + 3), count, 2 * count]), None


@pytest.mark.parametrize(("mode", "corners"), MODES)
def test_no_kernel_reads_a_row_that_the_rule_leaves_out(mode: str, corners: bool | None) -> None:
    chance = random.Random(f"{mode} {corners}")
    for _ in range(100):
        axes = random_axis(chance), random_axis(chance)
        for axis, allowed in zip(axes, rule_reads(mode, corners, *axes), strict=True):
            count, size, factor = axis
            for layout in (torch.contiguous_format, torch.channels_last):
                read = kernel_reads(count, mode, corners, layout, **asked(size, factor))
                assert not (read & ~allowed).any(), (axis, layout)
            # Not vacuous: the taps, one more where rounding leaves doubt, and what lies between the two ways to scale.
            between = 0.0 if factor is None or corners else abs(count / size - 1 / factor) * size
            assert allowed.sum(1).max() <= TAPS[mode] + 1 + math.ceil(between), axis


def asked(size: int, factor: float | None) -> dict[str, object]:
    return {"size": (size, 1)} if factor is None else {"scale_factor": (factor, 1.0)}


@pytest.mark.parametrize("count", [32, 41, 50])
def test_a_factor_that_nearly_doubles_reads_what_doubling_reads(count: int) -> None:
    factor = 2 + 0.9 / count
    read = kernel_reads(count, "nearest", None, torch.channels_last, scale_factor=(factor, 1.0))
    assert (read == np.repeat(np.eye(count, dtype=bool), 2, axis=0)).all()  # the kernel takes i // 2 ...
    by_factor = np.floor(np.arange(2 * count) / factor)
    assert (by_factor != np.arange(2 * count) // 2).any()  # ... which is not what the factor says ...
    assert not (read & ~rule_reads("nearest", None, (count, 2 * count, factor))[0]).any()  # ... and the rule has both


def test_rounding_to_single_precision_is_allowed_for() -> None:
    moved = 0
    for count, size in [(2, 82), (3, 123), (4, 164), (61, 183), (96, 288)]:
        read = kernel_reads(count, "nearest", None, torch.contiguous_format, size=(size, 1))
        moved += int((read.argmax(1) != np.arange(size) * count // size).sum())
        assert not (read & ~rule_reads("nearest", None, (count, size, None))[0]).any()
    assert moved > 3  # there is something to allow for


def test_an_exact_scale_leaves_no_doubt() -> None:
    assert (rule_reads("nearest", None, (8, 16, 2.0))[0].sum(1) == 1).all()
    assert (rule_reads("nearest-exact", None, (8, 8, None))[0].sum(1) == 1).all()
    assert (rule_reads("bilinear", False, (8, 32, 4.0))[0].sum(1) <= 2).all()
    assert rule_reads("nearest", None, (6, 8, 4 / 3))[0].sum() > 8  # 3 / 4 is exact, 1 / (4 / 3) is not


def test_a_place_beyond_the_input_is_clamped() -> None:
    assert rule_reads("nearest", None, (4, 2, 1e-30))[0].tolist() == [
        [True, False, False, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_factor_that_is_not_positive_counts_as_none(factor: float) -> None:
    assert (rule_reads("nearest", None, (4, 2, factor))[0] == rule_reads("nearest", None, (4, 2, None))[0]).all()


@pytest.mark.parametrize(("mode", "corners"), MODES)
def test_both_axes_of_an_upsampling_layer_have_their_own_factor(mode: str, corners: bool | None) -> None:
    torch.manual_seed(0)

    def enlarge(x: torch.Tensor, head: nn.Module) -> torch.Tensor:
        wide = functional.interpolate(x, scale_factor=(2.05, 1.3), mode=mode, align_corners=corners)
        return head(functional.interpolate(wide, (9, 20), mode=mode, align_corners=corners))

    check_field(Layer(enlarge, nn.Conv2d(3, 2, 1)), (7, 9))


def test_the_explicit_overload_carries_its_factors_too() -> None:
    def enlarge(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.upsample_nearest2d.default(x, [14, 27], 2.0, 3.0)

    network = Layer(enlarge)
    check_field(network, (7, 9), exact=False)
    _, _, (rows,), (columns,) = derive_layout(network, (7, 9)).dimensions
    assert rows.low.tolist() == np.repeat(np.arange(7), 2).tolist()
    assert (columns.high - columns.low).max() <= 1


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_smoothing_before_shrinking_is_refused(mode: str) -> None:
    network = Layer(lambda x: functional.interpolate(x, scale_factor=0.5, mode=mode, antialias=True))
    with pytest.raises(InputError, match=f"_upsample_{mode}2d_aa` has no rule"):
        wrap(network, classes=3).field(8, 8)


def vote_guard() -> LocalGuard:
    """Red pixels vote for class 0 and green ones for class 1, each in the cells that 2.02 times as many pixels make."""
    head = nn.Conv2d(3, 2, 1, bias=False)
    head.weight.data.copy_(torch.eye(3)[:2].view(2, 3, 1, 1))
    network = nn.Sequential(nn.Upsample(scale_factor=2.02), head)
    model = wrap(network, classes=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return LocalGuard(Preprocess(), model, Evidence(kind="logits", low=0.0, high=1.0), ClippedSum())


def test_no_patch_breaks_a_certificate_behind_an_upsampling_by_2_02() -> None:
    # Pixels 25 and 26 make cells 50 to 53, but a factor of 2.02 puts them at 51 to 54. The evidence for class 0 lies
    # so that a patch over the four red pixels wins, by one cell, if it reaches all of theirs.
    guard = vote_guard()
    image = torch.zeros(2, 3, 32, 32)
    image[0, 0] = 15 / (4 * 1020)
    image[1, 0] = 0.2  # an image with evidence to spare
    image[:, 0, 25:27, 25:27] = 1.0
    attacked = image.clone()
    attacked[:, 0, 25:27, 25:27] = 0.0
    attacked[:, 1, 25:27, 25:27] = 1.0
    certificate = guard.certify(image, Patch(2))
    assert certificate.label.tolist() == [0, 0]
    assert guard.predict(attacked).label.tolist() == [1, 0]
    assert certificate.certified.tolist() == [False, True]
