"""What is computed for every image of one size: which masks prove what, and the records that come of it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchguard.defenses import Defense, Undefended
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate
from patchguard.guard import bisect_sides as settled_sides
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch

PLAIN = Undefended()
CURVE = (Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(1), Fraction(8, 5))  # 1, 2, 3, 5, 8 for side 5


@final
@dataclass(frozen=True)
class WrittenPatch:
    """A patch as a user writes it: 5, 24x88, or 2% of each image's area.

    >>> WrittenPatch.read("24x88").key, WrittenPatch.read("2%").at(224, 224)
    ('24x88', Patch(height=32, width=32, count=1))
    """

    text: str
    fixed: Patch | None
    share: Fraction | None

    @classmethod
    def read(cls, text: str) -> "WrittenPatch":
        """Read the text; refuse anything else."""
        pixels = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text)
        percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", text)
        if pixels and int(pixels[1]) and int(pixels[2] or pixels[1]):
            return cls(text, Patch(int(pixels[1]), int(pixels[2] or pixels[1])), None)
        if percent and 0 < Fraction(percent[1]) <= 100:
            return cls(text, None, Fraction(percent[1]) / 100)
        raise InputError(f"`--patch` must be pixels such as 5 or 24x88, or a share of the image, 2%; got {text!r}.")

    @property
    def key(self) -> str:
        """The name of this patch in records: 5x5, 24x88 or 2%."""
        if self.fixed is not None:
            return f"{self.fixed.height}x{self.fixed.width}"
        exact = f"{float((self.share or 0) * 100):.6f}".rstrip("0").rstrip(".")
        return f"{exact}%"

    def at(self, height: int, width: int) -> Patch:
        """Return the patch in the pixels of an image; refuse one that does not fit."""
        if self.fixed is None:
            return Patch.of_area(self.share or 0, height=height, width=width)
        self.fixed.check_fits(height, width)
        return self.fixed


def curve_sides(patch: Patch, size: tuple[int, int]) -> tuple[int, ...]:
    """Return the sides of a curve over patch sizes: up to the patch, and one beyond it where the image has room."""
    side = max(patch.height, patch.width)
    return tuple(sorted({int(-(-side * part // 1)) for part in CURVE if side * part <= min(size)}))


@final
@dataclass(frozen=True)
class Task:
    """One proof per image: against `patch`, under the masks of `guard`."""

    written: WrittenPatch
    patch: Patch
    guard: LocalGuard[Any]
    windows: Windows
    masks: str  # "own" or "refitted"


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """All proofs for source images of one size, from one pass of the network.

    The rule is the guard's own. Where its masks do not lie on the cells of such images, they are refitted to the first
    patch. A patch that the rule's masks do not cover is certified with masks refitted to it.
    """

    guard: LocalGuard[Any]
    size: tuple[int, int]
    tasks: tuple[Task, ...]
    curve: tuple[tuple[int, Defense[Any], Windows], ...]
    largest: int  # side of the largest square that the rule's masks can withstand
    top_k: int
    reached: dict[int, Windows] = field(default_factory=dict)
    places: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    @property
    def rule(self) -> Defense[Any]:
        """The defense whose label is the answer."""
        defense: Defense[Any] = self.guard.defense
        return defense

    def windows(self, side: int) -> Windows:
        """Return what a square patch of this side can reach."""
        if side not in self.reached:
            self.reached[side] = Windows.reached_by(Patch(side), self.field)
        return self.reached[side]

    @cached_property
    def field(self) -> Field:
        """Which source pixels each cell reads."""
        return self.guard.field(*self.size)

    @cached_property
    def squares(self) -> list[int]:
        """The sides that are certified anyway with the rule's masks."""
        own = [task.patch for task in self.tasks if task.guard.defense == self.rule]
        return [patch.height for patch in own if patch.height == patch.width]

    def box(self, task: Task, window: Sequence[int]) -> list[int]:
        """Return a place (top, left, height, width) in the source image from which the patch owns this window."""
        top = self._place(0, self.field.rows, task.patch.height, window[0], window[1])
        left = self._place(1, self.field.columns, task.patch.width, window[2], window[3])
        return [top, left, task.patch.height, task.patch.width]

    def _place(self, axis_number: int, axis: Axis, length: int, start: int, stop: int) -> int:
        """Of the positions that touch the cells start .. stop - 1 and no others, the middle one."""
        known = (axis_number, length, start, stop)
        if known not in self.places:
            cells = np.zeros(axis.cells, dtype=bool)
            cells[np.arange(start, stop) % axis.cells] = True
            touched = axis.touched_cells_by_position(length)
            inside = (touched & ~cells).sum(1) == 0
            score = np.where(inside, (touched & cells).sum(1), -1)
            best = np.flatnonzero(score == score.max())
            self.places[known] = int(best[len(best) // 2])
        return self.places[known]


def make_plan(
    guard: LocalGuard[Any],
    size: tuple[int, int],
    patches: Sequence[WrittenPatch],
    sides: Sequence[int] = (),
    top_k: int = 1,
    *,
    own: bool = True,
) -> Plan:
    """Decide which masks serve which patch; raise where images of this size cannot be certified at all.

    `own` is whether the guard's masks are those of the model, not fitted for this run.
    """
    height, width = size
    asked = [written.at(height, width) for written in patches]
    source_field = guard.field(height, width)
    grid = source_field.grid
    blank = torch.zeros(1, guard.model.classes, *grid)
    probe = guard.evidence(blank)  # checks look at the kind of evidence and the grid alone
    masks = getattr(guard.defense, "masks", None)
    fits = not isinstance(masks, Windows) or masks.grid == grid
    base = guard if fits else guard.for_patch(asked[0], height, width)
    tasks = []
    for written, patch in zip(patches, asked, strict=True):
        windows = Windows.reached_by(patch, source_field)
        covered = base.defense.accepts(probe, windows)
        chosen = base if covered else guard.for_patch(patch, height, width)
        tasks.append(Task(written, patch, chosen, windows, "own" if covered and fits and own else "refitted"))
    for task in tasks:
        task.guard.defense.certify(probe, task.windows, 0, top_k)  # raises before any work is done
    curve = []
    for side in (each for each in sides if each <= min(size)):
        refitted = guard.for_patch(Patch(side), height, width)
        windows = Windows.reached_by(Patch(side), source_field)
        if _certifies(refitted.defense, probe, windows, top_k):
            curve.append((side, refitted.defense, windows))
    largest = _last(min(size), lambda side: base.defense.accepts(probe, Windows.reached_by(Patch(side), source_field)))
    return Plan(base, size, tuple(tasks), tuple(curve), largest, top_k)


def _last(count: int, holds: Callable[[int], bool]) -> int:
    """Return the last of 1 .. count for which a statement holds that, once false, stays false; 0 if none."""
    known, limit = 0, count
    while known < limit:
        middle = (known + limit + 1) // 2
        known, limit = (middle, limit) if holds(middle) else (known, middle - 1)
    return known


def _certifies(defense: Defense[Any], evidence: EvidenceMap, windows: Windows, top_k: int) -> bool:
    """Whether the rule is defined at all: masks that hide every cell leave none to decide."""
    try:
        defense.certify(evidence, windows, 0, top_k)
    except InputError:
        return False
    return True


# -- one batch ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Proofs:
    """Labels and certificates of one batch, each computed once however many entries ask for it."""

    plan: Plan
    evidence: EvidenceMap
    labels: dict[Defense[Any], Int64[Tensor, " batch"]] = field(default_factory=dict)
    found: dict[tuple[Defense[Any], Windows], Certificate] = field(default_factory=dict)

    def label(self, defense: Defense[Any]) -> Int64[Tensor, " batch"]:
        """Return the defended labels."""
        if defense not in self.labels:
            self.labels[defense] = defense.predict(self.evidence).label
        return self.labels[defense]

    def certificate(self, defense: Defense[Any], windows: Windows) -> Certificate:
        """Return the certificates of the defended labels."""
        if (defense, windows) not in self.found:
            proof = defense.certify(self.evidence, windows, self.labels.get(defense), self.plan.top_k)
            self.labels.setdefault(defense, proof.label)
            self.found[defense, windows] = proof
        return self.found[defense, windows]

    def largest(self) -> list[int]:
        """Return the side of the largest square patch that each image is certified against, masks kept."""
        rule, label = self.plan.rule, self.label(self.plan.rule)

        def proves(rows: Tensor, side: int) -> Tensor:
            windows = self.plan.windows(side)
            if (rule, windows) in self.found:
                return self.found[rule, windows].certified[rows]
            proof: Certificate = rule.certify(self.evidence[rows], windows, label[rows], self.plan.top_k)
            return proof.certified

        found: list[int] = settled_sides(label, self.plan.largest, proves, self.plan.squares).tolist()
        return found


def undefended(
    local_logits: Float[Tensor, "batch classes rows columns"], evidence: EvidenceMap, settings: Evidence
) -> list[int]:
    """Return what the network alone would say: the class with the largest sum of local logits."""
    plain = (settings.kind, settings.low, settings.high, settings.bits) == ("logits", None, None, 16)
    labels: list[int] = PLAIN.predict(evidence if plain else local_logits).label.tolist()
    return labels


@torch.no_grad()
def answers(
    plan: Plan, local_logits: Float[Tensor, "batch classes rows columns"], evidence: EvidenceMap
) -> tuple[list[dict[str, Any]], Proofs]:
    """Return what the records of one batch say about each image, and the proofs behind it."""
    proofs = Proofs(plan, evidence)
    entries = {task.written.key: entries_of(plan, task, proofs) for task in plan.tasks}
    largest = proofs.largest()
    refitted: dict[str, list[dict[str, Any]]] = {}
    for side, defense, windows in plan.curve:
        proof = proofs.certificate(defense, windows)
        pairs = zip(proof.label.tolist(), proof.certified.tolist(), strict=True)
        refitted[str(side)] = [{"label": label, "certified": certified} for label, certified in pairs]
    plain = undefended(local_logits, evidence, plan.guard.evidence)
    label = proofs.label(plan.rule).tolist()
    records = [
        {
            "undefended": plain[row],
            "label": label[row],
            "patches": {key: entry[row] for key, entry in entries.items()},
            "largest": largest[row],
            "refitted": {side: entry[row] for side, entry in refitted.items()},
        }
        for row in range(len(label))
    ]
    return records, proofs


def entries_of(plan: Plan, task: Task, proofs: Proofs) -> list[dict[str, Any]]:
    """Return what the records of one batch say about one patch."""
    proof = proofs.certificate(task.guard.defense, task.windows)
    size = len(proof.label)
    weakest = [None] * size if proof.weakest is None else proof.weakest.tolist()
    finite = proof.margin.isfinite().tolist()  # an undefended sum has no margin at all
    numbers = (proof.label.tolist(), proof.margin.tolist(), proof.certified.tolist(), proof.rival.tolist())
    entries = []
    for row, (label, margin, certified, rival) in enumerate(zip(*numbers, strict=True)):
        window = None if weakest[row] is None else task.windows.boxes[weakest[row]].tolist()
        entry: dict[str, Any] = {
            "label": label,
            "margin": margin if finite[row] else None,
            "certified": certified,
            "rival": rival,
            "weakest": weakest[row],
            "window": window,
            "box": None if window is None else plan.box(task, window),
            "masks": task.masks,
        }
        if task.written.share is not None:
            entry |= {"height": task.patch.height, "width": task.patch.width}
        entries.append(entry)
    return entries
