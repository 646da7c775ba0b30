"""Several patches at once (apx-multiple-patch): merged into one, cells masked one by one, other secure sums.

The paper claims, without numbers: (1) patches that lie close together can be merged into one larger patch, and
robustness is lost where that one grows too large; (2) masking the alpha strongest cells of each class, wherever they
are, works for any number of patches, at a lower bound on the true class that costs provable accuracy; (3) bounded sums,
as those of CBN and DS, handle several patches, too.

Ours: each of these rules on the maps, for one, two and three patches of the smallest size that the paper has for the
set. For bands of columns, whose windows lie on one axis, robust masking with masks of two boxes against two patches is
cheap enough to be exact at 32 columns, which the paper does not consider; where there are too many masks to go through,
the row says so. Numbers are in the tables; `docs/theory.md` has the theorems.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from patchguard.defenses import CellMasking, ClippedSum, MajorityVote, Median, RobustMasking, TrimmedMean
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.paper import models
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table, percent
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network
from patchguard.paper.tally import (
    CONFIDENCE,
    LOGITS,
    PREDICTION,
    SIGNED,
    TANH,
    VOTE,
    Question,
    count,
    double_masking,
    masking,
    rounding,
    told,
)
from patchguard.patch import Patch
from patchguard.runs.metrics import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "apx-multiple-patch"
COUNTS = (1, 2, 3)
SIDES = {"cifar10": 2}  # of each patch; for photos 1 % of 224 or 299 px
BOXES = {"cifar10": (2, 4, 6, 8, 12, 16)}  # sides of the box that holds all patches
PHOTO_BOXES = (23, 32, 48, 64, 96, 128)
ENUMERATED = 2000  # unions of windows up to which masks of several boxes are tried

Rule = Callable[[Windows], Question]


def run(context: Context, dataset: str) -> Result:
    """Measure the rules on the maps of the set's networks."""
    context.images(dataset)
    studies, notes = [], []
    for network in (*models.maskers(dataset), models.bands(dataset)):
        try:
            maps = context.maps(network.names, dataset)
        except Missing as missing:
            studies.append(Study(network=network, why=str(missing)))
            continue
        studies.append(studied(maps, network, context))
        question = masking(maps.windows(Patch(side_of(maps))), _evidence(maps))
        notes.append(told(rounding(maps, question, context.device), maps.model))
    ran = [study for study in studies if not study.why]
    return Result(
        tables=tuple(table for study in studies for table in study.tables(TITLES[dataset])),
        figures={f"several_patches_{study.model}": study.figure for study in ran},
        notes=(
            "The paper has no numbers for several patches.",
            "Cell masking, median and trimmed mean are certified without positions (any n cells, wherever they lie): "
            "they would hold for patches of any shape that reach as many cells.",
            *notes,
        ),
        settings={"counts": list(COUNTS)},
    )


# -- rules -------------------------------------------------------------------------------------------------------------


def side_of(maps: Maps) -> int:
    """Return the side of one patch: the smallest of the paper's for the set."""
    return SIDES.get(maps.dataset) or next(iter(models.patches(maps.dataset, maps.size[0]).values())).height


def boxes_of(maps: Maps) -> tuple[int, ...]:
    """Return the sides of boxes that may hold all patches and fit the image."""
    return tuple(side for side in BOXES.get(maps.dataset, PHOTO_BOXES) if side <= min(maps.size))


def _evidence(maps: Maps) -> Evidence:
    """What the network was trained to be masked by: confidences of bands, else logits from 0 on."""
    return CONFIDENCE if bands(maps) else LOGITS


def bands(maps: Maps) -> bool:
    """Whether cells are bands of columns."""
    return maps.grid[0] == 1


def rules(maps: Maps) -> dict[str, Rule]:
    """Return the rules for patches that may lie anywhere, by name."""
    own = _evidence(maps)
    signed = CONFIDENCE if bands(maps) else SIGNED
    votes = VOTE if bands(maps) else PREDICTION
    return {
        "robust masking, a mask per patch": lambda windows: masking(windows, own),
        "cell masking": lambda windows: Question(
            evidence=own, defense=CellMasking(cells=windows.largest_area, spatial=False), windows=windows
        ),
        "trimmed mean": lambda windows: Question(
            evidence=signed, defense=TrimmedMean(trim=windows.largest_area, spatial=False), windows=windows
        ),
        "median": lambda windows: Question(evidence=signed, defense=Median(spatial=False), windows=windows),
        "sum of confidences" if bands(maps) else "clipped sum (CBN)": lambda windows: Question(
            evidence=CONFIDENCE if bands(maps) else TANH, defense=ClippedSum(), windows=windows
        ),
        "majority vote (DS)": lambda windows: Question(evidence=votes, defense=MajorityVote(), windows=windows),
    }


def possible(question: Question, grid: tuple[int, int]) -> str:
    """Return why a rule cannot answer for its windows; empty where it can."""
    windows, defense = question.windows, question.defense
    assert windows is not None
    cells, taken = grid[0] * grid[1], windows.largest_area
    if isinstance(defense, RobustMasking) and windows.count > 1 and windows.regions > ENUMERATED:
        return "too many unions"
    if isinstance(defense, CellMasking) and taken >= cells:
        return "no cell left"
    if isinstance(defense, TrimmedMean) and 2 * taken >= cells:
        return "no cell left"
    if isinstance(defense, Median) and not question.evidence.bounded and 2 * taken >= cells:
        return "no cell left"
    return ""


