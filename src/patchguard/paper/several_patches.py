"""Several patches at once (apx-multiple-patch): merged into one, cells masked one by one, other secure sums.

The paper claims, without numbers: (1) patches that lie close together can be merged into one larger patch, and
robustness is lost where that one grows too large; (2) masking the alpha strongest cells of each class, wherever they
are, works for any number of patches, at a lower bound on the true class that costs provable accuracy; (3) bounded sums,
as those of CBN and DS, handle several patches, too.

Ours: each of these rules on the cached logits, for one, two and three patches of the smallest size that the paper has
for the dataset. For bands of columns, whose windows lie on one axis, robust masking with masks of two boxes against two
patches is cheap enough to be exact at 32 columns, which the paper does not consider; where there are too many masks to
go through, the row says so. `docs/theory.md` has the theorems.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from patchguard.defenses import CellMasking, ClippedSum, MajorityVote, Median, TrimmedMean
from patchguard.geometry.windows import Windows
from patchguard.paper import networks
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.paper.counting import CLEAN_ROBUST, clean_robust_columns, count, describe_rounding, make_result
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table, Value, to_percent
from patchguard.paper.fast_certificates import double_masking_query, masking_query, rank_query, sum_query
from patchguard.paper.query import CONFIDENCE, LOGITS, PREDICTION, SIGNED, TANH, VOTE, Query
from patchguard.patch import Patch
from patchguard.runs.summary import Proportion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "apx-multiple-patch"
COUNTS = (1, 2, 3)
COLUMNS = clean_robust_columns(str(number) for number in COUNTS)
SIDES = {"cifar10": 2}  # of each patch; for photos 1 % of 224 or 299 px
BOXES = {"cifar10": (2, 4, 6, 8, 12, 16)}  # sides of the box that holds all patches
PHOTO_BOXES = (23, 32, 48, 64, 96, 128)
MOST_UNIONS = 2000  # unions of windows up to which masks of several boxes are tried
NO_CELL = "no cell left"

Accuracies: TypeAlias = dict[
    tuple[str, int], tuple[Proportion, Proportion]
]  # clean and robust, by rule and number or side


def run(context: Context, dataset: str) -> Result:
    """Measure the rules on the logits of the dataset's networks."""
    tables, figures, notes = [], {}, []
    for network in (*networks.masking_networks(dataset), networks.band_network(dataset)):
        title = f"{network.label} on {TITLES[dataset]}"
        try:
            logits = context.logits(network.names, dataset)
        except Missing as missing:
            row = Row(label="all rules", ours=(None,) * len(COLUMNS), note=str(missing))
            tables.append(Table(title=title, where=WHERE, columns=COLUMNS, rows=(row,)))
            continue
        anywhere, merged, reasons = measure_rules(logits, context)
        tables += make_tables(logits, title, anywhere, merged, reasons)
        heading, side, rules = f"{network.label} ({logits.model})", patch_side(logits), make_rules(logits)
        figures[f"several_patches_{logits.model}"] = partial(draw, heading, side, rules, anywhere, merged)
        query = masking_query(logits.windows(Patch(patch_side(logits))), CONFIDENCE if has_bands(logits) else LOGITS)
        notes.append(describe_rounding(logits, query, context.device))
    return make_result(
        tables,
        (
            "The paper has no numbers for several patches.",
            "Cell masking, median and trimmed mean are certified without positions (any n cells, wherever they lie): "
            "they would hold for patches of any shape that reach as many cells.",
            *notes,
        ),
        figures,
        {"counts": list(COUNTS)},
    )


# -- rules -------------------------------------------------------------------------------------------------------------


def patch_side(logits: CachedLogits) -> int:
    """Return the side of one patch: the smallest of the paper's for the dataset."""
    return SIDES.get(logits.dataset) or next(iter(networks.patches(logits.dataset, logits.size[0]).values())).height


def has_bands(logits: CachedLogits) -> bool:
    """Whether cells are bands of columns."""
    return logits.grid[0] == 1


def make_rules(logits: CachedLogits) -> dict[str, Callable[[Windows], Query | str]]:
    """Return the rules for patches that may lie anywhere, by name; for some windows a rule gives a reason instead."""
    bands, cells = has_bands(logits), logits.grid[0] * logits.grid[1]
    own = CONFIDENCE if bands else LOGITS  # what the network was trained to be masked by
    signed, votes, bounded = (CONFIDENCE, VOTE, CONFIDENCE) if bands else (SIGNED, PREDICTION, TANH)

    def robust_masking(windows: Windows) -> Query | str:
        too_many = windows.count > 1 and windows.regions > MOST_UNIONS
        return "too many unions" if too_many else masking_query(windows, own)

    def cell_masking(windows: Windows) -> Query | str:
        area = windows.largest_area
        return NO_CELL if area >= cells else rank_query(CellMasking(cells=area, spatial=False), windows, own)

    def trimmed_mean(windows: Windows) -> Query | str:
        area = windows.largest_area
        return NO_CELL if 2 * area >= cells else rank_query(TrimmedMean(trim=area, spatial=False), windows, signed)

    def median(windows: Windows) -> Query | str:
        unlimited = not signed.bounded and 2 * windows.largest_area >= cells
        return NO_CELL if unlimited else rank_query(Median(spatial=False), windows, signed)

    return {
        "robust masking, a mask per patch": robust_masking,
        "cell masking": cell_masking,
        "trimmed mean": trimmed_mean,
        "median": median,
        "sum of confidences" if bands else "clipped sum (CBN)": lambda windows: sum_query(
            ClippedSum(), windows, bounded
        ),
        "majority vote (DS)": lambda windows: sum_query(MajorityVote(), windows, votes),
    }


