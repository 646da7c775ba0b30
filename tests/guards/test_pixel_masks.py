"""PixelMaskGuard against every classifier there is on a few masks, and its contract."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers.small_guards import srf_guard
from helpers.table_classifier import TableClassifier
from torch import nn

import patchguard as pg
from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.guards import mask_rounds, pixel_masks
from patchguard.guards.classifier import NumpyFunction
from patchguard.guards.pixel_masks import PixelMaskGuard, defend
from patchguard.patch import Patch

FILL = (0.5, 0.25, 0.75)


# -- the oracle --------------------------------------------------------------------------------------------------------


def find_counterexamples(table: TableClassifier, guard: PixelMaskGuard, patch: Patch) -> tuple[int, int, int]:
    """Return how many tables are certified, how many are not, and how many attacks change a certified label.

    An image x is its table. An attack on a position makes another image, whose table may be any that agrees with x's
    behind the masks that together hide the position. All of them are tried.
    """
    certificate = guard.certify(table.images, patch)
    said = guard.predict(table.images).label.tolist()
    height, width = table.masks.size
    attacks = []
    for top, left in product(range(height - patch.height + 1), range(width - patch.width + 1)):
        pixels = set(product(range(top, top + patch.height), range(left, left + patch.width)))
        kept = table.agreeing(pixels)
        answers: dict[tuple[int, ...], set[int]] = {}
        for other, label in zip(table.tables, said, strict=True):
            answers.setdefault(tuple(other[number] for number in kept), set()).add(label)
        attacks.append((kept, answers))
    certified, broken = certificate.certified.tolist(), 0
    for each, holds, label in zip(table.tables, certified, certificate.label.tolist(), strict=True):
        if holds:
            broken += any(answers[tuple(each[number] for number in kept)] != {label} for kept, answers in attacks)
    return sum(certified), len(certified) - sum(certified), broken


def make_table(masks: MaskSet, classes: int) -> tuple[TableClassifier, PixelMaskGuard]:
    table = TableClassifier(masks, FILL, classes)
    return table, PixelMaskGuard(classifier=table.wrap(), masks=masks, fill=FILL, drift=0.0)


THREE = MaskSet.covering((1, 12), Patch(1, 2), 3)
FOUR = MaskSet.covering((2, 12), Patch(2, 2), 4)


@pytest.mark.parametrize(("masks", "classes", "patch"), [(THREE, 3, Patch(1, 2)), (FOUR, 2, Patch(2, 2))])
def test_no_classifier_and_no_attack_changes_a_certified_label(masks, classes, patch) -> None:
    table, guard = make_table(masks, classes)
    certified, rest, broken = find_counterexamples(table, guard, patch)
    assert broken == 0
    assert certified >= classes
    assert rest > certified


def test_a_smaller_patch_needs_fewer_masks_and_more_is_certified() -> None:
    table, guard = make_table(FOUR, 2)
    large, _, _ = find_counterexamples(table, guard, Patch(2, 2))
    small, _, broken = find_counterexamples(table, guard, Patch(1, 1))
    assert broken == 0
    assert small >= large


def test_where_masks_overlap_enough_one_of_them_may_fail() -> None:
    masks = MaskSet(THREE.size, (*THREE.boxes, (0, 2, 1, 4)))  # the last one is not needed
    table, guard = make_table(masks, 2)
    certified, _, broken = find_counterexamples(table, guard, Patch(1, 2))
    assert broken == 0
    assert certified > 2  # more than the tables in which all pairs agree


def without_single_masks(lead, covering):
    """The diagonal is missing: only pairs of different masks count."""
    pairs = np.where(np.eye(len(lead), dtype=bool), np.inf, lead)
    return bool((covering & (pairs.min(1) > 0)).any(1).all())


def plain_majority(rounds):
    """The majority answers, before anybody asks whether all agree or a mask is to be believed."""
    votes = nn.functional.one_hot(rounds.labels, rounds.single.shape[2]).sum(1)
    return votes.argmax(1)


def test_the_oracle_notices_an_uncovered_position(monkeypatch) -> None:
    masks = MaskSet(THREE.size, (THREE.boxes[0], THREE.boxes[2]))
    table, guard = make_table(masks, 3)
    assert not guard.covers(Patch(1, 2), 1, 12)
    with pytest.raises(InputError, match="6 masks of 1 x 3 pixels would cover it"):
        guard.certify(table.images[:1], Patch(1, 2))
    monkeypatch.setattr(MaskSet, "positions", lambda self, patch: _serve_everywhere(self, patch))
    _, _, broken = find_counterexamples(table, guard, Patch(1, 2))
    assert broken > 0


def _serve_everywhere(masks, patch):
    real = MASK_POSITIONS(masks, patch)
    return type(real)(real.covering | ~real.covering.any(1, keepdims=True), real.number)


MASK_POSITIONS = MaskSet.positions


def test_the_oracle_notices_a_missing_diagonal(monkeypatch) -> None:
    table, guard = make_table(THREE, 3)
    diagonal = np.eye(len(THREE.boxes), dtype=bool)
    monkeypatch.setattr(
        mask_rounds.PairLeads, "worst", property(lambda self: np.where(diagonal, np.inf, self.lead).min(2))
    )
    monkeypatch.setattr(mask_rounds, "is_proved", without_single_masks)
    _, _, broken = find_counterexamples(table, guard, Patch(1, 2))
    assert broken > 0


def test_the_oracle_notices_a_majority_that_nobody_may_contradict(monkeypatch) -> None:
    table, guard = make_table(THREE, 3)
    monkeypatch.setattr(pixel_masks, "recover_label", plain_majority)
    _, _, broken = find_counterexamples(table, guard, Patch(1, 2))
    assert broken > 0


def test_the_oracle_notices_masks_that_are_believed_without_a_second_round(monkeypatch) -> None:
    table, guard = make_table(THREE, 3)
    monkeypatch.setattr(pixel_masks, "find_believed", lambda rounds, deviating: [True] * len(deviating))
    _, _, broken = find_counterexamples(table, guard, Patch(1, 2))
    assert broken > 0


@pytest.mark.parametrize(("masks", "classes"), [(THREE, 3), (FOUR, 2)])
def test_the_label_is_what_the_rule_says(masks, classes) -> None:
    table, guard = make_table(masks, classes)
    count = len(masks.boxes)
    said = guard.predict(table.images).label.tolist()
    for answers, label in zip(table.tables, said, strict=True):
        by_pair = dict(zip(table.pairs, answers, strict=True)) | {
            (other, one): answer for (one, other), answer in zip(table.pairs, answers, strict=True)
        }
        single = [by_pair[mask, mask] for mask in range(count)]
        majority = max(range(classes), key=lambda each: (single.count(each), -each))
        believed = {
            single[mask]
            for mask in range(count)
            if single[mask] != majority and all(by_pair[mask, other] == single[mask] for other in range(count))
        }
        assert len(believed) <= 1
        assert label == (believed or {majority}).pop()


# -- the contract ------------------------------------------------------------------------------------------------------


class Blobs(nn.Module):
    """Which third of the image is brightest, softly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.calls = 0

    def forward(self, images):
        self.calls += len(images)
        return self.weight * nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), (1, 3)).flatten(1)


