"""`patchguard attack`: try to break every image, and every certificate."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchguard.cli.certify import DEFENSES, EVIDENCE, SPACE, TAU, percent, plain
from patchguard.cli.common import screen, shown
from patchguard.cli.data import Root
from patchguard.cli.progress import shown_progress
from patchguard.errors import InputError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.runs.loop import Outcome
    from patchguard.runs.refute import Hunt, Trial
    from patchguard.runs.summary import AttackSummary

REFUTED = 3  # the exit status that says: a certified label was changed
# What an attack is allowed; a setting that the chosen attack has not is passed over.
BUDGETS: dict[str, dict[str, Any]] = {
    "quick": {"steps": 20, "locations": 1, "restarts": 1},
    "paper": {"steps": 500, "locations": 5, "restarts": 1, "step": 0.05},
}


def attack(
    model: Annotated[str, typer.Option(help="A checkpoint that `patchguard models` lists, or a file.")] = "cifar10",
    data: Annotated[
        str, typer.Option(help="sample, a known set, a folder of class folders, a folder or 'pattern' of images.")
    ] = "sample",
    root: Root = None,
    patch: Annotated[
        str,
        typer.Option(help="5, 24x88 or 2%. Default: what the model was trained against.", show_default=False),
    ] = "",
    patch_space: Annotated[str, typer.Option(help=SPACE)] = "source",
    attack: Annotated[
        str, typer.Option(help="adaptive, patch_pgd, universal_patch, noise, colours or copy.")
    ] = "adaptive",
    budget: Annotated[
        str,
        typer.Option(help="quick, paper (500 steps, 5 locations), or any settings of the attack: steps=50,restarts=2."),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Gradient steps per location.", show_default=False)] = None,
    locations: Annotated[int | None, typer.Option(help="Places that are tried.", show_default=False)] = None,
    restarts: Annotated[int | None, typer.Option(help="Fresh starts per place.", show_default=False)] = None,
    step_size: Annotated[
        float | None, typer.Option(help="How far a step moves a pixel, from 0 to 1.", show_default=False)
    ] = None,
    aim: Annotated[str, typer.Option(help="A class by name or number: attack until this is the answer.")] = "",
    seed: Annotated[int, typer.Option(help="With the number of an image, decides all that is random in it.")] = 0,
    defense: Annotated[
        str, typer.Option(help=f"Aggregate by another rule: {DEFENSES}; MaskedAgreement raises alerts.")
    ] = "",
    evidence: Annotated[str, typer.Option(help=f"Make another kind of evidence: {EVIDENCE}.")] = "",
    threshold: Annotated[str, typer.Option(help="Detection threshold T of RobustMasking, such as 0.2 or 1/5.")] = "",
    tau: Annotated[float | None, typer.Option(help=TAU, show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(help="So many images only, spread over all.", show_default=False)] = None,
    only: Annotated[
        int | None, typer.Option(help="Only the image of this number, attacked as in the run.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images at once. Default: 16 on a CPU, 512 on a GPU.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run. Default: runs/<model>-<data>-<attack>.", show_default=False),
    ] = None,
    mix_versions: Annotated[
        bool, typer.Option("--mix-versions", help="Go on with a run that other versions of patchguard or torch began.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
) -> None:
    """Attack images: change the pixels of a patch until the label falls; measure the gap between proof and attack.

    Every image is also certified. Should a certified label ever be changed, the run goes on to its end, keeps both
    images, the evidence and the seed in the folder `refuted`, and exits with status 3. Stopped at any moment and
    started again, it goes on where it was.
    """
    from patchguard import runtime
    from patchguard.attacks import build
    from patchguard.runs.job import opened, prepare
    from patchguard.runs.refute import Trial, refute

    chosen = {"steps": steps, "locations": locations, "restarts": restarts, "step": step_size}
    asked = {name: value for name, value in chosen.items() if value is not None}
    made = build(attack, **_settings(attack, budget, asked))
    if seed < 0:
        raise InputError(f"`--seed` must be a whole number of at least 0; got {seed}.")
    source = opened([data], root)
    source = source if limit is None else source.limit(limit)
    if only is not None and not 0 <= only < len(source):
        raise InputError(f"`--only` must be the number of an image, 0 to {len(source) - 1}; got {only}.")
    job = prepare(
        source=source,
        data=data,
        model=model,
        patches=[patch] if patch else (),
        defense=defense,
        evidence=evidence,
        threshold=threshold,
        tau=tau,
        patch_space=patch_space,
        curve=False,
        alerts=True,
    )
    if only is not None:  # taken now: another defense is fitted to the same image as in the run
        job = replace(job, source=job.source.subset([only]))
    words = {
        "model": model,
        "data": data,
        "root": root,
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
        "limit": limit,
        "device": device,
    }
    trial = Trial(
        job=job,
        attack=made,
        name=attack,
        aim=_aim(aim, job.class_names),
        seed=seed,
        numbers=None if only is None else (only,),
        command=("patchguard", "attack", *_written(words)),
        model=model,
    )
    folder = out or Path("runs") / "-".join(
        [plain(job.model), plain(job.data), plain(attack), *([] if only is None else [str(only)])]
    )
    first = runtime.rank() == 0
    with shown_progress(len(job.source), first=first, doing="attacking", shares=_shares) as progress:
        try:
            outcome = refute(
                trial, folder, device=device, batch_size=batch_size, progress=progress, mix_versions=mix_versions
            )
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command goes on where it was: {folder}", err=True)
            raise typer.Exit(130) from None
    if outcome is not None:
        _show(outcome, trial, folder, as_json)


def _settings(name: str, budget: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the attack: those of the budget, and those that are asked for one by one."""
    from dataclasses import MISSING, fields

    from patchguard import attacks

    if name not in attacks.ATTACKS:
        known = list(attacks.ATTACKS)
        raise InputError(f"`--attack` must be one of {', '.join(known)}; got {name!r}. {nearest(name, known)}")
    known_fields = fields(getattr(attacks, attacks.ATTACKS[name]))
    has = [field.name for field in known_fields]
    if budget in BUDGETS:
        given = {key: value for key, value in BUDGETS[budget].items() if key in has}
    else:
        given = dict(_pair(part) for part in budget.split(",")) if budget else {}
    for key in [*given, *asked]:
        if key not in has:
            raise InputError(
                f"the attack {name} has no setting `{key}`; it has {', '.join(has) or 'none'}. Leave it out."
            )
    lacking = [field.name for field in known_fields if field.default is MISSING and field.name not in given]
    if lacking:
        raise InputError(f"the attack {name} needs {', '.join(lacking)}; write --budget {lacking[0]}=... .")
    if "path" in given:
        attacks.load_patch(given["path"])  # raises here, before anything is written
    return {**given, **asked}


