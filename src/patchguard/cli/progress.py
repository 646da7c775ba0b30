"""How far a command is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import typer

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, TaskID

SECONDS_BETWEEN_LINES = 30.0


@final
class Progress:
    """Shows how much is done of a total, which may be unknown; `unit` is what is counted.

    Units other than bytes and "" (a fraction of the whole) also show their rate.
    """

    def __init__(self, doing: str, total: int | float | None, unit: str, bars: "Bars | None", shown: bool) -> None:
        self.doing, self.total, self.unit, self.bars, self.shown = doing, total, unit, bars, shown
        self.task: TaskID | None = None if bars is None else bars.add_task(doing, total=total, rate="", note="")
        self.began: tuple[float, int | float] | None = None  # time and amount at the first update
        self.last_line = time.monotonic()

    def update(self, done: int | float, total: int | float | None = None, note: str = "", doing: str = "") -> None:
        """Show that so much is done; `note` says in words what came of it so far."""
        self.total = self.total if total is None else total
        self.doing = doing or self.doing
        now = time.monotonic()
        if self.bars is not None and self.task is not None:
            self.began = self.began or (now, done)
            seconds, new = now - self.began[0], done - self.began[1]
            rate = f"{new / seconds:.1f}/s" if new and seconds and self.unit not in ("", "bytes") else ""
            self.bars.update(self.task, completed=done, total=self.total, description=self.doing, rate=rate, note=note)
        elif self.shown and self.unit and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            of = "" if self.total is None else f" of {self.total:,.0f}"
            typer.echo(f"{done:,.0f}{of} {self.unit}" + (f", {note}" if note else ""), err=True)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self.bars is not None:
            self.bars.console.print(line, highlight=False)
        elif self.shown:
            typer.echo(line, err=True)


@contextmanager
def show_progress(
    doing: str, total: int | float | None = None, *, unit: str = "", shown: bool = True, transient: bool = False
) -> Iterator[Progress]:
    """Yield what shows the progress of a command; only the first of several processes shows any.

    `transient` removes the bar at the end.
    """
    if not shown or not sys.stderr.isatty():
        yield Progress(doing, total, unit, None, shown)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(*_columns(unit), console=Console(stderr=True), transient=transient) as bars:
        yield Progress(doing, total, unit, bars, shown)


def _columns(unit: str) -> "list[ProgressColumn]":
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: dict[str, list[ProgressColumn]] = {
        "": [TaskProgressColumn()],
        "bytes": [DownloadColumn(), TransferSpeedColumn()],
    }
    counted = amount.get(unit, [MofNCompleteColumn(), TextColumn("{task.fields[rate]}")])
    doing, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    return [doing, BarColumn(), *counted, TimeRemainingColumn(), note]


@contextmanager
def show_download(name: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield what shows the bytes of a download as they come: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(*_columns("bytes"), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"downloading {name}", total=None, note="")
        yield lambda done, total: bars.update(bar, completed=done, total=total)
