import itertools

import pytest
import torch

from patchguard.cli.train import assignments
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.training.curriculum import coarse, rate, shares, stage_at, stages, thinned
from patchguard.training.recipes import RECIPES, cifar10, named, summaries, tiny
from patchguard.training.trainer import boxes_of_stages

WINDOWS = Windows.sliding(grid=(32, 32), size=(11, 11))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 100])
def test_coarse_masks_hold_every_window(step: int) -> None:
    masks = coarse(WINDOWS, step)
    assert masks.cover(WINDOWS)
    assert len(masks.rows) == -(-22 // step)


def test_step_one_keeps_the_windows_and_step_four_makes_six_by_six_masks_of_fourteen_cells() -> None:
    assert coarse(WINDOWS, 1) == WINDOWS
    masks = coarse(WINDOWS, 4)
    assert len(masks) == 36
    assert max(stop - start for start, stop in masks.rows) == 14


FINER = {"thin_share": 0, "plain_share": 0.2, "mask_steps": [[0.0, 4], [0.6, 2]]}


def test_the_warm_up_is_plain_and_masks_then_get_finer() -> None:
    recipe = cifar10().changed(FINER)
    assert [stage.mask_step for stage in stages(recipe)] == [None, 4, 2]
    assert [stage_at(recipe, progress).mask_step for progress in (0.0, 0.19, 0.2, 0.59, 0.6, 0.99)] == [
        None,
        None,
        4,
        4,
        2,
        2,
    ]
    assert sum(share for _, share in shares(recipe)) == pytest.approx(1)


def test_stages_inside_the_warm_up_are_skipped_but_the_last() -> None:
    recipe = cifar10().changed({**FINER, "plain_share": 0.7})
    assert [stage.mask_step for stage in stages(recipe)] == [None, 2]
    assert [stage.mask_step for stage in stages(cifar10().changed({**FINER, "plain_share": 0}))] == [4, 2]
    assert [stage.mask_step for stage in stages(cifar10().changed({**FINER, "plain_share": 1}))] == [None]


def test_the_stage_in_which_training_stops_being_thin_is_cut_in_two() -> None:
    def plan(share: float) -> list[tuple[float, int | None, bool]]:
        recipe = cifar10().changed({**FINER, "thin_share": share})
        assert sum(part for _, part in shares(recipe)) == pytest.approx(1)
        return [(stage.start, stage.mask_step, stage.thin) for stage in stages(recipe)]

    dense = [(0.0, None, False), (0.2, 4, False), (0.6, 2, False)]
    assert plan(0) == dense
    assert plan(1) == [(start, step, True) for start, step, _ in dense]
    assert plan(0.2) == [(0.0, None, True), *dense[1:]]
    assert plan(0.4) == [(0.0, None, True), (0.2, 4, True), (0.4, 4, False), (0.6, 2, False)]
    assert plan(0.7) == [(0.0, None, True), (0.2, 4, True), (0.6, 2, True), (0.7, 2, False)]


def test_a_thin_box_holds_the_even_cells_of_the_box() -> None:
    boxes = torch.tensor([[a, b, a, b] for a in range(9) for b in range(a, 10)])
    for (top, bottom, *_), (start, stop, *_) in zip(boxes.tolist(), thinned(boxes).tolist(), strict=True):
        assert [2 * cell for cell in range(start, stop)] == [cell for cell in range(top, bottom) if cell % 2 == 0]


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing() -> None:
    recipe = cifar10()
    rates = [rate(recipe, step / 1000) for step in range(1000)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(recipe.peak_rate)
    assert rates.index(max(rates)) == 150
    assert all(a > b for a, b in itertools.pairwise(rates[150:]))
    assert rates[-1] < 2e-3 * recipe.peak_rate


def test_the_step_schedule_divides_by_ten_twice() -> None:
    recipe = tiny().changed({"schedule": "step", "warm_up": 0, "peak_rate": 1.0})
    assert [rate(recipe, p) for p in (0.0, 0.49, 0.5, 0.75)] == pytest.approx([1, 1, 0.1, 0.01])


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_named_after_their_functions_and_survive_json(name: str) -> None:
    recipe = named(name)
    assert recipe.name == name
    assert summaries()[name].endswith(".")
    assert recipe.changed({key: value for key, value in recipe.to_json().items() if key != "patch"}) == recipe


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("cifar10", (11, 11)),
        ("cifar10_mask_ds", (1, 8)),
        ("cifar10_mask_bn17", (8, 8)),
        ("cifar10_mask_bn17_nearest", (6, 6)),
        ("imagenette_bn17", (6, 6)),
        ("paper_imagenette_ds", (1, 66)),
    ],
)
def test_recipes_make_guards_with_masks_for_their_patch(name: str, window: tuple[int, int]) -> None:
    recipe = named(name)
    guard = recipe.guard(recipe.source_size, tuple("abcdefghij"))
    assert guard.class_names == tuple("abcdefghij")
    masks = guard.defense.masks
    assert tuple(max(stop - start for start, stop in axis) for axis in (masks.rows, masks.columns)) == window


