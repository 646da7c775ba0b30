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
    from patchguard.paper.experiment import Table
    from patchguard.paper.outcome import Outcome

SECONDS_BETWEEN_LINES = 10.0


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment that --list shows, or all.")] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Only this data set; may be repeated. Default: all that the experiment can use."),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(help="Folder of datasets. Default: $PATCHGUARD_DATA, or ~/.cache/patchguard/data."),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder for maps and trained models, used again.")] = Path(
        "runs/reproduce-cache"
    ),
    out: Annotated[Path, typer.Option(help="Folder for results: <out>/<name>-<data>/result.json and pictures.")] = Path(
        "runs/reproduce"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    limit: Annotated[int | None, typer.Option(help="So many test images only, spread over all.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images at once. Default: 64 on a CPU, 512 on a GPU.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Train the models that are not here: hours on a GPU.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the experiments and the data each needs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run experiments of the paper and print the published numbers beside ours.

    Local evidence is computed once per model and data set and kept in --cache. A row whose model is not here is not run
    and says the command that would make it; --train does. Data sets that are not in --data-root are skipped.
    """
    if list_all:
        _list(as_json)
        return
    if not name:
        raise InputError("`name` must be an experiment or all. `patchguard reproduce --list` shows them.")
    if limit is not None and limit < 1:
        raise InputError(f"`--limit` must be a whole number, 1 or more; got {limit}.")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"`--batch-size` must be a whole number, 1 or more; got {batch_size}.")
    from patchguard import runtime
    from patchguard.paper.outcome import chosen, run_all, to_json

    work = chosen(name, data or ())
    from patchguard.paper.context import Context

    context = Context(
        data_root=data_root,
        cache=cache,
        device=runtime.resolve_device(device),
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        train=train,
        progress=_progress(),
    )
    found = run_all(context, work, out, report=(lambda outcome: None) if as_json else _show)
    if as_json:
        typer.echo(json.dumps([to_json(outcome, context) for outcome in found], indent=1))
    if all(outcome.result is None for outcome in found):
        raise InputError(f"nothing was run: {found[0].skipped}")
    failed = [outcome for outcome in found if outcome.failed]
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        raise InputError(f"not everything was run ({names}): {failed[0].skipped}")


def _list(as_json: bool) -> None:
    from patchguard.paper import EXPERIMENTS

    if as_json:
        entries = [
            {"name": each.name, "title": each.title, "where": each.where, "data": each.sets}
            for each in EXPERIMENTS.values()
        ]
        typer.echo(json.dumps(entries, indent=1))
        return
    from rich.table import Table as Rows

    table = Rows("name", "what", "in the paper", "data", box=None, pad_edge=False)
    for each in EXPERIMENTS.values():
        table.add_row(each.name, each.title, ", ".join(each.where), ", ".join(each.sets) or "none")
    screen().print(table)


def _progress() -> "Progress":
    """Return what says, on stderr and not too often, how much is computed."""
    last = [0.0]

    def tell(what: str, done: int, of: int) -> None:
        if done == of or time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            sys.stderr.write(f"{what}: {done:,}{f' of {of:,}' if of else ''}\n")
            sys.stderr.flush()

    return tell


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
    """Print ours, and below it in brackets what the paper says; remarks after the rows they belong to."""
    from rich.table import Table as Rows

    from patchguard.paper.experiment import written

    output = screen()
    where = f" ({table.where})" if table.where else ""
    output.print(f"{table.title}{where}: ours (published)", soft_wrap=True, highlight=False)
    rows = Rows("", *table.columns, box=None, pad_edge=False)
    notes: dict[str, list[str]] = {}
    for row in table.rows:
        theirs = row.published or (None,) * len(table.columns)
        cells = [
            written(mine) + ("" if paper is None else f" ({written(paper)})")
            for mine, paper in zip(row.ours, theirs, strict=True)
        ]
        rows.add_row(shown(row.label), *cells)
        if row.said:
            notes.setdefault(row.said, []).append(row.label)
    output.print(rows)
    for note, labels in notes.items():
        output.print(f"  {shown(', '.join(labels))}: {shown(note)}", soft_wrap=True, highlight=False)
    output.print()
