"""Attacks of others: used where they keep the budget, refused where they do not."""

import sys
from itertools import product

import numpy as np
import pytest
import torch
from helpers.color_network import color_guard, tinted_images

from patchguard.attacks import FunctionAttack, ToolboxAttack, as_toolbox_classifier
from patchguard.attacks.adapters import cover_with_rectangles
from patchguard.attacks.base import patch_mask
from patchguard.errors import InputError
from patchguard.patch import Patch


def painted_box(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Paint a 6 x 6 box in the color of the next class."""
    found = images.clone()
    for image, label in zip(found, target.tolist(), strict=True):
        image[:, 3:9, 4:10] = 0
        image[(label + 1) % 3, 3:9, 4:10] = 1
    return found


def test_a_function_is_an_attack() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(20)
    target = victim.predict(images).label
    attacked = FunctionAttack(function=painted_box)(victim, images, target, Patch(6))
    assert attacked.broken.float().mean() > 0.7
    assert attacked.positions.tolist() == [[[3, 4]]] * 20
    larger = FunctionAttack(function=painted_box)(victim, images, target, Patch(4, count=4))
    assert torch.equal(larger.images, attacked.images)


def test_a_function_that_changes_too_much_is_refused_with_the_number_of_pixels() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(5)
    target = victim.predict(images).label
    with pytest.raises(InputError, match=r"one rectangle of 5 x 5 pixels; in image 0 .* changed 11 pixels outside"):
        FunctionAttack(function=painted_box)(victim, images, target, Patch(5))
    with pytest.raises(InputError, match="of the shape it was given"):
        FunctionAttack(function=lambda images, target: images[:, :, 1:])(victim, images, target, Patch(5))
    with pytest.raises(InputError, match=r"pixels in \[0, 1\]"):
        FunctionAttack(function=lambda images, target: images + 2)(victim, images, target, Patch(5))


def test_rectangles_are_found_exactly_where_they_exist() -> None:
    generator = torch.Generator().manual_seed(0)
    patch = Patch(2, 3, count=2)
    corners = list(product(range(4), range(4)))
    answers = []
    for _ in range(60):
        changed = torch.rand(5, 6, generator=generator) < 0.12
        positions = torch.tensor([[first, second] for first in corners for second in corners])
        holds = (patch_mask(positions, patch, 5, 6)[:, 0] | ~changed).flatten(1).all(1)
        found = cover_with_rectangles(changed, patch)
        assert (found is not None) == bool(holds.any())
        answers.append(found is not None)
        if found is not None:
            assert (patch_mask(found[None], patch, 5, 6)[0, 0] | ~changed).all()
    assert True in answers
    assert False in answers


class StandIn:
    """Has the call shape of an evasion attack of the adversarial-robustness-toolbox."""

    def __init__(self, *, honest: bool = True) -> None:
        self.honest = honest

    def generate(self, x: np.ndarray, y: np.ndarray | None = None, **kwargs: np.ndarray) -> np.ndarray:
        mask = kwargs["mask"]
        assert x.shape == mask.shape
        assert x.dtype == mask.dtype == np.float32
        wanted = np.zeros_like(x)
        wanted[np.arange(len(x)), (y + 1) % 3] = 1
        return np.where(mask == 1, wanted, x) if self.honest else wanted


def test_an_attack_of_the_toolbox_is_an_attack() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(20)
    target = victim.predict(images).label
    one, several = (
        ToolboxAttack(attack=StandIn(), locations=count)(victim, images, target, Patch(6)) for count in (1, 4)
    )
    assert 0 < int(one.broken.sum()) <= int(several.broken.sum())
    with pytest.raises(InputError, match="pixels outside"):
        ToolboxAttack(attack=StandIn(honest=False))(victim, images, target, Patch(6))
    with pytest.raises(InputError, match="must have a method `generate`"):
        ToolboxAttack(attack=object())


def test_an_attack_of_the_toolbox_that_goes_the_wrong_way_is_refused() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(8)
    target = victim.predict(images).label
    attack = StandIn()
    for targeted, aim in ((True, None), (False, 1)):
        attack.targeted = targeted
        with pytest.raises(InputError, match=f"targeted={not targeted}"):
            ToolboxAttack(attack=attack)(victim, images, target, Patch(6), aim=aim)


def test_a_missing_toolbox_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "art", None)
    with pytest.raises(InputError, match="is not installed"):
        as_toolbox_classifier(color_guard("undefended"), size=(12, 12), classes=3)
