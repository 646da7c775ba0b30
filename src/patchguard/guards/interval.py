"""`IntervalGuard`: a small network whose answers are proved by interval bounds, beside `Guard`.

    guard = IntervalGuard(models.build("interval_cnn"))
    guard.predict(images).label
    guard.certify(images, Patch(5)).certified      # True: no 5 x 5 patch, anywhere, changes that label

P.-Y. Chiang, R. Ni, A. Abdelkader, C. Zhu, C. Studer, T. Goldstein, "Certified defenses for adversarial patches", ICLR
2020. Statement and proof, rounding included: docs/theory.md, "Interval bounds", in the symbols of this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchguard.data.images import validate_images
from patchguard.defenses.ties import argmax, argmin
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guard import Box, Certificate, Guard, Prediction
from patchguard.guards.identity import compute_digest, describe_model
from patchguard.models.base import LocalModel
from patchguard.models.interval_cnn import IntervalCnn
from patchguard.patch import Patch
from patchguard.runtime import device_and_dtype, full_precision

Images: TypeAlias = Float[Tensor, "batch 3 height width"]
Maps: TypeAlias = Float[Tensor, "_sets _channels _rows _columns"]
Interval: TypeAlias = tuple[Maps, Maps]  # center and radius
Product: TypeAlias = Callable[[nn.Conv2d, Tensor, Tensor], Tensor]

INTERVAL = {"name": "IntervalBounds"}  # in model files, in place of a defense
PRECISION = torch.float64
UNDERFLOW = 2.0**-100  # far above what n products can lose to it, far below any margin
LARGEST_ROUNDING = 0.01  # n v: beyond it the constants of the proof do not hold
# Pixels of all sets that pass through the network at once: within a CPU's cache, or a part of a GPU's memory.
PIXELS_AT_ONCE = {"cpu": 2**17, "cuda": 2**22}


@final
@dataclass(frozen=True, eq=False)
class IntervalGuard(Guard):
    r"""A network `f` of layers relu(W z + b), and bounds of what it answers for all patched images at once.

    Rule.     label = argmax_k f_k(x)   (ties: smallest k), in double precision
    Bounds.   |z - c| <= r for all patched images, entry by entry; from layer to layer
                  c' = W c + b,  r' = |W| r;     relu at both ends of c -+ r
    Theorem.  The label stays y if, at every position of the patch and for every k != y,
                  M_k = (W_y - W_k) c + (b_y - b_k) - |W_y - W_k| r  >  0.

    The radii are widened by what rounding can do, in `certify` and in `predict`. The `margin` is the smallest M_k, in
    logits. `weakest` is the number of the position it was found at: positions are counted along rows of the image, so
    that `divmod(weakest, width - patch.width + 1)` is its upper left pixel. A negative margin says nothing: the bounds
    are not exact.

    Everything is computed on the model's device; answers come back on the device of `images`, which have the pixels
    that the network is made for.
    """

    kind: ClassVar[str] = "interval"

    model: IntervalCnn
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, IntervalCnn):
            raise InputError(
                f"`model` must be an IntervalCnn; got {type(self.model).__name__}. Bounds are known for layers of "
                'relu(W z + b) alone: models.build("interval_cnn").'
            )
        if self.class_names and len(self.class_names) != self.model.classes:
            raise InputError(
                f"`class_names` must name the model's {self.model.classes} classes; got {len(self.class_names)} names."
            )
        for layer in (*self.model.convolutions(), self.model.fc):
            if layer.weight[0].numel() * torch.finfo(PRECISION).eps / 2 > LARGEST_ROUNDING:
                raise InputError(
                    f"layers must be smaller for a proof in {PRECISION}; got {tuple(layer.weight.shape)}. "
                    "Take fewer channels."
                )

    @property
    def classes(self) -> int:
        """Number of classes of the network."""
        return self.model.classes

    @property
    def digest(self) -> str:
        """SHA-256 of the network's tensors and settings."""
        return compute_digest(self.model, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return what makes the answers, besides the network's tensors, as JSON values."""
        described = describe_model(self.model, self.class_names)
        return {**described, "preprocess": Preprocess().to_json(), "evidence": None, "defense": INTERVAL}

    def settings(self) -> dict[str, Any]:
        """Return the rule in JSON values."""
        return {"guard": self.kind, "defense": INTERVAL["name"], "detects": False, "defends": True}

    def to(self, device: torch.device | str) -> "IntervalGuard":
        """Move the network to a device."""
        self.model.to(device)
        return self

    @classmethod
    def from_json(cls, model: LocalModel, settings: Mapping[str, Any], class_names: tuple[str, ...]) -> "IntervalGuard":
        """Return the guard that `to_json` described; refuse any other network."""
        return cls(model, class_names)  # type: ignore[arg-type]

    # -- the two verbs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, images: Images) -> Prediction:
        """Return the label of each image."""
        device, at_once = self._check(images)
        scores = []
        with full_precision(device):
            for part in torch.split(images, at_once):
                features = self._normalize(part.to(device))
                for layer in self.model.convolutions():
                    features = F.relu(apply_linear(layer, layer.weight, features) + shape_bias(layer, features))
                last = self.model.fc
                logits = apply_linear(last, last.weight, features) + shape_bias(last, features)
                scores.append(logits.flatten(1).to(images.device))
        joined = torch.cat(scores)
        return Prediction(label=argmax(joined, 1), scores=joined.double())

    @torch.no_grad()
    def certify(
        self, images: Images, patch: Patch, label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> Certificate:
        """Prove, per image, that no such patch changes the label: the prediction, or the class that is given."""
        device, at_once = self._check(images)
        chosen = self._labels(images, label).to(device)
        self.validate(patch, images.shape[-2], images.shape[-1], top_k)
        places = positions(patch, self.model.side, self.model.side, device)
        margins: list[Tensor] = []  # of some images each: images, positions
        rivals: list[Tensor] = []
        with full_precision(device):
            pixels = self._normalize(images.to(device))
            parts = (torch.split(each, max(1, at_once // len(places))) for each in (pixels, chosen))
            for part, own in zip(*parts, strict=True):
                untouched = bound_background(self.model, part)
                windows = (self._window(len(part), some, patch) for some in torch.split(places, at_once))
                lead = torch.cat([self._bound_leads(untouched, window, own) for window in windows], 1)
                rivals.append(argmin(lead, 2))
                margins.append(lead.amin(2))
        margin, rival = torch.cat(margins), torch.cat(rivals)
        weakest = argmin(margin, 1)
        at = (torch.arange(len(images), device=device), weakest)
        home = images.device
        return Certificate(
            label=chosen.to(home),
            margin=margin[at].double().to(home),
            weakest=weakest.to(home),
            rival=rival[at].to(home),
        )

    def for_patch(self, patch: Patch, height: int, width: int) -> "IntervalGuard":
        """Return this guard: its rule does not depend on the patch."""
        return self

    def validate(self, patch: Patch, height: int, width: int, top_k: int = 1) -> None:
        """Raise where bounds are not known: for several patches, the top k, or images of another size."""
        super().validate(patch, height, width, top_k)
        self.model.check_size(height, width)
        positions(patch, height, width)

    def prepare(self, height: int, width: int) -> None:
        """Raise unless images have the size that the network is made for."""
        self.model.check_size(height, width)

    def undefended(self, images: Images) -> Int64[Tensor, " batch"]:
        """Return the label: the rule is the network's own answer, and only the proof is added."""
        return self.predict(images).label

    def locate(self, patch: Patch, height: int, width: int, weakest: int) -> tuple[Box | None, Box | None]:
        """Return the position of that number; there are no cells."""
        top, left = divmod(weakest, width - patch.width + 1)
        return (top, left, patch.height, patch.width), None

    # -- from images to margins ----------------------------------------------------------------------------------------

    def _bound_leads(
        self, untouched: list[Interval], window: "Window", label: Int64[Tensor, " images"]
    ) -> Float[Tensor, "images _places classes"]:
        """Return a lower bound of f_y - f_k for every image and position; infinity for k = y."""
        lead = bound_leads(self.model.fc, *bound_reached(self.model, untouched, window))
        lead = lead.view(len(label), -1, *lead.shape[1:])
        own = label.view(-1, 1, 1, 1).expand(-1, lead.shape[1], 1, lead.shape[3])
        over_rivals = lead.gather(2, own).squeeze(2).nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        return over_rivals.scatter(2, own[..., 0], torch.inf)

    def _window(self, images: int, places: Int64[Tensor, "places 2"], patch: Patch) -> "Window":
        """Return the pixels under the patch, for every image and position, in this order."""
        center, radius = (each.expand(-1, patch.height, patch.width) for each in self._range())
        count = images * len(places)
        return Window(center.expand(count, -1, -1, -1), radius.expand(count, -1, -1, -1), places.repeat(images, 1))

    def _range(self) -> tuple[Tensor, Tensor]:
        """Return center and radius of a pixel that may show anything, once it is normalized."""
        black, white = (self._normalize(torch.full_like(self.model.normalize.mean, each)) for each in (0.0, 1.0))
        return (black + white) / 2, (white - black) / 2

    def _normalize(self, pixels: Tensor) -> Tensor:
        mean, std = (each.to(PRECISION) for each in (self.model.normalize.mean, self.model.normalize.std))
        return (pixels.to(PRECISION) - mean) / std

    def _check(self, images: Images) -> tuple[torch.device, int]:
        """Check the images; return the device of the network and how many images it takes at once there."""
        validate_images(images)
        self.model.check_size(*images.shape[2:])
        device, _ = device_and_dtype(self.model)
        at_once = PIXELS_AT_ONCE.get(device.type, PIXELS_AT_ONCE["cuda"]) // self.model.side**2
        return device, max(1, at_once)

    def _labels(self, images: Images, label: Int64[Tensor, " batch"] | int | None) -> Int64[Tensor, " batch"]:
        if label is None:
            return self.predict(images).label
        if isinstance(label, Tensor) and tuple(label.shape) != (len(images),):
            raise InputError(
                f"`label` must be one class number per image; got shape {tuple(label.shape)} for {len(images)} images."
            )
        given = torch.as_tensor(label, device=images.device).expand(len(images))
        if not bool(((given >= 0) & (given < self.model.classes)).all()):
            raise InputError(f"`label` must be a class number from 0 to {self.model.classes - 1}; got {label}.")
        return given


# -- positions ---------------------------------------------------------------------------------------------------------


def positions(patch: Patch, height: int, width: int, device: torch.device | None = None) -> Int64[Tensor, "places 2"]:
    """Return the upper left pixel of the patch at each of its positions inside the image, row by row."""
    patch.check_fits(height, width)
    if patch.count != 1:
        raise InputError(
            f"`patch` must be a single one for interval bounds; got {patch.count}. Pairs of positions would not finish."
        )
    tops = torch.arange(height - patch.height + 1, device=device)
    return torch.cartesian_prod(tops, torch.arange(width - patch.width + 1, device=device))


def covered_pixels(
    places: Int64[Tensor, "sets 2"], patch: Patch, height: int, width: int
) -> Bool[Tensor, "sets 1 height width"]:
    """Return which pixels the patch covers, by position."""
    rows = torch.arange(height, device=places.device) - places[:, :1]
    columns = torch.arange(width, device=places.device) - places[:, 1:]
    down, along = (rows >= 0) & (rows < patch.height), (columns >= 0) & (columns < patch.width)
    return (down.unsqueeze(2) & along.unsqueeze(1)).unsqueeze(1)


# -- bounds ------------------------------------------------------------------------------------------------------------


def apply_linear(layer: nn.Conv2d, weight: Tensor, inputs: Maps, padding: int | None = None) -> Maps:
    """Return W z for the convolution W with these weights: one matrix product, in which every output is a plain sum."""
    kernel, stride = int(layer.kernel_size[0]), int(layer.stride[0])
    around = int(layer.padding[0]) if padding is None else padding
    rows = F.pad(inputs, (around,) * 4).permute(0, 2, 3, 1).contiguous()
    taps = rows.unfold(1, kernel, stride).unfold(2, kernel, stride).permute(0, 1, 2, 4, 5, 3)
    sums = taps.flatten(3) @ weight.to(inputs.dtype).permute(2, 3, 1, 0).flatten(0, 2)
    return sums.permute(0, 3, 1, 2)


def apply_unpadded(layer: nn.Conv2d, weight: Tensor, inputs: Maps) -> Maps:
    """Return W z where zeros around the image are already part of z."""
    return apply_linear(layer, weight, inputs, padding=0)


def charge_rounding(layer: nn.Conv2d) -> float:
    """Return the charge e = 4 g(n + 8) of a layer with n products in each sum."""
    terms = (layer.weight[0].numel() + 8) * torch.finfo(PRECISION).eps / 2
    return 4 * terms / (1 - terms)


def bound_network(
    model: IntervalCnn,
    center: Maps,
    radius: Maps,
    *,
    product: Product = apply_linear,
    charge: Callable[[nn.Conv2d], float] = charge_rounding,
) -> Interval:
    """Return center and radius of what the last layer reads, of those of normalized pixels."""
    for layer in model.convolutions():
        center, radius = apply_relu(*bound_affine(layer, center, radius, product, charge))
    return center, radius


def bound_affine(
    layer: nn.Conv2d, center: Maps, radius: Maps, product: Product, charge: Callable[[nn.Conv2d], float]
) -> Interval:
    """Return c' = W c + b and r' = |W| (r + e (|c| + r)) + e |b| + 2^-100."""
    e, bias = charge(layer), shape_bias(layer, center)
    widened = radius + e * (center.abs() + radius)
    return (
        product(layer, layer.weight, center) + bias,
        product(layer, take_absolute(layer.weight), widened) + (e * bias.abs() + UNDERFLOW),
    )


def apply_relu(center: Maps, radius: Maps) -> Interval:
    """Return center and radius between the ReLUs of both ends."""
    low, high = F.relu(center - radius), F.relu(center + radius)
    return (low + high) / 2, (high - low) / 2


def bound_leads(
    layer: nn.Conv2d, center: Maps, radius: Maps, charge: Callable[[nn.Conv2d], float] = charge_rounding
) -> Float[Tensor, "_sets classes classes"]:
    """Return M, where M_yk is a lower bound of f_y - f_k over the set that the last layer reads."""
    e, classes = charge(layer), len(layer.weight)
    c, r = center.flatten(1), radius.flatten(1)
    weight, bias = layer.weight.flatten(1).to(c.dtype), layer.bias.to(c.dtype)  # type: ignore[union-attr]
    difference = (weight.unsqueeze(1) - weight).flatten(0, 1)  # W_y - W_k in row y classes + k
    spread = r @ take_absolute(difference).T
    sums = (c.abs() + r) @ weight.abs().T + bias.abs()
    charged = e * (sums.unsqueeze(2) + sums.unsqueeze(1)) + UNDERFLOW
    lead = (c @ difference.T).view(-1, classes, classes) + (bias.unsqueeze(1) - bias)
    return lead - (spread.view(-1, classes, classes) + charged)


def take_absolute(weight: Tensor) -> Tensor:
    """Return |W|."""
    return weight.abs()


def shape_bias(layer: nn.Conv2d, inputs: Maps) -> Float[Tensor, "_channels 1 1"]:
    """Return the bias, in the precision of the inputs."""
    return layer.bias.to(inputs.dtype).view(-1, 1, 1)  # type: ignore[union-attr]


# -- what a patch reaches ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Window:
    """Centre and radius on a part of a map, for many sets at once, and where that part starts in each of them."""

    center: Maps
    radius: Maps
    start: Int64[Tensor, "_sets 2"]


def bound_background(model: IntervalCnn, pixels: Maps) -> list[Interval]:
    """Return center and radius of what each layer reads where no patch is; the radius is all rounding."""
    intervals = [(pixels, torch.zeros_like(pixels))]
    for layer in model.convolutions():
        intervals.append(apply_relu(*bound_affine(layer, *intervals[-1], apply_linear, charge_rounding)))
    return intervals


def bound_reached(model: IntervalCnn, untouched: list[Interval], window: Window) -> Interval:
    """Return center and radius of what the last layer reads with patches on images, of those of the pixels below.

    A layer is computed only where it reads the window of the one before; elsewhere its bounds are the background's.
    """
    for layer, before, after in zip(model.convolutions(), untouched[:-1], untouched[1:], strict=True):
        kernel, stride, padding = int(layer.kernel_size[0]), int(layer.stride[0]), int(layer.padding[0])
        sides = torch.tensor(window.center.shape[2:])
        # Output u reads the inputs from u stride - padding on, `kernel` of them.
        limits = torch.tensor(after[0].shape[2:])
        sizes = torch.minimum((sides + kernel - 2) // stride + 1, limits)
        first = -((kernel - 1 - padding - window.start) // stride)
        start = torch.minimum(first.clamp(min=0), (limits - sizes).to(first.device))
        spans = ((sizes - 1) * stride + kernel).tolist()
        center, radius = paste_window(before, window, start * stride, spans, padding)
        window = Window(*apply_relu(*bound_affine(layer, center, radius, apply_unpadded, charge_rounding)), start)
    whole = torch.zeros_like(window.start)
    return paste_window(untouched[-1], window, whole, list(untouched[-1][0].shape[2:]), 0)


def paste_window(
    background: Interval, window: Window, start: Int64[Tensor, "_sets 2"], spans: list[int], padding: int
) -> Interval:
    """Return the parts of `spans` from `start` on, of backgrounds with zeros around them and windows put in."""
    sets, (images, _, _, _) = len(start), background[0].shape
    image = torch.arange(sets, device=start.device).div(sets // images, rounding_mode="floor").view(-1, 1, 1)
    number = torch.arange(sets, device=start.device).view(-1, 1, 1)
    rows, columns = (start[:, axis, None] + torch.arange(spans[axis], device=start.device) for axis in (0, 1))
    at_row, at_column = rows - padding - window.start[:, :1], columns - padding - window.start[:, 1:]
    height, width = window.center.shape[2:]
    down, along = (at_row >= 0) & (at_row < height), (at_column >= 0) & (at_column < width)
    inside = (down.unsqueeze(2) & along.unsqueeze(1)).unsqueeze(3)
    there = (number, slice(None), at_row.clamp(0, height - 1).unsqueeze(2), at_column.clamp(0, width - 1).unsqueeze(1))
    around = [F.pad(each, (padding,) * 4) for each in background]
    here = (image, slice(None), rows.unsqueeze(2), columns.unsqueeze(1))
    # A slice between index tensors puts the channels last.
    parts = [
        torch.where(inside, own[there], whole[here]).permute(0, 3, 1, 2)
        for own, whole in zip((window.center, window.radius), around, strict=True)
    ]
    return parts[0], parts[1]
