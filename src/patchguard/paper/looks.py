"""The centre of a receptive field (fig-center): how often each input cell is looked at.

The paper claims (apx-receptive): through two convolutions of kernel 3, the centre of the 5 input cells is looked at 3
times and the outermost once; with more layers the difference grows exponentially. So a feature focuses on the centre
of its field, and a patch far from it has little influence.

Ours: the counts of both examples are these; the ratio of centre to border, 3, 7, 19, 51, ..., grows by a factor that
tends to 3 per layer. On the path of ResNet-50 through all of its kernels, 81 of 483 pixels (field of the paper's
ResNet-50; 427 for the usual one, where the stride lies elsewhere) get half of the looks. BagNet-17 has four kernels of
3 and little focus: 7 to 1, and 7 of 17 pixels get half. No certificate relies on the focus: a cell that reads one pixel
of a patch counts as owned by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from patchguard.paper.case_figures import BLUE, GREY, ORANGE
from patchguard.paper.context import Context
from patchguard.paper.experiment import Result, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kernels along one axis with their strides, from the image on; convolutions of 1x1 look nowhere else.
Layers = Sequence[tuple[int, int]]
WHERE = "fig-center"
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
CENTRE, RESNET50_FIELD = 3, 483
DEPTHS = range(1, 9)


def run(context: Context, dataset: str) -> Result:
    """Count the looks of the paper's examples, of deeper stacks, and of the networks."""
    examples = tuple(
        Row(
            label=f"convolutions of kernel 3: {len(layers)}",
            ours=(" ".join(map(str, looks(layers))), round(ratio(layers))),
            published=(None, CENTRE if len(layers) == 2 else None),
        )
        for layers in (((3, 1),) * depth for depth in DEPTHS)
    )
    networks = {
        "ResNet-50, stride on the last unit": (RESNET50_LATE, RESNET50_FIELD),
        "ResNet-50, this package's": (RESNET50, None),
        "BagNet-17": (BAGNET17, 17),
    }
    rows = []
    for name, (layers, field) in networks.items():
        focus = Focus.of(layers)
        rows.append(Row(label=name, ours=(focus.field, focus.half, round(focus.ratio)), published=(field, None, None)))
    return Result(
        tables=(
            Table(
                title="Looks at each input cell",
                where=WHERE,
                columns=("looks", "centre : border"),
                rows=examples,
                unit="other",
            ),
            Table(
                title="Networks, along one axis",
                where="",
                columns=("field, px", "central px with half of the looks", "centre : border"),
                rows=tuple(rows),
                unit="other",
            ),
        ),
        figures={"centre": toy_figure, "centre_networks": network_figure},
        notes=(
            "The counts of the paper's two examples hold, and centre against border grows by nearly 3 per layer.",
            "Looks are ways through the network, not influence: weights and ReLUs decide how much each is worth.",
            "No certificate uses the focus: a cell that reads one pixel of a patch counts as lost.",
        ),
    )


def looks(layers: Layers) -> list[int]:
    """Return how often each input cell is looked at to compute one output cell: the number of ways to it.

    >>> looks([(3, 1), (3, 1)])
    [1, 2, 3, 2, 1]
    """
    counts = [1]
    for kernel, stride in reversed(layers):
        spread = [0] * ((len(counts) - 1) * stride + kernel)
        for place, count in enumerate(counts):
            for step in range(kernel):
                spread[place * stride + step] += count
        counts = spread
    return counts


