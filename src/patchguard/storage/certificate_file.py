"""Certificate files (`*.pgc`): one image's claim and its evidence, for `verify.py` to check without this package.

    certificate_file.write("cat.pgc", guard, image, Patch(5))          # one image
    packer = Packer(guard, Patch(5), 32, 32)                           # many: what they share is computed once
    data = packer.pack(evidence, certificate, row, image_digest(image))

The same inputs give the same bytes: no times, no machine. A file holds the fixed-point evidence, the field, the
windows, the rule and the claim; docs/check_a_certificate.md lists every entry.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from patchguard import __version__, verify
from patchguard.defenses import ClippedSum, Defense, DoubleMasking, MajorityVote, RobustMasking
from patchguard.defenses import serialization as config
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.field import Field
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch

Image = UInt8[Tensor, "3 height width"] | Float[Tensor, "3 height width"]

RULES = (RobustMasking, DoubleMasking, ClippedSum, MajorityVote)  # those that the checker knows
LARGEST_UNITS = 2**52  # up to here the float margin of a certificate determines its whole number of units


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: str | Path, guard: LocalGuard[Any], image: Image, patch: Patch) -> Certificate:
    """Certify the defended label of one image, write the file, all or nothing, and return the certificate.

    `image` has 8-bit pixels, as they are or divided by 255. A file that `verify` would call invalid is never written.
    """
    path = Path(path)
    pixels = eight_bit(image)
    height, width = pixels.shape[1:]
    packer = Packer(guard, patch, height, width)
    evidence = guard.evidence_of(as_images(pixels))
    certificate: Certificate = guard.defense.certify(evidence, packer.windows)
    data = packer.pack(evidence, certificate, 0, image_digest(pixels))
    verdict = verify.check_bytes(data)
    if not verdict.valid:
        raise InputError(f"no certificate file can be written for this image: the checker says that {verdict.reason}.")
    if not path.parent.is_dir():
        raise InputError(f"the folder of `path` must exist; got {path}. Make it first.")
    # Under its final name a file is always complete.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
    return certificate


@final
@dataclass(frozen=True, eq=False)
class Packer:
    """Makes the certificate files of one guard, patch and size of source images."""

    guard: LocalGuard[Any]
    patch: Patch
    height: int
    width: int

    @cached_property
    def field(self) -> Field:
        """Which source pixels each cell reads."""
        return self.guard.field(self.height, self.width)

    @cached_property
    def windows(self) -> Windows:
        """The windows that certificates must be about."""
        return self.guard.windows(self.patch, self.height, self.width)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {"model": self.guard.digest, "preprocess": preprocess_digest(self.guard.preprocess)}

    def pack(self, evidence: EvidenceMap, certificate: Certificate, row: int, image_digest: str) -> bytes:
        """Return the file for row `row` of a batch: of its evidence, and of its certificate for `windows`.

        The certificate must be about the defended prediction (`label=None`), with `top_k=1`. What all files share is
        held against the limits of the checker before the first one is returned.
        """
        chosen = slice(row, row + 1)
        one = evidence[chosen]
        if not isinstance(certificate, Certificate) or not 0 <= row < min(len(evidence), len(certificate.label)):
            raise InputError("`certificate` must be a Certificate, and `row` a row of it and of `evidence`.")
        # A positive margin implies that the label is the defended one.
        if not bool(certificate.certified[row]):
            defended = int(self.guard.defense.predict(one).label)
            if defended != int(certificate.label[row]):
                raise InputError(
                    f"a certificate file must be about the defended label {defended}; got one about "
                    f"{int(certificate.label[row])}. Certify with `label=None`."
                )
        weakest = None if certificate.weakest is None else certificate.weakest[chosen]
        data = encode(
            defense=self.guard.defense,
            settings=self.guard.evidence,
            evidence=one,
            certificate=replace(
                certificate,
                label=certificate.label[chosen],
                margin=certificate.margin[chosen],
                weakest=weakest,
                rival=certificate.rival[chosen],
            ),
            field=self.field,
            patch=self.patch,
            windows=self.windows,
            class_names=self.guard.class_names,
            digests={**self._digests, "image": image_digest},
        )
        if not self._admitted:
            try:
                verify.admit(*verify.read(data))
            except verify.Refused as refusal:
                raise InputError(f"no certificate file can be written: the checker says that {refusal}.") from None
            self._admitted.add(True)
        return data

    @cached_property
    def _admitted(self) -> set[bool]:
        """Not empty once a file was admitted by the checker: its limits are about what all files share."""
        return set()


def encode(
    *,
    defense: Defense[Any],
    settings: Evidence,
    evidence: EvidenceMap,
    certificate: Certificate,
    field: Field,
    patch: Patch,
    windows: Windows,
    class_names: tuple[str, ...],
    digests: Mapping[str, str],
) -> bytes:
    """Return the bytes of the file that makes this claim about one image; `digests`: model, preprocess, image."""
    if not isinstance(defense, RULES):
        known = ", ".join(rule.__name__ for rule in RULES)
        raise InputError(f"certificate files know {known}; got {type(defense).__name__}.")
    if patch.count != 1 or windows.count != 1 or (hasattr(defense, "masks") and defense.masks.count != 1):
        raise InputError(f"certificate files are about one patch and single masks; got a patch count of {patch.count}.")
    layers = _layers(evidence, settings)
    array = verify.array_header(layers.shape) + layers.astype("<i8").tobytes()
    rule = rule_to_json(defense)
    units = evidence_to_json(settings)
    claim: dict[str, Any] = {
        "format": verify.FORMAT,
        "package": __version__,
        "class_names": list(class_names),
        "defense": rule,
        "evidence": units,
        "units": verify.units_of(units),
        "shape": list(layers.shape),
        "source": list(field.source),
        "patch": {"height": patch.height, "width": patch.width, "count": patch.count},
        "field": field_to_json(field),
        "wrap": list(windows.wrap),
        "windows": windows.boxes.tolist(),
        "label": int(certificate.label),
        "margin": _margin(float(certificate.margin), evidence.scale, defense),
        "certified": bool(certificate.certified),
        "weakest": None if certificate.weakest is None else int(certificate.weakest),
        "rival": int(certificate.rival),
        "digests": {**digests, "evidence": hashlib.sha256(array).hexdigest()},
    }
    claim["digest"] = verify.digest_of(claim)
    return verify.archive(verify.canonical(claim), array)


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
    kept = np.maximum(values - drift, evidence.low), np.minimum(values + drift, evidence.high)
    if not (np.array_equal(lower, kept[0]) and np.array_equal(upper, kept[1])):
        raise InputError("`evidence` must carry the drift of the guard's settings; was it attacked or edited?")
    return np.asarray(values)


def _margin(margin: float, scale: int, defense: Defense[Any]) -> dict[str, Any]:
    """The margin as a whole number of units; with a threshold T = p/q they are 1 / (scale (q - p))."""
    denominator = scale
    if isinstance(defense, RobustMasking):
        threshold = Fraction(defense.threshold)
        denominator *= max(1, threshold.denominator - threshold.numerator)
    units = round(Fraction(margin) * denominator)
    if abs(units) >= LARGEST_UNITS or units / denominator != margin:
        raise InputError(f"the margin {margin} cannot be written exactly; use fewer `bits` or a rounder `threshold`.")
    return {"units": units, "denominator": denominator, "value": margin}


# -- parts as JSON -----------------------------------------------------------------------------------------------------


def rule_to_json(defense: Defense[Any]) -> dict[str, Any]:
    """Return the defense with its masks as boxes (top, bottom, left, right)."""
    rule = config.defense_to_json(defense)
    if isinstance(defense, (RobustMasking, DoubleMasking)):
        rule |= {"masks": defense.masks.boxes.tolist(), "wrap": list(defense.masks.wrap)}
    return rule


def evidence_to_json(settings: Evidence) -> dict[str, Any]:
    """Return the settings of evidence, with every decimal as one."""
    stated = config.evidence_to_json(settings)
    decimals = ("low", "high", "drift", "threshold")
    return stated | {name: None if stated[name] is None else float(stated[name]) for name in decimals}


def field_to_json(field: Field) -> dict[str, Any]:
    """Return which source pixels each cell reads, per axis."""
    axes = {"rows": field.rows, "columns": field.columns}
    return {name: {"starts": list(axis.starts), "lengths": list(axis.lengths)} for name, axis in axes.items()}


# -- images and digests ------------------------------------------------------------------------------------------------


def eight_bit(image: Tensor) -> UInt8[Tensor, "3 height width"]:
    """Return an image's 8-bit pixels; refuse floats that are not 8-bit pixels divided by 255."""
    if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] != 3 or image.numel() == 0:
        raise InputError("`image` must be one colour image (3, height, width), without a batch axis.")
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise InputError(f"`image` must hold 8-bit pixels, or floats in [0, 1]; got {image.dtype}.")
    whole = (image * 255).round()
    if not bool(((whole >= 0) & (whole <= 255) & (whole / 255 == image)).all()):
        raise InputError("`image` must hold 8-bit pixels divided by 255, so that others can check it; round it first.")
    return whole.to(torch.uint8)


