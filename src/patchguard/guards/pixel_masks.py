"""`PixelMaskGuard`: any classifier, called as a black box on masked images.

    guard = patchguard.defend(classifier, Patch(32), size=(224, 224))
    guard.predict(images).label
    guard.certify(images, Patch(32)).certified     # True: no 32 x 32 patch, anywhere, changes that label

C. Xiang, S. Mahloujifar, P. Mittal, "PatchCleanser: certifiably robust defense against adversarial patches for any
image classifier", USENIX Security 2022. Statement and proof: docs/theory.md, "Masks on pixels", in these symbols.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchguard.data.images import validate_images
from patchguard.defenses.serialization import exactly, number, sequence, text, whole
from patchguard.defenses.ties import argmax
from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.geometry.preprocess import Preprocess
from patchguard.guard import Box, Certificate, Examination, Guard, Images, Plan, Prediction, bisect_sides
from patchguard.guards.classifier import Classifier, Function, WholeNetwork, wrap_classifier
from patchguard.guards.identity import canonical, describe_model, digest_tensors
from patchguard.guards.local import LocalGuard
from patchguard.guards.mask_rounds import MaskRounds, Pair, PairLeads
from patchguard.models.base import IMAGENET_MEAN, LocalModel
from patchguard.patch import Patch

Color = tuple[float, float, float]
PIXEL_MASKS = "PixelMasks"  # the name of the rule in run.json, model files and on the command line
DRIFT = 1e-3  # of logits in float32, with room: other batches and devices round differently


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class PixelMaskGuard(Guard):
    r"""Hide one mask, then a second one, and believe the mask that no second one contradicts.

    Symbols.  l(m, m') is the label of the image with the pixels of the masks m and m' set to `fill`, in the source
              image and before any preprocessing; l(m) = l(m, m).
    Rule.     If all l(m) agree: that label. Otherwise z is the label of most masks (ties: smallest). A mask m with
              l(m) = c != z is believed if l(m, m') = c for every mask m'. If some mask is believed: its label; else z.
    Theorem.  If the patch, at every position, lies in a mask m with l(m, m') = y for every m', then the answer is y on
              every image that differs from this one in one such patch.
    Proof.    Let m hide the patch: then l(m, m') is the same on both images. If all masks agree, they agree on
              l(m) = y. No mask n with l(n) = c != y is believed, since l(n, m) = y. So if z = y, the answer is z; and
              if z != y, m is believed, and every other mask that is believed says y, too.

    `drift` is how far a score may move when the classifier is run again, in another batch or on another device. In a
    proof, y counts as the label only where it leads by more than twice that; `predict` takes the plain argmax.

    The `margin` is the smallest lead that the proof rests on, in scores, drift charged; of an image that is not
    certified, the smallest of those that were computed. `weakest` is the number of a position of the patch, counted
    along the rows of the image. The `scores` of a prediction are those of the image without masks; the label need not
    be their argmax.
    """

    kind: ClassVar[str] = "pixel_masks"

    classifier: Classifier
    masks: MaskSet
    fill: Color = IMAGENET_MEAN
    drift: float = DRIFT
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _validate_drift(self.drift)
        if len(self.fill) != 3 or not all(0 <= value <= 1 for value in self.fill):
            raise InputError(f"`fill` must be red, green and blue between 0 and 1; got {self.fill}.")
        if self.class_names and len(self.class_names) != self.classes:
            raise InputError(f"`class_names` must name the {self.classes} classes; got {len(self.class_names)} names.")

    @property
    def classes(self) -> int:
        """Number of classes of the classifier."""
        return self.classifier.classes

    @property
    def most_passes(self) -> int:
        """One for the image as it is, one for each mask, one for each pair of them."""
        return 1 + len(self.masks.boxes) * (len(self.masks.boxes) + 1) // 2

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The network, where the classifier is a torch module."""
        module = self.classifier.module
        if module is None:
            raise AttributeError("a classifier that is no torch module has no `model`")
        return module.network if isinstance(module, WholeNetwork) else module

    @property
    def digest(self) -> str:
        """SHA-256 of the classifier and of every setting."""
        settings = {**self.settings(), "masks": [self.masks.size, self.masks.boxes], "names": self.class_names}
        return digest_tensors({}, canonical({"classifier": self.classifier.digest, **settings}))

    def settings(self) -> dict[str, Any]:
        """Return the rule in JSON values."""
        return {
            "guard": self.kind,
            "defense": PIXEL_MASKS,
            "detects": self.detects,
            "defends": True,
            "masks": len(self.masks.boxes),
            "fill": [float(value) for value in self.fill],
            "drift": float(self.drift),
        }

    def to_json(self) -> dict[str, Any]:
        """Return what makes the answers, besides the network's tensors, as JSON values."""
        module = self.classifier.module
        if module is None:
            raise InputError("a classifier must be a torch module to be saved; this one is a function.")
        preprocess = module.preprocess if isinstance(module, WholeNetwork) else Preprocess()
        return {
            **describe_model(self.model, self.class_names),
            "preprocess": preprocess.to_json(),
            "evidence": None,
            "defense": {
                "name": PIXEL_MASKS,
                "size": list(self.masks.size),
                "boxes": [list(box) for box in self.masks.boxes],
                "per_axis": self.masks.per_axis,
                "fill": [float(value) for value in self.fill],
                "drift": float(self.drift),
                "classes": self.classes,
                "classifier": self.classifier.name,
            },
        }

    @classmethod
    def from_json(cls, model: nn.Module, settings: Mapping[str, Any], class_names: tuple[str, ...]) -> "PixelMaskGuard":
        """Return the guard that `to_json` described; refuse anything else."""
        names = ("name", "size", "boxes", "per_axis", "fill", "drift", "classes", "classifier")
        rule = exactly(settings["defense"], "defense", names)
        height, width = _read_whole(rule["size"], "defense.size", 2)
        boxes = []
        for box in sequence(rule["boxes"], "defense.boxes"):
            top, left, rows, columns = _read_whole(box, "defense.boxes", 4)
            boxes.append((top, left, rows, columns))
        color = sequence(rule["fill"], "defense.fill")
        if len(color) != 3:
            raise InputError(f"`defense.fill` must be red, green and blue; got {len(color)} numbers.")
        red, green, blue = (number(each, "defense.fill") for each in color)
        function = (
            WholeNetwork(Preprocess.from_json(settings["preprocess"]), model)
            if isinstance(model, LocalModel)
            else model
        )
        classifier = Classifier(
            function=function,
            classes=whole(rule["classes"], "defense.classes"),
            name=text(rule["classifier"], "defense.classifier"),
        )
        masks = MaskSet((height, width), tuple(boxes), whole(rule["per_axis"], "defense.per_axis"))
        return cls(
            classifier=classifier,
            masks=masks,
            fill=(red, green, blue),
            drift=number(rule["drift"], "defense.drift"),
            class_names=class_names,
        )

    def _require_network(self) -> WholeNetwork:
        if not isinstance(self.classifier.function, WholeNetwork):
            raise InputError(
                "`classifier` must be a network of this package to be given images after resizing; got "
                f"{type(self.classifier.function).__name__}. Resize the images yourself."
            )
        return self.classifier.function

    # -- the two verbs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, images: Images) -> Prediction:
        """Return the defended label of each image."""
        return self._ask(images).prediction

    @torch.no_grad()
    def certify(
        self, images: Images, patch: Patch, label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> Certificate:
        """Prove, per image, that no such patch changes the label: the prediction, or the class that is given."""
        validate_images(images)
        self.validate(patch, images.shape[-2], images.shape[-1], top_k)
        return self._ask(images, label).certificate(patch)

    def _ask(self, images: Images, label: Tensor | int | None = None) -> "Answers":
        validate_images(images)
        height, width = images.shape[-2:]
        if self.masks.size != (height, width):
            raise InputError(
                f"`images` must have the {self.masks.size[0]} x {self.masks.size[1]} pixels that the masks are made "
                f"for; got {height} x {width}. Resize them, or refit the masks: guard.for_patch(patch, {height}, "
                f"{width})."
            )
        given = None if label is None else _validate_labels(label, images, self.classes)
        return Answers(MaskRounds(self.classifier, self.masks, self.fill, images), self.drift, given)

    # -- masks and patches ---------------------------------------------------------------------------------------------

    def for_patch(self, patch: Patch, height: int, width: int) -> "PixelMaskGuard":
        """Return the guard whose masks cover this patch in such images, as many along each axis as now."""
        return replace(self, masks=MaskSet.covering((height, width), patch, self.masks.per_axis))

    def fit_size(self, patch: Patch, height: int, width: int) -> "PixelMaskGuard":
        """Return this guard where its masks are made for such images, else the one refitted to the patch."""
        return self if self.masks.size == (height, width) else self.for_patch(patch, height, width)

    def covers(self, patch: Patch, height: int, width: int) -> bool:
        """Whether the patch lies in some mask at every position."""
        return self.masks.size == (height, width) and self.masks.covers(patch)

    def validate(self, patch: Patch, height: int, width: int, top_k: int = 1) -> None:
        """Raise for the top k, several patches, and a patch that the masks do not cover."""
        super().validate(patch, height, width, top_k)
        if not self.covers(patch, height, width):
            fitting = MaskSet.covering((height, width), patch, self.masks.per_axis)
            raise InputError(
                f"`patch` must lie inside a mask at every position; {patch.height} x {patch.width} in {height} x "
                f"{width} images does not. {len(fitting.boxes)} masks of {fitting.boxes[0][2]} x {fitting.boxes[0][3]} "
                f"pixels would cover it: guard.for_patch(patch, {height}, {width})."
            )

    @torch.no_grad()
    def largest_certified_patch(self, images: Images) -> Int64[Tensor, " batch"]:
        """As `Guard` says; what was asked for one size is not asked again for another."""
        return self._ask(images).largest(self.largest_covered_side(images.shape[-2], images.shape[-1]))

    # -- runs ----------------------------------------------------------------------------------------------------------

    def prepare(self, height: int, width: int) -> None:
        """Call the classifier on a plain image; raise where it does not take this size."""
        self.classifier(torch.zeros(1, 3, height, width))

    def plan(
        self,
        patches: Sequence[Patch],
        height: int,
        width: int,
        *,
        sides: Sequence[int] = (),
        top_k: int = 1,
        own: bool = True,
        largest: bool = True,
    ) -> Plan:
        """As `Guard` says, without other `sides`: each of them would take a whole round of masks of its own."""
        return super().plan(patches, height, width, top_k=top_k, own=own, largest=largest)

    @torch.no_grad()
    def examine(self, images: Images, plan: Plan) -> Examination:
        """As `Guard` says; whatever uses the same masks shares its rounds."""
        answers: dict[MaskSet, Answers] = {}
        began = time.perf_counter()

        def find(guard: Guard) -> Answers:
            assert isinstance(guard, PixelMaskGuard)
            return answers.setdefault(guard.masks, answers.get(guard.masks) or guard._ask(images))

        own = find(plan.guard)
        return Examination(
            rows=tuple(range(len(images))),
            prediction=own.prediction,
            undefended=argmax(own.rounds.plain, 1),
            certificates=tuple(find(task.guard).certificate(task.patch) for task in plan.tasks),
            largest=own.largest(plan.largest) if plan.largest else None,
            details=answers,
            seconds=time.perf_counter() - began,  # nearly all of it is the classifier's
        )

    def undefended(self, images: Images) -> Int64[Tensor, " batch"]:
        """Return what the classifier says of the images as they are."""
        return argmax(self.classifier(images), 1)

    def locate(self, patch: Patch, height: int, width: int, weakest: int) -> tuple[Box | None, Box | None]:
        """Return the position of that number; there are no cells."""
        top, left = divmod(weakest, width - patch.width + 1)
        return (top, left, patch.height, patch.width), None

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes masks 1"]:
        """Return the scores behind each single mask with their graph: what most masks say is what attacks must move."""
        rounds = MaskRounds(self.classifier, self.masks, self.fill, images)
        pairs = [(image, mask, mask) for image in range(len(images)) for mask in range(len(self.masks.boxes))]
        scores = self.classifier.differentiate(rounds.hide(pairs))
        return scores.view(len(images), -1, self.classes).transpose(1, 2).unsqueeze(3)

    @property
    def differentiable(self) -> bool:
        """Whether `differentiable_logits` works: the classifier is a torch module."""
        return self.classifier.module is not None

    def to_network_pixels(self, images: Images) -> Images:
        """Return the images as the network reads them; for networks of this package alone."""
        return self._require_network().preprocess(images)

    def without_preprocess(self) -> "PixelMaskGuard":
        """Return the guard for images that are already preprocessed; for networks of this package alone."""
        network = WholeNetwork(Preprocess(), self._require_network().network)
        return replace(self, classifier=replace(self.classifier, function=network.eval()))

    def to(self, device: torch.device | str) -> "PixelMaskGuard":
        """Move a torch module to a device."""
        if self.classifier.module is not None:
            self.classifier.module.to(device)
        return self


# -- rule and proof ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Answers:
    """The rule and the proof for one batch; what is asked for one of them serves the others."""

    rounds: MaskRounds
    drift: float
    given: Int64[Tensor, " batch"] | None = None  # to be certified in place of the prediction

    @cached_property
    def prediction(self) -> Prediction:
        """The defended label, and the scores of the images as they are."""
        return Prediction(label=recover_label(self.rounds), scores=self.rounds.plain)

    @cached_property
    def leads(self) -> PairLeads:
        """How far the label that is certified leads behind pairs of masks."""
        return PairLeads(self.rounds, self.prediction.label if self.given is None else self.given, self.drift)

    def certificate(self, patch: Patch) -> Certificate:
        """Prove that the label stays y: at every position, some mask that hides the patch has l(m, m') = y for all m'.

        The margin is the minimum over positions, of the maximum over the masks there, of the smallest lead over m'.
        """
        positions, device = self.rounds.masks.positions(patch), self.rounds.images.device
        self.leads.prove(positions.covering)
        best = np.where(positions.covering, self.leads.worst[:, None], -np.inf)  # images, positions, masks
        weakest, image = best.max(2).argmin(1), np.arange(len(best))
        mask = best[image, weakest].argmax(1)
        second = self.leads.lead[image, mask].argmin(1)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        return Certificate(
            label=self.leads.label,
            margin=tensor(best[image, weakest, mask]),
            weakest=tensor(positions.number[weakest]),
            rival=tensor(self.leads.rival[image, mask, second]),
        )

    def largest(self, limit: int) -> Int64[Tensor, " batch"]:
        """Return the side of the largest square up to `limit` that each image is certified against."""

        def proves(rows: Tensor, side: int) -> Tensor:
            covering = self.rounds.masks.positions(Patch(side)).covering
            self.leads.prove(covering, rows.tolist())
            worst = self.leads.worst[rows.cpu().numpy()]
            return torch.from_numpy((covering & (worst[:, None] > 0)).any(2).all(1)).to(rows.device)

        return bisect_sides(self.leads.label, limit, proves)


def recover_label(rounds: MaskRounds) -> Int64[Tensor, " batch"]:
    """Return the label on which all masks agree; else that of a mask that is believed; else that of most masks."""
    labels = rounds.labels  # l(m)
    majority = argmax(F.one_hot(labels, rounds.single.shape[2]).sum(1), 1)  # z
    deviating = [(image, mask) for image, mask in (labels != majority.unsqueeze(1)).nonzero().tolist()]
    believed = find_believed(rounds, deviating)
    label = majority.clone()
    for (image, mask), holds in reversed(list(zip(deviating, believed, strict=True))):
        if holds:
            label[image] = labels[image, mask]
    return label


def find_believed(rounds: MaskRounds, deviating: Sequence[tuple[int, int]]) -> list[bool]:
    """Return, for each (image, m), whether l(m, m') = l(m) for every m'; masks that say otherwise alone come first."""
    believed = [True] * len(deviating)
    labels = rounds.labels.cpu().numpy()
    questions: list[list[Pair]] = []
    for image, mask in deviating:
        others = (
            other
            for agrees in (False, True)
            for other in np.flatnonzero((labels[image] == labels[image, mask]) == agrees)
        )
        questions.append([(image, mask, int(other)) for other in others if other != mask])

    def hear(numbers: list[int], pairs: list[Pair], scores: Tensor) -> set[int]:
        said = argmax(scores, 1).tolist()
        refuted = {
            number
            for number, (image, mask, _), label in zip(numbers, pairs, said, strict=True)
            if label != labels[image, mask]
        }
        for each in refuted:
            believed[each] = False
        return refuted

    rounds.ask_in_turn(questions, hear)
    return believed


def _read_whole(value: object, name: str, count: int) -> list[int]:
    numbers = [whole(each, name) for each in sequence(value, name)]
    if len(numbers) != count:
        raise InputError(f"`{name}` must hold {count} whole numbers each; got {len(numbers)}.")
    return numbers


def _validate_drift(drift: float) -> None:
    if not (drift >= 0 and np.isfinite(drift)):
        raise InputError(f"`drift` must be a finite number of at least 0; got {drift}.")


def _validate_labels(label: Tensor | int, images: Images, classes: int) -> Int64[Tensor, " batch"]:
    if isinstance(label, Tensor) and tuple(label.shape) != (len(images),):
        raise InputError(
            f"`label` must be one class number per image; got shape {tuple(label.shape)} for {len(images)} images."
        )
    given = torch.as_tensor(label, device=images.device).expand(len(images)).long()
    if not bool(((given >= 0) & (given < classes)).all()):
        raise InputError(f"`label` must be a class number from 0 to {classes - 1}; got {label}.")
    return given


# -- making one --------------------------------------------------------------------------------------------------------


def defend(
    classifier: "Function | str | Path | LocalGuard[Any]",
    patch: Patch,
    *,
    size: tuple[int, int],
    masks: int | MaskSet = 6,
    fill: Color | None = None,
    drift: float = DRIFT,
    class_names: Sequence[str] = (),
    name: str = "",
    batch_size: int | None = None,
) -> PixelMaskGuard:
    """Return a guard around any classifier of source images of `size` = (height, width); nothing is trained.

    `classifier` takes images (batch, 3, height, width) in [0, 1] and returns scores (batch, classes): a torch module,
    any function, or the path of an ONNX file. It normalizes and resizes by itself. It is called a few times here, to
    see that it is a function of single images.

    `masks` masks along each axis cover the patch. More of them are smaller and hide less, which proves more, and cost
    more: masks^2 passes for an answer, about masks^4 / 2 for a proof. A `MaskSet` of your own is taken as it is.
    `fill` is the color of the masks: by default the mean color of the network, where it is known, or of ImageNet.
    `name` says which classifier this is where it is no torch module; certificate files and runs need it. `batch_size`
    is the most images in one call.
    """
    if isinstance(classifier, LocalGuard):
        class_names = class_names or classifier.class_names
        classifier = WholeNetwork(classifier.preprocess, classifier.model)
    covering = MaskSet.covering(size, patch, masks) if isinstance(masks, int) else masks
    _validate_drift(drift)
    function = wrap_classifier(classifier, size, drift=drift, name=name, batch_size=batch_size)
    guard = PixelMaskGuard(
        classifier=function,
        masks=covering,
        fill=_mean_color(function) if fill is None else fill,
        drift=drift,
        class_names=tuple(class_names),
    )
    guard.validate(patch, *size)
    return guard


def _mean_color(classifier: Classifier) -> Color:
    """Return the color that becomes 0 once it is normalized, as far as that is known."""
    module = classifier.module
    network = module.network if isinstance(module, WholeNetwork) else module
    if not isinstance(network, LocalModel):
        return IMAGENET_MEAN
    red, green, blue = network.normalize.config()["mean"]
    return red, green, blue
