"""A LocalGuard from images to proofs: sound end to end, one pass for many patches, clear about what it refuses."""

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.small_guards import ANY_MASKS, bagnet_guard, build_thin_model, random_images, srf_guard
from torch import nn

from patchguard.data.images import validate_images
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
)
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.geometry.program import Program
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, DetectionCertificate
from patchguard.guards import local as guard_file
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

MAKERS = {"srf": (srf_guard, 16), "bagnet": (bagnet_guard, 12)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(MAKERS))
def case(request):
    make, side = MAKERS[request.param]
    return make(), random_images(24, side)


def patched(image: torch.Tensor, side: int, generator: torch.Generator) -> torch.Tensor:
    """The image with a patch at every position, each with contents of its own, some of them extreme."""
    height, width = image.shape[1:]
    spots = [(top, left) for top in range(height - side + 1) for left in range(width - side + 1)]
    changed = image.repeat(len(spots), 1, 1, 1)
    for index, (top, left) in enumerate(spots):
        noise = torch.rand(3, side, side, generator=generator)
        colour = torch.rand(3, 1, 1, generator=generator).round().expand(3, side, side)
        contents = (noise, noise.round(), colour)[int(torch.randint(3, (), generator=generator))]
        changed[index, :, top : top + side, left : left + side] = contents
    return changed


def test_no_patch_anywhere_changes_the_label_of_a_certified_image(case):
    guard, images = case
    certificate = guard.certify(images, Patch(2))
    assert 0 < int(certificate.certified.sum()) < len(images)  # both outcomes occur
    generator = torch.Generator().manual_seed(1)
    for index in certificate.certified.nonzero().flatten()[:4].tolist():
        attacked = patched(images[index], 2, generator)
        moved = guard.evidence_of(attacked).values != guard.evidence_of(images[index : index + 1]).values
        assert moved.flatten(1).any(1).float().mean() > 0.9  # the patches are seen
        assert set(guard.predict(attacked).label.tolist()) == {int(certificate.label[index])}


def test_only_cells_inside_a_window_move(case):
    guard, images = case
    height, width = images.shape[-2:]
    windows = guard.windows(Patch(2), height, width)
    before = guard.local_logits(images[:1])
    after = guard.local_logits(patched(images[0], 2, torch.Generator().manual_seed(2)))
    moved = ((after - before).abs() > guard.evidence.drift).any(1).flatten(1)
    owned = torch.from_numpy(windows.cells)
    assert moved.any(1).float().mean() > 0.9
    assert all((~owned & row).sum(1).min() == 0 for row in moved)  # some window holds every moved cell


def test_the_label_certified_is_the_label_predicted(case):
    guard, images = case
    assert torch.equal(guard.certify(images, Patch(1)).label, guard.predict(images).label)


def test_one_forward_pass_serves_every_patch(case, monkeypatch):
    guard, images = case
    monkeypatch.setitem(guard_file.PIXELS_AT_ONCE, "cpu", 2**30)
    with mock.patch.object(Program, "__call__", autospec=True, side_effect=Program.__call__) as passes:
        answers = guard.certify(images, [Patch(1), Patch(2), Patch(1, 2)])
        assert passes.call_count == 1
        sides = guard.largest_certified_patch(images)
        assert passes.call_count == 2
    assert isinstance(answers, tuple)
    for patch, answer in zip([Patch(1), Patch(2), Patch(1, 2)], answers, strict=True):
        alone = guard.certify(images, patch)
        for name in ("label", "margin", "weakest", "rival"):
            assert torch.equal(getattr(alone, name), getattr(answer, name))
    assert sides.shape == (24,)


def test_batches_are_split_without_changing_answers(case, monkeypatch):
    guard, images = case
    whole_margin = guard.certify(images, Patch(2), label=1)
    monkeypatch.setitem(guard_file.PIXELS_AT_ONCE, "cpu", 3 * 56 * 56)
    parts = guard.certify(images, Patch(2), label=torch.ones(24, dtype=torch.long))
    assert torch.equal(parts.label, whole_margin.label)
    assert torch.allclose(parts.margin, whole_margin.margin, atol=0.1)
    assert torch.equal(
        guard.predict(images).label, guard.predict(images[:5]).label.new_tensor(one_by_one(guard, images))
    )
    assert guard.local_logits(images).shape[0] == 24


def one_by_one(guard: LocalGuard, images: torch.Tensor) -> list[int]:
    return [int(guard.predict(image[None]).label) for image in images]


