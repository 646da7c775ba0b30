"""Laws that every defense obeys, and input that every defense refuses."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import patchguard.defenses as defenses
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    Defense,
    DoubleMasking,
    MajorityVote,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
    base,
)
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows

GRID = (6, 7)
MASKS = Windows.sliding(grid=GRID, size=(3, 3))
DEFENSES: dict[str, tuple[Defense, Evidence]] = {
    "RobustMasking": (RobustMasking(masks=MASKS), Evidence()),
    "RobustMasking T": (RobustMasking(masks=MASKS, threshold=Fraction(1, 5)), Evidence(high=6.0)),
    "DoubleMasking": (DoubleMasking(masks=MASKS), Evidence(low=None)),
    "DoubleMasking tau": (DoubleMasking(masks=MASKS, tau=5.0), Evidence(low=None)),
    "ClippedSum": (ClippedSum(), Evidence(kind="confidence")),
    "MajorityVote": (MajorityVote(), Evidence(kind="vote")),
    "CellMasking": (CellMasking(cells=9), Evidence()),
    "Median": (Median(), Evidence(low=None)),
    "TrimmedMean": (TrimmedMean(trim=9), Evidence(low=None)),
    "MaskedAgreement": (MaskedAgreement(masks=MASKS, tau=0.5), Evidence(low=None)),
    "Undefended": (Undefended(), Evidence(low=None)),
}
EVERY = pytest.mark.parametrize("name", DEFENSES)


def logits(count: int = 40, classes: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    maps = 4 * torch.rand(count, classes, *GRID, generator=generator)
    maps[:, 2] += 4 * torch.rand(count, 1, 1, generator=generator)
    return maps


def test_every_defense_has_its_laws_tested() -> None:
    named = {type(defense).__name__ for defense, _ in DEFENSES.values()}
    assert named == {name for name in defenses.__all__ if name != "Defense"}


@EVERY
def test_a_larger_window_never_certifies_more(name) -> None:
    defense, evidence = DEFENSES[name]
    maps = evidence(logits())
    margins = [defense.certify(maps, Windows.sliding(grid=GRID, size=(side, side))).margin for side in (1, 2, 3)]
    assert (margins[0] >= margins[1]).all()
    assert (margins[1] >= margins[2]).all()
    if name not in ("Undefended", "RobustMasking T"):
        assert int((margins[0] > 0).sum()) > 0


@EVERY
def test_permuting_the_classes_permutes_the_labels(name) -> None:
    defense, evidence = DEFENSES[name]
    maps = evidence(logits())
    best, second = defense.predict(maps).scores.topk(2, dim=1).values.unbind(1)
    maps = maps[best > second]  # a tie goes to the smallest index, whatever the order
    order = torch.tensor([3, 0, 4, 2, 1])
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    plain = defense.certify(maps, windows)
    permuted = defense.certify(maps.with_values(maps.values[:, order]), windows)
    assert torch.equal(order[permuted.label], plain.label)
    assert torch.equal(plain.margin, permuted.margin)
    assert torch.equal(plain.weakest, permuted.weakest)


@EVERY
def test_a_batch_row_equals_the_image_alone(name, monkeypatch) -> None:
    defense, evidence = DEFENSES[name]
    maps = logits(6)
    windows = Windows.sliding(grid=GRID, size=(2, 3))
    whole = defense.certify(evidence(maps), windows)
    scores = defense.predict(evidence(maps)).scores
    monkeypatch.setitem(base.ELEMENTS, "cpu", 2 * maps[0].numel())  # two images at a time
    split = defense.certify(evidence(maps), windows)
    for i in range(6):
        alone = defense.certify(evidence(maps[i : i + 1]), windows)
        for field in ("label", "margin", "weakest", "rival"):
            assert torch.equal(getattr(whole, field)[i : i + 1], getattr(alone, field))
            assert torch.equal(getattr(whole, field), getattr(split, field))
        assert torch.equal(defense.predict(evidence(maps[i : i + 1])).scores, scores[i : i + 1])


@EVERY
def test_labels_given_for_a_batch_that_is_split_belong_to_their_images(name, monkeypatch) -> None:
    defense, evidence = DEFENSES[name]
    maps = evidence(logits(7))
    windows = Windows.sliding(grid=GRID, size=(2, 3))
    label = torch.tensor([0, 2, 1, 2, 4, 3, 2])
    alone = [defense.certify(maps[i : i + 1], windows, label=int(label[i])) for i in range(7)]
    monkeypatch.setitem(base.ELEMENTS, "cpu", 2 * maps.values[0].numel())  # two images at a time
    split = defense.certify(maps, windows, label=label)
    assert torch.equal(split.label, label)
    for field in ("margin", "weakest", "rival"):
        assert torch.equal(getattr(split, field), torch.cat([getattr(each, field) for each in alone]))
    broken = logits(7)
    broken[5, 0, 0, 0] = torch.inf
    with pytest.raises(InputError, match="image 5 of the batch"):
        defense.certify(evidence(broken), windows, label=label)


@EVERY
def test_local_logits_are_quantised_with_the_defenses_own_evidence(name) -> None:
    defense, _ = DEFENSES[name]
    maps = logits(4)
    assert torch.equal(defense.predict(maps).scores, defense.predict(defense.default_evidence(maps)).scores)


@EVERY
def test_flipping_the_image_flips_the_weakest_window(name) -> None:
    defense, evidence = DEFENSES[name]
    maps = logits()
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    plain = defense.certify(evidence(maps), windows)
    mirrored = defense.certify(evidence(maps.flip(3)), windows)
    assert torch.equal(plain.margin, mirrored.margin)


@EVERY
def test_bad_input_is_refused_with_a_sentence(name) -> None:
    defense, evidence = DEFENSES[name]
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    maps = evidence(logits(2))
    with pytest.raises(InputError, match="windows of a 5 x 5 grid"):
        defense.certify(maps, Windows.sliding(grid=(5, 5), size=(2, 2)))
    for grid in ((6, 5), (5, 7), (7, 6)):
        with pytest.raises(InputError, match=f"grid of 6 x 7 cells; got windows of a {grid[0]} x {grid[1]} grid"):
            defense.certify(maps, Windows.sliding(grid=grid, size=(2, 2)))
    for top_k in (0, 5, 9):
        with pytest.raises(InputError, match="`top_k` must be"):
            defense.certify(maps, windows, top_k=top_k)
    with pytest.raises(InputError, match="`label` must lie between 0 and 4"):
        defense.certify(maps, windows, label=5)
    with pytest.raises(InputError, match="one entry per image"):
        defense.certify(maps, windows, label=torch.tensor([1]))
    with pytest.raises(InputError, match="one entry per image"):
        defense.certify(maps, windows, label=torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match="got no image"):
        defense.certify(maps[:0], windows)
    broken = logits(2)
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(InputError, match="image 1 of the batch"):
        defense.certify(evidence(broken), windows)
    assert defense.predict(evidence(broken)).label.shape == (2,)


@EVERY
def test_masks_of_another_grid_are_refused(name) -> None:
    defense, evidence = DEFENSES[name]
    if not hasattr(defense, "masks"):
        return
    for grid in ((5, 5), (6, 5), (5, 7)):
        with pytest.raises(InputError, match="Build the masks for this grid"):
            defense.predict(evidence(torch.rand(1, 3, *grid)))


def test_settings_are_shown_faithfully() -> None:
    defense = RobustMasking(masks=Windows.sliding(grid=(1, 3), size=(1, 2)), threshold=0.2)
    assert eval(repr(defense)) == defense
    assert defense.threshold == Fraction(1, 5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["RobustMasking", "RobustMasking T", "ClippedSum", "MajorityVote", "CellMasking", "Median"]
)
def test_a_larger_k_never_certifies_less(name, top_k) -> None:
    defense, evidence = DEFENSES[name]
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    maps = evidence(logits())
    fewer = defense.certify(maps, windows, top_k=top_k).margin
    more = defense.certify(maps, windows, top_k=top_k + 1).margin
    assert (more >= fewer).all()


def test_pruned_rivals_do_not_change_the_certificate() -> None:
    """Many classes: the margin, window and rival equal those of a run with only the classes that matter."""
    generator = torch.Generator().manual_seed(3)
    maps = torch.rand(3, 40, *GRID, generator=generator)
    maps[:, :10] += 0.3 * torch.rand(3, 10, 1, 1, generator=generator)
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    for defense, evidence in (
        (RobustMasking(masks=MASKS), Evidence()),
        (RobustMasking(masks=MASKS, threshold=0.1), Evidence(high=2.0)),
        (DoubleMasking(masks=MASKS), Evidence(low=None)),
        (DoubleMasking(masks=MASKS, tau=0.5), Evidence(low=None)),
        (Median(), Evidence(low=None)),
    ):
        found = defense.certify(evidence(maps), windows)
        for i in range(3):
            label = int(found.label[i])
            worst = min(
                float(defense.certify(evidence(maps[i : i + 1, [label, k]]), windows, label=0).margin)
                for k in range(40)
                if k != label
            )
            if isinstance(defense, DoubleMasking):
                assert float(found.margin[i]) <= worst  # the best mask may differ from rival to rival
            else:
                assert float(found.margin[i]) == worst


@pytest.mark.parametrize("name", sorted(DEFENSES.keys() - {"MajorityVote"}))  # votes have one unit
def test_finer_units_of_the_same_evidence_change_nothing(name) -> None:
    defense, evidence = DEFENSES[name]
    settings = evidence if evidence.kind == "logits" else Evidence(high=6.0)
    maps, windows = logits().round(), Windows.sliding(grid=GRID, size=(2, 2))
    coarse, fine = (replace(settings, bits=bits)(maps) for bits in (1, 9))
    assert torch.equal(defense.predict(coarse).scores, defense.predict(fine).scores)
    one, two = defense.certify(coarse, windows), defense.certify(fine, windows)
    for part in ("label", "margin", "weakest", "rival"):
        assert torch.equal(getattr(one, part), getattr(two, part))


@EVERY
def test_a_defense_accepts_just_the_windows_that_it_can_certify(name) -> None:
    defense, evidence = DEFENSES[name]
    maps = evidence(logits(1))
    part, whole = (Windows.sliding(grid=GRID, size=size) for size in ((2, 2), GRID))
    assert defense.accepts(maps, part)
    if name in ("RobustMasking T", "ClippedSum", "MajorityVote", "Undefended"):  # bounded evidence, or no proof at all
        assert defense.accepts(maps, whole)
        assert not defense.certify(maps, whole).certified.any()
    else:
        assert not defense.accepts(maps, whole)
        with pytest.raises(InputError, match="nothing can be certified"):
            defense.certify(maps, whole)


@EVERY
def test_a_defense_says_whether_a_negative_margin_means_an_attack(name) -> None:
    defense, evidence = DEFENSES[name]
    sound_only = ("RobustMasking T", "DoubleMasking", "DoubleMasking tau", "MaskedAgreement", "Undefended")
    windows = Windows.sliding(grid=GRID, size=(2, 2))
    maps = evidence(logits(1))
    assert defense.exact(maps, windows) == (name not in sound_only)
    if hasattr(defense, "spatial"):
        assert not replace(defense, spatial=False).exact(maps, windows)


def test_the_standalone_checker_knows_four_defenses() -> None:
    checkable = {type(defense).__name__ for defense, _ in DEFENSES.values() if defense.checkable}
    assert checkable == {"RobustMasking", "DoubleMasking", "ClippedSum", "MajorityVote"}
