"""The learning curve of a run: loss, accuracy and learning rate over epochs, drawn from log.jsonl."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchguard.storage.atomic import replace_file
from patchguard.training.checkpoint import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GRAY = "#1f5fa8", "#d9731a", "#2c8a4b", "#666666"


def draw(records: Sequence[Mapping[str, Any]], title: str = "") -> "Figure":
    """Draw one record per epoch: three panels above each other.

    The accuracy on training images is that of the plain sum on augmented images; on held-out images, clean accuracy is
    that of the defense.
    """
    from matplotlib.figure import Figure  # here, because it is slow to import
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 7), layout="constrained")
    losses, accuracies, rates = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 2))
    epochs = [record["epoch"] for record in records]
    _plot(losses, epochs, [record["loss"] for record in records], BLUE, "training loss")
    _plot(accuracies, epochs, [record["train_accuracy"] for record in records], BLUE, "training images")
    measured = [record for record in records if "held_out" in record]
    for key, color, label in (("clean", ORANGE, "held out, clean"), ("certified", GREEN, "held out, certified")):
        values = [record["held_out"][key] for record in measured]
        if values:
            _plot(accuracies, [record["epoch"] for record in measured], values, color, label, marker="o")
    _plot(rates, epochs, [record["lr"] for record in records], GRAY, "learning rate")
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
            axes.axvline(start, color=GRAY, linewidth=0.8, linestyle=":", label="masks change")
    if starts:
        losses.legend(handles=losses.lines[1:2], loc="upper right", frameon=False)
    figure.align_ylabels()
    if title:
        losses.set_title(title, loc="left")
    return figure


def write(out: Path, title: str) -> None:
    """Draw the log of a run folder to `curve.png`."""
    records = read_log(out)
    if records:
        with replace_file(out / "curve.png") as draft:
            draw(records, title).savefig(draft, format="png", dpi=120)


def _plot(
    axes: "Axes", epochs: Sequence[int], values: Sequence[float], color: str, label: str, marker: str | None = None
) -> None:
    # A single point has no line.
    marker = "o" if len(epochs) == 1 else marker
    axes.plot(epochs, values, color=color, label=label, linewidth=1.6, marker=marker, markersize=4)


def _stage_starts(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return where the masks change: half an epoch before the first one with other masks."""
    pairs = itertools.pairwise(records)
    return [after["epoch"] - 0.5 for before, after in pairs if before.get("mask_step") != after.get("mask_step")]
