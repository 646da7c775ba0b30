"""`patchguard verify`: check certificate files, alone or against the model and the image they are about."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from patchguard import verify as checker
from patchguard.cli.common import TrustCode
from patchguard.errors import InputError

if TYPE_CHECKING:
    from patchguard.guard import Guard


def verify(
    files: Annotated[list[str], typer.Argument(help="Certificate files (.pgc).", metavar="FILE...")],
    model: Annotated[str, typer.Option(help="Also compute everything anew with this model: a name or a file.")] = "",
    image: Annotated[str, typer.Option(help="With --model: the image that the certificates are about.")] = "",
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file.")] = False,
) -> None:
    """Check certificate files: one line each says valid or invalid, and why.

    Without --model, the proof is checked: that the claim follows from the evidence and the field in the file. The
    line then says that it holds if these are the network's. With --model and --image, the evidence and the field are
    computed anew as well, and every digest is compared.

    Exit status 0: all files are valid. 1: some are not.
    """
    if bool(model) != bool(image):
        raise InputError("`--model` and `--image` must be given together, or neither.")
    against = _against(model, image, trust_code) if model else None
    verdicts = [_checked(file, against) for file in files]
    for file, verdict in zip(files, verdicts, strict=True):
        condition = checker.CONDITION if verdict.valid and against is None else None
        found = {"file": file, **asdict(verdict), "condition": condition}
        typer.echo(json.dumps(found) if as_json else f"{file if file.isprintable() else ascii(file)}: {verdict}")
    if not all(verdict.valid for verdict in verdicts):
        raise typer.Exit(1)


def _checked(file: str, against: Callable[[bytes], tuple[bool, str]] | None) -> checker.Verdict:
    try:
        data = checker.load(file)
    except checker.Refused as refusal:
        return checker.Verdict(valid=False, certified=False, reason=str(refusal))
    verdict = checker.check_bytes(data, checker.CONDITION if against is None else "")
    if against is None or (verdict.checked and not verdict.valid):
        return verdict
    agrees, told = against(data)
    if not agrees:
        return checker.Verdict(valid=False, certified=False, reason=told)
    certified = bool(checker.read(data)[0]["certified"])
    return checker.Verdict(True, certified, f"{verdict.reason}; {told}" if verdict.checked else told)


def _against(model: str, image: str, trust_code: bool) -> Callable[[bytes], tuple[bool, str]]:
    """Return what compares a file with the model and the image, and says how that went; only this needs torch."""
    from patchguard.data.decode import decode
    from patchguard.patch import Patch
    from patchguard.storage import certificate_file, zoo

    pixels = decode(image)

    @cache
    def find(patch: Patch | None) -> "Guard":
        guard = zoo.find(model, trust_code=trust_code, patch=patch, size=(pixels.shape[1], pixels.shape[2]))
        file = zoo.file_of(model, guard)
        if file is not None:
            typer.echo(f"model: {file}", err=True)
        return guard

    own = zoo.is_own(model)  # its masks are made for the patch of each certificate
    if not own:
        find(None)

    def compare(data: bytes) -> tuple[bool, str]:
        about = checker.read(data)[0]["patch"]
        guard = find(Patch(about["height"], about["width"], about["count"]) if own else None)
        difference = certificate_file.difference(data, guard, pixels)
        if difference is not None:
            return False, difference
        claim = checker.read(data)[0]
        if claim["format"] == checker.STATEMENT:
            outcome = "is certified" if claim["certified"] else "is NOT certified"
            return True, f"label {claim['label']} {outcome}: the model, run anew on the image, says the same"
        masks = "" if certificate_file.has_own_masks(data, guard) else " with masks fitted to this patch"
        return True, f"model{masks}, field, image and evidence agree"

    return compare
