"""Signs without margins: every answer of a `Batch` is the defense's own."""

from dataclasses import replace

import pytest
import torch

from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MajorityVote,
    Median,
    RobustMasking,
    TrimmedMean,
    clipped_sum,
)
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.paper import fast_certificates
from patchguard.paper import query as query_module
from patchguard.paper.fast_certificates import DOUBLE_MASKING, RANKS, ROBUST_MASKING, SUMS, largest_unions
from patchguard.paper.query import Batch, Query, among_best

GRIDS = {
    "square": (Windows.sliding(grid=(8, 8), size=(2, 2)), Windows.sliding(grid=(8, 8), size=(3, 4))),
    "circle": (
        Windows.sliding(grid=(1, 14), size=(1, 3), wrap=(False, True)),
        Windows.sliding(grid=(1, 14), size=(1, 5), wrap=(False, True)),
    ),
}
KINDS = {
    "logits": Evidence(low=0.0),
    "clipped logits": Evidence(low=0.0, high=1.5),
    "signed logits": Evidence(low=None),
    "confidence": Evidence(kind="confidence"),
    "prediction": Evidence(kind="prediction"),
    "logits that drift": Evidence(low=0.0, drift=0.01),
    "large logits": Evidence(low=0.0, bits=8),  # masks may outweigh what fills a row: no short form of larger ones
}


def make_evidence(grid, kind, count=150):
    """Random evidence whose true class is ahead by an amount that differs from image to image."""
    generator = torch.Generator().manual_seed(len(kind))
    targets = torch.randint(0, 5, (count,), generator=generator)
    logits = 2 * torch.rand(count, 5, *grid, generator=generator) ** 4
    ahead = torch.linspace(0, 1.5, count) if grid[0] > 1 else torch.linspace(0, 4, count)
    logits[torch.arange(count), targets] += ahead.view(-1, 1, 1) * torch.rand(count, *grid, generator=generator)
    if kind == "large logits":
        logits *= 6000
    return KINDS[kind](logits - (0.5 if kind == "signed logits" else 0.0)), targets


FAST = {
    ClippedSum: SUMS,
    MajorityVote: SUMS,
    RobustMasking: ROBUST_MASKING,
    DoubleMasking: DOUBLE_MASKING,
    **dict.fromkeys((CellMasking, Median, TrimmedMean), RANKS),
}


def ask(defense, windows=None, top_k=1):
    published_sum = type(defense) is ClippedSum and not defense.spatial
    fast = None if getattr(defense, "threshold", 0) or published_sum else FAST[type(defense)]
    return Query(evidence=Evidence(), defense=defense, windows=windows, top_k=top_k, fast=fast)


def compare(defense, evidence, windows, targets, top_k=1):
    """Assert that a batch says what the defense says, and return how many images are certified."""
    batch, query = Batch(evidence, targets), ask(defense, windows, top_k)
    prediction = defense.predict(evidence)
    correct = prediction.label == targets if top_k == 1 else among_best(prediction.scores, targets, top_k)
    assert torch.equal(batch.correct(query), correct)
    certificate = defense.certify(evidence, windows, targets, top_k)
    assert torch.equal(batch.certified(query), correct & certificate.certified)
    return int((correct & certificate.certified).sum())


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "signed logits"])
@pytest.mark.parametrize("pair", ["own masks", "larger masks"])
def test_robust_masking_is_certified_as_the_defense_certifies(shape, kind, pair):
    small, large = GRIDS[shape]
    evidence, targets = make_evidence(small.grid, kind)
    masks = small if pair == "own masks" else large
    certified = [compare(RobustMasking(masks=masks), evidence, small, targets, top_k) for top_k in (1, 3)]
    assert 0 < certified[0] < len(targets)
    assert certified[0] <= certified[1]


