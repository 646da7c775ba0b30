"""The loop: it learns, stops, resumes bit by bit, keeps the best weights, and plans its time."""

import json
import math
import time
from pathlib import Path

import pytest
from helpers.stripe_dataset import states_equal, striped_trainer, stripes

from patchguard.data.dataset import hold_out
from patchguard.errors import InputError
from patchguard.patch import Patch
from patchguard.training import checkpoint, loop, run
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.trainer import Trainer

OLD_WORDS = {"lr": "rate", "seconds_left": "left"}


def budget(**limits: float) -> loop.Budget:
    return loop.Budget(started=time.monotonic(), **limits)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer after four epochs, and the folder of its run."""
    trainer, out = striped_trainer(320), tmp_path_factory.mktemp("learned")
    assert loop.run(trainer, out, epochs=4, budget=budget(), held_out=hold_out(stripes(380), 60)[1])
    return trainer, out


def test_a_network_learns_and_its_guard_certifies(learned: tuple[Trainer, Path]) -> None:
    trainer, out = learned
    accuracy = evaluate(trainer.guard, stripes(60, seed=9), Patch(2))
    assert accuracy.clean > 0.8
    assert accuracy.certified > 0.5
    log = checkpoint.read_log(out)
    assert [record["epoch"] for record in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[2]["held_out"]["total"] == 60
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_accuracy_counts_the_certificates_of_the_guard(learned: tuple[Trainer, Path]) -> None:
    guard, data = learned[0].guard, stripes(40)
    certificate = guard.certify(data.images.float() / 255, Patch(2))
    correct = certificate.label == data.targets
    accuracy = evaluate(guard, data, Patch(2))
    assert (accuracy.total, accuracy.correct) == (40, int(correct.sum()))
    assert accuracy.certified_correct == int((correct & certificate.certified).sum())
    with pytest.raises(InputError, match="at least one image"):
        evaluate(guard, data.subset(slice(0, 0)), Patch(2))


def test_the_weights_with_the_best_score_on_held_out_images_are_chosen(learned: tuple[Trainer, Path]) -> None:
    trainer, data = striped_trainer(), stripes(60, seed=9)
    choice = run.choose_weights(trainer, data, learned[0].guard.model.state_dict())
    assert choice["weights"] == "best"
    best = choice["before_rounding"]["best"]["certified_correct"]
    assert evaluate(trainer.guard, data, Patch(2)).certified_correct == best > 0


# -- stopped and resumed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_stopped_run_resumes_bit_by_bit_like_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    settings = {"optimizer.name": optimizer, "max_lr": 0.01}
    whole, first, second = (striped_trainer(100, **settings) for _ in range(3))
    assert loop.run(whole, tmp_path / "whole", epochs=3, budget=budget())
    assert not loop.run(first, tmp_path / "parts", epochs=3, budget=budget(stop=0.0))
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"epoch": 2, "lo')
    (tmp_path / "parts" / ".curve.png.17.draft").write_text("of a run that was killed")
    assert loop.run(second, tmp_path / "parts", epochs=None, budget=budget())
    assert states_equal(whole, second)
    assert not states_equal(first, second)
    assert [record["epoch"] for record in checkpoint.read_log(tmp_path / "parts")] == [1, 2, 3]
    assert not list((tmp_path / "parts").glob(".*"))


def test_a_run_of_an_earlier_release_resumes(tmp_path: Path) -> None:
    whole, first, second = (striped_trainer(100) for _ in range(3))
    loop.run(whole, tmp_path / "whole", epochs=2, budget=budget())
    done: list[object] = []
    loop.run(first, tmp_path, epochs=2, budget=budget(), on_epoch=done.append, should_stop=lambda: bool(done))
    path = tmp_path / "checkpoint-000001" / "state.json"
    state = json.loads(path.read_text())
    groups = state["recipe"]
    old = {"name": groups["name"], "seed": groups["seed"], "patch": groups["patch"]}
    old |= groups["data"] | groups["guard"] | groups["loss"] | groups["evaluation"]
    old |= {"model": groups["model"]["name"], "model_settings": groups["model"]["settings"], "initial": None}
    old |= {"batch_size": 32, "ema": 0.9, "peak_rate": 0.2, "epochs": 3, "pad": 1, "optimizer": "sgd"}
    for new, word in {"warmup_fraction": "plain_share", "image_size": "image_side", "input_size": "input_side"}.items():
        old[word] = old.pop(new)
    path.write_text(json.dumps({**state, "recipe": old}))
    log = tmp_path / "log.jsonl"
    record = json.loads(log.read_text())
    log.write_text(json.dumps({OLD_WORDS.get(key, key): value for key, value in record.items()}) + "\n")
    assert loop.run(second, tmp_path, epochs=None, budget=budget())
    assert states_equal(whole, second)
    assert all(record["lr"] >= 0 for record in checkpoint.read_log(tmp_path))


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    loop.run(striped_trainer(), tmp_path, epochs=1, budget=budget())
    with pytest.raises(InputError, match="other settings \\(seed\\)"):
        loop.run(striped_trainer(seed=1), tmp_path, epochs=1, budget=budget())


def test_a_checkpoint_is_split_into_parts_and_a_missing_part_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 2000)
    trainer, again = striped_trainer(), striped_trainer()
    loop.run(trainer, tmp_path, epochs=1, budget=budget())
    parts = sorted(tmp_path.glob("checkpoint-000001/part-*"))
    assert len(parts) > 2
    assert loop.resume(again, tmp_path) == (1, 1)
    assert states_equal(trainer, again)
    parts[1].unlink()
    with pytest.raises(InputError, match="lacks some of its parts"):
        loop.resume(again, tmp_path)
    parts[0].write_bytes(b"")
    with pytest.raises(InputError, match="is damaged"):
        loop.resume(again, tmp_path)


def test_the_best_weights_so_far_are_kept_and_dropped_with_a_stopped_run(tmp_path: Path) -> None:
    model = striped_trainer().guard.model
    best = checkpoint.Best(tmp_path)
    assert (best.state(), best.tensors()) == (None, None)
    for epoch, (certified, correct) in enumerate([(2, 8), (5, 7), (3, 9), (5, 6), (6, 6), (1, 10)], 1):
        model.fc.bias.fill_(epoch)
        best.offer(model, epoch, Accuracy(Patch(2), 10, correct, certified))
    # Of several of one sum, the one with more certificates.
    assert best.state() == {"epoch": 5, "score": [12, 6]}
    assert set(best.tensors()["fc.bias"].tolist()) == {5.0}
    best.drop_after(5)
    assert best.state() is not None
    best.drop_after(4)
    assert best.state() is None


def test_epochs_are_planned_to_fit_the_time() -> None:
    trainer = striped_trainer()
    short, long = (loop.plan_epochs(trainer, None, budget(plan=plan)) for plan in (0.0, 1000.0))
    assert short == 1
    assert long > 100
    with pytest.raises(InputError, match="minutes"):
        loop.plan_epochs(trainer, None, budget(plan=math.inf))
