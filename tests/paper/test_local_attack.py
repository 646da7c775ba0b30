"""The case study counts what it says, on logits made by hand and on networks with known weak spots."""

import pytest
import torch
from helpers.small_guards import build_once, random_images, randomize_weights
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
from patchguard.paper import local_attack, published
from patchguard.paper.context import StudyImages
from patchguard.paper.local_attack import Observed, Study, attack_and_observe, concatenate, histogram
from patchguard.paper.study_attacks import extend_attack, through_evidence
from patchguard.patch import Patch

FAST = PatchPGD(steps=8, step=0.2, locations=1)

# Two images, three classes, a row of four cells.
LOGITS = torch.tensor(
    [
        [[[9.0, 1, 1, 0]], [[0, 5, 2, 0]], [[0, 0, 0, 30]]],
        [[[1.0, 1, 1, 1]], [[2, 2, 2, 2]], [[0, 0, 0, 0]]],
    ]
)


@build_once
def resnet() -> LocalGuard:
    model = randomize_weights(build("resnet18", classes=3, width=0.1, small_images=True))
    return LocalGuard(Preprocess(), model, Evidence(low=None), Undefended())


def seen(wrong_cells: list[int], wrong: list[bool], values: torch.Tensor) -> Observed:
    return Observed(
        wrong_cells=torch.tensor(wrong_cells),
        wrong=torch.tensor(wrong),
        true=values[0],
        malicious=values[1],
        largest=values.amax((0, 2)),
    )


def make_study(original: Observed, broken: Observed, attacked: Observed) -> Study:
    return Study(original=original, broken=broken, attacked=attacked, ceiling=0.0, clips={})


def percentages(marks: dict[str, torch.Tensor]) -> dict[str, float]:
    return {kind: 100 * float(each.double().mean()) for kind, each in marks.items()}


# -- counting ----------------------------------------------------------------------------------------------------------


def test_cells_are_counted_on_logits_made_by_hand():
    observed = Observed.of(LOGITS, label=torch.tensor([2, 1]), target=torch.tensor([0, 1]))
    assert observed.wrong_cells.tolist() == [3, 0]
    assert observed.wrong_cell_fraction == 3 / 8
    assert observed.wrong.tolist() == [True, False]
    assert observed.true.tolist() == [[9, 1, 1, 0], [2, 2, 2, 2]]
    assert observed.malicious.tolist() == [[0, 0, 0, 30], [1, 1, 1, 1]]  # class 2 has the larger mean, then class 0
    assert observed.largest.tolist() == [30, 2]
    assert concatenate([observed, observed]).wrong_cells.tolist() == [3, 0, 3, 0]


def test_the_table_has_the_difference():
    values = torch.zeros(2, 2, 4)
    study = make_study(
        original=seen([1, 0], [False, False], values),
        broken=seen([2, 0], [True, False], values),
        attacked=seen([4, 2], [True, False], values),
    )
    assert list(local_attack.incorrect_predictions(study).values()) == [75.0, 12.5, 62.5, 50.0]


def test_the_published_differences_are_those_of_the_published_rows():
    for row in published.LOCAL_ATTACK.values():
        attacked, original, difference, _ = row.values()
        assert difference == pytest.approx(attacked - original)


def test_the_histogram_counts_values_above_the_limit_of_each_class():
    values = torch.tensor([[[5.0, 21, 22, 40]], [[1.0, 20, 30, 60]]])
    clean = torch.tensor([[[50.0, 10, 10, 10]], [[0.0, 0, 0, 0]]])
    original = seen([0], [False], clean)
    study = make_study(original, original, seen([3], [True], values))
    assert histogram(study, bins=4) == {
        "edges": [20.0, 30.0, 40.0, 50.0, 60.0],
        "true": [2, 1, 0, 0],
        "malicious": [1, 0, 0, 1],
        "clean_true": [0, 0, 1, 0],
    }
    rows = {row.label: row.ours for row in local_attack.logits_table(study, "").rows}
    assert rows["malicious class, attacked"] == (25.0, 20.0, 60.0, 60.0, 60.0)  # above 50, and quantiles
    assert rows["true class, attacked"][0] == 0.0


