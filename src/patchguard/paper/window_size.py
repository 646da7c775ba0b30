"""How many cells a patch reaches (fig-window): the paper's equation beside the fields of real networks.

The paper claims (eq-receptive, apx-receptive): a patch of p pixels reaches at most w = ceil((p + r - 1) / s) cells of
field r and stride s along an axis. In its example, r = 3 and s = 4, the largest patch that reaches n fields and not
n + 1 has p = n s - r + 1 pixels.

Ours: the example is right, and the equation gives exactly what `Windows.reached_by` derives from the graph wherever
the patch is counted in the pixels that the network reads. It does not know of resizing: for CIFAR-10 enlarged from 32
to 192 pixels, a 5 x 5 patch reaches 8 x 8 cells of BagNet-17 (bicubic), not the 6 x 6 that follow from p = 30.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.paper.case_figures import BLUE, GREY
from patchguard.paper.context import Context
from patchguard.paper.experiment import Result, Row, Table
from patchguard.patch import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIELD, STRIDE, REACHED = 3, 4, 3  # of the drawing
WHERE = "fig-window"
RED = "#c22f2f"
THIN = 0.02  # fields do not depend on the number of channels


def run(context: Context, dataset: str) -> Result:
    """Check the equation on the paper's example, on many lines of fields, and on the networks of the paper."""
    patch = largest_patch(REACHED, FIELD, STRIDE)
    example = Row(
        label=f"r = {FIELD}, s = {STRIDE}, n = {REACHED}: largest patch",
        ours=(patch,),
        published=(REACHED * STRIDE - FIELD + 1,),
    )
    tried = [(p, r, s) for p in range(1, 25) for r in range(1, 13) for s in range(1, 9)]
    agree = sum(reached(*each) == equation(*each) for each in tried)
    networks = tuple(
        Row(label=case.name, ours=(case.derived(),), published=(case.by_equation(),), note=case.told())
        for case in CASES
    )
    return Result(
        tables=(
            Table(title="The paper's example", where=WHERE, columns=("pixels",), rows=(example,), unit="other"),
            Table(
                title="Window sizes of networks",
                where="eq-receptive",
                columns=("cells per axis",),
                rows=networks,
                unit="other",
            ),
        ),
        figures={"window_size": figure},
        notes=(
            f"On {agree} of {len(tried)} lines of evenly spaced fields (p to 24, r to 12, s to 8 pixels) the equation "
            "is what trying every place of the patch finds.",
            "It is about pixels that the network reads. Where images are enlarged first, a patch in the source image "
            "reaches more cells than the equation says, but for nearest-neighbour interpolation.",
        ),
        settings={"field": FIELD, "stride": STRIDE, "cells": REACHED},
    )


