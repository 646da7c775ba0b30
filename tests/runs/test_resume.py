"""Runs that are started again: other images, other versions, other certificate files are never taken for the old."""

import functools
import hashlib
import html
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import threshold_guard
from PIL import Image
from typer.testing import CliRunner

from patchguard import __version__
from patchguard.cli import app
from patchguard.data import decode
from patchguard.errors import InputError
from patchguard.runs.certificate_folder import CertificateFolder, name_certificate
from patchguard.runs.records import Folder, lock_folder
from patchguard.storage import zoo
from patchguard.storage.published_models import CHECKPOINTS

COUNT = 5


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """One network for all commands of this process: deriving its field anew takes most of their time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zoo, "load", functools.cache(zoo.load))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return threshold_guard.save_guard(tmp_path_factory.mktemp("model") / "brightness.safetensors")


def draw(path: Path, grey: int, side: int = threshold_guard.SIDE) -> None:
    """Write a picture whose file has the same size whatever it shows."""
    Image.fromarray(np.full((side, side, 3), grey, np.uint8)).save(path, "BMP")


@pytest.fixture
def photos(tmp_path) -> Path:
    """Pictures of one grey each, one of them too small for the patch, and a file that is none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(COUNT):
        draw(folder / f"{number}.bmp", 60 + 40 * number)
    draw(folder / "small.bmp", 90, side=1)
    (folder / "torn.bmp").write_bytes(b"no picture")
    return folder


@pytest.fixture
def run(model, photos, tmp_path):
    """Certify or attack `photos` in batches of three into the folder `run`."""

    def invoke(*words, command="certify", out="run", data=photos):
        usual = ["--model", model, "--device", "cpu", "--data", str(data), "--batch-size", "3", "--patch", "2"]
        usual += ["--attack", "noise"] if command == "attack" else []
        return CliRunner().invoke(app, [command, *usual, "--out", str(tmp_path / out), *map(str, words)])

    return invoke


def stop(folder: Path, kept: int) -> None:
    """Leave a run as a kill does: so many records, and half of the next."""
    (shard,) = Folder(folder).shards()
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:kept]) + lines[kept][:9] if kept < len(lines) else b"".join(lines))
    (folder / "summary.json").unlink()


