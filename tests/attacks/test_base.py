"""The base class: the budget is exact, and randomness belongs to the image, not to its batch."""

from dataclasses import dataclass
from functools import cache

import jaxtyping
import pytest
import torch
from helpers.color_network import SIDE, color_guard, tinted_images
from helpers.small_guards import random_images
from hypothesis import given, settings
from hypothesis import strategies as st

from patchguard.attacks import ATTACKS, Adaptive, Attack, Colors, Copy, FunctionAttack, Noise, PatchPGD, build
from patchguard.attacks.base import patch_mask, round_to_8_bits
from patchguard.attacks.universal_patch import apply_patch
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch

ATTACKERS = [
    Noise(tries=2),
    Colors(tries=2),
    Copy(tries=2),
    PatchPGD(steps=2, locations=2, restarts=2),
    PatchPGD(steps=2, locations=2, search="gradient", objective="margin"),
    PatchPGD(steps=2, locations=2, search="certificate"),
    Adaptive(steps=4, locations=2),
]


@cache
def wrong_images(name: str) -> tuple[LocalGuard, torch.Tensor, torch.Tensor]:
    """Images behind a resize, the first of them with a target that the guard does not see."""
    victim = color_guard(name, Patch(3), resized=17)
    images = random_images(3, SIDE)
    target = victim.predict(images).label
    target[0] = (target[0] + 1) % 3
    return victim, images, target


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["undefended", "robust", "double"]),
    attack=st.sampled_from(ATTACKERS),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    count=st.integers(1, 2),
    aim=st.sampled_from([None, 1]),
)
def test_only_the_pixels_of_the_patch_change(name, attack, height, width, count, aim) -> None:
    victim, images, target = wrong_images(name)
    patch = Patch(height, width, count)
    attacked = attack(victim, images, target, patch, aim=aim)
    inside = patch_mask(attacked.positions, patch, SIDE, SIDE)
    assert ((attacked.images == images) | inside).all()
    changed = attacked.images[(attacked.images != images)]
    assert torch.equal(changed, round_to_8_bits(changed))
    assert int(inside.sum()) <= 3 * count * patch.area
    assert torch.equal(attacked.label, victim.predict(attacked.images).label)
    wanted = attacked.label != target if aim is None else (attacked.label == aim)
    assert torch.equal(attacked.broken, wanted if aim is None else wanted & (attacked.broken | (target != aim)))
    if aim is None:  # what is wrong as it is, is not touched
        assert attacked.broken[0]
        assert torch.equal(attacked.images[0], images[0])


@pytest.mark.parametrize("attack", ATTACKERS, ids=lambda each: type(each).__name__)
def test_an_answer_does_not_depend_on_the_batch(attack) -> None:
    victim = color_guard("robust")
    images, _ = tinted_images(6)
    target = victim.predict(images).label
    together = attack(victim, images, target, Patch(3), seed=4, numbers=range(10, 16))
    order = torch.tensor([5, 2, 0])
    apart = attack(victim, images[order], target[order], Patch(3), seed=4, numbers=(10 + order).tolist())
    assert torch.equal(together.positions[order], apart.positions)
    assert torch.equal(together.images[order], apart.images)
    assert torch.equal(together.broken[order], apart.broken)


def test_another_seed_draws_other_places() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(8)
    target = victim.predict(images).label
    first, second = (Noise(tries=1)(victim, images, target, Patch(2), seed=seed) for seed in (0, 1))
    assert not torch.equal(first.positions, second.positions)


@dataclass(frozen=True, kw_only=True)
class Cheat(Attack):
    what: str

    def run(self, victim, images, target, patch, aim, draws):
        positions = torch.zeros(len(images), patch.count, 2, dtype=torch.int64)
        found = images.clone()
        if self.what == "outside":
            found[:, 0, -1, -1] = 1 - found[:, 0, -1, -1]
        elif self.what == "range":
            found[:, 0, 0, 0] = 1.5
        elif self.what == "unrounded":
            found[:, :, :2, :3] = 0.3337  # 85.09 of 255 levels
        elif self.what == "NaN":
            found[:, 0, 0, 0] = torch.nan
        elif self.what == "place":
            positions += SIDE
        elif self.what == "shape":
            found = found[:, :, :4]
        return found, positions


def test_the_patch_is_rounded_to_8_bits_and_the_rest_is_not() -> None:
    victim = color_guard("undefended")
    images = tinted_images(4)[0] + 0.0013  # between two levels everywhere
    attacked = Cheat(what="unrounded")(victim, images, victim.predict(images).label, Patch(2, 3))
    assert torch.equal(attacked.images[..., 2:, :], images[..., 2:, :])
    assert torch.equal(attacked.images[..., 3:], images[..., 3:])
    assert (attacked.images[:, :, :2, :3] == 85 / 255).all()


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("outside", "change no pixel outside the patch; it changed 4"),
        ("range", r"keep pixels in \[0, 1\]"),
        ("NaN", r"keep pixels in \[0, 1\]"),
        ("place", "place every rectangle inside"),
        ("shape", "must return images"),
    ],
)
def test_an_attack_that_leaves_its_budget_is_refused(what, match) -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(4)
    with pytest.raises(RuntimeError, match=match):
        Cheat(what=what)(victim, images, victim.predict(images).label, Patch(2))


