"""`patchguard certify`: certify a set of images from one command."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchguard.cli.common import (
    DEFENSES,
    IMAGES,
    OUTPUT,
    RULE,
    RUN,
    AsJson,
    BatchSize,
    Data,
    Device,
    Evidence,
    Force,
    Limit,
    Masks,
    MixVersions,
    Model,
    PatchSpace,
    Quiet,
    Root,
    Tau,
    Threshold,
    TrustCode,
    Unlabeled,
    describe_classes,
    name_run,
    percent,
    resumable,
    screen,
    shown,
    write_options,
)
from patchguard.cli.finished import find_finished, remember
from patchguard.cli.progress import show_progress
from patchguard.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.runs.metrics import CertifyTally
    from patchguard.runs.summary import CertifySummary


def certify(
    model: Model = "cifar10",
    trust_code: TrustCode = False,
    data: Data = "sample",
    root: Root = None,
    unlabeled: Unlabeled = False,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            help="5, 24x88 or 2%; may be repeated. Default: the patch the model was trained against.",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    patch_space: PatchSpace = "source",
    defense: Annotated[str, typer.Option(help=f"Use another defense: {DEFENSES}.", rich_help_panel=RULE)] = "",
    evidence: Evidence = "",
    threshold: Threshold = "",
    tau: Tau = None,
    masks: Masks = None,
    top_k: Annotated[int, typer.Option(help="Prove that the label stays among the k best.", rich_help_panel=RULE)] = 1,
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run. Default: runs/<model>-<data>-<patch>.", show_default=False, rich_help_panel=RUN
        ),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="Also write a certificate file per image and patch into this folder.", rich_help_panel=OUTPUT
        ),
    ] = None,
    force: Force = False,
    mix_versions: MixVersions = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Certify images: prove for each that no patch changes its label; write records, a summary and a report.

    A run that was stopped is resumed by the same command. In the folder of a run, more images and more --patch extend
    it. Labeled images also give accuracies, each with its 95 % interval.
    """
    words = {
        "model": model,
        "trust_code": trust_code,
        "data": data,
        "root": root,
        "unlabeled": unlabeled,
        "patch_space": "" if patch_space == "source" else patch_space,
        "defense": defense,
        "evidence": evidence,
        "threshold": threshold,
        "tau": tau,
        "masks": masks,
        "top_k": "" if top_k == 1 else top_k,
        "limit": limit,
        "out": out,
        "certificates": certificates,
    }
    asked = [*write_options(words), *(patch or ())]
    if not force and certificates is None and (finished := find_finished(asked, model, data, out)) is not None:
        _show(
            finished.read_summary(),
            finished.model,
            finished.folder,
            already_complete=True,
            as_json=as_json,
            quiet=quiet,
        )
        return
    from patchguard import runtime
    from patchguard.runs.certify import certify as certify_all
    from patchguard.runs.engine import describe_cost
    from patchguard.runs.images import open_sources
    from patchguard.runs.job import prepare

    source = open_sources([data], root, labeled=not unlabeled)
    job = prepare(
        source=source if limit is None else source.limit(limit),
        data=data,
        model=model,
        trust_code=trust_code,
        patches=patch or (),
        defense=defense,
        evidence=evidence,
        threshold=threshold,
        tau=tau,
        masks=masks,
        patch_space=patch_space,
        top_k=top_k,
        certificates=certificates,
    )
    folder = out or name_run(job.model, job.data, *(patch.key for patch in job.patches))
    if certificates is not None:
        _make_folder(certificates)
    shown_here, total = runtime.rank() == 0 and not quiet, len(job.source)
    if shown_here and (cost := describe_cost(job, device)):
        typer.echo(cost, err=True)
    with resumable(folder), show_progress("certifying", total, unit="images", shown=shown_here) as progress:
        outcome = certify_all(
            job,
            folder,
            device=device,
            batch_size=batch_size,
            progress=lambda tally: progress.update(tally.images, note=_describe(tally)),
            mix_versions=mix_versions,
            force=force,
            command=("patchguard", "certify", *write_options(words)),
        )
    if outcome is not None:
        about = "" if job.file is None else str(job.file)
        _show(outcome.summary, about, folder, already_complete=outcome.already_complete, as_json=as_json, quiet=quiet)
        if certificates is None:
            remember(folder, asked, model, data, None if job.file is None else job.file.path, about)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`--certificates` must be a folder that can be made: {error.strerror}.") from None


def _describe(tally: "CertifyTally") -> str:
    clean, certified = tally.accuracy
    if certified is None:
        return ""
    if clean is None:
        return f"proved {certified:.1%}"
    return f"clean {clean:.1%} certified {certified:.1%}"


# -- results -----------------------------------------------------------------------------------------------------------


def _show(
    summary: "CertifySummary", model: str, folder: Path, *, already_complete: bool, as_json: bool, quiet: bool
) -> None:
    from patchguard.report import render as report
    from patchguard.runs.summary import to_json

    page = report.write([folder])
    if as_json:
        typer.echo(f"model: {model}", err=True)
        typer.echo(to_json(summary), nl=False)
        return
    if quiet:
        typer.echo(page)
        return
    output = screen()
    settings, seconds = summary.settings, summary.seconds
    if note := describe_classes(settings.class_names, labeled=summary.labeled):
        output.print(shown(note), soft_wrap=True, highlight=False)
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
    if model:
        output.print(f"model: {shown(model)}", soft_wrap=True, highlight=False)
    output.print(make_table(summary))
    if summary.errors:
        output.print(f"images without an answer: {summary.errors:,}; the records say why", soft_wrap=True)
    if any(entry.masks != "own" for entry in summary.patches.values()):
        output.print("refitted: masks made for that patch, not the model's own", soft_wrap=True)
    if seconds.images_per_second:
        output.print(
            f"{seconds.total:.1f} s, of which the network {seconds.network:.1f} s; "
            f"{seconds.images_per_second:.1f} images per second",
            soft_wrap=True,
        )
    output.print(f"{'already complete: ' if already_complete else ''}{shown(str(page))}", soft_wrap=True)


def make_table(summary: "CertifySummary") -> "Table":
    """Return the headline numbers, each with its 95 % interval."""
    from rich.table import Table

    names = ("clean", "certified", "proved") if summary.labeled else ("proved",)
    rows = Table("patch", *names, "masks", box=None, pad_edge=False)
    if summary.undefended is not None:
        rows.add_row("undefended", percent(summary.undefended), "", "", "")
    for key, entry in summary.patches.items():
        rows.add_row(key, *(percent(getattr(entry, name)) for name in names), entry.masks)
    return rows
