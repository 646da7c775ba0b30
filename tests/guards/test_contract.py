"""What every kind of guard inherits: the bisection over sides, and which masks a plan chooses for which patch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.toy_guard import Brightness
from torch import Tensor

from patchguard.errors import InputError
from patchguard.guard import Guard, bisect_sides
from patchguard.patch import Patch


@pytest.mark.parametrize("known", [(), (3,), (3, 7), (7,), (1, 2)])
def test_bisection_finds_the_largest_side_and_asks_known_ones_first(known) -> None:
    largest, asked = torch.arange(8), []

    def proves(rows: Tensor, side: int) -> Tensor:
        asked.append(side)
        return largest[rows] >= side

    assert bisect_sides(torch.zeros(8, dtype=torch.int64), 7, proves, known).tolist() == list(range(8))
    assert asked[0] == (max(known) if known else 4)
    assert all(asked.count(side) == 1 for side in known)
    assert 0 not in asked


@dataclass(frozen=True)
class Masked(Guard):
    """A guard whose masks have a size of their own; it remembers what they were fitted to."""

    masks: tuple[int, int] = (2, 2)
    fitted: tuple[int, int] | None = None  # the size of images that a refitted guard is for
    made_for: tuple[int, int] = (9, 6)
    most: int = 5  # wider patches are refused

    classes = 2
    digest = ""

    def predict(self, images: Tensor) -> Any:
        raise NotImplementedError

    def certify(self, images: Tensor, patch: Patch, label: Any = None, top_k: int = 1) -> Any:
        raise NotImplementedError

    def for_patch(self, patch: Patch, height: int, width: int) -> "Masked":
        return Masked((patch.height, patch.width), (height, width), (height, width))

    def fit_size(self, patch: Patch, height: int, width: int) -> Guard:
        return self if (height, width) == self.made_for else self.for_patch(patch, height, width)

    def covers(self, patch: Patch, height: int, width: int) -> bool:
        return patch.height <= self.masks[0] and patch.width <= self.masks[1]

    def validate(self, patch: Patch, height: int, width: int, top_k: int = 1) -> None:
        assert (height, width) == self.made_for
        if max(patch.height, patch.width) > self.most or top_k > 2:
            raise InputError(f"refused: {patch.height} x {patch.width}, top {top_k}")


def test_a_plan_keeps_the_masks_that_cover_a_patch_and_refits_the_others() -> None:
    guard = Masked()
    plan = guard.plan([Patch(2), Patch(1, 3)], 9, 6, sides=(1, 5, 6, 7), top_k=2)
    assert plan.guard is guard
    assert (plan.size, plan.largest, plan.top_k) == ((9, 6), 2, 2)
    assert [(task.patch, task.masks) for task in plan.tasks] == [(Patch(2), "own"), (Patch(1, 3), "refitted")]
    assert plan.tasks[0].guard is guard
    assert plan.tasks[1].guard == Masked((1, 3), (9, 6))
    # Side 6 is refused and left out of the curve; side 7 is wider than the image.
    assert plan.curve == ((1, Masked((1, 1), (9, 6))), (5, Masked((5, 5), (9, 6))))
    assert guard.plan([Patch(2)], 9, 6, largest=False).largest == 0


def test_masks_are_the_models_own_only_where_they_cover_the_patch_and_nobody_refitted_them() -> None:
    guard = Masked()
    assert guard.plan([Patch(1)], 9, 6, own=False).tasks[0].masks == "refitted"
    other = guard.plan([Patch(3), Patch(2)], 12, 8)  # images of another size: refitted to the first patch
    assert other.guard == Masked((3, 3), (12, 8), (12, 8))
    assert [(task.guard, task.masks) for task in other.tasks] == [(other.guard, "refitted")] * 2


def test_a_plan_with_a_patch_that_no_guard_certifies_is_refused() -> None:
    with pytest.raises(InputError, match="refused: 6 x 6, top 1"):
        Masked().plan([Patch(1), Patch(6)], 9, 6)
    with pytest.raises(InputError, match="refused: 1 x 1, top 3"):
        Masked().plan([Patch(1)], 9, 6, top_k=3)


def test_a_patch_must_fit_both_sides_and_only_the_best_class_is_proved_unless_a_guard_says_more() -> None:
    guard = Brightness()
    guard.validate(Patch(3, 8), 4, 8)
    guard.validate(Patch(8, 3), 8, 4)
    for patch, size in ((Patch(3, 5), (9, 4)), (Patch(5, 3), (4, 9))):
        with pytest.raises(InputError, match="must fit the image"):
            guard.validate(patch, *size)
    with pytest.raises(InputError, match="`top_k` must be 1 for Brightness; got 2"):
        guard.validate(Patch(1), 4, 8, top_k=2)
