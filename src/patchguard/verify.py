"""Check certificate files (`*.pgc`) without trusting the package that wrote them.

    python verify.py FILE...

This file needs Python and numpy, imports nothing of patchguard, and works when copied out alone; that is why it is one
long file. It recomputes the whole claim from the evidence in the file, in whole numbers and without shortcuts: which
cells the patch can touch from every position, the defended label, and the margin against every rival in every window.
One line per file says `valid` or `invalid` and why; the exit status is 0 if all are valid, 1 otherwise.

A valid file proves: *if* the network reads only the pixels that the field in the file says, and *if* it gives this
evidence for the image up to the stated drift, *then* no such patch changes the label. The two conditions are about the
network and the image, and the line repeats them; `patchguard verify --model --image` checks them, too. Digests detect
damage; they do not say who wrote the file.

The time is bounded: a file whose check could take longer than half a minute is refused before it begins.

Symbols: u_k(i) evidence of class k in cell i; w a window, the cells one patch can touch; v, m masks; y the label;
t_k the evidence outside w; [l, h] what a cell can hold. `lower` and `upper` bound u under drift.
"""

import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

FORMAT = 1
STATEMENT = 2  # the format of files without anything to recompute
MEMBERS = ("certificate.json", "evidence.npy")
ENTRIES = {
    "format", "package", "class_names", "defense", "evidence", "units", "shape", "source", "patch", "field", "windows",
    "wrap", "label", "margin", "certified", "weakest", "rival", "digests", "digest",
}  # fmt: skip
STATED = {
    "format", "package", "class_names", "guard", "source", "patch", "label", "margin", "certified", "rival", "digests",
    "digest",
}  # fmt: skip
DIGESTS = {"model", "preprocess", "image", "evidence"}
VOTES = ("vote", "prediction")
KINDS = ("logits", "confidence", "tanh", *VOTES)
CEILING = 4096.0  # what logits without a bound are clipped to

# What a valid file proves rests on this, until somebody with the network has checked it.
CONDITION = "the file's field and evidence are the network's (patchguard verify --model --image checks that)"

# Limits that are checked before anything is computed, so that no file can exhaust memory, time or 64-bit integers.
LARGEST_JSON = 2**22
LARGEST_EVIDENCE = 2**22  # entries
LARGEST_GRID = 2**17  # cells
LARGEST_AXIS = 2**14  # pixels
LARGEST_FIELD = 2**24  # pixels times cells of one axis
LARGEST_BOXES = 2**16
LARGEST_TABLE = 2**22  # classes times masks, or positions along one axis times windows
LARGEST_WORK = 1_500_000_000  # entries looked at, about ten nanoseconds each
LARGEST_SUM = 2**50
LARGEST_DENOMINATOR = 1000  # times two sums, this stays below 2**61
LARGEST_TAU = 2.0**24
AT_ONCE = 2**17  # entries
CALL = 2**13  # the cost of doing anything at all, as entries
NO_RIVAL = 2**63 - 1  # the margin against the label itself


class Refused(Exception):
    """Why a file is invalid."""


@final
@dataclass(frozen=True)
class Verdict:
    """What the check of one file found. A valid file may claim that its image is *not* certified.

    A statement has nothing that could be recomputed here: it is not `checked`, and so not `valid`.
    """

    valid: bool
    certified: bool
    reason: str
    checked: bool = True

    def __str__(self) -> str:
        word = "valid" if self.valid else "invalid" if self.checked else "unchecked"
        return f"{word}: {self.reason}"


# -- the answer --------------------------------------------------------------------------------------------------------


def check(path: str | os.PathLike[str]) -> Verdict:
    """Check one file. Never raises: whatever is wrong with it is the reason why it is invalid."""
    try:
        return check_bytes(load(path))
    except Refused as refusal:
        return Verdict(valid=False, certified=False, reason=str(refusal))


def check_bytes(data: bytes, condition: str = CONDITION) -> Verdict:
    """Check the contents of one file. Never raises.

    A valid claim is stated to hold if `condition` does; "" is for callers who have checked the network themselves.
    """
    try:
        claim, layers = read(data)
        if claim["format"] == STATEMENT:
            return Verdict(valid=False, certified=False, reason=_state(claim), checked=False)
        return Verdict(valid=True, certified=claim["certified"], reason=_prove(claim, layers, condition))
    except Refused as refusal:
        return Verdict(valid=False, certified=False, reason=str(refusal))
    except Exception as error:  # what no check above foresaw must not pass for a proof, nor end a long run
        return Verdict(valid=False, certified=False, reason=f"it cannot be read ({type(error).__name__})")