# -- one network -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Study:
    """What was found for one network: shares by rule and number of patches, and by box; or why there is nothing.

    An entry of `anywhere` is (clean, robust), or the reason why the rule gives none.
    """

    network: Network
    why: str = ""
    model: str = ""
    side: int = 0
    anywhere: Mapping[tuple[str, int], tuple[Share, Share] | str] | None = None
    merged: Mapping[tuple[str, int], tuple[Share, Share]] | None = None

    def tables(self, title: str) -> tuple[Table, ...]:
        """Return the two tables."""
        where, name = WHERE, self.network.label
        columns = tuple(f"{number} {kind}" for number in COUNTS for kind in ("clean", "robust"))
        if self.why:
            nothing = Row(label="all rules", ours=(None,) * len(columns), note=self.why)
            return (Table(title=f"{name} on {title}", where=where, columns=columns, rows=(nothing,)),)
        found, merged = self.anywhere or {}, self.merged or {}
        rows = []
        for rule in dict.fromkeys(rule for rule, _ in found):
            entries = [found[rule, number] for number in COUNTS]
            reasons = dict.fromkeys(entry for entry in entries if isinstance(entry, str))
            ours: list[Any] = [
                value for entry in entries for value in ((None, None) if isinstance(entry, str) else entry)
            ]
            rows.append(Row(label=rule, ours=tuple(ours), note="; ".join(reasons)))
        boxes = [
            Row(label=f"{rule}, all within {box} x {box} px", ours=merged[rule, box], note=self.model)
            for rule, box in merged
        ]
        size = f"{self.side} x {self.side} px"
        return (
            Table(
                title=f"{name} on {title}: patches of {size} anywhere ({self.model})",
                where=where,
                columns=columns,
                rows=tuple(rows),
            ),
            Table(
                title=f"{name} on {title}: patches merged into one box",
                where=where,
                columns=("clean", "robust"),
                rows=tuple(boxes),
            ),
        )

    def figure(self) -> "Figure":
        """Return robust accuracy over the number of patches anywhere, and over the box that holds them all."""
        return draw(self)


def studied(maps: Maps, network: Network, context: Context) -> Study:
    """Measure all rules on the maps of one network, in one pass."""
    side = side_of(maps)
    questions: dict[tuple[str, int], Question] = {}
    answers: dict[tuple[str, int], tuple[Share, Share] | str] = {}
    for name, rule in rules(maps).items():
        for number in COUNTS:
            windows = replace(maps.windows(Patch(side)), count=number)
            reason = possible(rule(windows), maps.grid)
            answers[name, number] = reason
            if not reason:
                questions[name, number] = rule(windows)
    boxed = {"robust masking": lambda windows: masking(windows, _evidence(maps)), "double masking": _double(maps)}
    merged = {
        (name, box): rule(maps.windows(Patch(box)))
        for name, rule in boxed.items()
        # Double masking looks at all pairs of masks: on every other box only.
        for box in (boxes_of(maps) if name == "robust masking" else boxes_of(maps)[1::2])
        if maps.windows(Patch(box)).largest_area < maps.grid[0] * maps.grid[1]
    }
    tagged: dict[tuple[bool, str, int], Question] = {
        **{(False, *key): question for key, question in questions.items()},
        **{(True, *key): question for key, question in merged.items()},
    }
    found = count(maps, tagged, context.device)
    for key in questions:
        answers[key] = (found[False, *key].clean, found[False, *key].robust)
    return Study(
        network=network,
        model=maps.model,
        side=side,
        anywhere=answers,
        merged={key: (found[True, *key].clean, found[True, *key].robust) for key in merged},
    )


def _double(maps: Maps) -> Rule:
    return lambda windows: double_masking(windows, CONFIDENCE if bands(maps) else SIGNED)


# -- the figure --------------------------------------------------------------------------------------------------------

COLOURS = ("#1f5fa8", "#d9731a", "#3a8f5c", "#8b5fb0", "#777777", "#c22f2f")
MARKERS = ("*", "o", "^", "v", "D", "s")


def draw(study: Study) -> "Figure":
    """Draw both panels with one scale."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 4), layout="constrained")
    left, right = made.subplots(1, 2, sharey=True)
    found, merged = study.anywhere or {}, study.merged or {}
    for colour, marker, rule in zip(COLOURS, MARKERS, dict.fromkeys(rule for rule, _ in found), strict=True):
        entries = [(number, found[rule, number]) for number in COUNTS]
        points = [(number, percent(entry[1])) for number, entry in entries if not isinstance(entry, str)]
        if points:
            numbers, shares = zip(*points, strict=True)
            left.plot(numbers, shares, marker=marker, markersize=12 if marker == "*" else 6, color=colour, label=rule)
    left.set_xticks(COUNTS)
    left.set_xlabel(f"patches of {study.side} x {study.side} pixels, anywhere")
    left.set_ylabel("certified accuracy, %")
    left.set_title("Patches anywhere", loc="left", fontsize=11)
    for colour, rule in zip(COLOURS[:1] + COLOURS[-1:], dict.fromkeys(rule for rule, _ in merged), strict=False):
        boxes = [box for name, box in merged if name == rule]
        right.plot(boxes, _shares(merged, rule, boxes), marker="s", linestyle="--", color=colour, label=rule)
    right.set_xlabel("side of the box that holds all patches, pixels")
    right.set_title("Any number of patches, merged into one box", loc="left", fontsize=11)
    left.set_ylim(0, 100)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    made.suptitle(f"{study.network.label} ({study.model})", fontsize=11)
    return made


def _shares(merged: Mapping[tuple[str, int], tuple[Share, Share]], rule: str, boxes: Sequence[int]) -> list[float]:
    return [percent(merged[rule, box][1]) or 0.0 for box in boxes]
