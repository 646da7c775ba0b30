"""`patchguard train`: run a recipe, watch it learn, stop it and resume."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

import typer

from patchguard.cli.common import Root, screen
from patchguard.errors import InputError

INTERRUPTED = 130  # what a shell expects after Ctrl-C


def train(
    recipe: Annotated[str, typer.Option(help="A name that --list shows.")] = "",
    data: Annotated[
        str,
        typer.Option(help="A known dataset, or a folder of class folders. Default: the recipe's.", show_default=False),
    ] = "",
    root: Root = None,
    out: Annotated[Path | None, typer.Option(help="Folder of this run; a stopped run in it is resumed.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe: GROUP.KEY=VALUE or KEY=VALUE; VALUE is JSON."),
    ] = None,
    epochs: Annotated[str, typer.Option(help="A number, or auto: as many as fit --minutes.")] = "",
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes, with a checkpoint.")] = None,
    plan_minutes: Annotated[
        float | None, typer.Option(help="With --epochs auto: minutes of the whole run, over several calls.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Measure the test set as well: once per published model.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    compile_mode: Annotated[
        str, typer.Option("--compile", help="Mode of torch.compile, or off. Default: off on CPUs, default on GPUs.")
    ] = "",
    limit: Annotated[int | None, typer.Option(help="Number of images to learn from: for a quick try.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On GPUs: the same bits every time, more slowly.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Train a recipe; write checkpoints, log.jsonl, curve.png, the guard and summary.json into a folder.

    The same command again resumes where the last one stopped: by Ctrl-C, by --minutes, or killed. Several processes
    share every batch when torchrun starts them: torchrun --nproc-per-node 2 -m patchguard train OPTIONS.

    Exit status 0: done, or --minutes are over. 1: the input is wrong. 130: stopped by Ctrl-C.
    """
    started = time.monotonic()
    if list_all:
        _list_recipes()
        return
    if not recipe or out is None:
        raise InputError("`--recipe` and `--out` must be given. `patchguard train --list` shows the recipes.")
    from patchguard.training import recipes, run

    dataset, folder = _find_dataset(data, root)
    options = run.Options(
        recipe=recipes.get_recipe(recipe).override({**dataset, **read_assignments(settings or [])}),
        root=folder,
        out=out,
        epochs=epochs or None,
        minutes=minutes,
        plan_minutes=plan_minutes,
        test=test,
        device=device,
        compile_mode=compile_mode or None,
        limit=limit,
        deterministic=deterministic,
        started=started,
    )
    summary = _train_with_progress(options)
    if summary is not None:
        typer.echo(json.dumps(summary))


def _find_dataset(data: str, root: Path | None) -> tuple[dict[str, str], Path]:
    """Return the setting that names the dataset, if it is not the recipe's own, and the folder where it lies."""
    from patchguard.data.catalog import CATALOG, data_root
    from patchguard.errors import nearest

    if not data or (data in CATALOG and CATALOG[data].train):
        return ({"data.dataset": data} if data else {}), data_root(root)
    if not Path(data).expanduser().is_dir():
        known = [name for name, dataset in CATALOG.items() if dataset.train]
        raise InputError(f"`--data` must be a folder or a dataset to train on; got {data!r}. {nearest(data, known)}")
    return {"data.dataset": "folder"}, Path(data).expanduser()


def read_assignments(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE; a value that is not JSON is text.

    >>> read_assignments(["schedule.epochs=3", "optimizer.name=adamw"])
    {'schedule.epochs': 3, 'optimizer.name': 'adamw'}
    """
    assignments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"`--set` must be KEY=VALUE; got {text!r}.")
        try:
            assignments[key] = json.loads(value)
        except ValueError:
            assignments[key] = value
    return assignments


def _list_recipes() -> None:
    from rich.table import Table

    from patchguard.training import recipes

    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, entry in recipes.RECIPES.items():
        table.add_row(name, entry.summary)
    screen().print(table)


def _train_with_progress(options: Any) -> dict[str, Any] | None:
    """Train with a bar on a terminal and a line per epoch elsewhere; only the first of several processes shows them."""
    from patchguard import runtime
    from patchguard.training import run

    first = runtime.rank() == 0
    with ExitStack() as stack:
        progress = stack.enter_context(_show_progress(first))
        interrupt = stack.enter_context(_handle_interrupts(first))
        try:
            summary = run.train(
                options, on_epoch=progress.on_epoch, on_step=progress.on_step, should_stop=interrupt.requested
            )
        except KeyboardInterrupt:
            summary = None
    if summary is None and interrupt.count:
        if first:
            where = "this epoch, which is saved" if interrupt.count == 1 else "the last checkpoint"
            typer.echo(f"stopped: the same command resumes after {where} in {options.out}", err=True)
        raise typer.Exit(INTERRUPTED)
    if summary is None and first:
        typer.echo("time is up before the last epoch: the same command resumes there", err=True)
    return summary


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@final
@dataclass
class _Interrupt:
    """How often Ctrl-C was pressed: once stops after the epoch, twice at once."""

    verbose: bool
    count: int = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        if self.verbose:
            typer.echo("finishing this epoch and saving it; Ctrl-C again stops at once", err=True)

    def requested(self) -> bool:
        """Return whether to stop after this epoch."""
        return self.count > 0


@contextmanager
def _handle_interrupts(verbose: bool) -> Iterator[_Interrupt]:
    interrupt = _Interrupt(verbose)
    try:
        before = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # only the main thread gets signals
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


# -- progress ----------------------------------------------------------------------------------------------------------


@final
class _Progress:
    """Shows on stderr how training goes: a bar on a terminal, a line per epoch elsewhere."""

    def __init__(self, bar: Any, verbose: bool) -> None:
        self.bar, self.verbose = bar, verbose
        self.task = None if bar is None else bar.add_task("training", total=1.0)

    def on_step(self, done: float) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Print the line of an epoch."""
        line = _format_record(record)
        if self.bar is not None:
            self.bar.update(self.task, description=f"epoch {record['epoch']}/{record['epochs']}")
            self.bar.console.print(line, highlight=False)
        elif self.verbose:
            typer.echo(line, err=True)


@contextmanager
def _show_progress(first: bool) -> Iterator[_Progress]:
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(console=console, show_level=False, show_path=False)
    logger = logging.getLogger("patchguard")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if first else logging.WARNING)
    try:
        if first and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
                yield _Progress(bar, first)
        else:
            yield _Progress(None, first)
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _format_record(record: dict[str, Any]) -> str:
    line = (
        f"epoch {record['epoch']:3d}/{record['epochs']}  loss {record['loss']:.4f}  "
        f"train {record['train_accuracy']:.2%}  masks {record['mask_step'] or 'none'}  "
        f"{record['images_per_second']:,.0f} images/s  left {record['seconds_left']:.0f} s"
    )
    if "held_out" in record:
        held_out = record["held_out"]
        line += f"  held out: clean {held_out['clean']:.2%} certified {held_out['certified']:.2%}"
    return line