def test_input_is_checked_before_any_work() -> None:
    victim = color_guard("undefended")
    images, target = tinted_images(4)
    with pytest.raises(InputError, match="must fit the image"):
        Noise()(victim, images, target, Patch(SIDE + 1))
    with pytest.raises(InputError, match=r"must lie in \[0, 1\]"):
        Noise()(victim, 255 * images, target, Patch(2))
    with pytest.raises(InputError, match="between 0 and 2; got 7 to 7"):
        Noise()(victim, images, target, Patch(2), aim=7)
    with pytest.raises(InputError, match="one class number per image"):
        Noise()(victim, images, target, Patch(2), aim=True)
    with pytest.raises(InputError, match="`numbers`"):
        Noise()(victim, images, target, Patch(2), numbers=[1])


def test_things_of_another_kind_are_named(unchecked) -> None:
    victim = color_guard("undefended")
    images, target = tinted_images(4)
    with pytest.raises(InputError, match=r"must be a Patch, such as Patch\(5\); got 5"):
        Noise()(victim, images, target, 5)
    with pytest.raises(InputError, match="a method `predict`, as a Guard has; got object"):
        Noise()(object(), images, target, Patch(2))
    for aim in (torch.ones(4, dtype=torch.bool), torch.ones(4)):
        with pytest.raises(InputError, match="`aim` must be one class number per image"):
            Noise()(victim, images, target, Patch(2), aim=aim)
    for positions in (torch.zeros(4, 2), torch.zeros(3, 1, 2), torch.zeros(4, 1, 3), [[0, 0]] * 4):
        with pytest.raises(InputError, match=r"\(images, patches, 2\) with 4 images"):
            apply_patch(torch.zeros(3, 4, 4), images, positions)


@pytest.fixture
def unchecked():
    """Without the type checks that only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_a_targeted_attack_leaves_images_of_that_class_alone() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(12)
    target = victim.predict(images).label
    attacked = Colors()(victim, images, target, Patch(6), aim=1)
    assert not attacked.broken[target == 1].any()
    assert torch.equal(attacked.images[target == 1], images[target == 1])
    assert torch.equal(attacked.broken, (attacked.label == 1) & (target != 1))


def test_an_alert_means_that_the_attack_did_not_go_through() -> None:
    victim = color_guard("agreement")
    images, _ = tinted_images(30)
    target = victim.predict(images).label
    attacked = Colors(tries=8)(victim, images, target, Patch(3))
    answer = victim.predict(attacked.images)
    assert torch.equal(attacked.broken, (answer.label != target) & ~answer.alert)


def test_gradients_reach_the_source_pixels_through_the_resize_and_leave_parameters_alone() -> None:
    for victim in (color_guard("undefended", resized=17), color_guard("undefended")):
        images = random_images(2, SIDE).requires_grad_(True)
        local_logits = victim.differentiable_logits(images)
        assert torch.allclose(local_logits, victim.local_logits(images), atol=1e-4)
        local_logits.square().sum().backward()
        assert (images.grad != 0).float().mean() > 0.9
        assert all(parameter.grad is None and parameter.requires_grad for parameter in victim.model.parameters())


def test_attacks_are_built_by_name() -> None:
    assert build("patch_pgd", steps=7) == PatchPGD(steps=7)
    assert list(ATTACKS) == ["patch_pgd", "adaptive", "universal_patch", "noise", "colors", "copy"]
    with pytest.raises(InputError, match="Did you mean 'adaptive'"):
        build("adaptve")
    with pytest.raises(InputError, match="has the settings tries; got speed"):
        build("noise", speed=3)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"steps": 0}, "`steps`"),
        ({"step": 0.0}, "`step`"),
        ({"momentum": 1.0}, "`momentum`"),
        ({"step": True}, "`step`"),
        ({"momentum": False}, "`momentum`"),
        ({"locations": 0}, "`locations`"),
        ({"search": "everywhere"}, "`search` must be one of random, occlusion, gradient, certificate"),
        ({"objective": "loss"}, "`objective`"),
    ],
)
def test_settings_are_checked(settings, match, unchecked) -> None:
    with pytest.raises(InputError, match=match):
        PatchPGD(**settings)


@pytest.mark.parametrize("matching", [-0.1, 1.1, True])
def test_a_share_of_matching_steps_is_a_number_from_0_to_1(matching, unchecked) -> None:
    with pytest.raises(InputError, match="`matching` must be a fraction"):
        Adaptive(matching=matching)


def test_the_whole_batch_may_be_wrong_already() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(3)
    wrong = (victim.predict(images).label + 1) % 3
    attacked = FunctionAttack(function=lambda images, target: 1 / 0)(victim, images, wrong, Patch(3))
    assert attacked.broken.all()
    assert torch.equal(attacked.images, images)
