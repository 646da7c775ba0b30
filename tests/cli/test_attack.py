"""`patchguard attack` through the real command line: what it finds, what it keeps, kills, resumes and torchrun."""

import functools
import json
import shlex
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import threshold_guard
from helpers.command_line import lines, start
from PIL import Image
from typer.testing import CliRunner

from patchguard.attacks import ATTACKS
from patchguard.cli import app
from patchguard.defenses import MaskedAgreement
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.runs.records import Folder
from patchguard.storage import zoo

GRADIENTS = ("--steps", "6", "--locations", "1")


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """One network for all commands of this process: deriving its field anew takes most of their time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zoo, "load", functools.cache(zoo.load))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return threshold_guard.save_guard(tmp_path_factory.mktemp("model") / "brightness.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Pictures of two classes, one of them in the wrong folder, and one broken file."""
    root = threshold_guard.write_images(tmp_path_factory.mktemp("photos"), 4)
    Image.new("RGB", (12, 12), (90, 90, 90)).save(root / "bright" / "night.png")
    (root / "dark" / "torn.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def resizing(tmp_path_factory) -> str:
    """The model for pictures of any size, which are resized to 12 x 12 pixels."""
    path = tmp_path_factory.mktemp("resizing") / "resizing.safetensors"
    zoo.save(replace(threshold_guard.make_guard(), preprocess=Preprocess((Resize(height=12, width=12),))), path)
    return str(path)


@pytest.fixture
def run(model, photos):
    def invoke(*words, command="attack"):
        usual = ["--model", model, "--device", "cpu"]
        usual += ["--data", str(photos)] if command == "attack" and "--data" not in words else []
        return CliRunner().invoke(app, [command, *usual, *map(str, words)])

    return invoke


def records(folder: Path) -> dict[str, dict]:
    return {record["name"]: record for record in Folder(folder).records()}


def test_a_sound_guard_is_never_refuted_and_everything_is_recorded(run, photos, tmp_path):
    shown = run("--patch", "2", *GRADIENTS, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    for words in (
        "correct without an attack",
        "correct under the attack",
        "correct and certified",
        "certified, but broken",
    ):
        assert words in shown.stdout
    found = records(tmp_path)
    assert len(found) == 10
    assert "known kind" in found["dark/torn.png"]["error"]
    wrong = found["bright/night.png"]
    assert (wrong["label"], wrong["attacked"], wrong["broken"]) == (1, 1, True)
    assert wrong["certified"]
    assert len(wrong["places"]) == 1  # its certificate is to be refuted as any other
    held = found["dark/000.png"]
    assert (held["target"], held["label"], held["attacked"]) == (1, 1, 1)
    assert held["certified"]
    assert not held["broken"]
    assert held["margin"] > 0
    assert len(held["places"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    shares = {name: (summary[name]["correct"], summary[name]["total"]) for name in ("clean", "attacked", "certified")}
    assert shares == {"clean": (8, 9), "attacked": (8, 9), "certified": (8, 9)}
    assert summary["refuted"] == []
    assert summary["broken"]["total"] == 0
    assert summary["settings"]["budget"]["steps"] == 6
    assert not (tmp_path / "refuted").exists()
    assert "What a failed attack does not prove" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "universal_patch"])
def test_every_attack_breaks_an_undefended_network_and_refutes_nothing(run, tmp_path, attack):
    words = GRADIENTS if attack in ("adaptive", "patch_pgd") else ()
    shown = run("--attack", attack, "--defense", "Undefended", *words, "--out", tmp_path, "--json")
    assert shown.exit_code == 0, shown.output
    summary = json.loads(shown.stdout)
    assert summary["certified"]["correct"] == 0
    assert summary["broken"]["total"] == 8
    assert summary["broken"]["correct"] >= (0 if attack == "copy" else 4)
    assert summary["attacked"]["correct"] == 8 - summary["broken"]["correct"]
    assert all(record.get("margin") is None for record in records(tmp_path).values())


def test_a_saved_universal_patch_is_used(run, tmp_path):
    Image.new("RGB", (2, 2), "white").save(tmp_path / "white.png")
    words = ("--attack", "universal_patch", "--defense", "Undefended", "--out", tmp_path / "run", "--budget")
    assert "needs path" in run(*words, "locations=2").stderr
    shown = run(*words, f"path={tmp_path / 'white.png'},locations=2")
    assert shown.exit_code == 0, shown.output
    found = records(tmp_path / "run")
    assert [found[f"dark/{number:03d}.png"]["attacked"] for number in range(4)] == [0] * 4
    assert [found[f"bright/{number:03d}.png"]["broken"] for number in range(4)] == [False] * 4
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["budget"]["path"] == "white.png"
    assert len(settings["budget"]["path_digest"]) == 64


def test_a_targeted_attack_counts_its_aim_and_leaves_its_class_alone(run, tmp_path):
    words = ("--attack", "colors", "--defense", "Undefended", "--aim", "bright", "--out", tmp_path, "--json")
    summary = json.loads(run(*words).stdout)
    assert summary["settings"]["aim"] == 0
    assert summary["aimed"]["total"] == 4
    assert summary["aimed"]["correct"] > 0
    found = records(tmp_path)
    assert found["bright/000.png"]["places"] is None
    assert not found["bright/000.png"]["broken"]


def test_images_without_classes_must_keep_their_labels(run, photos, tmp_path):
    pattern = f"{photos}/*/0*.png"
    shown = run("--data", pattern, "--attack", "colors", "--defense", "Undefended", "--out", tmp_path, "--json")
    summary = json.loads(shown.stdout)
    assert (summary["labeled"], summary["attacked"]["total"]) == (False, 8)
    assert summary["attacked"]["correct"] < 8
    assert "Label unchanged" in (tmp_path / "report.html").read_text()


# -- a planted mistake -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["windows", "field"])
def unsound(request, tmp_path) -> str:
    """A guard whose windows and masks lack one row and one column of the cells that a patch reaches."""
    with threshold_guard.plant_mistake(request.param):
        yield threshold_guard.save_guard(tmp_path / "unsound.safetensors")


def test_a_certificate_whose_windows_are_one_cell_too_small_is_refuted(run, unsound, photos, tmp_path):
    out = tmp_path / "run"
    words = ("--model", unsound, "--patch", "2", *GRADIENTS, "--seed", "5", "--out", out)
    shown = run(*words)
    assert shown.exit_code == 3, shown.output
    assert "REFUTED: 8 certified images flipped" in shown.stderr
    summary = json.loads((out / "summary.json").read_text())
    found = records(out)
    assert [found[name]["index"] for name in sorted(found) if found[name].get("refuted")] == summary["refuted"]
    assert len(summary["refuted"]) == 8
    assert summary["images"] == 10  # the run went on to its end

    name = f"{summary['refuted'][0]:06d}"
    kept = json.loads((out / "refuted" / f"{name}.json").read_text())
    record = kept["record"]
    original, attacked = (
        np.array(Image.open(out / "refuted" / f"{name}-{which}.png")) for which in ("original", "attacked")
    )
    changed = np.argwhere((original != attacked).any(2))
    (top, left), tall, wide = record["places"][0], *record["patch"]
    assert len(changed)
    assert (changed >= (top, left)).all()
    assert (changed < (top + tall, left + wide)).all()
    with np.load(out / "refuted" / f"{name}-evidence.npz", allow_pickle=False) as arrays:
        moved = np.argwhere((arrays["before_evidence"] != arrays["after_evidence"]).any(0))
        assert arrays["before_evidence"].sum((1, 2)).argmax() == record["label"]
        assert arrays["after_evidence"].sum((1, 2)).argmax() == record["attacked"]
    assert np.ptp(moved[:, 0]) == 3  # four rows of cells; the planted windows have three
    assert kept["labels_alone"] == [record["label"], record["attacked"]]
    assert kept["settings"]["seed"] == record["seed"] == 5

    files = [str(out / "refuted" / f"{name}-{which}.png") for which in ("original", "attacked")]
    answers = run(*files, "--model", unsound, "--json", command="predict")
    assert [json.loads(line)["label"] for line in answers.stdout.splitlines()] == [record["label"], record["attacked"]]

    again = CliRunner().invoke(app, [*shlex.split(kept["repeat"])[1:], "--out", str(tmp_path / "again")])
    assert again.exit_code == 3, again.output
    (repeated,) = Folder(tmp_path / "again").records()
    assert {**repeated, "index": None} == {**record, "index": None}
    page = (out / "report.html").read_text()
    assert "Refuted certificates" in page
    assert "--only" in page
    assert run(*words).exit_code == 3  # and stays refuted when it is only shown again


def test_the_certificate_of_a_wrong_label_is_refuted_as_well(run, photos, tmp_path):
    root = tmp_path / "swapped"
    for name, other in (("bright", "dark"), ("dark", "bright")):
        shutil.copytree(photos / name, root / other, ignore=shutil.ignore_patterns("n*", "t*"))
    with threshold_guard.plant_mistake():
        unsound = threshold_guard.save_guard(tmp_path / "unsound.safetensors")
        words = ("--model", unsound, "--patch", "2", *GRADIENTS, "--data", root, "--out", tmp_path / "run")
        shown = run(*words)
    assert shown.exit_code == 3, shown.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["clean"]["correct"] == 0
    assert summary["certified_broken"]["correct"] == summary["certified_broken"]["total"] == 8


def test_what_was_refuted_before_a_kill_counts_though_it_is_not_found_again(run, model, tmp_path):
    words = ("--model", model, *GRADIENTS, "--out")
    assert run(*words, tmp_path / "sound").exit_code == 0
    record = next(each for each in Folder(tmp_path / "sound").records() if each.get("certified"))
    found = {**record, "refuted": True, "attacked": 1 - record["label"]}
    # As a process leaves it that is killed between the pictures and the record.
    (tmp_path / "run" / "refuted").mkdir(parents=True)
    (tmp_path / "run" / "refuted" / f"{record['index']:06d}.json").write_text(json.dumps({"record": found}))
    shown = run(*words, tmp_path / "run")
    assert shown.exit_code == 3, shown.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["refuted"] == [record["index"]]


def test_a_rule_that_detects_promises_the_label_or_an_alert(run, tmp_path):
    guarded = threshold_guard.save_guard(tmp_path / "detects.safetensors", MaskedAgreement(masks=threshold_guard.ANY))
    sound = run("--model", guarded, *GRADIENTS, "--out", tmp_path / "sound", "--json")
    assert sound.exit_code == 0, sound.output
    summary = json.loads(sound.stdout)
    assert summary["alerts"]["correct"] == 8  # the plain sum falls, and an alert is raised
    assert summary["attacked"]["correct"] == summary["certified"]["correct"] == 8
    shown = run("--model", guarded, *GRADIENTS, "--out", tmp_path / "sound")
    assert "correct and certified (or an alert)" in shown.stdout
    page = (tmp_path / "sound" / "report.html").read_text()
    assert "every such patch leaves the label or raises an alert" in page
    assert "No patch of this size can change the label without raising an alert." in page
    assert "No patch of this size can change the label." not in page
    with threshold_guard.plant_mistake():
        defense = MaskedAgreement(masks=threshold_guard.ANY)
        mistaken = threshold_guard.save_guard(tmp_path / "mistaken.safetensors", defense)
        shown = run("--model", mistaken, *GRADIENTS, "--limit", "4", "--out", tmp_path / "mistaken")
    assert shown.exit_code == 3, shown.output
    found = [record for record in Folder(tmp_path / "mistaken").records() if record.get("refuted")]
    assert found
    assert all(record["attacked"] != record["label"] and not record["alert"] for record in found)


# -- mistakes of the user ----------------------------------------------------------------------------------------------

MISTAKES = {
    "an unknown attack": (("--attack", "adaptiv"), "Did you mean 'adaptive'?"),
    "a budget of no kind": (("--budget", "huge"), "`--budget` must be quick or paper, or settings such as steps=50"),
    "a setting of another attack": (("--attack", "noise", "--steps", "5"), "the attack noise has no setting `steps`"),
    "a setting that is not known": (("--budget", "depth=5"), "the attack adaptive has no setting `depth`"),
    "no steps": (("--steps", "0"), "`steps` must be a whole number"),
    "a word for a number": (("--budget", "momentum=much"), "`momentum` must be a number; got 'much'"),
    "no number": (("--budget", "step=none"), "`step` must be a number; got None"),
    "a word for a switch": (("--budget", "half=maybe"), "`half` must be true or false; got 'maybe'"),
    "a number for a word": (("--attack", "patch_pgd", "--budget", "search=5"), "`search` must be a word; got 5"),
    "an unknown class": (("--aim", "brigt"), "Did you mean 'bright'?"),
    "a class number too high": (("--aim", "7"), "`--aim` must be a class by name or number"),
    "a negative seed": (("--seed", "-1"), "`--seed` must be a whole number of at least 0"),
    "no such image": (("--only", "99"), "`--only` must be the number of an image, 0 to 9"),
    "patch in words": (("--patch", "five"), "`--patch` must be pixels such as 5 or 24x88"),
    "patch larger than the image": (("--patch", "13"), "`patch` must fit the image"),
    "an unknown defense": (("--defense", "Guess"), "`--defense` must be a known defense"),
    "no batch": (("--batch-size", "0"), "`--batch-size` must be a whole number"),
    "no such patch": (("--attack", "universal_patch", "--budget", "path=no.png"), "no.png cannot be read"),
    "a patch with a number for a name": (("--attack", "universal_patch", "--budget", "path=5"), "5 cannot be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(run, tmp_path, mistake):
    words, message = MISTAKES[mistake]
    shown = run("--out", tmp_path / "run", *words)
    assert shown.exit_code == 1, shown.output
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert shown.stdout == ""
    assert not (tmp_path / "run").exists()


def test_other_settings_and_runs_of_another_kind_are_refused(run, photos, tmp_path):
    words = ("--attack", "noise", "--out", tmp_path / "run")
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "already complete" in run(*words).stdout
    assert "other settings: seed 0, not 1" in run(*words, "--seed", "1").stderr
    certified = run("--data", photos, "--out", tmp_path / "run", command="certify")
    assert "holds a run of another kind: attack, not certify" in certified.stderr
    assert run("--data", photos, "--out", tmp_path / "proofs", command="certify").exit_code == 0
    mixed = CliRunner().invoke(app, ["report", str(tmp_path / "run"), str(tmp_path / "proofs")])
    assert mixed.exit_code == 1
    assert "runs of one kind; got attack and certify" in mixed.stderr
    alone = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert alone.stdout.strip() == str(tmp_path / "run" / "report.html")
    assert run(*words[:2], "--seed", "1", "--out", tmp_path / "other").exit_code == 0
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), str(tmp_path / "other")]).exit_code == 0
    assert "2 attacks compared" in (tmp_path / "run" / "comparison.html").read_text()


def test_one_image_of_a_run_is_attacked_under_the_masks_of_the_run(run, resizing, tmp_path):
    root = threshold_guard.write_images(tmp_path / "sizes", 2)
    Image.new("RGB", (48, 48), (120, 120, 120)).save(root / "dark" / "large.png")  # the masks are made for 12 x 12
    words = ("--model", resizing, "--data", root, "--defense", "DoubleMasking")
    words += ("--patch", "4", "--attack", "noise", "--out")
    assert run(*words, tmp_path / "all").exit_code == 0
    assert run(*words, tmp_path / "one", "--only", "4").exit_code == 0
    (alone,) = records(tmp_path / "one").values()
    assert {**alone, "index": 4} == records(tmp_path / "all")["dark/large.png"]


def test_in_network_pixels_the_resized_image_is_attacked(run, resizing, tmp_path):
    root = threshold_guard.write_images(tmp_path / "sizes", 2)
    Image.new("RGB", (48, 48), (120, 120, 120)).save(root / "dark" / "large.png")
    words = ("--model", resizing, "--data", root, "--patch", "4", "--patch-space", "input")
    shown = run(*words, "--attack", "noise", "--out", tmp_path / "run")
    assert shown.exit_code == 0, shown.output
    assert "a patch of 4x4 network pixels" in shown.stdout.replace("\n", " ")
    large = records(tmp_path / "run")["dark/large.png"]
    assert all(top <= 8 and left <= 8 for top, left in large["places"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["patch_space"] == "input"
    assert "patch on the resized and cropped image." in (tmp_path / "run" / "report.html").read_text()


# -- nothing lost ------------------------------------------------------------------------------------------------------


def test_records_depend_on_seed_and_image_alone(run, tmp_path):
    words = ("--attack", "noise", "--budget", "tries=2", "--limit", "5")
    found = []
    for number, more in enumerate((("--batch-size", "1"), ("--batch-size", "4"), ("--seed", "1"))):
        assert run(*words, *more, "--out", tmp_path / str(number)).exit_code == 0
        found.append(lines(tmp_path / str(number)))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_run_cut_anywhere_ends_with_the_same_bytes(run, tmp_path):
    words = ("--attack", "noise", "--defense", "Undefended", "--batch-size", "3", "--out", tmp_path)
    assert run(*words).exit_code == 0
    names = ("gallery.json", "gallery.npz")
    whole, kept = lines(tmp_path), [(tmp_path / name).read_bytes() for name in names]
    summary = json.loads((tmp_path / "summary.json").read_text())
    (shard,) = Folder(tmp_path).shards()
    content = shard.read_bytes()
    for length in (len(content) // 3, len(content) - 1):
        shard.write_bytes(content[:length])
        (tmp_path / "summary.json").unlink()
        assert run(*words).exit_code == 0
        assert lines(tmp_path) == whole
        assert [(tmp_path / name).read_bytes() for name in names] == kept
        again = json.loads((tmp_path / "summary.json").read_text())
        assert {**again, "seconds": None} == {**summary, "seconds": None}


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory) -> tuple[list[str], list[str]]:
    """The words of a longer run without its folder, and its records."""
    root = threshold_guard.write_images(tmp_path_factory.mktemp("many"), 12)
    words = ["attack", "--data", str(root), "--model", model, "--attack", "noise", "--budget", "tries=8"]
    words += ["--batch-size", "2", "--device", "cpu", "--out"]
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert CliRunner().invoke(app, [*words, str(out)]).exit_code == 0
    return words, lines(out)


@pytest.mark.slow
def test_a_killed_run_loses_and_doubles_nothing(uninterrupted, tmp_path):
    words, expected = uninterrupted
    out = tmp_path / "run"
    shard = out / "records-00000.jsonl"
    process = start([*words, str(out)])
    while process.poll() is None and (not shard.exists() or shard.stat().st_size < 2000):
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    second = CliRunner().invoke(app, [*words, str(out)])
    assert second.exit_code == 1
    assert "another process is working" in second.stderr
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    assert 0 < len(lines(out)) < len(expected)
    assert CliRunner().invoke(app, [*words, str(out)]).exit_code == 0
    assert lines(out) == expected


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
    assert len(Folder(out).shards()) == 2
    assert lines(out) == expected
    assert len(json.loads((out / "gallery.json").read_text())) == 8


def test_help_has_an_example():
    assert "Example: patchguard attack" in CliRunner().invoke(app, ["attack", "--help"]).stdout
