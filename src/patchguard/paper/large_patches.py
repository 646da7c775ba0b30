"""fig-large-patch: Mask-BN-17 against ever larger patches, with the picture."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Result, Row, Table, percent
from patchguard.paper.maps import Maps
from patchguard.paper.rows import TRUE_WINDOWS, Cell, Found, WindowsOf, both, measure
from patchguard.paper.tally import double_masking, masking
from patchguard.patch import Patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = {"imagenette": (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192), "cifar10": tuple(range(2, 27, 3))}
COLUMNS = ("clean", "robust", "clean, double masking", "robust, double masking")


def run(context: Context, dataset: str) -> Result:
    """Measure squares of every side; masks are fitted to each. Double masking of the same maps stands beside."""
    context.images(dataset)
    known = published.LARGE_PATCH.get(dataset, {})
    labels = [f"{side}x{side}" for side in SIDES[dataset]]
    theirs = {label: (*known.get(label, (None, None)), None, None) for label in labels}

    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        windows = {side: windows_of(Patch(side)) for side in SIDES[dataset]}
        return {f"{side}x{side}": (*both(masking(each)), *both(double_masking(each))) for side, each in windows.items()}

    tables, figures, notes = [], {}, Found()
    for network in models.maskers(dataset):
        found = measure(context, dataset, network, theirs, len(COLUMNS), build)
        title = f"Large patches, {network.label} on {TITLES[dataset]}"
        where = "fig-large-patch" if dataset == "imagenette" else ""
        tables.append(Table(title=title, where=where, columns=COLUMNS, rows=tuple(found.rows)))
        if any(row.measured for row in found.rows):
            plain = [row for row in found.rows if not row.label.endswith(TRUE_WINDOWS)]
            figures[f"large_patches-{network.label.lower()}"] = partial(figure, plain, title)
        notes.add(Found(notes=found.notes))
    return Result(
        tables=tuple(tables), figures=figures, notes=tuple(notes.notes), settings={"sides": list(SIDES[dataset])}
    )


def figure(rows: Sequence[Row], title: str) -> "Figure":
    """Draw accuracy over the side of the patch; the paper's points, where the text gives them, as crosses."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = made.add_subplot()
    sides = [int(row.label.split("x")[0]) for row in rows]
    styles = (("tab:blue", "-"), ("tab:red", "-"), ("tab:blue", ":"), ("tab:red", ":"))
    for place, (name, (colour, line)) in enumerate(zip(COLUMNS, styles, strict=True)):
        heights = [percent(row.ours[place]) or 0.0 for row in rows]
        axes.plot(sides, heights, line, color=colour, marker="o", ms=3, label=name)
    for place, colour in ((0, "tab:blue"), (1, "tab:red")):
        points = [
            (side, row.published[place])
            for side, row in zip(sides, rows, strict=True)
            if row.published and row.published[place] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "x", color=colour, ms=8, label=f"{COLUMNS[place]}, published")
    axes.set(xlabel="side of the patch in pixels", ylabel="%", ylim=(0, 100), title=title)
    axes.grid(alpha=0.3)
    made.legend(loc="outside lower center", ncols=3, fontsize=8)
    return made
