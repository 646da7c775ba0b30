"""`patchguard certify` and `patchguard predict`, through the real command line; kills, resumes and torchrun."""

import functools
import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import lines, start
from helpers.small_guards import random_images, srf_guard
from PIL import Image
from typer.testing import CliRunner

from patchguard import verify
from patchguard.cli import app
from patchguard.defenses import DoubleMasking
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch
from patchguard.runs.records import Folder
from patchguard.storage import zoo

NAMES = ("apple", "bread", "cheese")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    plain = srf_guard()
    guard = LocalGuard(plain.preprocess, plain.model, plain.evidence, plain.defense, NAMES)
    zoo.save(guard, path, recipe={"patch": {"height": 2, "width": 2, "count": 1}})
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """One network for all commands of this process: deriving its field anew takes most of their time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zoo, "load", functools.cache(zoo.load))
        yield


def draw(folder: Path, count: int, side: int = 16, seed: int = 0, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(random_images(count, side, seed=seed), first):
        pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{number:03d}.png")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """Classes in another order than the model's, two sizes, and one broken file."""
    root = tmp_path_factory.mktemp("labelled")
    for number, name in enumerate(("Cheese", "apple", "bread")):
        draw(root / name, 5, seed=number)
    draw(root / "apple", 3, side=20, seed=9, first=50)
    (root / "apple" / "broken.png").write_bytes(b"no picture")
    return root


@pytest.fixture
def run(model):
    def invoke(command, *words):
        chosen = [command, *map(str, words), "--model", model, "--device", "cpu"]
        return CliRunner().invoke(app, chosen)

    return invoke


