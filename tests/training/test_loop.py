"""The loop on pictures that a thin network learns in seconds: it learns, stops, goes on, and saves."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import recipe, stripes

from patchguard.data.datasets import hold_out
from patchguard.errors import InputError
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import checkpoint, loop, run
from patchguard.training.augment import Draws
from patchguard.training.curriculum import stages
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def budget(**limits: float) -> loop.Budget:
    return loop.Budget(started=time.monotonic(), checkpoint_every=0.0, **limits)


def states_equal(one: Trainer, two: Trainer) -> bool:
    mine, theirs = one.state(), two.state()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_network_learns_and_its_guard_certifies(tmp_path: Path) -> None:
    learned, held_out = hold_out(stripes(380), 60)
    trainer = Trainer(recipe(), learned, device=CPU)
    before = evaluate(trainer.guard, held_out, Patch(2))
    assert loop.run(trainer, tmp_path, epochs=4, budget=budget(), held_out=held_out)
    after = evaluate(trainer.guard, held_out, Patch(2))
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] < log[0]["loss"]
    assert after.clean > max(before.clean, 0.8)
    assert after.certified > 0.5
    assert log[2]["held_out"]["count"] == 60


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_stopped_run_goes_on_bit_by_bit_like_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    settings = recipe(optimizer=optimizer, peak_rate=0.01)
    whole, first, second = (Trainer(settings, stripes(100), device=CPU) for _ in range(3))
    assert loop.run(whole, tmp_path / "whole", epochs=4, budget=budget())
    assert not loop.run(first, tmp_path / "parts", epochs=4, budget=budget(stop=0.0))
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"epoch": 2, "lo')
    assert loop.run(second, tmp_path / "parts", epochs=None, budget=budget())
    assert states_equal(whole, second)
    assert not states_equal(first, second)
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3, 4]


def test_a_run_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    loop.run(Trainer(recipe(), stripes(64), device=CPU), tmp_path, epochs=1, budget=budget())
    with pytest.raises(InputError, match="other settings \\(seed\\)"):
        loop.run(Trainer(recipe(seed=1), stripes(64), device=CPU), tmp_path, epochs=1, budget=budget())


def test_a_checkpoint_is_split_into_parts_and_a_missing_part_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART", 2000)
    trainer = Trainer(recipe(), stripes(64), device=CPU)
    loop.run(trainer, tmp_path, epochs=1, budget=budget())
    parts = sorted(tmp_path.glob("checkpoint-000001/part-*"))
    assert len(parts) > 2
    again = Trainer(recipe(), stripes(64), device=CPU)
    assert loop.resume(again, tmp_path) == (1, 1)
    assert states_equal(trainer, again)
    parts[1].unlink()
    with pytest.raises(InputError, match="lacks some of its parts"):
        loop.resume(again, tmp_path)
    parts[0].write_bytes(b"")
    with pytest.raises(InputError, match="is damaged"):
        loop.resume(again, tmp_path)


def test_timing_some_steps_forgets_what_they_learned() -> None:
    trainer, untouched = (Trainer(recipe(), stripes(64), device=CPU) for _ in range(2))
    for stage in stages(trainer.recipe):
        assert trainer.trial(stage, 1) > 0
    assert states_equal(trainer, untouched)
    assert trainer.steps_done == 0


def test_epochs_are_planned_to_fit_the_time() -> None:
    trainer = Trainer(recipe(), stripes(64), device=CPU)
    short, long = (loop.planned_epochs(trainer, None, budget(plan=plan)) for plan in (0.0, 1000.0))
    assert short == 1
    assert long > 100
    with pytest.raises(InputError, match="minutes"):
        loop.planned_epochs(trainer, None, budget(plan=math.inf))


def test_the_average_follows_the_weights_and_without_one_equals_them() -> None:
    data = stripes(96)
    without = Trainer(recipe(ema=0), data, device=CPU)
    without.epoch(0, 3)
    assert all(torch.equal(a, b) for a, b in without._tensors() if a.is_floating_point())
    averaged = Trainer(recipe(ema=0.9), data, device=CPU)
    averaged.epoch(0, 3)
    assert any(not torch.equal(a, b) for a, b in averaged._tensors() if a.is_floating_point())


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"batch_size.*at most the 20 images"):
        Trainer(recipe(), stripes(20), device=CPU)


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    trainer = Trainer(recipe(), stripes(64), device=CPU)
    trainer.model.fc.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match="the loss of epoch 1 is nan"):
        trainer.epoch(0, 2)


def test_accuracy_counts_the_certificates_of_the_guard() -> None:
    data = stripes(40)
    guard = Trainer(recipe(), data, device=CPU).guard
    certificate = guard.certify(data.images.float() / 255, Patch(2))
    true = certificate.label == data.targets
    found = evaluate(guard, data, Patch(2))
    assert (found.count, found.right) == (40, int(true.sum()))
    assert found.proved == int((true & certificate.certified).sum())
    with pytest.raises(InputError, match="at least one image"):
        evaluate(guard, data.subset(slice(0, 0)), Patch(2))


def test_a_student_starts_from_one_model_and_learns_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path))
    first = Trainer(recipe(), stripes(96), device=CPU)
    zoo.save(first.guard, tmp_path / "first.safetensors")
    plain = recipe(name="undefended", defense="Undefended", plain_share=1.0, model="resnet18")
    plain = plain.changed({"model_settings": {"small_images": True, "width": 0.125}})
    zoo.save(Trainer(plain, stripes(96), device=CPU).guard, tmp_path / "wise.safetensors")
    student = Trainer(recipe(initial="first", teacher="wise", seed=5), stripes(96), device=CPU)
    for name, tensor in student.model.state_dict().items():
        assert torch.equal(tensor, first.guard.model.state_dict()[name])
    alone = Trainer(recipe(initial="first", seed=5), stripes(96), device=CPU)
    for trainer in (student, alone):
        trainer.epoch(0, 1)
    assert not states_equal(student, alone)
    with pytest.raises(InputError, match="same shape"):
        Trainer(recipe(initial="wise"), stripes(96), device=CPU)
    with pytest.raises(InputError, match=r"wis.*wise"):
        Trainer(recipe(teacher="wis"), stripes(96), device=CPU)


@pytest.mark.parametrize(
    ("regions", "weights"), [(1, {"local": 1.0}), (3, {"local": 1.0}), (8, {"robust_masking": 0.6, "plain": 0.4})]
)
def test_an_ablation_learns_from_random_bands(regions: int, weights: dict[str, float]) -> None:
    bands = recipe(
        model="ds_resnet18",
        model_settings={"width": 0.125, "band": 5},
        defense="RobustMasking",
        evidence="confidence",
        weights=weights,
        regions=regions,
        plain_share=0.0,
        mask_steps=((0.0, 1),),
        pad=0,
    )
    trainer = Trainer(bands, stripes(320), device=CPU)
    found = [trainer.epoch(number, 6) for number in range(6)]
    assert found[-1]["loss"] < found[0]["loss"] - 0.1
    assert evaluate(trainer.guard, stripes(60, seed=9), Patch(2)).clean > 0.6
    with pytest.raises(InputError, match="not an ablation"):
        Trainer(recipe(regions=1), stripes(96), device=CPU)


@pytest.mark.parametrize("kind", ["confidence", "prediction"])
def test_a_network_learns_with_confidences_and_votes(kind: str) -> None:
    trainer = Trainer(recipe(evidence=kind, low=None, weights={"plain": 1.0}, epochs=4), stripes(320), device=CPU)
    found = [trainer.epoch(number, 4) for number in range(4)]
    assert found[-1]["loss"] < found[0]["loss"]
    assert evaluate(trainer.guard, stripes(60, seed=9), Patch(2)).clean > 0.6


def test_the_best_weights_on_the_way_are_kept_and_forgotten_with_a_stopped_run(tmp_path: Path) -> None:
    model = Trainer(recipe(), stripes(96), device=CPU).guard.model
    best = loop.Best(tmp_path)
    assert (best.state(), best.tensors()) == (None, None)
    for epoch, (proved, right) in enumerate([(2, 8), (5, 7), (3, 9), (5, 6), (6, 6), (1, 10)], 1):
        model.fc.bias.fill_(epoch)
        best.offer(model, epoch, Accuracy(Patch(2), 10, right, proved))
    # Of several of one sum, the one with more proofs.
    assert best.state() == {"epoch": 5, "score": [12, 6]}
    assert set(best.tensors()["fc.bias"].tolist()) == {5.0}
    best.forget_after(5)
    assert best.state() is not None
    best.forget_after(4)
    assert best.state() is None


def test_the_weights_with_the_best_score_on_held_out_images_are_chosen() -> None:
    trainer, data = Trainer(recipe(), stripes(96), device=CPU), stripes(60, seed=9)
    good = Trainer(recipe(epochs=4), stripes(320), device=CPU)
    for number in range(4):
        good.epoch(number, 4)
    found = run.choose_weights(trainer, data, good.guard.model.state_dict())
    assert found["weights"] == "best"
    assert evaluate(trainer.guard, data, Patch(2)).proved == found["before_rounding"]["best"]["proved"] > 0


def test_a_network_that_leaves_cells_out_at_first_learns_and_ends_with_all_of_them() -> None:
    trainer = Trainer(recipe(epochs=4, thin_share=0.5), stripes(320), device=CPU)
    seen = []
    forward = trainer.forward

    def watched(pixels: torch.Tensor) -> torch.Tensor:
        logits = forward(pixels)
        seen.append(tuple(logits.shape[2:]))
        return logits

    trainer.forward = watched
    for number in range(4):
        trainer.epoch(number, 4)
    assert seen == [(8, 8)] * 20 + [(16, 16)] * 20
    assert evaluate(trainer.guard, stripes(60, seed=9), Patch(2)).clean > 0.8


def test_a_bagnet_sees_quarters_at_first_and_whole_images_in_the_end() -> None:
    settings = {"model": "bagnet9", "model_settings": {"width": 0.05}, "input_side": 64, "plain_share": 0.5}
    trainer = Trainer(recipe(epochs=2, thin_share=0.5, **settings), stripes(96), device=CPU)
    seen = []
    forward = trainer.forward

    def watched(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(pixels.shape[2:]))
        return forward(pixels)

    trainer.forward = watched
    for number in range(2):
        trainer.epoch(number, 2)
    assert seen == [(32, 32)] * trainer.steps + [(64, 64)] * trainer.steps


def test_only_networks_that_can_leave_cells_out_are_told_to() -> None:
    with pytest.raises(InputError, match="`thin_share` must be 0 for resnet18"):
        Trainer(
            recipe(
                thin_share=0.5,
                defense="Undefended",
                model="resnet18",
                model_settings={"width": 0.05, "small_images": True},
                input_side=32,
            ),
            stripes(96),
            device=CPU,
        )
    with pytest.raises(InputError, match="`thin_share` of a BagNet must be at most `plain_share`"):
        Trainer(
            recipe(thin_share=0.5, plain_share=0.2, model="bagnet9", model_settings={"width": 0.05}),
            stripes(96),
            device=CPU,
        )


def test_logits_are_not_clipped_while_training_is_plain() -> None:
    # Logits far below 0 have no gradient once they are clipped.
    trainer = Trainer(recipe(epochs=1, low=0.0, plain_share=0.5), stripes(96), device=CPU)
    images, targets = trainer.feed.first(32)
    moved = []
    for stage in stages(trainer.recipe)[:2]:
        with torch.no_grad():
            trainer.model.fc.bias.fill_(-100.0)
        draws = Draws(torch.Generator().manual_seed(3), 32, trainer.part)
        trainer.step(images, targets, stage, 0.0, draws)
        moved.append(float(trainer.model.fc.bias.grad.abs().sum()))
    assert moved[0] > 0
    assert moved[1] == 0
