"""One training run from the data to the summary, part by part, on pictures that a thin network learns in seconds."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.stripe_dataset import striped_recipe, striped_trainer, stripes, write_stripes

from patchguard import runtime
from patchguard.data import cifar10
from patchguard.data.dataset import Splits, hold_out
from patchguard.data.loading import load_splits
from patchguard.errors import InputError
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import loaders, loop, run
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.trainer import Trainer

CPU = torch.device("cpu")


def options(out: Path, **changes: object) -> run.Options:
    settings = {
        "recipe": striped_recipe(epochs=2, other_patches=[1], held_out=20),
        "root": out,
        "out": out,
        "device": "cpu",
    }
    return run.Options(**{**settings, **changes})


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "planned"), [(None, 2), (7, 7), ("7", 7), ("auto", None)])
def test_epochs_are_the_recipes_unless_given(tmp_path: Path, epochs: int | str | None, planned: int | None) -> None:
    assert options(tmp_path, epochs=epochs).read_epochs() == planned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": "some"}, "`epochs` must be a whole number of at least 1, or auto; got 'some'"),
        ({"epochs": 0}, "`epochs` must be a whole number of at least 1"),
        ({"epochs": -3}, "`epochs` must be a whole number of at least 1"),
        ({"compile_mode": "fast"}, "`compile` must be one of default, .*off; got 'fast'"),
        ({"limit": 0}, "`limit` must be a whole number of at least 1; got 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        options(tmp_path / "nowhere", **changes)


def test_the_plan_is_the_time_of_all_calls_or_else_of_this_one(tmp_path: Path) -> None:
    endless = options(tmp_path, started=5.0).budget(7)
    assert (endless.started, endless.stop, endless.plan, endless.certified) == (5.0, math.inf, math.inf, 7)
    short = options(tmp_path, minutes=2.0).budget(0)
    assert (short.stop, short.plan) == (120.0, 120.0)
    parts = options(tmp_path, minutes=2.0, plan_minutes=30.0, checkpoint_seconds=3.0).budget(0)
    assert (parts.stop, parts.plan, parts.checkpoint_every) == (120.0, 1800.0, 3.0)


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten images in each of the official files, whose digests are changed to match."""
    draw = np.random.default_rng(0)
    for digests in (cifar10.TRAIN, cifar10.TEST):
        for name in list(digests):
            rows = draw.integers(0, 256, (10, cifar10.RECORD), dtype=np.uint8)
            rows[:, 0] = np.arange(10)
            (tmp_path / name).write_bytes(rows.tobytes())
            monkeypatch.setitem(digests, name, hashlib.md5(rows.tobytes()).hexdigest())
    return tmp_path


def test_cifar10_is_limited_to_its_first_images_before_some_are_held_out(small_cifar10: Path) -> None:
    whole = load_splits("cifar10", small_cifar10)
    run_options = options(small_cifar10, recipe=striped_recipe(held_out=5), limit=30, test=True)
    train_set, held_out, test = run.load_data(run_options, CPU)
    assert (len(train_set), len(held_out), len(test)) == (25, 5, 10)
    expected = hold_out(whole.train.subset(slice(0, 30)), 5)
    assert torch.equal(train_set.images, expected[0].images)
    assert torch.equal(held_out.images, expected[1].images)
    assert torch.equal(test.images, whole.test.images)
    untested = run.load_data(options(small_cifar10, recipe=striped_recipe(held_out=0.1)), CPU)
    assert (len(untested[0]), len(untested[1]), untested[2]) == (45, 5, None)


def test_photos_are_the_same_in_memory_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_options = options(
        write_stripes(tmp_path, train=40, test=10),
        recipe=striped_recipe(dataset="folder", image_size=16, held_out=0.25),
        limit=20,
        test=True,
    )
    train_set, held_out, test = run.load_data(run_options, CPU)
    assert (len(train_set), len(held_out), len(test)) == (15, 5, 10)
    assert set(train_set.targets.tolist()) == {0, 1, 2}
    monkeypatch.setattr(loaders, "MEMORY_FRACTION", 0.0)
    streamed, apart, again = run.load_data(run_options, CPU)
    assert list(streamed.targets) == train_set.targets.tolist()
    assert torch.equal(streamed.read(3), train_set.images[3])
    assert torch.equal(apart.images, held_out.images)
    assert torch.equal(again.images, test.images)


# -- the run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def striped(monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Stripes in place of CIFAR-10."""
    splits = Splits(stripes(84), stripes(30, seed=9))
    monkeypatch.setattr(run, "load_splits", lambda name, root: splits)
    return splits


