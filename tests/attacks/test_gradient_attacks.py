"""PatchPGD and Adaptive on a crafted network: they break what can be broken, and never what is certified."""

from dataclasses import replace

import pytest
import torch
from helpers.color_network import GUARDS, color_guard, tinted_images

from patchguard.attacks import Adaptive, Noise, PatchPGD
from patchguard.attacks.weak_spot import find_weak_spot
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guard import Prediction
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

PATCH = Patch(3)


def right_images(name: str, count: int = 60):
    victim = color_guard(name, PATCH)
    images, _ = tinted_images(count)
    return victim, images, victim.predict(images).label


def test_pgd_breaks_an_undefended_network_and_noise_does_less() -> None:
    victim, images, target = right_images("undefended")
    patch = Patch(6)
    ascended = PatchPGD(steps=20, locations=2)(victim, images, target, patch)
    guessed = Noise(tries=2)(victim, images, target, patch)
    assert ascended.broken.float().mean() > 0.9
    assert guessed.broken.float().mean() < 0.5


def test_pgd_reaches_the_class_it_aims_at() -> None:
    victim, images, target = right_images("undefended")
    attacked = PatchPGD(steps=20, locations=3)(victim, images, target, Patch(7), aim=2)
    assert attacked.broken[target != 2].float().mean() > 0.8
    assert (attacked.label[attacked.broken] == 2).all()
    assert (attacked.label[target == 2] == 2).all()


def test_more_places_break_more_and_a_search_breaks_more_than_chance() -> None:
    victim, images, target = right_images("robust", 24)
    patch = Patch(3, 3)
    one, several = (
        int(PatchPGD(steps=12, locations=count)(victim, images, target, patch).broken.sum()) for count in (1, 4)
    )
    searched = PatchPGD(steps=12, locations=1, search="certificate")(victim, images, target, patch)
    assert several >= one
    assert int(searched.broken.sum()) >= one


@pytest.mark.parametrize("name", GUARDS)
def test_no_attack_flips_what_is_certified(name) -> None:
    victim, images, target = right_images(name, 16)
    proof = victim.certify(images, PATCH, target)
    for attack in (Adaptive(steps=8, locations=2), PatchPGD(steps=5, locations=2)):
        broken = attack(victim, images, target, PATCH).broken
        assert not (broken & (proof.margin > 0)).any()


@pytest.mark.parametrize("name", ["robust", "double", "clipped", "vote", "median", "cells"])
def test_an_adaptive_attack_breaks_more_of_what_is_not_certified_than_a_plain_one(name) -> None:
    victim, images, target = right_images(name, 80)
    proof = victim.certify(images, PATCH, target)
    open_ones = ~proof.certified
    adaptive = Adaptive(steps=20, locations=1)(victim, images, target, PATCH).broken
    plain = PatchPGD(steps=20, locations=1)(victim, images, target, PATCH).broken
    assert not (adaptive & proof.certified).any()
    assert open_ones.any()
    assert proof.certified.any()
    assert int(adaptive.sum()) > int(plain.sum())


@pytest.mark.parametrize("name", ["clipped", "vote"])
def test_a_plain_sum_of_other_evidence_than_logits_is_followed_like_a_defense(name) -> None:
    victim, images, target = right_images(name, 80)
    plain = replace(victim, defense=Undefended())
    assert torch.equal(plain.predict(images).label, target)  # one rule, under two names
    broken, expected = (Adaptive(steps=20, locations=1)(each, images, target, PATCH).broken for each in (plain, victim))
    assert int(broken.sum()) >= int(expected.sum()) > 0


def test_an_adaptive_attack_can_be_targeted() -> None:
    victim, images, target = right_images("robust")
    attacked = Adaptive(steps=20, locations=2)(victim, images, target, PATCH, aim=0)
    assert attacked.broken.any()
    assert (attacked.label[attacked.broken] == 0).all()


def test_several_patches_do_more_than_one() -> None:
    victim, images, target = right_images("clipped")
    one, two = (
        int(Adaptive(steps=12, locations=1)(victim, images, target, Patch(3, count=count)).broken.sum())
        for count in (1, 2)
    )
    assert two > one


