"""Figures of the case study, drawn from its summary alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9731a", "#999999"

ROWS = {
    "incorrect_local_attacked": "local, attacked",
    "incorrect_local_original": "local, original",
    "incorrect_local_difference": "local, difference",
    "incorrect_global": "global, attacked",
}


def figures(summary: Mapping[str, Any]) -> dict[str, "Figure"]:
    """Return every figure of a summary, by the name of its file."""
    found = {"local_predictions": local_predictions(summary), "histogram": local_logits(summary)}
    if summary["ceiling"]:
        found["ceiling"] = ceiling(summary)
    return found


def local_predictions(summary: Mapping[str, Any]) -> "Figure":
    """Return the paper's table of incorrect predictions as bars, ours beside the published ones."""
    rows = summary["tab-local-attack"]["rows"]
    series = [("measured here", BLUE, [rows[name]["ours"] for name in ROWS])]
    if all(rows[name]["published"] is not None for name in ROWS):
        series.append(("ResNet-50, published", GREY, [rows[name]["published"] for name in ROWS]))
    figure, axes = empty()
    bars(axes, list(ROWS.values()), series)
    axes.set_ylabel("incorrect predictions, %")
    axes.set_title(f"{_subject(summary)}: what a patch of {_patch(summary)} pixels does", loc="left")
    return figure


def local_logits(summary: Mapping[str, Any]) -> "Figure":
    """Return the histogram of large local logits of attacked images: true class and malicious class."""
    found = summary["histogram"]
    figure, axes = empty()
    edges = found["edges"]
    for name, colour, label in (("true", BLUE, "true class"), ("malicious", ORANGE, "malicious class")):
        axes.stairs(found[name], edges, fill=True, alpha=0.55, color=colour, label=f"{label}, attacked images")
    axes.stairs(found["clean_true"], edges, color="black", linewidth=0.9, label="true class, clean images")
    axes.axvline(found["largest_clean_logit"], color=GREY, linestyle="--", label="largest clean logit of any class")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"local logits above {found['large']:.3g}")
    axes.set_ylabel("cells")
    axes.set_title(f"{_subject(summary)}: large local logits", loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def ceiling(summary: Mapping[str, Any]) -> "Figure":
    """Return the accuracy under each clipping of the local logits: clean, and under the two attacks."""
    clips = summary["ceiling"]["clips"]
    kinds = (("clean", GREY, "clean"), ("transferred", BLUE, "attack on no clipping"), ("adaptive", ORANGE, "adaptive"))
    figure, axes = empty()
    series = [(label, colour, [100 * clips[clip][kind]["share"] for clip in clips]) for kind, colour, label in kinds]
    bars(axes, [f"clipped to {clip}" if index else "not clipped" for index, clip in enumerate(clips)], series)
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"{_subject(summary)}: a ceiling c_h = {summary['ceiling']['c_h']:.3g} on local logits", loc="left")
    return figure


def empty() -> tuple["Figure", "Axes"]:
    """Return a figure with one set of axes."""
    from matplotlib.figure import Figure  # here, because it is slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(axes: "Axes", names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Draw percentages in groups: one group per name, one bar in each per series (label, colour, values)."""
    width = 0.8 / len(series)
    for number, (label, colour, values) in enumerate(series):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(names))]
        axes.bar_label(axes.bar(places, values, width, color=colour, label=label), fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 110)  # room for the numbers
    axes.set_yticks(range(0, 101, 20))
    axes.figure.legend(loc="outside lower center", ncols=len(series), frameon=False)


def _subject(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['model']} on {summary['images']:,} images" if "model" in summary else f"{summary['images']:,} images"
    )


def _patch(summary: Mapping[str, Any]) -> str:
    height, width = summary["settings"]["patch"]
    return f"{height} x {width}"