def test_a_recipe_makes_a_guard_with_its_tau() -> None:
    recipe = tiny().changed(assignments(["tau=2"]))
    assert recipe.guard((16, 16), ("a", "b", "c")).defense.tau == 2
    assert recipe.to_json()["tau"] == 2
    assert tiny().guard((16, 16), ("a", "b", "c")).defense.tau == 0


def test_the_default_has_at_most_six_million_parameters() -> None:
    guard = cifar10().guard((32, 32), tuple("abcdefghij"))
    assert sum(parameter.numel() for parameter in guard.model.parameters()) <= 6_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "no setting 'epoch'.*epochs"),
        ({"epochs": 0}, "epochs.*at least 1"),
        ({"epochs": 1.5}, "epochs.*like 165; got 1.5"),
        ({"peak_rate": "high"}, "peak_rate.*like 0.3"),
        ({"flip": 1}, "flip.*like true"),
        ({"mask_steps": 4}, "mask_steps.*got 4"),
        ({"mask_steps": [[0, 1.5]]}, "mask_steps"),
        ({"weights": {"double": 1}}, "double_masking"),
        ({"weights.plain": -1}, "at least 0"),
        ({"tau": -0.5}, "`tau` must be a number from 0 to 16777216"),
        ({"tau": "much"}, "`tau` must be a value like 850.0"),
        (
            {"tau": 1.0, "defense": "RobustMasking"},
            "`tau` belongs to the defense DoubleMasking; got 1.0 with RobustMas",
        ),
        ({"defense": "Median"}, "DoubleMasking, RobustMasking"),
        ({"optimizer": "adam"}, "sgd, adamw"),
        ({"ema": 1.0}, "below 1"),
        ({"clip_norm": 0}, "above 0"),
        ({"mask_steps": [[0.5, 2]]}, "rise from 0"),
        ({"mask_steps": [[0, 0]]}, "at least 1"),
        ({"seed.x": 1}, "no setting 'seed.x'"),
        ({"patch": 0}, "at least 1"),
        ({"evidence": "tanh"}, "logits, confidence"),
        ({"crop": [0.9, 0.5]}, "two shares"),
        ({"temperature": 0.0}, "temperature.*above 0"),
        ({"input_side": 0}, "input_side.*at least 1"),
        ({"image_side": 0}, "image_side.*at least 1"),
        ({"held_out": 1.5}, "held_out.*whole number"),
        ({"held_out": -1}, "held_out.*at least 0"),
        ({"rate_steps": [0.7, 0.5]}, "rate_steps.*rising"),
        ({"rate_factor": 2.0}, "rate_factor.*from 0 to 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cifar10().changed(change)


def test_settings_change_one_by_one() -> None:
    recipe = cifar10().changed(
        {"model_settings.field": 9, "patch": [2, 3], "mask_steps": [[0, 3]], "clip_norm": None, "weights.plain": 0.1}
    )
    assert recipe.model_settings["field"] == 9
    assert recipe.model_settings["widths"] == cifar10().model_settings["widths"]
    assert (recipe.patch.height, recipe.patch.width, recipe.mask_steps) == (2, 3, ((0.0, 3),))
    assert recipe.weights == {**cifar10().weights, "plain": 0.1}


def test_the_paper_divides_the_rate_by_ten_after_ten_of_twenty_epochs() -> None:
    recipe = named("paper_cifar10_resnet50")
    rates = [rate(recipe, epoch / recipe.epochs) for epoch in range(recipe.epochs)]
    assert rates == pytest.approx([0.01] * 10 + [0.001] * 10)
    assert (recipe.momentum, recipe.weight_decay) == (0.9, 5e-4)


@pytest.mark.parametrize("dataset", ["imagenette", "imagenet", "flowers", "cats_vs_dogs", "cifar10"])
def test_the_paper_retrains_bagnets_twice(dataset: str) -> None:
    first, second = named(f"paper_{dataset}_bn17"), named(f"paper_{dataset}_bn17_provable")
    for recipe in (first, second):
        assert (recipe.dataset, recipe.model, recipe.epochs, recipe.batch_size) == (dataset, "bagnet17", 20, 64)
        assert {rate(recipe, progress) for progress in (0.0, 0.5, 0.99)} == {0.001}
        assert (recipe.momentum, recipe.nesterov) == (0.9, False)
    assert second.initial == first.name
    assert (first.weights, second.weights, second.mask_cells) == ({"plain": 1.0}, {"provable": 1.0}, 6)


def test_masks_of_a_loss_can_be_given_in_cells() -> None:
    recipe = named("paper_cifar10_bn17_provable")
    guard = recipe.guard((32, 32), tuple("abcdefghij"))
    boxes = boxes_of_stages(recipe, guard, (32, 32), torch.device("cpu"))[1, False]
    assert len(boxes) == 17 * 17
    assert set((boxes[:, 1] - boxes[:, 0]).tolist()) == {6}


def test_images_are_held_out_by_number_or_by_share() -> None:
    assert cifar10().held_out_of(50_000) == 0
    assert tiny().changed({"held_out": 5000}).held_out_of(50_000) == 5000
    assert named("imagenette_bn17").held_out_of(9469) == 947
    assert cifar10().changed({"held_out": 0.25}).held_out_of(100) == 25
    assert named("imagenette_bn17").changed({"held_out": 30}).held_out_of(100) == 30


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="cifar10"):
        named("cifar")