def replace_quietly(path: Path, content: bytes) -> None:
    """Write other content of equal size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(shown, *words: str) -> None:
    assert shown.exit_code == 1, shown.output
    assert len(shown.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in shown.stderr


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("command", ["certify", "attack"])
def test_an_image_replaced_with_equal_size_and_time_is_noticed(run, photos, tmp_path, command, finished):
    assert run(command=command).exit_code == 0
    if not finished:
        stop(tmp_path / "run", 4)
    recorded = next(each["name"] for each in Folder(tmp_path / "run").records() if "error" not in each)
    before = all_files(tmp_path / "run")
    original = (photos / recorded).read_bytes()
    replace_quietly(photos / recorded, original[:-9] + bytes([1] * 9))
    refused(run(command=command), f"{recorded} has changed since", "recorded other pixels. Give another --out")
    assert all_files(tmp_path / "run") == before
    replace_quietly(photos / recorded, original)
    shown = run(command=command)
    assert shown.exit_code == 0, shown.output
    assert ("already complete" in shown.stdout) == finished


@pytest.mark.parametrize("name", ["0.bmp", "small.bmp", "torn.bmp"])
def test_images_without_an_answer_and_images_that_lose_theirs_are_compared_too(run, photos, tmp_path, name):
    draw(tmp_path / "tiny.bmp", 90, side=1)
    content = (tmp_path / "tiny.bmp").read_bytes()
    (photos / "torn.bmp").write_bytes(b"x" * len(content))
    assert run().exit_code == 0
    errors = {each["name"]: each["image"] for each in Folder(tmp_path / "run").records() if "error" in each}
    assert set(errors) == {"small.bmp", "torn.bmp"}
    assert errors["torn.bmp"] is None
    assert len(errors["small.bmp"]) == 64
    other = {"0.bmp": b"x" * (photos / "0.bmp").stat().st_size, "small.bmp": content[:-2] + b"\x01\x02"}
    replace_quietly(photos / name, other.get(name, content))
    refused(run(), f"{name} has changed since")


def test_records_of_an_older_release_are_shown_and_not_gone_on_with(run, tmp_path):
    assert run().exit_code == 0
    (shard,) = Folder(tmp_path / "run").shards()
    lines = [json.loads(line) for line in shard.read_text().splitlines()]
    for each in lines:
        del each["image"]
    shard.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    stop(tmp_path / "run", 4)
    before = all_files(tmp_path / "run")
    refused(run(), "is of an older release and does not say which pixels it is about. Give another --out")
    assert all_files(tmp_path / "run") == before


def test_an_image_that_would_take_too_much_memory_is_recorded_and_the_run_goes_on(run, photos, tmp_path, monkeypatch):
    draw(photos / "large.bmp", 90, side=100)
    monkeypatch.setattr(decode, "MAX_BYTES", 60_000, raising=False)
    assert run().exit_code == 0
    errors = {each["name"]: each.get("error") for each in Folder(tmp_path / "run").records()}
    assert "more than the limit" in errors.pop("large.bmp")
    assert sum(error is None for error in errors.values()) == COUNT


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_run_stopped_after_any_record_writes_none_twice(run, tmp_path):
    words = ("--certificates", tmp_path / "files")
    assert run(*words).exit_code == 0
    files = all_files(tmp_path / "files")
    (shard,) = Folder(tmp_path / "run").shards()
    whole = sorted(shard.read_bytes().splitlines())
    assert len(whole) == COUNT + 2
    for kept in (0, 1, 5):
        stop(tmp_path / "run", kept)
        assert run(*words).exit_code == 0
        assert sorted(shard.read_bytes().splitlines()) == whole
        assert all_files(tmp_path / "files") == files


@pytest.mark.parametrize(("index", "told"), [(0, "image 0 "), (99, "image 99 "), (-1, "image -1 ")])
def test_records_that_are_there_twice_or_of_no_image_are_refused(run, tmp_path, index, told):
    assert run().exit_code == 0
    (shard,) = Folder(tmp_path / "run").shards()
    stop(tmp_path / "run", COUNT + 2)
    added = {**json.loads(shard.read_text().splitlines()[0]), "index": index}
    with shard.open("a") as file:
        file.write(json.dumps(added) + "\n")
    refused(run(), told, "should not be in", "or is there twice")


# -- versions ----------------------------------------------------------------------------------------------------------


def test_a_run_of_another_release_goes_on_only_by_choice(run, tmp_path):
    assert run().exit_code == 0
    stop(tmp_path / "run", 3)
    stamp = json.loads((tmp_path / "run" / "run.json").read_text())
    stamp["environment"]["patchguard"] = "0.0.1"
    (tmp_path / "run" / "run.json").write_text(json.dumps(stamp))
    before = all_files(tmp_path / "run")
    refused(
        run(), f"patchguard 0.0.1, not {__version__}", "Give --mix-versions to resume it anyway", "or another --out"
    )
    assert all_files(tmp_path / "run") == before
    assert run("--mix-versions").exit_code == 0
    mixed = f"0.0.1 and {__version__}"
    for name in ("run.json", "summary.json"):
        assert json.loads((tmp_path / "run" / name).read_text())["environment"]["patchguard"] == mixed
    assert mixed in (tmp_path / "run" / "report.html").read_text()
    assert "already complete" in run().stdout


def test_a_finished_run_of_another_release_is_shown(run, tmp_path):
    assert run(command="attack").exit_code == 0
    stamp = json.loads((tmp_path / "run" / "run.json").read_text())
    stamp["environment"]["torch"] = "1.0"
    (tmp_path / "run" / "run.json").write_text(json.dumps(stamp))
    assert "already complete" in run(command="attack").stdout


# -- certificate files -------------------------------------------------------------------------------------------------


def test_a_second_run_into_a_folder_of_certificates_overwrites_nothing(run, photos, tmp_path):
    files, others = tmp_path / "files", tmp_path / "others"
    assert run("--certificates", files).exit_code == 0
    before = all_files(files)
    assert len(before) == COUNT
    others.mkdir()
    for number in range(COUNT):
        draw(others / f"{number}.bmp", 70 + 30 * number)
    told = "0000-0-2x2.pgc is there already and is about another image, model or patch. Give another --certificates"
    refused(run("--certificates", files, out="images", data=others), told)
    refused(run("--certificates", files, "--tau", "1", out="rule"), told)
    assert not (tmp_path / "images" / "run.json").exists()
    assert all_files(files) == before
    assert run("--certificates", files, out="again").exit_code == 0  # the same images, model and patch: the same files
    assert all_files(files) == before
    assert run("--certificates", files, "--patch", "3", out="more").exit_code == 0
    assert {name: content for name, content in all_files(files).items() if "2x2" in name} == before


def test_a_file_where_none_will_be_written_is_another_runs(run, photos, tmp_path):
    assert run("--certificates", tmp_path / "files").exit_code == 0
    names = [path.name for path in sorted(photos.iterdir())]
    taken = tmp_path / "files" / f"{names.index('torn.bmp'):06d}-torn-2x2.pgc"
    taken.write_bytes((tmp_path / "files" / "000000-0-2x2.pgc").read_bytes())
    refused(run("--certificates", tmp_path / "files", out="again"), f"{taken} is there already")


def test_a_file_about_another_patch_is_another_runs(run, tmp_path):
    """Where a rule has no masks, nothing but the patch itself tells its files apart."""
    files, words = tmp_path / "files", ("--certificates", tmp_path / "files", "--defense", "ClippedSum")
    assert run(*words, "--patch", "3", "--limit", "2").exit_code == 0
    for path in files.glob("*2x2.pgc"):
        path.unlink()
    (other,) = files.glob("000001-*3x3.pgc")
    other.rename(taken := other.with_name(other.name.replace("3x3", "2x2")))
    refused(run(*words, "--limit", "2", out="again"), f"{taken.name} is there already and is about another")


@pytest.mark.parametrize(
    ("finished", "change"), [(True, "gone"), (True, "damaged"), (False, "gone"), (False, "another's")]
)
def test_files_of_recorded_images_are_what_the_run_wrote(run, tmp_path, finished, change):
    files = tmp_path / "files"
    assert run("--certificates", files).exit_code == 0
    record = next(each for each in Folder(tmp_path / "run").records() if "error" not in each)
    first = files / record["patches"]["2x2"]["file"]
    assert record["patches"]["2x2"]["certificate"] == hashlib.sha256(first.read_bytes()).hexdigest()
    if not finished:
        stop(tmp_path / "run", 4)
    if change == "gone":
        first.unlink()
    else:
        other = files / name_certificate(place := (record["index"] + 1) % COUNT, str(place), "2x2")
        first.write_bytes(first.read_bytes()[:-1] if change == "damaged" else other.read_bytes())
    told = f"lacks {first.name}" if change == "gone" else f"{first} is not the file that"
    refused(run("--certificates", files), told)


def test_a_folder_of_certificates_is_written_by_one_run_at_a_time(run, tmp_path):
    (tmp_path / "files").mkdir()
    with lock_folder(tmp_path / "files"):
        refused(run("--certificates", tmp_path / "files"), f"another process is working in {tmp_path / 'files'}")
    assert run("--certificates", tmp_path / "files").exit_code == 0


def test_other_content_under_a_name_is_kept_and_refused(tmp_path):
    folder = CertificateFolder(tmp_path)
    assert folder.write("a.pgc", b"one") == folder.write("a.pgc", b"one") == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(InputError, match=r"a\.pgc is there already with other content.*Give another --certificates"):
        folder.write("a.pgc", b"two")
    assert (tmp_path / "a.pgc").read_bytes() == b"one"


def test_certificates_of_an_older_release_are_not_taken_for_granted(run, tmp_path):
    assert run("--certificates", tmp_path / "files").exit_code == 0
    (shard,) = Folder(tmp_path / "run").shards()
    lines = [json.loads(line) for line in shard.read_text().splitlines()]
    for each in lines:
        each.get("patches", {}).get("2x2", {}).pop("certificate", None)
    shard.write_text("".join(json.dumps(each) + "\n" for each in lines))
    refused(run("--certificates", tmp_path / "files"), "is of an older release and does not say what 00")


# -- which model -------------------------------------------------------------------------------------------------------


def test_commands_say_which_file_they_loaded(run, model, photos, tmp_path):
    line = f"model: {model}, digest {zoo.load(model).digest[:16]}"
    for command in ("certify", "attack"):
        assert line in run(command=command, out=command).stdout
        stamp = json.loads((tmp_path / command / "run.json").read_text())
        assert stamp["model_file"] == {"name": "brightness.safetensors", "digest": zoo.load(model).digest}
        shown = run("--json", command=command, out=command)
        assert line in shown.stderr
        assert json.loads(shown.stdout)["images"] == COUNT + 2
    image = str(photos / "0.bmp")
    assert line in CliRunner().invoke(app, ["predict", image, "--model", model, "--device", "cpu"]).stderr
    assert run("--certificates", tmp_path / "files", out="files-run").exit_code == 0
    words = ["verify", str(tmp_path / "files" / "000000-0-2x2.pgc"), "--model", model, "--image", image]
    shown = CliRunner().invoke(app, words)
    assert (shown.exit_code, shown.stderr.strip()) == (0, line)


def test_a_file_called_like_a_model_is_not_verified_against(run, model, photos, tmp_path, monkeypatch):
    """A certificate of another model does not become one of `cifar10` by a file of that name."""
    assert run("--certificates", tmp_path / "files").exit_code == 0
    (tmp_path / "cifar10").write_bytes(Path(model).read_bytes())
    monkeypatch.chdir(tmp_path)
    words = ["verify", "files/000000-0-2x2.pgc", "--image", str(photos / "0.bmp"), "--model"]
    assert CliRunner().invoke(app, [*words, "./cifar10"]).exit_code == 0
    shown = CliRunner().invoke(app, [*words, "cifar10"])
    assert shown.exit_code == 1
    assert str(CHECKPOINTS / "cifar10.safetensors") in shown.stderr


# -- runs that grow ----------------------------------------------------------------------------------------------------


def by_name(folder: Path) -> dict[str, dict]:
    return {record["name"]: record for record in Folder(folder).records()}


@pytest.mark.parametrize("killed", [False, True])
def test_more_photos_are_added_and_recorded_ones_keep_their_records(run, photos, tmp_path, killed):
    assert run().exit_code == 0
    before = by_name(tmp_path / "run")
    draw(photos / "1a.bmp", 130)
    draw(photos / "zebra.bmp", 40)
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "already complete" not in shown.stdout
    if killed:
        stop(tmp_path / "run", len(before) + 1)
        assert run().exit_code == 0
    after = by_name(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"1a.bmp", "zebra.bmp"}
    assert {record["index"] for record in after.values()} == set(range(len(after)))
    assert run(out="fresh").exit_code == 0
    fresh = by_name(tmp_path / "fresh")
    for name, record in after.items():
        assert {**record, "index": 0} == {**fresh[name], "index": 0}
    assert "already complete" in run().stdout


@pytest.mark.parametrize("killed", [None, 2, 9])
def test_another_patch_is_added_and_what_was_proved_stays(run, tmp_path, killed):
    files = ("--certificates", tmp_path / "files")
    assert run(*files).exit_code == 0
    before, written = by_name(tmp_path / "run"), all_files(tmp_path / "files")
    assert run("--patch", "3", *files).exit_code == 0
    if killed is not None:  # as a kill leaves it: old records first, then some new ones
        whole = Folder(tmp_path / "run").shards()[0].read_bytes().splitlines(keepends=True)
        old = [json.dumps(record).encode() + b"\n" for record in before.values()]
        Folder(tmp_path / "run").shards()[0].write_bytes(b"".join([*old, *whole[:killed]][: len(old) + killed]))
        errors = [line for line in whole[:killed] if b'"error"' in line]
        if errors:  # an image without an answer is recorded once
            kept = [line for line in old if b'"error"' not in line]
            Folder(tmp_path / "run").shards()[0].write_bytes(b"".join([*kept, *whole[:killed]]))
        (tmp_path / "run" / "summary.json").unlink()
        shown = run("--patch", "3", *files)
        assert shown.exit_code == 0, shown.output
    after = by_name(tmp_path / "run")
    assert len(list(Folder(tmp_path / "run").all_records())) == len(before) == len(after)
    for name, record in before.items():
        if "error" in record:
            assert after[name] == record
            continue
        assert list(after[name]["patches"]) == ["2x2", "3x3"]
        old = {**after[name], "patches": {"2x2": after[name]["patches"]["2x2"]}}
        assert old == record
    now = all_files(tmp_path / "files")
    assert {name: now[name] for name in written} == written
    assert len(now) == 2 * len(written)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["patches"]) == ["2x2", "3x3"]
    fresh = run("--patch", "3", out="fresh")
    assert fresh.exit_code == 0
    for name, record in by_name(tmp_path / "fresh").items():
        if "error" not in record:
            kept = {
                key: value for key, value in after[name]["patches"]["3x3"].items() if key not in ("certificate", "file")
            }
            assert kept == record["patches"]["3x3"]
    assert "already complete" in run(*files).stdout  # fewer patches than the run has


def test_a_photo_that_is_gone_is_refused_and_force_starts_over(run, photos, tmp_path):
    assert run().exit_code == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = all_files(tmp_path / "run")
    (photos / "2.bmp").rename(photos / "moved.bmp")
    draw(photos / "more.bmp", 40)
    refused(run(), "2.bmp of", "must be among the images", "--force")
    assert {name: all_files(tmp_path / "run")[name] for name in before} == before
    shown = run("--force")
    assert shown.exit_code == 0, shown.output
    assert "moved.bmp" in by_name(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_force_removes_nothing_where_no_run_is(tmp_path):
    (tmp_path / "summary.json").write_text("mine")
    Folder(tmp_path).clear()
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_another_rule_is_not_an_extension(run, tmp_path):
    assert run().exit_code == 0
    refused(run("--defense", "ClippedSum"), "other settings: defense", "--force to start over")
    refused(run("--top-k", "2", "--defense", "ClippedSum"), "other settings")
    assert run(command="attack", out="attack").exit_code == 0


def test_an_attack_is_not_extended(run, photos, tmp_path):
    assert run(command="attack").exit_code == 0
    draw(photos / "more.bmp", 40)
    refused(run(command="attack"), "holds a run with other settings", "--force")
    assert run("--force", command="attack").exit_code == 0


@pytest.mark.parametrize("fast", [True, False])
def test_a_finished_run_on_a_disk_that_can_only_be_read_is_shown(run, photos, tmp_path, monkeypatch, fast):
    assert run().exit_code == 0
    if not fast:
        (tmp_path / "run" / "state.json").unlink()
    before = all_files(tmp_path / "run")

    def refuse(*words, **named):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for broken in ("filelock.FileLock.acquire", "patchguard.storage.atomic._replace"):
        monkeypatch.setattr(broken, refuse)
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "already complete" in shown.stdout
    assert all_files(tmp_path / "run") == before
    draw(photos / "more.bmp", 40)
    assert run().exit_code == 1


def test_a_finished_run_is_shown_again_without_torch(run, model, photos, tmp_path):
    assert run().exit_code == 0
    words = ["certify", "--model", model, "--device", "cpu", "--data", str(photos), "--batch-size", "3", "--patch", "2"]
    code = (
        "import sys; from patchguard.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    home = str(Path(decode.__file__).parents[2])
    again = [sys.executable, "-c", code, *words, "--out", str(tmp_path / "run")]
    shown = subprocess.run(again, env={**os.environ, "PYTHONPATH": home}, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "already complete" in shown.stdout


def test_the_report_ends_with_a_command_that_gives_the_run_again(run, tmp_path):
    assert run("--patch", "3").exit_code == 0
    command = json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    assert command[:2] == ["patchguard", "certify"]
    assert shlex.join(command) in html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "already complete" in CliRunner().invoke(app, [*command[1:], "--device", "cpu"]).stdout


def test_quiet_prints_the_path_of_the_report_alone(run, tmp_path):
    for command in ("certify", "attack"):
        shown = run("--quiet", command=command, out=command)
        assert (shown.exit_code, shown.stdout) == (0, f"{tmp_path / command / 'report.html'}\n")
        assert shown.stderr == ""


def test_old_names_of_certificate_files_are_still_found(run, tmp_path):
    files = tmp_path / "files"
    assert run("--certificates", files).exit_code == 0
    (shard,) = Folder(tmp_path / "run").shards()
    records = [json.loads(line) for line in shard.read_text().splitlines()]
    for record in records:
        for key, entry in record.get("patches", {}).items():
            (files / entry.pop("file")).rename(files / f"{record['index']:06d}-{key}.pgc")
    shard.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "already complete" in run("--certificates", files).stdout


def test_the_default_folder_names_the_patch(model, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", model, "--device", "cpu", "--data", "photos", "--patch", "4%"]
    for command, more in (("certify", ["--patch", "2"]), ("attack", ["--attack", "noise"])):
        shown = CliRunner().invoke(app, [command, *words, *more, "--quiet"])
        assert shown.exit_code == 0, shown.output
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "brightness-photos-4percent-2x2",
        "brightness-photos-noise-4percent",
    ]
    again = CliRunner().invoke(app, ["certify", *words, "--patch", "2"])
    assert "already complete" in again.stdout


def test_many_certificates_find_their_images_and_a_wrong_model_is_named(run, model, photos, tmp_path):
    files = tmp_path / "files"
    assert run("--certificates", files, "--patch", "3").exit_code == 0
    words = ["verify", *map(str, sorted(files.iterdir()))]
    shown = CliRunner().invoke(app, [*words, "--model", model, "--image", str(photos)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("image and evidence agree") == len(words) - 1 == 2 * COUNT
    some = [word for name in ("0.bmp", "1.bmp") for word in ("--image", str(photos / name))]
    shown = CliRunner().invoke(app, [*words, "--model", model, *some])
    assert shown.exit_code == 1
    assert shown.stdout.count("about another image: none of the 2 that were given") == 2 * (COUNT - 2)
    shown = CliRunner().invoke(app, [*words, "--model", "cifar10", "--image", str(photos)])
    assert shown.exit_code == 1
    assert shown.stdout.count("invalid: it is about another model than cifar10") == 2 * COUNT