def make_images(count: int = 6) -> torch.Tensor:
    images = 0.2 * torch.rand(count, 3, 12, 18, generator=torch.Generator().manual_seed(1))
    for number in range(count):
        third = number % 3
        images[number, :, :, 6 * third : 6 * third + 6] += 0.1 * number
    return images


def test_any_torch_module_is_defended_and_every_certificate_withstands_an_attack() -> None:
    guard = pg.defend(Blobs(), Patch(3), size=(12, 18), masks=4, class_names=("left", "middle", "right"))
    images = make_images(9)
    certificate = guard.certify(images, Patch(3))
    assert certificate.label.tolist() == guard.predict(images).label.tolist()
    assert {True, False} == set(certificate.certified.tolist())
    from patchguard.attacks import build

    for name in ("colors", "noise"):
        result = build(name)(guard, images, certificate.label, Patch(3))
        assert not bool((result.broken & certificate.certified).any())


def test_a_row_of_a_batch_is_the_image_alone() -> None:
    guard = defend(Blobs(), Patch(3), size=(12, 18), masks=3)
    images = make_images()
    together = guard.certify(images, Patch(3))
    for row in range(len(images)):
        alone = guard.certify(images[row : row + 1], Patch(3))
        assert int(alone.label) == int(together.label[row])
        assert bool(alone.certified) == bool(together.certified[row])


