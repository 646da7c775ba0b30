"""Certificates for several patches at once: unions of windows, enumerated."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.combinations import combine
from helpers.oracle import CIRCLE, LINE, Geometry
from helpers.oracle_grids import as_tensor, as_windows, assert_right

from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MaskedAgreement,
    RobustMasking,
    clipped_sum,
)
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows

WIDE = Geometry("wide", (1, 10))


@combine(
    one_in=3,
    patches={"2": 2, "3": 3},
    geometry={"line": LINE, "circle": CIRCLE},
    masks_count={"single masks": 1, "double masks": 2},
    threshold={text: Fraction(text) for text in ("0", "1/3", "1")},
)
def test_robust_masking_withstands_several_windows(geometry, masks_count, threshold, patches) -> None:
    generator = np.random.default_rng([geometry.wrap[1], masks_count, threshold.denominator, patches])
    boxes = geometry.boxes((1, 1))
    regions = oracle.unions(boxes, patches)
    mask_boxes = geometry.boxes((1, 2))
    masks = mask_boxes if masks_count == 1 else oracle.unions(mask_boxes, 2)
    defense = RobustMasking(masks=as_windows(geometry, (1, 2), masks_count), threshold=threshold)
    windows = as_windows(geometry, (1, 1), patches)
    maps = list(oracle.random_maps(generator, 25, 2, geometry.cells, 0, 2))
    found = defense.certify(Evidence(low=0.0, high=2.0, bits=0)(as_tensor(maps, geometry)), windows)
    rule = oracle.robust_masking(masks, threshold)
    certified = refuted = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert label == rule(u[None])[0]
        expected = float(oracle.robust_masking_margin(u, label, regions, masks, threshold, 2))
        assert margin == pytest.approx(expected, abs=1e-12)
        attackable = oracle.broken(u, regions, rule, label, (0, 1, 2))
        certified += margin > 0
        refuted += attackable.any()
        assert not (margin > 0 and attackable.any())
        if margin < 0 and threshold == 0:
            region = boxes[found.weakest[i].numpy()].max(0)
            assert oracle.broken(u, region[None], rule, label, (0, 1, 2)).all()
    assert certified >= 2
    assert refuted >= 2


def test_greedy_masking_of_two_windows_would_be_unsound() -> None:
    """Hiding the heaviest window, then the heaviest of the rest, is not the heaviest union."""
    generator = np.random.default_rng(22)
    single = LINE.boxes((1, 3))
    regions = oracle.unions(LINE.boxes((1, 1)), 2)
    pairs = oracle.unions(single, 2)

    def greedy(maps: np.ndarray) -> np.ndarray:
        first = single[(maps @ single.T).argmax(-1)]
        rest = maps * (1 - first)
        second = single[(rest @ single.T).argmax(-1)]
        return (rest * (1 - second)).sum(-1).argmax(-1)

    for u in oracle.random_maps(generator, 4000, 2, 9, 0, 4):
        label = int(greedy(u[None])[0])
        margin = oracle.robust_masking_margin(u, label, regions, pairs, Fraction(0), 4)
        if margin > 0 and oracle.broken(u, regions, greedy, label, (0, 2, 4)).any():
            break
    else:
        pytest.fail("no case refutes the greedy rule")
    rule = oracle.robust_masking(pairs, Fraction(0))
    label = int(rule(u[None])[0])
    margin = oracle.robust_masking_margin(u, label, regions, pairs, Fraction(0), 4)
    broken = oracle.broken(u, regions, rule, label, (0, 2, 4)).any()
    defense, windows = RobustMasking(masks=as_windows(LINE, (1, 3), 2)), as_windows(LINE, (1, 1), 2)
    assert_right(defense, Evidence(low=0.0, high=4.0, bits=0), u, LINE, windows, rule, margin, broken)


@pytest.mark.parametrize(
    ("kind", "tau"),
    [pytest.param(DoubleMasking, 0, marks=pytest.mark.slow), (DoubleMasking, 2), (MaskedAgreement, 0)],
)
def test_masks_of_two_boxes_withstand_two_windows(kind, tau) -> None:
    generator = np.random.default_rng(3)
    boxes = WIDE.boxes((1, 1))
    regions = oracle.unions(boxes, 2)
    defense = kind(masks=as_windows(WIDE, (1, 1), 2), tau=float(tau))
    windows = as_windows(WIDE, (1, 1), 2)
    rule = oracle.double_masking(regions, tau) if kind is DoubleMasking else oracle.masked_agreement(regions, tau)
    maps = list(oracle.random_maps(generator, 14, 2, 10, -2, 2, lead=(0.0, 1.0)))
    found = defense.certify(Evidence(low=None, bits=0)(as_tensor(maps, WIDE)), windows)
    held = found.margin > 0
    refuted = 0
    for i, u in enumerate(maps):
        label = int(found.label[i])
        expected = oracle.double_masking_margin if kind is DoubleMasking else oracle.agreement_margin
        assert float(found.margin[i]) == float(expected(u, label, regions, regions, tau))
        attackable = oracle.broken(u, regions, rule, label, (-4096, 4096)).any()
        assert not (held[i] and attackable)
        refuted += attackable
    assert int(held.sum()) >= 2
    assert refuted >= 2


@pytest.mark.parametrize("enumerated", [True, False])
def test_sums_withstand_two_windows(enumerated, monkeypatch) -> None:
    if not enumerated:
        monkeypatch.setattr(clipped_sum, "MOST_REGIONS", 0)
    generator = np.random.default_rng(8)
    regions = oracle.unions(LINE.boxes((1, 1)), 2)
    maps = list(oracle.random_maps(generator, 300, 3, 9, -1, 1))
    evidence = Evidence(low=-1.0, high=1.0, bits=0)(as_tensor(maps, LINE))
    windows = as_windows(LINE, (1, 1), 2)
    found = ClippedSum().certify(evidence, windows)
    assert found.weakest.shape == (300, 2)
    certified = refuted = 0
    for i, u in enumerate(maps):
        label = int(found.label[i])
        # Single cells never overlap, so the two heaviest windows are the heaviest union: both ways agree.
        assert float(found.margin[i]) == float(oracle.clipped_sum_margin(u, label, regions, -1, 1))
        attackable = oracle.broken(u, regions, oracle.plain_sum, label, (-1, 1)).any()
        certified += bool(found.certified[i])
        refuted += attackable
        assert not (found.certified[i] and attackable)
    assert min(certified, refuted) >= 20


def test_the_heaviest_windows_bound_a_union_that_is_not_enumerated(monkeypatch) -> None:
    evidence = Evidence(kind="tanh")(10 * torch.randn(50, 3, 1, 9, generator=torch.Generator().manual_seed(0)))
    windows = as_windows(LINE, (1, 2), 2)
    exact = ClippedSum().certify(evidence, windows).margin
    monkeypatch.setattr(clipped_sum, "MOST_REGIONS", 0)
    bound = ClippedSum().certify(evidence, windows).margin
    assert (bound <= exact).all()
    assert (bound < exact).any()


def test_treating_two_patches_as_one_is_refuted() -> None:
    generator = np.random.default_rng(2)
    boxes = LINE.boxes((1, 1))
    for u in oracle.random_maps(generator, 500, 2, 9, 0, 2):
        label = int(oracle.plain_sum(u[None])[0])
        claims = oracle.clipped_sum_margin(u, label, boxes, 0, 2) > 0
        if claims and oracle.broken(u, oracle.unions(boxes, 2), oracle.plain_sum, label, (0, 2)).any():
            break
    else:
        pytest.fail("no case needs both patches")
    evidence, margin = Evidence(low=0.0, high=2.0, bits=0), oracle.clipped_sum_margin(u, label, boxes, 0, 2)
    assert_right(ClippedSum(), evidence, u, LINE, as_windows(LINE, (1, 1)), oracle.plain_sum, margin, broken=False)
    margin = oracle.clipped_sum_margin(u, label, oracle.unions(boxes, 2), 0, 2)
    assert_right(ClippedSum(), evidence, u, LINE, as_windows(LINE, (1, 1), 2), oracle.plain_sum, margin, broken=True)


def test_what_would_not_finish_is_refused_and_the_position_free_certificate_offered() -> None:
    grid = (26, 26)
    windows = Windows.sliding(grid=grid, size=(6, 6), count=3)
    logits = torch.rand(1, 3, *grid)
    with pytest.raises(InputError, match="too many to enumerate"):
        RobustMasking(masks=windows).certify(logits, windows)
    with pytest.raises(InputError, match="spatial=False"):
        CellMasking(cells=108).certify(logits, windows)
    logits[:, 1] += 2
    assert CellMasking(cells=108, spatial=False).certify(logits, windows).certified.all()
    # A merged box is one window again.
    merged = replace(windows, count=1)
    assert RobustMasking(masks=merged).certify(logits, merged).certified.all()
