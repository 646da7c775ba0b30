"""`Guard`: the contract of a classifier that proves its answers. Read this file first.

    guard = patchguard.load("cifar10")
    guard.predict(images).label                    # the defended label
    guard.certify(images, Patch(5)).certified      # True: no 5 x 5 patch, anywhere, changes that label

Four kinds of guards keep this contract, each in one file of guards/:

    local        a network whose cells read small boxes of pixels; whole numbers of evidence, one pass
    pixel_masks  any classifier, called on masked images; labels behind all pairs of masks
    interval     a small network of known layers; interval bounds, one pass per position
    (your own)   subclass `Guard`, write `predict` and `certify`; the rest follows

The command line, runs, reports, attacks and certificate files speak to this contract only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, final

import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.patch import Patch

Images: TypeAlias = Float[Tensor, "batch 3 height width"]
Box: TypeAlias = tuple[int, int, int, int]
Masks: TypeAlias = Literal["own", "refitted"]


# -- answers -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The defended label, the score of every class, and the alert of a guard that detects."""

    label: Int64[Tensor, " batch"]
    scores: Float64[Tensor, "batch classes"]
    alert: Bool[Tensor, " batch"] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No patch takes `label` from the top k of the prediction, where `certified`.

    `margin` is the worst case over all places of the patch, in the units of the guard's scores, with drift already
    charged: strictly positive means proved. `weakest` is where it is attained (`Guard.locate` turns it into pixels) and
    `rival` the class that comes closest there: what an attack on an image that is not certified should aim at.
    Position-free certificates know no weakest place: None.
    """

    label: Int64[Tensor, " batch"]
    margin: Float64[Tensor, " batch"]
    weakest: Int64[Tensor, "batch *count"] | None
    rival: Int64[Tensor, " batch"]

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Whether the label is proved to stay."""
        return self.margin > 0


@final
@dataclass(frozen=True, kw_only=True)
class DetectionCertificate:
    """Every patch yields `label` OR AN ALERT, where `label_or_alert`.

    This says less than a `Certificate`: an attacker may still force an alert. It has no attribute `certified` so that
    the two cannot be confused. `alert` tells whether the image as it is raises one (a false alarm if it is clean).
    """

    label: Int64[Tensor, " batch"]
    margin: Float64[Tensor, " batch"]
    weakest: Int64[Tensor, "batch *count"] | None
    rival: Int64[Tensor, " batch"]
    alert: Bool[Tensor, " batch"]

    @property
    def label_or_alert(self) -> Bool[Tensor, " batch"]:
        """Whether every attack is proved to give the label or an alert."""
        return self.margin > 0


Answer = TypeVar("Answer", Prediction, Certificate, DetectionCertificate)
AnyCertificate: TypeAlias = Certificate | DetectionCertificate


def concatenate(answers: list[Answer]) -> Answer:
    """Join the answers for consecutive parts of a batch."""
    first = answers[0]
    if len(answers) == 1:
        return first
    joined: dict[str, Any] = {}
    for each in fields(first):
        parts = [getattr(answer, each.name) for answer in answers]
        joined[each.name] = None if parts[0] is None else torch.cat(parts)
    return type(first)(**joined)


def select_row(answer: Answer, row: int) -> Answer:
    """Return the answer for one image of a batch, as a batch of one."""
    rows = {name: value[row : row + 1] for name, value in vars(answer).items() if isinstance(value, Tensor)}
    return replace(answer, **rows)


def move(answer: Answer, device: torch.device) -> Answer:
    """Return the answer with its tensors on a device."""
    tensors = {name: value.to(device) for name, value in vars(answer).items() if isinstance(value, Tensor)}
    return replace(answer, **tensors)


# -- what a run asks ---------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Task:
    """One proof per image: against `patch`, by the rule of `guard`, whose masks are the model's own or refitted."""

    patch: Patch
    guard: "Guard"
    masks: Masks