def as_images(pixels: UInt8[Tensor, "3 height width"]) -> Float[Tensor, "1 3 height width"]:
    """Return 8-bit pixels as a batch of one image in [0, 1]."""
    return pixels[None].float() / 255


def image_digest(image: Image) -> str:
    """Return the SHA-256 of "HEIGHTxWIDTH", a newline, and the pixels row by row, each as red, green, blue."""
    pixels = eight_bit(image).cpu().permute(1, 2, 0).contiguous().numpy()
    return hashlib.sha256(f"{pixels.shape[0]}x{pixels.shape[1]}\n".encode() + pixels.tobytes()).hexdigest()


def preprocess_digest(preprocess: Preprocess) -> str:
    """Return the SHA-256 of the preprocessing as canonical JSON."""
    return hashlib.sha256(verify.canonical(preprocess.to_json())).hexdigest()


# -- checking against the network and the image ------------------------------------------------------------------------


def has_own_masks(data: bytes, guard: LocalGuard[Any]) -> bool:
    """Return whether the rule in a valid file is the guard's as it is, not with masks fitted to the file's patch."""
    own: bool = verify.read(data)[0]["defense"] == rule_to_json(guard.defense)
    return own


def difference(data: bytes, guard: LocalGuard[Any], image: Image) -> str | None:
    """Return the first way in which a valid file is not about this guard and image, or None.

    The masks of the file may be the guard's own or those that `for_patch` fits to the patch of the file
    (`has_own_masks` tells). Everything in the file that rests on the network is made anew: the digests, the settings,
    the field (traced; it must be equal) and the evidence. The evidence must lie within the drift that the certificate
    tolerates in every cell, so equal where the drift is 0. Of votes, the file must count none as sure and leave none
    out as possible that drift could change here: what it proves then holds for the evidence made here. On the machine
    that wrote the file it is equal.
    """
    claim, layers = verify.read(data)
    pixels = eight_bit(image)
    height, width = pixels.shape[1:]
    if claim["source"] != [height, width] or claim["digests"]["image"] != image_digest(pixels):
        return "it is about another image"
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
    evidence = guard.evidence_of(as_images(pixels))
    here = evidence.values[0].cpu().numpy()
    drift = claim["units"]["drift"] or 0
    values, lower, upper = layers if layers.ndim == 4 else (layers, layers - drift, layers + drift)
    least, most = (
        (each[0].cpu().numpy() for each in (evidence.lower, evidence.upper)) if layers.ndim == 4 else (here, here)
    )
    if here.shape != values.shape or not bool(evidence.finite.all()):
        return "the model gives no such evidence for this image"
    if not bool(((lower <= least) & (most <= upper)).all()):
        return (
            f"the model gives other evidence for this image: up to {int(abs(here - values).max())} units apart, "
            "more than the drift allows"
        )
    return None
