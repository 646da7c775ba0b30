"""DoubleMasking and MaskedAgreement against exhaustive rewriting."""

import itertools

import jaxtyping
import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.combinations import combine
from helpers.oracle import CIRCLE, GRID, LINE
from helpers.oracle_grids import as_tensor, as_windows, assert_right

from patchguard.defenses import DoubleMasking, MaskedAgreement, RobustMasking, double_masking
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import DetectionCertificate

SIZES = {"equal masks": (1, 2), "larger masks": (1, 3)}
GEOMETRIES = {"line": LINE, "grid": GRID, "circle": CIRCLE}
on_each_geometry = pytest.mark.parametrize("geometry", [LINE, GRID, CIRCLE], ids=lambda g: g.name)


@combine(one_in=3, tau={"0": 0, "5": 5}, low={"signed": -3, "clipped": 0}, mask=SIZES, geometry=GEOMETRIES)
def test_double_masking_keeps_the_certified_label(geometry, mask, low, tau) -> None:
    generator = np.random.default_rng([geometry.cells, geometry.wrap[1], mask[1], low + 3])
    regions, masks = geometry.boxes((1, 2)), geometry.boxes(mask)
    defense = DoubleMasking(masks=as_windows(geometry, mask), tau=float(tau))
    rule = oracle.double_masking(masks, tau)
    maps = list(oracle.random_maps(generator, 60, 3, geometry.cells, low, 3, lead=(0.0, 0.9)))
    evidence = Evidence(low=None if low else 0.0, bits=0)(as_tensor(maps, geometry))
    found = defense.certify(evidence, as_windows(geometry, (1, 2)))
    alphabet = (-4096 if low else 0, 4096)
    certified = refuted = lowered = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert label == rule(u[None])[0]
        assert margin == float(oracle.double_masking_margin(u, label, regions, masks, tau))
        lowered += margin < oracle.double_masking_margin(u, label, regions, masks)
        attackable = oracle.broken(u, regions, rule, label, alphabet)
        certified += margin > 0
        refuted += attackable.any()
        assert not (margin > 0 and attackable.any())
    assert certified >= 3
    assert refuted >= 3
    assert 3 <= lowered <= 57 if tau else lowered == 0


@combine(one_in=2, tau={"0": 0, "5": 5}, mask=SIZES, geometry=GEOMETRIES)
def test_double_masking_answers_as_the_two_round_rule_says(geometry, mask, tau) -> None:
    """Maps on which single masks disagree, so that the second round decides."""
    generator = np.random.default_rng(4)
    masks = geometry.boxes(mask)
    rule = oracle.double_masking(masks, tau)
    maps = generator.integers(-3, 4, (4000, 3, geometry.cells))
    evidence = Evidence(low=None, bits=0)(as_tensor(list(maps), geometry))
    answers = DoubleMasking(masks=as_windows(geometry, mask), tau=float(tau)).predict(evidence).label.numpy()
    assert (answers == rule(maps)).all()
    single = oracle.first_max(maps @ (1 - masks).T, axis=1)
    majority = np.array([np.bincount(row, minlength=3).argmax() for row in single])
    assert (answers != majority).sum() >= 5  # the second round did decide