def _state(claim: dict[str, Any]) -> str:
    """Check that a statement is one, and say what it states and that nothing proves it here."""
    height, width = (_whole(size, "source", 1, LARGEST_AXIS) for size in _sequence(claim["source"], "source", 2, 2))
    patch = _entries(claim["patch"], "patch", {"height", "width", "count"})
    sides = _whole(patch["height"], "patch.height", 1, height), _whole(patch["width"], "patch.width", 1, width)
    _whole(patch["count"], "patch.count", 1, LARGEST_AXIS)
    label = _whole(claim["label"], "label", 0, LARGEST_EVIDENCE)
    _whole(claim["rival"], "rival", 0, LARGEST_EVIDENCE)
    if type(claim["margin"]) is not float or _flag(claim["certified"], "certified") is not (claim["margin"] > 0):
        raise Refused("its margin must be a decimal, above 0 where it claims to be certified and nowhere else")
    if not isinstance(claim["guard"], str) or re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,63}", claim["guard"]) is None:
        raise Refused("`guard` must be the name of a kind of guard")
    outcome = "certified" if claim["certified"] else "NOT certified"
    return (
        f"it states that label {label} is {outcome} against every {sides[0]} x {sides[1]} patch, but holds no proof "
        "that can be checked without the network; patchguard verify --model --image certifies the image anew"
    )


def _prove(claim: dict[str, Any], layers: Integers, condition: str) -> str:
    """Recompute everything that the file claims; return the claim in words."""
    values, lower, upper, windows, rule, patch = admit(claim, layers)
    label = _whole(claim["label"], "label", 0, len(values) - 1)
    answer = rule.label(values)
    if answer != label:
        raise Refused(f"it claims label {label}, but the rule gives {answer} for its evidence")
    per_window, closest = rule.margins(label, lower, upper, windows)
    _check_margin(claim, per_window, closest, claim["units"]["scale"] * rule.multiple)
    outcome = "is certified against" if claim["certified"] else "is NOT certified against"
    provided = f" if {condition}" if condition else ""
    # Quoted, short and last: a name is what the writer calls a class, and must not read like a verdict.
    name = f", class {claim['class_names'][label][:40]!a}" if claim["class_names"] else ""
    return f"label {label} {outcome} every {patch} patch{provided}, margin {claim['margin']['value']:.6g}{name}"


def admit(
    claim: dict[str, Any], layers: Integers
) -> tuple[Integers, Integers, Integers, "Boxes", "RobustMasking | DoubleMasking | Sum", str]:
    """Check all but the label and the margin; refuse what would take too long to check.

    Returns the evidence with its bounds, the windows, the rule, and the patch in words.
    """
    values, lower, upper = _bounds(claim, layers)
    windows = _boxes(claim["windows"], "windows", claim["wrap"], values.shape[1:])
    rule = _rule(claim, values.shape[1:])
    masks = len(rule.masks.places) if rule.masks else 0
    if len(values) * masks > LARGEST_TABLE or rule.work(len(values), windows) > LARGEST_WORK:
        raise Refused(
            f"it would take too long to check {len(windows.places)} windows and {masks} masks "
            f"on {len(values)} x {windows.grid[0]} x {windows.grid[1]} values of evidence"
        )
    return values, lower, upper, windows, rule, _check_windows(claim, windows)


def _check_margin(claim: dict[str, Any], per_window: list[int], closest: set[int], denominator: int) -> None:
    """The claimed margin must be the smallest over all windows, and `certified` means strictly positive."""
    stated = _entries(claim["margin"], "margin", {"units", "denominator", "value"})
    margin = min(per_window)
    if type(stated["denominator"]) is not int or stated["denominator"] != denominator:
        raise Refused(f"its margin must be stated in units of 1/{denominator}")
    if type(stated["units"]) is not int or stated["units"] != margin:
        raise Refused(f"it claims another margin than the {margin} units that its evidence gives")
    if type(stated["value"]) is not float or stated["value"] != margin / denominator:
        raise Refused("its margin as a decimal is not its margin in units")
    if claim["certified"] is not (margin > 0):
        raise Refused(f"it claims the contrary of what a margin of {margin} units says about being certified")
    if type(claim["rival"]) is not int or claim["rival"] not in closest:
        raise Refused("the rival that it names does not attain the margin")
    if claim["defense"].get("spatial") is False:  # one margin for all positions
        if claim["weakest"] is not None:
            raise Refused("a position-free margin has no weakest window")
    elif per_window[_whole(claim["weakest"], "weakest", 0, len(per_window) - 1)] != margin:
        raise Refused("the weakest window that it names does not attain the margin")


