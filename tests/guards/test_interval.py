"""Interval bounds against brute force: no contents of a patch on any position changes a certified label."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import patchguard as pg
from patchguard import models
from patchguard.errors import InputError
from patchguard.guards import interval
from patchguard.guards.interval import IntervalGuard
from patchguard.patch import Patch
from patchguard.storage import zoo

SIDE = 6
PATCHES = [Patch(1), Patch(2), Patch(1, 3)]


def guard_of(seed: int = 0, *, side: int = SIDE) -> IntervalGuard:
    """Two padded, strided layers that see mostly brightness: bounds are nearly tight, some images certified."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"classes": 3, "side": side, "widths": [5, 6], "kernels": [3, 4], "strides": [1, 2]}
        model = models.build("interval_cnn", **settings).eval().requires_grad_(False)
        for layer in model.convolutions():
            layer.weight.copy_(0.5 * layer.weight.abs() + 0.1 * layer.weight)
            layer.bias.normal_(0, 0.1)
        model.fc.weight.mul_(0.1).add_(model.fc.weight[:1].abs() * torch.tensor([1.0, 0.0, -1.0]).view(3, 1, 1, 1))
        # Bright, middle and dark images: every class is the label of some.
        model.fc.bias.copy_(-model(pictures(40, side)).flatten(1).quantile(0.6, 0) * torch.tensor([1.0, 0.0, 1.0]))
    return IntervalGuard(model)


def pictures(count: int, side: int = SIDE, seed: int = 1) -> Tensor:
    """Noise from dark to bright."""
    noise = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return torch.lerp(torch.linspace(0, 1, count).view(-1, 1, 1, 1), noise, 0.2)


