"""What the records of a run add up to: intervals, counts, histograms."""

import doctest

import pytest

from patchguard.runs import metrics
from patchguard.runs.metrics import AttackTally, CertifyTally, attack_group, proportion, wilson
from patchguard.runs.summary import AttackSettings, AttackSummary, CertifySettings, CertifySummary, Proportion

ABOUT = {"model": "cifar10", "data": "sample", "patches": ("5x5",), "defense": "DoubleMasking"}


def summarize(records, *, labeled=True) -> CertifySummary:
    tally = CertifyTally(CertifySettings(**ABOUT, labeled=labeled, curve=(1, 5), class_names=("cat", "dog")))
    for each in records:
        tally.add(each)
    return tally.summarize()


def count(summary, *names: str) -> list[tuple[int, int]]:
    numbers = [getattr(summary, name) for name in names]
    return [(number.correct, number.total) for number in numbers]


def record(index, target, label, certified, margin, largest=0, masks="own"):
    entry = {"label": label, "certified": certified, "margin": margin, "masks": masks}
    refitted = {"1": {"label": label, "certified": True}, "5": {"label": label, "certified": certified}}
    return {
        "index": index,
        "target": target,
        "undefended": label,
        "label": label,
        "patches": {"5x5": entry},
        "largest": largest,
        "refitted": refitted,
    }


RECORDS = [
    record(0, 0, 0, True, 2.0, largest=5),
    record(1, 0, 0, False, -1.0, largest=1),
    record(2, 1, 0, True, 4.0, largest=7),
    record(3, 1, 1, False, 0.0),
    {"index": 4, "name": "broken", "target": 1, "error": "is empty"},
]


def test_the_examples_in_docstrings_run():
    assert doctest.testmod(metrics).failed == 0


@pytest.mark.parametrize("total", [1, 7, 500])
def test_an_interval_holds_its_fraction_and_stays_within_0_and_1(total):
    for correct in range(total + 1):
        low, high = wilson(correct, total)
        assert 0 <= low <= correct / total <= high <= 1


def test_the_fraction_of_nothing_is_none():
    assert proportion(0, 0) == Proportion(correct=0, total=0, fraction=None, low=0.0, high=1.0)


def test_certified_is_correct_and_proved():
    summary = summarize(RECORDS)
    assert (summary.images, summary.errors) == (5, 1)
    patch = summary.patches["5x5"]
    assert count(patch, "clean", "certified", "proved") == [(3, 4), (1, 4), (2, 4)]
    assert patch.masks == "own"
    assert summary.undefended.correct == 3
    rows = [(row.name, row.total, row.clean, row.certified) for row in summary.classes]
    assert rows == [("cat", 2, 2, {"5x5": 1}), ("dog", 2, 1, {"5x5": 0})]


def test_a_class_is_counted_by_the_label_of_the_rule_that_certifies():
    """Masks fitted to the patch may give another label than the model's own; what is certified is their label."""
    other = record(0, 0, 1, True, 2.0)
    other["label"] = 0
    summary = summarize([other, record(1, 1, 1, True, 1.0) | {"label": 0}])
    assert [(row.clean, row.certified["5x5"]) for row in summary.classes] == [(0, 0), (1, 1)]
    assert summary.patches["5x5"].clean.correct == sum(row.clean for row in summary.classes)


def test_curves_count_correct_labels_that_are_proved():
    curve = summarize(RECORDS).curve
    assert [curve.kept[side].correct for side in (1, 5)] == [2, 1]
    assert [curve.refitted[side].certified.correct for side in (1, 5)] == [3, 1]


def test_a_guard_without_masks_or_an_undefended_label_leaves_their_numbers_out():
    summary = summarize([{**each, "undefended": None, "largest": None} for each in RECORDS])
    assert summary.undefended is None
    assert summary.curve.kept[1].total == 0


