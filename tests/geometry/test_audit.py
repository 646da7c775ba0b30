"""The audit passes true fields and catches false ones."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchguard.errors import InputError
from patchguard.geometry.audit import audit
from patchguard.geometry.field import Axis, Field, compose
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.geometry.program import trace_field
from patchguard.patch import Patch


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 4, 2, 2),
    )


@cache
def true_field() -> Field:
    return trace_field(network(), (24, 29))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()


class Bands(nn.Module):
    """Column band v: the columns v, ..., v + 3 around the circle, seen as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, (9, width))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.body(functional.pad(x, (0, self.width - 1, 0, 0), mode="circular"))


def narrowed(axis: Axis, *, left: int = 0, right: int = 0) -> Axis:
    starts = tuple((start + left) % axis.size for start in axis.starts)
    return replace(axis, starts=starts, lengths=tuple(length - left - right for length in axis.lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_traced_field_passes_without_any_tolerance(dtype: torch.dtype) -> None:
    model = network().to(dtype).train()
    field = true_field()
    result = audit(model, field)
    assert result.passed
    assert result.drift == 0.0
    assert result.moved > 0
    assert (result.grid, result.size, result.stride) == (field.grid, (7, 7), (4, 4))
    assert all(part.training for part in model.modules())


def test_a_network_in_channels_last_order_passes_too() -> None:
    model = network().to(memory_format=torch.channels_last)
    assert audit(model, true_field()).passed


@pytest.mark.parametrize(
    "leak",
    [SqueezeExcite(), nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8, track_running_stats=False)],
)
def test_a_forged_field_of_a_leaky_network_is_caught(leak: nn.Module) -> None:
    model = network()
    field = true_field()
    model.insert(3, leak)
    result = audit(model, field)
    assert not result.passed
    assert result.drift == result.leaks[0].change > 0
    assert not field.touched_cells(result.leaks[0].box)[result.leaks[0].cell]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_a_field_one_pixel_too_short_is_caught(axis: str, side: str) -> None:
    model = network()
    field = true_field()
    forged = replace(field, **{axis: narrowed(getattr(field, axis), **{side: 1})})
    assert not audit(model, forged, patches=[Patch(1)]).passed


@pytest.mark.parametrize(("width", "passed"), [(4, True), (5, False)])
def test_bands_that_wrap_around_are_audited(width: int, passed: bool) -> None:
    torch.manual_seed(0)
    field = Field(Axis((0,), (9,), 9), Axis(tuple(range(11)), (4,) * 11, 11, wrap=True))
    assert audit(Bands(width), field).passed is passed


def test_a_whole_pipeline_is_audited_in_source_pixels() -> None:
    model = network().eval()
    preprocess = Preprocess(
        (Resize(height=30, width=33, mode="bicubic", antialias=False), CenterCrop(height=24, width=29))
    )
    field = compose(true_field(), preprocess.support(12, 15))
    assert audit(lambda images: model(preprocess(images)), field).passed
    forged = replace(field, rows=narrowed(field.rows, left=1))
    assert not audit(lambda images: model(preprocess(images)), forged).passed


def test_an_audit_repeats_itself_from_its_seed() -> None:
    model = network()
    model.insert(3, SqueezeExcite())
    field = true_field()
    assert audit(model, field, seed=3) == audit(model, field, seed=3)
    assert audit(model, field, seed=3) != audit(model, field, seed=4)


def test_a_leak_below_the_tolerance_is_reported_as_drift() -> None:
    model = network()
    model.insert(3, SqueezeExcite())
    result = audit(model, true_field(), tolerance=1e6)
    assert result.passed
    assert 0 < result.drift < 1e6


class NotANumber(nn.Module):
    """Spoils every cell as soon as one pixel turns black."""

    def forward(self, x: Tensor) -> Tensor:
        local_logits = functional.avg_pool2d(x, 2)
        return torch.where(x.amin((1, 2, 3), keepdim=True) > 0, local_logits, torch.nan)


def test_a_value_that_turns_into_nan_is_a_leak() -> None:
    image = torch.full((3, 8, 8), 0.5)
    axis = Axis((0, 2, 4, 6), (2, 2, 2, 2), 8)
    result = audit(NotANumber(), Field(axis, axis), image=image)
    assert result.leaks[0].change == float("inf")


def test_an_audit_that_moves_nothing_does_not_pass() -> None:
    model = network()
    nn.init.zeros_(model[5].weight)
    result = audit(model, true_field())
    assert (result.moved, result.leaks, result.passed) == (0, (), False)


def test_an_audit_starts_from_a_given_image() -> None:
    model = network()
    image = torch.rand(3, 24, 29, generator=torch.Generator().manual_seed(5))
    assert audit(model, true_field(), image=image).passed
    with pytest.raises(InputError, match="must have the field's 24 x 29 pixels"):
        audit(model, true_field(), image=image[:, 1:])


def test_a_field_of_another_grid_is_refused() -> None:
    with pytest.raises(InputError, match=r"must give local logits \(B, K, 24, 29\)"):
        audit(network(), Field.identity(24, 29))


def test_a_negative_tolerance_is_refused() -> None:
    with pytest.raises(InputError, match="`tolerance` must be at least 0"):
        audit(network(), Field.identity(4, 4), tolerance=float("nan"))


def test_a_sample_of_boxes_is_spread_over_borders_contents_and_patches() -> None:
    told: list[tuple[int, int]] = []
    seen: list[Tensor] = []

    def watched(images: Tensor) -> Tensor:
        seen.append(images)
        return network().eval()(images)

    with torch.no_grad():
        result = audit(watched, true_field(), most=10, batch=1, progress=lambda *counts: told.append(counts))
        complete = audit(network(), true_field())
    assert result.passed
    assert result.trials == 10 < result.possible == complete.possible == complete.trials
    assert told == [(done, 10) for done in range(1, 11)]
    images = torch.cat(seen).view(5, 3, 3, 24, 29)  # five contents: the clean image, then two boxes
    areas = (images[:, 1:] != images[:, :1]).any(2).sum((2, 3))
    assert sorted(set(areas.flatten().tolist())) == [1, 6 * 7]
    assert (
        len({tuple(each.nonzero()[0].tolist()) for each in (images[:, 1:] != images[:, :1]).any(2).flatten(0, 1)}) == 10
    )


def test_a_sample_finds_the_leak_that_all_boxes_find() -> None:
    torch.manual_seed(0)
    leaky = nn.Sequential(nn.Conv2d(3, 8, 3), SqueezeExcite(), nn.Conv2d(8, 4, 1))
    field = trace_field(nn.Conv2d(3, 4, 3), (24, 29))
    assert audit(leaky, field, most=5).leaks


def test_a_sample_has_at_least_one_box() -> None:
    with pytest.raises(InputError, match="`most` must be a number of boxes"):
        audit(network(), true_field(), most=0)
