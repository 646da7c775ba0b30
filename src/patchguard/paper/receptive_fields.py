"""Receptive fields (apx-receptive): where a feature looks (fig-center), and how many a patch reaches (fig-window).

fig-center. The paper claims: through two convolutions of kernel 3, the center of the 5 input cells is looked at 3 times
and the outermost once; with more layers the difference grows exponentially. So a feature focuses on the center of its
field, and a patch far from it has little influence. Ours: the counts of both examples are these; the ratio of center to
border, 3, 7, 19, 51, ..., grows by a factor that tends to 3 per layer. On the path of ResNet-50 through all of its
kernels, 81 of 483 pixels (field of the paper's ResNet-50; 427 for the usual one, where the stride lies elsewhere) get
half of the looks. BagNet-17 has four kernels of 3 and little focus: 7 to 1, and 7 of 17 pixels get half. No certificate
relies on the focus: a cell that reads one pixel of a patch counts as owned by it.

fig-window. The paper claims (eq-receptive): a patch of p pixels reaches at most w = ceil((p + r - 1) / s) cells of
field r and stride s along an axis. In its example, r = 3 and s = 4, the largest patch that reaches n fields and not
n + 1 has p = n s - r + 1 pixels. Ours: the example holds, and the equation gives exactly what `Windows.reached_by`
derives from the graph wherever the patch is counted in the pixels that the network reads. It does not know of resizing:
for CIFAR-10 enlarged from 32 to 192 pixels, a 5 x 5 patch reaches 8 x 8 cells of BagNet-17 (bicubic), not the 6 x 6
that follow from p = 30.
"""

from collections.abc import Sequence
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
from patchguard.paper.context import Context
from patchguard.paper.experiment import Result, Row, Table
from patchguard.paper.figures import BLUE, GRAY, ORANGE, RED
from patchguard.patch import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# -- fig-center --------------------------------------------------------------------------------------------------------

# Kernels along one axis with their strides, from the image on; convolutions of 1x1 look nowhere else.
Layers = Sequence[tuple[int, int]]
EXAMPLES: tuple[Layers, Layers] = (((3, 1),) * 2, ((3, 1),) * 3)
# The ResNet-50 whose field the paper gives as 483: the stride lies on the last unit of a stage.
RESNET50_LATE: Layers = (
    *((7, 2), (3, 2)),
    *((3, 1), (3, 1), (3, 2)),
    *((3, 1), (3, 1), (3, 1), (3, 2)),
    *((3, 1), (3, 1), (3, 1), (3, 1), (3, 1), (3, 2)),
    *((3, 1), (3, 1), (3, 1)),
)
# The usual one, and this package's: the stride lies on the first unit.
RESNET50: Layers = (
    *((7, 2), (3, 2)),
    *((3, 1), (3, 1), (3, 1)),
    *((3, 2), (3, 1), (3, 1), (3, 1)),
    *((3, 2), (3, 1), (3, 1), (3, 1), (3, 1), (3, 1)),
    *((3, 2), (3, 1), (3, 1)),
)
BAGNET17: Layers = ((3, 1), (3, 2), (3, 2), (3, 2))

# fig-center: "the center cell of the input layer receives the most attention (being looked at 3 times)"; the field of
# ResNet-50 is given in sec-motivation. The paper counts no more than that.
CENTER_LOOKS, RESNET50_FIELD = 3, 483
DEPTHS = range(1, 9)


def center(context: Context, dataset: str) -> Result:
    """Count the looks of the paper's examples, of deeper stacks, and of the networks."""
    examples = tuple(
        Row(
            label=f"convolutions of kernel 3: {depth}",
            ours=(" ".join(map(str, count_looks(((3, 1),) * depth))), round(center_to_border(((3, 1),) * depth))),
            published=(None, CENTER_LOOKS if depth == 2 else None),
        )
        for depth in DEPTHS
    )
    networks = {
        "ResNet-50, stride on the last unit": (RESNET50_LATE, RESNET50_FIELD),
        "ResNet-50, this package's": (RESNET50, None),
        "BagNet-17": (BAGNET17, 17),
    }
    rows = tuple(
        Row(
            label=name,
            ours=(len(count_looks(layers)), central_pixels(layers), round(center_to_border(layers))),
            published=(field, None, None),
        )
        for name, (layers, field) in networks.items()
    )
    looks = ("looks", "center : border")
    columns = ("field, px", "central px with half of the looks", "center : border")
    return Result(
        tables=(
            Table(title="Looks at each input cell", where="fig-center", columns=looks, rows=examples, unit="other"),
            Table(title="Networks, along one axis", where="", columns=columns, rows=rows, unit="other"),
        ),
        figures={"center": draw_examples, "center_networks": draw_networks},
        notes=(
            "The counts of the paper's two examples hold, and center against border grows by nearly 3 per layer.",
            "Looks are ways through the network, not influence: weights and ReLUs decide how much each is worth.",
            "No certificate uses the focus: a cell that reads one pixel of a patch counts as lost.",
        ),
    )


