"""docs/reproduction.md is what results/reproduction says."""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from patchguard.paper import EXPERIMENTS
from patchguard.runs.metrics import proportion

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("make_reproduction", DOCS / "make_reproduction.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(made):
    assert made.PAGE.read_text() == made.page(), "run `make docs`"


def test_published_runs_have_the_names_of_experiments(made):
    known = {each.result_name(data) for each in EXPERIMENTS.values() for data in each.datasets or ("",)}
    assert {path.stem for path in made.RUNS.glob("*.json")} <= known


def test_every_large_gap_to_the_paper_has_its_reason(made):
    for path in made.RUNS.glob("*.json"):
        assert made.unexplained(json.loads(path.read_text())) == [], path.name


def test_a_gap_without_a_reason_is_found_and_milliseconds_are_no_points(made):
    row = {"label": "R", "ours": [50.0], "published": [80.0], "note": "thin model", "reason": ""}
    table = {"title": "T", "where": "", "columns": ["clean"], "unit": "%", "rows": [row]}
    assert made.unexplained({"tables": [table]}) == ["T: R"]
    assert made.unexplained({"tables": [{**table, "rows": [{**row, "reason": "thin"}]}]}) == []
    assert made.unexplained({"tables": [{**table, "rows": [{**row, "published": [51.9]}]}]}) == []
    other = {**table, "unit": "other"}
    assert made.unexplained({"tables": [other]}) == []
    assert "points" not in "".join(made.remarks(other))


def test_a_run_is_shown_beside_the_paper_with_the_reason_for_its_gap(made, tmp_path):
    rows = [
        {
            "label": "Conventional training",
            "ours": [None, None],
            "published": [82.6, 31.7],
            "note": "not run: train it",
            "reason": "",
        },
        {
            "label": "Provable adv. training",
            "ours": [msgspec.to_builtins(proportion(80, 100)), msgspec.to_builtins(proportion(46, 100))],
            "published": [83.9, 47.3],
            "note": "thin model",
            "reason": "few channels",
        },
    ]
    table = {"title": "T", "where": "tab-adv-training", "columns": ["clean", "robust"], "unit": "%", "rows": rows}
    run = {"tables": [table], "figures": ["drawn"], "notes": ["noted"], "device": "cuda", "limit": None}
    (tmp_path / "training-cifar10.json").write_text(json.dumps(run))
    (tmp_path / "training-cifar10-drawn.png").write_bytes(b"")
    page = made.page(tmp_path)
    assert "| Conventional training | - (82.6) | - (31.7) |" in page
    assert "| Provable adv. training | 80.0 (83.9) | 46.0 (47.3) |" in page
    assert "- Provable adv. training (up to -3.9 points from the paper): thin model; few channels" in page
    assert "- Conventional training: not run: train it" in page
    assert "training-cifar10-drawn.png" in page
    assert (
        "| `training`: Effect of provable adversarial training | tab-adv-training | CIFAR-10 | ImageNette, ImageNet |"
        in page
    )
    assert "- noted" in page
