"""The published models answer as they always did: labels, margins and certificate files, bit for bit.

tests/golden/ was recorded with release 0.1.0 (tests/golden/README.md). Where torch or the CPU is another one, the
network rounds differently: labels must be equal then, and margins may move by what the drift allows.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.published_record import (
    GOLDEN,
    PHOTOS,
    RECORD,
    SAME_MACHINE,
    VALUES,
    check_values,
    images_for,
    load,
    patch_for,
)
from helpers.published_record import one_thread as one_thread
from typer.testing import CliRunner

from patchguard import verify
from patchguard.cli import app
from patchguard.data import sample
from patchguard.storage import certificate_file, zoo
from patchguard.storage.published_models import PUBLISHED

CERTIFYING = tuple(name for name in PUBLISHED if f"{name}/margin" in VALUES)
UNDEFENDED = tuple(name for name in PUBLISHED if name not in CERTIFYING)
only_here = pytest.mark.skipif(not SAME_MACHINE, reason="recorded with another torch or CPU")


@pytest.mark.parametrize(("name", "count"), [("cifar10", 4), ("cifar10_mask_ds", 4)])
def test_some_labels_and_margins_are_those_of_release_0_1(name, count) -> None:
    check_values(name, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CERTIFYING if name != PHOTOS])
def test_all_labels_and_margins_are_those_of_release_0_1(name) -> None:
    check_values(name, 500)


@pytest.mark.parametrize(
    ("name", "count"),
    [("cifar10_resnet18", 8), *(pytest.param(name, 500, marks=pytest.mark.slow) for name in UNDEFENDED)],
)
def test_labels_of_undefended_models_are_those_of_release_0_1(name, count) -> None:
    label = load(name).predict(images_for(name, count).float() / 255).label
    assert label.tolist() == VALUES[f"{name}/label"][:count].tolist()


def test_the_published_run_of_the_embedded_model_says_what_was_recorded() -> None:
    """results/sample.json: all 500 labels, which of them are certified, and the accuracies that follow."""
    published = json.loads((GOLDEN.parents[1] / "results" / "sample.json").read_text())
    label, certified = VALUES["cifar10/label"], VALUES["cifar10/margin"] > 0
    assert published["label"] == label.tolist()
    assert published["certified_5x5"] == np.flatnonzero(certified).tolist()
    correct, entry = label == sample.load().targets.numpy(), published["patches"]["5x5"]
    assert entry["clean"]["right"] == correct.sum()
    assert entry["certified"]["right"] == (correct & certified).sum()


def test_prediction_and_certificate_agree_on_the_label() -> None:
    label = load("cifar10").predict(images_for("cifar10", 4).float() / 255).label
    assert label.tolist() == VALUES["cifar10/label"][:4].tolist()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_and_their_digests_stay(name) -> None:
    file = zoo.file_of(name)
    assert zoo.inspect(file.path)["digest"] == RECORD["file_digests"][name]
    assert hashlib.sha256(file.path.read_bytes()).hexdigest() == RECORD["file_sha256"][name]
    assert file.digest == load(name).digest == RECORD["guard_digests"][name]


# -- certificate files -------------------------------------------------------------------------------------------------


def check_bytes(name: str, image: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_file, "__version__", RECORD["package"])
    path = folder / f"{name}-{image}.pgc"
    certificate_file.write(path, load(name), images_for(name, image + 1)[image], patch_for(name))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RECORD["certificate_sha256"][path.name]


@only_here
@pytest.mark.parametrize("name", ["cifar10", "cifar10_mask_ds"])
def test_certificate_files_have_the_bytes_of_release_0_1(name, tmp_path, monkeypatch) -> None:
    check_bytes(name, 0, tmp_path, monkeypatch)


@only_here
@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFYING)
@pytest.mark.parametrize("image", range(3))
def test_all_recorded_certificate_files_have_the_bytes_of_release_0_1(name, image, tmp_path, monkeypatch) -> None:
    check_bytes(name, image, tmp_path, monkeypatch)


@pytest.mark.parametrize("path", sorted((GOLDEN / "certificates").glob("*.pgc")), ids=lambda path: path.stem)
def test_certificate_files_of_release_0_1_still_verify(path) -> None:
    name, _, image = path.stem.rpartition("-")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RECORD["certificate_sha256"][path.name]
    verdict = verify.check(path)
    assert verdict.valid, verdict.reason
    assert verdict.certified == (VALUES[f"{name}/margin"][int(image)] > 0)
    assert f"label {VALUES[f'{name}/label'][int(image)]} is" in verdict.reason


# -- run folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["certify", "attack"])
def test_run_folders_of_release_0_1_still_give_a_report(kind, tmp_path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "runs" / kind, tmp_path / kind))
    shown = CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    page = (folder / "report.html").read_text()
    assert "66.7" in page
    assert "test/02745" in page


@pytest.mark.slow
@only_here
def test_a_run_of_release_0_1_that_was_stopped_is_resumed(tmp_path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "runs" / "certify", tmp_path / "run"))
    (folder / "summary.json").unlink()
    shard = folder / "records-00000.jsonl"
    lines = shard.read_text().splitlines(keepends=True)
    shard.write_text("".join(lines[:-1]))
    shown = CliRunner().invoke(
        app, ["certify", "--limit", "3", "--patch", "5", "--patch", "2", "--out", str(folder), "--mix-versions"]
    )
    assert shown.exit_code == 0, shown.output
    resumed = shard.read_text().splitlines(keepends=True)
    assert resumed[:-1] == lines[:-1], "finished work was computed again"
    new, old = json.loads(resumed[-1]), json.loads(lines[-1])
    assert new["name"] == old["name"]
    assert new["patches"]["5x5"]["margin"] == old["patches"]["5x5"]["margin"]
    assert new["patches"]["2x2"]["margin"] == old["patches"]["2x2"]["margin"]
