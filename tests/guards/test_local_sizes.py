"""A LocalGuard on images that are taller than wide, and what it hands to runs, reports and certificate files."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers.small_guards import random_images
from torch import nn

from patchguard import verify
from patchguard.defenses import ClippedSum, DoubleMasking, MaskedAgreement
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

SIZE = (9, 6)


@cache
def tall_guard() -> LocalGuard:
    """Cells of 3 x 1 pixels: 7 x 6 of them, with evidence that any defense takes."""
    network = nn.Conv2d(3, 2, (3, 1)).requires_grad_(False)
    nn.init.uniform_(network.weight, -1, 1, generator=torch.Generator().manual_seed(0))
    return LocalGuard(Preprocess(), wrap(network, classes=2), Evidence(low=None), ClippedSum())


def masked_guard(kind, **settings) -> LocalGuard:
    return replace(tall_guard(), defense=kind(masks=tall_guard().windows(Patch(2), *SIZE), **settings))


def test_height_and_width_keep_their_order() -> None:
    guard = tall_guard()
    field = guard.field(*SIZE)
    assert (field.source, field.grid, field.size) == (SIZE, (7, 6), (3, 1))
    assert guard.windows(Patch(2, 3), *SIZE) == Windows.sliding(grid=(7, 6), size=(4, 3)).maximal()
    bounded = replace(guard, evidence=Evidence(kind="tanh"))
    bounded.validate(Patch(8, 3), *SIZE)
    with pytest.raises(InputError, match="must fit the image"):
        bounded.validate(Patch(3, 8), *SIZE)


def test_a_patch_at_the_place_of_a_window_owns_that_window() -> None:
    guard, patch = tall_guard(), Patch(2, 3)
    windows, field = guard.windows(patch, *SIZE), guard.field(*SIZE)
    for number, cells in enumerate(windows.cells):
        place, window = guard.locate(patch, *SIZE, number)
        assert place is not None
        top, left, height, width = place
        assert (height, width) == (2, 3)
        touched = np.outer(field.rows.touched_cells(top, height), field.columns.touched_cells(left, width))
        assert (touched.reshape(-1) == cells).all()
        assert window == tuple(windows.boxes[number])


def test_a_tau_outlives_other_settings_but_not_other_units() -> None:
    guard = masked_guard(DoubleMasking, tau=2.0)
    assert guard.override() is guard
    assert guard.override(evidence="logits").defense.tau == 2.0
    assert guard.override(evidence="confidence").defense.tau == 0.0
    assert guard.override(evidence="confidence", tau=0.5).defense.tau == 0.5


def test_an_examination_finds_the_largest_patch_where_it_is_asked_for_and_labels_are_proved() -> None:
    images = random_images(3, *SIZE)
    for guard, largest, found in (
        (masked_guard(DoubleMasking), True, True),
        (masked_guard(DoubleMasking), False, False),
        (masked_guard(MaskedAgreement), True, False),
    ):
        plan = guard.plan([Patch(1)], *SIZE, largest=largest)
        assert plan.largest == (2 if largest else 0)
        sides = guard.examine(images, plan).largest
        assert (sides is not None) == found
        if sides is not None:
            assert torch.equal(sides, guard.largest_certified_patch(images))


def test_the_largest_patch_is_refused_where_masks_withstand_none() -> None:
    guard = replace(tall_guard(), defense=DoubleMasking(masks=Windows.sliding(grid=(7, 6), size=(1, 1))))
    with pytest.raises(InputError, match="lies in no mask"):
        guard.largest_certified_patch(random_images(1, *SIZE))


def test_the_claim_of_a_row_holds_the_evidence_of_its_own_image() -> None:
    guard, images = masked_guard(DoubleMasking), random_images(3, *SIZE)
    examination = guard.examine(images, guard.plan([Patch(2)], *SIZE))
    for row in range(3):
        certificate = guard.certify(images[row : row + 1], Patch(2))
        claim = guard.claim(examination, row, certificate, Patch(2), SIZE)
        values = examination.details.values[row].numpy()
        assert claim.array == verify.array_header(values.shape) + values.astype("<i8").tobytes()
