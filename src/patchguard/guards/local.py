"""`LocalGuard`: a network whose cells read small boxes of pixels, and a defense that aggregates what they say.

    guard = LocalGuard(preprocess, model, evidence, defense)

    images  --preprocess-->  pixels  --model-->  local logits  --evidence-->  whole numbers, per class and cell
                                                                                    |
    patch  --field of preprocess and model-->  windows of cells  --------------->  defense

Each word of this picture is one file: geometry/preprocess, models, defenses/evidence, geometry/field, geometry/windows
and one file per rule in defenses. A guard only puts them together.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Generic, final, get_args, overload
from weakref import WeakSet

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from patchguard import verify
from patchguard.data.images import validate_images
from patchguard.defenses import Undefended
from patchguard.defenses.base import Defense, Proof
from patchguard.defenses.evidence import Evidence, EvidenceMap, Kind
from patchguard.defenses.serialization import (
    defense_from_json,
    defense_to_json,
    evidence_from_json,
    evidence_to_json,
    find_defense,
)
from patchguard.errors import InputError, NoFieldError
from patchguard.geometry.field import Field, compose, middle_position
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guard import (
    Box,
    Certificate,
    Claim,
    Examination,
    Guard,
    Images,
    Picture,
    Plan,
    Prediction,
    Task,
    concatenate,
    move,
)
from patchguard.guards.cell_claims import claim_cells, compare_cells, require_checkable, rule_to_json
from patchguard.guards.cell_proofs import CellProofs
from patchguard.guards.identity import compute_digest, describe_model
from patchguard.models.base import LocalModel
from patchguard.patch import Patch
from patchguard.runtime import LARGEST_BATCH, device_and_dtype, eval_mode, frozen_parameters, full_precision

logger = logging.getLogger(__name__)

# Network pixels that pass through the model at once. A CPU is fastest while activations fit its cache (8 images of
# 32 x 32, or 1 of 224 x 224); a GPU wants many, within its memory (83 images of 224 x 224).
PIXELS_AT_ONCE = {"cpu": 2**13, "cuda": 2**22}
NOT_FINITE = "makes the network give NaN or infinity"
UNDEFENDED = Undefended()
_warned: WeakSet[nn.Module] = WeakSet()  # networks that a warning was logged about
ANY_MASKS = Windows.sliding(grid=(1, 1), size=(1, 1))  # until masks are fitted to a patch and a size


@final
@dataclass(frozen=True, eq=False)
class LocalGuard(Guard, Generic[Proof]):
    r"""A local model, how its images are prepared, and a defense that aggregates what its cells say.

    Theorem.  That of `Guard`.
    Proof.    `predict` runs the exported graph of the network (`geometry/program.py`), not the module. A cell reads
              only the source pixels of its field, which is derived from that graph and the matrices of the resizing.
              So a patched image changes only cells that the patch touches, and these lie in one region of
              `windows(patch)`. That no contents of such a region change the label is the theorem of the defense,
              computed in whole numbers.

    A certificate tolerates a change of `evidence.drift` in every cell outside the patch, and no more: with drift 0 both
    runs of the network must give equal numbers there. Masks lie on the cells, so they also fix the grid: images of a
    size that gives other cells are refused.

    Everything is computed on the model's device, in its precision, without autocast and TF32 and with the model in
    evaluation mode; answers come back on the device of `images`.
    """

    kind: ClassVar[str] = "cells"

    preprocess: Preprocess
    model: LocalModel
    evidence: Evidence
    defense: Defense[Proof]
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, LocalModel):
            raise InputError(
                f"`model` must be a LocalModel; got {type(self.model).__name__}. Wrap your own network: "
                "patchguard.models.wrap(network, classes=...)."
            )
        if self.class_names and len(self.class_names) != self.model.classes:
            raise InputError(
                f"`class_names` must name the model's {self.model.classes} classes; got {len(self.class_names)} names."
            )

    @property
    def classes(self) -> int:
        """Number of classes of the model."""
        return self.model.classes

    @property
    def detects(self) -> bool:
        """Whether the defense raises alerts."""
        return self.defense.detects

    @property
    def digest(self) -> str:
        """SHA-256 of the model's tensors and of every setting."""
        return compute_digest(self.model, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return what makes the answers, besides the model's tensors, as JSON values."""
        return {
            **describe_model(self.model, self.class_names),
            "preprocess": self.preprocess.to_json(),
            "evidence": evidence_to_json(self.evidence),
            "defense": defense_to_json(self.defense),
        }

    @classmethod
    def from_json(
        cls, model: LocalModel, settings: Mapping[str, Any], class_names: tuple[str, ...]
    ) -> "LocalGuard[Any]":
        """Return the guard that `to_json` described; refuse anything else."""
        preprocess = Preprocess.from_json(settings["preprocess"])
        evidence, defense = evidence_from_json(settings["evidence"]), defense_from_json(settings["defense"])
        return cls(preprocess, model, evidence, defense, class_names)

    # -- the two verbs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, images: Images) -> Prediction:
        """Return the defended label of each image."""
        answers = [self.defense.predict(self._evidence(part, images)) for part in self._local_logits(images)]
        return move(concatenate(answers), images.device)

    @overload
    def certify(
        self, images: Images, patch: Patch, label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> Proof: ...
    @overload
    def certify(
        self, images: Images, patch: Sequence[Patch], label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> tuple[Proof, ...]: ...
    @torch.no_grad()
    def certify(
        self,
        images: Images,
        patch: Patch | Sequence[Patch],
        label: Int64[Tensor, " batch"] | int | None = None,
        top_k: int = 1,
    ) -> Proof | tuple[Proof, ...]:
        """Prove, per image, that no such patch changes the answer; several patches share one pass of the network.

        `label=None` certifies the defended prediction, otherwise the given class: a positive margin then implies that
        it is the defended prediction. With `top_k > 1` the statement is that the label stays among the k best.
        """
        patches = _validate_patches(patch)
        if isinstance(label, Tensor) and tuple(label.shape) != (len(images),):
            raise InputError(
                f"`label` must be one class number per image; got shape {tuple(label.shape)} for {len(images)} images."
            )
        windows: list[Windows] = []
        proofs: list[list[Proof]] = []
        first = 0
        for local_logits in self._local_logits(images, proving=True):
            # Looked up only now: a GPU is at work on the logits meanwhile.
            if not windows:
                windows = [self.windows(each, *images.shape[-2:]) for each in patches]
                self._warn_of_covered_cells(patches, *images.shape[-2:])
            evidence = self._evidence(local_logits, images)
            chosen = label[first : first + len(evidence)] if isinstance(label, Tensor) else label
            if chosen is None and len(windows) > 1:
                chosen = self.defense.predict(evidence).label
            proofs.append([self.defense.certify(evidence, each, chosen, top_k) for each in windows])
            first += len(evidence)
        joined = tuple(move(concatenate(list(parts)), images.device) for parts in zip(*proofs, strict=True))
        return joined[0] if isinstance(patch, Patch) else joined

    # -- masks and patches ---------------------------------------------------------------------------------------------

    def for_patch(self, patch: Patch, height: int, width: int) -> "LocalGuard[Proof]":
        """Return the guard whose masks are exactly the windows that `patch` can reach in `height` x `width` images.

        Defenses that set aside a number of cells get as many as the largest of these windows has; others stay as they
        are. This changes the rule: the new guard may label an image differently.
        """
        return replace(self, defense=self.defense.fit_to(self.windows(patch, height, width)))

    def fit_size(self, patch: Patch, height: int, width: int) -> "LocalGuard[Proof]":
        """Return this guard where its masks lie on the cells of such images, else the one refitted to the patch."""
        grid = self.field(height, width).grid
        return self if self.defense.grid in (None, grid) else self.for_patch(patch, height, width)

    def covers(self, patch: Patch, height: int, width: int) -> bool:
        """Whether the defense accepts the windows of such a patch."""
        windows = self.windows(patch, height, width)
        return self.defense.accepts(self._probe(windows.grid), windows)

    def validate(self, patch: Patch, height: int, width: int, top_k: int = 1) -> None:
        """Raise where `certify` would refuse this patch in images of this size, whatever they show."""
        windows = self.windows(patch, height, width)
        self.defense.certify(self._probe(windows.grid), windows, 0, top_k)

    def _probe(self, grid: tuple[int, int]) -> EvidenceMap:
        """Return evidence of nothing: checks look at its kind and grid alone."""
        return self.evidence(torch.zeros(1, self.classes, *grid))

    @torch.no_grad()
    def largest_certified_patch(self, images: Images) -> Int64[Tensor, " batch"]:
        """As `Guard` says, on one pass of the network."""
        height, width = images.shape[-2:]
        sides = []
        for local_logits in self._local_logits(images, proving=True):
            evidence = self._evidence(local_logits, images)
            self.defense.validate_windows(evidence, self.windows(Patch(1), height, width))
            limit = self.largest_covered_side(height, width)
            sides.append(CellProofs(evidence, (height, width)).largest(self, limit))
        return torch.cat(sides).to(images.device)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def prepare(self, height: int, width: int) -> None:
        """Trace the network for images of this size; raise where it has no field."""
        self.field(height, width)

    def network_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of such images after preprocessing."""
        return self.preprocess.output_size(height, width)

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
        """As `Guard` says; warn of a patch that touches all cells."""
        plan = super().plan(patches, height, width, sides=sides, top_k=top_k, own=own, largest=largest)
        self._warn_of_covered_cells(patches, height, width)
        return plan

    @torch.no_grad()
    def examine(self, images: Images, plan: Plan) -> Examination:
        """As `Guard` says, from one pass of the network: every proof is computed from the same evidence."""
        began = time.perf_counter()
        local_logits = torch.cat([part.to(images.device) for part in self._local_logits(images, proving=True)])
        if local_logits.device.type == "cuda":
            torch.cuda.synchronize(local_logits.device)
        seconds = time.perf_counter() - began
        evidence = self.evidence(local_logits)
        finite = evidence.finite.tolist()
        rows = tuple(row for row, good in enumerate(finite) if good)
        failures = {row: NOT_FINITE for row, good in enumerate(finite) if not good}
        if failures:
            chosen = torch.tensor(rows, dtype=torch.int64, device=local_logits.device)
            evidence, local_logits = evidence[chosen], local_logits[chosen]
        if not rows:
            return Examination(rows=(), failures=failures, seconds=seconds)
        proofs, guard = CellProofs(evidence, plan.size, plan.top_k), _require_cells(plan.guard)
        own = [task.patch for task in plan.tasks if _require_cells(task.guard).defense == guard.defense]
        squares = tuple(patch.height for patch in own if patch.height == patch.width)
        return Examination(
            rows=rows,
            failures=failures,
            prediction=proofs.prediction(guard),
            undefended=self._undefended(local_logits, evidence),
            certificates=tuple(proofs.certificate(_require_cells(task.guard), task.patch) for task in plan.tasks),
            curve=tuple(proofs.certificate(_require_cells(other), Patch(side)) for side, other in plan.curve),
            largest=proofs.largest(guard, plan.largest, squares) if plan.largest and not self.detects else None,
            details=evidence,
            seconds=seconds,
        )

    def undefended(self, images: Images) -> Int64[Tensor, " batch"]:
        """Return what the network alone would say: the class with the largest sum of local logits."""
        local_logits = self.local_logits(images)
        return self._undefended(local_logits, self.evidence(local_logits))

    def _undefended(
        self, local_logits: Float[Tensor, "some classes rows columns"], evidence: EvidenceMap
    ) -> Int64[Tensor, " some"]:
        settings = self.evidence
        plain = (settings.kind, settings.low, settings.high, settings.bits) == ("logits", None, None, 16)
        return UNDEFENDED.predict(evidence if plain else local_logits).label

    def locate(self, patch: Patch, height: int, width: int, weakest: int) -> tuple[Box | None, Box | None]:
        """Return a place from which the patch owns the weakest window, and that window."""
        top, bottom, left, right = self.windows(patch, height, width).boxes[weakest].tolist()
        field = self.field(height, width)
        row = middle_position(field.rows, patch.height, top, bottom)
        column = middle_position(field.columns, patch.width, left, right)
        return (row, column, patch.height, patch.width), (top, bottom, left, right)

    def picture(self, examination: Examination, row: int, task: Task, classes: Sequence[int]) -> Picture:
        """Return the evidence of some classes, and the window that the rule hides of the first."""
        evidence: EvidenceMap = examination.details[row : row + 1]
        maps = tuple((evidence.values[0, each].double() / evidence.scale).float().cpu() for each in classes)
        return Picture(maps, _require_cells(task.guard).defense.hidden_window(evidence, classes[0]))

    def evidence_arrays(self, examination: Examination, row: int) -> dict[str, Tensor]:
        """Return the evidence in whole units, and their scale."""
        evidence: EvidenceMap = examination.details
        return {"evidence": evidence.values[row].cpu(), "scale": torch.tensor(evidence.scale)}

    # -- certificate files ---------------------------------------------------------------------------------------------

    def claim(
        self, examination: Examination, row: int, certificate: Certificate, patch: Patch, size: tuple[int, int]
    ) -> Claim:
        """Return evidence, field and rule of one image."""
        evidence: EvidenceMap = examination.details[row : row + 1]
        # A positive margin implies that the label is the defended one.
        if not bool(certificate.certified) and int(self.defense.predict(evidence).label) != int(certificate.label):
            raise InputError("a certificate file must be about the defended label. Certify with `label=None`.")
        return claim_cells(
            defense=self.defense,
            settings=self.evidence,
            evidence=evidence,
            certificate=certificate,
            field=self.field(*size),
            patch=patch,
            windows=self.windows(patch, *size),
            preprocess=self.preprocess,
        )

    def validate_claims(self) -> None:
        """Raise unless verify.py knows the defense."""
        require_checkable(self.defense)

    def compare_claim(self, claim: dict[str, Any], array: Any, pixels: UInt8[Tensor, "3 height width"]) -> str | None:
        """As `compare_cells` says."""
        if claim["format"] != verify.FORMAT:
            return "it makes no claim about cells"
        return compare_cells(claim, array, self, pixels)

    def has_rule_of(self, claim: dict[str, Any]) -> bool:
        """Whether the defense of a claim is this one, masks included."""
        return bool(claim["defense"] == rule_to_json(self.defense))

    # -- settings ------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return defense and evidence in JSON values."""
        return {"guard": self.kind, **self.defense.settings(), "evidence": evidence_to_json(self.evidence)}

    def override(
        self, *, defense: str = "", evidence: str = "", threshold: str = "", tau: float | None = None
    ) -> "LocalGuard[Any]":
        """Return the guard with another aggregation, evidence, threshold or tau; itself where none is given.

        Another defense brings its own kind of evidence; `evidence` names one instead. The drift stays; a tau does not,
        since it counts units of the model's own evidence. New masks are not yet fitted: `for_patch` does that.
        """
        rule: Defense[Any] = find_defense(defense).fitted(ANY_MASKS) if defense else self.defense
        if evidence and evidence not in get_args(Kind):
            raise InputError(f"`--evidence` must be one of {', '.join(get_args(Kind))}; got {evidence!r}.")
        settings = self.evidence
        if defense or evidence:
            usual = rule.default_evidence
            low = usual.low if usual.kind == "logits" else 0.0
            settings = Evidence(kind=evidence, low=low if evidence == "logits" else 0.0) if evidence else usual
            settings = replace(settings, drift=self.evidence.drift)
        if threshold:
            rule = rule.with_threshold(_read_fraction(threshold))
        rule = rule.with_tau(tau, new_units=settings.kind != self.evidence.kind)
        unchanged = rule is self.defense and settings == self.evidence
        return self if unchanged else replace(self, defense=rule, evidence=settings)

    def to(self, device: torch.device | str) -> "LocalGuard[Proof]":
        """Move the model to a device."""
        self.model.to(device)
        return self

    def to_network_pixels(self, images: Images) -> Float[Tensor, "batch 3 rows columns"]:
        """Return the images as `preprocess` leaves them."""
        return self.preprocess(images)

    def without_preprocess(self) -> "LocalGuard[Proof]":
        """Return the guard for images that are already preprocessed: patches then live in network pixels."""
        return replace(self, preprocess=Preprocess())

    # -- what lies between images and answers --------------------------------------------------------------------------

    def field(self, height: int, width: int) -> Field:
        """Return which pixels of a `height` x `width` source image each cell reads, through the whole chain."""
        return _compose_field(self._cells(height, width), self.preprocess, height, width)

    def windows(self, patch: Patch, height: int, width: int) -> Windows:
        """Return the boxes of cells that the patch can reach in source images of `height` x `width` pixels."""
        return _find_windows(patch, self._cells(height, width), self.preprocess, height, width)

    @torch.no_grad()
    def local_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of every cell, before evidence is made of them."""
        return torch.cat([part.to(images.device) for part in self._local_logits(images)])

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return `local_logits` with their graph: gradients flow to `images`, none to the parameters.

        For attacks and saliency, in one piece: the caller chooses how many images fit the memory. Autocast of the
        caller holds for the network, so that gradients may be computed in bfloat16; answers come from `predict`.
        """
        device, dtype = device_and_dtype(self.model)
        with eval_mode(self.model), frozen_parameters(self.model):
            with torch.autocast(device.type, enabled=False):
                pixels = self.preprocess(images.to(device)).to(dtype)
            if device.type == "cpu" or torch.is_autocast_enabled(device.type):
                pixels = pixels.contiguous(memory_format=torch.channels_last)
            local_logits: Tensor = self.model(pixels)
        return local_logits.to(images.device)

    @torch.no_grad()
    def evidence_of(self, images: Images) -> EvidenceMap:
        """Return the evidence that the defense decides on."""
        return self.evidence(self.local_logits(images))

    def _local_logits(
        self, images: Images, *, proving: bool = False
    ) -> Iterator[Float[Tensor, "some classes rows columns"]]:
        """Check the images, and run them through the network in parts that fit the memory.

        A network without a field may answer; for `proving`, it is refused before it runs.
        """
        validate_images(images)
        device, dtype = device_and_dtype(self.model)
        height, width = self.preprocess.output_size(*images.shape[-2:])
        self.model.check_size(height, width)
        at_once = PIXELS_AT_ONCE.get(device.type, PIXELS_AT_ONCE["cuda"]) // (height * width)
        run = self.model.program(height, width) if proving else self._network(height, width)
        for part in torch.split(images, min(max(1, at_once), LARGEST_BATCH)):
            with eval_mode(self.model), full_precision(device):
                local_logits = run(self.preprocess(part.to(device)).to(dtype))
            yield local_logits

    def _network(self, height: int, width: int) -> Callable[[Tensor], Tensor]:
        """Return the program of the network; or the network itself if it has no field, and so no certificate either."""
        try:
            return self.model.program(height, width)
        except NoFieldError:
            return self.model

    def _cells(self, height: int, width: int) -> Field:
        """Return the field of the network alone, which keeps it as long as its layers stay the same."""
        return self.model.field(*self.preprocess.output_size(height, width))

    def _warn_of_covered_cells(self, patches: Sequence[Patch], height: int, width: int) -> None:
        """Log once per network that nothing is certified since a patch can touch all cells, and from which layer on."""
        if not self.defense.defends or self.model in _warned:
            return
        field, support = self.field(height, width), self.preprocess.support(height, width)
        for patch in patches:
            if field.is_covered_by(patch.height, patch.width):
                _warned.add(self.model)
                layers = self.model.program(*support.grid).layers
                since = (
                    layer for layer, each in layers if compose(each, support).is_covered_by(patch.height, patch.width)
                )
                logger.warning(
                    f"a patch of {patch.height} x {patch.width} pixels can touch all {field.grid[0]} x {field.grid[1]} "
                    f"cells of this network in images of {height} x {width}, so nothing can be certified; its cells "
                    f"see that much from {next(since, type(self.model).__name__)} on. Use a network whose cells see "
                    "less, or hide pixels instead of cells: patchguard.defend works with any classifier."
                )
                return

    def _evidence(self, local_logits: Float[Tensor, "some classes rows columns"], images: Images) -> EvidenceMap:
        """Return the evidence of a part of `images`; refuse cells that the masks are not made for."""
        grid, expected = tuple(local_logits.shape[2:]), self.defense.grid
        if expected not in (None, grid):
            height, width = images.shape[-2:]
            raise InputError(
                f"`images` of {height} x {width} pixels give {grid[0]} x {grid[1]} cells, but this guard's masks are "
                f"made for {expected[0]} x {expected[1]}. Resize the images, or refit the masks: "
                f"guard.for_patch(patch, {height}, {width})."
            )
        return self.evidence(local_logits)


def _require_cells(guard: Guard) -> LocalGuard[Any]:
    """Return a guard of a plan, which this kind of guard has made."""
    assert isinstance(guard, LocalGuard)
    return guard


@lru_cache(maxsize=256)
def _compose_field(cells: Field, preprocess: Preprocess, height: int, width: int) -> Field:
    return compose(cells, preprocess.support(height, width))


@lru_cache(maxsize=1024)
def _find_windows(patch: Patch, cells: Field, preprocess: Preprocess, height: int, width: int) -> Windows:
    return Windows.reached_by(patch, _compose_field(cells, preprocess, height, width))


def _read_fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"`--threshold` must be a fraction such as 0.2 or 1/5; got {text!r}.") from None


def _validate_patches(patch: Patch | Sequence[Patch]) -> list[Patch]:
    patches = [patch] if isinstance(patch, Patch) else list(patch) if isinstance(patch, Sequence) else []
    if not patches or not all(isinstance(each, Patch) for each in patches):
        raise InputError(f"`patch` must be a Patch or a sequence of at least one; got {patch!r}. Write Patch(5).")
    return patches
