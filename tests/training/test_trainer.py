"""Steps and epochs on pictures that a thin network learns in seconds, for every kind of objective."""

from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import states_equal, striped_recipe, striped_trainer, stripes

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training.augment import BatchRandom
from patchguard.training.curriculum import plan_stages
from patchguard.training.evaluate import evaluate
from patchguard.training.losses import CrossEntropy
from patchguard.training.objectives import Batch, objective_for
from patchguard.training.trainer import Trainer

CPU = torch.device("cpu")


def run_epochs(trainer: Trainer, epochs: int) -> list[float]:
    return [trainer.run_epoch(number, epochs)["loss"] for number in range(epochs)]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_timing_some_steps_restores_what_they_changed() -> None:
    trainer, untouched = striped_trainer(), striped_trainer()
    for stage in plan_stages(trainer.recipe):
        assert trainer.time_step(stage, 1) > 0
    assert states_equal(trainer, untouched)
    assert trainer.steps_done == 0


def test_the_average_follows_the_weights_and_without_one_equals_them() -> None:
    without, averaged = striped_trainer(ema_decay=0), striped_trainer(ema_decay=0.9)
    for trainer in (without, averaged):
        trainer.run_epoch(0, 3)
    assert all(torch.equal(a, b) for a, b in without._tensors() if a.is_floating_point())
    assert any(not torch.equal(a, b) for a, b in averaged._tensors() if a.is_floating_point())


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"batch_size.*at most the 20 images"):
        Trainer(striped_recipe(), stripes(20), device=CPU)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    trainer = striped_trainer()
    trainer.model.fc.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match="the loss must stay finite; in epoch 1 it is nan"):
        trainer.run_epoch(0, 2)


def test_logits_are_not_clipped_during_the_warmup() -> None:
    # Logits far below 0 have no gradient once they are clipped.
    trainer = striped_trainer(low=0.0, warmup_fraction=0.5)
    images, targets = trainer.loader.first(32)
    gradients = []
    for stage in plan_stages(trainer.recipe)[:2]:
        with torch.no_grad():
            trainer.model.fc.bias.fill_(-100.0)
        random = BatchRandom(torch.Generator().manual_seed(3), 32, trainer.part)
        trainer.step(images, targets, stage, 0.0, random)
        gradients.append(float(trainer.model.fc.bias.grad.abs().sum()))
    assert gradients[0] > 0
    assert gradients[1] == 0


def test_a_network_that_cannot_be_compiled_learns_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    trainer = Trainer(striped_recipe(), stripes(64), device=CPU, compile_mode="default")
    assert trainer.compile_mode is None
    assert states_equal(trainer, striped_trainer())


# -- cells -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["confidence", "prediction"])
def test_a_network_learns_with_confidences_and_votes(kind: str) -> None:
    trainer = striped_trainer(320, evidence=kind, weights={"plain": 1.0})
    records = [trainer.run_epoch(number, 3) for number in range(3)]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["train_accuracy"] > 0.6


BANDS = {
    "model.name": "ds_resnet18",
    "model.settings": {"width": 0.125, "band": 5},
    "defense": "RobustMasking",
    "evidence": "confidence",
    "warmup_fraction": 0.0,
    "mask_steps": [[0.0, 1]],
    "crop_padding": 0,
}


@pytest.mark.parametrize(
    ("regions", "weights"),
    [
        (1, {"local": 1.0}),
        pytest.param(3, {"local": 1.0}, marks=pytest.mark.slow),
        pytest.param(8, {"robust_masking": 0.6, "plain": 0.4}, marks=pytest.mark.slow),
    ],
)
def test_an_ablation_learns_from_random_bands(regions: int, weights: dict[str, float]) -> None:
    trainer = striped_trainer(320, **BANDS, regions=regions, weights=weights)
    losses = run_epochs(trainer, 6)
    assert losses[-1] < losses[0] - 0.1
    assert evaluate(trainer.guard, stripes(60, seed=9), Patch(2)).clean > 0.6


