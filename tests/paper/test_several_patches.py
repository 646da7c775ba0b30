"""Several patches: every entry of the tables is what the defense itself certifies."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.reproduction import random_logits
from helpers.small_guards import ANY_MASKS, randomize_weights, srf_guard

from patchguard.defenses import CellMasking, ClippedSum, DoubleMasking, MajorityVote, RobustMasking, TrimmedMean
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import several_patches
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.paper.experiment import to_png
from patchguard.patch import Patch

COUNT = 40


def leading_logits(guard: LocalGuard, side: int) -> CachedLogits:
    """Logits with a lead of the true class that differs from image to image."""
    generator = torch.Generator().manual_seed(1)
    grid = guard.field(side, side).grid
    targets = torch.randint(3, (COUNT,), generator=generator)
    logits = torch.randn(COUNT, 3, *grid, generator=generator)
    logits[torch.arange(COUNT), targets] += torch.linspace(0, 4, COUNT).view(-1, 1, 1)
    return random_logits(guard, logits, targets, side)


@pytest.fixture(scope="module")
def cells() -> CachedLogits:
    return leading_logits(srf_guard(side=24), 24)


@pytest.fixture(scope="module")
def bands() -> CachedLogits:
    model = randomize_weights(build("ds_resnet18", classes=3, width=0.05))
    guard = LocalGuard(Preprocess(), model, Evidence(kind="confidence"), RobustMasking(masks=ANY_MASKS))
    return leading_logits(guard, 32)


@pytest.fixture(scope="module")
def of_cells(cells: CachedLogits, tmp_path_factory: pytest.TempPathFactory):
    return several_patches.measure_rules(cells, Context(cache=tmp_path_factory.mktemp("cache")))


def expected(logits: CachedLogits, evidence: Evidence, defense, windows) -> list[int]:
    values = evidence(torch.from_numpy(np.array(logits.local_logits)).float())
    correct = defense.predict(values).label == logits.targets
    return [int(correct.sum()), int((correct & defense.certify(values, windows).certified).sum())]


def counts(accuracies) -> list[int]:
    return [each.correct for each in accuracies]


def test_rules_for_patches_anywhere_are_the_defenses_own(cells: CachedLogits, of_cells) -> None:
    anywhere, _, reasons = of_cells
    for number in (1, 2, 3):
        windows = replace(cells.windows(Patch(2)), count=number)
        area = 36 * number  # 6 x 6 cells each
        for name, evidence, defense in (
            ("cell masking", Evidence(low=0.0), CellMasking(cells=area, spatial=False)),
            ("trimmed mean", Evidence(low=None), TrimmedMean(trim=area, spatial=False)),
            ("clipped sum (CBN)", Evidence(kind="tanh"), ClippedSum()),
            ("majority vote (DS)", Evidence(kind="prediction"), MajorityVote()),
        ):
            assert counts(anywhere[name, number]) == expected(cells, evidence, defense, windows), (name, number)
    certified = [counts(anywhere["cell masking", number])[1] for number in (1, 2, 3)]
    assert COUNT > certified[0] > certified[1] > certified[2] > 0
    assert reasons["robust masking, a mask per patch", 2] == "too many unions"


def test_merged_patches_are_one_larger_patch(cells: CachedLogits, of_cells) -> None:
    _, merged, _ = of_cells
    for box in (4, 8):
        windows = cells.windows(Patch(box))
        robust = expected(cells, Evidence(low=0.0), RobustMasking(masks=windows), windows)
        assert counts(merged["robust masking", box]) == robust
    windows = cells.windows(Patch(8))
    double = expected(cells, Evidence(low=None), DoubleMasking(masks=windows), windows)
    assert counts(merged["double masking", 8]) == double
    certified = [counts(merged["robust masking", box])[1] for box in (2, 8)]
    assert certified[0] > certified[1]


def test_bands_are_masked_with_a_mask_per_patch(bands: CachedLogits, tmp_path: Path) -> None:
    anywhere, _, _ = several_patches.measure_rules(bands, Context(cache=tmp_path))
    windows = replace(bands.windows(Patch(2)), count=2)
    two = counts(anywhere["robust masking, a mask per patch", 2])
    assert two == expected(bands, Evidence(kind="confidence"), RobustMasking(masks=windows), windows)
    assert 0 < two[1] < counts(anywhere["robust masking, a mask per patch", 1])[1]
    # Masks of two boxes certify what masks of cells do not: they know that the cells of a patch are neighbors.
    assert two[1] > counts(anywhere["cell masking", 2])[1]


def test_a_network_has_two_tables_and_a_picture(cells: CachedLogits, of_cells) -> None:
    anywhere, merged = several_patches.make_tables(cells, "thin on CIFAR-10", *of_cells)
    assert anywhere.columns == ("1 clean", "1 robust", "2 clean", "2 robust", "3 clean", "3 robust")
    (masks,) = [row for row in anywhere.rows if row.label.startswith("robust masking")]
    assert masks.ours[2:] == (None,) * 4
    assert masks.note == "too many unions"
    assert len(merged.rows) == len(several_patches.BOXES["cifar10"]) + len(several_patches.BOXES["cifar10"]) // 2
    rules = several_patches.make_rules(cells)
    drawing = partial(several_patches.draw, "thin", 2, rules, of_cells[0], of_cells[1])
    assert to_png(drawing).startswith(b"\x89PNG")
