"""CellMasking, Median and TrimmedMean against exhaustive rewriting."""

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.combinations import combine
from helpers.oracle import CIRCLE, GRID, LINE
from helpers.oracle_grids import as_tensor, as_windows, assert_right

from patchguard.defenses import CellMasking, Median, TrimmedMean
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError

DEFENSES = {
    "median": lambda spatial: Median(spatial=spatial),
    "trimmed 1": lambda spatial: TrimmedMean(trim=1, spatial=spatial),  # |w| > trim
    "trimmed 3": lambda spatial: TrimmedMean(trim=3, spatial=spatial),
    "cells 1": lambda spatial: CellMasking(cells=1, spatial=spatial),  # |w| > cells
    "cells 3": lambda spatial: CellMasking(cells=3, spatial=spatial),
}


@combine(
    one_in=3,
    spatial={"spatial": True, "position-free": False},
    count={"one patch": 1, "two patches": 2},
    geometry={"line": LINE, "grid": GRID, "circle": CIRCLE},
    name={name: name for name in DEFENSES},
)
def test_rank_rules_are_certified_exactly(name, geometry, count, spatial) -> None:
    generator = np.random.default_rng([len(name), geometry.cells, geometry.wrap[1], count])
    size = (1, 2) if count == 1 else (1, 1)
    boxes = geometry.boxes(size)
    regions = boxes if count == 1 else oracle.unions(boxes, 2)
    windows = as_windows(geometry, size, count)
    defense = DEFENSES[name](spatial)
    ranks = defense.ranks(geometry.cells)
    rule = oracle.rank_sum(*ranks)
    low = 0 if name.startswith("cells") else -2
    maps = list(oracle.random_maps(generator, 120, 3, geometry.cells, low, 4))
    found = defense.certify(Evidence(low=float(low), high=4.0, bits=0)(as_tensor(maps, geometry)), windows)
    certified = refuted = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert label == rule(u[None])[0]
        if spatial:
            assert margin == float(oracle.rank_margin(u, label, regions, ranks, low, 4))
        else:
            assert margin <= float(oracle.rank_margin(u, label, regions, ranks, low, 4))
            assert found.weakest is None
        attackable = oracle.broken(u, regions, rule, label, (low, 2, 4))
        certified += margin > 0
        refuted += attackable.any()
        assert not (margin > 0 and attackable.any())
        if margin < 0 and spatial:
            region = np.maximum.reduce(boxes[np.atleast_1d(found.weakest[i].numpy())])
            assert oracle.broken(u, region[None], rule, label, (low, 2, 4)).all()
    assert refuted >= 5
    assert certified >= (5 if spatial else 1)


@pytest.mark.parametrize("mutant", ["forgets the label's loss", "forgets the rival's gain", "ties"])
@pytest.mark.parametrize(
    ("defense", "ranks"),
    [(CellMasking(cells=2), (1, 7)), (Median(), (5, 5)), (TrimmedMean(trim=2), (3, 7))],
    ids=["cells", "median", "trimmed"],
)
def test_a_mutant_of_the_rank_bound_is_refuted(mutant, defense, ranks) -> None:
    generator = np.random.default_rng(1)
    regions, rule = LINE.boxes((1, 2)), oracle.rank_sum(*ranks)
    for u in oracle.random_maps(generator, 3000, 2, 9, 0, 3):
        label = int(rule(u[None])[0])
        margin = oracle.rank_margin(u, label, regions, ranks, 0, 3, mutant)
        claims = margin >= 0 if mutant == "ties" else margin > 0
        if claims and oracle.broken(u, regions, rule, label, (0, 1, 3)).any():
            break
    else:
        pytest.fail(f"no case refutes the mutant {mutant!r}")
    evidence, margin = Evidence(low=0.0, high=3.0, bits=0), oracle.rank_margin(u, label, regions, ranks, 0, 3)
    assert_right(defense, evidence, u, LINE, as_windows(LINE, (1, 2)), rule, margin, broken=True)


def test_an_attack_on_more_cells_than_are_set_aside_is_refused_for_unbounded_evidence() -> None:
    windows = as_windows(LINE, (1, 3))
    logits = as_tensor([np.ones((2, 9))], LINE)
    for defense in (CellMasking(cells=2), TrimmedMean(trim=2)):
        with pytest.raises(InputError, match="nothing can be certified"):
            defense.certify(logits, windows)
    with pytest.raises(InputError, match="must leave some of the 9 cells"):
        TrimmedMean(trim=5).predict(logits)
    with pytest.raises(InputError, match="must leave some of the 9 cells"):
        CellMasking(cells=9).predict(logits)
    with pytest.raises(InputError, match="`cells` must be a whole number"):
        CellMasking(cells=-1)
    with pytest.raises(InputError, match="`trim` must be a whole number"):
        TrimmedMean(trim=-1)


def test_nothing_set_aside_gives_the_plain_sum() -> None:
    logits = torch.rand(20, 3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = logits.sum((2, 3))
    for defense in (CellMasking(cells=0), TrimmedMean(trim=0)):
        assert torch.allclose(defense.predict(logits).scores, expected, atol=12 * 2**-16)


def test_cell_masking_counts_logits_between_0_and_1_as_they_are_and_none_below_0() -> None:
    logits = torch.full((1, 3, 2, 2), 0.25)
    logits[:, 1], logits[:, 2] = 0.5, -9.0
    assert CellMasking(cells=1).predict(logits).scores.tolist() == [[0.75, 1.5, 0.0]]