def test_a_larger_patch_never_certifies_more(case):
    guard, images = case
    small, tall, wide, large = guard.certify(images, [Patch(1), Patch(2, 1), Patch(1, 2), Patch(2)])
    assert (small.margin >= tall.margin).all()
    assert (small.margin >= wide.margin).all()
    assert (tall.margin >= large.margin).all()
    assert (wide.margin >= large.margin).all()
    assert (small.margin > large.margin).any()


@pytest.mark.parametrize("patch", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_largest_certified_patch_agrees_with_certify(case, patch):
    guard, images = case
    side = images.shape[-1]
    guard = guard.for_patch(Patch(patch), side, side)
    sides = guard.largest_certified_patch(images)
    covered = [p for p in range(1, side + 1) if guard.defense.masks.cover(guard.windows(Patch(p), side, side))]
    expected = torch.zeros_like(sides)
    for p in covered:
        expected = torch.where(guard.certify(images, Patch(p)).certified, p, expected)
    assert torch.equal(sides, expected)
    assert len(sides.unique()) > 1


def test_bounded_evidence_is_not_stopped_by_its_masks():
    guard = srf_guard(side=9, patch=1)
    bounded = replace(guard, evidence=Evidence(kind="confidence"), defense=RobustMasking(masks=guard.defense.masks))
    images = random_images(6, 9)
    sides = bounded.largest_certified_patch(images)
    for p in range(1, 10):
        certified = bounded.certify(images, Patch(p)).certified
        assert torch.equal(certified, sides >= p)


def test_an_undefended_guard_certifies_nothing():
    guard = replace(srf_guard(), defense=Undefended())
    assert guard.largest_certified_patch(random_images(3, 16)).tolist() == [0, 0, 0]


# -- masks and patches -------------------------------------------------------------------------------------------------


def test_masks_are_kept_and_a_patch_they_do_not_cover_is_refused(case):
    guard, images = case
    with pytest.raises(InputError, match=r"lies in no mask.*guard\.for_patch"):
        guard.certify(images, Patch(5))
    side = images.shape[-1]
    refitted = guard.for_patch(Patch(5), side, side)
    assert refitted.defense.masks == guard.windows(Patch(5), side, side)
    assert isinstance(refitted.certify(images, Patch(5)), Certificate)
    assert guard.defense.masks == guard.windows(Patch(2), side, side)  # the old one is as it was


@pytest.mark.parametrize(
    ("defense", "expected"),
    [
        (CellMasking(cells=1), {"cells": 36}),
        (TrimmedMean(trim=1, spatial=False), {"trim": 36, "spatial": False}),
        (RobustMasking(masks=ANY_MASKS, threshold=Fraction(1, 5)), {"threshold": Fraction(1, 5)}),
        (DoubleMasking(masks=ANY_MASKS, tau=1.5), {"tau": 1.5}),
        (Median(), {}),
        (ClippedSum(spatial=False), {"spatial": False}),
    ],
)
def test_each_defense_is_refitted_in_its_own_way(defense, expected):
    guard = replace(srf_guard(), defense=defense).for_patch(Patch(2), 16, 16)
    assert {name: getattr(guard.defense, name) for name in expected} == expected
    masks = getattr(guard.defense, "masks", None)
    assert masks is None or masks == guard.windows(Patch(2), 16, 16)
    assert type(guard.defense) is type(defense)


def test_several_patches_need_masks_for_several_patches():
    guard = srf_guard(side=8, patch=1)
    images = random_images(2, 8)
    with pytest.raises(InputError, match="lies in no mask"):
        guard.certify(images, Patch(1, count=2))
    two = guard.for_patch(Patch(1, count=2), 8, 8)
    assert two.defense.masks.count == 2
    assert two.certify(images, Patch(1, count=2)).weakest.shape == (2, 2)


def test_images_that_give_another_grid_are_refused(case):
    guard, _ = case
    if guard.preprocess.steps:
        assert guard.predict(random_images(1, 20, 24)).label.shape == (1,)  # the resize gives every size the same cells
        return
    with pytest.raises(InputError, match=r"20 x 24 pixels give 20 x 24 cells.*for 16 x 16.*for_patch\(patch, 20, 24\)"):
        guard.predict(random_images(1, 20, 24))


def test_detection_guards_answer_label_or_alert():
    guard = srf_guard()
    detect = replace(guard, defense=MaskedAgreement(masks=guard.defense.masks))
    images = random_images(4, 16)
    assert isinstance(detect.certify(images, Patch(1)), DetectionCertificate)
    assert detect.predict(images).alert.shape == (4,)
    with pytest.raises(InputError, match="certifies labels"):
        detect.largest_certified_patch(images)


# -- known windows -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bagnet17():
    return build_thin_model("bagnet17")


def largest(windows: Windows) -> tuple[int, int]:
    return tuple(max(b - a for a, b in axis) for axis in (windows.rows, windows.columns))


def chain(model, *steps) -> LocalGuard:
    return LocalGuard(Preprocess(steps), model, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "cells"), [("bicubic", (6, 8, 11)), ("bilinear", (5, 7, 9)), ("nearest", (4, 6, 8))])