@pytest.mark.slow
def test_a_run_stops_resumes_and_measures_the_file_that_it_wrote(striped: Splits, tmp_path: Path) -> None:
    run_options = options(tmp_path, test=True, checkpoint_seconds=0.0)
    records: list[dict[str, object]] = []
    progress: list[float] = []
    assert run.train(run_options, should_stop=lambda: True, on_epoch=records.append) is None
    assert not (tmp_path / "summary.json").exists()
    summary = run.train(run_options, on_epoch=records.append, on_step=progress.append)
    assert [record["epoch"] for record in records] == [1, 2]
    assert progress[-1] == pytest.approx(1.0)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["train_images"], summary["processes"], summary["device"]) == (64, 1, "cpu")
    path = tmp_path / summary["file"]
    guard = zoo.load(path)
    assert summary["digest"] == guard.digest
    assert summary["parameters"] == sum(each.numel() for each in guard.model.parameters())
    held_out = hold_out(striped.train, 20)[1]
    for name, data in (("held_out", held_out), ("test", striped.test)):
        fitted = guard.for_patch(Patch(1), 16, 16)
        expected = [evaluate(guard, data, Patch(2)), evaluate(fitted, data, Patch(1))]
        assert summary[name] == [json.loads(json.dumps(each.to_json())) for each in expected]


def test_the_file_and_the_summary_say_how_many_epochs_there_were(striped: Splits, tmp_path: Path) -> None:
    run_options = options(tmp_path, recipe=striped_recipe(epochs=9, other_patches=[], held_out=0), epochs=1)
    summary = run.train(run_options)
    assert summary["recipe"]["schedule"]["epochs"] == 1
    assert zoo.inspect(tmp_path / summary["file"])["recipe"]["schedule"]["epochs"] == 1
    assert summary["weights"] == "averaged"  # nothing is held out to choose by
    assert not summary.keys() & {"held_out", "test", "best", "before_rounding"}


def test_kernels_that_repeat_are_asked_for_before_the_run(
    striped: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(runtime, "use_deterministic_kernels", lambda: asked.append("deterministic"))
    monkeypatch.setattr(run, "_train", lambda *_, **__: asked.append("train"))
    run.train(options(tmp_path))
    assert asked == ["train"]
    run.train(options(tmp_path, deterministic=True))
    assert asked == ["train", "deterministic", "train"]


def test_only_the_first_of_several_processes_writes_and_returns_a_summary(
    striped: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "run", lambda *_, **__: True)
    monkeypatch.setattr(runtime, "rank", lambda: 1)
    assert run.train(options(tmp_path)) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return striped_trainer()


@pytest.mark.parametrize("best", ["averaged", "last", "best"])
def test_of_several_weights_those_with_the_best_held_out_score_stay(
    trainer: Trainer, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = {name: float(number) for number, name in enumerate(("averaged", "last", "best"), 1)}
    trainer.guard.model.fc.bias.data.fill_(biases["averaged"])
    trainer.model.fc.bias.data.fill_(biases["last"])
    offered = {**trainer.guard.model.state_dict(), "fc.bias": torch.full((3,), biases["best"])}

    def measure(guard: object, data: object, patch: Patch) -> Accuracy:
        value = float(guard.model.fc.bias[0])
        return Accuracy(patch, 10, 5, 3 if value == biases[best] else 2)

    monkeypatch.setattr(run, "evaluate", measure)
    chosen = run.choose_weights(trainer, stripes(10), offered)
    assert chosen["weights"] == best
    assert {name: each["certified_correct"] for name, each in chosen["before_rounding"].items()} == {
        name: 3 if name == best else 2 for name in biases
    }
    assert set(trainer.guard.model.fc.bias.tolist()) == {biases[best]}
    assert set(run.choose_weights(trainer, stripes(10), None)["before_rounding"]) == {"averaged", "last"}


def test_other_patches_are_measured_with_masks_fitted_to_each(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(run, "evaluate", lambda guard, _, patch: measured.append((patch, guard.defense.masks)))
    list(run.measure(trainer.guard, striped_recipe(other_patches=[1, 3]), stripes(4)))
    masks = [trainer.guard.for_patch(Patch(side), 16, 16).defense.masks for side in (2, 1, 3)]
    assert measured == list(zip((Patch(2), Patch(1), Patch(3)), masks, strict=True))
    assert masks[0] not in masks[1:]