# -- boxes of cells ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Boxes:
    """Boxes of cells: box p has the rows top, ..., bottom - 1 and the columns left, ..., right - 1 of places[p].

    On an axis that wraps around, rows and columns count modulo the grid.
    """

    grid: tuple[int, int]
    places: list[tuple[int, int, int, int]]

    def rows(self, number: int) -> Integers:
        """Rows of box `number`."""
        return np.arange(*self.places[number][:2]) % self.grid[0]

    def columns(self, number: int) -> Integers:
        """Columns of box `number`."""
        return np.arange(*self.places[number][2:]) % self.grid[1]

    def size(self, number: int) -> int:
        """How many cells box `number` has."""
        top, bottom, left, right = self.places[number]
        return (bottom - top) * (right - left)

    def cells(self, number: int) -> Integers:
        """1 in the cells of box `number`, 0 elsewhere: (1, rows, columns)."""
        return 1 - self.outside(number, np.ones((1, *self.grid), dtype=np.int64))

    def outside(self, number: int, maps: Integers) -> Integers:
        """The maps (maps, rows, columns) with 0 in box `number`."""
        rest = maps.copy()
        rest[:, self.rows(number)[:, None], self.columns(number)[None, :]] = 0
        return rest

    @cached_property
    def ends(self) -> tuple[Integers, Integers, Integers, Integers]:
        """The first and last rows and columns of all boxes: top, bottom, left, right."""
        top, bottom, left, right = np.array(self.places).T
        return top, bottom, left, right

    @cached_property
    def repeats(self) -> tuple[int, int]:
        """How often a map is put beside itself along rows and columns, so that no box passes its end."""
        _, bottom, _, right = self.ends
        return 2 if bottom.max() > self.grid[0] else 1, 2 if right.max() > self.grid[1] else 1

    def sums(self, maps: Integers) -> Integers:
        """The sum of each map over each box: (maps, boxes) of (maps, rows, columns)."""
        some = max(1, AT_ONCE // self._entries)  # few maps at a time stay in the processor's cache
        return np.concatenate([self._sums(maps[first : first + some]) for first in range(0, len(maps), some)])

    def _sums(self, maps: Integers) -> Integers:
        if self.repeats != (1, 1):
            maps = np.tile(maps, (1, *self.repeats))
        count, height, width = maps.shape
        before = np.zeros((count, height + 1, width + 1), dtype=np.int64)  # at (i, j): all cells above i, left of j
        np.cumsum(maps, axis=1, out=before[:, 1:, 1:])
        np.cumsum(before[:, 1:, 1:], axis=2, out=before[:, 1:, 1:])
        at, flat = width + 1, before.reshape(count, -1)
        top, bottom, left, right = self.ends
        totals: Integers = flat.take(bottom * at + right, axis=1)
        totals -= flat.take(top * at + right, axis=1)
        totals -= flat.take(bottom * at + left, axis=1)
        totals += flat.take(top * at + left, axis=1)
        return totals

    @property
    def _entries(self) -> int:
        """Entries that `sums` looks at for each map: cells, boxes, and a few for the map itself."""
        return math.prod(self.grid) * math.prod(self.repeats) + len(self.places) + 16

    def work(self, maps: int) -> int:
        """Entries that `sums` looks at for so many maps."""
        return CALL + maps * self._entries


def _boxes(value: object, name: str, wrap: object, grid: Any) -> Boxes:
    around = [_flag(each, "wrap") for each in _sequence(wrap, "wrap", 2, 2)]
    places, distinct = [], set()
    for box in _sequence(value, name, 1, LARGEST_BOXES):
        ends: list[int] = []
        cells: list[tuple[int, int]] = []
        for start, stop, size, circle in zip(_sequence(box, name, 4, 4)[::2], box[1::2], grid, around, strict=True):
            start = _whole(start, name, 0, size - 1)
            ends += [start, _whole(stop, name, start + 1, start + size if circle else size)]
            cells.append((0, size) if stop - start == size else (start, stop))  # a whole circle starts anywhere
        places.append((ends[0], ends[1], ends[2], ends[3]))
        distinct.add(tuple(cells))
    if len(distinct) < len(places):
        raise Refused(f"`{name}` must not name the same cells twice")
    return Boxes((grid[0], grid[1]), places)


# -- from pixels to cells ----------------------------------------------------------------------------------------------


def _check_windows(claim: dict[str, Any], windows: Boxes) -> str:
    """Put the patch on every position of the source image: the cells it touches must lie in one window.

    A cell reads the product of a row interval and a column interval of pixels, so the cells that a patch touches are
    the touched rows times the touched columns.
    """
    patch = _entries(claim["patch"], "patch", {"height", "width", "count"})
    if type(patch["count"]) is not int or patch["count"] != 1:
        raise Refused("`patch.count` must be 1: this checker has no theorem for several patches")
    field = _entries(claim["field"], "field", {"rows", "columns"})
    height, width = (_whole(size, "source", 1, LARGEST_AXIS) for size in _sequence(claim["source"], "source", 2, 2))
    side = _whole(patch["height"], "patch.height", 1, height), _whole(patch["width"], "patch.width", 1, width)
    rows = _find_touched(field["rows"], "field.rows", windows.grid[0], height, side[0])
    columns = _find_touched(field["columns"], "field.columns", windows.grid[1], width, side[1])
    both, number = len(rows) * len(columns), len(windows.places)
    if (len(rows) + len(columns)) * CALL + both * number > LARGEST_WORK or len(columns) * number > LARGEST_TABLE:
        raise Refused(f"it would take too long to compare {number} windows with {both} positions of the patch")
    top, bottom, left, right = windows.ends
    wide = np.array([_holds(touched, left, right) for touched in columns])  # [position, window]
    for touched in rows:
        if not (_holds(touched, top, bottom) & wide).any(axis=1).all():
            raise Refused("there is a position of the patch where it touches cells that no window holds together")
    return f"{side[0]} x {side[1]}"


def _holds(touched: Truths, starts: Integers, stops: Integers) -> Truths:
    """Which of the intervals hold all touched cells of one axis; past its end, they go on at cell 0."""
    before = np.concatenate([[0], np.tile(touched, 2).cumsum()])
    inside: Truths = before[stops] - before[starts] == touched.sum()
    return inside


def _find_touched(value: object, name: str, cells: int, size: int, length: int) -> list[Truths]:
    """Which cells of one axis `length` pixels touch, at every position; equal answers once."""
    if size * cells > LARGEST_FIELD:
        raise Refused(f"`{name}` has too many cells and pixels to check")
    stated = _entries(value, name, {"starts", "lengths"})
    starts = _sequence(stated["starts"], f"{name}.starts", cells, cells)
    lengths = _sequence(stated["lengths"], f"{name}.lengths", cells, cells)
    reads = np.zeros((size, cells), dtype=bool)
    for cell in range(cells):
        start = _whole(starts[cell], f"{name}.starts", 0, size - 1)
        stop = start + _whole(lengths[cell], f"{name}.lengths", 0, size)
        reads[np.arange(start, stop) % size, cell] = True  # past the end, it goes on at pixel 0
    # Pixels that a cell reads before each pixel; it reads some of a stretch if their number grows along it.
    before = np.concatenate([np.zeros((1, cells), dtype=np.int64), reads.cumsum(axis=0)])
    return list({touched.tobytes(): touched for touched in before[length:] > before[:-length]}.values())


# -- evidence ----------------------------------------------------------------------------------------------------------


def units_of(evidence: dict[str, Any]) -> dict[str, Any]:
    """Return what the settings of evidence mean in whole units: scale, least and largest value, and drift.

    Rounding may move two values that differ by d apart by one unit more, so a drift d > 0 is floor(d scale) + 1 units.
    Votes flip whole: their drift has no units, and the file holds sure and possible votes instead.
    """
    kind, bits = evidence["kind"], evidence["bits"]
    if kind in VOTES:
        return {"scale": 1, "low": 0, "high": 1, "drift": None, "bounded": True}
    low = evidence["low"] if kind == "logits" else -1.0 if kind == "tanh" else 0.0
    high = evidence["high"] if kind == "logits" else 1.0
    bounded = low is not None and high is not None
    least = round((-CEILING if low is None else low) * 2**bits)
    most = round((CEILING if high is None else high) * 2**bits)
    drift = math.floor(min(evidence["drift"], 2.0**60) * 2**bits) + 1 if evidence["drift"] > 0 else 0
    return {"scale": 2**bits, "low": least, "high": most, "drift": min(drift, most - least), "bounded": bounded}


def _bounds(claim: dict[str, Any], layers: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the evidence, and the least and most that drift can make of it."""
    stated = _entries(claim["evidence"], "evidence", {"kind", "low", "high", "drift", "threshold", "bits"})
    if stated["kind"] not in KINDS:
        raise Refused(f"`evidence.kind` must be one of {', '.join(KINDS)}")
    _whole(stated["bits"], "evidence.bits", 0, 32)
    for name in ("low", "high", "drift", "threshold"):
        optional = name in ("low", "high") and stated[name] is None
        if not optional and not (type(stated[name]) is float and math.isfinite(stated[name])):
            raise Refused(f"`evidence.{name}` must be a finite decimal")
    if stated["drift"] < 0:
        raise Refused("`evidence.drift` must not be negative")
    if stated["kind"] != "logits" and (stated["low"] not in (0.0, None) or stated["high"] is not None):
        raise Refused("`evidence.low` and `evidence.high` clip logits alone")
    if stated["kind"] == "vote" and not 0 < stated["threshold"] <= 1:
        raise Refused("`evidence.threshold` of a vote must lie above 0 and at most at 1")
    units = units_of(stated)
    if canonical(claim["units"]) != canonical(units):
        raise Refused("`units` do not follow from the settings of `evidence`")
    low, high = units["low"], units["high"]
    cells = layers.shape[-2] * layers.shape[-1]
    if not low < high or cells * max(abs(low), abs(high)) >= LARGEST_SUM:
        raise Refused("the range of its evidence is empty, or too large for exact sums")
    if int(layers.min()) < low or int(layers.max()) > high:
        raise Refused(f"its evidence must lie between {low} and {high} units")
    drifting_votes = stated["kind"] in VOTES and stated["drift"] > 0
    if (layers.ndim == 4) is not drifting_votes:
        raise Refused("it must hold sure and possible votes if votes can drift, and one layer otherwise")
    if drifting_votes:
        values, lower, upper = layers
        if not ((lower <= values) & (values <= upper)).all():
            raise Refused("a sure vote must be a vote, and a vote must be a possible one")
        return values, lower, upper
    drift = units["drift"] or 0
    return layers, np.maximum(layers - drift, low), np.minimum(layers + drift, high)


# -- rules and theorems ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class RobustMasking:
    """Remove the heaviest mask of each class, if it holds more than the share T.

    Rule.     s_k = S_k - H_k if H_k > T S_k else S_k, with S_k the sum and H_k the largest sum in a mask; T = p/q.
    Theorem.  The label stays y under any attack on w if LB > UB_k for every k != y, where
                  LB = t_y - max{ 0, a_y(v) : (1 - T)(a_y(v) + h n(v)) > T (t_y - a_y(v)) }
                  D_k = t_k + h |w| - max_v (a_k(v) + h n(v))
                  UB_k = min(t_k + h |w|, D_k / (1 - T)), or D_k if max_v a_k(v) > T UB_k
                         (T = 0: D_k; T = 1: t_k + h |w|)
              with a_k(v) the evidence in v outside w, n(v) the cells that v and w share, lower for y and upper for k;
              in the condition of LB the first a_y(v) is upper, in max_v a_k(v) > T UB_k it is lower.
    Needs l = 0 and, unless h bounds the evidence, a mask around every window.
    """

    masks: Boxes
    threshold: Fraction
    high: int
    bounded: bool

    @property
    def multiple(self) -> int:
        """Margins are in units of 1 / (q - p) to stay whole."""
        return max(1, self.threshold.denominator - self.threshold.numerator)

    def work(self, classes: int, windows: Boxes) -> int:
        """Entries that `label` and `margins` look at."""
        maps, rounds = self.masks.work(classes), 1 if self.threshold == 0 else 2
        each = 3 * self.masks.work(1) + rounds * maps + classes * math.prod(windows.grid) // 2
        return maps + len(windows.places) * each

    def label(self, values: Integers) -> int:
        """The defended label; ties go to the smallest index."""
        p, q = self.threshold.numerator, self.threshold.denominator
        totals, hidden = _sums(values), self.masks.sums(values).max(axis=1)
        return int(np.where(q * hidden > p * totals, totals - hidden, totals).argmax())  # the first of equals

    def margins(self, label: int, lower: Integers, upper: Integers, windows: Boxes) -> tuple[list[int], set[int]]:
        """The margin in each window, and the rivals that attain the smallest."""
        every = range(len(windows.places))
        return _smallest((self._margins_in(window, label, lower, upper, windows) for window in every), label)

    def _margins_in(self, window: int, label: int, lower: Integers, upper: Integers, windows: Boxes) -> Integers:
        """(q - p)(LB - UB_k) in one window, for every class k. No product reaches 2**61."""
        p, q = self.threshold.numerator, self.threshold.denominator
        shared = self.masks.sums(windows.cells(window))[0]  # n(v)
        size = windows.size(window)
        if not self.bounded and not (shared == size).any():
            raise Refused(f"window {window} lies in no mask, and the evidence has no bound")
        least, most = windows.outside(window, lower), windows.outside(window, upper)
        own = least[label].sum()  # t_y
        smallest, largest = (self.masks.sums(each[label : label + 1])[0] for each in (least, most))  # a_y(v)
        removable = (q - p) * (largest + self.high * shared) > p * (own - smallest)
        floor = own - smallest.max(where=removable, initial=0)  # LB
        whole = _sums(most) + self.high * size  # t_k + h |w|
        if p == q:
            return np.asarray(floor - whole)
        masked = whole - (self.masks.sums(most) + self.high * shared).max(axis=1)  # D_k
        if p == 0:
            return np.asarray(floor - masked)
        sure = self.masks.sums(least).max(axis=1)  # max_v a_k(v)
        certain = (q * sure > p * whole) | ((q - p) * sure > p * masked)  # above T times the smaller one of two
        ceiling = np.where(certain, (q - p) * masked, np.minimum((q - p) * whole, q * masked))  # (q - p) UB_k
        return np.asarray((q - p) * floor - ceiling)


@final
@dataclass(frozen=True)
class DoubleMasking:
    """Hide one mask, then a second one.

    Rule.     l(m, m') is the class with the largest sum outside m and m', l(m) = l(m, m), z the label of most masks
              (ties: smallest). If some l(m) = c != z has l(m, m') = c for every m', and is still the class with the
              largest sum outside m alone when T is taken off its own: that c. Else z. T is tau in units, rounded down.
    Theorem.  The label stays y under any attack on w if some mask m that covers w has, for every k != y,
              (S_y - S_k)(outside m) > T and (S_y - S_k)(outside m and m') > 0 for every m'. The margin in w is
                  max over m covering w, min over k != y of the smaller one of (lower_y - upper_k)(outside m) - T and
                  min over m' of (lower_y - upper_k)(outside m and m').
    """

    masks: Boxes
    lead: int  # T
    multiple: int = 1

    def work(self, classes: int, windows: Boxes) -> int:
        """Entries that `label` and `margins` look at."""
        pairs = self.masks.work(classes) + classes * math.prod(windows.grid) // 2
        return 2 * len(self.masks.places) * pairs + len(windows.places) * self.masks.work(1)

    def label(self, values: Integers) -> int:
        """The defended label; ties go to the smallest index."""
        single, believed = [], []
        for mask in range(len(self.masks.places)):
            sums = self._outside_both(mask, values)
            claim = int(sums[:, mask].argmax())  # numpy promises the first of equals
            single.append(claim)
            sums[claim, mask] -= self.lead
            believed.append(bool((sums.argmax(axis=0) == claim).all()))
        majority = int(np.bincount(single).argmax())
        deviating = [y for y, holds in zip(single, believed, strict=True) if y != majority and holds]
        return deviating[0] if deviating else majority

    def margins(self, label: int, lower: Integers, upper: Integers, windows: Boxes) -> tuple[list[int], set[int]]:
        """The margin in each window, and the rivals that attain the smallest."""
        gaps = lower[label] - upper
        worst, attained = [], []  # by each mask m: the smallest over k, and which k attain it
        for mask in range(len(self.masks.places)):
            sums = self._outside_both(mask, gaps)
            sums[:, mask] -= self.lead
            row = sums.min(axis=1)
            row[label] = NO_RIVAL
            worst.append(row.min())
            attained.append(row == row.min())
        margins, by_mask = [], np.array(worst)
        for window in range(len(windows.places)):
            covering = self.masks.sums(windows.cells(window))[0] == windows.size(window)
            if not covering.any():
                raise Refused(f"window {window} lies in no mask")
            margins.append(int(by_mask[covering].max()))
        deciding = np.array(attained)[by_mask == min(margins)]
        return margins, {int(k) for k in np.flatnonzero(deciding.any(axis=0))}

    def _outside_both(self, mask: int, maps: Integers) -> Integers:
        """The sum of each map outside `mask` and each second mask: (maps, masks)."""
        kept = self.masks.outside(mask, maps)
        outside_masks: Integers = _sums(kept)[:, None] - self.masks.sums(kept)
        return outside_masks


@final
@dataclass(frozen=True)
class Sum:
    """ClippedSum, and MajorityVote on votes.

    Rule.     The class with the largest sum S_k.
    Theorem.  The label stays y under any attack on w if t_y - t_k > |w| (h - l) for every k != y, lower for y and
              upper for k. Position-free, with n = max |w|: if S_y - S_k > 2 n (h - l).
    """

    span: int
    spatial: bool
    masks: None = None
    multiple: int = 1

    def work(self, classes: int, windows: Boxes) -> int:
        """Entries that `label` and `margins` look at."""
        return len(windows.places) * (CALL + classes * math.prod(windows.grid))

    def label(self, values: Integers) -> int:
        """The defended label; ties go to the smallest index."""
        return int(values.sum(axis=(1, 2)).argmax())

    def margins(self, label: int, lower: Integers, upper: Integers, windows: Boxes) -> tuple[list[int], set[int]]:
        """The margin in each window (in all, if position-free), and the rivals that attain the smallest."""
        gaps = lower[label] - upper
        every = range(len(windows.places))
        if not self.spatial:
            return _smallest([_sums(gaps) - 2 * max(map(windows.size, every)) * self.span], label)
        return _smallest((_sums(windows.outside(w, gaps)) - windows.size(w) * self.span for w in every), label)


def _rule(claim: dict[str, Any], grid: Any) -> RobustMasking | DoubleMasking | Sum:
    units, defense = claim["units"], claim["defense"]
    name = defense.get("name") if isinstance(defense, dict) else None
    if name in ("ClippedSum", "MajorityVote"):
        _entries(defense, "defense", {"name", "spatial"})
        if not units["bounded"] or (name == "MajorityVote" and claim["evidence"]["kind"] not in VOTES):
            raise Refused(f"{name} has no theorem for this evidence")
        return Sum(units["high"] - units["low"], _flag(defense["spatial"], "defense.spatial"))
    if name == "DoubleMasking":
        _entries(defense, "defense", {"name", "masks", "wrap"} | ({"tau"} & set(defense)))
        tau = defense.get("tau", 0.0)
        if type(tau) is not float or not 0 <= tau <= LARGEST_TAU:
            raise Refused(f"`defense.tau` must be a decimal from 0 to {LARGEST_TAU:.0f}")
        masks = _boxes(defense["masks"], "defense.masks", defense["wrap"], grid)
        return DoubleMasking(masks, math.floor(Fraction(tau) * units["scale"]))
    if name == "RobustMasking":
        _entries(defense, "defense", {"name", "masks", "wrap", "threshold"})
        spelled = re.fullmatch(r"([0-9]{1,9})(?:/([1-9][0-9]{0,8}))?", str(defense["threshold"]))
        if spelled is None or int(spelled[1]) > int(spelled[2] or 1):
            raise Refused("`defense.threshold` must be a fraction between 0 and 1")
        if units["low"] != 0:
            raise Refused("RobustMasking has no theorem for evidence whose least value is not 0")
        masks = _boxes(defense["masks"], "defense.masks", defense["wrap"], grid)
        threshold = Fraction(int(spelled[1]), int(spelled[2] or 1))
        if threshold.denominator > LARGEST_DENOMINATOR:
            raise Refused(f"`defense.threshold` must have a denominator of at most {LARGEST_DENOMINATOR}")
        return RobustMasking(masks, threshold, units["high"], units["bounded"])
    raise Refused("`defense.name` must be RobustMasking, DoubleMasking, ClippedSum or MajorityVote")


def _sums(maps: Integers) -> Integers:
    """The sum of each map."""
    return np.asarray(maps.sum(axis=(1, 2)))


def _smallest(rows: Iterable[Integers], label: int) -> tuple[list[int], set[int]]:
    """From the margins against every class, one row per window: the smallest of each window, and the closest rivals."""
    per_window, per_class = [], np.array(NO_RIVAL)
    for row in rows:
        row[label] = NO_RIVAL
        per_window.append(int(row.min()))
        per_class = np.minimum(per_class, row)
    return per_window, {int(k) for k in np.flatnonzero(per_class == min(per_window))}


# -- the file ----------------------------------------------------------------------------------------------------------


def read(data: bytes) -> tuple[dict[str, Any], Integers]:
    """Return the claim and its evidence; raise `Refused` unless every byte is as the format prescribes."""
    document, array = _members(data)
    claim = _parse(document)
    stated = isinstance(claim, dict) and type(claim.get("format")) is int and claim["format"] == STATEMENT
    _entries(claim, "certificate", STATED if stated else ENTRIES)
    if not stated and (type(claim["format"]) is not int or claim["format"] != FORMAT):
        raise Refused(f"it has another format than {FORMAT}; use the checker of its release")
    digests = _entries(claim["digests"], "digests", {"model", "image"} if stated else DIGESTS)
    for digest in (claim["digest"], *digests.values()):
        if not isinstance(digest, str) or re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise Refused("a digest must be 64 hexadecimal digits")
    if claim["digest"] != digest_of(claim):
        raise Refused("its digest does not match its contents: it is damaged")
    if stated:
        return _statement(claim, array)
    if digests["evidence"] != hashlib.sha256(array).hexdigest():
        raise Refused("the digest of its evidence does not match: it is damaged")
    shape = [_whole(size, "shape", 1, LARGEST_EVIDENCE) for size in _sequence(claim["shape"], "shape", 3, 4)]
    if shape[-3] < 2 or (len(shape) == 4 and shape[0] != 3):
        raise Refused("`shape` must be two classes or more, three layers or one")
    if math.prod(shape) > LARGEST_EVIDENCE or shape[-2] * shape[-1] > LARGEST_GRID:
        raise Refused(f"`shape` must have at most {LARGEST_GRID} cells, and {LARGEST_EVIDENCE} entries in all")
    header = array_header(shape)
    if array[: len(header)] != header or len(array) != len(header) + 8 * math.prod(shape):
        raise Refused(f"its evidence must be an array of 64-bit integers of shape {shape}")
    names = _sequence(claim["class_names"], "class_names", 0, shape[-3])
    if len(names) not in (0, shape[-3]) or not all(isinstance(name, str) for name in (*names, claim["package"])):
        raise Refused("`class_names` must name every class or none, and `package` its release")
    return claim, np.frombuffer(array, dtype="<i8", offset=len(header)).astype(np.int64).reshape(shape)


def _statement(claim: dict[str, Any], array: bytes) -> tuple[dict[str, Any], Integers]:
    """Return a statement with its empty array."""
    if array != array_header([0]):
        raise Refused("a statement must hold no evidence")
    names = _sequence(claim["class_names"], "class_names", 0, LARGEST_EVIDENCE)
    if not all(isinstance(name, str) for name in (*names, claim["package"])):
        raise Refused("`class_names` must name classes, and `package` its release")
    return claim, np.zeros(0, dtype=np.int64)


def archive(document: bytes, array: bytes) -> bytes:
    """Return the one zip file of the two members: stored, in this order, dated 1980-01-01, without extra fields."""
    local, central = b"", b""
    for name, content in zip(MEMBERS, (document, array), strict=True):
        shared = struct.pack(
            "<HHHHHLLLHH", 20, 0, 0, 0, 0x21, zlib.crc32(content), len(content), len(content), len(name), 0
        )
        central += b"PK\1\2" + struct.pack("<H", 20) + shared + struct.pack("<HHHLL", 0, 0, 0, 0, len(local))
        central += name.encode()
        local += b"PK\3\4" + shared + name.encode() + content
    end = struct.pack("<HHHHLLH", 0, 0, len(MEMBERS), len(MEMBERS), len(central), len(local), 0)
    return local + central + b"PK\5\6" + end


def array_header(shape: Sequence[int]) -> bytes:
    """Return what precedes the numbers in a .npy file (version 1.0) of 64-bit integers."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({', '.join(map(str, shape))}), }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def canonical(value: object) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(claim: dict[str, Any]) -> str:
    """Return the SHA-256 of all entries but `digest` itself."""
    return hashlib.sha256(canonical({name: entry for name, entry in claim.items() if name != "digest"})).hexdigest()


def load(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file of acceptable size; raise `Refused` for anything else."""
    most = LARGEST_JSON + 8 * LARGEST_EVIDENCE + 1024
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Refused("it is not a file")
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise Refused(f"it cannot be opened ({type(error).__name__})") from None
    if len(data) > most:
        raise Refused(f"it is larger than {most} bytes")
    return data


def _members(data: bytes) -> tuple[bytes, bytes]:
    """Cut the two members out where they must lie; the archive they make must be the file, byte for byte."""
    members, place = [], 0
    for name in MEMBERS:
        start = place + 30 + len(name)
        size = int.from_bytes(data[place + 18 : place + 22], "little")
        members.append(data[start : start + size])
        place = start + size
    if len(members[0]) > LARGEST_JSON or archive(members[0], members[1]) != data:
        raise Refused(f"it is not a zip file of {' and '.join(MEMBERS)} as the format prescribes")
    return members[0], members[1]


def _parse(document: bytes) -> Any:
    try:
        claim = json.loads(document.decode("ascii"))
        same = canonical(claim) == document  # duplicate keys, NaN, spaces and other spellings do not survive this
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise Refused("its certificate.json is not JSON in its one canonical spelling")
    return claim


def _entries(value: object, name: str, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != wanted:
        raise Refused(f"`{name}` must have the entries {', '.join(sorted(wanted))} and no others")
    return value


def _sequence(value: object, name: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise Refused(f"`{name}` must be a list of {least} to {most} entries")
    return value


def _whole(value: object, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Refused(f"`{name}` must be a whole number from {least} to {most}")
    return value


def _flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise Refused(f"`{name}` must be true or false")
    return value


def main(paths: Sequence[str]) -> int:
    """Check each file, one line each; return the exit status."""
    if paths and paths[0] in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    if not paths:
        sys.stderr.write("usage: python verify.py FILE...\n")
        return 1
    verdicts = []
    for path in paths:
        verdict = check(path)
        sys.stdout.write(f"{path if path.isascii() and path.isprintable() else ascii(path)}: {verdict}\n")
        verdicts.append(verdict.valid)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
