"""Rounds of masked images: what is asked, how often, and how far drift moves a confidence."""

import jaxtyping
import pytest
import torch
from torch import nn

from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.guards.classifier import Classifier
from patchguard.guards.mask_rounds import MaskRounds
from patchguard.guards.pixel_masks import defend
from patchguard.patch import Patch

FILL = (0.5, 0.25, 0.75)


class Thirds(nn.Module):
    """How bright each third of an image is; counts the images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.images = 0

    def forward(self, images):
        self.images += len(images)
        return self.weight * nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), (1, 3)).flatten(1)


def make_images(count: int) -> torch.Tensor:
    images = 0.2 * torch.rand(count, 3, 12, 18, generator=torch.Generator().manual_seed(1))
    for number in range(count):
        images[number, :, :, 6 * (number % 3) : 6 * (number % 3) + 6] += 0.1 * number
    return images


def test_what_was_asked_for_one_patch_is_not_asked_again() -> None:
    network = Thirds()
    guard = defend(network, Patch(3), size=(12, 18), masks=3)
    answers = guard._ask(make_images(9))
    certificate = answers.certificate(Patch(3))
    assert {True, False} == set(certificate.certified.tolist())
    asked = network.images
    again = answers.certificate(Patch(3))
    assert network.images == asked
    assert torch.equal(again.margin, certificate.margin)
    masks = len(guard.masks.boxes)
    proved = answers.certificate(Patch(2)).certified & certificate.certified
    assert bool(proved.any())
    known = torch.from_numpy(answers.leads.lead).isfinite().sum((1, 2))
    assert set(known[proved].tolist()) == {masks * masks}


def test_black_and_white_masks_are_taken_and_one_image_shows_that_a_size_is() -> None:
    network = Thirds()
    guard = defend(network, Patch(3), size=(12, 18), masks=2, fill=(0.0, 1.0, 1.0))
    network.images = 0
    guard.prepare(12, 18)
    assert network.images == 1
    assert guard.certify(make_images(1), Patch(3)).margin.isfinite().all()


def test_scores_that_tie_prove_nothing_however_small_the_patch() -> None:
    guard = defend(lambda images: torch.zeros(len(images), 3), Patch(3), size=(12, 18), masks=2, drift=0.0)
    images = make_images(2)
    assert guard.certify(images, Patch(1)).margin.tolist() == [0.0, 0.0]
    assert guard.largest_certified_patch(images).tolist() == [0, 0]


def test_what_is_no_batch_of_images_is_refused_by_every_question(monkeypatch) -> None:
    guard = defend(Thirds(), Patch(3), size=(12, 18), masks=2)
    for ask in (guard.predict, lambda images: guard.certify(images, Patch(3)), guard.largest_certified_patch):
        with pytest.raises(InputError, match=r"must lie in \[0, 1\]"):
            ask(make_images(2) + 1.5)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # only tests check types
    with pytest.raises(InputError, match="`images` must"):
        guard.certify(torch.rand(3), Patch(3))


def test_the_model_is_the_torch_module_and_a_function_has_none() -> None:
    network = Thirds()
    assert defend(network, Patch(3), size=(12, 18), masks=2).model is network
    with pytest.raises(AttributeError, match="no torch module"):
        _ = defend(lambda images: images.mean((2, 3)), Patch(3), size=(12, 18), masks=2).model


def test_a_confidence_moves_with_the_drift_of_its_scores_as_far_as_the_bounds_say_and_no_farther() -> None:
    masks = MaskSet.covering((4, 6), Patch(2), 2)
    scores = 3 * torch.randn(5, len(masks.boxes), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    classifier = Classifier(function=lambda images: torch.zeros(len(images), 4), classes=4, name="zeros")
    rounds = MaskRounds(classifier, masks, FILL, torch.zeros(5, 3, 4, 6))
    rounds.__dict__["single"] = scores  # what the first round says
    assert torch.allclose(rounds.confidence, scores.softmax(2).amax(2))
    assert bool((rounds.confidence < 0.99).any())
    for drift in (0.0, 0.01, 0.3):
        lowest, highest = rounds.bound_confidence(drift)
        label = scores.argmax(2, keepdim=True)
        for bound, sign in ((lowest, -1), (highest, 1)):
            moved = scores - sign * drift
            moved = moved.scatter(2, label, scores.amax(2, keepdim=True) + sign * drift)
            attained = moved.softmax(2).gather(2, label).squeeze(2)
            assert bool((sign * (bound - attained) > 0).all())  # with room for rounding
            assert torch.allclose(bound, attained, atol=1e-8)
