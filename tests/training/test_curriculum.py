import itertools

import pytest

from patchguard.errors import InputError
from patchguard.training.curriculum import coarse, rate, shares, stage_at, stages
from patchguard.training.recipe import RECIPES, cifar10, named, tiny
from patchguard.windows import Windows

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


FINER = {"plain_share": 0.2, "mask_steps": [[0.0, 4], [0.6, 2]]}


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
    assert [stage.mask_step for stage in stages(cifar10().changed({"plain_share": 0}))] == [4, 2]
    assert [stage.mask_step for stage in stages(cifar10().changed({"plain_share": 1}))] == [None]


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
def test_recipes_are_named_after_their_functions_and_make_guards(name: str) -> None:
    recipe = named(name)
    assert recipe.name == name
    guard = recipe.guard((32, 32), tuple("abcdefghij"))
    assert guard.class_names == tuple("abcdefghij")
    assert recipe.changed({key: value for key, value in recipe.to_json().items() if key != "patch"}) == recipe


def test_the_default_has_at_most_six_million_parameters() -> None:
    guard = cifar10().guard((32, 32), tuple("abcdefghij"))
    assert sum(parameter.numel() for parameter in guard.model.parameters()) <= 6_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "no setting 'epoch'.*epochs"),
        ({"epochs": 0}, "epochs.*at least 1"),
        ({"epochs": 1.5}, "epochs.*like 80; got 1.5"),
        ({"peak_rate": "high"}, "peak_rate.*like 0.3"),
        ({"flip": 1}, "flip.*like true"),
        ({"mask_steps": 4}, "mask_steps.*got 4"),
        ({"mask_steps": [[0, 1.5]]}, "mask_steps"),
        ({"weights": {"double": 1}}, "double_masking"),
        ({"weights.plain": -1}, "at least 0"),
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
    assert recipe.weights == {"double_masking": 0.7, "plain": 0.1}


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="cifar10"):
        named("cifar")