def attacked(image: Tensor, patch: Patch, seed: int) -> Tensor:
    """The image with many contents on every position: all corners of colour, random corners, random values.

    Positions are written out here, apart from those of the package.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = torch.tensor(list(product((0.0, 1.0), repeat=3))).view(8, 3, 1, 1).expand(8, 3, patch.height, patch.width)
    size = (24, 3, patch.height, patch.width)
    corners = torch.randint(2, size, generator=generator).float()
    contents = torch.cat([plain, corners, torch.rand(size, generator=generator)])
    found = []
    for top in range(SIDE - patch.height + 1):
        for left in range(SIDE - patch.width + 1):
            many = image.expand(len(contents), -1, -1, -1).clone()
            many[:, :, top : top + patch.height, left : left + patch.width] = contents
            found.append(many)
    return torch.cat(found)


def climbed(guard: IntervalGuard, image: Tensor, patch: Patch, label: int) -> Tensor:
    """Contents at the corners that gradients point to, step by step, on every position and for every rival."""
    tops, lefts = range(SIDE - patch.height + 1), range(SIDE - patch.width + 1)
    under = torch.zeros(len(tops) * len(lefts), 1, SIDE, SIDE, dtype=torch.bool)
    for number, (top, left) in enumerate(product(tops, lefts)):
        under[number, :, top : top + patch.height, left : left + patch.width] = True
    found = []
    for rival in {0, 1, 2} - {label}:
        many = torch.where(under, 0.5, image)
        for _ in range(3):
            asked = many.clone().requires_grad_(True)
            logits = guard.model(asked).flatten(1)
            (slope,) = torch.autograd.grad((logits[:, rival] - logits[:, label]).sum(), asked)
            many = torch.where(under, (slope > 0).float(), many)
            found.append(many)
    return torch.cat(found)


def refuted(guard: IntervalGuard, patch: Patch, count: int = 24) -> tuple[int, int, int]:
    """Return how many images are certified, not certified, and certified though an attack changes their label."""
    images = pictures(count)
    proof = guard.certify(images, patch)
    broken = 0
    for number, image in enumerate(images):
        if proof.certified[number]:
            label = int(proof.label[number])
            tries = torch.cat([attacked(image, patch, number), climbed(guard, image, patch, label)])
            labels = guard.predict(tries).label
            broken += bool((labels != label).any())
    certified = int(proof.certified.sum())
    return certified, len(images) - certified, broken


# -- the oracle and its mutants ----------------------------------------------------------------------------------------

SEEDS = (1, 2)


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_no_contents_on_any_position_change_a_certified_label(patch: Patch) -> None:
    counts = torch.tensor([refuted(guard_of(seed), patch) for seed in SEEDS]).sum(0).tolist()
    assert counts[0] > 5, counts
    assert counts[1] > 5, counts
    assert counts[2] == 0


MUTANTS = {
    "center and radius swapped": (IntervalGuard, "_range", lambda right: lambda self: swapped(right(self))),
    "|W| forgotten": (interval, "take_absolute", lambda right: lambda weight: weight),
    "radius forgotten": (interval, "bound_affine", lambda right: lambda *a: (right(*a)[0], 0 * right(*a)[1])),
    "only the upper end": (interval, "apply_relu", lambda right: lambda c, r: (F.relu(c + r), 0 * r)),
}


def swapped(entrance: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return entrance[1], entrance[0].abs()


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_in_the_bound_are_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, part, change = MUTANTS[name]
    monkeypatch.setattr(owner, part, change(getattr(owner, part)))
    assert any(refuted(guard_of(seed), Patch(2), count=12)[2] for seed in SEEDS)


@pytest.mark.parametrize("patch", [Patch(1), Patch(2, 3)], ids=str)
def test_a_position_left_out_is_refuted_whichever_it_is(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every position there is a network that only a patch there deceives."""
    everywhere = interval.positions
    image = torch.full((1, 3, SIDE, SIDE), 0.9)
    for number, (top, left) in enumerate(everywhere(patch, SIDE, SIDE).tolist()):
        guard = looking_at(top, left, patch)
        black = image.clone()
        black[:, :, top : top + patch.height, left : left + patch.width] = 0.0
        assert [int(guard.predict(each).label) for each in (image, black)] == [0, 1]
        monkeypatch.setattr(interval, "positions", everywhere)
        proof = guard.certify(image, patch)
        assert not proof.certified.item()
        assert (int(proof.weakest), int(proof.rival)) == (number, 1)
        left_out = [place for place in range(len(everywhere(patch, SIDE, SIDE))) if place != number]
        monkeypatch.setattr(interval, "positions", lambda *given, kept=left_out: everywhere(*given)[kept])
        assert guard.certify(image, patch).certified.item()


def looking_at(top: int, left: int, patch: Patch) -> IntervalGuard:
    """Class 0 where some of the pixels under one position are bright, class 1 where all are dark."""
    settings = {"classes": 2, "side": SIDE, "widths": [1], "kernels": [1], "strides": [1]}
    model = models.build("interval_cnn", **settings, mean=[0.0] * 3, std=[1.0] * 3).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.convolutions()[0].weight[:] = 1.0
    model.fc.weight[0, 0, top : top + patch.height, left : left + patch.width] = 1.0
    model.fc.bias[1] = 0.5
    return IntervalGuard(model)


def test_a_margin_is_exact_where_no_bound_is_loose() -> None:
    """One layer of positive weights: the worst contents are black, and the margin is what they leave."""
    guard = looking_at(0, 0, Patch(1))
    guard.model.fc.weight[0] = 0.1
    images = pictures(5)
    proof = guard.certify(images, Patch(2), label=0)
    for image, margin, weakest in zip(images, proof.margin, proof.weakest, strict=True):
        left_over = []
        for top, left in product(range(SIDE - 1), repeat=2):
            dark = image.double().clone()
            dark[:, top : top + 2, left : left + 2] = 0
            left_over.append(float(0.1 * dark.sum() - 0.5))
        assert margin == pytest.approx(min(left_over), abs=1e-6)
        assert left_over[weakest] == pytest.approx(min(left_over), abs=1e-6)


# -- rounding ----------------------------------------------------------------------------------------------------------


