"""The report: one page that shows every number, escapes every name, and loads nothing from elsewhere."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.run_folders import CIFAR10, fabricate
from typer.testing import CliRunner

from patchguard import defenses
from patchguard.cli import app
from patchguard.errors import InputError
from patchguard.report import render as report
from patchguard.report.files import read_finished
from patchguard.report.numbers import interval, percent, short
from patchguard.runs.summary import AttackSummary, CertifySummary, convert, read_summary, to_json

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"
VOID = {"img", "input", "meta", "br", "col"}


class Page(HTMLParser):
    """Every element with its attributes, and the text; complains about what is not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"<{tag}> repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        {"style": self.styles, "script": self.scripts}.get(inside, self.words).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+(?=[\s,;])", "", re.sub(r"\s", " ", " ".join(self.words)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def written(*folders) -> Page:
    path = report.write(folders)
    assert path == folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    html = path.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    page = Page(html)
    check_self_contained(page)
    check_accessible(page)
    return page


def check_self_contained(page: Page) -> None:
    assert not {"link", "iframe", "object"} & {name for name, _ in page.elements}
    ours = (report.TEMPLATES / "photos.js").read_text(encoding="utf-8")
    assert [script for script in page.scripts if not script.startswith('{"columns"')] in ([], [ours])
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if page.scripts else "'none'"
    assert f"script-src {allowed};" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    for _, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href"):
                assert (value or "").startswith(("data:image/png;base64,", "data:image/jpeg;base64,", "#"))
    style = " ".join(page.styles)
    assert "url(" not in style
    assert "@import" not in style
    assert "//" not in style


def check_accessible(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert all("alt" in image for image in page.all("img"))
    for drawing in page.all("svg"):
        assert drawing.get("aria-hidden") == "true" or (drawing["role"] == "img" and drawing["aria-label"])
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert {label["for"] for label in page.all("label")} <= set(identities)
    assert {link["href"][1:] for link in page.all("a")} <= set(identities)


def fractions(value) -> list[dict]:
    if isinstance(value, dict):
        return [value] if "fraction" in value else [each for inner in value.values() for each in fractions(inner)]
    return []


def change(folder, name, edit) -> None:
    value = json.loads((folder / name).read_text())
    edit(value)
    (folder / name).write_text(json.dumps(value))


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


# -- one run -----------------------------------------------------------------------------------------------------------


def test_every_number_of_the_summary_is_shown(tmp_path):
    folder = fabricate(tmp_path / "run", patches=("5x5", "2x2", "24x88"), errors=2)
    text = written(folder).text
    summary = json.loads((folder / "summary.json").read_text())
    for refitted in summary["curve"]["refitted"].values():
        del refitted["proved"]  # correct or wrong; where there are classes, curves show what is correct
    for share in fractions(summary):
        assert plain(percent(share["fraction"])) in text
        assert plain(interval(share["low"], share["high"])) in text
        assert f"{share['correct']:,} of {share['total']:,}" in text
    for each in summary["classes"]:
        counts = [each["clean"], *each["certified"].values()]
        row = " ".join(f"{plain(percent(found / each['total'], 0))} {found}" for found in counts)
        assert re.sub(r" +", " ", f"{each['name']} {each['total']} {row}") in text
    for margins in summary["margins"].values():
        groups = zip(margins["certified"], margins["not_certified"], margins["wrong"], strict=True)
        for low, high, found in zip(margins["edges"], margins["edges"][1:], groups, strict=False):
            assert f"{short(low)} to {short(high)} {' '.join(map(str, found))}" in text
    for seconds in summary["seconds"].values():
        assert short(seconds) in text
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert settings["model_digest"] in text
    assert "evidence drift 0.001" in text


def test_the_headline_is_a_sentence_about_the_first_patch(tmp_path):
    folder = fabricate(tmp_path / "run", images=100, patches=("5x5", "2x2"))
    share = json.loads((folder / "summary.json").read_text())["patches"]["5x5"]["certified"]["fraction"]
    text = written(folder).text
    assert f"For {share:.0%} of images, no 5 × 5 patch can change the correct label".replace("%", " %") in text
    assert "Without an attack, the defended classifier is correct on" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"certified": 0.0}, "It is not proved for any of 60 images that no 5 × 5 patch can change the correct label"),
        ({"certified": 1.0, "labeled": False}, "For all 60 images, no 5 × 5 patch can change the label"),
        ({"certified": 1.0, "labeled": False, "images": 1}, "For the one image, no 5 × 5 patch can change the label"),
        ({"certified": 0.0, "images": 1}, "It is not proved for the one image that no 5 × 5 patch"),
        ({"patches": ("2%",)}, "of images, no patch of 2 % of the image can change the correct label"),
        ({"top_k": 3}, "no 5 × 5 patch can push the correct label out of the top 3"),
        ({"defense": "MaskedAgreement", "detects": True}, "can change the correct label without raising an alert"),
        ({"images": 0, "errors": 3}, "No image could be read, so nothing is certified"),
    ],
)
def test_the_headline_is_true_at_the_ends(tmp_path, options, sentence):
    page = written(fabricate(tmp_path / "run", **options))
    heading = re.sub(r" +", " ", page.text)
    assert sentence in heading


