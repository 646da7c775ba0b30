"""What records say: intervals, counts, histograms."""

import doctest

import pytest

from patchguard.runs import metrics
from patchguard.runs.metrics import share, summarise, wilson

SETTINGS = {"labelled": True, "patches": ["5x5"], "curve": [1, 5], "class_names": ["cat", "dog"]}


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


@pytest.mark.parametrize("of", [1, 7, 500])
def test_an_interval_holds_its_share_and_stays_within_0_and_1(of):
    for right in range(of + 1):
        low, high = wilson(right, of)
        assert 0 <= low <= right / of <= high <= 1


def test_the_share_of_nothing_is_none():
    assert share(0, 0) == {"right": 0, "of": 0, "share": None, "low": 0.0, "high": 1.0}


def test_certified_is_right_and_proved():
    found = summarise(RECORDS, SETTINGS)
    assert (found["images"], found["errors"]) == (5, 1)
    patch = found["patches"]["5x5"]
    assert [(patch[name]["right"], patch[name]["of"]) for name in ("clean", "certified", "proved")] == [
        (3, 4),
        (1, 4),
        (2, 4),
    ]
    assert patch["masks"] == "own"
    assert found["undefended"]["right"] == 3
    assert found["classes"] == [
        {"name": "cat", "of": 2, "clean": 2, "certified": {"5x5": 1}},
        {"name": "dog", "of": 2, "clean": 1, "certified": {"5x5": 0}},
    ]


def test_a_class_is_counted_by_the_label_of_the_rule_that_certifies():
    """Masks fitted to the patch may answer otherwise than the model's own; what is certified is their answer."""
    other = record(0, 0, 1, True, 2.0)
    other["label"] = 0
    found = summarise([other, record(1, 1, 1, True, 1.0) | {"label": 0}], SETTINGS)
    assert [(row["clean"], row["certified"]["5x5"]) for row in found["classes"]] == [(0, 0), (1, 1)]
    assert found["patches"]["5x5"]["clean"]["right"] == sum(row["clean"] for row in found["classes"])


def test_curves_count_right_labels_that_are_proved():
    curve = summarise(RECORDS, SETTINGS)["curve"]
    assert [curve["kept"][side]["right"] for side in ("1", "5")] == [2, 1]
    assert [curve["refitted"][side]["certified"]["right"] for side in ("1", "5")] == [3, 1]


def test_a_margin_of_0_lies_on_the_side_of_what_is_not_proved():
    margins = summarise(RECORDS, SETTINGS)["margins"]["5x5"]
    zero = margins["edges"].index(0.0)
    assert sum(margins["certified"]) == sum(margins["wrong"]) == 1
    assert sum(margins["certified"][:zero]) == 0
    assert sum(margins["not_certified"][:zero]) == 2
    assert len(margins["certified"]) == len(margins["edges"]) - 1


def test_without_classes_only_proofs_are_counted():
    found = summarise([{**each, "target": None} for each in RECORDS], {**SETTINGS, "labelled": False})
    assert not {"undefended", "classes"} & set(found)
    assert set(found["patches"]["5x5"]) == {"proved", "masks"}
    assert found["curve"]["kept"]["1"]["right"] == 3
    assert sum(found["margins"]["5x5"]["wrong"]) == 0


def test_masks_of_both_kinds_are_called_mixed():
    records = [RECORDS[0], record(1, 0, 0, True, 1.0, masks="refitted")]
    assert summarise(records, SETTINGS)["patches"]["5x5"]["masks"] == "mixed"


def test_a_run_without_margins_has_an_empty_histogram():
    found = summarise([record(0, 0, 0, False, None)], SETTINGS)
    assert found["margins"]["5x5"] == {"edges": [], "certified": [], "not_certified": [], "wrong": []}
