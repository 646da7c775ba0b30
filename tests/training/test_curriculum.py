"""The stages of training and the learning rate."""

import itertools

import pytest

from patchguard.training.curriculum import learning_rate, plan_stages, stage_at, stage_fractions
from patchguard.training.recipes import cifar10, get_recipe, tiny

FINER = {"subsample_fraction": 0, "warmup_fraction": 0.2, "mask_steps": [[0.0, 4], [0.6, 2]]}


def test_the_warmup_is_plain_and_masks_then_get_finer() -> None:
    recipe = cifar10().override(FINER)
    assert [stage.mask_step for stage in plan_stages(recipe)] == [None, 4, 2]
    steps = [stage_at(recipe, progress).mask_step for progress in (0.0, 0.19, 0.2, 0.59, 0.6, 0.99)]
    assert steps == [None, None, 4, 4, 2, 2]
    assert sum(fraction for _, fraction in stage_fractions(recipe)) == pytest.approx(1)


@pytest.mark.parametrize(("warmup", "steps"), [(0.7, [None, 2]), (0, [4, 2]), (1, [None])])
def test_of_stages_inside_the_warmup_only_the_last_remains(warmup: float, steps: list[int | None]) -> None:
    recipe = cifar10().override({**FINER, "warmup_fraction": warmup})
    assert [stage.mask_step for stage in plan_stages(recipe)] == steps


def test_the_stage_in_which_subsampling_ends_is_split_in_two() -> None:
    def plan(fraction: float) -> list[tuple[float, int | None, bool]]:
        recipe = cifar10().override({**FINER, "subsample_fraction": fraction})
        assert sum(part for _, part in stage_fractions(recipe)) == pytest.approx(1)
        return [(stage.start, stage.mask_step, stage.subsampled) for stage in plan_stages(recipe)]

    dense = [(0.0, None, False), (0.2, 4, False), (0.6, 2, False)]
    assert plan(0) == dense
    assert plan(1) == [(start, step, True) for start, step, _ in dense]
    assert plan(0.2) == [(0.0, None, True), *dense[1:]]
    assert plan(0.4) == [(0.0, None, True), (0.2, 4, True), (0.4, 4, False), (0.6, 2, False)]
    assert plan(0.7) == [(0.0, None, True), (0.2, 4, True), (0.6, 2, True), (0.7, 2, False)]


def test_the_radius_of_interval_bounds_rises_after_the_warmup() -> None:
    recipe = get_recipe("cifar10_ibp_5").override({"warmup_fraction": 0.2, "ramp": 0.4})
    radii = [round(stage_at(recipe, progress).radius, 3) for progress in (0.0, 0.2, 0.4, 0.6, 0.9)]
    assert radii == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert stage_at(tiny(), 0.0).radius == 1.0


def test_one_cycle_rises_to_its_maximum_and_falls_to_almost_nothing() -> None:
    schedule = cifar10().schedule
    rates = [learning_rate(schedule, step / 1000) for step in range(1000)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(schedule.max_lr)
    assert rates.index(max(rates)) == 150
    assert all(a > b for a, b in itertools.pairwise(rates[150:]))
    assert rates[-1] < 2e-3 * schedule.max_lr


def test_the_step_schedule_multiplies_by_gamma_at_each_milestone() -> None:
    schedule = tiny().override({"schedule.name": "step", "lr_warmup_fraction": 0, "max_lr": 1.0}).schedule
    assert [learning_rate(schedule, p) for p in (0.0, 0.49, 0.5, 0.75)] == pytest.approx([1, 1, 0.1, 0.01])


def test_the_paper_divides_the_learning_rate_by_ten_after_ten_of_twenty_epochs() -> None:
    recipe = get_recipe("paper_cifar10_resnet50")
    epochs = recipe.schedule.epochs
    rates = [learning_rate(recipe.schedule, epoch / epochs) for epoch in range(epochs)]
    assert rates == pytest.approx([0.01] * 10 + [0.001] * 10)
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 5e-4)
    constant = get_recipe("paper_imagenette_bn17").schedule
    assert {learning_rate(constant, progress) for progress in (0.0, 0.5, 0.99)} == {0.001}