EVIL = ("<script>alert(1)</script>", "\"><img src=x onerror='alert(2)'>", "a & b", "half \ud800 \u202e\x00")


def check_harmless(page_path) -> None:
    html = page_path.read_text(encoding="utf-8")
    page = Page(html)
    check_self_contained(page)
    assert json.loads(page.scripts[0])["rows"]
    for name in EVIL[:3]:
        assert name in page.text
        assert name not in html
    assert "\u202e" not in html
    assert "half \ufffd \ufffd\ufffd" in page.text


def test_names_with_markup_in_them_are_only_text(tmp_path):
    settings = {"model": "</style><b>", "data": "'; rm -rf x", "class_names": EVIL, "data_digest": "d1"}
    folder = fabricate(tmp_path / "<run>", name="</figure><script>{}", errors=1, **settings)
    other = fabricate(tmp_path / "other", seed=1, **settings)
    check_harmless(report.write([folder]))
    page = written(folder)
    assert "#0 </figure><script>0" in page.text
    table = json.loads(page.scripts[0])
    assert table["rows"][0][1] == "</figure><script>0"
    assert set(EVIL[:3]) < set(table["words"])
    assert "other certifies most against any 5 × 5 patch: 48.3 %, then <run> with" in written(folder, other).text


def test_names_in_an_attack_are_only_text(attack):
    change(attack, "summary.json", lambda summary: summary["settings"].update(class_names=EVIL, attack=EVIL[1], aim=0))
    change(
        attack, "gallery.json", lambda gallery: [entry.update(name=EVIL[0], label=1, attacked=2) for entry in gallery]
    )
    check_harmless(report.write([attack]))


def test_data_without_labels_speaks_of_proofs_and_not_of_accuracy(tmp_path):
    text = written(fabricate(tmp_path / "run", labeled=False)).text
    assert "Label certified" in text
    assert "No true labels were given" in text
    assert "This model knows only 10 classes: airplane, automobile" in text
    assert "Not certified" in text
    for word in ("accuracy", "Undefended", "true class:", "wrong without any attack"):
        assert word not in text


def test_of_many_classes_the_worst_and_the_best_are_shown_and_the_others_folded(tmp_path):
    known = [f"class {number}" for number in range(1000)]
    folder = fabricate(tmp_path / "run", class_names=known, images=900, pictures=2)
    page = written(folder)
    tables = [attributes for attributes in page.all("table") if attributes.get("class") == "classes"]
    assert len(tables) == 3
    filled = sum(each["total"] > 0 for each in json.loads((folder / "summary.json").read_text())["classes"])
    assert f"The other {filled - 20} classes" in page.text
    assert f"{1000 - filled} classes without images" in page.text


@pytest.mark.parametrize("curve", [(), (5,), (1, 224)])
def test_any_number_of_sizes_is_drawn(tmp_path, curve):
    page = written(fabricate(tmp_path / "run", curve=curve))
    assert ("by patch size" in page.text) == bool(curve)


def test_a_side_of_which_nothing_was_measured_is_left_out(tmp_path):
    folder = fabricate(tmp_path / "run", curve=(1, 5, 32), unmeasured=(32,))
    assert json.loads((folder / "summary.json").read_text())["curve"]["refitted"]["32"]["clean"]["fraction"] is None
    written(folder)
    curves = report.split_curve(read_finished(folder, CertifySummary).summary)
    assert [list(curve) for curve in curves] == [[1, 5, 32], [1, 5], [1, 5]]


