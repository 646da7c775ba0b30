"""The case study counts what it says, on maps made by hand and on networks with known weak spots."""

import json
from pathlib import Path

import pytest
import torch
from helpers.small_guards import random_images, randomize_weights
from helpers.weak_networks import Spike, dark_images, undefended_guard

from patchguard.attacks.base import patch_mask
from patchguard.attacks.gradient_ascent import StepSchedule
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.defenses import ClippedSum, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import case_figures, case_study, published
from patchguard.paper.case_study import CaseStudy, Options
from patchguard.paper.local_maps import Observed, Stages, histogram, joined, local_attack_table, observed
from patchguard.paper.study_images import StudyImages, open_model
from patchguard.paper.victims import Through, press
from patchguard.patch import Patch
from patchguard.storage import zoo

FAST = PatchPGD(steps=8, step=0.2, locations=1)

# Two images, three classes, a row of four cells.
MAPS = torch.tensor(
    [
        [[[9.0, 1, 1, 0]], [[0, 5, 2, 0]], [[0, 0, 0, 30]]],
        [[[1.0, 1, 1, 1]], [[2, 2, 2, 2]], [[0, 0, 0, 0]]],
    ]
)


def resnet(classes: int = 3) -> LocalGuard:
    model = randomize_weights(build("resnet18", classes=classes, width=0.1, small_images=True))
    return LocalGuard(Preprocess(), model, Evidence(low=None), Undefended())


def seen(wrong_cells: list[int], wrong: list[bool], values: torch.Tensor) -> Observed:
    return Observed(
        wrong_cells=torch.tensor(wrong_cells),
        wrong=torch.tensor(wrong),
        true=values[0],
        malicious=values[1],
        largest=values.amax((0, 2)),
    )


# -- counting ----------------------------------------------------------------------------------------------------------


def test_cells_are_counted_on_a_map_made_by_hand():
    found = observed(MAPS, label=torch.tensor([2, 1]), target=torch.tensor([0, 1]))
    assert found.wrong_cells.tolist() == [3, 0]
    assert found.wrong_cell_share == 3 / 8
    assert found.wrong.tolist() == [True, False]
    assert found.true.tolist() == [[9, 1, 1, 0], [2, 2, 2, 2]]
    assert found.malicious.tolist() == [[0, 0, 0, 30], [1, 1, 1, 1]]  # class 2 has the larger mean, then class 0
    assert found.largest.tolist() == [30, 2]
    again = joined([found, found])
    assert again.wrong_cells.tolist() == [3, 0, 3, 0]


def test_the_table_has_the_difference_and_the_published_numbers_beside():
    values = torch.zeros(2, 2, 4)
    study = Stages(
        original=seen([1, 0], [False, False], values),
        broken=seen([2, 0], [True, False], values),
        attacked=seen([4, 2], [True, False], values),
    )
    found = local_attack_table(study, "cifar10")
    ours = {name: row["ours"] for name, row in found["rows"].items()}
    assert ours == {
        "incorrect_local_attacked": 75.0,
        "incorrect_local_original": 12.5,
        "incorrect_local_difference": 62.5,
        "incorrect_global": 50.0,
    }
    assert found["rows"]["incorrect_global"]["published"] == 95.5
    assert found["incorrect_local_at_first_success"] == 25.0
    assert local_attack_table(study, "flowers")["rows"]["incorrect_global"]["published"] is None


def test_the_published_differences_are_those_of_the_published_rows():
    for row in published.LOCAL_ATTACK.values():
        attacked, original = row["incorrect_local_attacked"], row["incorrect_local_original"]
        assert row["incorrect_local_difference"] == pytest.approx(attacked - original)


def test_the_histogram_counts_values_above_the_limit_of_each_class():
    values = torch.tensor([[[5.0, 21, 22, 40]], [[1.0, 20, 30, 60]]])
    clean = torch.tensor([[[50.0, 10, 10, 10]], [[0.0, 0, 0, 0]]])
    original = seen([0], [False], clean)
    found = histogram(Stages(original=original, broken=original, attacked=seen([3], [True], values)), bins=4)
    assert found["large"] == 20.0
    assert found["edges"] == [20.0, 30.0, 40.0, 50.0, 60.0]
    assert found["true"] == [2, 1, 0, 0]
    assert found["malicious"] == [1, 0, 0, 1]
    assert found["clean_true"] == [0, 0, 1, 0]
    assert found["share_large"] == {"true": 0.75, "malicious": 0.5, "clean_true": 0.25}
    assert found["largest_clean_logit"] == 50.0
    assert found["share_above_largest_clean"] == {"true": 0.0, "malicious": 0.25, "clean_true": 0.0}
    assert found["quantiles"]["malicious"] == {"0.5": 20.0, "0.9": 60.0, "0.99": 60.0, "1.0": 60.0}


def test_a_network_of_small_logits_gets_a_limit_of_its_own():
    values = torch.arange(20.0).view(2, 1, 10) / 20
    stage = seen([0], [False], values)
    found = histogram(Stages(original=stage, broken=stage, attacked=stage), bins=2)
    assert 0.8 < found["large"] < 0.9
    assert sum(found["malicious"]) + sum(found["true"]) == 2


# -- attacks -----------------------------------------------------------------------------------------------------------


