"""`patchguard audit`: derive a model's field, show it, and try to catch a cell that reads outside it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchguard.cli.common import common_patches, screen, sides

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.geometry.audit import Audit
    from patchguard.guards.local import LocalGuard


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

    from patchguard import runtime
    from patchguard.geometry.audit import audit as audit_field
    from patchguard.storage import zoo

    progress, output = Console(stderr=True), screen()
    place = runtime.resolve_device(device)
    height, width = sides(size) if size else zoo.usual_size(model)
    with progress.status("building the network"):
        guard = zoo.find(model)
        guard.model.to(place)
    with progress.status("deriving the field"):
        output.print(_field_table(guard, height, width))
        output.print(_windows_table(guard, height, width))
    with progress.status("changing patches"):
        noise = torch.rand(3, height, width, generator=runtime.make_generator(0)).to(place)
        result = audit_field(guard.local_logits, guard.field(height, width), image=noise, tolerance=tolerance)
    output.print(_verdict(result), soft_wrap=True)
    if not result.passed:
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