UNIONS = {
    "circle": Windows.sliding(grid=(1, 14), size=(1, 2), wrap=(False, True)),
    "line": Windows.sliding(grid=(1, 14), size=(1, 2)),
    "square": Windows.sliding(grid=(5, 5), size=(2, 1)),
    "nearly everything": Windows.sliding(grid=(1, 5), size=(1, 2)),
    "uneven": Windows(grid=(1, 22), rows=((0, 1),), columns=((0, 2), (1, 4), (3, 5), (5, 8), (10, 12), (20, 22))),
}


@pytest.mark.parametrize("shape", UNIONS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "signed logits"])
def test_unions_of_two_are_certified_as_the_defense_certifies(shape, kind):
    windows = replace(UNIONS[shape], count=2)
    evidence, targets = make_evidence(windows.grid, kind, count=60)
    certified = [compare(RobustMasking(masks=windows), evidence, windows, targets, top_k) for top_k in (1, 3)]
    assert 0 < max(certified) < len(targets) or shape == "nearly everything"


@pytest.mark.parametrize("shape", UNIONS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("kind", "defense"),
    [
        ("clipped logits", ClippedSum()),
        ("confidence", ClippedSum()),
        ("confidence", ClippedSum(spatial=False)),
        ("prediction", MajorityVote()),
    ],
)
def test_sums_under_several_windows_are_certified_as_the_defense_certifies(shape, count, kind, defense, monkeypatch):
    windows = replace(UNIONS[shape], count=count)
    evidence, targets = make_evidence(windows.grid, kind, count=60)
    compare(defense, evidence, windows, targets)
    # Evidence of few values, where ties are frequent.
    generator = torch.Generator().manual_seed(count)
    votes = Evidence(low=0.0, high=1.0, bits=1)(torch.rand(500, 3, *windows.grid, generator=generator).round())
    truth = votes.values.sum((2, 3)).argmax(1)
    compare(ClippedSum(), votes, windows, truth)
    monkeypatch.setattr(clipped_sum, "MOST_REGIONS", 1)  # too many unions: both bound them
    compare(ClippedSum(), votes, windows, truth)


def test_the_largest_unions_decide_only_where_all_others_lie_in_one():
    line = largest_unions(replace(UNIONS["line"], count=2))
    assert line is not None
    assert len(line) < replace(UNIONS["line"], count=2).regions
    assert largest_unions(replace(UNIONS["uneven"], count=2)) is None


def test_masks_smaller_than_the_windows_are_left_to_the_defense():
    small, large = GRIDS["square"]
    evidence, targets = make_evidence(small.grid, "clipped logits")
    compare(RobustMasking(masks=small), evidence, large, targets)


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", ["own masks", "larger masks"])
def test_double_masking_is_certified_as_the_defense_certifies(shape, kind, pair):
    small, large = GRIDS[shape]
    evidence, targets = make_evidence(small.grid, kind)
    defense = DoubleMasking(masks=small if pair == "own masks" else large)
    lead = {"large logits": 12000.0, "prediction": 4.0, "confidence": 2.0}.get(kind, 6.0)
    plain, above = (compare(replace(defense, tau=tau), evidence, small, targets) for tau in (0.0, lead))
    assert 0 < above < plain < len(targets)


