"""Cleanings do what their papers say, and an attack that knows of them gets through."""

from dataclasses import replace

import pytest
import torch
from helpers.small_guards import build_once, random_images, randomize_weights
from torch import nn

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.paper.image_cleaning import (
    Cleaned,
    DigitalWatermarking,
    LocalGradientSmoothing,
    busy_blocks,
    dense_region,
    gradient_magnitude,
    inpaint,
    saliency,
)
from patchguard.patch import Patch

FITTED = [
    LocalGradientSmoothing.fitted(32, 32),
    replace(LocalGradientSmoothing.fitted(32, 32), surrogate="smooth"),
    DigitalWatermarking.fitted(32, 32),
]


@build_once
def guard() -> LocalGuard:
    model = randomize_weights(build("resnet18", classes=3, width=0.1, small_images=True))
    return LocalGuard(Preprocess(), model, Evidence(low=None), Undefended())


def noisy_patch(images: torch.Tensor, top: int, left: int, side: int) -> torch.Tensor:
    noise = torch.rand(len(images), 3, side, side, generator=torch.Generator().manual_seed(1)).round()
    attacked = images.clone()
    attacked[..., top : top + side, left : left + side] = noise
    return attacked


# -- local gradient smoothing ------------------------------------------------------------------------------------------


def test_smoothing_leaves_flat_images_and_soft_ramps_unchanged():
    flat = torch.full((2, 3, 32, 32), 0.7)
    assert torch.equal(LocalGradientSmoothing()(flat), flat)
    # One strong edge elsewhere makes the ramp's own differences small against it.
    ramp = torch.linspace(0.2, 0.4, 32).expand(1, 3, 32, 32).clone()
    ramp[..., 31, 31] = 1.0
    cleaned = LocalGradientSmoothing(window=5, overlap=2)(ramp)
    assert torch.equal(cleaned[..., :20, :20], ramp[..., :20, :20])


def test_smoothing_darkens_a_noisy_patch_and_little_else():
    images = torch.full((2, 3, 32, 32), 0.5)
    attacked = noisy_patch(images, 10, 12, 6)
    cleaned = LocalGradientSmoothing.fitted(32, 32)(attacked)
    inside = (..., slice(11, 15), slice(13, 17))
    assert cleaned[inside].mean() < 0.15 * attacked[inside].mean()
    assert torch.equal(cleaned[..., :8, :], attacked[..., :8, :])
    assert torch.equal(cleaned[..., 20:, :], attacked[..., 20:, :])