@pytest.mark.parametrize("antialias", [True, False])
def test_resizing_widens_what_a_patch_in_the_source_reaches(bagnet17, mode, cells, antialias):
    guard = chain(bagnet17, Resize(height=192, width=192, mode=mode, antialias=antialias))
    assert guard.field(32, 32).grid == (22, 22)
    found = [largest(guard.windows(Patch(side), 32, 32)) for side in (2, 5, 8)]
    assert found == [(size, size) for size in cells]


@pytest.mark.slow
def test_bagnet17_at_224_pixels_has_the_windows_of_the_paper(bagnet17):
    guard = chain(bagnet17)
    field = guard.field(224, 224)
    assert (field.grid, field.size, field.stride) == ((26, 26), (17, 17), (8, 8))
    for side, cells in ((23, 5), (32, 6), (39, 7)):
        windows = guard.windows(Patch(side), 224, 224)
        assert cells == -(-(side + 17 - 1) // 8)  # Eq. 1
        assert windows == Windows.sliding(grid=(26, 26), size=(cells, cells))


def test_a_crop_shifts_the_field_to_its_place_in_the_source():
    guard = chain(wrap(nn.Conv2d(3, 2, 3), classes=2), CenterCrop(height=9, width=9))
    field = guard.field(20, 30)
    assert (field.source, field.grid, field.rows.starts[0], field.columns.starts[0]) == ((20, 30), (7, 7), 6, 10)
    assert largest(guard.windows(Patch(1), 20, 30)) == (3, 3)
    assert guard.without_preprocess().field(9, 9).source == (9, 9)


# -- running -----------------------------------------------------------------------------------------------------------


def test_a_model_in_training_mode_is_evaluated_and_put_back():
    guard = srf_guard.__wrapped__()
    images = random_images(3, 16)
    expected = guard.local_logits(images)
    state = {name: tensor.clone() for name, tensor in guard.model.state_dict().items()}
    guard.model.train()
    assert torch.equal(guard.local_logits(images), expected)
    assert guard.model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in guard.model.state_dict().items())


def test_autocast_and_reduced_precision_do_not_reach_the_network():
    images = random_images(3, 16)
    expected = srf_guard().local_logits(images)
    new = srf_guard.__wrapped__()  # neither the export of a network nor what it computes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(srf_guard().local_logits(images), expected)
        assert torch.equal(new.local_logits(images), expected)


def test_answers_carry_no_gradient_and_work_under_inference_mode():
    guard = srf_guard(side=14)
    images = random_images(2, 14).requires_grad_()
    assert not guard.predict(images).scores.requires_grad
    with torch.inference_mode():
        inside = guard.certify(random_images(2, 14), Patch(2))
    assert torch.equal(inside.margin, guard.certify(random_images(2, 14), Patch(2)).margin)


def test_a_network_whose_layers_change_gets_a_new_field():
    guard = chain(wrap(nn.Sequential(nn.Conv2d(3, 2, 3)), classes=2))
    assert guard.field(8, 8).size == (3, 3)
    guard.model.features[0] = nn.Conv2d(3, 2, 5)
    assert guard.field(8, 8).size == (5, 5)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 8, 8), r"Give one image a batch axis"),
        (torch.zeros(2, 1, 8, 8), r"got \(2, 1, 8, 8\)\. Convert them to RGB"),
        (torch.zeros(2, 8, 8, 3), r"Move the channels forward"),
        (torch.zeros(0, 3, 8, 8), r"at least one image"),
        (torch.zeros(2, 3, 0, 8), r"at least one pixel"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"Divide 8-bit pixels by 255"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.long), r"floating point"),
        (torch.full((1, 3, 8, 8), 255.0), r"must lie in \[0, 1\]; got 255 to 255"),
        (torch.full((1, 3, 8, 8), -0.1), r"got -0\.1 to -0\.1"),
        (torch.full((1, 3, 8, 8), torch.inf), r"got inf to inf"),
        (torch.tensor([0.5, torch.nan]).expand(1, 3, 4, 2), r"got NaN"),
    ],
)
def test_tensors_that_are_no_images_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        validate_images(images)


def test_images_smaller_than_the_field_are_refused():
    with pytest.raises(InputError, match="at least 5 x 5 pixels here; got 4 x 9"):
        srf_guard().predict(random_images(1, 4, 9))


