"""The picture of a run: loss, accuracy and learning rate over epochs, drawn from the lines of log.jsonl."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9731a", "#2c8a4b", "#666666"


def figure_of(records: Sequence[Mapping[str, Any]], title: str = "") -> "Figure":
    """Return the figure of a run, of one record per epoch: three panels above each other.

    The accuracy on training images is that of the plain sum on augmented images; on held-out images, clean accuracy is
    that of the defense.
    """
    from matplotlib.figure import Figure  # here, because it is slow to import
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 7), layout="constrained")
    losses, accuracies, rates = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 2))
    epochs = [record["epoch"] for record in records]
    _line(losses, epochs, [record["loss"] for record in records], BLUE, "training loss")
    _line(accuracies, epochs, [record["train_accuracy"] for record in records], BLUE, "training images")
    measured = [record for record in records if "held_out" in record]
    for key, colour, label in (("clean", ORANGE, "held out, clean"), ("certified", GREEN, "held out, certified")):
        values = [record["held_out"][key] for record in measured]
        if values:
            _line(accuracies, [record["epoch"] for record in measured], values, colour, label, marker="o")
    _line(rates, epochs, [record["rate"] for record in records], GREY, "learning rate")
    accuracies.set_ylim(0, 1)
    accuracies.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    accuracies.legend(loc="lower right", frameon=False)
    rates.set_ylim(bottom=0)
    rates.xaxis.set_major_locator(MaxNLocator(integer=True))
    rates.set_xlabel("epoch")
    starts = _stage_starts(records)
    for axes, label in ((losses, "loss"), (accuracies, "accuracy"), (rates, "learning rate")):
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for start in starts:
            axes.axvline(start, color=GREY, linewidth=0.8, linestyle=":", label="other masks from here")
    if starts:
        losses.legend(handles=losses.lines[1:2], loc="upper right", frameon=False)
    figure.align_ylabels()
    if title:
        losses.set_title(title, loc="left")
    return figure


def logged(out: Path) -> list[dict[str, Any]]:
    """Return what the log of a run folder says of each epoch, in order; nothing where there is no log."""
    path = out / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(out: Path, title: str) -> None:
    """Draw the log of a run folder to `curve.png`, all or nothing."""
    records = logged(out)
    if not records:
        return
    draft = out / f".curve.{os.getpid()}.draft"
    figure_of(records, title).savefig(draft, format="png", dpi=120)
    os.replace(draft, out / "curve.png")


def _line(
    axes: "Axes", epochs: Sequence[int], values: Sequence[float], colour: str, label: str, marker: str | None = None
) -> None:
    # A single point has no line to be seen by.
    marker = "o" if len(epochs) == 1 else marker
    axes.plot(epochs, values, color=colour, label=label, linewidth=1.6, marker=marker, markersize=4)


def _stage_starts(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return where the masks change: half an epoch before the first one with others."""
    pairs = itertools.pairwise(records)
    return [after["epoch"] - 0.5 for before, after in pairs if before.get("mask_step") != after.get("mask_step")]