def test_the_magnitude_is_the_length_of_all_first_differences():
    images = torch.zeros(1, 3, 3, 3)
    images[0, 0, 1, 1], images[0, 1, 1, 1] = 3.0, 4.0
    expected = torch.tensor([[0.0, 5.0, 0.0], [5.0, 50**0.5, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(gradient_magnitude(images)[0], expected)


def test_blocks_overlap_and_the_last_one_ends_with_the_image():
    values = torch.zeros(1, 7, 7)
    values[0, 6, 6] = 9.0
    # Blocks of 3 start at 0, 2, 4: only that at (4, 4) has a mean above 0.9.
    kept = busy_blocks(values, window=3, overlap=1, threshold=0.9)
    expected = torch.zeros(7, 7)
    expected[4:, 4:] = 1
    assert torch.equal(kept[0], expected)
    assert not busy_blocks(values, window=3, overlap=1, threshold=1.0).any()


def test_published_blocks_are_for_large_images_and_shrink_with_small_ones():
    assert LocalGradientSmoothing.fitted(299, 299) == LocalGradientSmoothing(window=15, overlap=5)
    assert LocalGradientSmoothing.fitted(32, 32) == LocalGradientSmoothing(window=3, overlap=1)


def test_only_a_leak_tells_an_attack_about_black_pixels():
    attacked = noisy_patch(torch.full((1, 3, 32, 32), 0.5), 10, 12, 6).requires_grad_()
    smoothing = LocalGradientSmoothing(window=3, overlap=1)
    black = smoothing.darken(attacked.detach()) == 0
    black &= attacked.detach() > 0
    assert black.any()

    def gradient(leak: float) -> torch.Tensor:
        return torch.autograd.grad(smoothing.darken(attacked, leak=leak)[black].sum(), attacked)[0]

    assert not gradient(0.0).any()
    assert gradient(0.1).any()


def test_the_smooth_surrogate_hands_on_averages_of_the_gradient():
    images = random_images(1, 8).requires_grad_()
    cleaned = LocalGradientSmoothing(window=3, overlap=1, surrogate="smooth").differentiable(images)
    (gradient,) = torch.autograd.grad(cleaned[0, 0, 4, 4], images)
    expected = torch.zeros(3, 8, 8)
    expected[0, 3:6, 3:6] = 1 / 9
    torch.testing.assert_close(gradient[0], expected)


# -- digital watermarking ----------------------------------------------------------------------------------------------


def test_only_dense_regions_survive_thresholding():
    values = torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.5
    values[0, 8:14, 20:26] = 1.0
    values[0, 2, 3] = 1.0  # alone
    region = dense_region(values, fraction=37 / 1024, radius=1)[0]
    assert region[8:14, 20:26].all()
    assert not region[:5].any()
    assert int(region.sum()) <= 8 * 8


def test_inpainting_changes_the_region_alone_and_continues_its_surroundings():
    flat = torch.full((1, 3, 20, 13), 0.3)
    flat[..., 10:, :] = 0.9
    region = torch.zeros(1, 20, 13, dtype=torch.bool)
    region[0, 2:7, 3:8] = True
    attacked = flat.clone()
    attacked[:, :, region[0]] = torch.rand(1, 3, 25)
    filled = inpaint(attacked, region)
    assert torch.equal(filled[:, :, ~region[0]], attacked[:, :, ~region[0]])
    torch.testing.assert_close(filled[:, :, region[0]], flat[:, :, region[0]], atol=0.16, rtol=0)
    everything = inpaint(attacked, torch.ones_like(region))
    torch.testing.assert_close(everything, torch.full_like(everything, 0.5))


def test_guided_saliency_shows_what_speaks_for_the_label_alone():
    class Corners(LocalModel):
        """Class 0 is the brightness of one square less that of another, class 1 a constant."""

        def local_logits(self, normalized):
            seen = nn.functional.relu(normalized[:, :1, 4:8, 4:8]) - 0.5 * nn.functional.relu(normalized[:, :1, :4, :4])
            return torch.cat([seen, torch.full_like(seen, -9.0)], dim=1)

        def smallest_input(self):
            return 8, 8

    corners = LocalGuard(
        Preprocess(), Corners(classes=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)), Evidence(low=None), Undefended()
    )
    found = saliency(corners, torch.ones(1, 3, 12, 12))
    assert (found[0, 4:8, 4:8] > 0).all()
    assert int((found > 0).sum()) == 16  # a plain gradient would show both squares


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleaning", FITTED, ids=lambda cleaning: type(cleaning).__name__)
def test_cleaned_images_are_images_and_do_not_depend_on_their_batch(cleaning):
    images = noisy_patch(random_images(4, 32), 3, 20, 6)
    cleaned = cleaning(images, guard())
    assert cleaned.shape == images.shape
    assert cleaned.min() >= 0
    assert cleaned.max() <= 1
    assert not torch.equal(cleaned, images)
    torch.testing.assert_close(cleaning(images[2:3], guard())[0], cleaned[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cleaning", FITTED, ids=lambda cleaning: type(cleaning).__name__)
def test_what_gradients_flow_through_has_the_same_values(cleaning):
    images = noisy_patch(random_images(3, 32), 3, 20, 6).requires_grad_()
    victim = Cleaned(guard(), cleaning)
    local_logits = victim.differentiable_logits(images)
    expected = victim.guard.local_logits(cleaning(images.detach(), victim.guard))
    torch.testing.assert_close(local_logits.detach(), expected, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(local_logits.square().sum(), images)
    assert gradient.isfinite().all()
    assert (gradient[:, :, 3:9, 20:26] != 0).any()
    assert victim.predict(images.detach()).label.tolist() == victim.defense.predict(expected).label.tolist()


@pytest.mark.parametrize("cleaning", FITTED, ids=lambda cleaning: type(cleaning).__name__)
def test_a_cleaning_certifies_nothing_and_says_why(cleaning):
    with pytest.raises(InputError, match="has no certificate: it cleans by a heuristic"):
        Cleaned(guard(), cleaning).certify(random_images(1, 32), Patch(5))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (LocalGradientSmoothing, {"window": 3, "overlap": 3}),
        (LocalGradientSmoothing, {"threshold": 1.0}),
        (LocalGradientSmoothing, {"surrogate": "none"}),
        (DigitalWatermarking, {"fraction": 0.0}),
        (DigitalWatermarking, {"radius": 0}),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings):
    with pytest.raises(InputError, match="must"):
        kind(**settings)
