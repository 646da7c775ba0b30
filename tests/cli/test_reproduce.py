"""`patchguard reproduce`: what is there is run, what is not is said."""

import json
import subprocess
import sys

import pytest
from helpers.reproduction import IMAGES, thin_context
from typer.testing import CliRunner

from patchguard import paper
from patchguard.cli import app
from patchguard.cli.reproduce import _print_progress
from patchguard.errors import InputError
from patchguard.paper import EXPERIMENTS
from patchguard.paper.context import Context
from patchguard.paper.experiment import Experiment, Missing, Result, Row, Table


@pytest.fixture
def run(tmp_path):
    def invoke(*words):
        places = ("--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--device", "cpu")
        return CliRunner().invoke(app, ["reproduce", *words, *places])

    return invoke


@pytest.fixture
def context(tmp_path, monkeypatch):
    return thin_context(tmp_path / "cache", monkeypatch)


def test_the_list_names_every_experiment_its_table_and_its_data(run):
    shown = run("--list")
    assert shown.exit_code == 0
    for experiment in EXPERIMENTS.values():
        (line,) = [line for line in shown.stdout.splitlines() if line.split()[0] == experiment.name]
        for word in (*experiment.where[:1], *experiment.datasets):
            assert word in line
    listed = json.loads(run("--list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(EXPERIMENTS)


def test_the_list_does_not_wait_for_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from patchguard.cli import app\n"
        "shown = CliRunner().invoke(app, ['reproduce', '--list'])\n"
        "assert shown.exit_code == 0 and 'main' in shown.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("treshold",), "Did you mean 'thresholds'?"),
        ((), "`patchguard reproduce --list` shows them"),
        (("main", "--data", "flowers"), "`--data` must be a dataset that main can use; got 'flowers'"),
        (
            ("toy_example", "--data", "cifar10"),
            "`--data` must be a dataset that toy_example can use; got 'cifar10'. It needs",
        ),
        (("main", "--limit", "0"), "`--limit` must be a whole number, 1 or more"),
        (("main", "--batch-size", "-1"), "`--batch-size` must be a whole number, 1 or more"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(run, words, message):
    shown = run(*words)
    assert shown.exit_code == 1
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_without_data_nothing_is_run_and_the_command_says_so(run, tmp_path):
    shown = run("all", "--root", str(tmp_path / "nothing"), "--data", "cifar10")
    assert shown.exit_code == 1
    assert shown.stdout.count("patchguard data get cifar10") == sum(
        "cifar10" in e.datasets for e in EXPERIMENTS.values()
    )
    assert "nothing was run" in shown.stderr


def test_a_run_prints_ours_beside_theirs_and_writes_its_folder(run, context, tmp_path):
    shown = run("training")
    assert shown.exit_code == 0, shown.stderr
    assert "Provable adv. training  - (83.9)  - (47.3)" in shown.stdout
    found = json.loads((tmp_path / "out" / "training-cifar10" / "result.json").read_text())
    assert found["where"] == ["tab-adv-training"]
    assert found["tables"][0]["rows"][0]["ours"] == [None, None]
    assert found["environment"]["torch"]


def test_json_holds_counts_with_intervals(run, context):
    shown = run("large_patches", "--data", "cifar10", "--json")
    assert shown.exit_code == 0, shown.stderr
    (found,) = json.loads(shown.stdout)
    first = found["tables"][1]["rows"][0]["ours"][0]
    assert first["total"] == IMAGES
    assert first["low"] < first["fraction"] < first["high"]
    assert found["figures"] == ["large_patches-mask-srf-7"]


def test_the_old_name_of_the_root_still_works_and_is_not_shown(run, tmp_path):
    missing = run("main", "--data-root", str(tmp_path / "nothing"), "--data", "cifar10")
    assert str(tmp_path / "nothing") in missing.stdout
    assert "--data-root" not in run("--help").stdout


def test_a_refuted_certificate_is_status_3(run, monkeypatch):
    def refuted(context: Context, dataset: str) -> Result:
        return Result(tables=(), refuted=2)

    monkeypatch.setattr(paper, "EXPERIMENTS", {"refuted": Experiment("refuted", "refuted", (), (), refuted)})
    shown = run("all")
    assert shown.exit_code == 3
    assert "2 certified images were broken" in shown.stderr


def test_what_lacks_its_data_is_skipped_and_the_rest_is_run(run, monkeypatch, tmp_path):
    def lacking(context: Context, dataset: str) -> Result:
        raise Missing("no such data: get it")

    def found(context: Context, dataset: str) -> Result:
        table = Table(title="t", where="", columns=("a",), rows=(Row(label="r", ours=(1.0,), published=(2.0,)),))
        return Result(tables=(table,), figures={"drawn": b"\x89PNG"})

    made = {
        name: Experiment(name, name, (), (), function) for name, function in (("lacking", lacking), ("found", found))
    }
    monkeypatch.setattr(paper, "EXPERIMENTS", made)
    shown = run("all")
    assert shown.exit_code == 0, shown.stderr
    assert "lacking: skipped. no such data: get it" in shown.stdout
    assert "1.0 (2.0)" in shown.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "found").iterdir()) == ["drawn.png", "result.json"]
    assert not (tmp_path / "out" / "lacking").exists()


def test_a_broken_file_costs_its_own_experiment_only_and_the_status_says_so(run, monkeypatch, tmp_path):
    def broken(context: Context, dataset: str) -> Result:
        raise InputError("thin.safetensors is not a whole file.")

    def found(context: Context, dataset: str) -> Result:
        return Result(tables=())

    made = {name: Experiment(name, name, (), (), function) for name, function in (("broken", broken), ("found", found))}
    monkeypatch.setattr(paper, "EXPERIMENTS", made)
    shown = run("all")
    assert shown.exit_code == 1
    assert "broken: skipped. thin.safetensors is not a whole file." in shown.stdout
    assert "not everything was run (broken): thin.safetensors is not a whole file." in shown.stderr
    assert (tmp_path / "out" / "found" / "result.json").is_file()


def test_progress_of_an_unknown_length_is_not_told_at_every_step(capsys):
    tell = _print_progress()
    for done in range(1, 500):
        tell("steps", done, 0)
    assert capsys.readouterr().err.splitlines() == ["steps: 1"]
    tell("maps", 7, 7)
    assert capsys.readouterr().err == "maps: 7 of 7\n"