def equation(patch: int, field: int, stride: int) -> int:
    """Return the window size that the paper's eq-receptive gives; this package derives it from the graph instead."""
    return -(-(patch + field - 1) // stride)


def reached(patch: int, field: int, stride: int) -> int:
    """Return the most cells that a patch touches on a long line of evenly spaced fields, by trying every place."""
    return _largest(Windows.reached_by(Patch(1, patch), _line(field, stride, cells=patch // stride + field + 3)))


def largest_patch(cells: int, field: int, stride: int) -> int:
    """Return the largest patch that reaches `cells` fields and never one more, by trying sizes."""
    patch = 1
    while reached(patch + 1, field, stride) <= cells:
        patch += 1
    return patch


def _line(field: int, stride: int, cells: int) -> Field:
    starts = tuple(stride * cell for cell in range(cells))
    return Field(Axis.identity(1), Axis(starts, (field,) * cells, starts[-1] + max(field, stride)))


def _largest(windows: Windows) -> int:
    return max(stop - start for start, stop in windows.columns)


# -- networks ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A network behind a resizing from `side` to `enlarged` pixels, and a patch in pixels of the source image."""

    name: str
    model: str
    side: int
    patch: int
    enlarged: int | None = None
    mode: str = "bicubic"

    def derived(self) -> int:
        """Return the side, in cells, of the largest window that the patch reaches."""
        return _largest(self.guard().windows(Patch(self.patch), self.side, self.side))

    def by_equation(self) -> int:
        """Return the window size by the paper's equation, with the patch enlarged as the image is."""
        guard, side = self.guard().without_preprocess(), self.enlarged or self.side
        columns = guard.field(side, side).columns
        stride = columns.stride
        assert stride is not None  # every network of these cases is regular
        return equation(self.patch * side // self.side, columns.field_size, stride)

    def told(self) -> str:
        """Return the patch and the image in words."""
        enlarged = "" if self.enlarged is None else f", enlarged to {self.enlarged} px"
        return f"{self.patch} px patch in {self.side} px{enlarged}"

    def guard(self) -> LocalGuard[Any]:
        """Return the network with few channels and any weights: its field is that of the trained one."""
        steps: tuple[Any, ...] = ()
        if self.enlarged is not None:
            steps = (Resize(height=self.enlarged, width=self.enlarged, mode=self.mode),)  # type: ignore[arg-type]
        return LocalGuard(Preprocess(steps), _thin(self.model), Evidence(low=None), Undefended())


@lru_cache(maxsize=8)
def _thin(name: str) -> LocalModel:
    """Return one network for all cases: it keeps the fields that it once derived."""
    return build(name, classes=2, width=THIN)


_LARGE: dict[str, Any] = {"name": "CIFAR-10 at 192 px", "model": "bagnet17", "side": 32, "patch": 5, "enlarged": 192}
CASES = (
    Case(name="BagNet-17, 1 %", model="bagnet17", side=224, patch=23),
    Case(name="BagNet-17, 2 %", model="bagnet17", side=224, patch=32),
    Case(name="BagNet-17, 3 %", model="bagnet17", side=224, patch=39),
    Case(name="BagNet-9, 2 %", model="bagnet9", side=224, patch=32),
    Case(name="BagNet-33, 2 %", model="bagnet33", side=224, patch=32),
    Case(name="DS-25-ResNet-50, 2 %", model="ds_resnet50", side=299, patch=42),
    Case(name="DS-4-ResNet-18, CIFAR-10", model="ds_resnet18", side=32, patch=5),
    *(Case(**{**_LARGE, "name": f"BagNet-17, CIFAR-10 at 192 px, {mode}", "mode": mode}) for mode in
      ("nearest", "bilinear", "bicubic")),
)  # fmt: skip


# -- the figure --------------------------------------------------------------------------------------------------------


def figure(field: int = FIELD, stride: int = STRIDE, cells: int = REACHED) -> "Figure":
    """Return the paper's drawing: fields on a line of pixels, and the largest patch that reaches only `cells`."""
    from matplotlib.figure import Figure

    patch = largest_patch(cells, field, stride)
    made = Figure(figsize=(10, 2.5), layout="constrained")
    axes = made.subplots()
    _pixels(axes, field, stride, fields=cells + 1)
    start = field - 1  # the last pixel of field 0
    axes.plot(
        [start, start + patch, start + patch, start, start],
        [-0.25, -0.25, 1.25, 1.25, -0.25],
        color=RED,
        linestyle="--",
        linewidth=2,
    )
    axes.text(start + patch / 2, 1.4, f"patch of {patch} pixels", color=RED, ha="center", va="bottom")
    for cell in range(cells + 1):
        middle = stride * cell + field / 2
        axes.annotate(
            "",
            xy=(stride * cell, -0.5),
            xytext=(stride * cell + field, -0.5),
            arrowprops={"arrowstyle": "|-|,widthA=0.2,widthB=0.2", "color": "black", "linewidth": 0.8},
        )
        state = "reached" if cell < cells else "not reached"
        axes.text(middle, -0.75, f"field {cell}\n{state}", ha="center", va="top", fontsize=9)
    axes.set_title(
        f"Fields of {field} pixels every {stride}: {patch} pixels reach {cells} of them, "
        f"{patch + 1} pixels reach {reached(patch + 1, field, stride)}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlim(-0.3, stride * cells + field + 5.2)
    axes.set_ylim(-1.8, 2.0)
    axes.set_aspect("equal")
    axes.axis("off")
    return made


def _pixels(axes: "Axes", field: int, stride: int, fields: int) -> None:
    from matplotlib.patches import Rectangle

    kinds = {"centre of a field": (BLUE, 1.0), "other pixels of a field": (BLUE, 0.4), "read by no cell": (GREY, 0.25)}
    for pixel in range(stride * (fields - 1) + field):
        place = pixel % stride
        kind = "read by no cell" if place >= field else "other pixels of a field"
        if place == (field - 1) / 2:
            kind = "centre of a field"
        colour, alpha = kinds[kind]
        axes.add_patch(Rectangle((pixel + 0.05, 0), 0.9, 1, facecolor=colour, alpha=alpha, edgecolor="none"))
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, alpha=alpha) for colour, alpha in kinds.values()]
    axes.legend(handles, list(kinds), loc="center right", frameon=False, fontsize=9)
