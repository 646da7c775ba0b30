"""Undefended networks: clean accuracy, clipping of local logits, invariance to masked features."""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from patchguard.defenses import Undefended, ties
from patchguard.defenses.evidence import Evidence
from patchguard.defenses.window_sums import sums
from patchguard.geometry.windows import Windows
from patchguard.paper import networks, published
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.paper.counting import (
    Cells,
    Measured,
    WindowsOf,
    appendix_label,
    describe_model,
    describe_rounding,
    make_result,
    measure,
    missing_rows,
    sum_over_batches,
)
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Value
from patchguard.paper.networks import Network
from patchguard.paper.query import SIGNED, Query
from patchguard.runs.metrics import proportion

PLAIN = Query(evidence=SIGNED, defense=Undefended())
CLIPS = ((None, None), (0.0, None), (0.0, 50.0), (0.0, 15.0), (0.0, 5.0))
SIDES = (0, 2, 4, 6, 8)  # of the masked windows, in cells


# -- tab-huge-vanilla, tab-clipping, tab-clipping-cifar ----------------------------------------------------------------


def vanilla(context: Context, dataset: str) -> Result:
    """Clean accuracy of ResNet and BagNet."""
    pairs = [
        *((network, "ResNet") for network in networks.resnets(dataset)),
        *((network, "BagNet") for network in (networks.plain_bagnet(dataset), *networks.small_networks(dataset))),
    ]
    measured = _measure_clean(context, dataset, pairs, published.VANILLA[dataset], [PLAIN])
    table = measured.table(f"Clean accuracy on {TITLES[dataset]}", "tab-huge-vanilla", ("clean",))
    return make_result((table,), measured.notes)


def clipping(context: Context, dataset: str) -> Result:
    """Clean accuracy of undefended networks whose local logits are clipped."""
    queries = [Query(evidence=Evidence(low=low, high=high), defense=Undefended()) for low, high in CLIPS]
    pairs = [
        *((network, "ResNet-50") for network in networks.resnets(dataset)),
        *((networks.plain_bagnet(dataset, field), f"BagNet-{field}") for field in (33, 17)),
        *((network, "BagNet-17") for network in networks.small_networks(dataset)),
        (networks.plain_bagnet(dataset, 9), "BagNet-9"),
    ]
    measured = _measure_clean(context, dataset, pairs, published.CLIPPINGS[dataset], queries)
    title = f"Clipping of local logits on {TITLES[dataset]}"
    table = measured.table(title, appendix_label("tab-clipping", dataset), published.CLIPS)
    return make_result((table,), measured.notes)


def _measure_clean(
    context: Context,
    dataset: str,
    pairs: Sequence[tuple[Network, str]],
    theirs: published.Rows,
    queries: Sequence[Query],
) -> Measured:
    """Return one row of clean accuracies per network, beside the paper's row of the given label."""
    measured = Measured()
    for network, label in pairs:
        name = f"{network.label}, for {label}" if network.stand_in else label

        def make_cells(logits: CachedLogits, windows_of: WindowsOf, name: str = name) -> Cells:
            return {name: [(query, "clean") for query in queries]}

        known = {name: theirs[label]}
        measured.add(measure(context, dataset, network, known, len(queries), make_cells, patched=False))
    return measured


# -- tab-feature-mask, tab-feature-mask-cifar --------------------------------------------------------------------------


def feature_masking(context: Context, dataset: str) -> Result:
    """Predictions of the undefended network while one window after the other is masked."""
    theirs, tables, notes = published.FEATURE_MASK[dataset], [], []
    for network in (networks.plain_bagnet(dataset), *networks.small_networks(dataset)):
        # The same number of cells is another fraction of another network's cells.
        known = {name: () if network.stand_in else theirs[name] for name in theirs}
        measured = Measured()
        try:
            logits = context.logits(network.names, dataset)
        except Missing as missing:
            measured.rows = missing_rows(missing, known, len(SIDES))
        else:
            numbers = measure_invariance(logits, context.device)
            note, reason = describe_model(logits), network.describe_differences(logits.model)
            measured.rows = [
                Row(label=name, ours=tuple(numbers[name]), published=known[name], note=note, reason=reason)
                for name in known
            ]
            notes.append(describe_rounding(logits, PLAIN, context.device))
        title = f"Masked features of {network.label} on {TITLES[dataset]}"
        columns = [f"{side}x{side}" for side in SIDES]
        tables.append(measured.table(title, appendix_label("tab-feature-mask", dataset), columns))
    return make_result(tables, notes)


def measure_invariance(logits: CachedLogits, device: torch.device) -> dict[str, list[Value]]:
    """Return, per side of the window, the paper's three numbers.

    Masked accuracy: correct labels among all images and windows. % images: some window gives a wrong label.
    % windows per image: the mean fraction of windows that change the label of the unmasked network.
    """
    rows, columns = logits.grid
    windows = {
        side: Windows.sliding(grid=logits.grid, size=(min(side, rows), min(side, columns))) for side in SIDES if side
    }

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        counter: Counter[Hashable] = Counter()
        values = SIGNED(local_logits).values
        total = values.sum((2, 3))
        plain = ties.argmax(total, dim=1).unsqueeze(1)
        for side in SIDES:
            unmasked = total.unsqueeze(2) - sums(values, windows[side]) if side else total.unsqueeze(2)
            label = ties.argmax(unmasked, dim=1)  # images, windows
            correct = label == targets.unsqueeze(1)
            counter[side, "correct"] = int(correct.sum())
            counter[side, "images"] = int((~correct.all(1)).sum())
            counter[side, "changed"] = int((label != plain).sum())
        return counter

    counts = sum_over_batches(logits, device, work)
    numbers: dict[str, list[Value]] = {"Masked accuracy": [], "% images": [], "% windows per image": []}
    for side in SIDES:
        pairs = len(logits) * (len(windows[side]) if side else 1)
        numbers["Masked accuracy"].append(100 * counts[side, "correct"] / pairs)
        numbers["% images"].append(proportion(counts[side, "images"], len(logits)))
        numbers["% windows per image"].append(100 * counts[side, "changed"] / pairs)
    return numbers