def test_a_labelled_folder_gives_records_summary_gallery_and_a_table(run, labelled, tmp_path):
    shown = run("certify", "--data", labelled, "--patch", "2", "--patch", "3x1", "--patch", "4%", "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    for word in ("undefended", "clean", "certified", "proved", "2x2", "3x1", "4%", "images without an answer: 1"):
        assert word in shown.stdout
    records = {record["name"]: record for record in Folder(tmp_path).records()}
    assert len(records) == 19
    assert "known kind" in records["apple/broken.png"]["error"]
    assert records["Cheese/000.png"]["target"] == NAMES.index("cheese")
    small, large = records["bread/000.png"], records["apple/050.png"]
    assert [small["patches"][key]["masks"] for key in ("2x2", "3x1", "4%")] == ["own", "refitted", "refitted"]
    assert large["patches"]["2x2"]["masks"] == "refitted"
    assert (small["patches"]["4%"]["height"], large["patches"]["4%"]["height"]) == (4, 4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["images"], summary["errors"], summary["labeled"]) == (19, 1, True)
    assert summary["patches"]["2x2"]["masks"] == "mixed"
    assert sum(row["total"] for row in summary["classes"]) == 18
    assert [row["name"] for row in summary["classes"]] == list(NAMES)
    chosen = json.loads((tmp_path / "gallery.json").read_text())
    with np.load(tmp_path / "gallery.npz", allow_pickle=False) as arrays:
        assert len(arrays.files) == 3 * len(chosen) > 0
        for number, entry in enumerate(chosen):
            assert arrays[f"image_{number}"].shape == (*entry["size"], 3)
            assert arrays[f"evidence_{number}"].shape == tuple(entry["grid"])


def test_records_say_what_the_guard_says(run, labelled, model, tmp_path):
    words = ("--data", labelled / "bread", "--patch", "2", "--batch-size", "1", "--out", tmp_path)
    assert run("certify", *words).exit_code == 0
    guard = zoo.load(model)
    for record in Folder(tmp_path).records():
        pixels = np.array(Image.open(labelled / "bread" / record["name"]))
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()[None].float() / 255
        proof = guard.certify(image, Patch(2))
        entry = record["patches"]["2x2"]
        assert (entry["label"], entry["margin"], entry["rival"]) == (int(proof.label), float(proof.margin), proof.rival)
        assert record["largest"] == int(guard.largest_certified_patch(image))
        windows = guard.windows(Patch(2), 16, 16)
        assert windows.boxes[entry["weakest"]].tolist() == entry["window"]
        top, bottom, left, right = entry["window"]
        cells = np.zeros(windows.grid, dtype=bool)
        cells[top:bottom, left:right] = True
        assert (guard.field(16, 16).touched_cells(tuple(entry["box"])) == cells).all()
        for side, refitted in record["refitted"].items():
            fitted = guard.for_patch(Patch(int(side)), 16, 16)
            again = fitted.certify(image, Patch(int(side)))
            assert refitted == {"label": int(again.label), "certified": bool(again.certified)}


@pytest.mark.parametrize("command", ["certify", "predict", "attack"])
def test_images_without_classes_bring_the_classes_of_the_model_first(run, labelled, tmp_path, command):
    pattern, out = f"{labelled}/b*/*.png", ("--out", tmp_path / "run")
    words = {"predict": (pattern,), "attack": ("--data", pattern, "--attack", "colors", *out)}
    shown = run(command, *words.get(command, ("--data", pattern, *out)))
    assert shown.exit_code == 0, shown.output
    assert "this model knows only 3 classes (apple, bread, cheese)" in "".join(shown.output.splitlines()[:2])
    assert "this model knows" not in run("certify", "--data", labelled, "--out", tmp_path / "labeled").output


def test_images_without_classes_get_labels_and_proofs(run, labelled, tmp_path):
    shown = run("certify", "--data", f"{labelled}/b*/*.png", "--out", tmp_path, "--json")
    assert shown.exit_code == 0, shown.output
    summary = json.loads(shown.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["patches"]["2x2"]["certified"] is None
    assert summary["settings"]["labeled"] is False
    assert {entry["group"] for entry in json.loads((tmp_path / "gallery.json").read_text())} <= {"proved", "not proved"}


@pytest.mark.parametrize(
    "words",
    [
        ("--defense", "RobustMasking", "--threshold", "1/5", "--top-k", "2"),
        ("--defense", "ClippedSum", "--evidence", "tanh"),
        ("--defense", "MajorityVote"),
        ("--defense", "CellMasking"),
        ("--defense", "TrimmedMean"),
        ("--defense", "Median"),
        ("--defense", "Undefended"),
        ("--evidence", "confidence"),
        ("--tau", "3"),
    ],
    ids=lambda words: "-".join(words).replace("--", ""),
)
def test_the_rule_can_be_swapped(run, labelled, tmp_path, words):
    shown = run("certify", "--data", labelled, "--limit", "6", "--out", tmp_path, *words)
    assert shown.exit_code == 0, shown.output
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert settings["defense"] == (words[1] if words[0] == "--defense" else "DoubleMasking")
    assert settings["images"] == 6
    assert settings["rule"]["tau"] == (3 if words[0] == "--tau" else None)
    assert (", tau 3" in shown.stdout) == (words[0] == "--tau")


def test_a_finished_run_is_shown_again_and_other_settings_are_refused(run, labelled, tmp_path):
    words = ("--data", labelled / "bread", "--out", tmp_path)
    first = run("certify", *words)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json*")}
    second = run("certify", *words)
    assert second.exit_code == 0
    assert "already complete" in second.stdout
    assert first.stdout.splitlines()[1:3] == second.stdout.splitlines()[1:3]
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json*")}
    other = run("certify", *words, "--tau", "3")
    assert (other.exit_code, other.stdout) == (1, "")
    assert "tau null, not 3" in other.stderr


def test_a_run_cut_anywhere_ends_with_the_same_bytes(run, labelled, tmp_path):
    words = ("--data", labelled, "--limit", "8", "--batch-size", "3", "--out", tmp_path)
    assert run("certify", *words).exit_code == 0
    whole, summary = lines(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    (shard,) = Folder(tmp_path).shards()
    content = shard.read_bytes()
    for length in (len(content) // 3, len(content) - 1, len(content)):
        shard.write_bytes(content[:length])
        (tmp_path / "summary.json").unlink()
        shown = run("certify", *words)
        assert shown.exit_code == 0, shown.output
        assert lines(tmp_path) == whole
        again = json.loads((tmp_path / "summary.json").read_text())
        assert {**again, "seconds": None} == {**summary, "seconds": None}


@pytest.mark.parametrize("tau", ["0", "2.5"])
def test_certificate_files_are_written_and_valid(run, labelled, tmp_path, tau):
    words = ("--data", labelled / "bread", "--patch", "2", "--patch", "3", "--limit", "2", "--out", tmp_path / "run")
    shown = run("certify", *words, "--tau", tau, "--certificates", tmp_path / "files")
    assert shown.exit_code == 0, shown.output
    files = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert files == [f"00000{index}-{files[2 * index][7:10]}-{key}.pgc" for index in (0, 1) for key in ("2x2", "3x3")]
    records = {record["index"]: record for record in Folder(tmp_path / "run").records()}
    for name in files:
        verdict = verify.check_bytes((tmp_path / "files" / name).read_bytes())
        entry = records[int(name[:6])]["patches"][name[11:14]]
        assert verdict.valid
        assert verdict.certified == entry["certified"]


def test_tau_stays_with_the_evidence_whose_units_it_counts() -> None:
    guard = srf_guard()
    guard = replace(guard, defense=DoubleMasking(masks=guard.defense.masks, tau=3.0))
    assert guard.override() is guard
    assert guard.override(evidence="logits").defense.tau == 3
    assert guard.override(evidence="confidence").defense.tau == 0
    assert guard.override(evidence="confidence", tau=0.5).defense.tau == 0.5
    assert guard.override(defense="DoubleMasking").defense.tau == 0
    assert guard.override(tau=0.0).defense.tau == 0


MISTAKES = {
    "an empty folder": (("--data", "{empty}"), "holds no images"),
    "no such folder": (("--data", "./nowhere"), "no folder or file of images"),
    "an unknown set": (("--data", "sampel"), "Did you mean 'sample'?"),
    "patch in words": (("--patch", "five"), "`--patch` must be pixels such as 5 or 24x88"),
    "patch of nothing": (("--patch", "0"), "`--patch` must be pixels"),
    "patch of 101 %": (("--patch", "101%"), "`--patch` must be pixels"),
    "patch larger than the image": (("--patch", "17"), "`patch` must fit the image; got 17 x 17"),
    "an unknown defense": (("--defense", "RobustMaskng"), "Did you mean 'RobustMasking'?"),
    "a defense that detects": (("--defense", "MaskedAgreement"), "MaskedAgreement only detects attacks"),
    "evidence of no kind": (("--evidence", "feelings"), "`--evidence` must be one of"),
    "evidence that does not fit": (("--defense", "MajorityVote", "--evidence", "tanh"), "needs votes"),
    "a threshold in words": (("--defense", "RobustMasking", "--threshold", "low"), "`--threshold` must be a fraction"),
    "a threshold without use": (("--threshold", "0.2"), "belongs to RobustMasking"),
    "a tau without use": (("--defense", "RobustMasking", "--tau", "2"), "`--tau` belongs to DoubleMasking and"),
    "a tau below 0": (("--tau", "-1"), "`tau` must lie between 0 and"),
    "a tau that is no number": (("--tau", "nan"), "`tau` must lie between 0 and"),
    "a top k that is not proved": (("--top-k", "2"), "no certificate for the top 2"),
    "no images": (("--limit", "0"), "`limit` must be a whole number, 1 or more"),
    "no batch": (("--batch-size", "0"), "`--batch-size` must be a whole number"),
    "no such device": (("--device", "abacus"), "`device` must be auto"),
    "certificates of a median": (
        ("--defense", "Median", "--certificates", "{empty}"),
        "certificate files must be about one of RobustMasking",
    ),
    "a space of no kind": (("--patch-space", "pixels"), "`--patch-space` must be source or input; got 'pixels'"),
    "network pixels, no patch": (("--patch-space", "input"), "`--patch-space input` needs --patch"),
    "certificates of network pixels": (
        ("--patch-space", "input", "--patch", "2", "--certificates", "{empty}"),
        "`--certificates` are about source images",
    ),
    "an unknown model": (("--model", "cifar11"), "neither a file nor a known name"),
    "other classes": (("--data", "{others}"), "must be the model's (apple, bread, cheese); got dog"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(model, labelled, tmp_path, mistake):
    (tmp_path / "empty").mkdir()
    draw(tmp_path / "others" / "dog", 1)
    draw(tmp_path / "others" / "apple", 1)
    words, message = MISTAKES[mistake]
    filled = [word.format(empty=tmp_path / "empty", others=tmp_path / "others") for word in words]
    out = tmp_path / "run"
    usual = ["--data", str(labelled / "bread"), "--model", model, "--device", "cpu", "--out", str(out)]
    shown = CliRunner().invoke(app, ["certify", *usual, *filled])
    assert shown.exit_code == 1
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert shown.stdout == ""
    assert not out.exists()


def test_in_network_pixels_the_patch_lies_on_the_resized_image(model, tmp_path):
    plain = zoo.load(model)
    resize = Preprocess((Resize(height=16, width=16),))
    zoo.save(replace(plain, preprocess=resize), tmp_path / "resized.safetensors")
    draw(tmp_path / "photos", 3, side=40)
    draw(tmp_path / "photos", 2, side=24, seed=4, first=3)
    usual = ["--model", str(tmp_path / "resized.safetensors"), "--data", str(tmp_path / "photos"), "--patch", "2"]
    shown = CliRunner().invoke(app, ["certify", *usual, "--patch-space", "input", "--out", str(tmp_path / "input")])
    assert shown.exit_code == 0, shown.output
    assert "patches in network pixels" in shown.stdout
    page = (tmp_path / "input" / "report.html").read_text()
    assert "side of a square patch, network pixels" in page
    assert "patch on the resized and cropped image can" in page
    found = list(Folder(tmp_path / "input").records())
    assert len(found) == 5
    for record in found:
        pixels = torch.from_numpy(np.array(Image.open(tmp_path / "photos" / record["name"]))).permute(2, 0, 1)[None]
        seen = (resize(pixels.float() / 255) * 255).round() / 255
        proof = plain.certify(seen, Patch(2))
        entry = record["patches"]["2x2"]
        assert entry["label"] == proof.label.item()
        assert entry["margin"] == pytest.approx(proof.margin.item(), abs=1e-3)
        assert entry["masks"] == "own"
        assert max(entry["box"][0], entry["box"][1]) <= 14  # a place in the resized image
    again = CliRunner().invoke(app, ["certify", *usual, "--out", str(tmp_path / "input")])
    assert "other settings: patch_space input, not source" in again.stderr
    assert CliRunner().invoke(app, ["certify", *usual, "--out", str(tmp_path / "source")]).exit_code == 0
    assert "resized and cropped" not in (tmp_path / "source" / "report.html").read_text()
    mixed = CliRunner().invoke(app, ["report", str(tmp_path / "source"), str(tmp_path / "input")])
    assert mixed.exit_code == 1
    assert "patches in one place; got some in source images" in mixed.stderr


def test_images_smaller_than_the_patch_are_recorded_and_do_not_stop_the_run(run, labelled, tmp_path):
    draw(tmp_path / "mixed", 2, side=16)
    draw(tmp_path / "mixed", 1, side=8, first=7)
    shown = run("certify", "--data", tmp_path / "mixed", "--patch", "9", "--out", tmp_path / "run")
    assert shown.exit_code == 0, shown.output
    errors = [record["error"] for record in Folder(tmp_path / "run").records() if "error" in record]
    assert len(errors) == 1
    assert "`patch` must fit the image" in errors[0]


def test_where_no_image_can_be_read_the_first_reason_is_given(run, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    shown = run("certify", "--data", tmp_path / "images", "--out", tmp_path / "run")
    assert shown.exit_code == 1
    assert "none of the 1 images can be read: a.png is empty" in shown.stderr


def test_predict_labels_files_folders_and_patterns(run, labelled):
    file = labelled / "bread" / "000.png"
    shown = run("predict", file, labelled / "apple", f"{labelled}/Ch*/*.png", "--patch", "2", "--patch", "3")
    assert shown.exit_code == 0, shown.output
    rows = shown.stdout.splitlines()
    assert rows[0].split() == ["image", "label", "2x2", "3x3"]
    assert len(rows) == 1 + 1 + 9 + 6
    assert any("broken.png" in row and "error" in row for row in rows)


def test_predict_prints_json_lines_that_agree_with_certify(run, labelled, tmp_path):
    shown = run("predict", labelled / "bread", "--patch", "2", "--json")
    found = {answer["name"]: answer for answer in map(json.loads, shown.stdout.splitlines())}
    assert run("certify", "--data", labelled / "bread", "--patch", "2", "--out", tmp_path).exit_code == 0
    for record in Folder(tmp_path).records():
        answer = found[record["name"]]
        assert answer["class"] == NAMES[record["label"]]
        assert answer["patches"]["2x2"]["certified"] == record["patches"]["2x2"]["certified"]


def test_predict_without_a_patch_gives_labels_alone(run, labelled):
    shown = run("predict", labelled / "bread" / "000.png", "--json")
    assert set(json.loads(shown.stdout)) == {"name", "label", "class"}
    broken = run("predict", labelled / "apple" / "broken.png")
    assert broken.exit_code == 1


def test_the_names_of_folders_can_be_ignored(run, labelled, tmp_path):
    draw(tmp_path / "others" / "dog", 2)
    draw(tmp_path / "others" / "apple", 1)
    words = ("--data", tmp_path / "others", "--out", tmp_path / "run")
    assert "--unlabeled to ignore classes" in run("certify", *words).stderr
    shown = run("certify", *words, "--unlabeled")
    assert shown.exit_code == 0, shown.output
    assert {record["target"] for record in Folder(tmp_path / "run").records()} == {None}


@pytest.mark.parametrize("command", ["certify", "predict"])
def test_help_has_an_example(command):
    assert "Example: patchguard" in CliRunner().invoke(app, [command, "--help"]).stdout


# -- other processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for number, name in enumerate(NAMES):
        draw(root / name, 60, seed=number)
    (root / "apple" / "broken.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def uninterrupted(many, model, tmp_path_factory) -> tuple[list[str], list[str]]:
    """The words of a run without its folder, and its records."""
    words = ["certify", "--data", str(many), "--model", model, "--batch-size", "4", "--device", "cpu", "--out"]
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert CliRunner().invoke(app, [*words, str(out)]).exit_code == 0
    return words, lines(out)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_loses_and_doubles_nothing(uninterrupted, tmp_path):
    words, expected = uninterrupted
    chance, out = random.Random(5), tmp_path / "run"
    shard = out / "records-00000.jsonl"
    total = sum(len(line) + 1 for line in expected)
    kills = 0
    for part in (0.1, 0.4, 0.7):
        process = start([*words, str(out)])
        wanted = (part + 0.2 * chance.random()) * total
        while process.poll() is None and (not shard.exists() or shard.stat().st_size < wanted):
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        if kills == 0:
            second = CliRunner().invoke(app, [*words, str(out)])
            assert second.exit_code == 1
            assert "another process is working" in second.stderr
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == 3
    assert not (out / "summary.json").exists()
    assert CliRunner().invoke(app, [*words, str(out)]).exit_code == 0
    assert lines(out) == expected
    assert json.loads((out / "summary.json").read_text())["errors"] == 1


@pytest.mark.slow
def test_two_processes_of_torchrun_give_the_records_of_one(uninterrupted, tmp_path):
    words, expected = uninterrupted
    out = tmp_path / "run"
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "patchguard")
    process = start([*words, str(out)], *launch)
    try:
        _, problems = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, problems.decode()
    shards = Folder(out).shards()
    assert [path.name for path in shards] == ["records-00000.jsonl", "records-00001.jsonl"]
    assert all(json.loads(line)["index"] // 4 % 2 == 1 for line in shards[1].read_text().splitlines())
    assert lines(out) == expected
    assert json.loads((out / "summary.json").read_text())["images"] == len(expected)
    again = CliRunner().invoke(app, [*words, str(out)])
    assert "already complete" in again.stdout


def test_records_of_other_images_are_never_taken_for_these(run, labelled, tmp_path):
    """Same names, other pictures: a finished run and a stopped one are both refused."""
    photos, out = tmp_path / "photos", tmp_path / "run"
    photos.mkdir()
    for place, path in enumerate(sorted((labelled / "bread").glob("*.png"))[:3]):
        (photos / f"{place}.png").write_bytes(path.read_bytes())
    words = ("--data", photos, "--out", out)
    assert run("certify", *words).exit_code == 0
    assert "already complete" in run("certify", *words).stdout
    Image.new("RGB", (16, 16), "red").save(photos / "1.png")
    for _ in range(2):
        shown = run("certify", *words)
        assert shown.exit_code == 1
        assert "1.png has changed since" in shown.stderr
        (out / "summary.json").unlink(missing_ok=True)


def test_certificates_that_a_finished_run_has_elsewhere_are_missed(run, labelled, tmp_path):
    words = ("--data", labelled / "bread", "--limit", "2", "--out", tmp_path / "run", "--certificates")
    assert run("certify", *words, tmp_path / "here").exit_code == 0
    assert run("certify", *words, tmp_path / "here").exit_code == 0
    shown = run("certify", *words, tmp_path / "there")
    assert shown.exit_code == 1
    assert "lacks 000000-001-2x2.pgc" in shown.stderr


@pytest.mark.parametrize("words", [("--out", "/proc"), ("--certificates", "/proc")])
def test_places_that_cannot_be_written_are_one_line(run, labelled, tmp_path, words):
    shown = run("certify", "--data", labelled / "bread", "--limit", "2", "--out", tmp_path, *words)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("patchguard: ")
    assert len(shown.stderr.splitlines()) == 1


def test_masks_fitted_for_the_run_are_not_called_the_models_own(run, labelled, tmp_path):
    words = ("--data", labelled / "bread", "--limit", "2", "--defense", "RobustMasking", "--out", tmp_path)
    assert run("certify", *words).exit_code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["patches"]["2x2"]["masks"] == "refitted"
    assert summary["settings"]["fitted"] == "2x2 in 16x16"
