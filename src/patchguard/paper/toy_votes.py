"""The toy example of the appendix on generalisation: what a proof gains by knowing that a patch is in one place.

The paper claims (apx-generalization): of the local predictions C C W C C W C C W C C an adversary rewrites 3. Votes
are 8 to 3; the gap of 5 is below 2 x 3, so de-randomized smoothing (DS) cannot certify the image. But the 3 are
neighbours, the worst attack leaves 6 to 5, and robust masking certifies it.

Ours: all of that is so, number by number. The vote itself is not to blame, though: the same vote with a proof that
looks at neighbours certifies the image, too. And of all 2^11 vectors of 11 predictions this is the only one for which
the places matter: there are 67 that DS certifies, and 68 that its vote with the exact proof or robust masking do.
Double masking certifies 112.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from patchguard.defenses import Defense, DoubleMasking, MajorityVote, RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.paper.case_figures import BLUE, ORANGE
from patchguard.paper.context import Context
from patchguard.paper.experiment import Result, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VOTES = "CCWCCWCCWCC"
CORRUPTED = 3
WHERE = "apx-generalization"
RIGHT = 0  # the class C; W is class 1
PREDICTION = Evidence(kind="prediction")


# What the appendix says of the example; 2 x 3 is what the published proof of DS demands of the gap.
PUBLISHED = {
    "votes for C": 8,
    "votes for W": 3,
    "gap": 5,
    "gap that DS needs": 6,
    "worst patch, C": 6,
    "worst patch, W": 5,
}


def run(context: Context, dataset: str) -> Result:
    """Compute the numbers of the example, and count over all vectors of its length."""
    right, wrong = Attack((), VOTES).counts
    after = worst_neighbours().counts
    ours = (right, wrong, right - wrong, 2 * CORRUPTED, *after)
    numbers = tuple(
        Row(label=label, ours=(mine,), published=(theirs,))
        for (label, theirs), mine in zip(PUBLISHED.items(), ours, strict=True)
    )
    found, counted = margins([VOTES], CORRUPTED), census()
    proofs = tuple(
        Row(label=name, ours=("yes" if margin > 0 else "no", margin, counted[name]))
        for name, (margin,) in found.items()
    )
    columns = ("certified", "margin", f"certified of all {2 ** len(VOTES):,} vectors")
    return Result(
        tables=(
            Table(
                title=f"Votes {VOTES}, {CORRUPTED} corrupted",
                where=WHERE,
                columns=("votes",),
                rows=numbers,
                unit="other",
            ),
            Table(title="Proofs about them", where="", columns=columns, rows=proofs, unit="other"),
        ),
        figures={"toy_example": figure},
        notes=(
            "The paper's conclusion holds: DS does not certify the example, robust masking does.",
            "The gain is the proof's: the vote of DS with its exact proof certifies the same as robust masking.",
            f"Of all {2 ** len(VOTES):,} vectors of {len(VOTES)} predictions only the example shows a difference.",
        ),
        settings={"votes": VOTES, "corrupted": CORRUPTED},
    )


def rules(cells: int, corrupted: int) -> dict[str, Defense[Any]]:
    """Return the rules that the table compares, for a line of cells of which so many neighbours are corrupted."""
    masks = _windows(cells, corrupted)
    return {
        "DS, published proof": MajorityVote(spatial=False),
        "DS, exact proof": MajorityVote(),
        "robust masking, T = 1": RobustMasking(masks=masks, threshold=Fraction(1)),
        "robust masking, T = 0": RobustMasking(masks=masks),
        "double masking": DoubleMasking(masks=masks),
    }


def maps(vectors: Sequence[str]) -> Float[Tensor, "vectors 2 1 cells"]:
    """Return local logits of two classes whose argmax says C or W, one cell per letter."""
    right = torch.tensor([[letter == "C" for letter in votes] for votes in vectors], dtype=torch.float32)
    return torch.stack([right, 1 - right], dim=1).unsqueeze(2)


def margins(vectors: Sequence[str], corrupted: int) -> dict[str, list[float]]:
    """Return, by rule, the margin of the class C for each vector: above 0 it is certified."""
    cells = len(vectors[0])
    evidence, windows = PREDICTION(maps(vectors)), _windows(cells, corrupted)
    return {
        name: rule.certify(evidence, windows, label=RIGHT).margin.tolist()
        for name, rule in rules(cells, corrupted).items()
    }


def census(cells: int = len(VOTES), corrupted: int = CORRUPTED) -> dict[str, int]:
    """Return, by rule, how many of all vectors of C and W it certifies as C."""
    found = margins(["".join(letters) for letters in product("CW", repeat=cells)], corrupted)
    return {name: sum(margin > 0 for margin in each) for name, each in found.items()}


@final
@dataclass(frozen=True)
class Attack:
    """Cells that an adversary turned into W, and the votes then."""

    cells: tuple[int, ...]
    votes: str

    @property
    def counts(self) -> tuple[int, int]:
        """Votes for C and for W."""
        return self.votes.count("C"), self.votes.count("W")


def attacked(votes: str, cells: Sequence[int]) -> Attack:
    """Return the votes once these cells say W."""
    return Attack(tuple(cells), "".join("W" if place in cells else vote for place, vote in enumerate(votes)))


def worst_neighbours(votes: str = VOTES, corrupted: int = CORRUPTED) -> Attack:
    """Return the best attack on neighbouring cells: the one that leaves the fewest C, of these the middle one."""
    tried = [attacked(votes, range(first, first + corrupted)) for first in range(len(votes) - corrupted + 1)]
    least = min(attack.counts[0] for attack in tried)
    best = [attack for attack in tried if attack.counts[0] == least]
    return best[len(best) // 2]


def worst_anywhere(votes: str = VOTES, corrupted: int = CORRUPTED) -> Attack:
    """Return an attack on any cells, which the published proof of DS allows for and no patch can make."""
    right = [place for place, vote in enumerate(votes) if vote == "C"]
    step = max(1, (len(right) - 1) // max(1, corrupted - 1))
    return attacked(votes, right[::step][:corrupted])


def masked_scores(votes: str, corrupted: int = CORRUPTED) -> tuple[int, int]:
    """Return the scores of C and W under robust masking (T = 0): votes, less the most that one window holds."""
    scores = RobustMasking(masks=_windows(len(votes), corrupted)).predict(PREDICTION(maps([votes]))).scores[0]
    return int(scores[0]), int(scores[1])


def _windows(cells: int, corrupted: int) -> Windows:
    return Windows.sliding(grid=(1, cells), size=(1, corrupted))


# -- the figure --------------------------------------------------------------------------------------------------------


def figure(votes: str = VOTES, corrupted: int = CORRUPTED) -> "Figure":
    """Return the votes, the worst attack that a patch can make, and the one that the proof of DS allows for."""
    from matplotlib.figure import Figure

    near, anywhere = worst_neighbours(votes, corrupted), worst_anywhere(votes, corrupted)
    clean = Attack((), votes)
    scores = masked_scores(near.votes, corrupted)
    lines = [
        (clean, "the image", "{} C, {} W".format(*clean.counts)),
        (near, f"worst patch: {corrupted} neighbours", "{} C, {} W: C wins.".format(*near.counts)),
        (anywhere, f"DS's proof allows any {corrupted}", "{} C, {} W: C loses.".format(*anywhere.counts)),
    ]
    lines[1] = (*lines[1][:2], lines[1][2] + "\nMasked, {} to {}: C wins.".format(*scores))
    lines[2] = (*lines[2][:2], lines[2][2] + "\nBut no patch does this.")
    made = Figure(figsize=(9, 2.6), layout="constrained")
    axes = made.subplots()
    for row, (attack, name, outcome) in enumerate(lines):
        _line(axes, -1.6 * row, attack)
        axes.text(-0.4, -1.6 * row, name, ha="right", va="center", fontsize=10)
        axes.text(len(votes) + 0.2, -1.6 * row, outcome, ha="left", va="center", fontsize=10)
    axes.set_xlim(-5.2, len(votes) + 4.6)
    axes.set_ylim(-1.6 * (len(lines) - 1) - 0.8, 0.8)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("A patch rewrites neighbours: a proof that forgets this gives the image up", loc="left", fontsize=11)
    return made


def _line(axes: "Axes", height: float, attack: Attack) -> None:
    from matplotlib.patches import Rectangle

    for place, vote in enumerate(attack.votes):
        colour = BLUE if vote == "C" else ORANGE
        axes.add_patch(Rectangle((place - 0.02, height - 0.5), 0.94, 1, facecolor=colour, edgecolor="white"))
        axes.text(place + 0.45, height, vote, ha="center", va="center", color="white", fontweight="bold")
        if place in attack.cells:
            box = (place - 0.02, height - 0.5)
            axes.add_patch(Rectangle(box, 0.94, 1, fill=False, edgecolor="black", linewidth=2, zorder=3))
