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
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: the images that the certificates are about: files, folders or 'patterns'; may be "
            "repeated. Each certificate finds its own.",
            show_default=False,
        ),
    ] = None,
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object per file.")] = False,
) -> None:
    """Check certificate files: one line each says valid or invalid, and why.

    Without --model, the proof is checked: that the claim follows from the evidence and the field in the file. The
    line then says that it holds if these are the network's. With --model and --image, the evidence and the field are
    computed anew as well, and every digest is compared.

    Exit status 0: all files are valid. 1: some are not.
    """
    if bool(model) != bool(image):
        raise InputError("`--model` and `--image` must be given together, or neither.")
    against = _against(model, image, trust_code) if model and image else None
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


def _against(model: str, images: list[str], trust_code: bool) -> Callable[[bytes], tuple[bool, str]]:
    """Return what compares a file with the model and its image, and says how that went; only this needs torch."""
    from patchguard.data.decode import Unreadable
    from patchguard.data.loading import iterate_images
    from patchguard.patch import Patch
    from patchguard.runs.images import open_sources
    from patchguard.storage import certificate_file, zoo

    source = open_sources(images, labeled=False)
    numbers: dict[str, int] = {}  # of the images, by the digest of their pixels
    for number, pixels in enumerate(iterate_images(source)):
        if not isinstance(pixels, Unreadable):
            numbers.setdefault(certificate_file.image_digest(pixels), number)
        elif len(source) == 1:
            raise pixels

    @cache
    def find(patch: Patch | None, size: tuple[int, int] | None) -> "Guard":
        guard = zoo.find(model, trust_code=trust_code, patch=patch, size=size)
        file = zoo.file_of(model, guard)
        if file is not None:
            typer.echo(f"model: {file}", err=True)
        return guard

    own = zoo.is_own(model)  # its masks are made for the patch and the image of each certificate
    if not own:
        find(None, None)

    def compare(data: bytes) -> tuple[bool, str]:
        claim = checker.read(data)[0]
        number = numbers.get(claim["digests"]["image"], 0 if len(source) == 1 else None)
        if number is None:
            return False, f"it is about another image: none of the {len(source)} that were given"
        pixels, about = source.read(number), claim["patch"]
        patch = Patch(about["height"], about["width"], about["count"])
        guard = find(patch, (pixels.shape[1], pixels.shape[2])) if own else find(None, None)
        difference = certificate_file.difference(data, guard, pixels)
        if difference is not None:
            other = "" if certificate_file.is_about_model(claim, guard) else f"it is about another model than {model}: "
            return False, difference if "another image" in difference else f"{other}{difference}"
        if claim["format"] == checker.STATEMENT:
            outcome = "is certified" if claim["certified"] else "is NOT certified"
            return True, f"label {claim['label']} {outcome}: the model, run anew on the image, says the same"
        masks = "" if certificate_file.has_own_masks(data, guard) else " with masks fitted to this patch"
        return True, f"model{masks}, field, image and evidence agree"

    return compare
