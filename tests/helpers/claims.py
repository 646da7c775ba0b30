"""Certificate files for tests: honest ones of every kind, edits that keep the digests right, and the truth."""

import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch

from patchguard import verify
from patchguard.defenses import ClippedSum, Defense, DoubleMasking, MajorityVote, RobustMasking
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.cell_claims import claim_cells
from patchguard.patch import Patch
from patchguard.storage import certificate_file

DIGESTS = {"model": "0" * 64, "preprocess": "1" * 64, "image": "2" * 64}
TAUS = [0.0, 0.0, 0.3, 1.0, 2.7]
THRESHOLDS = [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(4, 5), Fraction(1), Fraction(333, 1000)]


def random_axis(draw: np.random.Generator, around: bool) -> Axis:
    """Cells in order with uneven starts and lengths, as resizing makes them; on a circle, bands that pass the end."""
    cells = int(draw.integers(2, 6))
    size = int(draw.integers(cells, 2 * cells + 3))
    if around:
        starts = np.sort(draw.choice(size, cells, replace=False))
        lengths = draw.integers(1, max(2, size // 2), cells)
    else:
        starts = np.sort(draw.integers(0, size, cells))
        lengths = np.minimum(draw.integers(0, 4, cells), size - starts)
    return Axis(tuple(starts.tolist()), tuple(lengths.tolist()), size, wrap=around)


def random_evidence(draw: np.random.Generator, rule: str, grid: tuple[int, int]) -> tuple[Evidence, EvidenceMap]:
    """Few bits, so that ties happen; one favoured class, so that some claims are certified."""
    drift = float(draw.choice([0.0, 0.0, 0.3, 1.0]))
    if rule == "MajorityVote":
        settings = Evidence(kind=str(draw.choice(["vote", "prediction"])), drift=drift / 5, bits=4)
    elif rule == "ClippedSum":
        kind = str(draw.choice(["tanh", "logits", "confidence"]))
        bounds = {"low": -2.0, "high": 3.0} if kind == "logits" else {}
        settings = Evidence(kind=kind, drift=drift / 10, bits=int(draw.integers(1, 4)), **bounds)
    elif rule == "DoubleMasking":
        settings = Evidence(low=None, drift=drift, bits=int(draw.integers(0, 3)))
    else:
        kind = str(draw.choice(["logits", "logits", "vote", "confidence"]))
        bounds = {"high": draw.choice([None, 2.0, 5.0])} if kind == "logits" else {}
        settings = Evidence(kind=kind, drift=drift, bits=int(draw.integers(0, 3)), **bounds)
    classes = int(draw.integers(2, 5))
    logits = draw.integers(-2, 6, (1, classes, *grid)).astype(float) * draw.choice([0.5, 1.0])
    logits[0, draw.integers(classes)] += draw.choice([0.0, 2.0, 6.0, 20.0])
    return settings, settings(torch.from_numpy(logits))


def random_rule(draw: np.random.Generator, rule: str, windows: Windows) -> Defense:
    if rule in ("ClippedSum", "MajorityVote"):
        return {"ClippedSum": ClippedSum, "MajorityVote": MajorityVote}[rule](spatial=bool(draw.random() < 0.8))
    masks = windows
    if draw.random() < 0.5:
        size = tuple(int(draw.integers(1, cells + 1)) for cells in windows.grid)
        masks = Windows.sliding(grid=windows.grid, size=size, wrap=windows.wrap)
    if rule == "DoubleMasking":
        return DoubleMasking(masks=masks, tau=float(draw.choice(TAUS)))
    return RobustMasking(masks=masks, threshold=THRESHOLDS[draw.integers(len(THRESHOLDS))])


RULES = ["RobustMasking", "DoubleMasking", "ClippedSum", "MajorityVote"]


@cache
def honest(seed: int, rule: str) -> bytes | None:
    """The file of a random claim as this package proves it, or None where it refuses to."""
    draw = np.random.default_rng([seed, RULES.index(rule)])
    field = Field(random_axis(draw, seed % 5 == 4), random_axis(draw, bool(draw.random() < 0.4)))
    patch = Patch(*(int(draw.integers(1, min(size, 4) + 1)) for size in field.source))
    settings, evidence = random_evidence(draw, rule, field.grid)
    defense = random_rule(draw, rule, Windows.reached_by(patch, field))
    try:
        return proved(defense, settings, evidence, field, patch)
    except InputError:
        return None


def proved(defense: Defense, settings: Evidence, evidence: EvidenceMap, field: Field, patch: Patch) -> bytes:
    """The file of what the package proves about this evidence."""
    windows = Windows.reached_by(patch, field)
    certificate = defense.certify(evidence, windows)
    claim = claim_cells(
        defense=defense,
        settings=settings,
        evidence=evidence,
        certificate=certificate,
        field=field,
        patch=patch,
        windows=windows,
        preprocess=Preprocess(),
    )
    return certificate_file.encode(
        certificate=certificate,
        patch=patch,
        size=field.source,
        class_names=(),
        kind="cells",
        digests={name: DIGESTS[name] for name in ("model", "image")},
        claim=claim,
    )


def honest_files(rule: str, count: int) -> Iterator[bytes]:
    seed = 0
    while count:
        data = honest(seed, rule)
        seed += 1
        if data is not None:
            count -= 1
            yield data


def sealed(claim: dict[str, Any], layers: np.ndarray) -> bytes:
    """The file of any claim, with right digests."""
    array = verify.array_header(layers.shape) + layers.astype("<i8").tobytes()
    claim["shape"] = list(layers.shape)
    claim["digests"]["evidence"] = hashlib.sha256(array).hexdigest()
    claim["digest"] = verify.digest_of(claim)
    return verify.archive(verify.canonical(claim), array)


def edited(data: bytes, edit: Callable[[dict[str, Any], np.ndarray], None]) -> bytes:
    """The file after `edit(claim, evidence)`, with right digests."""
    claim, layers = verify.read(data)
    layers = layers.copy()
    edit(claim, layers)
    return sealed(claim, layers)


def covers(windows: Windows, axes: list[Axis], patch: tuple[int, int]) -> bool:
    """Whether all cells that a patch touches, wherever it lies, are in one of the windows.

    Not of their hull, as the package makes windows: a file may have cells that read nothing between others.
    """
    rows, columns = (
        [axis.touched_cells(position, length) for position in range(axis.size - length + 1)]
        for axis, length in zip(axes, patch, strict=True)
    )
    return all((windows.cells | ~np.outer(row, column).ravel()).all(1).any() for row in rows for column in columns)


def true_claim(data: bytes) -> bool:
    """Whether the package, given the objects that the file describes, proves the same claim."""
    try:
        return _proved(data)
    except InputError:  # it proves nothing about such objects
        return False


def _proved(data: bytes) -> bool:
    claim, layers = verify.read(data)
    grid = tuple(layers.shape[-2:])
    wrap = tuple(claim["wrap"])
    windows = Windows.from_boxes(claim["windows"], grid=grid, wrap=wrap)
    axes = [
        Axis(tuple(axis["starts"]), tuple(axis["lengths"]), size, wrap=around)
        for axis, size, around in zip(
            (claim["field"]["rows"], claim["field"]["columns"]), claim["source"], wrap, strict=True
        )
    ]
    patch = Patch(**claim["patch"])
    settings = Evidence(**claim["evidence"])
    blank = settings(torch.zeros(1, layers.shape[-3], *grid))
    values, lower, upper = layers if layers.ndim == 4 else (layers, layers, layers)
    if layers.ndim == 3:
        slack = settings._slack(blank.high - blank.low)
        lower, upper = np.maximum(values - slack, blank.low), np.minimum(values + slack, blank.high)
    maps = [torch.from_numpy(np.ascontiguousarray(each))[None] for each in (values, lower, upper)]
    evidence = EvidenceMap(**{**vars(blank), "values": maps[0], "lower": maps[1], "upper": maps[2]})
    stated = dict(claim["defense"])
    name = stated.pop("name")
    if "masks" in stated:
        stated["masks"] = Windows.from_boxes(stated["masks"], grid=grid, wrap=tuple(stated.pop("wrap")))
    if "threshold" in stated:
        stated["threshold"] = Fraction(stated["threshold"])
    kinds = {kind.__name__: kind for kind in (RobustMasking, DoubleMasking, ClippedSum, MajorityVote)}
    certificate = kinds[name](**stated).certify(evidence, windows)
    return (
        covers(windows, axes, (patch.height, patch.width))
        and int(certificate.label) == claim["label"]
        and float(certificate.margin) == claim["margin"]["value"]
        and bool(certificate.certified) == claim["certified"]
    )


# -- forged claims -----------------------------------------------------------------------------------------------------


def forged(seed: int, rule: str) -> bytes | None:
    """A claim about other objects than were certified, whose label and margin are what the checker itself computes.

    Nothing but the theorems is then left to refute it. None where the checker refuses the objects.
    """
    draw = np.random.default_rng([seed, RULES.index(rule), 1])
    original = honest(int(draw.integers(60)), rule)
    if original is None:
        return None
    claim, layers = verify.read(original)
    layers = layers.copy()
    for _ in range(draw.integers(1, 4)):
        changes = CHANGES if "masks" in claim["defense"] else CHANGES[:-3]
        changes[draw.integers(len(changes))](draw, claim, layers)
    try:
        claim["units"] = verify.units_of(claim["evidence"])
        return settled(claim, layers)
    except verify.Refused:
        return None


def settled(claim: dict[str, Any], layers: np.ndarray, label: int | None = None) -> bytes:
    """The file that claims what the checker itself computes, for its own label or for another one."""
    values, lower, upper, windows, rule, _ = verify.admit(claim, layers)
    claim["label"] = rule.label(values) if label is None else label
    per_window, closest = rule.margins(claim["label"], lower, upper, windows)
    margin, denominator = min(per_window), claim["units"]["scale"] * rule.multiple
    claim["margin"] = {"units": margin, "denominator": denominator, "value": margin / denominator}
    claim["certified"], claim["rival"] = margin > 0, min(closest)
    claim["weakest"] = None if claim["defense"].get("spatial") is False else per_window.index(margin)
    return sealed(claim, layers)


def _change_evidence(draw: np.random.Generator, _: dict[str, Any], layers: np.ndarray) -> None:
    layers.reshape(-1)[draw.integers(layers.size)] += draw.integers(-3, 4)


def _favor_a_class(draw: np.random.Generator, _: dict[str, Any], layers: np.ndarray) -> None:
    layers[..., draw.integers(layers.shape[-3]), :, :] += draw.integers(-2, 3)


def _change_settings(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    name = str(draw.choice(["drift", "low", "high", "bits", "threshold", "kind"]))
    values = {
        "drift": [0.0, 0.1, 0.3, 1.0, 1e9],
        "low": [None, 0.0, -2.0, -1.0, 1.0],
        "high": [None, 1.0, 2.0, 5.0, 4096.0],
        "bits": [0, 1, 2, 4, 16],
        "threshold": [0.2, 0.5, 1.0, 0.0],
        "kind": ["logits", "confidence", "tanh", "vote", "prediction"],
    }[name]
    claim["evidence"][name] = values[draw.integers(len(values))]


def _change_field(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    axis = claim["field"][str(draw.choice(["rows", "columns"]))]
    entry = axis[str(draw.choice(["starts", "lengths"]))]
    entry[draw.integers(len(entry))] += int(draw.integers(-2, 3))


def _change_size(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    if draw.random() < 0.7:
        claim["patch"][str(draw.choice(["height", "width"]))] += int(draw.choice([-1, 1]))
    else:
        claim["source"][draw.integers(2)] += int(draw.integers(-2, 3))


def _change_circle(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    around = claim["wrap"] if draw.random() < 0.7 else claim["defense"].get("wrap", claim["wrap"])
    around[draw.integers(2)] ^= True


def _change_boxes(draw: np.random.Generator, boxes: list[list[int]]) -> None:
    place = int(draw.integers(len(boxes)))
    if draw.random() < 0.2 and len(boxes) > 1:
        del boxes[place]
    elif draw.random() < 0.2:
        boxes.append(boxes[place][:2] + boxes[int(draw.integers(len(boxes)))][2:])
    else:
        boxes[place][draw.integers(4)] += int(draw.choice([-1, 1]))


def _change_windows(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    _change_boxes(draw, claim["windows"])


def _change_masks(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    _change_boxes(draw, claim["defense"]["masks"])


def _change_rule(draw: np.random.Generator, claim: dict[str, Any], _: np.ndarray) -> None:
    if claim["defense"]["name"] == "RobustMasking":
        claim["defense"]["threshold"] = str(THRESHOLDS[draw.integers(len(THRESHOLDS))])
    else:
        claim["defense"]["tau"] = float(draw.choice([*TAUS, 1e6]))


def _exchange_rules(_: np.random.Generator, claim: dict[str, Any], __: np.ndarray) -> None:
    if claim["defense"]["name"] == "RobustMasking":
        claim["defense"] = {**claim["defense"], "name": "DoubleMasking", "tau": 0.3}
        del claim["defense"]["threshold"]
    else:
        claim["defense"] = {**claim["defense"], "name": "RobustMasking", "threshold": "1/4"}
        claim["defense"].pop("tau", None)


CHANGES = [
    _change_evidence, _favor_a_class, _change_settings, _change_field, _change_size, _change_circle, _change_windows,
    _change_masks, _change_rule, _exchange_rules,
]  # fmt: skip


# -- wrong claims ------------------------------------------------------------------------------------------------------


def wrong(name):
    """Return the edit of this name: what it writes must be invalid for every honest file."""

    def margin(claim, _):
        claim["margin"]["units"] += 1
        claim["margin"]["value"] = claim["margin"]["units"] / claim["margin"]["denominator"]

    def whole(claim, _):
        claim["margin"]["units"] += 1

    def decimal(claim, _):
        claim["margin"]["value"] += 1.0

    def denominator(claim, _):
        claim["margin"]["denominator"] *= 2
        claim["margin"]["value"] /= 2

    def certified(claim, _):
        claim["certified"] = not claim["certified"]

    def label(claim, layers):
        claim["label"] = (claim["label"] + 1) % layers.shape[-3]

    def rival(claim, _):
        claim["rival"] = claim["label"]

    def weakest(claim, _):
        claim["weakest"] = len(claim["windows"])

    def first_window(claim, _):
        claim["windows"] = claim["windows"][1:]

    def last_window(claim, _):
        claim["windows"] = claim["windows"][:-1]

    def patch(claim, _):
        claim["patch"]["height"] = claim["source"][0] + 1

    def count(claim, _):
        claim["patch"]["count"] = 2

    def evidence(claim, layers):
        layers[...] = claim["units"]["high"] + 1

    def units(claim, _):
        claim["units"]["high"] += 1

    def truth(claim, _):
        claim["label"] = bool(claim["label"])

    def tau(claim, _):
        claim["defense"]["tau"] = 1e6  # beyond what any second mask takes away

    return locals()[name]


EDITS = [
    "margin", "whole", "decimal", "denominator", "certified", "label", "rival", "weakest", "first_window",
    "last_window", "patch", "count", "evidence", "units", "truth", "tau",
]  # fmt: skip


def dishonest(data: bytes) -> list[bytes]:
    return [edited(data, wrong(name)) for name in EDITS]


def decided_by_tau() -> bytes:
    """An honest file whose label would be another one if masks could overrule the majority without a lead."""

    def without(claim, _):
        claim["defense"].pop("tau", None)

    for data in honest_files("DoubleMasking", 10**4):
        if "but the rule gives" in verify.check_bytes(edited(data, without)).reason:
            return data
    raise AssertionError("no label depends on tau")


def decided_behind_one_mask() -> bytes:
    """An honest file whose label rests on one mask with a lead of more than tau, which no pair of masks leaves."""
    field, patch = Field(Axis.identity(1), Axis.identity(3)), Patch(1)
    settings = Evidence(low=None, bits=0)
    evidence = settings(torch.tensor([[[[9.0, 0.0, 0.0]], [[0.0, 2.0, 2.0]]]]))
    return proved(DoubleMasking(masks=Windows.reached_by(patch, field), tau=3.0), settings, evidence, field, patch)


def relabeled(rule: str) -> bytes:
    """A file about another label than the rule gives, with the right margin of that other label."""
    claim, layers = verify.read(next(honest_files(rule, 1)))
    return settled(claim, layers, (claim["label"] + 1) % layers.shape[-3])


def trailing() -> bytes:
    """A negative tau, which no mask fails: all else in the file is as with none."""

    def negative(claim, _):
        claim["defense"]["tau"] = -1.0

    for data in honest_files("DoubleMasking", 10**4):
        if "tau" not in verify.read(data)[0]["defense"]:
            return edited(data, negative)
    raise AssertionError("every rule has a tau")


def uncovered() -> bytes:
    """Masks smaller than the windows, with evidence whose only bound is the numerical ceiling."""

    def unbound(claim, _):
        claim["evidence"]["high"], claim["units"]["bounded"] = None, False

    for data in honest_files("RobustMasking", 10**4):
        claim, _ = verify.read(data)
        masks = max((b - a) * (d - c) for a, b, c, d in claim["defense"]["masks"])
        if claim["evidence"]["high"] == 2.0 and masks < max((b - a) * (d - c) for a, b, c, d in claim["windows"]):
            break

    def ceiling(claim, layers):
        claim["evidence"]["high"] = verify.CEILING
        claim["units"] = verify.units_of(claim["evidence"])

    raised = edited(data, ceiling)
    gives = verify.check_bytes(raised).reason.removeprefix("it claims another margin than the ").split()[0]

    def margin(claim, _):
        claim["margin"]["units"], claim["certified"] = int(gives), int(gives) > 0
        claim["margin"]["value"] = int(gives) / claim["margin"]["denominator"]

    return edited(edited(raised, margin), unbound)
