"""`patchguard train` on a folder of pictures: it learns, says what is wrong, stops, and goes on after a kill."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import folder_options, write_stripes
from safetensors.torch import load_file
from typer.testing import CliRunner

from patchguard.cli import app
from patchguard.data.dataset import hold_out
from patchguard.data.loading import load_splits
from patchguard.errors import InputError
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import loaders, recipes, run
from patchguard.training.evaluate import evaluate

LONG = {"epochs": 12, "other_patches": []}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def epochs_of(out: Path) -> list[int]:
    path = out / "log.jsonl"
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()] if path.exists() else []


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    (latest,) = out.glob("checkpoint-*")
    for part in latest.glob("part-*"):
        found.update(load_file(part))
    return found


def test_the_command_trains_saves_and_measures_the_saved_file(data: Path, tmp_path: Path) -> None:
    options = [*folder_options(data, tmp_path, other_patches=[1]), "--test", "--epochs", "4"]
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(result.stdout)
    assert result.stderr.count("epoch ") >= 4
    assert [entry["total"] for entry in summary["test"]] == [40, 40]
    assert [entry["patch"]["height"] for entry in summary["held_out"]] == [2, 1]
    assert summary["test"][0]["clean"] > 0.7
    guard = zoo.load(tmp_path / "tiny.safetensors")
    assert guard.class_names == ("lying", "none", "standing")
    splits = load_splits("folder", data, size=(16, 16))
    held_out = hold_out(splits.train, 60)[1]
    assert evaluate(guard, held_out, Patch(2)).to_json() == summary["held_out"][0]
    recipe = zoo.inspect(tmp_path / "tiny.safetensors")["recipe"]
    assert (recipe["optimizer"]["batch_size"], recipe["schedule"]["epochs"]) == (32, 4)
    assert summary["recipe"] == recipe
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_recipes_are_listed_with_one_line_each() -> None:
    result = CliRunner().invoke(app, ["train", "--list"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 1 + len(recipes.RECIPES)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "dataset=cifar10"], "data_batch_1.bin is not in"),
        (["--data", "cifar10", "--root", "nowhere"], "`root` must be a folder that holds CIFAR-10; got nowhere"),
        (["--data", "cifar"], "dataset to train on; got 'cifar'. Did you mean 'cifar10'"),
        (["--data", "sample"], "dataset to train on; got 'sample'"),
        (["--epochs", "some"], "whole number of at least 1, or auto"),
        (["--set", "epochs"], "KEY=VALUE"),
        (["--set", "schedule.epoch=3"], "no setting 'schedule.epoch'. Did you mean 'epochs'"),
        (["--recipe", "tiniest"], "tiny"),
        (["--compile", "fast"], "compile.*max-autotune"),
        (["--limit", "0"], "limit.*at least 1"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(data: Path, tmp_path: Path, extra: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", *folder_options(data, tmp_path / "out"), *extra])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1

    assert re.search(message, result.stderr)


# -- stopped, killed ---------------------------------------------------------------------------------------------------


def started(data: Path, out: Path) -> subprocess.Popen[str]:
    """Start training in another process, with a checkpoint after every epoch."""
    code = (
        "import sys, functools\n"
        "from patchguard.cli import app\n"
        "from patchguard.training import run\n"
        "run.Options = functools.partial(run.Options, checkpoint_seconds=0.0)\n"
        "app(['train', *sys.argv[1:]])\n"
    )
    options = folder_options(data, out, **LONG)
    command = [sys.executable, "-c", code, *options]
    return subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_epoch(process: subprocess.Popen[str], out: Path, epoch: int) -> None:
    limit = time.monotonic() + 600  # against waiting forever
    while max(epochs_of(out) or [0]) < epoch and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_ends_bit_by_bit_like_one_that_was_not(data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = started(data, whole)
    draw = random.Random(4)
    for epoch in (2, 5):
        killed = started(data, parts)
        wait_for_epoch(killed, parts, epoch)
        time.sleep(draw.uniform(0, 0.2))
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
    stopped = started(data, parts)
    wait_for_epoch(stopped, parts, 8)
    stopped.send_signal(signal.SIGINT)
    said = stopped.communicate()[1]
    assert (stopped.returncode, said.count("the same command resumes")) == (130, 1), said
    assert max(epochs_of(parts)) < 12
    last = started(data, parts)
    assert [each.communicate()[1] is not None and each.returncode for each in (process, last)] == [0, 0]
    mine, theirs = weights_of(whole), weights_of(parts)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert epochs_of(whole) == epochs_of(parts) == list(range(1, 13))
    summaries = [json.loads((out / "summary.json").read_text()) for out in (whole, parts)]
    for key in ("digest", "held_out", "best", "before_rounding"):
        assert summaries[0][key] == summaries[1][key]
    assert not list(parts.glob(".*"))


@pytest.mark.parametrize(("times", "message"), [(1, "this step, which is saved"), (2, "the last checkpoint")])
def test_ctrl_c_stops_after_the_step_and_twice_at_once(
    times: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(options: run.Options, *, should_stop: Callable[[], bool], **_: object) -> None:
        assert not should_stop()
        for _number in range(times):
            signal.raise_signal(signal.SIGINT)
        assert should_stop()

    monkeypatch.setattr(run, "train", train)
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(app, ["train", *folder_options(tmp_path, tmp_path / "out")])
    assert result.exit_code == 130
    assert f"the same command resumes after {message}" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


# -- photos ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_images_that_do_not_fit_into_memory_are_streamed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "MEMORY_FRACTION", 0.0)
    monkeypatch.setattr(loaders.StreamingLoader, "workers", 0, raising=False)
    result = CliRunner().invoke(app, ["train", *folder_options(data, tmp_path), "--epochs", "2"])
    assert result.exit_code == 0, result.output
    assert "decoded anew in every epoch" in result.stderr
    summary = json.loads(result.stdout)
    assert summary["train_images"] == 160
    assert summary["held_out"][0]["total"] == 60


def test_a_limit_takes_images_of_all_classes_and_a_fraction_is_held_out(data: Path, tmp_path: Path) -> None:
    recipe = recipes.tiny().override({"dataset": "folder", "image_size": 16, "held_out": 0.1})
    options = run.Options(recipe=recipe, root=data, out=tmp_path, limit=50)
    train_set, held_out, test = run.load_data(options, torch.device("cpu"))
    assert (len(train_set), len(held_out), test) == (45, 5, None)
    assert set(train_set.targets.tolist()) == {0, 1, 2}
    with pytest.raises(InputError, match="batch_size"):
        run.train(options)