def exact_activations(guard: IntervalGuard, image: Tensor) -> list[Fraction]:
    """The logits in fractions, of the weights as they are stored and of pixels normalized in double precision."""
    maps = [[[Fraction(float(v)) for v in row] for row in channel] for channel in guard._normalize(image)]
    layers = [*guard.model.convolutions(), guard.model.fc]
    for layer in layers:
        maps = convolved_exactly(layer, maps)
        if layer is not guard.model.fc:
            maps = [[[max(v, Fraction(0)) for v in row] for row in channel] for channel in maps]
    return [channel[0][0] for channel in maps]


def convolved_exactly(layer: torch.nn.Conv2d, maps: list) -> list:
    kernel, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    side = len(maps[0])
    out = (side + 2 * padding - kernel) // stride + 1
    weights = layer.weight.tolist()
    answer = []
    for row, bias in zip(weights, layer.bias.tolist(), strict=True):
        channel = [[Fraction(bias)] * out for _ in range(out)]
        for u, v, c, i, j in product(range(out), range(out), range(len(maps)), range(kernel), range(kernel)):
            y, x = u * stride + i - padding, v * stride + j - padding
            if 0 <= y < side and 0 <= x < side:
                channel[u][v] += Fraction(row[c][i][j]) * maps[c][y][x]
        answer.append(channel)
    return answer


def test_bounds_hold_in_exact_arithmetic() -> None:
    guard = guard_of(0, side=4)
    image = pictures(1, side=4)[0]
    for label in range(3):
        proof = guard.certify(image.unsqueeze(0), Patch(1), label=label)
        for top, left, value in ((0, 0, 1.0), (3, 3, 0.0), (1, 2, 1.0)):
            changed = image.clone()
            changed[:, top, left] = value
            logits = exact_activations(guard, changed)
            lead = min(logits[label] - logits[k] for k in range(3) if k != label)
            assert lead >= Fraction(float(proof.margin))


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_the_charge_covers_rounding_in_any_order_of_sums(precision: torch.dtype, monkeypatch) -> None:
    """A set of one image: what sums in other orders and precisions give lies within the radius, which is all charge."""
    monkeypatch.setattr(interval, "PRECISION", precision)
    guard = guard_of(2, side=16)
    pixels = guard._normalize(pictures(8, side=16))
    center, radius = interval.bound_network(guard.model, pixels, torch.zeros_like(pixels))
    for other in (torch.float32, torch.float64) if precision == torch.float32 else (torch.float64,):
        features = pixels.to(other)
        for layer in guard.model.convolutions():
            weight, bias = layer.weight.to(other), layer.bias.to(other)
            features = F.relu(F.conv2d(features, weight, bias, layer.stride, layer.padding))
        assert (features - center).abs().le(radius.to(torch.float64)).all()
    assert radius.max() > 0
    assert radius.max() < 1e4 * torch.finfo(precision).eps * center.max()


def test_without_the_charge_rounding_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "PRECISION", torch.float32)
    guard = guard_of(2, side=16)
    pixels = guard._normalize(pictures(8, side=16))
    center, radius = interval.bound_network(guard.model, pixels, torch.zeros_like(pixels), charge=lambda layer: 0.0)
    features = pixels.double()
    for layer in guard.model.convolutions():
        weight, bias = layer.weight.double(), layer.bias.double()
        features = F.relu(F.conv2d(features, weight, bias, layer.stride, layer.padding))
    assert not (features - center).abs().le(radius).all()


def test_layers_too_large_for_the_proof_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "PRECISION", torch.bfloat16)
    with pytest.raises(InputError, match="must be smaller for a proof"):
        guard_of()


# -- laws --------------------------------------------------------------------------------------------------------------


def test_batches_chunks_and_sharing_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, images = guard_of(), pictures(5)
    whole = guard.certify(images, Patch(2))
    for pixels in (1, 7 * SIDE**2, 60 * SIDE**2):
        monkeypatch.setitem(interval.PIXELS_AT_ONCE, "cpu", pixels)
        again = guard.certify(images, Patch(2))
        assert torch.equal(again.label, whole.label)
        assert torch.allclose(again.margin, whole.margin, atol=1e-9)
        assert torch.equal(again.weakest, whole.weakest)
        assert torch.equal(again.rival, whole.rival)
        assert torch.allclose(guard.predict(images).scores[2], guard.predict(images[2:3]).scores[0], atol=1e-9)


