"""Recipes: grouped settings that are validated, change by key, and read the words of earlier releases."""

import json
from pathlib import Path

import pytest

from patchguard.cli.train import read_assignments
from patchguard.errors import InputError
from patchguard.models import build
from patchguard.storage import zoo
from patchguard.training.objectives import build_guard
from patchguard.training.recipe import ALIASES, GROUPS, PATHS, Recipe, ScheduleSettings, read_recipe
from patchguard.training.recipes import RECIPES, cifar10, get_recipe, tiny

OLD = Path(__file__).parent / "recipe_0_1_0.json"  # as release 0.1.0 wrote it into cifar10.safetensors
NAMES = tuple("abcdefghij")


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_their_name_and_a_line_and_survive_json(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert RECIPES[name].summary.endswith(".")
    assert read_recipe(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="cifar10"):
        get_recipe("cifar")


@pytest.mark.parametrize("dataset", ["imagenette", "imagenet", "flowers", "cats_vs_dogs", "cifar10"])
def test_the_paper_retrains_bagnets_twice(dataset: str) -> None:
    first, second = get_recipe(f"paper_{dataset}_bn17"), get_recipe(f"paper_{dataset}_bn17_provable")
    for recipe in (first, second):
        assert (recipe.data.dataset, recipe.model.name) == (dataset, "bagnet17")
        assert (recipe.schedule.epochs, recipe.optimizer.batch_size) == (20, 64)
        assert (recipe.optimizer.momentum, recipe.optimizer.nesterov) == (0.9, False)
    assert second.model.init_from == first.name
    assert (first.loss.weights, second.loss.weights) == ({"plain": 1.0}, {"provable": 1.0})
    assert second.loss.mask_cells == 6


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("cifar10", (11, 11)),
        ("cifar10_mask_ds", (1, 8)),
        pytest.param("cifar10_mask_bn17", (8, 8), marks=pytest.mark.slow),
        pytest.param("cifar10_mask_bn17_nearest", (6, 6), marks=pytest.mark.slow),
        pytest.param("imagenette_bn17", (6, 6), marks=pytest.mark.slow),
        pytest.param("paper_imagenette_ds", (1, 66), marks=pytest.mark.slow),
    ],
)
def test_recipes_make_guards_with_masks_for_their_patch(name: str, window: tuple[int, int]) -> None:
    recipe = get_recipe(name)
    thin = {"settings.widths": [8] * 6} if recipe.model.name == "srf" else {"settings.width": 0.05}
    guard = build_guard(recipe.override(thin), recipe.source_size, NAMES)
    assert guard.class_names == NAMES
    masks = guard.defense.masks
    assert tuple(max(stop - start for start, stop in axis) for axis in (masks.rows, masks.columns)) == window


def test_the_default_has_at_most_six_million_parameters() -> None:
    model = build(cifar10().model.name, **cifar10().model.settings)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 6_000_000


def test_a_recipe_makes_a_guard_with_its_tau() -> None:
    assert build_guard(tiny().override({"tau": 2}), (16, 16), ("a", "b", "c")).defense.tau == 2
    assert build_guard(tiny(), (16, 16), ("a", "b", "c")).defense.tau == 0


def test_images_are_held_out_by_number_or_by_fraction() -> None:
    assert cifar10().count_held_out(50_000) == 0
    assert tiny().override({"held_out": 5000}).count_held_out(50_000) == 5000
    assert get_recipe("imagenette_bn17").count_held_out(9469) == 947
    assert cifar10().override({"held_out": 0.25}).count_held_out(100) == 25


# -- changes -----------------------------------------------------------------------------------------------------------


def test_no_two_groups_share_the_name_of_a_setting() -> None:
    names = [name for kind in GROUPS.values() for name in kind.__struct_fields__ if name != "name"]
    assert len(names) == len(set(names))
    assert not set(names) & (set(Recipe.__struct_fields__) | set(ALIASES))


def test_settings_change_one_by_one_with_their_group_or_alone() -> None:
    texts = ["schedule.max_lr=0.5", "epochs=7", "optimizer.name=adamw", "patch=[2, 3]", "mask_steps=[[0, 3]]"]
    texts += ["clip_grad_norm=null", "loss.weights.plain=0.1", "model.settings.field=9", 'guard={"low": 0}']
    recipe = cifar10().override(read_assignments(texts))
    assert (recipe.schedule.max_lr, recipe.schedule.epochs, recipe.optimizer.name) == (0.5, 7, "adamw")
    assert (recipe.patch.height, recipe.patch.width, recipe.loss.mask_steps) == (2, 3, ((0.0, 3),))
    assert recipe.optimizer.clip_grad_norm is None
    assert recipe.loss.weights == {**cifar10().loss.weights, "plain": 0.1}
    assert recipe.model.settings == {**cifar10().model.settings, "field": 9}
    assert (recipe.guard.low, recipe.guard.tau) == (0.0, cifar10().guard.tau)


