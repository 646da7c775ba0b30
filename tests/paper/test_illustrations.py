"""Illustrations of the paper: their numbers by hand, and against what the package derives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import oracle
from torch import nn

from patchguard.models import build
from patchguard.paper import EXPERIMENTS, inference_time, receptive_fields, toy_votes
from patchguard.paper.context import Context
from patchguard.paper.experiment import format_value, to_png

PNG = b"\x89PNG"


def test_experiments_that_need_no_data_are_known_by_name() -> None:
    without = [experiment.name for experiment in EXPERIMENTS.values() if not experiment.datasets]
    assert without == ["time", "center", "window_size", "toy_example"]


def test_whole_numbers_are_written_without_a_point() -> None:
    assert (format_value(2048), format_value(2048.0), format_value("yes")) == ("2,048", "2048.0", "yes")


# -- the toy example ---------------------------------------------------------------------------------------------------


def test_the_toy_example_has_the_papers_numbers() -> None:
    assert toy_votes.count_votes(toy_votes.VOTES) == (8, 3)
    attacked = toy_votes.rewrite(toy_votes.VOTES, toy_votes.worst_neighbors())
    assert toy_votes.count_votes(attacked) == (6, 5)
    assert len(toy_votes.worst_neighbors()) == 3
    assert toy_votes.masked_scores(attacked) == (4, 2)  # 6 - 2 and 5 - 3
    found = {name: margin for name, (margin,) in toy_votes.certify_votes([toy_votes.VOTES], 3).items()}
    assert found["DS, published proof"] == 5 - 2 * 3
    assert found["DS, exact proof"] == (6 - 2) - 3
    assert found["robust masking, T = 1"] == found["DS, exact proof"]
    assert found["robust masking, T = 0"] == (6 - 2) - (3 - 1)


def test_an_attack_on_any_cells_would_break_the_toy_example() -> None:
    anywhere = toy_votes.worst_anywhere()
    assert toy_votes.count_votes(toy_votes.rewrite(toy_votes.VOTES, anywhere)) == (5, 6)
    assert max(anywhere) - min(anywhere) >= 3  # no patch of three neighbors


def test_the_census_of_all_votes_agrees_with_trying_every_attack() -> None:
    cells, corrupted = 7, 2
    counted = toy_votes.count_certified(cells, corrupted)
    boxes = oracle.Geometry("line", (1, cells)).boxes((1, corrupted))
    stays = {"DS, exact proof": 0, "robust masking, T = 0": 0}
    rules = {"DS, exact proof": oracle.plain_sum, "robust masking, T = 0": oracle.robust_masking(boxes)}
    for number in range(2**cells):
        right = np.array([(number >> place) & 1 for place in range(cells)])
        for name, rule in rules.items():
            # Class 1 is the true one, so that a tie is lost: a certificate holds for either order of the classes.
            votes = np.stack([1 - right, right])
            stays[name] += rule(votes[None])[0] == 1 and not oracle.broken(votes, boxes, rule, 1, (0, 1)).any()
    assert {name: counted[name] for name in stays} == stays
    assert 0 < counted["DS, published proof"] <= stays["DS, exact proof"] < 2**cells


def test_of_all_votes_only_the_papers_example_tells_the_two_proofs_apart() -> None:
    counted = toy_votes.count_certified()
    assert counted["DS, exact proof"] == counted["DS, published proof"] + 1 == counted["robust masking, T = 0"]


# -- receptive fields --------------------------------------------------------------------------------------------------


def test_looks_are_counted_as_in_the_paper() -> None:
    assert receptive_fields.count_looks(receptive_fields.EXAMPLES[0]) == [1, 2, 3, 2, 1]
    assert receptive_fields.count_looks(receptive_fields.EXAMPLES[1]) == [1, 3, 6, 7, 6, 3, 1]
    assert receptive_fields.count_looks([(3, 2), (2, 1)]) == [1, 1, 2, 1, 1]
    assert len(receptive_fields.count_looks(receptive_fields.RESNET50_LATE)) == 483
    assert receptive_fields.central_pixels(receptive_fields.EXAMPLES[0]) == 3  # 7 of 9 looks; the centre alone has 3


def test_paths_are_those_of_the_networks() -> None:
    for layers, name in ((receptive_fields.BAGNET17, "bagnet17"), (receptive_fields.RESNET50, "resnet50")):
        found = []
        for place, layer in build(name, classes=2, width=0.02).named_modules():
            if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)) and "downsample" not in place:
                kernel, stride = (
                    each if isinstance(each, int) else each[0] for each in (layer.kernel_size, layer.stride)
                )
                found += [(kernel, stride)] if kernel > 1 else []
        assert tuple(found) == tuple(layers), name


def test_looks_of_a_network_of_ones_are_its_gradient() -> None:
    pixels = torch.ones(1, 1, 17, requires_grad=True)
    values = pixels
    for kernel, stride in receptive_fields.BAGNET17:
        values = torch.nn.functional.conv1d(values, torch.ones(1, 1, kernel), stride=stride)
    (gradient,) = torch.autograd.grad(values.sum(), pixels)
    assert gradient.flatten().tolist() == receptive_fields.count_looks(receptive_fields.BAGNET17)


@pytest.mark.parametrize(("field", "stride"), [(3, 4), (17, 8), (1, 1), (7, 1), (4, 4)])
def test_the_papers_equation_is_what_a_patch_reaches(field: int, stride: int) -> None:
    for patch in range(1, 30):
        assert receptive_fields.count_reached(patch, field, stride) == receptive_fields.window_equation(
            patch, field, stride
        )
    largest = receptive_fields.largest_patch(3, field, stride)
    assert largest == 3 * stride - field + 1 if 3 * stride >= field else largest == 1


@pytest.mark.slow
def test_the_equation_misses_what_enlarging_adds() -> None:
    found = {
        mode: case
        for case in receptive_fields.CASES
        for mode in ("nearest", "bilinear", "bicubic")
        if mode in case.name
    }
    assert [found[mode].derive() for mode in found] == [6, 7, 8]
    assert [found[mode].by_equation() for mode in found] == [6, 6, 6]


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_times_are_medians_of_rounds_and_ratios_to_the_bare_network() -> None:
    small = inference_time.Sizes(
        side=33, patch=2, band_side=32, band_patch=2, width=0.03, classes=3, batch=2, band_batch=1, rounds=1
    )
    found = inference_time.make_tables(torch.device("cpu"), small)
    paper, beside = found.tables
    assert [row.label for row in paper.rows] == ["ResNet-50", "BagNet-17", "DS-25-ResNet", "Mask-BN", "Mask-DS"]
    rows = {row.label: row for row in (*paper.rows, *beside.rows)}
    assert all(value > 0 for row in rows.values() for value in row.ours)
    assert rows["Mask-BN"].ours[1] == pytest.approx(rows["Mask-BN"].ours[0] / rows["BagNet-17"].ours[0])
    assert rows["Mask-BN"].published[:2] == (16.6, pytest.approx(16.6 / 12.1))


def test_the_first_round_is_not_counted() -> None:
    calls = []
    seconds = inference_time.time_in_turn(
        {name: (lambda name=name: calls.append(name)) for name in "ab"}, 2, torch.device("cpu")
    )
    assert calls == ["a", "b"] * 3
    assert [len(taken) for taken in seconds.values()] == [2, 2]


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["center", "toy_example"])
def test_illustrations_are_tables_and_pictures(name: str, tmp_path: Path) -> None:
    found = EXPERIMENTS[name].run(Context(cache=tmp_path), "")
    assert all(row.measured for table in found.tables for row in table.rows)
    for table in found.tables:
        for row in table.rows:
            for ours, theirs in zip(row.ours, row.published, strict=False):
                assert theirs is None or ours == theirs
    assert all(to_png(drawing).startswith(PNG) for drawing in found.figures.values())


def test_the_window_size_is_drawn() -> None:
    assert to_png(receptive_fields.draw_window).startswith(PNG)