class Wrapper:
    """A victim that is no LocalGuard: it knows neither evidence nor certificates."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def predict(self, images) -> Prediction:
        return self.inner.predict(images)

    def differentiable_logits(self, images) -> torch.Tensor:
        return self.inner.differentiable_logits(images)


def test_any_victim_with_labels_and_gradients_can_be_attacked() -> None:
    victim, images, target = right_images("undefended", 20)
    for attack in (PatchPGD(steps=15, locations=1, search="certificate"), Adaptive(steps=15)):
        assert attack(Wrapper(victim), images, target, Patch(6)).broken.float().mean() > 0.5


def test_a_step_that_breaks_an_image_ends_its_attack() -> None:
    victim, images, target = right_images("undefended", 20)
    seen = []

    class Counting(Wrapper):
        def differentiable_logits(self, images) -> torch.Tensor:
            seen.append(len(images))
            return super().differentiable_logits(images)

    PatchPGD(steps=20, locations=1)(Counting(victim), images, target, Patch(7))
    assert seen[0] == 20
    assert seen[-1] < 20
    assert sum(seen) < 20 * 15


@pytest.mark.parametrize(
    "name",
    [name if name in ("double", "vote") else pytest.param(name, marks=pytest.mark.slow) for name in GUARDS],
)
def test_rough_gradients_still_break_images_and_never_count_by_themselves(name, monkeypatch) -> None:
    def rough(device: torch.device, half: bool) -> torch.autocast:  # what a GPU does by itself
        return torch.autocast("cpu", torch.bfloat16)

    for module in ("gradient_ascent", "cropped_forward", "weak_spot"):
        monkeypatch.setattr(f"patchguard.attacks.{module}.gradient_precision", rough)
    victim, images, target = right_images(name, 24)
    patch = Patch(3) if hasattr(victim.defense, "masks") else Patch(4)
    attacked = Adaptive(steps=12, locations=2)(victim, images, target, patch)
    assert torch.equal(attacked.label, victim.predict(attacked.images).label)
    assert attacked.broken.any()


def test_a_network_that_mixes_positions_can_still_be_attacked() -> None:
    class Mixing(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (images - images.mean((2, 3), keepdim=True).flip(1)).mean((2, 3), keepdim=True)

    victim = LocalGuard(Preprocess(), wrap(Mixing(), classes=3), Evidence(low=None), Undefended())
    images, _ = tinted_images(6)
    target = victim.predict(images).label
    for attack in (PatchPGD(steps=6, locations=2, search="certificate"), Adaptive(steps=6)):
        assert attack(victim, images, target, Patch(7)).broken.any()


def test_an_image_that_makes_the_network_overflow_does_not_cost_the_others_their_hints() -> None:
    victim, images, target = right_images("double", 6)
    alone = find_weak_spot(victim, images[:5], PATCH, target[:5], size=6, half=False)
    images[5] = torch.nan
    together = find_weak_spot(victim, images, PATCH, target, size=6, half=False)
    assert alone is not None
    assert together is not None
    assert torch.equal(together.boxes[:5], alone.boxes)
    assert torch.equal(together.rival[:5], alone.rival)


def test_a_patch_that_reaches_every_cell_gives_no_hint_about_rivals() -> None:
    whole = wrap(torch.nn.Conv2d(3, 3, 9, padding=4), classes=3)
    victim = LocalGuard(Preprocess(), whole, Evidence(low=0.0, high=1.0), Undefended())
    images = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    target = victim.predict(images).label
    assert find_weak_spot(victim, images, Patch(5), target, size=4, half=False) is None
    part = wrap(torch.nn.Conv2d(3, 3, 1), classes=3)
    found = find_weak_spot(replace(victim, model=part), images, Patch(2), target, size=4, half=False)
    assert found is not None


def test_of_attempts_that_all_fail_the_one_with_the_highest_loss_is_kept() -> None:
    victim, images, target = right_images("undefended", 24)
    settings = {"steps": 2, "step": 0.02}

    def lead(attacked: torch.Tensor) -> torch.Tensor:
        scores = victim.differentiable_logits(attacked).mean((2, 3))
        return torch.nn.functional.cross_entropy(scores, target, reduction="none").detach()

    several = PatchPGD(locations=4, **settings)(victim, images, target, Patch(3))
    # The positions of a seed come in the same order, however many there are.
    alone = [PatchPGD(locations=count, **settings)(victim, images, target, Patch(3)) for count in (1, 2, 3)]
    left = ~several.broken
    assert left.any()
    for fewer in alone:
        assert (lead(several.images)[left] >= lead(fewer.images)[left] - 1e-6).all()
    assert (several.positions[left] != alone[0].positions[left]).any()