def test_a_certified_image_costs_one_pass_per_mask_and_pair_and_another_fewer() -> None:
    network = Blobs()
    guard = defend(network, Patch(3), size=(12, 18), masks=4, batch_size=8)
    masks = len(guard.masks.boxes)
    images = make_images(9)
    costs = {}
    for row, holds in enumerate(guard.certify(images, Patch(3)).certified.tolist()):
        network.calls = 0
        guard.certify(images[row : row + 1], Patch(3), guard.undefended(images[row : row + 1]))
        costs.setdefault(holds, []).append(network.calls - 1)
    assert set(costs[True]) == {masks + masks * (masks - 1) // 2}
    assert max(costs[False]) < costs[True][0]


def test_labels_near_a_tie_do_not_count_as_agreeing() -> None:
    images = make_images(9)
    sure = defend(Blobs(), Patch(3), size=(12, 18), masks=4, drift=0.0).certify(images, Patch(3))
    charged = defend(Blobs(), Patch(3), size=(12, 18), masks=4, drift=0.02).certify(images, Patch(3))
    held = sure.certified & charged.certified
    assert torch.allclose(charged.margin[held], sure.margin[held] - 0.04)
    lost = sure.certified & ~charged.certified
    assert bool((sure.margin[lost] <= 0.04 + 1e-12).all())
    assert bool(held.any())


def test_scores_that_are_not_finite_prove_nothing() -> None:
    def shaky(images):
        scores = torch.zeros(len(images), 3)
        scores[:, 1] = torch.where(images.mean((1, 2, 3)) > 0.5, torch.inf, 1.0)
        return scores

    guard = defend(shaky, Patch(2), size=(8, 8), masks=2)
    images = torch.stack([torch.full((3, 8, 8), 0.9), torch.full((3, 8, 8), 0.1)])
    certificate = guard.certify(images, Patch(2))
    assert certificate.label.tolist() == [1, 1]
    assert certificate.certified.tolist() == [False, True]


def test_the_largest_certified_patch_is_certified_and_one_more_is_not() -> None:
    guard = defend(Blobs(), Patch(5), size=(12, 18), masks=3)
    images = make_images(9)
    sides = guard.largest_certified_patch(images)
    limit = guard.largest_covered_side(12, 18)
    assert limit == 5
    assert len(set(sides.tolist())) > 1
    for side in range(1, limit + 1):
        certified = guard.certify(images, Patch(side)).certified
        assert certified.tolist() == (sides >= side).tolist()


def test_one_examination_answers_a_whole_plan() -> None:
    guard = defend(Blobs(), Patch(3), size=(12, 18), masks=3)
    images = make_images(9)
    plan = guard.plan([Patch(3), Patch(1), Patch(4)], 12, 18, sides=[1, 2])
    assert [task.masks for task in plan.tasks] == ["own", "own", "refitted"]
    examination = guard.examine(images, plan)
    assert examination.curve == ()
    for task, certificate in zip(plan.tasks, examination.certificates, strict=True):
        alone = task.guard.certify(images, task.patch)
        assert certificate.certified.tolist() == alone.certified.tolist()
        assert torch.equal(certificate.margin[alone.certified], alone.margin[alone.certified])
    assert torch.equal(examination.largest, guard.largest_certified_patch(images))
    assert torch.equal(examination.undefended, guard.undefended(images))


def test_masks_are_refitted_to_images_of_another_size() -> None:
    guard = defend(Blobs(), Patch(3), size=(12, 18), masks=3)
    other = guard.fit_size(Patch(3), 24, 18)
    assert (other.masks.size, other.masks.per_axis) == ((24, 18), 3)
    assert guard.fit_size(Patch(3), 12, 18) is guard
    with pytest.raises(InputError, match="12 x 18 pixels that the masks are made for"):
        guard.predict(torch.rand(1, 3, 24, 18))


def test_every_setting_and_every_tensor_is_part_of_the_digest() -> None:
    def make(**settings) -> str:
        return defend(settings.pop("network", Blobs()), Patch(3), size=(12, 18), **({"masks": 3} | settings)).digest

    other = Blobs()
    with torch.no_grad():
        other.weight += 1
    digests = [make(), make(masks=4), make(fill=(0.0, 0.0, 0.0)), make(drift=0.1), make(network=other)]
    assert len(set(digests)) == len(digests)
    assert make() == digests[0]


def test_a_numpy_function_is_a_classifier_and_its_name_stands_for_it() -> None:
    def thirds(images: np.ndarray) -> np.ndarray:
        assert isinstance(images, np.ndarray)
        return images.mean((1, 2)).reshape(len(images), 3, -1).mean(2) * 3

    images = make_images()
    named = defend(NumpyFunction(thirds, "thirds 1"), Patch(3), size=(12, 18), masks=3)
    assert torch.equal(
        named.predict(images).label, defend(Blobs(), Patch(3), size=(12, 18), masks=3).predict(images).label
    )
    assert named.digest != defend(NumpyFunction(thirds, "thirds 2"), Patch(3), size=(12, 18), masks=3).digest
    with pytest.raises(InputError, match="`name` must say which classifier"):
        defend(NumpyFunction(thirds), Patch(3), size=(12, 18), masks=3).digest  # noqa: B018
    with pytest.raises(InputError, match="no gradients"):
        named.classifier.differentiate(images)


def test_networks_and_guards_of_the_package_are_classifiers_too() -> None:
    network = replace(srf_guard(), class_names=("apple", "bread", "cheese"))
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    guard = defend(network, Patch(5), size=(16, 16), masks=2)
    assert guard.class_names == network.class_names
    assert guard.fill == tuple(network.model.normalize.config()["mean"])
    assert torch.equal(guard.undefended(images), network.local_logits(images).mean((2, 3)).argmax(1))
    assert defend(network.model, Patch(5), size=(16, 16), masks=2).classes == 3


def draw_noise(images):
    return torch.rand(len(images), 3)


def compare_within_batch(images):
    return torch.stack([images.mean((1, 2, 3)) * len(images), images.amax((1, 2, 3))], 1)


def refuse_single_images(images):
    if len(images) == 1:
        raise RuntimeError("batches of one are not supported")
    return images.mean((2, 3))


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        (draw_noise, "function of single images; when called again"),
        (compare_within_batch, "function of single images; on one image alone"),
        (refuse_single_images, "it stopped with: batches of one are not supported"),
        (lambda images: images, r"must return scores \(3, classes\) for 3 images; got \(3, 3, 8, 8\)"),
        (lambda images: images.mean((1, 2, 3))[:, None], "scores of two or more classes; got 1"),
        (lambda images: images.mean((2, 3))[:1], r"must return scores \(3, classes\)"),
    ],
)
def test_what_is_no_function_of_single_images_is_refused(classifier, message) -> None:
    with pytest.raises(InputError, match=message):
        defend(classifier, Patch(2), size=(8, 8), masks=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masks": 0}, "`masks` must be"),
        ({"drift": -1.0}, "`drift` must be"),
        ({"drift": float("nan")}, "`drift` must be"),
        ({"fill": (0.0, 2.0, 0.0)}, "`fill` must be"),
        ({"class_names": ("one",)}, "`class_names` must name the 3 classes"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"masks": MaskSet((12, 18), ((0, 0, 12, 9), (0, 9, 12, 9)))}, "30 masks of 4 x 5 pixels would cover it"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message) -> None:
    with pytest.raises(InputError, match=message):
        defend(Blobs(), Patch(3), size=(12, 18), **settings)


def test_a_patch_or_label_that_cannot_be_certified_is_refused() -> None:
    guard, images = defend(Blobs(), Patch(3), size=(12, 18), masks=3), make_images()
    for patch, message in (
        (Patch(13), "must fit the image"),
        (Patch(5), "would cover it"),
        (Patch(2, count=2), "single"),
    ):
        with pytest.raises(InputError, match=message):
            guard.certify(images, patch)
    with pytest.raises(InputError, match="top_k"):
        guard.certify(images, Patch(3), top_k=2)
    with pytest.raises(InputError, match="`label` must be a class number from 0 to 2"):
        guard.certify(images, Patch(3), 3)
    with pytest.raises(InputError, match="size"):
        defend(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), Patch(2), size=(8, 8), masks=2).prepare(9, 9)