def test_a_card_shows_picture_maps_windows_and_caption(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=1, certified=1.0)
    page = written(folder)
    assert len(page.all("img")) == 3
    drawn = {attributes.get("class") for attributes in page.all("rect")}
    assert {"place", "window", "mask"} <= drawn
    entry = json.loads((folder / "gallery.json").read_text())[0]
    caption = (
        f"{CIFAR10[entry['label']]} true class: {CIFAR10[entry['target']]} margin 30 · rival {CIFAR10[entry['rival']]}"
    )
    assert caption in re.sub(r" +", " ", page.text)


def test_a_window_that_wraps_around_is_drawn_in_two_parts(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=1)
    change(folder, "gallery.json", lambda gallery: gallery[0].update(window=[0, 32, 28, 36], mask=None, box=None))
    windows = [each for each in written(folder).all("rect") if each.get("class") == "window" and each["x"] != "3"]
    assert [(each["x"], each["width"]) for each in windows] == [("28.0", "4.0"), ("0.0", "4.0")]


def test_evidence_without_any_strength_or_with_infinities_is_drawn(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=2)
    with np.load(folder / "gallery.npz") as archive:
        arrays = dict(archive)
    arrays["evidence_0"] = arrays["rival_0"] = np.zeros((1, 40), np.float32)
    arrays["evidence_1"][0, 0] = np.inf
    np.savez(folder / "gallery.npz", **arrays)
    assert len(written(folder).all("img")) == 6


def test_images_that_could_not_be_read_are_counted_and_the_first_listed(tmp_path):
    folder = fabricate(tmp_path / "run", errors=14)
    with (folder / "records-00000.jsonl").open("a") as records:
        records.write('{"index": 99, "error": "torn')
    text = written(folder).text
    assert "14 of 74 images got no answer" in text
    assert "broken-9.jpg is truncated" in re.sub(r" +", " ", text)
    assert "broken-10.jpg" not in text
    assert "and 4 more" in text


def test_a_rule_that_proves_nothing_has_infinite_margins(tmp_path):
    folder = fabricate(tmp_path / "run", certified=0.0, pictures=1)
    change(folder, "gallery.json", lambda gallery: gallery[0].update(margin=None, window=None, box=None))
    change(folder, "summary.json", lambda summary: summary["margins"]["5x5"].update(edges=[], **EMPTY))
    assert "margin none" in written(folder).text


EMPTY: dict[str, list[int]] = {"certified": [], "not_certified": [], "wrong": []}


