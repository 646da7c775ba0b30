"""Whoever adds a kind of guard writes one class, and gets runs, attacks, the report and certificate files."""

import json

import numpy as np
import pytest
import torch
from helpers.toy_guard import Brightness
from PIL import Image

from patchguard import verify
from patchguard.attacks import build
from patchguard.patch import Patch
from patchguard.report import render as report
from patchguard.runs.attack import Trial, refute
from patchguard.runs.certify import certify, predict
from patchguard.runs.images import open_sources
from patchguard.runs.job import prepare
from patchguard.runs.records import Folder
from patchguard.storage import certificate_file

SHADES = (20, 90, 118, 126, 129, 138, 170, 240)


@pytest.fixture
def photos(tmp_path):
    """Plain pictures of 12 x 12 pixels, some of them too near the threshold for a proof."""
    for number, shade in enumerate(SHADES):
        folder = tmp_path / "photos" / ("bright" if shade > 127 else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 12, 3), shade, np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def make_job(photos, **settings):
    return prepare(source=open_sources([str(photos)]), data="photos", model=Brightness(), patches=["3"], **settings)


def test_certify_records_what_the_guard_proves_and_the_report_shows_it(photos, tmp_path) -> None:
    outcome = certify(make_job(photos, certificates=tmp_path), tmp_path / "run", device="cpu")
    records = list(Folder(tmp_path / "run").records())
    assert {record["label"] for record in records} == {0, 1}
    assert {record["patches"]["3x3"]["certified"] for record in records} == {True, False}
    by_name = {record["name"]: record for record in records}
    assert by_name["dark/0.png"]["largest"] > by_name["dark/1.png"]["largest"] > by_name["dark/3.png"]["largest"] == 0
    entry = outcome.summary.patches["3x3"]
    assert (entry.clean.correct, entry.certified.correct) == (8, sum(r["patches"]["3x3"]["certified"] for r in records))
    page = report.write([tmp_path / "run"])
    assert "Brightness" in page.read_text()
    assert certify(make_job(photos, certificates=tmp_path), tmp_path / "run", device="cpu").already_complete


def test_predict_gives_labels_and_proofs(photos) -> None:
    records = list(predict(make_job(photos), device="cpu"))
    assert [record["label"] for record in sorted(records, key=lambda record: record["name"])] == [1] * 4 + [0] * 4
    assert {record["patches"]["3x3"]["certified"] for record in records} == {True, False}


def test_an_attack_breaks_only_what_is_not_certified(photos, tmp_path) -> None:
    trial = Trial(job=make_job(photos, curve=False), attack=build("colors"), name="colors")
    summary = refute(trial, tmp_path / "attack", device="cpu").summary
    records = list(Folder(tmp_path / "attack").records())
    assert summary.refuted == []
    assert any(record["broken"] for record in records)
    assert not any(record["broken"] for record in records if record["certified"])
    assert report.write([tmp_path / "attack"]).exists()


def test_a_certificate_file_is_a_statement_that_the_guard_confirms(tmp_path) -> None:
    image = torch.full((3, 12, 12), 20, dtype=torch.uint8)
    certificate_file.write(tmp_path / "dark.pgc", Brightness(), image, Patch(3))
    data = (tmp_path / "dark.pgc").read_bytes()
    verdict = verify.check_bytes(data)
    assert (verdict.checked, verdict.valid) == (False, False)
    assert certificate_file.difference(data, Brightness(), image) is None
    assert certificate_file.difference(data, Brightness(), image + 1) == "it is about another image"
    assert json.loads(verify.canonical(verify.read(data)[0]))["certified"] is True