@final
@dataclass(frozen=True)
class Plan:
    """Every proof that a run wants for source images of one size (height, width).

    The labels are those of `guard`. `curve` holds guards with masks refitted to square patches of growing side, and
    `largest` is the side of the largest square that the guard's own masks withstand: 0 does not ask for
    `Guard.largest_certified_patch`.
    """

    guard: "Guard"
    size: tuple[int, int]
    tasks: tuple[Task, ...]
    curve: tuple[tuple[int, "Guard"], ...] = ()
    largest: int = 0
    top_k: int = 1


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examination:
    """Everything that a run records about a batch, from one pass of the network where the guard knows how.

    `failures` says, by row, why an image has no answer; all other entries are about the other `rows`, in order.
    `certificates` belong to the tasks of the plan and `curve` to its sides. `details` is the guard's own, for its
    pictures, files and refutations. `seconds` is the time that the network took, where the guard measures it.
    """

    rows: tuple[int, ...]
    prediction: Prediction | None = None  # None where no row has an answer
    undefended: Int64[Tensor, " some"] | None = None
    certificates: tuple[AnyCertificate, ...] = ()
    curve: tuple[AnyCertificate, ...] = ()
    largest: Int64[Tensor, " some"] | None = None
    failures: dict[int, str] = field(default_factory=dict)
    details: Any = None
    seconds: float = 0.0


@final
@dataclass(frozen=True, eq=False)
class Picture:
    """What a report draws over an image: maps of evidence on the cells, and the cells that the rule hides.

    `maps` belong to the classes that were asked for, each (rows, columns); `mask` is (top, bottom, left, right) in
    cells.
    """

    maps: tuple[Float[Tensor, "rows columns"], ...]
    mask: Box | None = None


@final
@dataclass(frozen=True, eq=False)
class Claim:
    """What the standalone checker needs to recompute one certificate: entries of the claim, digests, and an array."""

    entries: dict[str, Any]
    digests: dict[str, str]
    array: bytes  # a .npy file of 64-bit integers


# -- the contract ------------------------------------------------------------------------------------------------------


