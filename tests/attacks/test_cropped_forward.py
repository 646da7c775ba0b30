"""A close-up gives the same logits, and the same gradient inside the patch, as the whole picture."""

from itertools import product

import pytest
import torch
from helpers.color_network import SIDE, StrongestColor, color_guard
from helpers.small_guards import bagnet_guard, random_images, srf_guard
from torch import nn

from patchguard.attacks.base import patch_mask
from patchguard.attacks.cropped_forward import crop_forward
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

VICTIMS = {
    "no padding": (color_guard("robust"), SIDE, Patch(2, 3)),
    "padding": (srf_guard(16), 16, Patch(2)),
    "stride 8": (bagnet_guard(12).without_preprocess(), 56, Patch(3, 2)),
}


@pytest.mark.parametrize("name", VICTIMS)
def test_a_closeup_sees_what_the_whole_picture_shows(name) -> None:
    victim, side, patch = VICTIMS[name]
    step = max(1, (side - patch.height) // 4)
    tops, lefts = ([*range(0, side - size, step), side - size] for size in (patch.height, patch.width))
    positions = torch.tensor([[corner] for corner in product(tops, lefts)])
    images = random_images(len(positions), side)
    near = crop_forward(victim, images, positions, patch, size=8, half=True)
    assert near is not None
    inside = patch_mask(positions, patch, side, side)
    changed = torch.where(inside, 1 - images, images)
    rows = torch.arange(len(positions))
    answers = []
    for logits in (victim.differentiable_logits, lambda pixels: near(pixels, rows)):
        pixels = changed.clone().requires_grad_(True)
        found = logits(pixels)
        gradient = torch.autograd.grad(found.square().sum(), pixels)[0]
        answers.append((found.detach(), gradient * inside))
    scale = answers[0][0].abs().max()
    assert torch.allclose(answers[0][0], answers[1][0], atol=1e-4 * float(scale))
    assert torch.allclose(answers[0][1], answers[1][1], rtol=1e-2, atol=1e-3 * float(answers[0][1].abs().max()))


def test_there_is_none_where_it_does_not_hold_or_does_not_pay() -> None:
    images, positions = random_images(2, SIDE), torch.zeros(2, 1, 2, dtype=torch.int64)
    assert (
        crop_forward(color_guard("robust", resized=17), images, positions, Patch(3), size=8, half=True) is None
    )  # a resize
    assert crop_forward(color_guard("robust"), images, positions, Patch(11), size=8, half=True) is None  # nearly all
    twice = positions.expand(-1, 2, -1)
    assert crop_forward(color_guard("robust"), images, twice, Patch(2, count=2), size=8, half=True) is None


class Sized(nn.Module):
    """Answers by the size of what it is shown: a cut-out of an image looks different to it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.body, self.share = StrongestColor(), share

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images) * (1 + self.share * (images.shape[-1] / SIDE - 1))


@pytest.mark.parametrize(("share", "holds"), [(0.0, True), (0.002, True), (0.5, False)])
def test_there_is_none_for_a_network_that_answers_by_the_size_of_the_image(share, holds) -> None:
    plain = color_guard("robust")
    model = wrap(Sized(share), classes=3, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), smallest_input=(3, 3))
    victim = LocalGuard(plain.preprocess, model, plain.evidence, plain.defense)
    images, positions = random_images(3, SIDE), torch.full((3, 1, 2), 4)
    assert (crop_forward(victim, images, positions, Patch(2), size=8, half=True) is not None) == holds
