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

from patchguard.cli import own_photos
from patchguard.cli.common import Root, screen
from patchguard.cli.progress import Progress, show_progress
from patchguard.errors import InputError

INTERRUPTED = 130  # what a shell expects after Ctrl-C


def train(
    recipe: Annotated[
        str, typer.Option(help="A name that --list shows. Default: one for --data.", show_default=False)
    ] = "",
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
        bool, typer.Option("--test", metavar="", help="Measure the test set as well: once per published model.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    compile_mode: Annotated[
        str, typer.Option("--compile", help="Mode of torch.compile, or off. Default: off on CPUs, default on GPUs.")
    ] = "",
    limit: Annotated[int | None, typer.Option(help="Number of images to learn from: for a quick try.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", metavar="", help="On GPUs: the same bits every time, more slowly.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", metavar="", help="List the recipes and exit.")] = False,
) -> None:
    """Train a recipe; write checkpoints, log.jsonl, curve.png, the guard and summary.json into a folder.

    With --data FOLDER and no recipe, one is chosen by the number and size of the photos; a card and a certified report
    of photos that training never saw follow.

    The same command again resumes where the last one stopped: by Ctrl-C, by --minutes, or killed. Several processes
    share every batch when torchrun starts them: torchrun --nproc-per-node 2 -m patchguard train OPTIONS.

    Exit status 0: done, or --minutes are over. 1: the input is wrong. 130: stopped by Ctrl-C.
    """
    started = time.monotonic()
    if list_all:
        _list_recipes()
        return
    if out is None or not (recipe or data):
        raise InputError(
            "`--out` must be given, and `--data` or `--recipe`: `patchguard train --data photos --out runs/mine` "
            "chooses a recipe, and `patchguard train --list` shows all."
        )
    from patchguard.training import recipes, run

    dataset, folder = _find_dataset(data, root)
    own = not recipe
    if own and dataset["data.dataset"] != "folder":
        raise InputError(f"`--recipe` must be given for {data}. `patchguard train --list` shows the recipes.")
    options = run.Options(
        recipe=(own_photos.choose(folder) if own else recipes.get_recipe(recipe)).override(
            {**dataset, **read_assignments(settings or [])}
        ),
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
        estimate=own,
    )
    summary = _train_with_progress(options)
    if summary is None:
        return
    if own:
        own_photos.finish(folder, out, device, summary, time.monotonic() - started)
    else:
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
        progress = stack.enter_context(_show_training(first))
        interrupt = stack.enter_context(_handle_interrupts(first))
        try:
            summary = run.train(
                options,
                on_epoch=progress.on_epoch,
                on_step=progress.on_step,
                on_features=progress.on_features,
                should_stop=interrupt.requested,
            )
        except KeyboardInterrupt:
            summary = None
    if summary is None and interrupt.count:
        if first:
            where = "this step, which is saved" if interrupt.count == 1 else "the last checkpoint"
            typer.echo(f"stopped: the same command resumes after {where} in {options.out}", err=True)
        raise typer.Exit(INTERRUPTED)
    if summary is None and first:
        typer.echo("time is up before the last epoch: the same command resumes at the next step", err=True)
    return summary


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@final
@dataclass
class _Interrupt:
    """How often Ctrl-C was pressed: once stops after the step, twice at once."""

    verbose: bool
    count: int = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        if self.verbose:
            typer.echo("finishing this step and saving it; Ctrl-C again stops at once", err=True)

    def requested(self) -> bool:
        """Return whether to stop after this step."""
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
class _Reporter(logging.Handler):
    """Shows steps, epochs and log messages by the one progress of all commands."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress, self.note, self.ends = progress, "", 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message above the bar."""
        self.progress.print(record.getMessage())

    def on_features(self, done: int, total: int) -> None:
        """Move the bar while features are computed."""
        self.progress.update(done / total, doing=f"features of photo {done:,} of {total:,}")

    def on_step(self, done: float) -> None:
        """Move the bar."""
        self.progress.update(done, doing="training", note=self.note)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Print the line of an epoch."""
        if "held_out" in record:
            held_out = record["held_out"]
            self.note = f"held out: clean {held_out['clean']:.1%} certified {held_out['certified']:.1%}"
        self.progress.print(_format_record(record))


@contextmanager
def _show_training(first: bool) -> Iterator[_Reporter]:
    logger = logging.getLogger("patchguard")
    before = logger.level
    with show_progress("training", 1.0, shown=first) as progress:
        reporter = _Reporter(progress)
        logger.addHandler(reporter)
        logger.setLevel(logging.INFO if first else logging.WARNING)
        try:
            yield reporter
        finally:
            logger.setLevel(before)
            logger.removeHandler(reporter)


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