def test_a_network_of_small_logits_gets_a_limit_of_its_own():
    stage = seen([0], [False], torch.arange(20.0).view(2, 1, 10) / 20)
    counts = histogram(make_study(stage, stage, stage), bins=2)
    assert 0.8 < counts["edges"][0] < 0.9
    assert sum(counts["malicious"]) + sum(counts["true"]) == 2


# -- attacks -----------------------------------------------------------------------------------------------------------


def test_an_attack_that_continues_changes_its_patch_alone_and_never_loses():
    guard, images, patch = resnet(), random_images(6, 32), Patch(6)
    target = guard.predict(images).label
    target[0] = (target[0] + 1) % 3  # wrong as it is: gets a patch all the same
    made = FAST(guard, images, target, patch)
    extended = extend_attack(guard, images, target, patch, made, StepSchedule(steps=10, step=0.1))
    differs = (extended != images).any(1)
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

    before, after = loss(made.images), loss(extended)
    assert (after >= before - 1e-5).all()
    assert (after > before + 1e-3).any()


def test_an_attacked_network_has_more_wrong_cells():
    guard, images = resnet(), (random_images(6, 32) * 255).round().to(torch.uint8)
    study_images = StudyImages(images, guard.predict(images.float() / 255).label, tuple(range(6)))
    study = attack_and_observe(guard, study_images, FAST, Patch(12))
    assert study.original.wrong.tolist() == [False] * 6
    assert study.attacked.wrong_cell_fraction > study.original.wrong_cell_fraction
    assert study.attacked.wrong_cell_fraction >= study.broken.wrong_cell_fraction
    assert study.attacked.malicious.mean() > study.original.malicious.mean()


def test_a_ceiling_stops_an_attack_that_lives_on_large_logits_and_an_attack_through_it_knows():
    images = StudyImages(dark_images(6), torch.zeros(6, dtype=torch.int64), tuple(range(6)))
    study = attack_and_observe(undefended_guard(Spike()), images, FAST, Patch(6))
    assert local_attack.incorrect_predictions(study)["Incorrect global predictions"] == 100.0
    assert study.ceiling == 5.0
    clips = {clip: percentages(marks) for clip, marks in study.clips.items()}
    assert {clip: each["clean"] for clip, each in clips.items()} == dict.fromkeys(clips, 100.0)
    assert clips["(-inf, inf)"]["adaptive"] == 0.0
    assert clips["(0, inf)"]["adaptive"] == 0.0
    assert clips["(0, c_h)"]["adaptive"] == 100.0
    assert local_attack.logits_table(study, "").rows[1].ours[0] > 0  # malicious logits above the largest clean one
    victim = through_evidence(local_attack.clip_logits(undefended_guard(Spike()), 0.0, 5.0))
    bright = torch.ones(1, 3, 32, 32, requires_grad=True)
    logits = victim.differentiable_logits(bright)
    assert logits.max() == 5.0
    assert torch.autograd.grad(logits.sum(), bright)[0].abs().sum() > 0  # cut, and yet it pulls


def test_a_study_does_not_depend_on_how_images_are_batched():
    images = StudyImages(dark_images(5), torch.tensor([0, 0, 1, 0, 0]), (3, 14, 15, 92, 65))
    whole, parts = (
        attack_and_observe(undefended_guard(Spike()), images, FAST, Patch(6), batch_pixels=pixels)
        for pixels in (None, 2 * 32 * 32)
    )
    for stage in ("original", "broken", "attacked"):
        for name, values in vars(getattr(whole, stage)).items():
            assert torch.equal(getattr(getattr(parts, stage), name), values)
    assert local_attack.ceiling_table(parts) == local_attack.ceiling_table(whole)
    assert int(whole.original.wrong.sum()) == 1


def test_a_study_is_of_an_undefended_network():
    images = StudyImages(dark_images(1), torch.zeros(1, dtype=torch.int64), (0,))
    guard = undefended_guard(Spike())
    defended = LocalGuard(guard.preprocess, guard.model, Evidence(low=0.0, high=5.0), ClippedSum())
    with pytest.raises(InputError, match="must be undefended; got ClippedSum"):
        attack_and_observe(defended, images, FAST, Patch(6))
