"""The universal patch: learned once, saved as a picture, used on other images."""

import pytest
import torch
from helpers.color_network import color_guard, tinted_images
from PIL import Image

from patchguard.attacks import Transformations, UniversalPatch, apply_patch, learn_patch, load_patch, save_patch
from patchguard.errors import InputError
from patchguard.patch import Patch


def test_a_patch_learned_on_some_images_works_on_others(tmp_path) -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(60)
    shares = []
    picture = learn_patch(
        victim, images[:20], 1, Patch(6), steps=40, step=0.05, progress=lambda number, share: shares.append(share)
    )
    assert len(shares) == 40
    assert sum(shares[-5:]) > sum(shares[:5])
    save_patch(picture, tmp_path / "patch.png")
    others = images[20:]
    target = victim.predict(others).label
    attacked = UniversalPatch(path=tmp_path / "patch.png", locations=3)(victim, others, target, Patch(6), aim=1)
    assert attacked.broken[target != 1].float().mean() > 0.7
    again = apply_patch(tmp_path / "patch.png", others, attacked.positions)
    touched = (attacked.images != others).flatten(1).any(1)
    assert torch.equal(again[touched], attacked.images[touched])


def test_a_picture_survives_its_file(tmp_path) -> None:
    picture = torch.randint(256, (3, 5, 9), generator=torch.Generator().manual_seed(0)) / 255
    save_patch(picture, tmp_path / "patch.png")
    assert torch.equal(load_patch(tmp_path / "patch.png"), picture)
    with Image.open(tmp_path / "patch.png") as file:
        assert file.size == (9, 5)


def test_a_picture_of_another_size_is_fitted_to_the_threat(tmp_path) -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(4)
    save_patch(torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0)), tmp_path / "patch.png")
    attacked = UniversalPatch(path=tmp_path / "patch.png")(
        victim, images, victim.predict(images).label, Patch(2, 4, count=2)
    )
    assert (attacked.images != images).any(1).flatten(1).sum(1).max() <= 16


def test_two_runs_learn_the_same() -> None:
    victim = color_guard("undefended")
    images, _ = tinted_images(8)
    first, second = (learn_patch(victim, images, 0, Patch(3), steps=3, seed=7) for _ in range(2))
    assert torch.equal(first, second)


def test_mistakes_are_named(tmp_path) -> None:
    images, _ = tinted_images(2)
    (tmp_path / "no.png").write_text("no picture")
    with pytest.raises(InputError, match="cannot be read"):
        load_patch(tmp_path / "no.png")
    with pytest.raises(InputError, match="inside the images"):
        apply_patch(torch.zeros(3, 4, 4), images, torch.tensor([[[0, 0]], [[9, 0]]]))
    with pytest.raises(InputError, match="transformations must have"):
        Transformations(smallest=2.0, largest=1.0)
    with pytest.raises(InputError, match="`aim` must be a class from 0 to"):
        learn_patch(color_guard("undefended"), images, 99, Patch(3), steps=1)
