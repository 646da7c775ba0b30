"""Positions: inside the image, where they were wanted, and touching the cells they are said to touch."""

import torch
from helpers.color_network import SIDE, color_guard
from helpers.small_guards import bagnet_guard

from patchguard.attacks.base import Draws, patch_mask
from patchguard.attacks.gradient_ascent import occlusion_scores
from patchguard.attacks.objectives import Goal, cross_entropy
from patchguard.attacks.positions import (
    owned_cells,
    positions_reaching,
    random_positions,
    salient_positions,
    sum_inside,
    top_positions,
)
from patchguard.guard import Prediction
from patchguard.patch import Patch


def test_random_places_reach_every_corner_and_never_leave() -> None:
    draws = Draws(0, tuple(range(400)), torch.device("cpu"))
    positions = random_positions(draws, Patch(5, 7), 6, 10)
    assert set(positions[:, 0, 0].tolist()) == {0, 1}
    assert set(positions[:, 0, 1].tolist()) == {0, 1, 2, 3}


def test_what_a_rectangle_holds_is_summed_at_every_position() -> None:
    saliency = torch.rand(2, 6, 5, generator=torch.Generator().manual_seed(0))
    held = sum_inside(saliency, Patch(2, 3))
    assert held.shape == (2, 5, 3)
    assert torch.allclose(held[1, 4, 2], saliency[1, 4:6, 2:5].sum())


def test_the_heaviest_places_come_first_and_several_rectangles_lie_apart() -> None:
    saliency = torch.zeros(1, 9, 9)
    saliency[0, 2, 2], saliency[0, 6, 7] = 3, 2
    first, second = salient_positions(saliency, Patch(2, count=2), 2, 2)
    assert first.tolist() == [[[2, 2], [6, 6]]]
    assert second.tolist()[0][0] == [6, 6]
    crowded = salient_positions(torch.ones(1, 2, 2), Patch(2, count=2), 3, 1)  # no room for two: they overlap
    assert [each.tolist() for each in crowded] == [[[[0, 0], [0, 0]]]]


def test_a_position_for_a_window_reaches_all_of_it() -> None:
    patch = Patch(2)
    for victim, side in ((color_guard("robust"), SIDE), (bagnet_guard(12), 12)):
        windows, field = victim.windows(patch, side, side), victim.field(side, side)
        boxes = torch.arange(len(windows))
        saliency = torch.rand(len(windows), side, side, generator=torch.Generator().manual_seed(0))
        positions = positions_reaching(boxes, windows, field, patch, lambda saliency=saliency: saliency)
        wanted = torch.stack([torch.from_numpy(windows.box_cells(box)).view(windows.grid) for box in boxes.tolist()])
        assert torch.equal(owned_cells(positions, field, patch), wanted)


def test_several_boxes_get_one_rectangle_each() -> None:
    victim = color_guard("robust")
    patch = Patch(2, count=2)
    windows, field = victim.windows(patch, SIDE, SIDE), victim.field(SIDE, SIDE)
    positions = positions_reaching(
        torch.tensor([[0, len(windows) - 1]]), windows, field, patch, lambda: torch.zeros(1, 12, 12)
    )
    assert positions.tolist() == [[[0, 0], [10, 10]]] or positions.shape == (1, 2, 2)
    owned = owned_cells(positions, field, patch)
    assert owned[0, 0, 0]
    assert owned[0, -1, -1]
    assert int(patch_mask(positions, patch, SIDE, SIDE).sum()) == 8


def test_tries_lie_apart_as_far_as_there_is_room() -> None:
    saliency = torch.zeros(1, 12, 12)
    saliency[0, 2:5, 2:5] = 9.0
    saliency[0, 7:10, 7:10] = 1.0
    first, second, third = (each[0, 0].tolist() for each in salient_positions(saliency, Patch(3), 3, 1))
    assert first == [2, 2]
    assert second == [7, 7]
    assert max(abs(third[0] - 2), abs(third[1] - 2)) >= 3
    crowded = salient_positions(torch.rand(1, 4, 4), Patch(3), 4, 1)  # four positions, all of which overlap
    assert len({tuple(each[0, 0].tolist()) for each in crowded}) == 4


class _Corner:
    """Class 0 by the mean of four pixels around (9, 3), class 1 by a constant."""

    def differentiable_logits(self, images: torch.Tensor) -> torch.Tensor:
        seen = images[:, :, 9:11, 3:5].mean((1, 2, 3))
        return torch.stack([seen, torch.full_like(seen, 0.5)], 1)[:, :, None, None]

    def predict(self, images: torch.Tensor) -> Prediction:
        scores = self.differentiable_logits(images)[:, :, 0, 0]
        return Prediction(label=scores.argmax(1), scores=scores.double())


def test_occlusion_is_worst_where_the_evidence_comes_from() -> None:
    images = torch.full((3, 3, 16, 16), 0.9)
    goal = Goal(target=torch.zeros(3, dtype=torch.int64), aim=None)
    scores = occlusion_scores(
        _Corner(), images, Patch(4), goal, lambda logits, some, rows, step: cross_entropy(logits, some), 1, 2, False
    )
    assert scores.shape == (3, 13, 13)
    whole = scores[:, 7:10, 1:4]  # positions whose rectangle holds all four pixels
    torch.testing.assert_close(whole, scores.amax((1, 2), keepdim=True).expand_as(whole))
    assert scores[0, 0, 12] < scores[0, 6, 0] < whole[0, 0, 0]
    first = top_positions(scores, Patch(4), 2, 1)[0]
    assert first[:, 0].tolist() == [[7, 1]] * 3