@pytest.mark.parametrize("patch", [Patch(1), Patch(2, 5), Patch(4), Patch(9)], ids=str)
@pytest.mark.parametrize(("kernels", "strides"), [((4, 3, 4, 3), (2, 1, 2, 1)), ((1, 5, 2), (3, 1, 2))], ids=str)
def test_where_the_patch_does_not_reach_nothing_changes(patch: Patch, kernels: tuple, strides: tuple) -> None:
    """Layers computed around the patch alone give what layers computed everywhere give."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = [4] * len(kernels)
        model = models.build("interval_cnn", side=12, widths=widths, kernels=kernels, strides=strides)
    guard, images = IntervalGuard(model.requires_grad_(False)), pictures(2, side=12)
    inside = interval.covered_pixels(interval.positions(patch, 12, 12), patch, 12, 12)
    (middle, half), pixels = guard._range(), guard._normalize(images)
    center = torch.where(inside, middle, pixels.unsqueeze(1)).flatten(0, 1)
    radius = torch.where(inside, half, 0.0).repeat(2, 1, 1, 1)
    lead = interval.bound_leads(model.fc, *interval.bound_network(model, center, radius)).view(2, len(inside), 10, 10)
    label = guard.predict(images).label
    rivals = torch.arange(10).expand(2, 10) != label.unsqueeze(1)
    expected = [lead[i, :, label[i]][:, rivals[i]].min() for i in range(2)]
    assert torch.allclose(guard.certify(images, patch).margin, torch.stack(expected), rtol=1e-9)


def test_a_larger_patch_never_certifies_more() -> None:
    guard, images = guard_of(), pictures(20)
    margins = [guard.certify(images, patch, label=0).margin for patch in (Patch(1), Patch(1, 2), Patch(2), Patch(3))]
    for smaller, larger in pairwise(margins):
        assert (larger <= smaller + 1e-9).all()


def test_predictions_are_those_of_the_network() -> None:
    guard, images = guard_of(), pictures(20)
    logits = guard.model(images).flatten(1)
    assert torch.allclose(guard.predict(images).scores, logits.double(), atol=1e-4)
    assert torch.equal(guard.certify(images, Patch(1)).label, logits.argmax(1))


def test_a_positive_margin_of_a_given_class_makes_it_the_prediction() -> None:
    guard, images = guard_of(), pictures(20)
    for label in range(3):
        proof = guard.certify(images, Patch(1), label=label)
        assert (guard.predict(images).label[proof.certified] == label).all()
        assert (proof.rival != label).all()


# -- boundary and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "label", "message"),
    [
        (Patch(1, count=2), None, "single one"),
        (Patch(7), None, "must fit"),
        (Patch(1), 3, "from 0 to 2"),
    ],
)
def test_what_cannot_be_certified_is_refused(patch: Patch, label: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        guard_of().certify(pictures(1), patch, label)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(InputError, match="6 x 6 pixels here; got 8 x 8"):
        guard_of().predict(pictures(1, side=8))


def test_a_file_brings_the_same_guard_back(tmp_path) -> None:
    guard = replace(guard_of(), class_names=("a", "b", "c"))
    path = tmp_path / "bounds.safetensors"
    zoo.save(guard, path, recipe={"name": "none"})
    again = pg.load(path)
    assert isinstance(again, IntervalGuard)
    assert again.class_names == guard.class_names
    images = pictures(6)
    assert torch.equal(again.certify(images, Patch(2)).margin, guard.certify(images, Patch(2)).margin)
    assert again.digest == guard.digest
    assert zoo.recipe(path) == {"name": "none"}
    with pytest.raises(InputError, match="no cells to look at"):
        zoo.load_guard(path)