class Guard(ABC):
    r"""A classifier that proves its answers.

    Theorem.  Let `certify(images, patch)` give image x the label y and say `certified`. Then `predict` answers y for
              every image with pixels in [0, 1] that equals x outside `patch.count` rectangles of `patch.height` x
              `patch.width` source pixels, wherever in the image they lie and whatever they show.

    Each kind of guard proves this theorem for its own rule, in its docstring. (With `top_k`: y stays among the k best.
    A guard that `detects` proves less: the answer is y or an alert.)

    Two things the theorem does not say:

    * Arithmetic.  The two runs of the network, on the image and on the patched one, may differ by rounding where the
      patch has no influence (another device, batch size or kernel). What a guard tolerates there is its stated drift.
    * Clean images.  A certificate is about the image it was computed on. An image met in the wild may already carry a
      patch; it can then be certified for the attacker's label.

    The masks of a rule, where it has any, are part of it: `certify` keeps them and refuses a patch that they do not
    cover; `for_patch` returns another guard, with other masks, whose labels may differ.

    A subclass must write `predict`, `certify`, `classes` and `digest`. What follows the two verbs has defaults that
    call them; a guard that computes several answers in one pass overrides `examine`.
    """

    model: nn.Module  # the network, where there is one: for model files
    kind: ClassVar[str] = ""  # the name of this kind in run.json and certificate files; "" takes the class name

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty where nobody names them."""
        return ()

    @property
    def detects(self) -> bool:
        """Whether the guard proves the label or an alert: its certificates are `DetectionCertificate`s."""
        return False

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of classes."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of everything that makes the answers: weights and settings."""

    # -- the two verbs -------------------------------------------------------------------------------------------------

    @abstractmethod
    def predict(self, images: Images) -> Prediction:
        """Return the defended label of each image."""

    @abstractmethod
    def certify(
        self, images: Images, patch: Patch, label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> Any:
        """Prove, per image, that no such patch changes the answer: a `Certificate`, or a `DetectionCertificate`.

        `label=None` certifies the defended prediction, otherwise the given class: a positive margin then implies that
        it is the defended prediction. With `top_k > 1` the statement is that the label stays among the k best.
        """

    # -- masks and patches ---------------------------------------------------------------------------------------------

    def for_patch(self, patch: Patch, height: int, width: int) -> "Guard":
        """Return the guard with masks refitted to this patch in `height` x `width` images.

        This changes the rule: the new guard may label an image differently. A rule without masks stays as it is.
        """
        return self

    def fit_size(self, patch: Patch, height: int, width: int) -> "Guard":
        """Return this guard where its masks are made for such images, else the one refitted to the patch."""
        return self

    def covers(self, patch: Patch, height: int, width: int) -> bool:
        """Whether the masks, as they are, withstand such a patch at all; a rule without masks withstands any."""
        return True

    def validate(self, patch: Patch, height: int, width: int, top_k: int = 1) -> None:
        """Raise where `certify` would refuse this patch in images of this size, whatever they show."""
        patch.check_fits(height, width)
        if top_k != 1:
            raise InputError(f"`top_k` must be 1 for {type(self).__name__}; got {top_k}.")

    @torch.no_grad()
    def largest_certified_patch(self, images: Images) -> Int64[Tensor, " batch"]:
        """Return the side of the largest square patch that each image is certified against, 0 if there is none.

        The masks stay as they are and limit the answer: it is at most `largest_covered_side(height, width)`, whatever
        the image shows; `for_patch` makes masks for larger patches. Found by bisection: each side returned was itself
        certified, and larger ones are not, since a larger patch can do all that a smaller one can.
        (Only the bounds of robust masking with a threshold above 0 might certify one size and not a smaller one; the
        side is then still certified, perhaps not the largest.)
        """
        size = (images.shape[-2], images.shape[-1])
        label = self.predict(images).label

        def proves(rows: Tensor, side: int) -> Tensor:
            return require_label(self.certify(images[rows.to(images.device)], Patch(side), label[rows])).certified

        return bisect_sides(label, self.largest_covered_side(*size), proves)

    def largest_covered_side(self, height: int, width: int) -> int:
        """Return the side of the largest square patch that the masks withstand in such images, 0 if there is none."""
        smallest, limit = 0, min(height, width)
        while smallest < limit:
            middle = (smallest + limit + 1) // 2
            covered = self.covers(Patch(middle), height, width)
            smallest, limit = (middle, limit) if covered else (smallest, middle - 1)
        return smallest

    # -- runs ----------------------------------------------------------------------------------------------------------

    def prepare(self, height: int, width: int) -> None:  # noqa: B027
        """Do once what images of this size need; raise where nothing can be proved about them."""

    def network_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that such images have for the network: `prepare` does its work once for each."""
        return height, width

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
        """Decide which masks serve which patch; raise where images of this size cannot be certified at all.

        The rule is the guard's own. Where its masks are not made for such images, they are refitted to the first patch;
        a patch that they do not cover is certified with masks refitted to it. `sides` are squares that are always
        certified with refitted masks, where that can be done. `own` is whether the masks are those of the model.
        """
        base = self.fit_size(patches[0], height, width)
        tasks = []
        for patch in patches:
            covered = base.covers(patch, height, width)
            guard = base if covered else self.for_patch(patch, height, width)
            tasks.append(Task(patch, guard, "own" if covered and base is self and own else "refitted"))
        for task in tasks:
            task.guard.validate(task.patch, height, width, top_k)
        curve = []
        for side in (each for each in sides if each <= min(height, width)):
            refitted = self.for_patch(Patch(side), height, width)
            if _is_valid(refitted, Patch(side), height, width, top_k):
                curve.append((side, refitted))
        limit = base.largest_covered_side(height, width) if largest else 0
        return Plan(base, (height, width), tuple(tasks), tuple(curve), limit, top_k)

    @torch.no_grad()
    def examine(self, images: Images, plan: Plan) -> Examination:
        """Compute everything that `plan` wants about a batch; called on the guard that made the plan."""
        prediction = plan.guard.predict(images)
        certificates = []
        for task in plan.tasks:
            label = prediction.label if task.guard is plan.guard else None
            certificates.append(task.guard.certify(images, task.patch, label, plan.top_k))
        return Examination(
            rows=tuple(range(len(images))),
            prediction=prediction,
            undefended=plan.guard.undefended(images),
            certificates=tuple(certificates),
            curve=tuple(guard.certify(images, Patch(side), None, plan.top_k) for side, guard in plan.curve),
            largest=plan.guard.largest_certified_patch(images) if plan.largest and not self.detects else None,
        )

    def undefended(self, images: Images) -> Int64[Tensor, " batch"] | None:
        """Return what the network alone would say, None where there is no such answer."""
        return None

    def locate(self, patch: Patch, height: int, width: int, weakest: int) -> tuple[Box | None, Box | None]:
        """Return where in the source image a patch attains the margin, and the cells that it then owns.

        The first is (top, left, height, width) in pixels, the second (top, bottom, left, right) in cells; None where
        the guard knows no such thing.
        """
        return None, None

    def picture(self, examination: Examination, row: int, task: Task, classes: Sequence[int]) -> Picture | None:
        """Return what a report draws over row `row` of an examination; None draws the image alone."""
        return None

    def evidence_arrays(self, examination: Examination, row: int) -> dict[str, Tensor]:
        """Return the numbers behind row `row` of an examination, for whoever must understand a refuted proof."""
        return {}

    # -- certificate files ---------------------------------------------------------------------------------------------

    def claim(
        self, examination: Examination, row: int, certificate: Certificate, patch: Patch, size: tuple[int, int]
    ) -> Claim | None:
        """Return what verify.py needs to recompute the certificate of row `row`, which is about one image.

        None where it cannot: the file is then a statement that only the holder of the guard can confirm.
        """
        return None

    def validate_claims(self) -> None:  # noqa: B027
        """Raise where no certificate file can be written about this guard."""

    def compare_claim(self, claim: dict[str, Any], array: Any, pixels: UInt8[Tensor, "3 height width"]) -> str | None:
        """Return the first way in which a claim of this kind is not about this guard and image, or None."""
        return f"{type(self).__name__} makes no claims of this kind"

    def has_rule_of(self, claim: dict[str, Any]) -> bool:
        """Whether the rule in a claim is the guard's as it is, not with masks fitted to the claim's patch."""
        return True

    # -- settings ------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the rule in JSON values, for run.json and reports."""
        name = type(self).__name__
        return {"guard": self.kind or name, "defense": name, "detects": self.detects, "defends": True}

    def override(
        self, *, defense: str = "", evidence: str = "", threshold: str = "", tau: float | None = None
    ) -> "Guard":
        """Return the guard with another aggregation, evidence, threshold or tau; itself where none is given."""
        if defense or evidence or threshold or tau is not None:
            raise InputError(
                f"`--defense`, `--evidence`, `--threshold` and `--tau` are for guards with cells; this one is "
                f"{type(self).__name__}. Leave them out."
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return what makes the answers, besides the network's tensors, as JSON values: what a model file holds."""
        raise InputError(f"{type(self).__name__} cannot be saved to a model file.")

    def to(self, device: torch.device | str) -> "Guard":
        """Move the network to a device; answers come back on the device of the images."""
        return self

    def to_network_pixels(self, images: Images) -> Images:
        """Return source images as the network reads them: resized and cropped."""
        return images

    def without_preprocess(self) -> "Guard":
        """Return the guard for images that are already preprocessed: patches then live in network pixels."""
        return self


def require_label(certificate: AnyCertificate) -> Certificate:
    """Return a certificate of the label; refuse one of detection."""
    if not isinstance(certificate, Certificate):
        raise InputError("`largest_certified_patch` needs a guard that certifies labels; this one detects.")
    return certificate


def bisect_sides(
    label: Int64[Tensor, " batch"],
    limit: int,
    proves: Callable[[Int64[Tensor, " _some"], int], Bool[Tensor, " _some"]],
    known: Sequence[int] = (),
) -> Int64[Tensor, " batch"]:
    """Return, per image, the largest side up to `limit` for which `proves(images, side)` holds, 0 if for none.

    A larger patch can do all that a smaller one can. Sides in `known` cost nothing and come first.
    """
    sides = torch.zeros_like(label)

    def search(rows: Tensor, proved: int, limit: int) -> None:
        """Settle images that are certified for side `proved` and for none above `limit`."""
        if proved == limit or len(rows) == 0:
            sides[rows] = proved
            return
        free = [side for side in known if proved < side <= limit]
        side = max(free) if free else (proved + limit + 1) // 2
        certified = proves(rows, side)
        search(rows[certified], side, limit)
        search(rows[~certified], proved, side - 1)

    search(torch.arange(len(label), device=label.device), 0, limit)
    return sides


def _is_valid(guard: Guard, patch: Patch, height: int, width: int, top_k: int) -> bool:
    try:
        guard.validate(patch, height, width, top_k)
    except InputError:
        return False
    return True