@pytest.mark.parametrize("tau", [0.0, 1.5])
def test_labels_of_double_masking_where_masks_disagree(tau):
    """Masks of all sizes on a small grid: majorities that stand, and such that one mask overrules, rightly and not."""
    generator = torch.Generator().manual_seed(0)
    for size in ((2, 2), (3, 2), (3, 3)):
        defense = DoubleMasking(masks=Windows.sliding(grid=(4, 4), size=size), tau=tau)
        logits = (
            torch.randn(3000, 3, 4, 4, generator=generator).sign() * torch.rand(3000, 3, 4, 4, generator=generator) ** 3
        )
        evidence = Evidence(low=None, bits=4)(logits)
        label = defense.predict(evidence).label
        for target in range(3):
            targets = torch.full((3000,), target)
            assert torch.equal(Batch(evidence, targets).correct(ask(defense)), label == targets)


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "large logits"])
@pytest.mark.parametrize("count", [1, 2])
def test_rank_sums_without_positions_are_certified_as_the_defense_certifies(shape, kind, count):
    windows = replace(GRIDS[shape][0], count=count)
    evidence, targets = make_evidence(windows.grid, kind)
    cells = windows.largest_area
    rules = [CellMasking(cells=cells, spatial=False), Median(spatial=False), TrimmedMean(trim=1, spatial=False)]
    rules.append(TrimmedMean(trim=min(cells, windows.grid[1] // 2 - 1), spatial=False))
    accepted = [rule for rule in rules if rule.accepts(evidence, windows)]
    certified = [compare(rule, evidence, windows, targets) for rule in accepted]
    assert len(certified) >= 2
    assert max(certified) > 0 or (shape, count) == ("circle", 2)


@pytest.mark.parametrize("defense", [RobustMasking, DoubleMasking])
def test_sums_of_32_bits_say_what_those_of_64_do(defense, monkeypatch):
    windows = GRIDS["square"][0]
    evidence, targets = make_evidence(windows.grid, "logits")
    short, query = Batch(evidence, targets), ask(defense(masks=windows), windows)
    certified = short.certified(query)
    assert short.values.dtype == torch.int32
    monkeypatch.setattr(query_module, "LARGEST_SHORT", 0)
    long = Batch(evidence, targets)
    assert torch.equal(long.certified(query), certified)
    assert long.values.dtype == torch.int64


def test_other_rules_are_asked_as_they_are():
    windows = GRIDS["square"][0]
    evidence, targets = make_evidence(windows.grid, "clipped logits")
    assert 0 < compare(ClippedSum(), evidence, windows, targets) < len(targets)
    assert 0 < compare(RobustMasking(masks=windows, threshold=0.2), evidence, windows, targets) < len(targets)


@pytest.mark.parametrize("defense", [RobustMasking, DoubleMasking])
def test_only_what_quick_bounds_leave_open_is_searched(defense, monkeypatch):
    windows = GRIDS["square"][0]
    evidence, targets = make_evidence(windows.grid, "logits")
    searched = []

    def heaviest(maps, masks, windows):
        searched.append(len(maps))
        return slow(maps, masks, windows)

    slow = fast_certificates.heaviest
    monkeypatch.setattr(fast_certificates, "heaviest", heaviest)
    Batch(evidence, targets).certified(ask(defense(masks=windows), windows))
    assert 0 < sum(searched) < len(targets)


def test_a_tie_among_the_best_goes_to_the_smaller_class():
    scores = torch.tensor([[1.0, 1.0, 0.0]]).double().expand(3, 3)
    assert among_best(scores, torch.tensor([0, 1, 2]), 1).tolist() == [True, False, False]
    assert among_best(scores, torch.tensor([0, 1, 2]), 2).tolist() == [True, True, False]


def test_what_the_defense_refuses_is_refused():
    signed = Evidence(low=None)(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    windows = Windows.sliding(grid=(4, 4), size=(2, 2))
    targets = torch.tensor([0, 1])
    with pytest.raises(InputError, match="clipped at 0"):
        Batch(signed, targets).certified(ask(RobustMasking(masks=windows), windows))
    clipped = Evidence(low=0.0)(torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(InputError, match="`top_k` must be"):
        Batch(clipped, targets).certified(ask(RobustMasking(masks=windows), windows, top_k=3))
    other = Windows.sliding(grid=(5, 5), size=(2, 2))
    with pytest.raises(InputError, match="grid"):
        Batch(signed, targets).certified(ask(DoubleMasking(masks=windows), other))
    with pytest.raises(InputError, match="`trim` must leave"):
        Batch(signed, targets).correct(ask(TrimmedMean(trim=8)))
    logits = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    logits[1, 0, 0, 0] = torch.nan
    broken, rule = Evidence(low=0.0)(logits), CellMasking(cells=4, spatial=False)
    with pytest.raises(InputError, match="must be finite"):
        Batch(broken, rule.predict(broken).label).certified(ask(rule, windows))
