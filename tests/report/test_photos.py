"""Every image of a run: photos.csv beside the report, and the data of the table inside it."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.run_folders import fabricate

from patchguard.report import photos, pictures, render
from patchguard.report.files import read_finished
from patchguard.runs.records import Folder
from patchguard.runs.summary import AttackSummary, CertifySummary

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"


def read_csv(folder: Path) -> list[dict[str, str]]:
    text = (folder / "photos.csv").read_bytes().decode()
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def read_table(folder: Path) -> dict:
    found = re.search(r'id="photos-data">(.*?)</script>', (folder / "report.html").read_text("utf-8"), re.DOTALL)
    return json.loads(found[1])


def test_the_file_has_one_row_per_image_in_the_words_of_the_report(tmp_path):
    folder = fabricate(tmp_path / "run", images=40, patches=("5x5", "2x2"), errors=2)
    render.write([folder])
    records = {record["index"]: record for record in Folder(folder).records()}
    rows = read_csv(folder)
    assert [int(row["number"]) for row in rows] == list(range(42))
    summary = read_finished(folder, CertifySummary).summary
    for patch in ("5x5", "2x2"):
        verdicts = [row[f"verdict {patch}"] for row in rows]
        entry = summary.patches[patch]
        assert verdicts.count("correct and certified") == entry.certified.correct > 0
        assert verdicts.count("correct, not certified") == entry.clean.correct - entry.certified.correct > 0
        assert verdicts.count("wrong") == entry.clean.total - entry.clean.correct > 0
        assert verdicts.count("no answer") == 2
        assert [row[f"certified {patch}"] for row in rows].count("yes") == entry.proved.correct
    for row in rows[:40]:
        record = records[int(row["number"])]
        assert float(row["margin 5x5"]) == record["patches"]["5x5"]["margin"]
        assert row["true class"] == summary.settings.class_names[record["target"]]
        assert row["masks 2x2"] == "refitted"
    assert (rows[41]["image"], rows[41]["reason"], rows[41]["margin 5x5"]) == ("broken-1.jpg", "is truncated", "")


def test_columns_are_the_same_whatever_the_answers_are(tmp_path):
    folders = [fabricate(tmp_path / "a", errors=3), fabricate(tmp_path / "b", labeled=False)]
    heads = []
    for folder in folders:
        render.write([folder])
        heads.append((folder / "photos.csv").read_text().splitlines()[0])
    assert heads[0] == heads[1]
    assert heads[0].startswith("number,image,height,width,true class,undefended label,label 5x5,verdict 5x5")


@pytest.mark.parametrize(
    "name",
    ['=HYPERLINK("http://x")', "+1", "-2,3", "@SUM(A1)", 'a "quoted", name', "line\nbreak", "\uff1d1", "half \ud800"],
)
def test_names_are_quoted_and_no_spreadsheet_computes_them(tmp_path, name):
    folder = fabricate(tmp_path / "run", images=3, pictures=0)
    (shard,) = Folder(folder).shards()
    records = [{**json.loads(line), "name": name} for line in shard.read_text().splitlines()]
    shard.write_text("".join(json.dumps(record) + "\n" for record in records))
    render.write([folder])
    rows = read_csv(folder)
    assert len(rows) == 3
    shown = rows[0]["image"]
    assert shown[0] not in "=+-@\t\r\uff1d"
    plain = name.replace("\n", "\ufffd").replace("\ud800", "\ufffd")
    assert shown == (f"'{plain}" if name[0] in "=+-@\uff1d" else plain)
    assert [row[1] for row in read_table(folder)["rows"]] == [plain] * 3


def test_negative_margins_stay_numbers(tmp_path):
    folder = fabricate(tmp_path / "run", certified=0.0)
    render.write([folder])
    assert {float(row["margin 5x5"]) for row in read_csv(folder)} == {-30.0}


def test_the_table_says_what_the_file_says(tmp_path):
    folder = fabricate(tmp_path / "run", patches=("5x5", "2x2"), errors=1)
    render.write([folder])
    table, rows = read_table(folder), read_csv(folder)
    verdicts = [words for words, _ in table["columns"][4]["verdicts"]]
    for shown, row in zip(table["rows"], rows, strict=True):
        number, name, target, label, verdict, margin = shown[:6]
        assert (str(number), name, verdicts[verdict]) == (row["number"], row["image"], row["verdict 5x5"])
        if row["reason"]:
            assert shown[-1] == row["reason"]
            continue
        assert (table["words"][target], table["words"][label]) == (row["true class"], row["label 5x5"])
        assert margin == pytest.approx(float(row["margin 5x5"]), rel=1e-5)
        assert (margin > 0) == (row["certified 5x5"] == "yes")
    entries = json.loads((folder / "gallery.json").read_text())
    assert table["pictures"] == [entry["index"] for entry in entries]
    page = (folder / "report.html").read_text("utf-8")
    assert all(f'id="picture-{entry["index"]}"' in page for entry in entries)


def test_images_without_true_classes_get_no_word_about_them(tmp_path):
    folder = fabricate(tmp_path / "run", labeled=False)
    render.write([folder])
    assert {row["verdict 5x5"] for row in read_csv(folder)} == {"certified", "not certified"}
    assert {row["true class"] for row in read_csv(folder)} == {""}
    assert [words for words, _ in read_table(folder)["columns"][3]["verdicts"]] == ["certified", "not certified"]


def test_an_attack_lists_what_became_of_every_image(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "attack", tmp_path / "attack"))
    render.write([folder])
    rows, summary = read_csv(folder), read_finished(folder, AttackSummary).summary
    assert len(rows) == summary.images
    verdicts = [row["verdict"] for row in rows]
    assert verdicts.count("broken by the attack") == summary.broken.correct
    assert verdicts.count("certified, and held") == summary.certified.correct
    assert verdicts.count("wrong without an attack") == summary.clean.total - summary.clean.correct
    assert verdicts.count("certified, but broken") == 0
    held = next(row for row in rows if row["verdict"] == "certified, and held")
    assert (held["label"], held["broken"], held["alert"]) == (held["label under attack"], "no", "")
    assert held["patch at"].startswith("row ")


def test_five_thousand_images_with_photographs_stay_below_five_megabytes(tmp_path):
    name = "a long name of a folder/and of another one/" + "x" * 60 + "-{:05d}.jpeg"
    folder = fabricate(tmp_path / "run", images=5000, patches=("5x5", "2x2", "24x88"), name=name, pictures=24)
    draw = np.random.default_rng(0)
    with np.load(folder / "gallery.npz") as archive:
        arrays = dict(archive)
    for number in range(24):  # rougher than any photograph
        smooth = draw.integers(0, 256, (80, 80, 3)).repeat(4, 0).repeat(4, 1)
        arrays[f"image_{number}"] = (smooth + draw.integers(-20, 20, smooth.shape)).clip(0, 255).astype(np.uint8)
    np.savez(folder / "gallery.npz", **arrays)
    page = render.write([folder])
    assert page.stat().st_size < 5e6
    assert len(read_table(folder)["rows"]) == 5000


def test_what_does_not_fit_into_the_page_is_named_and_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "PAGE_BYTES", 1000)
    folder = fabricate(tmp_path / "run", images=300)
    page = render.write([folder]).read_text("utf-8")
    listed = len(read_table(folder)["rows"])
    assert 0 < listed < 60
    assert f"The first {listed}\u00a0images of\n  300; the others would make this page too large." in page
    assert len(read_csv(folder)) == 300


def test_a_run_that_kept_no_records_has_a_page_without_the_table(tmp_path):
    folder = fabricate(tmp_path / "run")
    for shard in Folder(folder).shards():
        shard.unlink()
    assert "All images" not in render.write([folder]).read_text("utf-8")
    assert not (folder / "photos.csv").exists()


@pytest.mark.parametrize("side", [40, 320])
def test_small_pictures_are_exact_and_large_ones_stay_small(side):
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
    assert pictures.embed_picture(pixels, 60_000).startswith("data:image/png" if side == 40 else "data:image/jpeg")
    flat = np.full((side, side, 3), 90, np.uint8)
    assert len(pictures.embed_picture(flat, 3000)) < 4100
    assert pictures.embed_picture(pixels, 2000).startswith("data:image/jpeg")
