"""`patchguard reproduce`: the tables and figures of the paper, our numbers beside the published ones."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchguard.cli.common import screen, shown
from patchguard.errors import InputError

if TYPE_CHECKING:
    from patchguard.paper.context import Progress
    from patchguard.paper.experiment import Outcome, Table

SECONDS_BETWEEN_LINES = 10.0


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment that --list shows, or all.")] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Only this dataset; may be repeated. Default: all that the experiment can use."),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Folder of datasets. Default: $PATCHGUARD_DATA, or ~/.cache/patchguard/data.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(hidden=True)] = None,
    cache: Annotated[Path, typer.Option(help="Folder for local logits and trained models, used again.")] = Path(
        "runs/reproduce-cache"
    ),
    out: Annotated[Path, typer.Option(help="Folder for results: <out>/<name>-<data>/result.json and figures.")] = Path(
        "runs/reproduce"
    ),
    defense: Annotated[
        str, typer.Option(help="Add rows for this defense to main: one of ours, or one that you installed.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Only this many test images, evenly spaced.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images at once. Default: 64 on a CPU, 256 on a GPU.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    train: Annotated[
        bool, typer.Option("--train", metavar="", help="Train the models that are not here: hours on a GPU.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", metavar="", help="List the experiments and the datasets each can use.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the results as JSON.")] = False,
) -> None:
    """Run experiments of the paper and print the published numbers beside ours.

    The local logits of a model on a dataset are computed once and kept in --cache. A row whose model is not here is not
    run and shows the command that makes the model; with --train it is trained. Datasets that are not in --root are
    skipped.
    """
    if list_all:
        _list(as_json)
        return
    if not name:
        raise InputError("`name` must be an experiment or all. `patchguard reproduce --list` shows them.")
    for option, number in (("--limit", limit), ("--batch-size", batch_size)):
        if number is not None and number < 1:
            raise InputError(f"`{option}` must be a whole number, 1 or more; got {number}.")
    from patchguard.paper import select_experiments

    work = select_experiments(name, data or ())
    if defense:
        _check_defense(name, defense)
    from patchguard import runtime
    from patchguard.paper.context import Context
    from patchguard.paper.experiment import run_experiments

    context = Context(
        root=root or data_root,
        cache=cache,
        device=runtime.resolve_device(device),
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        defense=defense,
        train=train,
        progress=_print_progress(),
    )
    outcomes = []
    for outcome in run_experiments(context, work, out):
        outcomes.append(outcome)
        if not as_json:
            _show(outcome)
    if as_json:
        typer.echo(json.dumps([outcome.to_json(context) for outcome in outcomes], indent=1))
    if all(outcome.result is None for outcome in outcomes):
        raise InputError(f"nothing was run: {outcomes[0].skipped}")
    refuted = sum(outcome.result.refuted for outcome in outcomes if outcome.result is not None)
    if refuted:
        typer.echo(f"{refuted} certified images were broken: a certificate is wrong. Report this as a bug.", err=True)
        raise typer.Exit(3)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        raise InputError(f"not everything was run ({names}): {failed[0].skipped}")


def _check_defense(name: str, defense: str) -> None:
    from patchguard.defenses.serialization import find_defense

    if name != "main":
        raise InputError(f"`--defense` adds rows to the experiment main; got {name!r}. Leave it out.")
    if find_defense(defense).detects:
        raise InputError(f"`--defense` must prove labels; {defense} only detects attacks. Leave it out.")


def _list(as_json: bool) -> None:
    from patchguard.paper import EXPERIMENTS

    if as_json:
        entries = [
            {"name": each.name, "title": each.title, "where": each.where, "data": each.datasets}
            for each in EXPERIMENTS.values()
        ]
        typer.echo(json.dumps(entries, indent=1))
        return
    from rich.table import Table as Rows

    table = Rows("name", "what", "in the paper", "data", box=None, pad_edge=False)
    for each in EXPERIMENTS.values():
        table.add_row(each.name, each.title, ", ".join(each.where) or "-", ", ".join(each.datasets) or "none")
    screen().print(table)


def _print_progress() -> "Progress":
    """Return what prints progress on stderr, one line every few seconds."""
    last = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            sys.stderr.write(f"{what}: {done:,}{f' of {total:,}' if total else ''}\n")
            sys.stderr.flush()

    return report


def _show(outcome: "Outcome") -> None:
    output = screen()
    if outcome.result is None:
        output.print(f"{outcome.name}: skipped. {shown(outcome.skipped)}\n", soft_wrap=True, highlight=False)
        return
    for table in outcome.result.tables:
        _show_table(table)
    for note in outcome.result.notes:
        output.print(shown(note), soft_wrap=True, highlight=False)
    output.print(f"{outcome.seconds:.1f} s; {shown(str(outcome.folder))}\n", soft_wrap=True, highlight=False)


def _show_table(table: "Table") -> None:
    """Print our values with the published ones in brackets; remarks after the rows they belong to."""
    from rich.table import Table as Rows

    output = screen()
    where = f" ({table.where})" if table.where else ""
    output.print(f"{table.title}{where}: ours (published)", soft_wrap=True, highlight=False)
    rows = Rows("", *table.columns, box=None, pad_edge=False)
    labels: dict[str, list[str]] = {}
    for row in table.rows:
        rows.add_row(shown(row.label), *row.texts())
        if row.remark:
            labels.setdefault(row.remark, []).append(row.label)
    output.print(rows)
    for remark, about in labels.items():
        output.print(f"  {shown(', '.join(about))}: {shown(remark)}", soft_wrap=True, highlight=False)
    output.print()