def count_looks(layers: Layers) -> list[int]:
    """Return how often each input cell is looked at to compute one output cell: the number of ways to it.

    >>> count_looks([(3, 1), (3, 1)])
    [1, 2, 3, 2, 1]
    """
    counts = [1]
    for kernel, stride in reversed(layers):
        below = [0] * ((len(counts) - 1) * stride + kernel)
        for cell, count in enumerate(counts):
            for step in range(kernel):
                below[cell * stride + step] += count
        counts = below
    return counts


def center_to_border(layers: Layers) -> float:
    """Return how much more often the center is looked at than the border."""
    counts = count_looks(layers)
    return counts[len(counts) // 2] / counts[0]


def central_pixels(layers: Layers, fraction: float = 0.5) -> int:
    """Return how many cells, centered in the field, get at least this fraction of all looks."""
    counts = count_looks(layers)
    margin = 0  # cells left out at each end
    while sum(counts[margin + 1 : len(counts) - margin - 1]) >= fraction * sum(counts):
        margin += 1
    return len(counts) - 2 * margin


def draw_examples() -> "Figure":
    """Draw the paper's figure: two and three layers of kernel 3, with the count in each cell."""
    from matplotlib.figure import Figure

    widths = [len(count_looks(layers)) for layers in EXAMPLES]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, layers in zip(figure.subplots(1, 2, width_ratios=widths), EXAMPLES, strict=True):
        _draw_pyramid(axes, layers)
        counts = count_looks(layers)
        axes.set_title(f"{len(layers)} layers: center {counts[len(counts) // 2]} : border {counts[0]}")
    figure.suptitle("How often each cell is looked at for one output: most often in the center", fontsize=12)
    return figure


def _draw_pyramid(axes: "Axes", layers: Layers) -> None:
    """Draw the cells of each layer, the output on top, joined by the looks between them."""
    from matplotlib.patches import Rectangle

    levels = [count_looks(layers[depth:]) for depth in range(len(layers) + 1)]  # the input first
    reach = len(levels[0]) / 2
    for level, counts in enumerate(levels):
        for cell, count in enumerate(counts):
            x = cell - len(counts) / 2
            for step in range(layers[level - 1][0] if level else 0):
                below = -len(levels[level - 1]) / 2 + cell + step + 0.5
                axes.plot([x + 0.5, below], [1.6 * level, 1.6 * (level - 1) + 0.8], color=GRAY, linewidth=0.7)
            shade = 0.25 + 0.75 * count / max(max(counts), 2)
            box = Rectangle((x + 0.05, 1.6 * level), 0.9, 0.8, facecolor=BLUE, alpha=shade, edgecolor="none")
            axes.add_patch(box)
            color = "white" if shade > 0.55 else "black"
            axes.text(x + 0.5, 1.6 * level + 0.4, str(count), ha="center", va="center", color=color)
        name = "input" if level == 0 else "output" if level == len(layers) else f"hidden {level}"
        axes.text(-reach - 0.25, 1.6 * level + 0.4, name, ha="right", va="center", fontsize=9)
    axes.set_xlim(-reach - 1.7, reach + 0.1)
    axes.set_ylim(-0.2, 1.6 * max(map(len, EXAMPLES)) + 1.0)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_networks() -> "Figure":
    """Draw the looks of ResNet-50 and of BagNet-17 over their fields, each as a fraction of its largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    networks = {"ResNet-50": RESNET50_LATE, "BagNet-17": BAGNET17}
    for axes, (name, layers) in zip(figure.subplots(1, 2), networks.items(), strict=True):
        counts, half, ratio = count_looks(layers), central_pixels(layers), center_to_border(layers)
        edges = [pixel - len(counts) / 2 for pixel in range(len(counts) + 1)]
        axes.stairs([count / max(counts) for count in counts], edges, fill=True, color=BLUE, alpha=0.6)
        axes.axvspan(-half / 2, half / 2, color=ORANGE, alpha=0.25, linewidth=0)
        axes.text(0, 1.04, f"half of all looks:\n{half} px", ha="center", va="bottom", fontsize=9)
        axes.set(ylim=(0, 1.35), yticks=[0, 0.5, 1], xlim=(edges[0], edges[-1]))
        axes.set_xlabel("pixels from the center of the field")
        number = f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio / 1e6:.1f} million"
        axes.set_title(f"{name}: field of {len(counts)} px, center : border = {number} : 1", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("looks, largest = 1")
    return figure


# -- fig-window, eq-receptive ------------------------------------------------------------------------------------------

FIELD, STRIDE, REACHED = 3, 4, 3  # of the drawing
THIN = 0.02  # fields do not depend on the number of channels


def window_size(context: Context, dataset: str) -> Result:
    """Check the equation on the paper's example, on many lines of fields, and on the networks of the paper."""
    example = Row(
        label=f"r = {FIELD}, s = {STRIDE}, n = {REACHED}: largest patch",
        ours=(largest_patch(REACHED, FIELD, STRIDE),),
        published=(REACHED * STRIDE - FIELD + 1,),
    )
    lines = [(p, r, s) for p in range(1, 25) for r in range(1, 13) for s in range(1, 9)]
    agree = sum(count_reached(*line) == window_equation(*line) for line in lines)
    rows = tuple(
        Row(label=case.name, ours=(case.derive(),), published=(case.by_equation(),), note=case.describe())
        for case in CASES
    )
    cells = ("cells per axis",)
    return Result(
        tables=(
            Table(title="The paper's example", where="fig-window", columns=("pixels",), rows=(example,), unit="other"),
            Table(title="Window sizes of networks", where="eq-receptive", columns=cells, rows=rows, unit="other"),
        ),
        figures={"window_size": draw_window},
        notes=(
            f"On {agree} of {len(lines)} lines of evenly spaced fields (p to 24, r to 12, s to 8 pixels) the equation "
            "is what trying every position of the patch gives.",
            "It is about pixels that the network reads. Where images are enlarged first, a patch in the source image "
            "reaches more cells than the equation says, except with nearest-neighbor interpolation.",
        ),
        settings={"field": FIELD, "stride": STRIDE, "cells": REACHED},
    )


def window_equation(patch: int, field: int, stride: int) -> int:
    """Return the window size that the paper's eq-receptive gives; this package derives it from the graph instead."""
    return -(-(patch + field - 1) // stride)


def count_reached(patch: int, field: int, stride: int) -> int:
    """Return the most cells that a patch touches on a long line of evenly spaced fields, by trying every position."""
    starts = tuple(stride * cell for cell in range(patch // stride + field + 3))
    line = Axis(starts, (field,) * len(starts), starts[-1] + max(field, stride))
    return _largest_side(Windows.reached_by(Patch(1, patch), Field(Axis.identity(1), line)))


def largest_patch(cells: int, field: int, stride: int) -> int:
    """Return the largest patch that reaches `cells` fields and never one more, by trying sizes."""
    patch = 1
    while count_reached(patch + 1, field, stride) <= cells:
        patch += 1
    return patch


def _largest_side(windows: Windows) -> int:
    return max(stop - start for start, stop in windows.columns)


@final
@dataclass(frozen=True)
class Case:
    """A network behind a resizing from `side` to `enlarged` pixels, and a patch in pixels of the source image."""

    name: str
    model: str
    side: int
    patch: int
    enlarged: int | None = None
    mode: str = "bicubic"

    def derive(self) -> int:
        """Return the side, in cells, of the largest window that the patch reaches."""
        return _largest_side(self._guard().windows(Patch(self.patch), self.side, self.side))

    def by_equation(self) -> int:
        """Return the window size by the paper's equation, with the patch enlarged as the image is."""
        side = self.enlarged or self.side
        columns = self._guard().without_preprocess().field(side, side).columns
        assert columns.stride is not None  # every network of these cases is regular
        return window_equation(self.patch * side // self.side, columns.field_size, columns.stride)

    def describe(self) -> str:
        """Return the patch and the image in words."""
        enlarged = "" if self.enlarged is None else f", enlarged to {self.enlarged} px"
        return f"{self.patch} px patch in {self.side} px{enlarged}"

    def _guard(self) -> LocalGuard[Any]:
        """Return the network with few channels and any weights: its field is that of the trained one."""
        steps: tuple[Any, ...] = ()
        if self.enlarged is not None:
            steps = (Resize(height=self.enlarged, width=self.enlarged, mode=self.mode),)  # type: ignore[arg-type]
        return LocalGuard(Preprocess(steps), _build_thin(self.model), Evidence(low=None), Undefended())


@lru_cache(maxsize=8)
def _build_thin(name: str) -> LocalModel:
    """Return one network for all cases: it keeps the fields that it once derived."""
    return build(name, classes=2, width=THIN)


CASES = (
    Case("BagNet-17, 1 %", "bagnet17", 224, 23),
    Case("BagNet-17, 2 %", "bagnet17", 224, 32),
    Case("BagNet-17, 3 %", "bagnet17", 224, 39),
    Case("BagNet-9, 2 %", "bagnet9", 224, 32),
    Case("BagNet-33, 2 %", "bagnet33", 224, 32),
    Case("DS-25-ResNet-50, 2 %", "ds_resnet50", 299, 42),
    Case("DS-4-ResNet-18, CIFAR-10", "ds_resnet18", 32, 5),
    *(
        Case(f"BagNet-17, CIFAR-10 at 192 px, {mode}", "bagnet17", 32, 5, 192, mode)
        for mode in ("nearest", "bilinear", "bicubic")
    ),
)


def draw_window(field: int = FIELD, stride: int = STRIDE, cells: int = REACHED) -> "Figure":
    """Draw the paper's figure: fields on a line of pixels, and the largest patch that reaches only `cells`."""
    from matplotlib.figure import Figure

    patch = largest_patch(cells, field, stride)
    figure = Figure(figsize=(10, 2.5), layout="constrained")
    axes = figure.subplots()
    _draw_pixels(axes, field, stride, fields=cells + 1)
    start, stop = field - 1, field - 1 + patch  # from the last pixel of field 0 on
    outline = [start, stop, stop, start, start], [-0.25, -0.25, 1.25, 1.25, -0.25]
    axes.plot(*outline, color=RED, linestyle="--", linewidth=2)
    axes.text(start + patch / 2, 1.4, f"patch of {patch} pixels", color=RED, ha="center", va="bottom")
    arrow = {"arrowstyle": "|-|,widthA=0.2,widthB=0.2", "color": "black", "linewidth": 0.8}
    for cell in range(cells + 1):
        left = stride * cell
        axes.annotate("", xy=(left, -0.5), xytext=(left + field, -0.5), arrowprops=arrow)
        state = "reached" if cell < cells else "not reached"
        axes.text(left + field / 2, -0.75, f"field {cell}\n{state}", ha="center", va="top", fontsize=9)
    axes.set_title(
        f"Fields of {field} pixels every {stride}: {patch} pixels reach {cells} of them, "
        f"{patch + 1} pixels reach {count_reached(patch + 1, field, stride)}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlim(-0.3, stride * cells + field + 5.2)
    axes.set_ylim(-1.8, 2.0)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def _draw_pixels(axes: "Axes", field: int, stride: int, fields: int) -> None:
    from matplotlib.patches import Rectangle

    kinds = {"center of a field": (BLUE, 1.0), "other pixels of a field": (BLUE, 0.4), "read by no cell": (GRAY, 0.25)}
    for pixel in range(stride * (fields - 1) + field):
        offset = pixel % stride
        kind = "read by no cell" if offset >= field else "other pixels of a field"
        if offset == (field - 1) / 2:
            kind = "center of a field"
        color, alpha = kinds[kind]
        axes.add_patch(Rectangle((pixel + 0.05, 0), 0.9, 1, facecolor=color, alpha=alpha, edgecolor="none"))
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, alpha=alpha) for color, alpha in kinds.values()]
    axes.legend(handles, list(kinds), loc="center right", frameon=False, fontsize=9)