def test_a_patch_larger_than_the_image_is_refused():
    with pytest.raises(InputError, match="must fit the image"):
        srf_guard().certify(random_images(1, 16), Patch(17))


def test_an_empty_list_of_patches_is_refused():
    with pytest.raises(InputError, match="a sequence of at least one"):
        srf_guard().certify(random_images(1, 16), [])


def test_class_names_must_match_the_classes():
    guard = srf_guard()
    assert replace(guard, class_names=("a", "b", "c")).class_names == ("a", "b", "c")
    with pytest.raises(InputError, match="the model's 3 classes; got 2 names"):
        replace(guard, class_names=("a", "b"))


def test_a_leaky_network_is_refused_when_a_patch_is_certified():
    leaky = wrap(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)), classes=2)
    guard = LocalGuard(Preprocess(), leaky, Evidence(low=None), Median())
    guard.predict(random_images(1, 8))  # answers, but proves nothing
    with pytest.raises(InputError, match=r"layer `features\.1` \(InstanceNorm2d\) cannot be bounded"):
        guard.certify(random_images(1, 8), Patch(1))


def deep_network() -> nn.Sequential:
    """Cells that see 3, 7 and 15 pixels, so that a patch of 6 x 6 touches all of them from the third layer on."""
    layers = [nn.Conv2d(channels, 4, 3, stride=2, padding=1) for channels in (3, 4, 4)]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 1))


def deep_guard(defense) -> LocalGuard:
    return LocalGuard(Preprocess(), wrap(deep_network(), 4), Evidence(low=None), defense)


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("patchguard")]


@pytest.mark.parametrize("verb", ["certify", "plan"])
def test_a_patch_that_touches_all_cells_is_named_once_with_the_layer(verb, caplog):
    guard, patch, images = deep_guard(DoubleMasking(masks=ANY_MASKS)), Patch(6), random_images(1, 16)
    guard = guard.for_patch(patch, 16, 16)
    assert not warnings_in(caplog)
    for _ in range(2):
        guard.certify(images, patch) if verb == "certify" else guard.plan([patch], 16, 16, sides=(2,))
    (warning,) = warnings_in(caplog)
    expected = "6 x 6 pixels can touch all 2 x 2 cells .* 16 x 16, .* from layer `features.2` .Conv2d. on.*defend"
    assert re.search(expected, warning)


def test_the_layer_is_found_in_source_pixels(caplog):
    enlarge = Preprocess((Resize(height=16, width=16, mode="nearest"),))
    guard = replace(deep_guard(DoubleMasking(masks=ANY_MASKS)), preprocess=enlarge)
    guard.for_patch(Patch(3), 4, 4).certify(random_images(1, 4), Patch(3))
    assert re.search("3 x 3 pixels .* images of 4 x 4, .* from layer `features.1`", "".join(warnings_in(caplog)))


def test_a_patch_that_leaves_cells_alone_is_no_reason_to_warn(caplog):
    srf_guard().for_patch(Patch(3), 16, 16).certify(random_images(1, 16), Patch(3))
    deep_guard(Undefended()).certify(random_images(1, 16), Patch(6))  # nobody expects a certificate of it
    assert not warnings_in(caplog)


def test_the_checks_hold_without_any_type_checker():
    """The suite runs with shape checks at every call; users do not have them."""
    code = (
        "import torch, patchguard as pg\n"
        "from patchguard.geometry.preprocess import Preprocess\n"
        "from patchguard.defenses import DoubleMasking, Median\n"
        "from patchguard.models import build\n"
        "model = build('srf', classes=2, field=3, widths=[4])\n"
        "guard = pg.LocalGuard(Preprocess(), model, pg.Evidence(low=None), Median())\n"
        "good = torch.rand(1, 3, 8, 8)\n"
        "for ask in (lambda: guard.predict(good[0]), lambda: guard.predict((good * 255).byte()),\n"
        "            lambda: guard.predict([1]), lambda: guard.certify(good, 5), lambda: guard.certify(good, [5]),\n"
        "            lambda: guard.certify(good, pg.Patch(1), label=torch.zeros(2, dtype=torch.long)),\n"
        "            lambda: pg.LocalGuard(Preprocess(), torch.nn.Conv2d(3, 2, 3), pg.Evidence(), Median())):\n"
        "    try:\n"
        "        ask()\n"
        "    except pg.InputError as error:\n"
        "        print(error)\n"
        "    else:\n"
        "        raise SystemExit('not refused')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7


@pytest.mark.slow
def test_the_example_runs_and_certifies_something():
    example = Path(__file__).parents[2] / "examples" / "certify_your_own_cnn.py"
    assert len(example.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "audit passed: True" in done.stdout
    assert "no 5 x 5 patch changes 0 of" not in done.stdout