def test_no_torch_is_needed(tmp_path):
    folder = fabricate(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from patchguard.report.render import write\n"
        f"write([Path({str(folder)!r})]); assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_guard_without_cells_has_pictures_without_overlays(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=1, rule={"guard": "toy"})
    change(folder, "gallery.json", lambda gallery: gallery[0].update(grid=None, mask=None, window=None, box=None))
    with np.load(folder / "gallery.npz") as archive:
        np.savez(folder / "gallery.npz", image_0=archive["image_0"])
    page = written(folder)
    assert len(page.all("img")) == 1
    assert not [each for each in page.all("input") if each.get("class") == "choice"]
    assert "field" not in page.text


def test_what_pages_say_about_a_rule_comes_from_the_summary_and_not_from_its_name():
    sources = [*report.TEMPLATES.iterdir(), *report.TEMPLATES.parent.glob("*.py")]
    names = "|".join(defenses.__all__)
    assert "MaskedAgreement" in names
    assert not [path.name for path in sources if re.search(f"[\"']({names})[\"']", path.read_text(encoding="utf-8"))]


# -- attacks and earlier releases --------------------------------------------------------------------------------------


@pytest.fixture
def attack(tmp_path):
    """The folder of an attack, written by release 0.1."""
    return Path(shutil.copytree(GOLDEN / "attack", tmp_path / "attack"))


def test_an_attack_shows_what_held_what_broke_and_what_lies_between(attack):
    page = written(attack)
    for words in ("of labels stay correct under this attack", "Accuracy under attack", "must be 0 0 of", "row"):
        assert words in page.text
    assert "(or an alert)" not in page.text
    assert len([each for each in page.all("div") if each.get("class") == "quartet"]) == 2


def test_an_attack_on_unlabeled_images_speaks_of_no_correct_labels(attack):
    broken = {"right": 1, "of": 2, "share": 0.5, "low": 0.1, "high": 0.9}
    change(attack, "summary.json", lambda summary: summary.update(labelled=False, broken=broken))
    text = written(attack).text
    assert "without a certificate, it broke" in text
    assert "This model knows only" in text
    assert "correct label" not in text


def test_a_rule_that_detects_promises_the_label_or_an_alert(attack):
    change(attack, "summary.json", lambda summary: summary["settings"].update(defense="MaskedAgreement"))
    text = written(attack).text
    assert "every such patch leaves the label or raises an alert" in text
    assert "Attacked images that raise an alert" in text


def test_a_baseline_certifies_nothing(attack):
    change(attack, "summary.json", lambda summary: summary["settings"].update(defense="Undefended"))
    text = written(attack).text
    assert "under this attack; nothing is certified" in text
    assert "margin" not in text.split("Settings and environment")[0]


def test_attacks_are_compared_and_not_mixed_with_other_runs(attack, tmp_path):
    other = Path(shutil.copytree(attack, tmp_path / "other"))
    change(other, "summary.json", lambda summary: summary.update(refuted=[1]))
    text = written(attack, other).text
    assert "1 certified image broken in 2 attacks" in text
    with pytest.raises(InputError, match="runs of one kind; got attack and certify"):
        report.write([attack, fabricate(tmp_path / "run")])


def test_summaries_of_release_0_1_are_read_under_the_names_of_this_one(attack):
    old = json.loads((attack / "summary.json").read_text())
    new = read_summary(attack, AttackSummary)
    assert (new.labeled, new.clean.correct, new.clean.total, new.clean.fraction) == (
        old["labelled"],
        *(old["clean"][name] for name in ("right", "of", "share")),
    )
    assert new.certified_broken.total == old["fallen"]["of"]
    assert new.settings.rule["evidence"] == old["settings"]["evidence"]
    assert (new.settings.detects, new.settings.defends) == (False, True)
    old = json.loads((GOLDEN / "certify" / "summary.json").read_text())
    new = read_summary(GOLDEN / "certify", CertifySummary)
    assert {side: number.correct for side, number in new.curve.kept.items()} == {
        int(side): number["right"] for side, number in old["curve"]["kept"].items()
    }
    assert [row.total for row in new.classes] == [row["of"] for row in old["classes"]]
    assert convert(json.loads(to_json(new)), CertifySummary, attack) == new


# -- several runs ------------------------------------------------------------------------------------------------------


def test_runs_are_compared_row_by_row_with_overlaid_curves(tmp_path):
    first = fabricate(tmp_path / "double", patches=("5x5", "2x2"), certified=0.7, images=200)
    second = fabricate(tmp_path / "<masking>", certified=0.5, defense="RobustMasking", images=200, seed=1)
    text = written(first, second).text
    assert "double certifies most against any 5 × 5 patch" in text
    assert "not measured" in text
    assert "defense DoubleMasking RobustMasking" in re.sub(r" +", " ", text)
    for folder in (first, second):
        summary = json.loads((folder / "summary.json").read_text())
        for share in (*fractions(summary["curve"]["kept"]), *fractions(summary["undefended"])):
            assert plain(percent(share["fraction"])) in text
    assert not (second / "report.html").exists()


def test_runs_that_cannot_be_ranked_are_not(tmp_path):
    first = fabricate(tmp_path / "a", patches=("5x5",))
    second = fabricate(tmp_path / "b", patches=("2x2",))
    third = fabricate(tmp_path / "c", labeled=False)
    assert "2 runs compared" in written(first, second).text
    text = written(first, third).text
    assert "2 runs compared" in text
    assert "correct or wrong" in text


def test_runs_about_different_images_are_not_ranked(tmp_path):
    folders = [fabricate(tmp_path / each, data_digest=each, certified=0.2 + 0.2 * (each == "b")) for each in "ab"]
    text = written(*folders).text
    assert "2 runs compared" in text
    assert "not about the same images, so they are not ranked" in text
    assert "certifies most" not in text
    same = [fabricate(tmp_path / each, data_digest="a", certified=0.2 + 0.4 * (each == "d")) for each in "cd"]
    assert "d certifies most" in written(*same).text


def test_equal_runs_are_level_and_runs_of_one_name_are_told_apart(tmp_path):
    folders = [fabricate(tmp_path / place / "run") for place in ("one", "two")]
    text = written(*folders).text
    assert "one/run and two/run are level" in text
    assert "All settings and versions are the same." in text
    assert report.name_runs([read_finished(folders[0], CertifySummary)] * 2) == ["one/run (1)", "one/run (2)"]


def test_eight_runs_still_have_a_page(tmp_path):
    page = written(*(fabricate(tmp_path / f"run{k}", images=20, pictures=0, seed=k) for k in range(8)))
    assert "run7" in page.text


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("run.json", "must be a folder that `patchguard certify --out` .* has written; run.json is missing"),
        ("summary.json", "must hold a finished run; .* it resumes; summary.json is missing"),
        ("gallery.json", "gallery.json is missing"),
        ("gallery.npz", "gallery.npz is missing"),
    ],
)
def test_a_missing_file_is_named(tmp_path, name, match):
    folder = fabricate(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(InputError, match=match):
        report.write([folder])
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["run.json", "summary.json", "gallery.json", "gallery.npz"])
def test_a_damaged_file_is_named_and_the_old_page_stays(tmp_path, name):
    folder = fabricate(tmp_path / "run")
    before = report.write([folder]).read_bytes()
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=f"{name}` is damaged"):
        report.write([folder])
    assert (folder / "report.html").read_bytes() == before
    assert not list(folder.glob(".report*"))


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("summary.json", lambda s: s.update(format=2), "summary.json` must have format 1; got 2"),
        (
            "summary.json",
            lambda s: s.update(images="many"),
            "summary.json` is damaged at `images`: expected `int`",
        ),
        (
            "summary.json",
            lambda s: s["patches"]["5x5"]["clean"].update(fraction=1.5),
            "clean.fraction`: expected `float` <=",
        ),
        ("summary.json", lambda s: s["patches"]["5x5"].pop("proved"), "missing required field `proved`"),
        ("summary.json", lambda s: s.update(patches={}), "one entry in `patches` for each patch"),
        ("summary.json", lambda s: s["margins"]["5x5"]["wrong"].pop(), r"margins.*: expected \d+ counts in each group"),
        (
            "summary.json",
            lambda s: s["curve"]["kept"].update(x={}),
            "at `key in curve.kept`: expected `int`, got `str`",
        ),
        ("run.json", lambda s: s.update(settings=[]), "settings`: expected `object`, got `array`"),
        ("gallery.json", lambda s: s[0].update(window=[1, 2]), "at `window`: expected `array` of length 4"),
        ("gallery.json", lambda s: s[0].update(grid=[0, 4]), r"at `grid\[0\]`: expected `int` >= 1"),
        ("gallery.json", lambda s: s.append(s[0]), "gallery.npz` is damaged"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, name, edit, match):
    folder = fabricate(tmp_path / "run")
    change(folder, name, edit)
    with pytest.raises(InputError, match=match):
        report.write([folder])


def test_arrays_of_a_wrong_shape_are_named(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=1)
    np.savez(folder / "gallery.npz", image_0=np.zeros((4, 4)), evidence_0=np.zeros((2, 2)), rival_0=np.zeros((2, 2)))
    with pytest.raises(InputError, match="image_0 must be 8-bit pixels"):
        report.write([folder])


def test_a_single_array_is_no_gallery(tmp_path):
    folder = fabricate(tmp_path / "run", pictures=1)
    with (folder / "gallery.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match="not an archive of arrays"):
        report.write([folder])


def test_no_folder_is_refused():
    with pytest.raises(InputError, match="at least one run folder"):
        report.write([])


# -- command -----------------------------------------------------------------------------------------------------------


def test_the_command_prints_where_the_page_is(tmp_path):
    folder = fabricate(tmp_path / "run")
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == str(folder / "report.html")
    helped = CliRunner().invoke(app, ["report", "--help"])
    assert "Example: patchguard report" in helped.stdout


def test_the_command_refuses_in_one_line(tmp_path):
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert len(shown.stderr.strip().splitlines()) == 1
    assert "run.json is missing" in shown.stderr
