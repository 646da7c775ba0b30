"""Margins against the scores that some drift and some contents really reach.

Every score is a function of its own class alone, so the least score of the label and the greatest of a rival over all
drifts and all contents of a region are found class by class, with nothing left out. No margin may exceed their gap.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.oracle import Geometry
from helpers.oracle_grids import as_tensor, as_windows

from patchguard.defenses import CellMasking, ClippedSum, Defense, Median, RobustMasking, TrimmedMean
from patchguard.defenses.evidence import Evidence

LINE = Geometry("line", (1, 5))
CIRCLE = Geometry("circle", (1, 5), (False, True))
GRID = Geometry("grid", (2, 3))
HIGH = 4
Score = Callable[[np.ndarray], np.ndarray]  # (maps, cells) -> score


def robust_masking(masks: np.ndarray, threshold: Fraction) -> Score:
    def score(maps: np.ndarray) -> np.ndarray:
        total, hidden = maps.sum(-1), (maps @ masks.T).max(-1)
        return np.where(threshold.denominator * hidden > threshold.numerator * total, total - hidden, total)

    return score


def ranks(first: int, last: int) -> Score:
    return lambda maps: np.sort(maps, -1)[..., first - 1 : last].sum(-1)


@cache
def changes(region: tuple[int, ...], drift: int) -> tuple[np.ndarray, np.ndarray]:
    """Every drift of the cells outside a region, and every value of those inside; contents are marked by HIGH + 1."""
    options = [range(HIGH + 1) if inside else range(-drift, drift + 1) for inside in region]
    moves = np.array(list(product(*options)))
    return np.where(np.array(region), 0, moves), np.where(np.array(region), moves, 0)


def extremes(row: np.ndarray, region: np.ndarray, score: Score, drift: int) -> tuple[int, int]:
    moves, contents = changes(tuple(region.tolist()), drift)
    reached = score(np.where(region == 1, contents, np.clip(row + moves, 0, HIGH)))
    return int(reached.min()), int(reached.max())


def true_gap(u: np.ndarray, label: int, regions: np.ndarray, score: Score, drift: int) -> int:
    """min over regions and rivals of (least score of the label) - (greatest score of the rival)."""
    gaps = []
    for region in regions:
        bounds = [extremes(row, region, score, drift) for row in u]
        gaps.append(bounds[label][0] - max(most for k, (_, most) in enumerate(bounds) if k != label))
    return min(gaps)


def drawn(seed: list[int], count: int, classes: int, cells: int) -> list[np.ndarray]:
    """Maps of two kinds in turn: with a favoured class, and of totals that lie close together."""
    generator = np.random.default_rng(seed)
    led = oracle.random_maps(generator, count, classes, cells, 0, HIGH)
    return [u if i % 2 else generator.integers(0, 2 + i % 3, u.shape) for i, u in enumerate(led)]


def compare(
    defense: Defense,
    score: Score,
    maps: list[np.ndarray],
    geometry: Geometry,
    size: tuple[int, int],
    drift: int,
    exact: bool,
) -> tuple[int, int]:
    """Check every margin; return how many are the true gap and how many images are certified."""
    # A drift of just under one unit is charged as one unit.
    evidence = Evidence(low=0.0, high=float(HIGH), bits=0, drift=0.999 * drift)(as_tensor(maps, geometry))
    found = defense.certify(evidence, as_windows(geometry, size))
    regions = geometry.boxes(size)
    attained = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert label == oracle.first_max(score(u))
        truth = true_gap(u, label, regions, score, drift)
        assert margin == truth if exact else margin <= truth
        attained += margin == truth
    return attained, int(found.certified.sum())


SIZES = [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 2), (1, 2)), ((1, 1), (1, 3))]  # masks, windows


@pytest.mark.parametrize("drift", [0, 1])
@pytest.mark.parametrize("threshold", [Fraction(0), Fraction(1, 3), Fraction(3, 5), Fraction(1)], ids=str)
@pytest.mark.parametrize("geometry", [LINE, CIRCLE], ids=lambda each: each.name)
def test_robust_masking_never_promises_more_than_every_drift_and_contents_leave(geometry, threshold, drift) -> None:
    attained = certified = 0
    for number, (mask, size) in enumerate(SIZES):
        seed = [geometry.wrap[1], threshold.denominator, threshold.numerator, drift, number]
        defense = RobustMasking(masks=as_windows(geometry, mask), threshold=threshold)
        score = robust_masking(geometry.boxes(mask), threshold)
        maps = drawn(seed, 20 if drift else 60, 4, geometry.cells)
        same, proved = compare(defense, score, maps, geometry, size, drift, exact=threshold == 0)
        attained, certified = attained + same, certified + proved
    assert attained >= 20
    assert drift or certified >= 4


@pytest.mark.parametrize("drift", [0, 1])
@pytest.mark.parametrize(
    ("defense", "score"),
    [
        (ClippedSum(), lambda maps: maps.sum(-1)),
        (CellMasking(cells=2), ranks(1, 4)),
        (Median(), ranks(3, 3)),
        (TrimmedMean(trim=1), ranks(2, 5)),
    ],
    ids=["sum", "cells", "median", "trimmed"],
)
def test_sums_and_ranks_promise_just_what_every_drift_and_contents_leave(defense, score, drift) -> None:
    maps = drawn([drift], 30, 3, GRID.cells)
    attained, certified = compare(defense, score, maps, GRID, (1, 1), drift, exact=True)
    assert attained == len(maps)
    assert certified >= 1


# A rival of small total that no attack need be caught with, and one of large total that is always caught.
OVERTAKEN = [
    [[4, 4, 4, 4, 4], [4, 0, 4, 4, 0], [0, 0, 0, 3, 0]],
    [[4, 4, 4, 4, 4], [0, 4, 3, 0, 4], [0, 0, 0, 3, 0]],
    [[4, 4, 4, 4, 4], [1, 0, 4, 4, 1], [2, 1, 0, 0, 0]],
]


@pytest.mark.parametrize(
    ("mask", "size", "threshold"),
    [((1, 1), (1, 3), Fraction(0)), ((1, 3), (1, 2), Fraction(1, 2)), ((1, 2), (1, 1), Fraction(1))],
    ids=["uncovered", "threshold", "no detection"],
)
def test_no_rival_is_set_aside_that_could_come_closest(mask, size, threshold) -> None:
    """Image by image: in a batch, one image keeps rivals in play for all others."""
    generator = np.random.default_rng(2)
    regions, masks = LINE.boxes(size), LINE.boxes(mask)
    defense, windows = RobustMasking(masks=as_windows(LINE, mask), threshold=threshold), as_windows(LINE, size)
    drawn = generator.integers(0, 5, (40, 3, 5)) * (generator.random((40, 3, 5)) < generator.random((40, 3, 1)))
    for u in [*map(np.array, OVERTAKEN), *drawn]:
        evidence = Evidence(low=0.0, high=4.0, bits=0)(as_tensor([u], LINE))
        expected = oracle.robust_masking_margin(u, 0, regions, masks, threshold, 4)
        assert float(defense.certify(evidence, windows, label=0).margin) == float(expected)


@pytest.mark.parametrize("threshold", [Fraction(0), Fraction(1, 2)], ids=str)
def test_masks_that_are_the_windows_may_hold_one_another(threshold) -> None:
    """Lemma 1 needs boxes of one size: a mask around the window hides more than the window itself."""
    windows = as_windows(LINE, (1, 1))
    nested = type(windows)(grid=(1, 5), rows=((0, 1),), columns=((0, 1), (0, 3), (2, 4), (3, 4)))
    boxes = nested.cells.astype(np.int64)
    maps = drawn([7], 120, 3, 5)
    evidence = Evidence(low=0.0, high=float(HIGH), bits=0)(as_tensor(maps, LINE))
    found = RobustMasking(masks=nested, threshold=threshold).certify(evidence, nested)
    shortcut = 0
    for i, u in enumerate(maps):
        label = int(found.label[i])
        expected = oracle.robust_masking_margin(u, label, boxes, boxes, threshold, HIGH)
        assert float(found.margin[i]) == pytest.approx(float(expected), abs=1e-12)
        shortcut += expected != oracle.robust_masking_margin(u, label, boxes, boxes, threshold, HIGH, "uncovered")
    assert shortcut >= 20  # taking the evidence outside the window would give another margin


@pytest.mark.parametrize("threshold", [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1)], ids=str)
def test_with_many_classes_the_certified_label_is_the_predicted_one(threshold) -> None:
    """Above 16 classes the label is sought among those whose total can win; ties and single leaders both occur."""
    generator = np.random.default_rng(threshold.denominator)
    masks = as_windows(LINE, (1, 2))
    defense = RobustMasking(masks=masks, threshold=threshold)
    maps = list(generator.integers(0, 3, (300, 20, 5)))
    for i in range(0, 300, 3):  # one class far ahead: few others matter, in a batch where many do elsewhere
        maps[i][generator.integers(20)] = HIGH
    for i in range(0, 300, 2):  # one class has the largest total in one heap, which is hidden
        maps[i][generator.integers(20)] = np.array([0, HIGH, HIGH, 0, 3 * (i % 4 == 0)])
    evidence = Evidence(low=0.0, high=float(HIGH), bits=0)(as_tensor(maps, LINE))
    expected = oracle.first_max(robust_masking(LINE.boxes((1, 2)), threshold)(np.stack(maps)))
    assert torch.equal(defense.predict(evidence).label, torch.from_numpy(expected))
    assert torch.equal(defense.certify(evidence, masks).label, torch.from_numpy(expected))
    for i in range(0, 300, 30):
        assert int(defense.certify(evidence[i : i + 1], masks).label) == expected[i]
