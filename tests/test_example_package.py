"""The example of docs/add_a_defense.md: a package of its own, installed and run as a user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.reproduction import IMAGES, thin_context, thin_guard
from typer.testing import CliRunner

import patchguard
from patchguard.cli import app
from patchguard.defenses.serialization import DEFENSES
from patchguard.runs.records import Folder
from patchguard.storage import zoo

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "mean_confidence"
HOME = Path(patchguard.__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the example is installed, without a network."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"  # a copy, so that the build leaves nothing in the repository
    source.mkdir()
    for file in ("pyproject.toml", "mean_confidence.py"):
        (source / file).write_text((EXAMPLE / file).read_text())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(folder / "site")]
    shown = subprocess.run([*pip, *options, str(source)], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


def test_the_page_shows_the_file_of_the_example() -> None:
    page = (ROOT / "docs" / "add_a_defense.md").read_text()
    (first, *_) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert first == (EXAMPLE / "mean_confidence.py").read_text()
    (entry,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert entry in (EXAMPLE / "pyproject.toml").read_text()


def test_the_example_is_known_only_where_it_is_installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MeanConfidence" not in DEFENSES
    monkeypatch.syspath_prepend(str(site))
    assert DEFENSES.package("MeanConfidence") == "mean-confidence"


def test_the_example_certifies_and_the_attack_breaks_no_certificate(installed: Path, tmp_path: Path) -> None:
    model = tmp_path / "thin.safetensors"
    zoo.save(thin_guard(), model)
    words = ["--model", str(model), "--data", "sample", "--limit", "6", "--patch", "3", "--device", "cpu"]
    words += ["--defense", "MeanConfidence"]
    shown = CliRunner().invoke(app, ["certify", *words, "--out", str(tmp_path / "certify")])
    assert shown.exit_code == 0, shown.stderr
    summary = json.loads((tmp_path / "certify" / "summary.json").read_text())
    assert summary["settings"]["defense"] == "MeanConfidence"
    assert summary["settings"]["rule"]["evidence"]["kind"] == "confidence"
    assert summary["images"] == 6
    assert (
        len([line for shard in Folder(tmp_path / "certify").shards() for line in shard.read_text().splitlines()]) == 6
    )
    assert "MeanConfidence" in (tmp_path / "certify" / "report.html").read_text()
    more = ["--attack", "colors", "--limit", "2", "--out", str(tmp_path / "attack")]
    shown = CliRunner().invoke(app, ["attack", *words, *more])
    assert shown.exit_code == 0, shown.stderr


def test_the_test_of_the_example_passes_with_the_fixture(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_mean_confidence.py").write_text((EXAMPLE / "test_mean_confidence.py").read_text())
    (tmp_path / "test_unsound.py").write_text(
        "from patchguard.oracle import Counterexample\n"
        "from test_mistake import Generous\n\n\n"
        "def test_generous(check_defense):\n    check_defense(Generous())\n"
    )
    (tmp_path / "test_mistake.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from mean_confidence import MeanConfidence\n"
        "from patchguard.defenses import ClippedSum\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Generous(ClippedSum.__base__):\n"
        "    default_evidence = MeanConfidence.default_evidence\n"
        "    def validate_windows(self, evidence, windows):\n"
        "        MeanConfidence().validate_windows(evidence, windows)\n"
        "    def _predict(self, evidence):\n"
        "        return MeanConfidence()._predict(evidence)\n"
        "    def _certify(self, *words):\n"
        "        proof = MeanConfidence()._certify(*words)\n"
        "        return replace(proof, margin=proof.margin + 0.5)\n"
    )
    paths = os.pathsep.join(map(str, (site, HOME)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_patchguard", "."]
    shown = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert "1 failed, 1 passed" in shown.stdout
    assert "Counterexample: Generous() certifies class" in shown.stdout
    assert "evidence after the attack: [[[" in shown.stdout


# -- reproduce ---------------------------------------------------------------------------------------------------------


def reproduce(folder: Path, *words: str):
    places = ("--cache", str(folder / "cache"), "--out", str(folder / "out"), "--device", "cpu")
    return CliRunner().invoke(app, ["reproduce", *words, *places])


def test_reproduce_shows_the_example_beside_the_defenses_of_the_paper(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thin_context(tmp_path / "cache", monkeypatch)
    shown = reproduce(tmp_path, "main", "--data", "cifar10", "--defense", "MeanConfidence")
    assert shown.exit_code == 0, shown.stderr
    result = json.loads((tmp_path / "out" / "main-cifar10" / "result.json").read_text())
    assert result["defense"] == "MeanConfidence"
    rows = {row["label"]: row for row in result["tables"][1]["rows"]}
    (ours,) = [row for label, row in rows.items() if label.endswith(": MeanConfidence")]
    clean, robust, *_ = ours["ours"]
    assert clean["total"] == IMAGES
    assert 0 <= robust["correct"] <= clean["correct"] <= IMAGES
    without = reproduce(tmp_path, "main", "--data", "cifar10")
    assert without.exit_code == 0
    assert "MeanConfidence" not in without.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("main", "--defense", "MeanConfidenc"), "`--defense` must be a known defense; got 'MeanConfidenc'"),
        (("thresholds", "--defense", "Median"), "`--defense` adds rows to the experiment main; got 'thresholds'"),
        (("main", "--defense", "MaskedAgreement"), "`--defense` must prove labels; MaskedAgreement only detects"),
    ],
)
def test_reproduce_refuses_a_defense_that_it_cannot_add(tmp_path: Path, words, message) -> None:
    shown = reproduce(tmp_path, *words)
    assert shown.exit_code == 1
    assert message in shown.stderr


def test_without_any_network_the_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thin_context(tmp_path / "elsewhere", monkeypatch)
    shown = reproduce(tmp_path, "main", "--data", "cifar10", "--defense", "Median", "--json")
    assert "no network is here; the other rows say how to get one" in shown.stdout
