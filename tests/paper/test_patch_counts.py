"""Several patches on maps: every entry of the tables is what the defense itself certifies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_guards import ANY_MASKS, randomize_weights, srf_guard

from patchguard.defenses import CellMasking, ClippedSum, DoubleMasking, MajorityVote, RobustMasking, TrimmedMean
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import several_patches
from patchguard.paper.context import Context
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network
from patchguard.paper.outcome import png
from patchguard.patch import Patch

COUNT = 40
NETWORK = Network(label="thin", names=("thin",))


def maps_of(guard: LocalGuard, side: int) -> Maps:
    """Maps with a lead of the true class that differs from image to image."""
    generator = torch.Generator().manual_seed(1)
    grid = guard.field(side, side).grid
    targets = torch.randint(3, (COUNT,), generator=generator)
    logits = torch.randn(COUNT, 3, *grid, generator=generator)
    logits[torch.arange(COUNT), targets] += torch.linspace(0, 4, COUNT).view(-1, 1, 1)
    half = logits.half()
    places = (0, 1)
    return Maps(
        model="thin",
        dataset="cifar10",
        guard=guard,
        size=(side, side),
        local_logits=half.numpy(),
        targets=targets,
        sample_places=places,
        sample_logits=logits[: len(places)].numpy(),
        about={},
    )


@pytest.fixture(scope="module")
def cells() -> Maps:
    return maps_of(srf_guard(side=24), 24)


@pytest.fixture(scope="module")
def bands() -> Maps:
    model = randomize_weights(build("ds_resnet18", classes=3, width=0.05))
    return maps_of(LocalGuard(Preprocess(), model, Evidence(kind="confidence"), RobustMasking(masks=ANY_MASKS)), 32)


def counted(maps: Maps, evidence: Evidence, defense, windows) -> tuple[int, int]:
    found = evidence(torch.from_numpy(np.array(maps.local_logits)).float())
    right = defense.predict(found).label == maps.targets
    return int(right.sum()), int((right & defense.certify(found, windows).certified).sum())


def shares(entry) -> tuple[int, int]:
    return entry[0]["right"], entry[1]["right"]


def test_rules_for_patches_anywhere_are_the_defenses_own(cells: Maps, tmp_path: Path) -> None:
    study = several_patches.studied(cells, NETWORK, Context(cache=tmp_path))
    for number in (1, 2, 3):
        windows = replace(cells.windows(Patch(2)), count=number)
        area = 36 * number  # 6 x 6 cells each
        for name, evidence, defense in (
            ("cell masking", Evidence(low=0.0), CellMasking(cells=area, spatial=False)),
            ("trimmed mean", Evidence(low=None), TrimmedMean(trim=area, spatial=False)),
            ("clipped sum (CBN)", Evidence(kind="tanh"), ClippedSum()),
            ("majority vote (DS)", Evidence(kind="prediction"), MajorityVote()),
        ):
            assert shares(study.anywhere[name, number]) == counted(cells, evidence, defense, windows), (name, number)
    proved = [shares(study.anywhere["cell masking", number])[1] for number in (1, 2, 3)]
    assert COUNT > proved[0] > proved[1] > proved[2] > 0
    assert study.anywhere["robust masking, a mask per patch", 2] == "too many unions"


def test_merged_patches_are_one_larger_patch(cells: Maps, tmp_path: Path) -> None:
    study = several_patches.studied(cells, NETWORK, Context(cache=tmp_path))
    for box in (4, 8):
        windows = cells.windows(Patch(box))
        expected = counted(cells, Evidence(low=0.0), RobustMasking(masks=windows), windows)
        assert shares(study.merged["robust masking", box]) == expected
    windows = cells.windows(Patch(8))
    expected = counted(cells, Evidence(low=None), DoubleMasking(masks=windows), windows)
    assert shares(study.merged["double masking", 8]) == expected
    proved = [shares(study.merged["robust masking", box])[1] for box in (2, 8)]
    assert proved[0] > proved[1]


def test_bands_are_masked_with_a_mask_per_patch(bands: Maps, tmp_path: Path) -> None:
    study = several_patches.studied(bands, NETWORK, Context(cache=tmp_path))
    windows = replace(bands.windows(Patch(2)), count=2)
    expected = counted(bands, Evidence(kind="confidence"), RobustMasking(masks=windows), windows)
    found = shares(study.anywhere["robust masking, a mask per patch", 2])
    assert found == expected
    assert 0 < found[1] < shares(study.anywhere["robust masking, a mask per patch", 1])[1]
    # Masks of two boxes certify what masks of cells do not: they know that the cells of a patch are neighbours.
    assert found[1] > shares(study.anywhere["cell masking", 2])[1]


def test_a_study_is_two_tables_and_a_picture(cells: Maps, tmp_path: Path) -> None:
    study = several_patches.studied(cells, NETWORK, Context(cache=tmp_path))
    anywhere, merged = study.tables("CIFAR-10")
    assert anywhere.columns == ("1 clean", "1 robust", "2 clean", "2 robust", "3 clean", "3 robust")
    (masks,) = [row for row in anywhere.rows if row.label.startswith("robust masking")]
    assert masks.ours[2:] == (None,) * 4
    assert masks.note == "too many unions"
    assert len(merged.rows) == len(several_patches.BOXES["cifar10"]) + len(several_patches.BOXES["cifar10"]) // 2
    assert png(study.figure).startswith(b"\x89PNG")