def measure_rules(logits: CachedLogits, context: Context) -> tuple[Accuracies, Accuracies, dict[tuple[str, int], str]]:
    """Return accuracies for patches anywhere and for patches in one box, and why a rule has none, in one pass."""
    evidence, signed = (CONFIDENCE, CONFIDENCE) if has_bands(logits) else (LOGITS, SIGNED)
    queries: dict[tuple[bool, str, int], Query] = {}
    reasons: dict[tuple[str, int], str] = {}
    for name, rule in make_rules(logits).items():
        for number in COUNTS:
            query = rule(replace(logits.windows(Patch(patch_side(logits))), count=number))
            if isinstance(query, str):
                reasons[name, number] = query
            else:
                queries[False, name, number] = query
    boxes = [side for side in BOXES.get(logits.dataset, PHOTO_BOXES) if side <= min(logits.size)]
    for name, rule, sides in (
        ("robust masking", partial(masking_query, evidence=evidence), boxes),
        # Double masking looks at all pairs of masks: on every other box only.
        ("double masking", partial(double_masking_query, evidence=signed), boxes[1::2]),
    ):
        for side in sides:
            windows = logits.windows(Patch(side))
            if windows.largest_area < logits.grid[0] * logits.grid[1]:
                queries[True, name, side] = rule(windows)
    counts = count(logits, queries, context.device)
    anywhere, merged = (
        {(rule, number): (each.clean, each.robust) for (boxed, rule, number), each in counts.items() if boxed == box}
        for box in (False, True)
    )
    return anywhere, merged, reasons


# -- tables and the figure ---------------------------------------------------------------------------------------------


def make_tables(
    logits: CachedLogits, title: str, anywhere: Accuracies, merged: Accuracies, reasons: Mapping[tuple[str, int], str]
) -> tuple[Table, Table]:
    """Return the two tables of one network: patches anywhere, and patches in one box."""
    rows = []
    for rule in make_rules(logits):
        ours: list[Value] = [value for number in COUNTS for value in anywhere.get((rule, number), (None, None))]
        why = dict.fromkeys(reasons[rule, number] for number in COUNTS if (rule, number) in reasons)
        rows.append(Row(label=rule, ours=tuple(ours), note="; ".join(why)))
    boxes = [
        Row(label=f"{rule}, all within {box} x {box} px", ours=accuracies, note=logits.model)
        for (rule, box), accuracies in merged.items()
    ]
    size = "{0} x {0} px".format(patch_side(logits))
    anywhere_title = f"{title}: patches of {size} anywhere ({logits.model})"
    return (
        Table(title=anywhere_title, where=WHERE, columns=COLUMNS, rows=tuple(rows)),
        Table(title=f"{title}: patches merged into one box", where=WHERE, columns=CLEAN_ROBUST, rows=tuple(boxes)),
    )


COLORS = ("#1f5fa8", "#d9731a", "#3a8f5c", "#8b5fb0", "#777777", "#c22f2f")
MARKERS = ("*", "o", "^", "v", "D", "s")


def draw(heading: str, side: int, rules: Iterable[str], anywhere: Accuracies, merged: Accuracies) -> "Figure":
    """Draw robust accuracy over the number of patches anywhere, and over the box that holds them all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for color, marker, rule in zip(COLORS, MARKERS, rules, strict=True):
        if not any(rule == name for name, _ in anywhere):
            continue
        size = 12 if marker == "*" else 6
        left.plot(*_robust_curve(anywhere, rule), marker=marker, markersize=size, color=color, label=rule)
    left.set_xticks(COUNTS)
    left.set_xlabel(f"patches of {side} x {side} pixels, anywhere")
    left.set_ylabel("certified accuracy, %")
    left.set_title("Patches anywhere", loc="left", fontsize=11)
    for color, rule in zip(COLORS[:1] + COLORS[-1:], dict.fromkeys(rule for rule, _ in merged), strict=False):
        right.plot(*_robust_curve(merged, rule), marker="s", linestyle="--", color=color, label=rule)
    right.set_xlabel("side of the box that holds all patches, pixels")
    right.set_title("Any number of patches, merged into one box", loc="left", fontsize=11)
    left.set_ylim(0, 100)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return figure


def _robust_curve(accuracies: Accuracies, rule: str) -> tuple[list[int], list[float]]:
    points = {number: robust for (name, number), (_, robust) in accuracies.items() if name == rule}
    return list(points), [to_percent(robust) or 0.0 for robust in points.values()]
