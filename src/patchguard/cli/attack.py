"""`patchguard attack`: try to break every image, and every certificate."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchguard.cli.common import (
    DEFENSES,
    IMAGES,
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
from patchguard.cli.progress import show_progress
from patchguard.errors import InputError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.runs.attack import Hunt, Trial
    from patchguard.runs.engine import Outcome
    from patchguard.runs.summary import AttackSummary

ATTACK = "The attack"  # a panel of the help
REFUTED = 3  # the exit status that says: a certified label was changed
# What an attack is allowed; a setting that the chosen attack has not is passed over.
BUDGETS: dict[str, dict[str, Any]] = {
    "quick": {"steps": 20, "locations": 1, "restarts": 1},
    "paper": {"steps": 500, "locations": 5, "restarts": 1, "step": 0.05},
}


def attack(
    model: Model = "cifar10",
    trust_code: TrustCode = False,
    data: Data = "sample",
    root: Root = None,
    unlabeled: Unlabeled = False,
    patch: Annotated[
        str,
        typer.Option(
            help="5, 24x88 or 2%. Default: the patch the model was trained against.",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = "",
    patch_space: PatchSpace = "source",
    attack: Annotated[
        str,
        typer.Option(
            help="adaptive, patch_pgd, universal_patch, noise, colors, copy, or one that you installed.",
            rich_help_panel=ATTACK,
        ),
    ] = "adaptive",
    budget: Annotated[
        str,
        typer.Option(
            help="quick, paper (500 steps, 5 locations), or any settings of the attack: steps=50,restarts=2.",
            rich_help_panel=ATTACK,
        ),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(help="Gradient steps per location.", show_default=False, rich_help_panel=ATTACK)
    ] = None,
    locations: Annotated[
        int | None, typer.Option(help="Locations to try.", show_default=False, rich_help_panel=ATTACK)
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Random restarts per location.", show_default=False, rich_help_panel=ATTACK)
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(help="How far a step moves a pixel, from 0 to 1.", show_default=False, rich_help_panel=ATTACK),
    ] = None,
    aim: Annotated[
        str,
        typer.Option(
            help="Targeted attack: a class by name or number that must be the answer.", rich_help_panel=ATTACK
        ),
    ] = "",
    seed: Annotated[
        int,
        typer.Option(help="With the number of an image, decides all that is random in it.", rich_help_panel=ATTACK),
    ] = 0,
    defense: Annotated[
        str,
        typer.Option(help=f"Use another defense: {DEFENSES}; MaskedAgreement raises alerts.", rich_help_panel=RULE),
    ] = "",
    evidence: Evidence = "",
    threshold: Threshold = "",
    tau: Tau = None,
    masks: Masks = None,
    limit: Limit = None,
    only: Annotated[
        int | None,
        typer.Option(
            help="Attack only the image of this number, as in the run.", show_default=False, rich_help_panel=IMAGES
        ),
    ] = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run. Default: runs/<model>-<data>-<attack>-<patch>.",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
    force: Force = False,
    mix_versions: MixVersions = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Attack images: change the pixels of a patch until the label falls; measure the gap between proof and attack.

    Every image is also certified. If a certified label ever changes, the run continues to its end, keeps both images,
    the evidence and the seed in the folder `refuted`, and exits with status 3. A run that was stopped is resumed by the
    same command.
    """
    from patchguard import runtime
    from patchguard.attacks import build
    from patchguard.runs.attack import Trial, refute
    from patchguard.runs.engine import describe_cost
    from patchguard.runs.images import open_sources
    from patchguard.runs.job import prepare

    chosen = {"steps": steps, "locations": locations, "restarts": restarts, "step": step_size}
    options = {name: value for name, value in chosen.items() if value is not None}
    built = build(attack, **_read_settings(attack, budget, options))
    if seed < 0:
        raise InputError(f"`--seed` must be a whole number of at least 0; got {seed}.")
    source = open_sources([data], root, labeled=not unlabeled)
    source = source if limit is None else source.limit(limit)
    if only is not None and not 0 <= only < len(source):
        raise InputError(f"`--only` must be the number of an image, 0 to {len(source) - 1}; got {only}.")
    job = prepare(
        source=source,
        data=data,
        model=model,
        trust_code=trust_code,
        patches=[patch] if patch else (),
        defense=defense,
        evidence=evidence,
        threshold=threshold,
        tau=tau,
        masks=masks,
        patch_space=patch_space,
        curve=False,
        alerts=True,
    )
    if only is not None:  # taken now: another defense is fitted to the same image as in the run
        job = replace(job, source=job.source.subset([only]))
    words = {
        "model": model,
        "trust_code": trust_code,
        "data": data,
        "root": root,
        "unlabeled": unlabeled,
        "patch": job.patches[0].key,
        "patch_space": "" if patch_space == "source" else patch_space,
        "attack": attack,
        "budget": budget,
        "steps": steps,
        "locations": locations,
        "restarts": restarts,
        "step_size": step_size,
        "aim": aim,
        "seed": seed,
        "defense": defense,
        "evidence": evidence,
        "threshold": threshold,
        "tau": tau,
        "masks": masks,
        "limit": limit,
        "device": device,
    }
    trial = Trial(
        job=job,
        attack=built,
        name=attack,
        aim=_read_class(aim, job.class_names),
        seed=seed,
        numbers=None if only is None else (only,),
        command=("patchguard", "attack", *write_options(words)),
        model=model,
    )
    names = (job.model, job.data, attack, job.patches[0].key, "" if only is None else str(only))
    folder = out or name_run(*names)
    shown_here, total = runtime.rank() == 0 and not quiet, len(job.source)
    if shown_here and (cost := describe_cost(job, device)):
        typer.echo(f"{cost}; the attack comes on top", err=True)
    with resumable(folder), show_progress("attacking", total, unit="images", shown=shown_here) as progress:
        outcome = refute(
            trial,
            folder,
            device=device,
            batch_size=batch_size,
            progress=lambda hunt: progress.update(
                hunt.images, note=_describe(hunt, labeled=job.source.targets is not None)
            ),
            mix_versions=mix_versions,
            force=force,
        )
    if outcome is not None:
        _show(outcome, trial, folder, as_json, quiet)


