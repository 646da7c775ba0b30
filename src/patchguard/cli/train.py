"""`patchguard train`: run a recipe, see it learn, stop it and go on."""

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

from patchguard.cli.common import screen
from patchguard.errors import InputError

STOPPED = 130  # what a shell expects of a command that Ctrl-C ended


def train(
    recipe: Annotated[str, typer.Option(help="A name that --list shows.")] = "",
    data: Annotated[Path | None, typer.Option(help="Folder of datasets. Default: $PATCHGUARD_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of this run; one with a stopped run goes on.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Another setting of the recipe, KEY=VALUE; VALUE is JSON.")
    ] = None,
    epochs: Annotated[str, typer.Option(help="A number, or auto: as many as fit --minutes.")] = "",
    minutes: Annotated[float | None, typer.Option(help="Stop in time, counted from the start of this call.")] = None,
    plan_minutes: Annotated[
        float | None, typer.Option(help="With --epochs auto: time of the whole run, over several calls.")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Measure the test set, too: once per published model.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    compile_mode: Annotated[
        str, typer.Option("--compile", help="Mode of torch.compile, or off. Default: off on CPUs, default on GPUs.")
    ] = "",
    limit: Annotated[int | None, typer.Option(help="Learn from so many images only: for a quick try.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On GPUs: the same bits every time, more slowly.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Train a recipe; write checkpoints, log.jsonl, curve.png, the Guard and summary.json into a folder.

    The same command again goes on where the last one stopped: by Ctrl-C, by --minutes, or killed. Several processes
    share every batch when torchrun starts them: torchrun --nproc-per-node 2 -m patchguard.training.run OPTIONS.

    Exit status 0: done, or --minutes are over. 1: the input is wrong. 130: stopped by Ctrl-C.
    """
    started = time.monotonic()
    if list_all:
        _list()
        return
    if not recipe or out is None:
        raise InputError("`--recipe` and `--out` must be given. `patchguard train --list` shows the recipes.")
    from patchguard.data.catalog import data_root
    from patchguard.training import recipes, run

    options = run.Options(
        recipe=recipes.named(recipe).changed(assignments(settings or [])),
        data=data_root(data),
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
    summary = _watched(options)
    if summary is not None:
        typer.echo(json.dumps(summary))


def assignments(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE; a value that is not JSON is text.

    >>> assignments(["epochs=3", "optimizer=adamw"])
    {'epochs': 3, 'optimizer': 'adamw'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"`--set` must be KEY=VALUE; got {text!r}.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _list() -> None:
    from rich.table import Table

    from patchguard.training import recipes

    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, line in recipes.summaries().items():
        table.add_row(name, line)
    screen().print(table)


def _watched(options: Any) -> dict[str, Any] | None:
    """Train with a bar on a terminal and a line per epoch elsewhere; only the first of several processes shows them."""
    from patchguard import runtime
    from patchguard.training import run

    first = runtime.rank() == 0
    with ExitStack() as stack:
        watch = stack.enter_context(_watching(first))
        stop = stack.enter_context(_stopping(first))
        try:
            summary = run.train(options, report=watch.report, tick=watch.tick, stopped=stop.wanted)
        except KeyboardInterrupt:
            summary = None
    if summary is None and stop.times:
        if first:
            where = "after this epoch, which is saved" if stop.times == 1 else "after the last checkpoint"
            typer.echo(f"stopped: the same command goes on {where} in {options.out}", err=True)
        raise typer.Exit(STOPPED)
    if summary is None and first:
        typer.echo("time is up before the last epoch: the same command goes on there", err=True)
    return summary


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@final
@dataclass
class _Stop:
    """How often Ctrl-C was pressed: once asks for the end of the epoch, twice ends at once."""

    shown: bool
    times: int = 0

    def __call__(self, *_: object) -> None:
        self.times += 1
        if self.times > 1:
            raise KeyboardInterrupt
        if self.shown:
            typer.echo("finishing this epoch and saving it; Ctrl-C again stops at once", err=True)

    def wanted(self) -> bool:
        """Return whether to stop after this epoch."""
        return self.times > 0


@contextmanager
def _stopping(shown: bool) -> Iterator[_Stop]:
    stop = _Stop(shown)
    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread, which alone gets signals
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# -- progress ----------------------------------------------------------------------------------------------------------


@final
class _Watch:
    """Says on stderr how training goes: with a bar where there is a terminal, by a line per epoch elsewhere."""

    def __init__(self, progress: Any, shown: bool) -> None:
        self.progress, self.shown = progress, shown
        self.task = None if progress is None else progress.add_task("training", total=1.0)

    def tick(self, done: float) -> None:
        """Move the bar."""
        if self.progress is not None:
            self.progress.update(self.task, completed=done)

    def report(self, record: dict[str, Any]) -> None:
        """Tell about an epoch."""
        line = _line(record)
        if self.progress is not None:
            self.progress.update(self.task, description=f"epoch {record['epoch']}/{record['epochs']}")
            self.progress.console.print(line, highlight=False)
        elif self.shown:
            typer.echo(line, err=True)


@contextmanager
def _watching(first: bool) -> Iterator[_Watch]:
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
            with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
                yield _Watch(progress, first)
        else:
            yield _Watch(None, first)
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _line(record: dict[str, Any]) -> str:
    line = (
        f"epoch {record['epoch']:3d}/{record['epochs']}  loss {record['loss']:.4f}  "
        f"train {record['train_accuracy']:.2%}  masks {record['mask_step'] or 'none'}  "
        f"{record['images_per_second']:,.0f} images/s  left {record['left']:.0f} s"
    )
    if "held_out" in record:
        held_out = record["held_out"]
        line += f"  held out: clean {held_out['clean']:.2%} certified {held_out['certified']:.2%}"
    return line