def test_an_ablation_with_masks_sees_its_regions_as_a_row_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = striped_trainer(64, **BANDS, regions=8, weights={"robust_masking": 0.6, "plain": 0.4})
    ((key, masks),) = trainer.objective.masks.items()
    assert key == (1, False)
    assert set(masks[:, :2].flatten().tolist()) == {0, 1}  # one row
    assert int(masks[:, 3].max()) == 8
    shapes = []
    forward = trainer.forward

    def record(pixels: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(pixels.shape))
        return forward(pixels)

    trainer.forward = record
    trainer.run_epoch(0, 1)
    assert shapes == [(8 * 32, *shapes[0][1:])] * 2


def test_a_network_that_leaves_cells_out_at_first_learns_and_ends_with_all_of_them() -> None:
    trainer = striped_trainer(320, epochs=4, subsample_fraction=0.5)
    grids = []
    forward = trainer.forward

    def record(pixels: torch.Tensor) -> torch.Tensor:
        logits = forward(pixels)
        grids.append(tuple(logits.shape[2:]))
        return logits

    trainer.forward = record
    run_epochs(trainer, 4)
    assert grids == [(8, 8)] * 20 + [(16, 16)] * 20
    assert evaluate(trainer.guard, stripes(60, seed=9), Patch(2)).clean > 0.8


def test_a_bagnet_sees_quarters_at_first_and_whole_images_later() -> None:
    settings = {"subsample_fraction": 0.5, "warmup_fraction": 0.5, "mask_steps": [[0, 1]], "weights": {"plain": 1.0}}
    recipe = striped_recipe(input_size=64, **settings)
    objective = objective_for(recipe, (16, 16), CPU)
    model = build("bagnet9", classes=3, width=0.125)
    network = objective.attach(model)
    data, sizes = stripes(4), []

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(pixels.shape[2:]))
        return network(pixels)

    for stage in plan_stages(recipe):
        random = BatchRandom(torch.Generator().manual_seed(0), 4, slice(0, 4))
        batch = Batch(data.images / 255, data.targets, stage, random, 0, CrossEntropy())
        assert objective.compute(forward, batch)[1].shape == (4, 3)
    assert sizes == [(32, 32), (64, 64)]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("resnet18", {"subsample_fraction": 0.5}, "`loss.subsample_fraction` must be 0 for resnet18"),
        ("bagnet9", {"subsample_fraction": 0.5}, "`loss.subsample_fraction` of a BagNet must be at most .* 0.2"),
        ("srf", {"regions": 1}, "`loss.regions` must be 0 for srf: it is not an ablation"),
    ],
)
def test_networks_leave_out_only_what_they_can(model: str, settings: dict[str, object], message: str) -> None:
    recipe = striped_recipe(warmup_fraction=0.2, **{"model.name": model}, **settings)
    network = build(model, classes=3, **({} if model == "srf" else {"width": 0.05}))
    with pytest.raises(InputError, match=message):
        objective_for(recipe, (16, 16), CPU).attach(network)


def test_masks_of_a_loss_can_be_given_in_cells() -> None:
    boxes = striped_trainer(mask_cells=6, mask_steps=[[0, 1]]).objective.masks[1, False]
    assert len(boxes) == 11 * 11
    assert set((boxes[:, 1] - boxes[:, 0]).tolist()) == {6}


# -- trained models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_student_starts_from_one_model_and_learns_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path))
    first = striped_trainer()
    zoo.save(first.guard, tmp_path / "first.safetensors")
    network = build("resnet18", classes=3, small_images=True, width=0.125)
    zoo.save(LocalGuard(Preprocess(), network, Evidence(), Undefended()), tmp_path / "wise.safetensors")
    student = Trainer(striped_recipe(init_from="first", teacher="wise", seed=5), stripes(64), device=CPU)
    alone = Trainer(striped_recipe(init_from="first", seed=5), stripes(64), device=CPU)
    for name, tensor in student.model.state_dict().items():
        assert torch.equal(tensor, first.guard.model.state_dict()[name])
    for trainer in (student, alone):
        trainer.run_epoch(0, 1)
    assert not states_equal(student, alone)
    with pytest.raises(InputError, match="same shape"):
        Trainer(striped_recipe(init_from="wise"), stripes(64), device=CPU)
    with pytest.raises(InputError, match=r"wis.*wise"):
        Trainer(striped_recipe(teacher="wis"), stripes(64), device=CPU)