def _read_settings(name: str, budget: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the attack: those of the budget, then single options."""
    from dataclasses import MISSING, fields

    from patchguard import attacks

    if name not in attacks.ATTACKS:
        known = list(attacks.ATTACKS)
        raise InputError(f"`--attack` must be one of {', '.join(known)}; got {name!r}. {nearest(name, known)}")
    kind: Any = attacks.ATTACKS[name]
    known_fields = fields(kind)
    has = [field.name for field in known_fields]
    if budget in BUDGETS:
        settings = {key: value for key, value in BUDGETS[budget].items() if key in has}
    else:
        settings = dict(_read_setting(part) for part in budget.split(",")) if budget else {}
    for key in [*settings, *options]:
        if key not in has:
            raise InputError(
                f"the attack {name} has no setting `{key}`; it has {', '.join(has) or 'none'}. Leave it out."
            )
    missing = [field.name for field in known_fields if field.default is MISSING and field.name not in settings]
    if missing:
        raise InputError(f"the attack {name} needs {', '.join(missing)}; write --budget {missing[0]}=... .")
    if "path" in settings:
        attacks.load_patch(settings["path"])  # raises here, before anything is written
    return {**settings, **options}


def _read_setting(text: str) -> tuple[str, Any]:
    """Read steps=50: whole numbers, numbers, true, false and none mean what they say, other words stay words."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise InputError(f"`--budget` must be {' or '.join(BUDGETS)}, or settings such as steps=50; got {text!r}.")
    name = name.replace("-", "_")
    if name == "path":  # a file may have any name
        return name, value
    if value.casefold() in ("true", "false", "none"):
        return name, {"true": True, "false": False, "none": None}[value.casefold()]
    for read in (int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, value


def _read_class(text: str, names: tuple[str, ...]) -> int | None:
    if not text:
        return None
    known = {name.casefold(): number for number, name in enumerate(names)}
    number = known.get(text.casefold(), int(text) if text.isdecimal() else -1)
    if not 0 <= number < len(names):
        raise InputError(f"`--aim` must be a class by name or number; got {text!r}. {nearest(text, list(names))}")
    return number


def _describe(hunt: "Hunt", *, labeled: bool) -> str:
    counts = hunt.tally.counts
    if not counts["read"]:
        return ""
    clean, attacked, certified = (counts[name] / counts["read"] for name in ("clean", "attacked", "certified"))
    refuted = f" REFUTED {len(hunt.tally.refuted)}" if hunt.tally.refuted else ""
    before = f"clean {clean:.1%} attacked" if labeled else "unchanged"
    return f"{before} {attacked:.1%} certified {certified:.1%}{refuted}"


# -- results -----------------------------------------------------------------------------------------------------------


def _show(outcome: "Outcome[AttackSummary]", trial: "Trial", folder: Path, as_json: bool, quiet: bool) -> None:
    from patchguard.report import render as report
    from patchguard.runs.summary import to_json

    summary = outcome.summary
    if summary.refuted:  # first of all: nothing that fails later may hide it
        typer.echo(_alarm(summary.refuted, trial, folder), err=True)
    page = report.write([folder])
    if as_json:
        typer.echo(f"model: {trial.job.file}", err=True)
        typer.echo(to_json(summary), nl=False)
    elif quiet:
        typer.echo(page)
    else:
        output = screen()
        settings, seconds = summary.settings, summary.seconds
        if note := describe_classes(settings.class_names, labeled=summary.labeled):
            output.print(shown(note), soft_wrap=True, highlight=False)
        output.print(
            f"{shown(settings.model)} on {shown(settings.data)}: {summary.images:,} images, "
            f"{settings.defense}"
            + (f" with tau {settings.rule['tau']:g}" if settings.rule.get("tau") else "")
            + f", {settings.attack} with a patch of {settings.patches[0]}"
            + (" network pixels" if settings.patch_space == "input" else ""),
            soft_wrap=True,
        )
        output.print(f"model: {shown(str(trial.job.file))}", soft_wrap=True, highlight=False)
        output.print(make_table(summary))
        if summary.errors:
            output.print(f"images without an answer: {summary.errors:,}; the records say why", soft_wrap=True)
        if summary.masks != "own":
            output.print("masks: made for that patch, not the model's own", soft_wrap=True)
        if seconds.images_per_second:
            output.print(f"{seconds.total:.1f} s; {seconds.images_per_second:.1f} images per second")
        output.print(f"{'already complete: ' if outcome.already_complete else ''}{shown(str(page))}", soft_wrap=True)
    if summary.refuted:
        raise typer.Exit(REFUTED)


def _alarm(refuted: list[int], trial: "Trial", folder: Path) -> str:
    certified = "certified image" if len(refuted) == 1 else "certified images"
    return (
        f"patchguard: REFUTED: {len(refuted):,} {certified} flipped, the first is {trial.number(refuted[0])}. "
        f"A certificate, the field or the attack is wrong; {folder / 'refuted'} holds images, evidence and seeds. "
        f"Repeat: {trial.repeat_command(refuted[0])}"
    )


def make_table(summary: "AttackSummary") -> "Table":
    """Return the headline numbers, each with its 95 % interval."""
    from rich.table import Table

    table = Table("images", "fraction (95 %)", "number", box=None, pad_edge=False)
    detects = summary.settings.detects
    either = " (or an alert)" if detects else ""
    rows = [("correct without an attack", "clean")] if summary.labeled else []
    rows += [
        (("correct under the attack" if summary.labeled else "label unchanged by the attack") + either, "attacked"),
        (("correct and certified" if summary.labeled else "label certified") + either, "certified"),
        ("not certified, and broken", "broken"),
    ]
    rows += [("answered with the aim", "aimed")] if summary.aimed is not None else []
    rows += [("attacks that raise an alert", "alerts")] if detects else []
    for words, name in rows:
        number = getattr(summary, name)
        table.add_row(words, percent(number), f"{number.correct:,} of {number.total:,}")
    fallen = summary.certified_broken
    table.add_row("certified, but broken", "must be none", f"{fallen.correct:,} of {fallen.total:,}")
    return table
