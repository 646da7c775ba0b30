"""Certificate files: what a guard proved about one image, for others to check.

    certificate_file.write("cat.pgc", guard, image, Patch(5))
    python verify.py cat.pgc

A file is a zip of a claim (JSON) and an array of whole numbers. Where `Guard.claim` gives what the standalone checker
needs, `verify.py` recomputes the proof; otherwise the file is a *statement*, which only the holder of the guard can
confirm, and the checker says so.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from patchguard import __version__, verify
from patchguard.errors import InputError
from patchguard.guard import Certificate, Claim, Examination, Guard, Plan, Task, select_row
from patchguard.patch import Patch
from patchguard.storage.atomic import write_bytes

Image = UInt8[Tensor, "3 height width"] | Float[Tensor, "3 height width"]


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: str | Path, guard: Guard, image: Image, patch: Patch) -> Certificate:
    """Certify the defended label of one image, write the file, all or nothing, and return the certificate.

    `image` has 8-bit pixels, as they are or divided by 255. A file that `verify` would call invalid is never written.
    """
    path = Path(path)
    pixels = eight_bit(image)
    height, width = pixels.shape[1:]
    task = Task(patch, guard, "own")
    guard.validate(patch, height, width)
    examination = guard.examine(as_images(pixels), Plan(guard, (height, width), (task,)))
    if examination.failures:
        raise InputError(f"no certificate file can be written: the image {examination.failures[0]}.")
    data = Packer(task, height, width).pack(examination, 0, 0, image_digest(pixels))
    verdict = verify.check_bytes(data)
    if verdict.checked and not verdict.valid:
        raise InputError(f"no certificate file can be written for this image: the checker says that {verdict.reason}.")
    if not path.parent.is_dir():
        raise InputError(f"the folder of `path` must exist; got {path}. Make it first.")
    write_bytes(path, data)
    certificate: Certificate = examination.certificates[0]  # type: ignore[assignment]
    return certificate


@final
@dataclass(frozen=True, eq=False)
class Packer:
    """Makes the certificate files of one task and size of source images."""

    task: Task
    height: int
    width: int

    @cached_property
    def _model_digest(self) -> str:
        return self.task.guard.digest

    def pack(self, examination: Examination, number: int, row: int, image_digest: str) -> bytes:
        """Return the file for row `row` of an examination and certificate `number` of its plan, which is the task's.

        The certificate must be about the defended prediction, with `top_k=1`. What all files share is held against the
        limits of the checker before the first one is returned.
        """
        guard, certificate = self.task.guard, examination.certificates[number]
        if not isinstance(certificate, Certificate):
            raise InputError("certificate files are about labels; this guard detects.")
        one = select_row(certificate, row)
        claim = guard.claim(examination, row, one, self.task.patch, (self.height, self.width))
        data = encode(
            certificate=one,
            patch=self.task.patch,
            size=(self.height, self.width),
            class_names=guard.class_names,
            kind=guard.settings()["guard"],
            digests={"model": self._model_digest, "image": image_digest},
            claim=claim,
        )
        if not self._admitted and claim is not None:
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
    certificate: Certificate,
    patch: Patch,
    size: tuple[int, int],
    class_names: tuple[str, ...],
    kind: str,
    digests: Mapping[str, str],
    claim: Claim | None,
) -> bytes:
    """Return the bytes of the file about one image and a `kind` of guard; without a claim, those of a statement.

    `digests` are those of model and image.
    """
    statement = {"format": verify.STATEMENT, "guard": kind, "margin": float(certificate.margin)}
    entries: dict[str, Any] = {
        "package": __version__,
        "class_names": list(class_names),
        "source": list(size),
        "patch": {"height": patch.height, "width": patch.width, "count": patch.count},
        "label": int(certificate.label),
        "certified": bool(certificate.certified),
        "rival": int(certificate.rival),
        **(statement if claim is None else claim.entries),
        "digests": {**digests, **({} if claim is None else claim.digests)},
    }
    entries["digest"] = verify.digest_of(entries)
    return verify.archive(verify.canonical(entries), verify.array_header([0]) if claim is None else claim.array)


# -- images and digests ------------------------------------------------------------------------------------------------


def eight_bit(image: Tensor) -> UInt8[Tensor, "3 height width"]:
    """Return an image's 8-bit pixels; refuse floats that are not 8-bit pixels divided by 255."""
    if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] != 3 or image.numel() == 0:
        raise InputError("`image` must be one color image (3, height, width), without a batch axis.")
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


# -- checking against the guard and the image --------------------------------------------------------------------------


def has_own_masks(data: bytes, guard: Guard) -> bool:
    """Return whether the rule in an intact file is the guard's as it is, not with masks fitted to the file's patch."""
    return guard.has_rule_of(verify.read(data)[0])


def is_about_model(claim: dict[str, Any], guard: Guard) -> bool:
    """Return whether a claim names this guard, or the one with masks fitted to its patch."""
    if claim["digests"]["model"] == guard.digest:
        return True
    patch = Patch(claim["patch"]["height"], claim["patch"]["width"], claim["patch"]["count"])
    try:
        return bool(claim["digests"]["model"] == guard.for_patch(patch, *claim["source"]).digest)
    except InputError:
        return False


def difference(data: bytes, guard: Guard, image: Image) -> str | None:
    """Return the first way in which an intact file is not about this guard and image, or None.

    A statement is confirmed by certifying the image anew.
    """
    claim, array = verify.read(data)
    pixels = eight_bit(image)
    height, width = pixels.shape[1:]
    if claim["source"] != [height, width] or claim["digests"]["image"] != image_digest(pixels):
        return "it is about another image"
    if claim["format"] != verify.STATEMENT:
        return guard.compare_claim(claim, array, pixels)
    if claim["digests"]["model"] != guard.digest:
        return "it is about a model with other weights or settings"
    patch = Patch(claim["patch"]["height"], claim["patch"]["width"], claim["patch"]["count"])
    certificate: Certificate = guard.certify(as_images(pixels), patch)
    if int(certificate.label) != claim["label"]:
        return f"the model gives label {int(certificate.label)} for this image, not {claim['label']}"
    if bool(certificate.certified) is not claim["certified"]:
        return "the model proves otherwise for this image: it claims the contrary about being certified"
    return None
