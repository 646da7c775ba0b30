"""`Defense`: from evidence to a label and a proof. The base class checks the input; a subclass writes the rule."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from numbers import Integral
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.defenses.evidence import Evidence, EvidenceMap, check_map
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, DetectionCertificate, Prediction, concatenate

Proof = TypeVar("Proof", Certificate, DetectionCertificate)
LocalEvidence: TypeAlias = EvidenceMap | Float[Tensor, "batch classes rows columns"]

# Evidence entries handled at once: on a CPU few enough that memory is reused, on an accelerator enough to fill it.
ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
LARGEST_TAU = 2.0**24  # in the finest fixed point still far from the ends of 64 bits


class Defense(ABC, Generic[Proof]):
    """A secure aggregation: a rule (`predict`) and a proof about that rule (`certify`).

    Both take an `EvidenceMap`, or local logits (batch, classes, rows, columns) that `default_evidence` turns into one.
    What differs between defenses is said here, by class attributes and methods; nobody else asks for their class.
    """

    default_evidence: ClassVar[Evidence]
    largest_top_k: ClassVar[int | None] = None  # None: any k below the number of classes
    detects: ClassVar[bool] = False  # whether it answers a label or an alert: certificates are `DetectionCertificate`s
    defends: ClassVar[bool] = True  # False: a baseline that certifies nothing
    checkable: ClassVar[bool] = False  # whether verify.py recomputes its certificates

    # -- the two verbs -------------------------------------------------------------------------------------------------

    def predict(self, evidence: LocalEvidence) -> Prediction:
        """Return the defended label of each image."""
        return concatenate([self._predict(part) for part in self._parts(evidence)])

    def certify(
        self,
        evidence: LocalEvidence,
        windows: Windows,
        label: Int64[Tensor, " batch"] | int | None = None,
        top_k: int = 1,
    ) -> Proof:
        """Prove, per image, that no contents of any region of `windows` change the answer.

        `label=None` certifies the defended prediction, otherwise the given class: a positive margin then implies that
        it is the defended prediction. With `top_k > 1` the statement is that the label stays among the k best.
        """
        chosen_labels = None if label is None else self.validate_labels(label, evidence)
        answers = []
        first = 0
        for part in self._parts(evidence):
            if not bool(part.finite.all()):
                bad = first + int(part.finite.logical_not().nonzero()[0])
                raise InputError(
                    f"evidence must be finite to be certified; image {bad} of the batch holds NaN or infinity. "
                    "Nothing was certified; `predict` still answers."
                )
            self.validate(part, windows, top_k)
            here = slice(first, first + len(part))
            chosen = self._label(part) if chosen_labels is None else chosen_labels[here].to(part.values.device)
            answers.append(self._certify(part, windows, chosen, top_k))
            first += len(part)
        return concatenate(answers)

    def validate(self, evidence: EvidenceMap, windows: Windows, top_k: int) -> None:
        """Raise where `certify` would refuse such a question, whatever the evidence says."""
        self.validate_evidence(evidence)
        self._validate_query(evidence, windows, top_k)
        self.validate_windows(evidence, windows)

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where this defense cannot certify anything for such evidence and windows."""

    def accepts(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """Whether `validate_windows` lets such evidence and windows pass."""
        try:
            self.validate_windows(evidence, windows)
        except InputError:
            return False
        return True

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """Whether a negative margin (top 1, no drift) always comes with contents that change the label."""
        return True

    # -- masks and settings --------------------------------------------------------------------------------------------

    @classmethod
    def fitted(cls, windows: Windows) -> "Defense[Any]":
        """Return this defense with its default settings, made to withstand an attack on any of the windows."""
        return cls()

    def fit_to(self, windows: Windows) -> "Defense[Proof]":
        """Return the defense with masks, or a number of cells set aside, that just withstand attacks on the windows.

        A defense without such settings stays as it is.
        """
        return self

    @property
    def grid(self) -> tuple[int, int] | None:
        """The grid of cells that the masks are made for; None fits any."""
        return None

    def with_threshold(self, threshold: Fraction) -> "Defense[Proof]":
        """Return the defense with another detection threshold."""
        raise InputError(f"`--threshold` belongs to RobustMasking; got {type(self).__name__}. Leave it out.")

    def with_tau(self, tau: float | None, *, new_units: bool) -> "Defense[Proof]":
        """Return the defense with another `tau`; None keeps it, unless evidence changes its units."""
        if tau is not None:
            raise InputError(
                f"`--tau` belongs to DoubleMasking and MaskedAgreement; got {type(self).__name__}. Leave it out."
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Return what a report says about the defense, in JSON values."""
        threshold, tau = (getattr(self, name, None) for name in ("threshold", "tau"))
        return {
            "defense": type(self).__name__,
            "threshold": None if threshold is None else str(threshold),
            "tau": tau or None,  # 0 is none
            "detects": self.detects,
            "defends": self.defends,
        }

    def margin_unit(self, scale: int) -> int:
        """Return the denominator of margins: they are whole multiples of one over it."""
        return scale

    def hidden_window(self, evidence: EvidenceMap, label: int) -> tuple[int, int, int, int] | None:
        """Return the one window (top, bottom, left, right) that the rule hides of a class, for the first image."""
        return None

    # -- what a subclass writes ----------------------------------------------------------------------------------------

    @abstractmethod
    def _predict(self, evidence: EvidenceMap) -> Prediction: ...

    @abstractmethod
    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Proof: ...

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise where the rule itself is not defined for such evidence."""

    def _label(self, evidence: EvidenceMap) -> Int64[Tensor, " batch"]:
        return self._predict(evidence).label

    def _parts(self, evidence: LocalEvidence) -> Iterator[EvidenceMap]:
        if isinstance(evidence, Tensor):
            check_map(evidence)
            shape = evidence.shape
        elif isinstance(evidence, EvidenceMap):
            shape = evidence.values.shape
            if shape[0] == 0:
                raise InputError("evidence must not be empty; got no image.")
        else:
            raise InputError(f"`evidence` must be a tensor or an EvidenceMap; got {type(evidence).__name__}.")
        device = evidence.device if isinstance(evidence, Tensor) else evidence.values.device
        some = max(1, ELEMENTS.get(device.type, ELEMENTS["cuda"]) // shape[1:].numel())
        for first in range(0, shape[0], some):
            part = evidence[first : first + some]
            admitted = part if isinstance(part, EvidenceMap) else self.default_evidence(part)
            self.validate_evidence(admitted)
            yield admitted

    def _validate_query(self, evidence: EvidenceMap, windows: Windows, top_k: int) -> None:
        if windows.grid != evidence.grid:
            raise InputError(
                f"`windows` must lie on the evidence's grid of {evidence.grid[0]} x {evidence.grid[1]} cells; "
                f"got windows of a {windows.grid[0]} x {windows.grid[1]} grid."
            )
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k < evidence.classes:
            raise InputError(
                f"`top_k` must be a whole number from 1 to {evidence.classes - 1} for {evidence.classes} classes; "
                f"got {top_k!r}."
            )
        if self.largest_top_k is not None and top_k > self.largest_top_k:
            raise InputError(f"{type(self).__name__} has no certificate for the top {top_k}; use `top_k=1`.")

    def validate_labels(self, label: Tensor | int, evidence: LocalEvidence) -> Tensor:
        """Return one class number per image; raise unless that is what was given."""
        count, classes = len(evidence), evidence.shape[1] if isinstance(evidence, Tensor) else evidence.classes
        if isinstance(label, Integral) and not isinstance(label, bool):
            label = torch.full((count,), int(label))
        if not isinstance(label, Tensor) or label.dim() != 1 or label.is_floating_point() or label.dtype == torch.bool:
            raise InputError("`label` must be one whole number, or a tensor with one class number per image.")
        if len(label) != count:
            raise InputError(f"`label` must have one entry per image; got {len(label)} for {count} images.")
        if int(label.min()) < 0 or int(label.max()) >= classes:
            raise InputError(f"`label` must lie between 0 and {classes - 1}; got {label.tolist()[:8]}.")
        return label.long()


class MaskedDefense(Defense[Proof]):
    """A defense whose rule hides the cells of `masks`: a frozen dataclass with that field."""

    masks: Windows
    checkable: ClassVar[bool] = True

    @classmethod
    def fitted(cls, windows: Windows) -> "Defense[Any]":
        """Return this defense with its default settings and the windows as masks."""
        factory: Any = cls
        defense: Defense[Any] = factory(masks=windows)
        return defense

    def fit_to(self, windows: Windows) -> "Defense[Proof]":
        """Return the defense with the windows as masks."""
        settings: Any = self
        defense: Defense[Proof] = replace(settings, masks=windows)
        return defense

    @property
    def grid(self) -> tuple[int, int] | None:
        """The grid of the masks."""
        return self.masks.grid


def validate_masks(masks: Windows, evidence: EvidenceMap) -> None:
    """Raise unless the masks lie on the evidence's grid."""
    if masks.grid != evidence.grid:
        raise InputError(
            f"the defense masks a grid of {masks.grid[0]} x {masks.grid[1]} cells, but the evidence has "
            f"{evidence.grid[0]} x {evidence.grid[1]}. Build the masks for this grid."
        )


def require_cover(masks: Windows, windows: Windows, *, otherwise: str = "") -> None:
    """Raise where some region lies in no mask; `otherwise` adds what else would help."""
    if not masks.cover(windows):
        raise InputError(
            "some window lies in no mask, so an attack there has no limit and nothing can be certified. "
            f"Use masks at least as large as the windows (`guard.for_patch`){otherwise}."
        )


def validate_tau(tau: float) -> None:
    """Raise unless a lead of more than `tau` can be asked for: less than 0 asks for none."""
    if isinstance(tau, bool) or not 0 <= tau <= LARGEST_TAU:
        raise InputError(f"`tau` must lie between 0 and {LARGEST_TAU:.0f}; got {tau}.")


def tau_units(tau: float, evidence: EvidenceMap) -> int:
    """Return T = floor(tau scale): for whole numbers, a lead above tau is one above T."""
    return int(tau * evidence.scale)


def select(values: Int[Tensor, "batch classes *rest"], label: Int64[Tensor, " batch"]) -> Tensor:
    """Return the entry of class `label` for each image."""
    return values[torch.arange(len(label), device=label.device), label]


def without(label: Tensor, values: Tensor) -> Tensor:
    """Replace the label's own entry in (batch, classes) by the smallest integer: the label is not its own rival."""
    return values.scatter(1, label.unsqueeze(1), torch.iinfo(torch.int64).min)


def strongest(priority: Int64[Tensor, "batch classes"], label: Tensor, count: int) -> Int64[Tensor, "batch some"]:
    """Return the `count` rivals of highest priority, in ascending order of class."""
    return without(label, priority).topk(count, dim=1).indices.sort(dim=1).values


def contenders(
    ceiling: Int64[Tensor, "batch classes"],
    reached: Int64[Tensor, " batch"],
    label: Int64[Tensor, " batch"],
    top_k: int,
) -> Int64[Tensor, "batch some"]:
    """Return the rivals whose bound can matter: those whose `ceiling` is at least what k others surely reach."""
    counts = (without(label, ceiling) >= reached.unsqueeze(1)).sum(1)
    return strongest(ceiling, label, max(top_k, int(counts.max())))


def gather(values: Tensor, classes: Int64[Tensor, "batch some"]) -> Tensor:
    """Return (batch, some, rows, columns): the maps of the chosen classes."""
    return values[torch.arange(len(classes), device=classes.device).unsqueeze(1), classes]


def worst_case(
    margins: Int64[Tensor, "batch some regions"],
    classes: Int64[Tensor, "batch some"],
    label: Int64[Tensor, " batch"],
    windows: Windows | None,
    unit: int,
    top_k: int = 1,
) -> Certificate:
    """Turn the margin against every rival in every region into a certificate (position-free: `windows=None`).

    The label leaves the top k in a region once k rivals pass it: the k-th smallest margin counts.
    """
    per_region = margins.amin(1) if top_k == 1 else margins.sort(dim=1).values[:, top_k - 1]
    region = ties.argmin(per_region, dim=1)
    worst = per_region.gather(1, region.unsqueeze(1))
    there = margins.gather(2, region.view(-1, 1, 1).expand(-1, margins.shape[1], 1)).squeeze(2)
    rival = classes.gather(1, ties.argmax((there == worst).long(), dim=1).unsqueeze(1)).squeeze(1)
    return Certificate(
        label=label,
        margin=worst.squeeze(1).double() / unit,
        weakest=None if windows is None else boxes_of(region, windows),
        rival=rival,
    )


def boxes_of(region: Int64[Tensor, " batch"], windows: Windows) -> Int64[Tensor, "batch *count"]:
    """Return the boxes, by number, of each region."""
    if windows.count == 1:
        return region
    return torch.from_numpy(windows.members).to(region.device)[region]


def prediction(scores: Int64[Tensor, "batch classes"], unit: int, **more: Tensor) -> Prediction:
    """Return the class of the highest score (ties: smallest index)."""
    return Prediction(label=ties.argmax(scores, dim=1), scores=scores.double() / unit, **more)
