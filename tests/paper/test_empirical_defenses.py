"""Attacks that know a cleaning beat it; certificates hold beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import color_network
from helpers.reproduction import save_model, thin_guard
from helpers.small_guards import random_images, randomize_weights, srf_guard
from helpers.weak_networks import Texture, dark_images, undefended_guard

from patchguard.attacks.adaptive import Adaptive
from patchguard.attacks.baselines import Colors
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.data.catalog import CIFAR10_CLASSES
from patchguard.data.source import open_source
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import empirical_defenses
from patchguard.paper.context import Context, StudyImages
from patchguard.paper.empirical_defenses import (
    Options,
    StillCorrect,
    accuracies,
    attack_victim,
    compare,
    make_cleanings,
)
from patchguard.paper.experiment import to_png
from patchguard.paper.image_cleaning import Cleaned
from patchguard.patch import Patch

FAST = Options(
    attack=PatchPGD(steps=40, step=0.05, locations=2),
    adaptive=Adaptive(steps=4, step=0.2, locations=1),
    tries=2,
    area=0.06,
)


@pytest.mark.slow
def test_an_attack_through_the_smoothing_breaks_what_one_on_the_bare_network_does_not():
    images = StudyImages(dark_images(4), torch.zeros(4, dtype=torch.int64), tuple(range(4)))
    kept = compare(undefended_guard(Texture()), images, FAST)
    assert all(each.clean.all() and each.certified is None for each in kept.values())
    assert not kept["none"].plain.any()
    smoothed = kept["local_gradient_smoothing"]
    assert int(smoothed.plain.sum()) >= 2
    assert not smoothed.adaptive.any()


def test_gradients_through_the_smoothing_need_no_guesses():
    guard, images, target = undefended_guard(Texture()), dark_images(6).float() / 255, torch.zeros(6, dtype=torch.int64)
    victims = [Cleaned(guard, cleaning) for cleaning in make_cleanings(*images.shape[-2:])["local_gradient_smoothing"]]
    patch = Patch.of_area(FAST.area, height=images.shape[-2], width=images.shape[-1])
    assert not attack_victim(victims, images, target, images, [FAST.attack], patch).adaptive.any()


def test_a_victim_that_hides_its_gradient_falls_to_guesses():
    class Hidden:
        """Answers as the network does; its gradient is 0 everywhere."""

        def predict(self, images):
            return guard.predict(images)

        def differentiable_logits(self, images):
            return guard.differentiable_logits(images.detach()) + 0 * images.sum()

    guard, (images, _) = color_network.color_guard("undefended"), color_network.tinted_images(12)
    target = guard.predict(images).label
    climbed = attack_victim([Hidden()], images, target, images, [FAST.attack], Patch(7))
    guessed = attack_victim([Hidden()], images, target, images, [FAST.attack, Colors(tries=20)], Patch(7))
    assert climbed.adaptive.all()
    assert not guessed.adaptive.all()


def test_a_certified_guard_beside_keeps_at_least_what_it_certifies():
    certified = srf_guard(side=16)
    pixels = (random_images(10, 16) * 255).round().to(torch.uint8)
    images = StudyImages(pixels, certified.predict(pixels.float() / 255).label, tuple(range(10)))
    bare = LocalGuard(Preprocess(), certified.model, Evidence(low=None), Undefended())
    options = replace(FAST, attack=replace(FAST.attack, steps=4))
    with pytest.raises(InputError, match="`guard` must be undefended"):
        compare(certified, images, options)
    kept = compare(bare, images, options, certified=certified)["certified"]
    assert not kept.refuted.any()
    counts = {column: value.correct for column, value in accuracies(kept).items()}
    assert 0 < counts["certified"] < counts["clean"]  # both kinds are there
    assert counts["certified"] <= counts["adaptive"] <= counts["plain"] <= counts["clean"]


def test_a_refuted_certificate_is_counted():
    yes, no = torch.tensor([True, True]), torch.tensor([True, False])
    assert StillCorrect(clean=yes, plain=yes, adaptive=no, certified=yes).refuted.tolist() == [False, True]
    assert StillCorrect(clean=yes, plain=yes, adaptive=no).refuted.tolist() == [False, False]


@pytest.mark.slow
def test_the_experiment_compares_the_models_of_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = randomize_weights(build("resnet18", classes=10, width=0.1, small_images=True))
    context = Context(cache=tmp_path, limit=2)
    save_model(
        context, "cifar10_resnet18", LocalGuard(Preprocess(), model, Evidence(low=None), Undefended(), CIFAR10_CLASSES)
    )
    save_model(context, "cifar10", thin_guard())
    monkeypatch.setattr(Context, "_all_images", lambda self, dataset: open_source("sample"))
    quick = Options(attack=replace(FAST.attack, steps=1), adaptive=replace(FAST.adaptive, steps=1), tries=1)
    monkeypatch.setattr(empirical_defenses, "Options", lambda seed: quick)
    result = empirical_defenses.run(context, "cifar10")
    (table,) = result.tables
    assert [row.label for row in table.rows] == [
        "none",
        "local gradient smoothing",
        "digital watermarking",
        "certified",
    ]
    assert [row.note.split(",")[0] for row in table.rows] == ["cifar10_resnet18"] * 3 + ["cifar10"]
    assert [row.ours[3] is None for row in table.rows] == [True, True, True, False]
    assert result.refuted == 0
    assert to_png(result.figures["empirical_defenses"]).startswith(b"\x89PNG")
