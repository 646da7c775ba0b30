"""`patchguard certify`: certify a set of images from one command."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchguard.cli.common import screen, shown
from patchguard.cli.data import Root
from patchguard.cli.progress import shown_progress
from patchguard.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.runs.job import Job
    from patchguard.runs.loop import Outcome
    from patchguard.runs.metrics import CertifyTally
    from patchguard.runs.summary import CertifySummary, Proportion

DEFENSES = "RobustMasking, DoubleMasking, ClippedSum, MajorityVote, CellMasking, Median, TrimmedMean or Undefended"
SPACE = "Where the patch lies: in the source image, or in the network's input, after resize and crop."
TAU = (
    "Lead, in units of evidence, that DoubleMasking asks of a mask that overrules the majority. "
    "Default: the model's, or 0 with another rule or evidence."
)
EVIDENCE = "logits, confidence, vote, prediction or tanh"


def certify(
    model: Annotated[str, typer.Option(help="A checkpoint that `patchguard models` lists, or a file.")] = "cifar10",
    data: Annotated[
        str, typer.Option(help="sample, a known set, a folder of class folders, a folder or 'pattern' of images.")
    ] = "sample",
    root: Root = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            help="5, 24x88 or 2%; may be repeated. Default: what the model was trained against.", show_default=False
        ),
    ] = None,
    patch_space: Annotated[str, typer.Option(help=SPACE)] = "source",
    defense: Annotated[str, typer.Option(help=f"Aggregate by another rule: {DEFENSES}.")] = "",
    evidence: Annotated[str, typer.Option(help=f"Make another kind of evidence: {EVIDENCE}.")] = "",
    threshold: Annotated[str, typer.Option(help="Detection threshold T of RobustMasking, such as 0.2 or 1/5.")] = "",
    tau: Annotated[float | None, typer.Option(help=TAU, show_default=False)] = None,
    top_k: Annotated[int, typer.Option(help="Prove that the label stays among the k best.")] = 1,
    limit: Annotated[int | None, typer.Option(help="So many images only, spread over all.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images at once. Default: 16 on a CPU, 512 on a GPU.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/<model>-<data>.", show_default=False)
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="Also write a certificate file per image and patch into this folder.")
    ] = None,
    mix_versions: Annotated[
        bool, typer.Option("--mix-versions", help="Go on with a run that other versions of patchguard or torch began.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
) -> None:
    """Certify images: prove, one by one, that no patch changes their label; record, sum up and report.

    Stopped at any moment and started again, a run goes on where it was. Images without classes get labels and proofs;
    with classes also accuracies, each with its 95 % interval.
    """
    from patchguard import runtime
    from patchguard.runs.job import opened, prepare
    from patchguard.runs.run import certify as certify_all

    source = opened([data], root)
    job = prepare(
        source=source if limit is None else source.limit(limit),
        data=data,
        model=model,
        patches=patch or (),
        defense=defense,
        evidence=evidence,
        threshold=threshold,
        tau=tau,
        patch_space=patch_space,
        top_k=top_k,
        certificates=certificates,
    )
    folder = out or Path("runs") / f"{plain(job.model)}-{plain(job.data)}"
    if certificates is not None:
        _make(certificates)
    first = runtime.rank() == 0
    with shown_progress(len(job.source), first=first, doing="certifying", shares=_shares) as progress:
        try:
            outcome = certify_all(
                job, folder, device=device, batch_size=batch_size, progress=progress, mix_versions=mix_versions
            )
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command goes on where it was: {folder}", err=True)
            raise typer.Exit(130) from None
    if outcome is not None:
        _show(outcome, job, folder, as_json)


def plain(text: str) -> str:
    """Return a word that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "images"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`--certificates` must be a folder that can be made: {error.strerror}.") from None


def _shares(tally: "CertifyTally") -> str:
    clean, certified = tally.accuracy
    if certified is None:
        return ""
    if clean is None:
        return f"proved {certified:.1%}"
    return f"clean {clean:.1%} certified {certified:.1%}"


# -- at the end --------------------------------------------------------------------------------------------------------


def _show(outcome: "Outcome[CertifySummary]", job: "Job", folder: Path, as_json: bool) -> None:
    from patchguard.report import render as report
    from patchguard.runs.summary import to_json

    page = report.write([folder])
    if as_json:
        typer.echo(f"model: {job.file}", err=True)
        typer.echo(to_json(outcome.summary), nl=False)
        return
    output, summary = screen(), outcome.summary
    settings, seconds = summary.settings, summary.seconds
    output.print(
        f"{shown(settings.model)} on {shown(settings.data)}: {summary.images:,} images, "
        f"{settings.defense}"
        + (f" of {settings.rule['evidence']['kind']}" if "evidence" in settings.rule else "")
        + (f", tau {settings.rule['tau']:g}" if settings.rule.get("tau") else "")
        + (f", label among the best {settings.top_k}" if settings.top_k > 1 else ""),
        soft_wrap=True,
    )
    if settings.patch_space == "input":
        output.print("patches in network pixels, placed after resizing and cropping", soft_wrap=True)
    output.print(f"model: {shown(str(job.file))}", soft_wrap=True, highlight=False)
    output.print(table(summary))
    if summary.errors:
        output.print(f"images without an answer: {summary.errors:,}; the records say why", soft_wrap=True)
    if any(entry.masks != "own" for entry in summary.patches.values()):
        output.print("refitted: masks made for that patch, which are not the model's own", soft_wrap=True)
    if seconds.images_per_second:
        output.print(
            f"{seconds.total:.1f} s, of which the network {seconds.network:.1f} s; "
            f"{seconds.images_per_second:.1f} images per second",
            soft_wrap=True,
        )
    output.print(f"{'was finished before: ' if outcome.before else ''}{shown(str(page))}", soft_wrap=True)


def table(summary: "CertifySummary") -> "Table":
    """Return the headline numbers, each with its 95 % interval."""
    from rich.table import Table

    names = ("clean", "certified", "proved") if summary.labeled else ("proved",)
    found = Table("patch", *names, "masks", box=None, pad_edge=False)
    if summary.undefended is not None:
        found.add_row("undefended", percent(summary.undefended), "", "", "")
    for key, entry in summary.patches.items():
        found.add_row(key, *(percent(getattr(entry, name)) for name in names), entry.masks)
    return found


def percent(proportion: "Proportion") -> str:
    """Return a fraction with its interval: 86.2 % (82.9 to 88.9)."""
    if proportion.fraction is None:
        return "none"
    return f"{100 * proportion.fraction:.1f} % ({100 * proportion.low:.1f} to {100 * proportion.high:.1f})"
