"""Attacks that know a cleaning beat it; certificates hold beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import color_network
from helpers.small_guards import random_images, randomize_weights, srf_guard
from helpers.weak_networks import Texture, dark_images, undefended_guard

from patchguard.attacks.adaptive import Adaptive
from patchguard.attacks.baselines import Colors
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import empirical_defenses
from patchguard.paper.empirical import Cleaned
from patchguard.paper.empirical_defenses import Kept, Options, cleanings, kept
from patchguard.paper.study_images import StudyImages
from patchguard.patch import Patch
from patchguard.storage import zoo

FAST = Options(
    attack=PatchPGD(steps=40, step=0.05, locations=2),
    adaptive=Adaptive(steps=4, step=0.2, locations=1),
    tries=2,
    area=0.06,
)


def test_an_attack_through_the_smoothing_breaks_what_one_on_the_bare_network_does_not():
    images = StudyImages(dark_images(6), torch.zeros(6, dtype=torch.int64), tuple(range(6)))
    rows = empirical_defenses.run(undefended_guard(Texture()), images, FAST)["defenses"]
    assert {name: row["clean"]["share"] for name, row in rows.items()} == dict.fromkeys(rows, 1.0)
    assert rows["none"]["plain"]["share"] == 0.0
    smoothed = rows["local_gradient_smoothing"]
    assert smoothed["plain"]["share"] >= 0.5
    assert smoothed["adaptive"]["share"] == 0.0
    assert all(row["certified"] is None and row["certified_and_broken"] is None for row in rows.values())


def test_gradients_through_the_smoothing_need_no_guesses():
    guard, images, target = undefended_guard(Texture()), dark_images(6).float() / 255, torch.zeros(6, dtype=torch.int64)
    victims = [Cleaned(guard, cleaning) for cleaning in cleanings(*images.shape[-2:])["local_gradient_smoothing"]]
    patch = Patch.of_area(FAST.area, height=images.shape[-2], width=images.shape[-1])
    assert not kept(victims, images, target, images, [FAST.attack], patch).adaptive.any()


def test_a_victim_that_hides_its_gradient_falls_to_guesses():
    class Hidden:
        """Answers as the network does; its gradient is 0 everywhere."""

        def predict(self, images):
            return guard.predict(images)

        def differentiable_logits(self, images):
            return guard.differentiable_logits(images.detach()) + 0 * images.sum()

    guard, (images, _) = color_network.color_guard("undefended"), color_network.tinted_images(12)
    target = guard.predict(images).label
    climbed = kept([Hidden()], images, target, images, [FAST.attack], Patch(7))
    guessed = kept([Hidden()], images, target, images, [FAST.attack, Colors(tries=20)], Patch(7))
    assert climbed.adaptive.all()
    assert not guessed.adaptive.all()


def test_a_certified_guard_beside_keeps_at_least_what_it_certifies():
    certified = srf_guard(side=16)
    pixels = (random_images(12, 16) * 255).round().to(torch.uint8)
    images = StudyImages(pixels, certified.predict(pixels.float() / 255).label, tuple(range(12)))
    bare = LocalGuard(Preprocess(), certified.model, Evidence(low=None), Undefended())
    options = replace(FAST, attack=replace(FAST.attack, steps=4))
    with pytest.raises(InputError, match="`guard` must be undefended"):
        empirical_defenses.run(certified, images, options)
    row = empirical_defenses.run(bare, images, options, certified=certified)["defenses"]["certified"]
    assert row["certified_and_broken"] == 0
    assert 0 < row["certified"]["right"] < row["clean"]["right"]  # both kinds are there
    assert row["certified"]["right"] <= row["adaptive"]["right"] <= row["plain"]["right"] <= row["clean"]["right"]


def test_a_refuted_certificate_is_counted():
    yes, no = torch.tensor([True, True]), torch.tensor([True, False])
    assert Kept(clean=yes, plain=yes, adaptive=no, certified=yes).refuted.tolist() == [False, True]
    assert Kept(clean=yes, plain=yes, adaptive=no).refuted.tolist() == [False, False]


def test_the_command_writes_a_table_and_a_figure(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    model = randomize_weights(build("resnet18", classes=10, width=0.1, small_images=True))
    zoo.save(LocalGuard(Preprocess(), model, Evidence(low=None), Undefended()), tmp_path / "thin.safetensors")
    options = ["--data", "sample", "--limit", "4", "--steps", "2", "--locations", "1", "--device", "cpu"]
    arguments = ["--model", str(tmp_path / "thin.safetensors"), *options, "--out", str(tmp_path / "out")]
    assert empirical_defenses.main(arguments) == 0
    assert "adaptive attack" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["defenses"]) == ["none", "local_gradient_smoothing", "digital_watermarking"]
    assert (tmp_path / "out" / "empirical_defenses.png").stat().st_size > 1000

    refuted = {**summary, "defenses": {"certified": {**summary["defenses"]["none"], "certified_and_broken": 2}}}
    monkeypatch.setattr(empirical_defenses, "run", lambda *arguments, **settings: refuted)
    assert empirical_defenses.main(arguments) == 3
    assert "2 certified images were broken" in capsys.readouterr().err