def test_a_margin_of_0_lies_on_the_side_of_what_is_not_proved():
    margins = summarize(RECORDS).margins["5x5"]
    zero = margins.edges.index(0.0)
    assert sum(margins.certified) == sum(margins.wrong) == 1
    assert sum(margins.certified[:zero]) == 0
    assert sum(margins.not_certified[:zero]) == 2
    assert len(margins.certified) == len(margins.edges) - 1


def test_without_classes_only_proofs_are_counted():
    summary = summarize([{**each, "target": None} for each in RECORDS], labeled=False)
    assert (summary.undefended, summary.classes) == (None, [])
    assert (summary.patches["5x5"].clean, summary.patches["5x5"].certified) == (None, None)
    assert summary.curve.kept[1].correct == 3
    assert sum(summary.margins["5x5"].wrong) == 0


def test_masks_of_both_kinds_are_called_mixed():
    assert summarize([RECORDS[0], record(1, 0, 0, True, 1.0, masks="refitted")]).patches["5x5"].masks == "mixed"


def test_a_run_without_margins_has_an_empty_histogram():
    margins = summarize([record(0, 0, 0, False, None)]).margins["5x5"]
    assert (margins.edges, margins.groups) == ([], {"certified": [], "not_certified": [], "wrong": []})


# -- attacks -----------------------------------------------------------------------------------------------------------


def attacked(index: int, target: int, label: int, after: int, *, certified: bool = False, **more: object) -> dict:
    """A record of an untargeted attack."""
    return {
        "index": index,
        "target": target,
        "label": label,
        "certified": certified,
        "attacked": after,
        "broken": after != target,
        "refuted": certified and after != label,
        "places": [[0, 0]] if target == label else None,
        "masks": "own",
        **more,
    }


ATTACKED = [
    attacked(0, 1, 1, 1, certified=True),  # proved, and held
    attacked(1, 1, 1, 0),  # broken
    attacked(2, 1, 1, 2),  # broken
    attacked(3, 1, 1, 1),  # neither proved nor broken
    attacked(4, 1, 2, 2),  # wrong without an attack
    attacked(5, 1, 2, 2, certified=True),  # wrong, and proved to stay so
    {"index": 6, "name": "torn.png", "target": 1, "error": "is truncated"},
]


def summarize_attack(records, *, labeled=True) -> AttackSummary:
    tally = AttackTally(AttackSettings(**ABOUT, labeled=labeled, attack="adaptive", budget={}))
    for each in records:
        tally.add(each)
    return tally.summarize()


def test_every_attacked_image_is_counted_once_where_it_belongs():
    summary = summarize_attack(ATTACKED)
    assert (summary.images, summary.errors, summary.refuted, summary.masks) == (7, 1, [], "own")
    counts = count(summary, "clean", "attacked", "certified", "proved", "attempted", "broken", "certified_broken")
    assert counts == [(4, 6), (2, 6), (1, 6), (2, 6), (4, 6), (2, 3), (0, 1)]
    assert [attack_group(each) for each in ATTACKED[:4]] == ["withstood", "broken", "broken", "open"]


def test_a_refuted_certificate_is_listed_and_lowers_what_is_correct_below_what_is_certified():
    refuted = attacked(7, 1, 1, 0, certified=True)
    summary = summarize_attack([*ATTACKED, refuted])
    assert summary.refuted == [7]
    assert attack_group(refuted) == "refuted"
    assert count(summary, "attacked", "certified", "certified_broken", "broken") == [(2, 7), (2, 7), (1, 2), (2, 3)]


def test_an_alert_counts_as_a_label_that_stays():
    alerted = attacked(0, 1, 1, 0, certified=True, alert=True) | {"broken": False, "refuted": False}
    summary = summarize_attack([alerted, attacked(1, 1, 1, 0, alert=False)])
    assert count(summary, "attacked", "alerts", "broken", "certified_broken") == [(1, 2), (1, 2), (1, 1), (0, 1)]


def test_without_true_classes_the_label_is_what_must_stay():
    summary = summarize_attack([{**each, "target": None} for each in ATTACKED], labeled=False)
    assert count(summary, "clean", "attacked") == [(6, 6), (4, 6)]