def test_two_recipes_are_compared_setting_by_setting() -> None:
    changed = tiny().override({"seed": 1, "max_lr": 0.5, "weights.plain": 2, "model.name": "bagnet9"})
    assert set(changed.differences(tiny())) == {"seed", "schedule.max_lr", "loss.weights", "model.name"}
    assert tiny().differences(tiny()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "no setting 'epoch'. Did you mean 'epochs'"),
        ({"loss.epochs": 3}, "no setting 'loss.epochs'"),
        ({"schedule": {"epoch": 3}}, "no setting 'schedule.epoch'. Did you mean 'epochs'"),
        ({"seed.x": 1}, "no setting 'seed.x'"),
        ({"epochs": 0}, "`schedule.epochs` must be a whole number of at least 1; got 0"),
        ({"epochs": 1.5}, "`schedule.epochs` must be a whole number of at least 1; got 1.5"),
        ({"max_lr": "high"}, '`schedule.max_lr` must be a number of at least 0; got "high"'),
        ({"flip": 1}, "`augmentation.flip` must be true or false; got 1"),
        ({"mask_steps": 4}, "`loss.mask_steps` must be a value like .*; got 4"),
        ({"mask_steps": [[0, 1.5]]}, "`loss.mask_steps` must be a value like"),
        ({"mask_steps": [[0.5, 2]]}, "`loss.mask_steps` must be pairs.*rise from 0"),
        ({"mask_steps": [[0, 0]]}, "steps of at least 1"),
        ({"weights": {"double": 1}}, "`loss.weights` must name known losses.*double_masking"),
        ({"weights": {"plain": 0}}, "at least 0, and some above 0"),
        ({"weights.plain": -1}, "`loss.weights` must be a value like"),
        ({"tau": -0.5}, "`guard.tau` must be a number of at least 0 and at most 16777216; got -0.5"),
        ({"tau": 1.0, "defense": "RobustMasking"}, "`guard.tau` must be 0 unless .* DoubleMasking; got 1.0 with"),
        ({"defense": "Median"}, "`guard.defense` must be one of DoubleMasking,.*RobustMasking"),
        ({"optimizer.name": "adam"}, '`optimizer.name` must be one of adamw, sgd; got "adam"'),
        ({"ema_decay": 1.0}, "`optimizer.ema_decay` must be a number of at least 0 and below 1; got 1.0"),
        ({"clip_grad_norm": 0}, "`optimizer.clip_grad_norm` must be a number above 0 or null; got 0"),
        ({"patch": 0}, "at least 1"),
        ({"patch": {"heigth": 3}}, "`patch` must be a side"),
        ({"evidence": "tanh"}, "`guard.evidence` must be one of confidence, logits"),
        ({"crop_scale": [0.9, 0.5]}, "`augmentation.crop_scale` must be two fractions"),
        ({"crop_scale": [1]}, "`augmentation.crop_scale` must be 2 numbers in a list or null"),
        ({"temperature": 0.0}, "`loss.temperature` must be a number above 0"),
        ({"input_size": 0}, "`guard.input_size` must be a whole number of at least 1 or null"),
        ({"held_out": 1.5}, "`evaluation.held_out` must be a whole number.*or a number.*below 1"),
        ({"held_out": -1}, "`evaluation.held_out` must be a whole number of at least 0"),
        ({"lr_milestones": [0.7, 0.5]}, "`schedule.lr_milestones` must be rising"),
        ({"lr_gamma": 2.0}, "`schedule.lr_gamma` must be a number of at least 0 and at most 1; got 2.0"),
        ({"drift": float("nan")}, "`guard.drift` must be a number of at least 0; got NaN"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cifar10().override(change)


@pytest.mark.parametrize(
    "changes",
    [{"weights": {"local": 1.0}}, {"regions": 0}, {"input_size": 32}, {"defense": "Undefended"}],
    ids=lambda each: next(iter(each)),
)
def test_settings_that_do_not_fit_interval_bounds_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="IntervalBounds"):
        get_recipe("cifar10_ibp_2").override(changes)


def test_groups_made_in_python_check_themselves() -> None:
    with pytest.raises(InputError, match="lr_milestones"):
        ScheduleSettings(lr_milestones=(0.5, 0.2))


# -- earlier releases --------------------------------------------------------------------------------------------------


def test_a_recipe_in_the_words_of_an_earlier_release_is_read() -> None:
    old = json.loads(OLD.read_text())
    assert {"plain_share", "thin_share", "peak_rate", "mixing", "colour", "trust"} <= old.keys()
    assert read_recipe(old) == cifar10()


def test_every_old_name_leads_to_a_setting_of_another_name() -> None:
    recipe = cifar10().to_json()
    for old in json.loads(OLD.read_text()):
        *groups, name = PATHS[old]
        assert name in (recipe[groups[0]] if groups else recipe)
    assert all(PATHS[old] == PATHS[new] for old, new in ALIASES.items())


def test_old_names_still_work_on_the_command_line() -> None:
    old = ["peak_rate=0.1", "optimizer=adamw", "model=bagnet9", "model_settings.width=0.5", "initial=mine"]
    old += ["crop=[0.5,1]"]
    new = ["schedule.max_lr=0.1", "optimizer.name=adamw", "model.name=bagnet9", "model.settings.width=0.5"]
    new += ["model.init_from=mine", "augmentation.crop_scale=[0.5,1]"]
    assert tiny().override(read_assignments(old)) == tiny().override(read_assignments(new))


@pytest.mark.parametrize("name", [name for name in zoo.PUBLISHED if zoo.recipe(name)])
def test_the_recipe_of_every_published_model_is_read(name: str) -> None:
    assert read_recipe(zoo.recipe(name)).name == name