def ratio(layers: Layers) -> float:
    """Return how much more often the centre is looked at than the border."""
    counts = looks(layers)
    return counts[len(counts) // 2] / counts[0]


def core(layers: Layers, share: float = 0.5) -> int:
    """Return how many cells, centred in the field, get at least this share of all looks."""
    counts = looks(layers)
    margin = 0  # cells left out at each end
    while sum(counts[margin + 1 : len(counts) - margin - 1]) >= share * sum(counts):
        margin += 1
    return len(counts) - 2 * margin


@final
@dataclass(frozen=True, kw_only=True)
class Focus:
    """The field of a path of layers, its central part that gets half of all looks, and centre against border."""

    field: int
    half: int
    ratio: float

    @classmethod
    def of(cls, layers: Layers) -> "Focus":
        """Measure a path."""
        return cls(field=len(looks(layers)), half=core(layers), ratio=ratio(layers))


# -- figures -----------------------------------------------------------------------------------------------------------


def toy_figure() -> "Figure":
    """Return the paper's drawing: two and three layers of kernel 3, with the count in each cell."""
    from matplotlib.figure import Figure

    widths = [len(looks(layers)) for layers in EXAMPLES]
    made = Figure(figsize=(10, 4), layout="constrained")
    for axes, layers in zip(made.subplots(1, 2, width_ratios=widths), EXAMPLES, strict=True):
        _pyramid(axes, layers)
        axes.set_title(
            f"{len(layers)} layers: centre {looks(layers)[len(looks(layers)) // 2]} : border {looks(layers)[0]}"
        )
    made.suptitle("How often each cell is looked at for one output: most often in the centre", fontsize=12)
    return made


def _pyramid(axes: "Axes", layers: Layers) -> None:
    """Draw the cells of each layer, the output on top, joined by the looks between them."""
    from matplotlib.patches import Rectangle

    levels = [looks(layers[depth:]) for depth in range(len(layers) + 1)]  # the input first
    reach = len(levels[0]) / 2
    for level, counts in enumerate(levels):
        start = -len(counts) / 2
        for place, count in enumerate(counts):
            x = start + place
            if level:
                kernel = layers[level - 1][0]
                for step in range(kernel):
                    below = -len(levels[level - 1]) / 2 + place + step + 0.5
                    axes.plot([x + 0.5, below], [1.6 * level, 1.6 * (level - 1) + 0.8], color=GREY, linewidth=0.7)
            shade = 0.25 + 0.75 * count / max(max(counts), 2)
            box = Rectangle((x + 0.05, 1.6 * level), 0.9, 0.8, facecolor=BLUE, alpha=shade, edgecolor="none")
            axes.add_patch(box)
            colour = "white" if shade > 0.55 else "black"
            axes.text(x + 0.5, 1.6 * level + 0.4, str(count), ha="center", va="center", color=colour)
        name = "input" if level == 0 else "output" if level == len(layers) else f"hidden {level}"
        axes.text(-reach - 0.25, 1.6 * level + 0.4, name, ha="right", va="center", fontsize=9)
    axes.set_xlim(-reach - 1.7, reach + 0.1)
    axes.set_ylim(-0.2, 1.6 * max(map(len, EXAMPLES)) + 1.0)
    axes.set_aspect("equal")
    axes.axis("off")


def network_figure() -> "Figure":
    """Return the looks of ResNet-50 and of BagNet-17 over their fields, each as a share of its largest."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, name, layers in zip(
        made.subplots(1, 2), ("ResNet-50", "BagNet-17"), (RESNET50_LATE, BAGNET17), strict=True
    ):
        counts, found = looks(layers), Focus.of(layers)
        largest = max(counts)
        edges = [place - len(counts) / 2 for place in range(len(counts) + 1)]
        axes.stairs([count / largest for count in counts], edges, fill=True, color=BLUE, alpha=0.6)
        axes.axvspan(-found.half / 2, found.half / 2, color=ORANGE, alpha=0.25, linewidth=0)
        axes.text(0, 1.04, f"half of all looks:\n{found.half} px", ha="center", va="bottom", fontsize=9)
        axes.set_ylim(0, 1.35)
        axes.set_yticks([0, 0.5, 1])
        axes.set_xlim(edges[0], edges[-1])
        axes.set_xlabel("pixels from the centre of the field")
        axes.set_title(
            f"{name}: field of {found.field} px, centre : border = {_readable(found.ratio)} : 1", fontsize=10
        )
        axes.spines[["top", "right"]].set_visible(False)
    made.axes[0].set_ylabel("looks, largest = 1")
    return made


def _readable(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:.1f} million"
