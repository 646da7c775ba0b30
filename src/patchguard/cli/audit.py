"""`patchguard audit`: derive the field of a model, show it, and try to refute it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchguard.cli.common import TrustCode, common_patches, screen, sides
from patchguard.cli.progress import show_progress

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.geometry.audit import Audit
    from patchguard.guards.local import LocalGuard

SAMPLED = 30  # patches that are rewritten unless all are asked for


def audit(
    model: Annotated[
        str,
        typer.Option(
            help="A name that `patchguard models` lists, a file, or a network of yours: my_net.py:make_model."
        ),
    ],
    trust_code: TrustCode = False,
    size: Annotated[
        str, typer.Option(help="Size of the source images, 224 or 224x300. Default: the model's usual size.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or a numbered GPU such as cuda:1.")] = "auto",
    tolerance: Annotated[float, typer.Option(help="Largest change outside a field that counts as rounding.")] = 0.0,
    full: Annotated[
        bool,
        typer.Option("--full", metavar="", help=f"Rewrite every patch of the plan, not a sample of about {SAMPLED}."),
    ] = False,
) -> None:
    """Derive which pixels each cell of a model reads, then test it: change a patch; no other cell may change.

    Exit status 0: no cell changed outside its field. 1: one did, or the model has no bounded field.
    """
    import torch
    from rich.console import Console

    from patchguard import runtime
    from patchguard.geometry.audit import audit as audit_field
    from patchguard.guards.local import PIXELS_AT_ONCE
    from patchguard.storage import zoo

    progress, output = Console(stderr=True), screen()
    target_device = runtime.resolve_device(device)
    height, width = sides(size) if size else zoo.usual_size(model)
    with progress.status("building the network"):
        smallest = common_patches(height, width)[0]
        guard = zoo.require_cells(zoo.find(model, trust_code=trust_code, patch=smallest, size=(height, width)), model)
        guard.model.to(target_device)
    with progress.status("deriving the field"):
        output.print(_field_table(guard, height, width))
        output.print(_windows_table(guard, height, width))
    noise = torch.rand(3, height, width, generator=runtime.make_generator(0)).to(target_device)
    with show_progress("rewriting patches", unit="patches", transient=True) as bar:
        result = audit_field(
            guard.local_logits,
            guard.field(height, width),
            image=noise,
            tolerance=tolerance,
            batch=min(max(1, PIXELS_AT_ONCE.get(target_device.type, 2**20) // (height * width)), 16),  # as guards do
            most=None if full else SAMPLED,
            progress=bar.update,
        )
    output.print(_verdict(result), soft_wrap=True, highlight=False)
    if result.passed:
        output.print(_meaning(guard, height, width), soft_wrap=True, highlight=False)
    else:
        raise typer.Exit(1)


def _field_table(guard: "LocalGuard[Any]", height: int, width: int) -> "Table":
    from rich.table import Table

    field = guard.field(height, width)
    strides = ["uneven" if stride is None else str(stride) for stride in field.stride]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("source image", f"{height} x {width} pixels")
    table.add_row("cells", f"{field.grid[0]} x {field.grid[1]}")
    table.add_row("field of a cell", f"{field.size[0]} x {field.size[1]} pixels")
    table.add_row("stride", " x ".join(strides))
    return table


def _windows_table(guard: "LocalGuard[Any]", height: int, width: int) -> "Table":
    from rich.table import Table

    table = Table("patch", "largest window", "of all cells", "windows", box=None, pad_edge=False)
    for patch in common_patches(height, width):
        windows = guard.windows(patch, height, width)
        rows, columns = (max(b - a for a, b in axis) for axis in (windows.rows, windows.columns))
        fraction = rows * columns / (windows.grid[0] * windows.grid[1])
        table.add_row(
            f"{patch.height} x {patch.width}", f"{rows} x {columns} cells", f"{fraction:.0%}", str(len(windows))
        )
    return table


def _verdict(result: "Audit") -> str:
    sampled = "" if result.trials == result.possible else f" of {result.possible} (--full for all)"
    observed = f"{result.trials} patches{sampled} rewritten, {result.moved} cells changed inside their fields"
    if result.passed:
        return f"{observed}\npassed: no cell outside its field changed by more than {result.tolerance:g}"
    if not result.leaks:
        return f"{observed}\nfailed: no cell changed at all, so the audit shows nothing"
    worst = result.leaks[0]
    top, left, tall, wide = worst.box
    return (
        f"{observed}\nfailed: cell {worst.cell} changed by {worst.change:.3g} "
        f"when the {tall} x {wide} pixels at row {top}, column {left}, outside its field, were rewritten"
    )


def _meaning(guard: "LocalGuard[Any]", height: int, width: int) -> str:
    """Say which of the common patches leave cells alone: only against these can cells prove anything."""
    field, patches = guard.field(height, width), common_patches(height, width)
    bounded = [patch for patch in patches if not field.is_covered_by(patch.height, patch.width)]
    if bounded:
        largest = bounded[-1]
        return f"so certificates can be had: a patch of {largest.height} x {largest.width} pixels leaves cells alone"
    smallest = patches[0]
    return (
        f"but no certificates can be had: a patch of {smallest.height} x {smallest.width} pixels can touch every cell. "
        "Use a network whose cells see less, or masks on pixels, which work with any classifier: "
        "docs/defend_your_classifier.md"
    )
