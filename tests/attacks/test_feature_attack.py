"""The witness: wherever an exact certificate has a negative margin, the attack changes the label."""

from fractions import Fraction

import pytest
import torch
from helpers.combinations import combine

from patchguard.attacks.feature_attack import attack_features, union_cells
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MajorityVote,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
)
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows

GRID = (7, 8)
SIZES = [(3, 3), (2, 4)]


def logits(generator: torch.Generator, count: int = 50) -> torch.Tensor:
    maps = 4 * torch.randn(count, 4, *GRID, generator=generator)
    maps[:, 1] += 8 * torch.rand(count, 1, 1, generator=generator)
    return maps


@combine(
    one_in=2,
    evidence={
        "logits": Evidence(),
        "clipped": Evidence(high=5.0),
        "confidence": Evidence(kind="confidence"),
        "vote": Evidence(kind="vote"),
    },
    count={"1": 1, "2": 2},
    larger={"equal masks": 0, "larger masks": 1},
    size={str(size): size for size in SIZES},
)
def test_a_negative_margin_of_an_exact_certificate_has_a_witness(evidence, count, larger, size) -> None:
    generator = torch.Generator().manual_seed(sum(size) + larger)
    maps = evidence(logits(generator))
    windows = Windows.sliding(grid=GRID, size=size if count == 1 else (1, 2), count=count)
    masks = Windows.sliding(grid=GRID, size=(size[0] + larger, size[1] + larger), count=1)
    trimmed = 12
    candidates = [CellMasking(cells=trimmed), Median(), TrimmedMean(trim=trimmed)]
    if evidence.bounded:
        candidates.append(ClippedSum())
    if evidence.bounded or count == 1:
        candidates.append(RobustMasking(masks=masks))
    if evidence.kind == "vote":
        candidates.append(MajorityVote())
    for defense in candidates:
        assert defense.exact(maps, windows)
        found = defense.certify(maps, windows)
        attack = attack_features(defense, maps, windows, found)
        assert attack.succeeded[found.margin < 0].all(), type(defense).__name__
        assert not attack.succeeded[found.certified].any()


@pytest.mark.parametrize(
    "defense",
    [
        RobustMasking(masks=Windows.sliding(grid=GRID, size=(3, 3)), threshold=Fraction(1, 5)),
        DoubleMasking(masks=Windows.sliding(grid=GRID, size=(3, 3))),
        DoubleMasking(masks=Windows.sliding(grid=GRID, size=(3, 3)), tau=20.0),
        MaskedAgreement(masks=Windows.sliding(grid=GRID, size=(3, 3))),
        MaskedAgreement(masks=Windows.sliding(grid=GRID, size=(3, 3)), tau=20.0),
        Undefended(),
    ],
    ids=["T = 1/5", "double", "double tau", "agreement", "agreement tau", "undefended"],
)
def test_the_attack_breaks_some_of_what_is_not_certified_and_nothing_that_is(defense) -> None:
    generator = torch.Generator().manual_seed(9)
    maps = defense.default_evidence(0.4 * logits(generator))
    windows = Windows.sliding(grid=GRID, size=(3, 3))
    found = defense.certify(maps, windows)
    attack = attack_features(defense, maps, windows, found)
    held = found.margin > 0
    assert not attack.succeeded[held].any()
    assert attack.succeeded.any()
    if not isinstance(defense, Undefended):
        assert held.any()


def test_the_attack_writes_only_into_the_window_and_within_range() -> None:
    generator = torch.Generator().manual_seed(0)
    defense = RobustMasking(masks=Windows.sliding(grid=GRID, size=(3, 3)))
    maps = Evidence()(logits(generator))
    windows = Windows.sliding(grid=GRID, size=(3, 3))
    found = defense.certify(maps, windows)
    attack = attack_features(defense, maps, windows, found)
    owned = union_cells(found.weakest, windows)
    changed = (attack.evidence.values != maps.values).any(1)
    assert not (changed & ~owned).any()
    assert attack.evidence.values.min() >= maps.low
    assert attack.evidence.values.max() <= maps.high


def test_a_position_free_certificate_can_be_attacked_too() -> None:
    windows = Windows.sliding(grid=GRID, size=(3, 3))
    defense = CellMasking(cells=2, spatial=False)
    bounded = Evidence(low=0.0, high=1.0)(torch.zeros(2, 3, *GRID))
    found = defense.certify(bounded, windows)
    assert attack_features(defense, bounded, windows, found).succeeded.all()
