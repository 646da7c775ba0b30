"""`patchguard verify`: check certificate files, alone or against the model and the image they are about."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from patchguard import verify as checker
from patchguard.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def verify(
    files: Annotated[list[str], typer.Argument(help="Certificate files (.pgc).", metavar="FILE...")],
    model: Annotated[str, typer.Option(help="Also compute everything anew with this model: a name or a file.")] = "",
    image: Annotated[str, typer.Option(help="With --model: the image that the certificates are about.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file.")] = False,
) -> None:
    """Check certificate files: one line each says valid or invalid, and why.

    Without --model, the proof is checked: that the claim follows from the evidence and the field in the file. With
    --model and --image, the evidence and the field are computed anew as well, and every digest is compared.

    Exit status 0: all files are valid. 1: some are not.
    """
    if bool(model) != bool(image):
        raise InputError("`--model` and `--image` must be given together, or neither.")
    against = _against(model, image) if model else None
    verdicts = [_checked(file, against) for file in files]
    for file, verdict in zip(files, verdicts, strict=True):
        found = {"file": file, "valid": verdict.valid, "certified": verdict.certified, "reason": verdict.reason}
        typer.echo(json.dumps(found) if as_json else f"{file if file.isprintable() else ascii(file)}: {verdict}")
    if not all(verdict.valid for verdict in verdicts):
        raise typer.Exit(1)


def _checked(file: str, against: Callable[[bytes], str | None] | None) -> checker.Verdict:
    try:
        data = checker.load(file)
    except checker.Refused as refusal:
        return checker.Verdict(valid=False, certified=False, reason=str(refusal))
    verdict = checker.check_bytes(data)
    if not verdict.valid or against is None:
        return verdict
    difference = against(data)
    if difference is not None:
        return checker.Verdict(valid=False, certified=False, reason=difference)
    return checker.Verdict(True, verdict.certified, f"{verdict.reason}; model, field, image and evidence agree")


def _against(model: str, image: str) -> Callable[[bytes], str | None]:
    """Return what compares a file with the model and the image; only this needs torch."""
    from patchguard import certificate_file, zoo

    guard, pixels = zoo.find(model), _pixels(image)
    return lambda data: certificate_file.difference(data, guard, pixels)


def _pixels(path: str) -> "Tensor":
    """Return the 8-bit pixels (3, height, width) of an image file."""
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            pixels = np.array(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"`--image` must be an image file; {path} cannot be read: {error}.") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
