"""The command line: the same verbs, words and defaults as in Python.

Results go to stdout, progress to stderr. torch is imported by the commands that need it, not by `--help`.
"""

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from patchguard import __version__
from patchguard.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from patchguard.audit import Audit
    from patchguard.guard import Guard
    from patchguard.patch import Patch


class Commands(TyperGroup):
    """The commands; an `InputError` in any of them becomes one line on stderr and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.echo(f"patchguard: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="patchguard",
    cls=Commands,
    help="Certified robustness of image classifiers against adversarial patches.",
    epilog="Example: patchguard audit --model bagnet17",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"patchguard {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Certified robustness of image classifiers against adversarial patches."""


@app.command(epilog="Example: patchguard models")
def models() -> None:
    """List every name that --model takes: trained checkpoints, presets, bare networks."""
    from rich.table import Table

    from patchguard import zoo

    table = Table("name", "kind", "description", box=None, pad_edge=False)
    for entry in zoo.available():
        table.add_row(entry.name, entry.kind, entry.description)
    _screen().print(table)


@app.command(epilog="Example: patchguard audit --model bagnet17 --size 224x300")
def audit(
    model: Annotated[str, typer.Option(help="A name that `patchguard models` lists, or a checkpoint file.")],
    size: Annotated[str, typer.Option(help="Source images, 224 or 224x300. Default: what the name is made for.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1 and the like.")] = "auto",
    tolerance: Annotated[float, typer.Option(help="Largest change outside a field that still counts as none.")] = 0.0,
) -> None:
    """Derive which pixels each cell of a model reads, then test it: change a patch, and no other cell may move.

    Exit status 0: the field holds. 1: it does not, or the model is refused because some layer mixes positions.
    """
    import torch
    from rich.console import Console

    from patchguard import runtime, zoo
    from patchguard.audit import audit as audit_field

    progress, screen = Console(stderr=True), _screen()
    place = runtime.choose_device(device)
    height, width = _sides(size) if size else zoo.usual_size(model)
    with progress.status("building the network"):
        guard = zoo.find(model)
        guard.model.to(place)
    with progress.status("deriving the field"):
        screen.print(_field_table(guard, height, width))
        screen.print(_windows_table(guard, height, width))
    with progress.status("changing patches"):
        noise = torch.rand(3, height, width, generator=runtime.generator(0)).to(place)
        result = audit_field(guard.local_logits, guard.field(height, width), image=noise, tolerance=tolerance)
    screen.print(_verdict(result), soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)


def _screen() -> "Console":
    """Return stdout; into a pipe or file, rows are not folded to the width of a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def _sides(size: str) -> tuple[int, int]:
    """Read 224 as (224, 224) and 224x300 as (224, 300)."""
    found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", size)
    if found is None:
        raise InputError(f"`--size` must be a side such as 224, or height x width such as 224x300; got {size!r}.")
    return int(found[1]), int(found[2] or found[1])


def _common_patches(height: int, width: int) -> list["Patch"]:
    """Return 1, 2 and 3 % of a large image, or squares of 2, 5 and 8 pixels in a small one."""
    from patchguard.patch import Patch

    if min(height, width) >= 100:
        return [Patch.of_area(share, height=height, width=width) for share in (0.01, 0.02, 0.03)]
    return [Patch(side) for side in (2, 5, 8) if side <= min(height, width)]


def _field_table(guard: "Guard[Any]", height: int, width: int) -> "Table":
    from rich.table import Table

    field = guard.field(height, width)
    strides = ["uneven" if stride is None else str(stride) for stride in field.stride]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("source image", f"{height} x {width} pixels")
    table.add_row("cells", f"{field.grid[0]} x {field.grid[1]}")
    table.add_row("field of a cell", f"{field.size[0]} x {field.size[1]} pixels")
    table.add_row("stride", " x ".join(strides))
    return table


def _windows_table(guard: "Guard[Any]", height: int, width: int) -> "Table":
    from rich.table import Table

    table = Table("patch", "largest window", "of all cells", "windows", box=None, pad_edge=False)
    for patch in _common_patches(height, width):
        windows = guard.windows(patch, height, width)
        rows, columns = (max(b - a for a, b in axis) for axis in (windows.rows, windows.columns))
        share = rows * columns / (windows.grid[0] * windows.grid[1])
        table.add_row(f"{patch.height} x {patch.width}", f"{rows} x {columns} cells", f"{share:.0%}", str(len(windows)))
    return table


def _verdict(result: "Audit") -> str:
    seen = f"{result.trials} patches changed, {result.moved} cells moved inside their fields"
    if result.passed:
        return f"{seen}\npassed: no cell moved outside its field by more than {result.tolerance:g}"
    if not result.leaks:
        return f"{seen}\nfailed: an audit that moves nothing shows nothing"
    worst = result.leaks[0]
    top, left, tall, wide = worst.box
    return (
        f"{seen}\nfailed: cell {worst.cell} moved by {worst.change:.3g} "
        f"when the {tall} x {wide} pixels at row {top}, column {left}, outside its field, changed"
    )


def main() -> None:
    """Run the command line."""
    app()
