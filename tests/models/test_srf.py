import copy

import pytest
import torch
from helpers.pixel_influence import build_random, changed_cells, expected_cells, intervals, random_image
from helpers.small_guards import srf_guard
from torch import nn

from patchguard.errors import InputError
from patchguard.models.srf import WIDTHS, ConvNorm, Srf, choose_3x3_blocks, srf, srf_wide
from patchguard.patch import Patch

THIN = (4, 8, 8, 12, 12, 12)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_default_network_has_one_cell_per_pixel_and_two_million_parameters():
    model = srf().eval()
    with torch.inference_mode():
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10, 32, 32)
    assert 2.2e6 < parameters(model) < 2.6e6


def test_the_wide_network_has_six_million_parameters():
    with torch.device("meta"):
        assert 5.8e6 < parameters(srf_wide()) < 6.2e6


@pytest.mark.parametrize(
    ("count", "blocks"),
    [(0, []), (1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 4, 5])],
)
def test_blocks_that_widen_look_around_first(count, blocks):
    assert choose_3x3_blocks(WIDTHS, count) == blocks


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("field", range(5, 17, 2))
def test_a_pixel_moves_exactly_the_cells_whose_field_holds_it(field, stride):
    model = build_random(Srf, classes=3, field=field, stride=stride, widths=THIN)
    height, width = 21, 24
    for pixel in [(0, 0), (10, 11), (20, 12), (1, 23)]:
        seen = changed_cells(model, height, width, pixel)
        assert seen.shape == (-(-height // stride), -(-width // stride))
        assert (seen == expected_cells(seen.shape, pixel, size=field, stride=stride, first=-(field // 2))).all(), pixel


@pytest.mark.parametrize(
    ("field", "stride"),
    [(9, 2), pytest.param(7, 1, marks=pytest.mark.slow), pytest.param(15, 2, marks=pytest.mark.slow)],
)
def test_the_traced_field_agrees_with_the_arithmetic(field, stride):
    rows = Srf(classes=3, field=field, stride=stride, widths=THIN).field(21, 15).rows
    expected = intervals(-(-21 // stride), 21, size=field, stride=stride, first=-(field // 2))
    assert list(zip(rows.starts, rows.lengths, strict=True)) == expected


@pytest.mark.parametrize(("field", "widths"), [(5, (4, 8)), (7, THIN), (9, (4, 4, 4)), (13, THIN)])
def test_cells_that_are_kept_are_what_they_were(field, widths):
    model = build_random(Srf, classes=3, field=field, widths=widths)
    image = random_image(21, 24)
    with torch.inference_mode():
        whole = model(image)
        model.keep_every(2)
        torch.testing.assert_close(model(image), whole[..., ::2, ::2])
        model.keep_every(1)
        assert torch.equal(model(image), whole)


def test_a_guard_whose_network_leaves_cells_out_needs_new_masks():
    guard = copy.deepcopy(srf_guard(side=16))
    image, patch = random_image(16, 16).clamp(0, 1), Patch(2)
    guard.certify(image, patch)
    guard.model.keep_every(2)
    for answer in (guard.predict, lambda images: guard.certify(images, patch)):
        with pytest.raises(InputError, match="give 8 x 8 cells, but this guard's masks are made for 16 x 16"):
            answer(image)
    refitted = guard.for_patch(patch, 16, 16)
    assert len(refitted.field(16, 16).rows.starts) == 8
    refitted.certify(image, patch)


def test_a_network_that_looks_around_in_its_stem_alone_leaves_no_cell_out():
    model = build_random(Srf, classes=3, field=3, widths=(4,))
    model.keep_every(1)
    with pytest.raises(InputError, match="`field` must be at least 5"):
        model.keep_every(2)


@pytest.mark.parametrize("stride", [1, 2])
def test_frozen_statistics_fold_into_the_convolution(stride):
    layer = build_random(ConvNorm, inputs=3, outputs=5, kernel=3, stride=stride)
    inputs = random_image(9, 8, batch=2)
    with torch.inference_mode():
        torch.testing.assert_close(layer(inputs), layer.norm(layer.conv(inputs)))


def test_training_uses_and_updates_batch_statistics():
    layer = build_random(ConvNorm, inputs=3, outputs=5, kernel=3).train()
    before = layer.norm.running_mean.clone()
    features = layer(random_image(9, 8, batch=4))
    normalized = (features - layer.norm.bias[:, None, None]) / layer.norm.weight[:, None, None]
    torch.testing.assert_close(normalized.mean((0, 2, 3)), torch.zeros(5, dtype=torch.float64), atol=1e-9, rtol=0)
    assert not torch.equal(before, layer.norm.running_mean)


def test_a_training_step_reaches_every_parameter():
    model = build_random(srf, classes=3, widths=THIN).train()
    model(random_image(12, 12, batch=4)).pow(2).mean().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []


def test_an_image_in_a_batch_scores_as_it_does_alone():
    model = build_random(srf, classes=3, widths=THIN)
    images = random_image(12, 10, batch=3)
    with torch.inference_mode():
        torch.testing.assert_close(model(images)[1:2], model(images[1:2]))


def test_channels_last_gives_the_same_logits():
    model, images = build_random(srf, classes=3, widths=THIN), random_image(12, 10, batch=2)
    with torch.inference_mode():
        plain = model(images)
        fast = model.to(memory_format=torch.channels_last)(images)
    torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("field", [1, 4, 8, -7])
def test_a_field_that_is_even_or_too_small_is_refused(field):
    with pytest.raises(InputError, match=f"`field` must be an odd number of pixels of at least 3; got {field}"):
        Srf(field=field)


def test_a_field_too_wide_for_the_blocks_is_refused():
    with pytest.raises(InputError, match=r"must name at least 7 blocks .* got 6"):
        Srf(field=17)


def test_a_stride_above_two_is_refused():
    with pytest.raises(InputError, match="`stride` must be 1 or 2; got 3"):
        Srf(stride=3)


@pytest.mark.parametrize("widths", [(), (8, 0)])
def test_widths_that_are_no_channel_counts_are_refused(widths):
    with pytest.raises(InputError, match="`widths` must be one positive channel count per block"):
        Srf(widths=widths)


def test_an_image_smaller_than_the_field_is_refused():
    with pytest.raises(InputError, match="at least 9 x 9 pixels here; got 9 x 8"):
        srf(field=9, widths=THIN)(torch.rand(1, 3, 9, 8))