MUTANTS = {  # and the tau of the rule
    "one round": 0,
    "any mask": 0,
    "disjoint pairs": 0,
    "ties": 0,
    "no tau": 5,
    "tau in place of a second round": 5,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_double_masking_bound_is_refuted(mutant) -> None:
    generator = np.random.default_rng(0)
    regions = masks = LINE.boxes((1, 3))
    tau = MUTANTS[mutant]
    rule = oracle.double_masking(masks, tau)
    for u in oracle.random_maps(generator, 3000, 2, 9, -3, 3):
        label = int(rule(u[None])[0])
        margin = oracle.double_masking_margin(u, label, regions, masks, tau, mutant)
        claims = margin == 0 if mutant == "ties" else margin > 0
        if claims and oracle.broken(u, regions, rule, label, (-4096, 4096)).any():
            break
    else:
        pytest.fail(f"no case refutes the mutant {mutant!r}")
    windows = as_windows(LINE, (1, 3))
    defense, margin = (
        DoubleMasking(masks=windows, tau=float(tau)),
        oracle.double_masking_margin(u, label, regions, masks, tau),
    )
    assert_right(defense, Evidence(low=None, bits=0), u, LINE, windows, rule, margin, broken=True)


def test_a_larger_tau_overrules_fewer_majorities_and_lowers_margins_by_no_more_than_itself() -> None:
    generator = torch.Generator().manual_seed(2)
    windows = Windows.sliding(grid=(5, 5), size=(2, 2))
    evidence = Evidence(low=None, bits=4)(torch.randn(4000, 3, 5, 5, generator=generator))
    largest = DoubleMasking(masks=windows, tau=1000.0).predict(evidence).label  # always the majority
    overruled, proofs = [], []
    for tau in (0.0, 3.0, 6.0, 6.05):  # the last is no whole number of units: rounded down
        defense = DoubleMasking(masks=windows, tau=tau)
        overruled.append(int((defense.predict(evidence).label != largest).sum()))
        proofs.append(defense.certify(evidence, windows, label=0))
    assert overruled[0] > overruled[1] > overruled[2] == overruled[3] > 0
    for larger, smaller in itertools.pairwise(reversed(proofs[:3])):
        lost = smaller.margin - larger.margin
        assert lost.min() == 0  # where second masks take as much away anyway
        assert 0 < lost.max() <= 3
    for entry in ("margin", "weakest", "rival"):
        assert torch.equal(getattr(proofs[3], entry), getattr(proofs[2], entry))


@pytest.mark.parametrize("tau", [9, 40, 400])
@pytest.mark.parametrize("mask", [(1, 2), (1, 4)], ids=["equal masks", "larger masks"])
def test_where_tau_exceeds_what_masks_take_away_the_margin_is_the_lead_behind_one_mask(mask, tau) -> None:
    generator = np.random.default_rng([mask[1], tau])
    regions, masks = LINE.boxes((1, 2)), LINE.boxes(mask)
    maps = list(oracle.random_maps(generator, 40, 5, 9, -2, 2, lead=(0.2, 1.0)))
    defense, windows = DoubleMasking(masks=as_windows(LINE, mask), tau=float(tau)), as_windows(LINE, (1, 2))
    dominated = 0
    for u in maps:  # one by one, so that no other image keeps rivals in play that seem not to matter
        found = defense.certify(Evidence(low=None, bits=0)(as_tensor([u], LINE)), windows)
        expected = oracle.double_masking_margin(u, int(found.label), regions, masks, tau)
        assert float(found.margin) == float(expected)
        dominated += expected == oracle.double_masking_margin(u, int(found.label), regions, masks, tau, "one round")
    assert dominated >= (40 if tau > 36 else 10)  # no mask takes more than 4 cells, each of them 4 apart, twice over


@on_each_geometry
@pytest.mark.parametrize("tau", [0, 5])
def test_the_rival_alone_gives_the_margin_where_each_window_has_one_mask(geometry, tau) -> None:
    generator = np.random.default_rng([geometry.cells, tau])
    windows = as_windows(geometry, (1, 2))
    defense, settings = DoubleMasking(masks=windows, tau=float(tau)), Evidence(low=None, bits=0)
    maps = as_tensor(list(oracle.random_maps(generator, 60, 4, geometry.cells, -3, 3, lead=(0.0, 0.9))), geometry)
    found = defense.certify(settings(maps), windows)
    alone = maps[torch.arange(60).unsqueeze(1), torch.stack([found.label, found.rival], 1)]
    assert torch.equal(defense.certify(settings(alone), windows, label=0).margin, found.margin)
    assert len(found.rival.unique()) == 4


def test_a_third_class_close_behind_keeps_a_mask_from_overruling() -> None:
    """Hiding cell 0 puts class 0 far ahead of the majority's class 1, but only 3 ahead of class 2."""
    maps = torch.tensor([[5.0, 5, 5, 5], [100, 0, 0, 0], [4, 4, 4, 4]]).view(1, 3, 1, 4)
    masks = Windows.sliding(grid=(1, 4), size=(1, 1))
    labels = [int(DoubleMasking(masks=masks, tau=tau).predict(maps).label) for tau in (0.0, 3.0, 3.5, 4.0)]
    assert labels == [0, 0, 1, 1]


@pytest.mark.parametrize("tau", [0.0, 4.0])
@pytest.mark.parametrize(("images", "most"), [(600, 100), (60, 1)], ids=["parts", "one by one"])
def test_the_second_round_may_look_at_claims_in_parts(tau, images, most, monkeypatch) -> None:
    maps = np.random.default_rng(6).integers(-3, 4, (images, 3, GRID.cells))
    evidence = Evidence(low=None, bits=0)(as_tensor(list(maps), GRID))
    defense = DoubleMasking(masks=as_windows(GRID, (1, 2)), tau=tau)
    whole = defense.predict(evidence).label
    monkeypatch.setattr(double_masking, "PAIRS", {"cpu": most, "cuda": most})
    assert torch.equal(defense.predict(evidence).label, whole)


def test_double_masking_certifies_all_that_robust_masking_does_at_equal_masks() -> None:
    logits = torch.rand(600, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    logits[:, 3] += 0.6 * torch.rand(600, 1, 1, generator=torch.Generator().manual_seed(1))
    windows = Windows.sliding(grid=(6, 6), size=(2, 2))
    evidence = Evidence(low=0.0)(logits)
    robust = RobustMasking(masks=windows).certify(evidence, windows, label=3).certified
    double = DoubleMasking(masks=windows).certify(evidence, windows, label=3).certified
    assert (double | ~robust).all()
    assert int(double.sum()) > int(robust.sum()) > 10


@combine(one_in=3, tau={"0": 0, "3": 3}, mask=SIZES, geometry=GEOMETRIES)
def test_masked_agreement_gives_the_certified_label_or_an_alert(geometry, mask, tau) -> None:
    generator = np.random.default_rng([geometry.cells, geometry.wrap[1], mask[1], tau])
    regions, masks = geometry.boxes((1, 2)), geometry.boxes(mask)
    defense = MaskedAgreement(masks=as_windows(geometry, mask), tau=float(tau))
    rule = oracle.masked_agreement(masks, tau)
    maps = list(oracle.random_maps(generator, 200, 3, geometry.cells, -3, 3, lead=(0.0, 0.9)))
    evidence = Evidence(low=None, bits=0)(as_tensor(maps, geometry))
    found = defense.certify(evidence, as_windows(geometry, (1, 2)))
    assert isinstance(found, DetectionCertificate)
    assert not hasattr(found, "certified")
    certified = refuted = 0
    for i, u in enumerate(maps):
        label, margin = int(found.label[i]), float(found.margin[i])
        assert bool(found.alert[i]) == (rule(u[None])[0] == -1)
        assert margin == float(oracle.agreement_margin(u, label, regions, masks, tau))
        attackable = oracle.broken(u, regions, rule, label, (-4096, 0, 4096))
        certified += margin > 0
        refuted += attackable.any()
        assert not (margin > 0 and attackable.any())
    assert certified >= 10
    assert refuted >= 10
    if geometry is LINE and mask == (1, 3) and tau == 0:
        assert (found.label_or_alert & found.alert).any()  # a certified image may raise a false alarm


@pytest.mark.parametrize("mutant", ["no tau", "any mask"])
def test_a_mutant_of_the_agreement_bound_is_refuted(mutant) -> None:
    generator = np.random.default_rng(0)
    regions, masks = LINE.boxes((1, 2)), LINE.boxes((1, 2))
    rule = oracle.masked_agreement(masks, 4)
    for u in oracle.random_maps(generator, 3000, 2, 9, -3, 3):
        label = int(oracle.plain_sum(u[None])[0])
        margin = oracle.agreement_margin(u, label, regions, masks, 4, mutant)
        if margin > 0 and oracle.broken(u, regions, rule, label, (-4096, 0, 4096)).any():
            break
    else:
        pytest.fail(f"no case refutes the mutant {mutant!r}")
    windows = as_windows(LINE, (1, 2))
    defense, margin = MaskedAgreement(masks=windows, tau=4.0), oracle.agreement_margin(u, label, regions, masks, 4)
    assert_right(defense, Evidence(low=None, bits=0), u, LINE, windows, rule, margin, broken=True)


@pytest.mark.parametrize("kind", [DoubleMasking, MaskedAgreement])
def test_masks_that_cover_no_window_and_top_k_are_refused(kind) -> None:
    defense = kind(masks=Windows.sliding(grid=(4, 4), size=(1, 1)))
    bounded = Evidence(low=0.0, high=1.0)(torch.rand(1, 3, 4, 4))
    with pytest.raises(InputError, match="lies in no mask"):
        defense.certify(bounded, Windows.sliding(grid=(4, 4), size=(2, 2)))
    with pytest.raises(InputError, match="no certificate for the top 2"):
        defense.certify(bounded, Windows.sliding(grid=(4, 4), size=(1, 1)), top_k=2)


@pytest.mark.parametrize("kind", [DoubleMasking, MaskedAgreement])
@pytest.mark.parametrize("tau", [-1.0, float("nan"), float("inf"), 2.0**25, True])
def test_a_tau_that_is_no_lead_is_refused(kind, tau, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # only tests check types
    with pytest.raises(InputError, match="`tau` must lie between 0 and 16777216; got"):
        kind(masks=Windows.sliding(grid=(4, 4), size=(1, 1)), tau=tau)


@pytest.mark.parametrize("kind", [DoubleMasking, MaskedAgreement])
def test_a_tau_is_kept_until_another_is_given_or_the_units_change(kind) -> None:
    defense = kind(masks=as_windows(LINE, (1, 2)), tau=2.0)
    for tau, new_units, expected in ((None, False, 2.0), (None, True, 0.0), (3.0, False, 3.0), (3.0, True, 3.0)):
        changed = defense.with_tau(tau, new_units=new_units)
        assert (type(changed), changed.masks, changed.tau) == (kind, defense.masks, expected)


def test_no_lead_is_asked_for_unless_a_tau_is_given() -> None:
    masks = as_windows(LINE, (1, 2))
    assert DoubleMasking(masks=masks).tau == MaskedAgreement(masks=masks).tau == 0
    assert DoubleMasking(masks=masks, tau=2.0).with_tau(None, new_units=True).tau == 0


def test_the_rival_of_an_agreement_is_the_class_closest_behind_a_mask_that_attains_the_margin() -> None:
    maps = np.random.default_rng(3).integers(-3, 4, (60, 5, LINE.cells))
    maps[:, 2] += 2
    masks = LINE.boxes((1, 2))
    evidence = Evidence(low=None, bits=0)(as_tensor(list(maps), LINE))
    certificate = MaskedAgreement(masks=as_windows(LINE, (1, 2))).certify(evidence, as_windows(LINE, (1, 2)))
    for i, u in enumerate(maps):
        label, margin = int(certificate.label[i]), int(certificate.margin[i])
        leads = (u[label] - u) @ (1 - masks).T  # classes, masks
        others = np.delete(leads, label, axis=0).min(0)
        assert margin == others.min()
        assert leads[int(certificate.rival[i]), int(certificate.weakest[i])] == margin
        assert int(certificate.rival[i]) != label