def test_an_attack_that_goes_on_changes_its_patch_alone_and_never_loses():
    guard, images, patch = resnet(), random_images(6, 32), Patch(6)
    target = guard.predict(images).label
    target[0] = (target[0] + 1) % 3  # wrong as it is: gets a patch all the same
    made = FAST(guard, images, target, patch)
    pressed = press(guard, images, target, patch, made, StepSchedule(steps=10, step=0.1))
    differs = (pressed != images).any(1)
    assert differs[0].any()
    outside = ~patch_mask(made.positions, patch, 32, 32)[:, 0]
    assert not (differs & outside)[1:].any()
    assert all(
        int(rows.sum()) <= 6 and int(columns.sum()) <= 6
        for rows, columns in zip(differs.any(2), differs.any(1), strict=True)
    )

    def loss(some: torch.Tensor) -> torch.Tensor:
        logits = guard.local_logits(some).mean((2, 3))
        return torch.nn.functional.cross_entropy(logits, target, reduction="none")

    before, after = loss(made.images), loss(pressed)
    assert (after >= before - 1e-5).all()
    assert (after > before + 1e-3).any()


def test_a_study_of_a_batch_finds_more_wrong_cells_after_the_attack():
    guard, images = resnet(), random_images(6, 32)
    target = guard.predict(images).label
    study = CaseStudy.of(guard, images, target, FAST, Patch(12), schedule=StepSchedule(steps=15, step=0.2))
    stages = study.stages
    assert stages.original.wrong.tolist() == [False] * 6
    assert stages.attacked.wrong_cell_share > stages.original.wrong_cell_share
    assert stages.attacked.wrong_cell_share >= stages.broken.wrong_cell_share
    assert stages.attacked.malicious.mean() > stages.original.malicious.mean()


def test_a_ceiling_stops_an_attack_that_lives_on_large_logits_and_an_attack_through_it_knows():
    images = StudyImages(dark_images(6), torch.zeros(6, dtype=torch.int64), tuple(range(6)))
    summary = case_study.run(undefended_guard(Spike()), images, options=Options(attack=FAST))
    assert summary["tab-local-attack"]["rows"]["incorrect_global"]["ours"] == 100.0
    assert summary["ceiling"]["c_h"] == 5.0
    clips = summary["ceiling"]["clips"]
    assert {clip: shares["clean"]["share"] for clip, shares in clips.items()} == dict.fromkeys(clips, 1.0)
    assert clips["(-inf, inf)"]["adaptive"]["share"] == 0.0
    assert clips["(0, inf)"]["adaptive"]["share"] == 0.0
    assert clips["(0, c_h)"]["adaptive"]["share"] == 1.0
    assert summary["histogram"]["share_above_largest_clean"]["malicious"] > 0
    victim = Through(case_study.clipped(undefended_guard(Spike()), 0.0, 5.0))
    bright = torch.ones(1, 3, 32, 32, requires_grad=True)
    maps = victim.differentiable_logits(bright)
    assert maps.max() == 5.0
    assert torch.autograd.grad(maps.sum(), bright)[0].abs().sum() > 0  # cut, and yet it pulls


def test_a_study_does_not_depend_on_how_images_are_batched():
    images = StudyImages(dark_images(5), torch.tensor([0, 0, 1, 0, 0]), (3, 14, 15, 92, 65))
    whole, parts = (
        case_study.run(undefended_guard(Spike()), images, options=Options(attack=FAST, batch_pixels=pixels))
        for pixels in (None, 2 * 32 * 32)
    )
    assert parts == whole
    assert whole["tab-local-attack"]["incorrect_global_original"]["right"] == 1


def test_a_study_is_of_an_undefended_network():
    images = StudyImages(dark_images(1), torch.zeros(1, dtype=torch.int64), (0,))
    guard = undefended_guard(Spike())
    defended = LocalGuard(guard.preprocess, guard.model, Evidence(low=0.0, high=5.0), ClippedSum())
    with pytest.raises(InputError, match="must be undefended; got ClippedSum"):
        case_study.run(defended, images)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_summary_and_figures(tmp_path: Path, capsys):
    zoo.save(resnet(classes=10), tmp_path / "thin.safetensors")
    out = tmp_path / "out"
    options = ["--data", "sample", "--limit", "6", "--steps", "2", "--locations", "1", "--device", "cpu"]
    code = case_study.main(["--model", str(tmp_path / "thin.safetensors"), *options, "--out", str(out)])
    printed = capsys.readouterr()
    assert code == 0
    assert "incorrect_local_attacked" in printed.out
    assert "attack:" in printed.err
    summary = json.loads((out / "summary.json").read_text())
    assert summary["model"] == "thin"
    assert summary["images"] == 6
    assert summary["settings"]["patch"] == [6, 6]
    assert summary["settings"]["attack"]["steps"] == 2
    assert set(summary["clipping"]["rows"]) == set(published.CLIPPING["cifar10"])
    assert {path.name for path in out.glob("*.png")} == {f"{name}.png" for name in case_figures.figures(summary)}
    assert case_study.main(["--model", "nonsense", "--out", str(out)]) == 1
    assert "neither a file nor a known name" in capsys.readouterr().err


def test_a_model_made_of_weights_says_how():
    with pytest.raises(InputError, match="made of the weights of a ResNet-50 of your own"):
        open_model("imagenette_resnet50", None)
    with pytest.raises(InputError, match="'cifar10' has its own"):
        open_model("cifar10", "some.safetensors")
