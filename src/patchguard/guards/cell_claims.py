"""What a certificate file says about a `LocalGuard`: evidence, field and rule, for verify.py to recompute."""

import hashlib
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from patchguard import verify
from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.serialization import DEFENSES, defense_to_json
from patchguard.defenses.serialization import evidence_to_json as settings_to_json
from patchguard.errors import InputError
from patchguard.geometry.field import Field
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Claim
from patchguard.patch import Patch

if TYPE_CHECKING:
    from patchguard.guards.local import LocalGuard

LARGEST_UNITS = 2**52  # up to here the float margin of a certificate determines its whole number of units


def claim_cells(
    *,
    defense: Defense[Any],
    settings: Evidence,
    evidence: EvidenceMap,
    certificate: Certificate,
    field: Field,
    patch: Patch,
    windows: Windows,
    preprocess: Preprocess,
) -> Claim:
    """Return the claim about one image, whose evidence and certificate these are."""
    require_checkable(defense)
    masks: Windows | None = getattr(defense, "masks", None)
    if patch.count != 1 or windows.count != 1 or (masks is not None and masks.count != 1):
        raise InputError(f"certificate files are about one patch and single masks; got a patch count of {patch.count}.")
    layers = _layers(evidence, settings)
    array = verify.array_header(layers.shape) + layers.astype("<i8").tobytes()
    units = evidence_to_json(settings)
    entries = {
        "format": verify.FORMAT,
        "defense": rule_to_json(defense),
        "evidence": units,
        "units": verify.units_of(units),
        "shape": list(layers.shape),
        "field": field_to_json(field),
        "wrap": list(windows.wrap),
        "windows": windows.boxes.tolist(),
        "margin": _margin(float(certificate.margin), defense.margin_unit(evidence.scale)),
        "weakest": None if certificate.weakest is None else int(certificate.weakest),
    }
    digests = {"preprocess": preprocess_digest(preprocess), "evidence": hashlib.sha256(array).hexdigest()}
    return Claim(entries, digests, array)


def require_checkable(defense: Defense[Any]) -> None:
    """Raise unless verify.py recomputes certificates of such a rule."""
    if not defense.checkable:
        known = ", ".join(name for name in DEFENSES.own if DEFENSES[name].checkable)
        raise InputError(f"certificate files must be about one of {known}; got {type(defense).__name__}.")


def _layers(evidence: EvidenceMap, settings: Evidence) -> np.ndarray:
    """The evidence of one image (classes, rows, columns); for votes that drift also the sure and the possible ones."""
    units = verify.units_of(evidence_to_json(settings))
    stated = {name: getattr(evidence, name) for name in ("scale", "low", "high", "bounded")}
    if len(evidence) != 1 or not bool(evidence.finite.all()) or stated != {name: units[name] for name in stated}:
        raise InputError("`evidence` must be finite, of one image, and made with the guard's own settings.")
    values, lower, upper = (each[0].cpu().numpy() for each in (evidence.values, evidence.lower, evidence.upper))
    if evidence.binary and settings.drift > 0:
        return np.stack([values, lower, upper])
    drift = units["drift"] or 0
    bounds = np.maximum(values - drift, evidence.low), np.minimum(values + drift, evidence.high)
    if not (np.array_equal(lower, bounds[0]) and np.array_equal(upper, bounds[1])):
        raise InputError("`evidence` must carry the drift of the guard's settings; was it attacked or edited?")
    return np.asarray(values)


def _margin(margin: float, denominator: int) -> dict[str, Any]:
    """The margin as a whole number of units."""
    units = round(Fraction(margin) * denominator)
    if abs(units) >= LARGEST_UNITS or units / denominator != margin:
        raise InputError(f"the margin {margin} cannot be written exactly; use fewer `bits` or a rounder `threshold`.")
    return {"units": units, "denominator": denominator, "value": margin}


# -- parts as JSON -----------------------------------------------------------------------------------------------------


def rule_to_json(defense: Defense[Any]) -> dict[str, Any]:
    """Return the defense with its masks as boxes (top, bottom, left, right)."""
    rule = defense_to_json(defense)
    masks: Windows | None = getattr(defense, "masks", None)
    if masks is not None:
        rule |= {"masks": masks.boxes.tolist(), "wrap": list(masks.wrap)}
    return rule


def evidence_to_json(settings: Evidence) -> dict[str, Any]:
    """Return the settings of evidence, with every decimal as one."""
    stated = settings_to_json(settings)
    decimals = ("low", "high", "drift", "threshold")
    return stated | {name: None if stated[name] is None else float(stated[name]) for name in decimals}


def field_to_json(field: Field) -> dict[str, Any]:
    """Return which source pixels each cell reads, per axis."""
    axes = {"rows": field.rows, "columns": field.columns}
    return {name: {"starts": list(axis.starts), "lengths": list(axis.lengths)} for name, axis in axes.items()}


def preprocess_digest(preprocess: Preprocess) -> str:
    """Return the SHA-256 of the preprocessing as canonical JSON."""
    return hashlib.sha256(verify.canonical(preprocess.to_json())).hexdigest()


# -- checking against the network and the image ------------------------------------------------------------------------


def compare_cells(
    claim: dict[str, Any], array: np.ndarray, guard: "LocalGuard[Any]", pixels: UInt8[Tensor, "3 height width"]
) -> str | None:
    """Return the first way in which a valid claim is not about this guard and image, or None.

    The masks of the claim may be the guard's own or those that `for_patch` fits to its patch. Everything that rests on
    the network is made anew: the digests, the settings, the field (traced; it must be equal) and the evidence. The
    evidence must lie within the drift that the certificate tolerates in every cell, so equal where the drift is 0. Of
    votes, the claim must count none as sure and leave none out as possible that drift could change here: what it
    proves then holds for the evidence made here. On the machine that wrote the file it is equal.
    """
    height, width = pixels.shape[1:]
    if claim["digests"]["preprocess"] != preprocess_digest(guard.preprocess):
        return "it is about another preprocessing"
    if claim["evidence"] != evidence_to_json(guard.evidence):
        return "its settings of evidence are not the model's"
    if claim["class_names"] != list(guard.class_names):
        return "its names of classes are not the model's"
    if claim["defense"] != rule_to_json(guard.defense):
        patch = Patch(claim["patch"]["height"], claim["patch"]["width"])
        guard = guard.for_patch(patch, height, width)
    if claim["defense"] != rule_to_json(guard.defense):
        return "its defense is not the model's, or its masks are neither the model's nor those fitted to its patch"
    if claim["digests"]["model"] != guard.digest:
        return "it is about a model with other weights or settings"
    field = guard.field(height, width)
    if claim["field"] != field_to_json(field) or claim["wrap"] != [field.rows.wrap, field.columns.wrap]:
        return "its field is not the one traced from the model"
    evidence = guard.evidence_of(pixels[None].float() / 255)
    here = evidence.values[0].cpu().numpy()
    drift = claim["units"]["drift"] or 0
    values, lower, upper = array if array.ndim == 4 else (array, array - drift, array + drift)
    least, most = (
        (each[0].cpu().numpy() for each in (evidence.lower, evidence.upper)) if array.ndim == 4 else (here, here)
    )
    if here.shape != values.shape or not bool(evidence.finite.all()):
        return "the model gives no such evidence for this image"
    if not bool(((lower <= least) & (most <= upper)).all()):
        return (
            f"the model gives other evidence for this image: up to {int(abs(here - values).max())} units apart, "
            "more than the drift allows"
        )
    return None
