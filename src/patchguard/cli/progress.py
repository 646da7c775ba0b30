"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from patchguard.runs.loop import Counted

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def show_download(name: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield what shows the bytes of a download as they come: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = [TextColumn(f"downloading {name}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


@contextmanager
def shown_progress(
    total: int, *, first: bool, doing: str, shares: Callable[["Counted"], str]
) -> Iterator[Callable[["Counted"], None] | None]:
    """Yield what shows the counts of a run as they grow; `shares` says in words what was found so far.

    Only the first process shows anything.
    """
    if not first:
        yield None
    elif not sys.stderr.isatty():
        yield _lines(total, shares)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = [TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
        bars = Bars(*columns, TimeRemainingColumn(), TextColumn("{task.fields[shares]}"), console=Console(stderr=True))
        with bars:
            bar = bars.add_task("", total=total, rate="", shares="")
            began: list[tuple[float, int]] = []

            def update(tally: Any) -> None:
                began.append((time.monotonic(), tally.images)) if not began else None
                seconds, images = time.monotonic() - began[0][0], tally.images - began[0][1]
                rate = f"{images / seconds:.1f}/s" if images and seconds else ""
                bars.update(bar, completed=tally.images, rate=rate, shares=shares(tally))

            yield update


def _lines(total: int, shares: Callable[["Counted"], str]) -> Callable[["Counted"], None]:
    last = [time.monotonic()]

    def update(tally: "Counted") -> None:
        if time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            typer.echo(f"{tally.images:,} of {total:,} images, {shares(tally)}", err=True)

    return update