def _pair(text: str) -> tuple[str, Any]:
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


def _aim(text: str, names: tuple[str, ...]) -> int | None:
    if not text:
        return None
    known = {name.casefold(): number for number, name in enumerate(names)}
    number = known.get(text.casefold(), int(text) if text.isdecimal() else -1)
    if not 0 <= number < len(names):
        raise InputError(f"`--aim` must be a class by name or number; got {text!r}. {nearest(text, list(names))}")
    return number


def _written(words: dict[str, Any]) -> list[str]:
    """Return options as they are typed; those that are empty are left out."""
    return [
        part
        for name, value in words.items()
        if value not in (None, "")
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def _shares(hunt: "Hunt") -> str:
    counts = hunt.tally.counts
    if not counts["read"]:
        return ""
    clean, attacked, certified = (counts[name] / counts["read"] for name in ("clean", "attacked", "certified"))
    refuted = f" REFUTED {len(hunt.tally.refuted)}" if hunt.tally.refuted else ""
    return f"clean {clean:.1%} attacked {attacked:.1%} certified {certified:.1%}{refuted}"


# -- at the end --------------------------------------------------------------------------------------------------------


def _show(outcome: "Outcome[AttackSummary]", trial: "Trial", folder: Path, as_json: bool) -> None:
    from patchguard.report import render as report
    from patchguard.runs.summary import to_json

    summary = outcome.summary
    if summary.refuted:  # first of all: nothing that fails later may hide it
        typer.echo(_alarm(summary.refuted, trial, folder), err=True)
    page = report.write([folder])
    if as_json:
        typer.echo(f"model: {trial.job.file}", err=True)
        typer.echo(to_json(summary), nl=False)
    else:
        output = screen()
        settings, seconds = summary.settings, summary.seconds
        output.print(
            f"{shown(settings.model)} on {shown(settings.data)}: {summary.images:,} images, "
            f"{settings.defense}"
            + (f" with tau {settings.rule['tau']:g}" if settings.rule.get("tau") else "")
            + f", {settings.attack} with a patch of {settings.patches[0]}"
            + (" network pixels" if settings.patch_space == "input" else ""),
            soft_wrap=True,
        )
        output.print(f"model: {shown(str(trial.job.file))}", soft_wrap=True, highlight=False)
        output.print(table(summary))
        if summary.errors:
            output.print(f"images without an answer: {summary.errors:,}; the records say why", soft_wrap=True)
        if summary.masks != "own":
            output.print("masks: made for that patch, which are not the model's own", soft_wrap=True)
        if seconds.images_per_second:
            output.print(f"{seconds.total:.1f} s; {seconds.images_per_second:.1f} images per second")
        output.print(f"{'was finished before: ' if outcome.before else ''}{shown(str(page))}", soft_wrap=True)
    if summary.refuted:
        raise typer.Exit(REFUTED)


def _alarm(refuted: list[int], trial: "Trial", folder: Path) -> str:
    certified = "certified image" if len(refuted) == 1 else "certified images"
    return (
        f"patchguard: REFUTED: {len(refuted):,} {certified} flipped, the first is {trial.number(refuted[0])}. "
        f"A certificate, the field or the attack is wrong; {folder / 'refuted'} holds images, evidence and seeds. "
        f"Repeat: {trial.repeating(refuted[0])}"
    )


def table(summary: "AttackSummary") -> "Table":
    """Return the headline numbers, each with its 95 % interval."""
    from rich.table import Table

    found = Table("images", "share (95 %)", "number", box=None, pad_edge=False)
    detects = summary.settings.detects
    either = " (or an alert)" if detects else ""
    rows = [("right without an attack", "clean")] if summary.labeled else []
    rows += [
        (("right under the attack" if summary.labeled else "label unchanged by the attack") + either, "attacked"),
        (("right, and proved to stay" if summary.labeled else "label proved to stay") + either, "certified"),
        ("not proved, and really broken", "broken"),
    ]
    rows += [("answered with the aim", "aimed")] if summary.aimed is not None else []
    rows += [("attacks that raise an alert", "alerts")] if detects else []
    for words, name in rows:
        number = getattr(summary, name)
        found.add_row(words, percent(number), f"{number.correct:,} of {number.total:,}")
    fallen = summary.certified_broken
    found.add_row("proved, but broken", "must be none", f"{fallen.correct:,} of {fallen.total:,}")
    return found
