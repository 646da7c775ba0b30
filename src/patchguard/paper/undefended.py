"""Undefended networks: clean accuracy, clipping of local logits, invariance to masking of features."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from patchguard.defenses import Undefended, ties
from patchguard.defenses.evidence import Evidence
from patchguard.defenses.window_sums import sums
from patchguard.geometry.windows import Windows
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table, Value
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network
from patchguard.paper.rows import Build, Cell, Found, WindowsOf, described, differs, measure
from patchguard.paper.tally import SIGNED, Question, over_batches, rounding, told
from patchguard.runs import metrics

PLAIN = Question(evidence=SIGNED, defense=Undefended())
CLIPS = ((None, None), (0.0, None), (0.0, 50.0), (0.0, 15.0), (0.0, 5.0))
SIDES = (0, 2, 4, 6, 8)  # of the masked windows, in cells


# -- tab-huge-vanilla --------------------------------------------------------------------------------------------------


def vanilla(context: Context, dataset: str) -> Result:
    """Clean accuracy of ResNet and BagNet."""
    context.images(dataset)
    theirs = published.VANILLA[dataset]
    found = Found()
    stand_in = models.small_field(dataset)
    others = () if stand_in is None else (stand_in,)
    for label, networks in (
        ("ResNet", models.residuals(dataset)),
        ("BagNet", (models.plain_bagnet(dataset), *others)),
    ):
        for network in networks:
            named = f"{network.label}, for {label}" if network.stand_in else label
            found.add(_rows(context, dataset, network, {named: theirs[label]}, (PLAIN,)))
    table = Table(
        title=f"Clean accuracy on {TITLES[dataset]}",
        where="tab-huge-vanilla",
        columns=("clean",),
        rows=tuple(found.rows),
    )
    return Result(tables=(table,), notes=tuple(found.notes))


def _rows(
    context: Context,
    dataset: str,
    network: Network,
    theirs: Mapping[str, Sequence[float | None]],
    questions: Sequence[Question],
) -> Found:
    """Return one row of clean accuracies, under the label that is given the paper's numbers."""
    cells: list[Cell] = [(question, "clean") for question in questions]

    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        return dict.fromkeys(theirs, cells)

    made: Build = build
    return measure(context, dataset, network, theirs, len(cells), made, spaced=False)


# -- tab-clipping, tab-clipping-cifar ----------------------------------------------------------------------------------


def clipping(context: Context, dataset: str) -> Result:
    """Clean accuracy of undefended networks whose local logits are clipped."""
    context.images(dataset)
    theirs = published.CLIPPINGS[dataset]
    questions = [Question(evidence=Evidence(low=low, high=high), defense=Undefended()) for low, high in CLIPS]
    found = Found()
    stand_in = models.small_field(dataset)
    networks = [
        *((network, "ResNet-50") for network in models.residuals(dataset)),
        *((models.plain_bagnet(dataset, field), f"BagNet-{field}") for field in (33, 17)),
        *(() if stand_in is None else ((stand_in, "BagNet-17"),)),
        (models.plain_bagnet(dataset, 9), "BagNet-9"),
    ]
    for network, label in networks:
        named = f"{network.label}, for {label}" if network.stand_in else label
        found.add(_rows(context, dataset, network, {named: theirs[label]}, questions))
    where = "tab-clipping-cifar" if dataset == "cifar10" else "tab-clipping"
    title = f"Clipping of local logits on {TITLES[dataset]}"
    table = Table(title=title, where=where, columns=published.CLIPS, rows=tuple(found.rows))
    return Result(tables=(table,), notes=tuple(found.notes))


# -- tab-feature-mask, tab-feature-mask-cifar --------------------------------------------------------------------------


def feature_masking(context: Context, dataset: str) -> Result:
    """Predictions of the undefended network while one window after the other is masked."""
    context.images(dataset)
    where = "tab-feature-mask-cifar" if dataset == "cifar10" else "tab-feature-mask"
    columns = tuple(f"{side}x{side}" for side in SIDES)
    theirs = published.FEATURE_MASK[dataset]
    tables, notes = [], []
    stand_in = models.small_field(dataset)
    for network in (models.plain_bagnet(dataset), *(() if stand_in is None else (stand_in,))):
        # The same number of cells is another share of another network's cells.
        known = {name: () if network.stand_in else theirs[name] for name in theirs}
        try:
            maps = context.maps(network.names, dataset)
        except Missing as missing:
            nothing = (None,) * len(SIDES)
            rows = [Row(label=name, ours=nothing, published=known[name], note=str(missing)) for name in known]
        else:
            found = invariance(maps, context.device)
            note, reason = described(maps), differs(maps.model, network)
            rows = [
                Row(label=name, ours=tuple(found[name]), published=known[name], note=note, reason=reason)
                for name in known
            ]
            notes.append(told(rounding(maps, PLAIN, context.device), maps.model))
        title = f"Masked features of {network.label} on {TITLES[dataset]}"
        tables.append(Table(title=title, where=where, columns=columns, rows=tuple(rows)))
    return Result(tables=tuple(tables), notes=tuple(notes))


def invariance(maps: Maps, device: torch.device) -> dict[str, list[Value]]:
    """Return, per side of the window, the paper's three numbers.

    Masked accuracy: right labels among all images and windows. % images: some window gives a wrong label.
    % windows per image: the mean share of windows that change the label of the unmasked network.
    """
    windows = {side: Windows.sliding(grid=maps.grid, size=_fitting(side, maps.grid)) for side in SIDES if side}

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        counted: Counter[Hashable] = Counter()
        values = SIGNED(local_logits).values
        total = values.sum((2, 3))
        plain = ties.argmax(total, dim=1).unsqueeze(1)
        for side in SIDES:
            seen = total.unsqueeze(2) - sums(values, windows[side]) if side else total.unsqueeze(2)
            label = ties.argmax(seen, dim=1)  # images, windows
            right = label == targets.unsqueeze(1)
            counted[side, "right"] = int(right.sum())
            counted[side, "images"] = int((~right.all(1)).sum())
            counted[side, "changed"] = int((label != plain).sum())
        return counted

    counts = over_batches(maps, device, work)
    found: dict[str, list[Value]] = {"Masked accuracy": [], "% images": [], "% windows per image": []}
    for side in SIDES:
        pairs = len(maps) * (len(windows[side]) if side else 1)
        found["Masked accuracy"].append(100 * counts[side, "right"] / pairs)
        found["% images"].append(metrics.share(counts[side, "images"], len(maps)))
        found["% windows per image"].append(100 * counts[side, "changed"] / pairs)
    return found


def _fitting(side: int, grid: tuple[int, int]) -> tuple[int, int]:
    return min(side, grid[0]), min(side, grid[1])
