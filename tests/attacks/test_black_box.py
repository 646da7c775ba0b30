"""Guards that offer no gradients: attacked by queries, first where their certificate is weakest."""

import pytest
import torch
from helpers.color_network import color_guard, tinted_images

from patchguard.attacks import Adaptive, PatchPGD, learn_patch
from patchguard.attacks.base import DifferentiableVictim
from patchguard.attacks.baselines import find_weakest_positions
from patchguard.errors import InputError
from patchguard.guard import Certificate, Guard, Prediction
from patchguard.patch import Patch

SIDE = 8


class CornerGuard(Guard):
    """Bright or dark, by the mean of the red channel in 4 x 4 pixels at row 4, column 2: only a patch there matters."""

    classes, digest = 2, "0" * 64

    def predict(self, images: torch.Tensor) -> Prediction:
        red = images[:, 0, 4:8, 2:6].mean((1, 2)).double()
        scores = torch.stack([red, 1 - red], 1)
        return Prediction(label=scores.argmax(1), scores=scores)

    def certify(self, images, patch, label=None, top_k=1) -> Certificate:
        margin = (self.predict(images).scores[:, 0] - 0.5).abs() - min(patch.area, 16) / 16
        label = self.predict(images).label if label is None else label
        weakest = torch.full((len(images),), 4 * SIDE + 2)
        return Certificate(label=label, margin=margin, weakest=weakest, rival=1 - label)

    def locate(self, patch, height, width, weakest):
        top, left = divmod(weakest, width)
        return (min(top, height - patch.height), min(left, width - patch.width), patch.height, patch.width), None


class PositionFreeGuard(CornerGuard):
    def locate(self, patch, height, width, weakest):
        return None, None


def gray_images() -> torch.Tensor:
    return torch.full((6, 3, SIDE, SIDE), 0.5) + torch.linspace(-0.4, 0.4, 6).view(-1, 1, 1, 1)


@pytest.mark.parametrize("attack", [Adaptive(steps=8, locations=1), PatchPGD(steps=8, locations=1)], ids=repr)
def test_gradient_attacks_query_a_guard_without_gradients_where_it_is_weakest(attack) -> None:
    guard, images = CornerGuard(), gray_images()
    assert not isinstance(guard, DifferentiableVictim)
    target = guard.predict(images).label
    result = attack(guard, images, target, Patch(4))
    assert result.broken.all()
    assert (result.positions == torch.tensor([4, 2])).all()
    weak = attack(guard, images, target, Patch(1))
    assert not (weak.broken & guard.certify(images, Patch(1)).certified).any()
    assert guard.certify(images, Patch(1)).certified.any()


def test_without_a_weakest_position_the_search_is_random_and_a_larger_patch_breaks_more() -> None:
    guard, images = PositionFreeGuard(), gray_images()
    target = guard.predict(images).label
    assert find_weakest_positions(guard, images, target, Patch(4)) is None
    small, large = (Adaptive(steps=16)(guard, images, target, Patch(side)).broken for side in (2, 5))
    assert small.sum() < large.sum()


def test_every_rectangle_gets_a_position() -> None:
    guard, images = CornerGuard(), gray_images()
    positions = find_weakest_positions(guard, images, guard.predict(images).label, Patch(2, count=3))
    assert positions is not None
    assert positions.tolist() == [[[4, 2]] * 3] * 6


def test_a_victim_that_is_no_guard_is_searched_at_random() -> None:
    class Predictor:
        def predict(self, images: torch.Tensor) -> Prediction:
            return color_guard("undefended").predict(images)

    victim, (images, _) = Predictor(), tinted_images(12)
    target = victim.predict(images).label
    assert find_weakest_positions(victim, images, target, Patch(7)) is None
    assert PatchPGD(steps=8, locations=1)(victim, images, target, Patch(7)).broken.any()


def test_a_patch_cannot_be_learned_without_gradients() -> None:
    with pytest.raises(InputError, match="must offer gradients"):
        learn_patch(CornerGuard(), gray_images(), 1, Patch(2), steps=1)
