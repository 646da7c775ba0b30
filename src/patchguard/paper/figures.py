"""What figures share: colors, an empty figure, and groups of bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GRAY = "#1f5fa8", "#d9731a", "#2c8a4b", "#c22f2f", "#999999"


def new_figure() -> tuple["Figure", "Axes"]:
    """Return a figure with one set of axes."""
    from matplotlib.figure import Figure  # here, because it is slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_bars(axes: "Axes", names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Draw percentages in groups: one group per name, one bar in each per series (label, color, values)."""
    width = 0.8 / len(series)
    for number, (label, color, values) in enumerate(series):
        centers = [center - 0.4 + width * (number + 0.5) for center in range(len(names))]
        axes.bar_label(axes.bar(centers, values, width, color=color, label=label), fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 110)  # room for the numbers
    axes.set_yticks(range(0, 101, 20))
    axes.figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
