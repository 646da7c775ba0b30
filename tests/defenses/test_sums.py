"""ClippedSum, MajorityVote and Undefended against exhaustive rewriting, and the paper's section 6.1."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.oracle import CIRCLE, GRID, LINE
from helpers.oracle_grids import as_tensor, as_windows, assert_right

from patchguard.defenses import ClippedSum, MajorityVote, RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows

GEOMETRIES = pytest.mark.parametrize("geometry", [LINE, GRID, CIRCLE], ids=lambda g: g.name)


def votes(maps: list[np.ndarray], geometry: oracle.Geometry) -> torch.Tensor:
    """Logits whose confidences pass or miss the vote threshold as the 0/1 maps say."""
    return torch.where(as_tensor(maps, geometry) > 0, 0.0, -30.0)


@GEOMETRIES
@pytest.mark.parametrize("low", [-2, 0])
@pytest.mark.parametrize("spatial", [True, False], ids=["spatial", "published"])
def test_clipped_sums_are_certified_exactly(geometry, low, spatial) -> None:
    generator = np.random.default_rng([geometry.cells, low + 2, spatial])
    regions, windows = geometry.boxes((1, 2)), as_windows(geometry, (1, 2))
    maps = list(oracle.random_maps(generator, 400, 3, geometry.cells, low, 2))
    evidence = Evidence(low=float(low), high=2.0, bits=0)(as_tensor(maps, geometry))
    found = ClippedSum(spatial=spatial).certify(evidence, windows)
    bound = oracle.clipped_sum_margin if spatial else oracle.published_sum_margin
    certified = refuted = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert margin == float(bound(u, label, regions, low, 2))
        attackable = oracle.broken(u, regions, oracle.plain_sum, label, (low, 1, 2))
        if margin > 0:
            certified += 1
            assert not attackable.any()
        if attackable.any():
            refuted += 1
        if margin < 0 and spatial:
            assert attackable[int(found.weakest[i])]
    assert min(certified, refuted) >= 20


@GEOMETRIES
@pytest.mark.parametrize("spatial", [True, False], ids=["spatial", "published"])
def test_majority_votes_are_certified_exactly(geometry, spatial) -> None:
    generator = np.random.default_rng([geometry.cells, geometry.wrap[1], spatial])
    regions, windows = geometry.boxes((1, 2)), as_windows(geometry, (1, 2))
    maps = list(oracle.random_maps(generator, 400, 3, geometry.cells, 0, 1))
    # Every cell votes for one class at least, so that a softmax can produce the map.
    for u in maps:
        u[0, u.sum(0) == 0] = 1
    found = MajorityVote(spatial=spatial).certify(votes(maps, geometry), windows)
    bound = oracle.clipped_sum_margin if spatial else oracle.published_sum_margin
    certified = refuted = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert margin == float(bound(u, label, regions, 0, 1))
        attackable = oracle.broken(u, regions, oracle.plain_sum, label, (0, 1))
        certified += margin > 0
        refuted += attackable.any()
        assert not (margin > 0 and attackable.any())
        if margin < 0 and spatial:
            assert attackable[int(found.weakest[i])]
    assert min(certified, refuted) >= 20


@pytest.mark.parametrize("mutant", ["runner-up", "half", "ties", "published with one n"])
def test_a_mutant_of_the_sum_bound_is_refuted(mutant) -> None:
    generator = np.random.default_rng(3)
    regions = LINE.boxes((1, 3))
    for u in oracle.random_maps(generator, 4000, 3, 9, -1, 1):
        label = int(oracle.plain_sum(u[None])[0])
        if mutant == "published with one n":
            margin = oracle.published_sum_margin(u, label, regions, -1, 1, factor=1)
        else:
            margin = oracle.clipped_sum_margin(u, label, regions, -1, 1, mutant)
        claims = margin >= 0 if mutant == "ties" else margin > 0
        if claims and oracle.broken(u, regions, oracle.plain_sum, label, (-1, 1)).any():
            break
    else:
        pytest.fail(f"no case refutes the mutant {mutant!r}")
    spatial = mutant != "published with one n"
    bound = oracle.clipped_sum_margin if spatial else oracle.published_sum_margin
    evidence, margin = Evidence(low=-1.0, high=1.0, bits=0), bound(u, label, regions, -1, 1)
    windows = as_windows(LINE, (1, 3))
    assert_right(ClippedSum(spatial=spatial), evidence, u, LINE, windows, oracle.plain_sum, margin, broken=True)


def test_the_spatial_rule_certifies_all_that_the_published_one_does_and_more() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 30 * torch.rand(500, 4, 1, 30, generator=generator)
    logits[:, 2] += 40 * torch.rand(500, 1, 1, generator=generator)
    windows = Windows.sliding(grid=(1, 30), size=(1, 5), wrap=(False, True))
    for spatial, published in (
        (ClippedSum(), ClippedSum(spatial=False)),
        (MajorityVote(), MajorityVote(spatial=False)),
    ):
        wide, narrow = (
            spatial.certify(logits, windows).certified,
            published.certify(logits, windows).certified,
        )
        assert (wide | ~narrow).all()
        assert int(wide.sum()) > int(narrow.sum()) > 0


def test_the_papers_toy_example_is_certified_by_the_spatial_rule_alone() -> None:
    """Appendix I: C C W C C W C C W C C with three consecutive votes corrupted."""
    wrong = torch.tensor([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0])
    logits = 30.0 * torch.stack([1 - wrong, wrong]).view(1, 2, 1, 11)
    windows = Windows.sliding(grid=(1, 11), size=(1, 3))
    assert MajorityVote().certify(logits, windows).certified.all()
    assert not MajorityVote(spatial=False).certify(logits, windows).certified.any()
    assert RobustMasking(masks=windows).certify(Evidence(kind="vote")(logits), windows).certified.all()


@GEOMETRIES
def test_robust_masking_without_detection_reduces_to_clipped_sum_and_majority_vote(geometry) -> None:
    """Section 6.1: T = 1 never detects, so the rule and the certificate are those of CBN and DS."""
    windows = as_windows(geometry, (1, 2))
    logits = torch.randn(300, 4, *geometry.grid, generator=torch.Generator().manual_seed(2)) * 4
    logits[:, 1] += 3
    never = RobustMasking(masks=windows, threshold=Fraction(1))
    for evidence, reduced in (
        (Evidence(kind="logits", low=0.0, high=5.0), ClippedSum()),
        (Evidence(kind="confidence"), ClippedSum()),
        (Evidence(kind="vote"), MajorityVote()),
    ):
        ours, theirs = never.certify(evidence(logits), windows), reduced.certify(evidence(logits), windows)
        assert torch.equal(never.predict(evidence(logits)).label, reduced.predict(evidence(logits)).label)
        assert torch.equal(ours.margin, theirs.margin)
        assert torch.equal(ours.weakest, theirs.weakest)
        assert 0 < int(ours.certified.sum()) < 300


@pytest.mark.parametrize("mean", [False, True])
def test_undefended_is_the_plain_network_and_certifies_nothing(mean) -> None:
    logits = torch.randn(20, 5, 4, 3, dtype=torch.double)
    defense = Undefended(mean=mean)
    answer = defense.predict(logits)
    expected = logits.mean((2, 3)) if mean else logits.sum((2, 3))
    assert torch.equal(answer.label, expected.argmax(1))
    assert torch.allclose(answer.scores, expected, atol=16 * 2**-16)
    strong = torch.zeros(1, 2, 4, 4)
    strong[:, 0] = 100
    found = defense.certify(Evidence(low=0.0, high=100.0)(strong), Windows.sliding(grid=(4, 4), size=(1, 1)))
    assert not found.certified.any()
    assert found.rival.item() == 1


def test_a_sum_of_unbounded_evidence_is_refused() -> None:
    windows = Windows.sliding(grid=(2, 2), size=(1, 1))
    with pytest.raises(InputError, match="unbounded evidence cannot be certified"):
        ClippedSum().certify(Evidence(kind="logits")(torch.rand(1, 2, 2, 2)), windows)
    with pytest.raises(InputError, match="needs votes"):
        MajorityVote().certify(Evidence(kind="confidence")(torch.rand(1, 2, 2, 2)), windows)


@pytest.mark.parametrize("defense", [ClippedSum(), MajorityVote()])
def test_a_sum_is_exact_unless_unions_are_bounded_in_place_of_enumerated(defense) -> None:
    evidence = defense.default_evidence(torch.rand(1, 2, 40, 40))
    few, many = (Windows.sliding(grid=(40, 40), size=(2, 2), count=count) for count in (1, 3))
    assert defense.exact(evidence, few)
    assert not defense.exact(evidence, many)
