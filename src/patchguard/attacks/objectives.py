"""Attack objectives: differentiable functions of local logits, the larger the worse for the defense.

An attack on a defended model must follow the defense, or it increases what the defense hides. Values here are those of
the rule (up to fixed point); only gradients are softened, so that hidden cells and saturated evidence still contribute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.defenses import (
    CellMasking,
    Defense,
    DoubleMasking,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
)
from patchguard.defenses.base import gather
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows

LEAK = 0.1  # fraction of the gradient that passes where the rule lets none through
FEW = 8  # classes that a pair of masks is compared against; others are far behind

Maps: TypeAlias = Float[Tensor, "batch classes rows columns"]
Scores: TypeAlias = Float[Tensor, " batch"]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Goal:
    """The true class, the class to be predicted instead (None: any other), and the cells that the patch reaches."""

    target: Int64[Tensor, " batch"]
    aim: Int64[Tensor, " batch"] | None = None
    owned: Bool[Tensor, "batch rows columns"] | None = None

    def __getitem__(self, rows: Tensor | slice) -> "Goal":
        """Return some of the images."""
        aim, owned = (None if each is None else each[rows] for each in (self.aim, self.owned))
        return Goal(target=self.target[rows], aim=aim, owned=owned)


# -- undefended --------------------------------------------------------------------------------------------------------


def cross_entropy(local_logits: Maps, goal: Goal) -> Scores:
    """Equations 2 and 3 of the paper, on the mean of the local logits: away from the target, or towards the aim."""
    logits = local_logits.float().mean((2, 3))
    if goal.aim is None:
        return F.cross_entropy(logits, goal.target, reduction="none")
    return -F.cross_entropy(logits, goal.aim, reduction="none")


def margin(scores: Float[Tensor, "batch classes"], goal: Goal) -> Scores:
    """How far the aim leads all others; without an aim, how far the strongest other class leads the target."""
    if goal.aim is not None:
        return select_class(scores, goal.aim) - scores.scatter(1, goal.aim.unsqueeze(1), -torch.inf).amax(1)
    return scores.scatter(1, goal.target.unsqueeze(1), -torch.inf).amax(1) - select_class(scores, goal.target)


def select_class(values: Float[Tensor, "batch classes *rest"], label: Int64[Tensor, " batch"]) -> Tensor:
    """Return the entries of one class for each image."""
    return values[torch.arange(len(label), device=label.device), label]


# -- evidence ----------------------------------------------------------------------------------------------------------


def soft_evidence(evidence: Evidence, local_logits: Maps) -> Maps:
    """Return the values of `evidence` in its own units, unrounded, with gradients that never die out.

    Votes and confidences saturate exponentially in the logits; their gradients are replaced by those of x / (1 + |x|),
    x being how far the class is above the threshold in log odds. Clipped logits let the fraction `LEAK` through.
    """
    logits = local_logits.float()
    if evidence.kind == "logits":
        clipped = logits.clamp(evidence.low, evidence.high) if _clips(evidence) else logits
        return clipped + LEAK * (logits - clipped - (logits - clipped).detach())
    if evidence.kind == "tanh":
        hard, soft = torch.tanh(0.05 * logits - 1), F.softsign(0.05 * logits - 1)
    elif evidence.kind == "prediction":
        first = logits.topk(2, dim=1).values
        ahead = logits - torch.where(logits == first[:, :1], first[:, 1:], first[:, :1])
        winner = F.one_hot(logits.argmax(1), logits.shape[1]).movedim(-1, 1)
        hard, soft = winner.float(), 0.5 * F.softsign(ahead)
    else:
        odds = _log_odds(logits)
        threshold = evidence.threshold if evidence.kind == "vote" else 0.5
        bar = float(np.log(threshold / max(1 - threshold, 1e-6)))
        hard = (odds >= bar).float() if evidence.kind == "vote" else odds.sigmoid()
        soft = 0.5 * F.softsign(odds - bar)
    return hard.detach() + soft - soft.detach()


def _clips(evidence: Evidence) -> bool:
    return evidence.low is not None or evidence.high is not None


def _log_odds(logits: Maps) -> Maps:
    """log p_k / (1 - p_k), without the rounding of 1 - p_k to 0."""
    log_p = logits.log_softmax(1)
    rest = torch.log1p(-log_p.exp().clamp(max=1 - 1e-7))
    # Where one class has nearly everything, what is left over is the sum of all others.
    first, second = (each.unsqueeze(1) for each in logits.topk(2, dim=1).values.unbind(1))
    return torch.where(log_p > -1e-3, logits - torch.where(logits == first, second, first), log_p - rest)


# -- surrogates of defended rules --------------------------------------------------------------------------------------


def sum_score(defense: Any, soft: Maps, goal: Goal) -> Scores:
    """Return the margin of S_k = sum_i u_k(i)."""
    return margin(soft.sum((2, 3)), goal)


def masked_score(defense: RobustMasking, soft: Maps, goal: Goal) -> Scores:
    """Return the margin of s_k = S_k - H_k if H_k > T S_k else S_k, with a leak through the mask."""
    total = soft.sum((2, 3))
    hidden = box_sums(soft, defense.masks).amax(2)
    leak = LEAK * (hidden - hidden.detach())
    return margin(torch.where(hidden > float(defense.threshold) * total, total - hidden + leak, total), goal)


def rank_score(defense: CellMasking | Median | TrimmedMean, soft: Maps, goal: Goal) -> Scores:
    """Return the margin of the sum of the cells whose ranks count, with a leak through the others."""
    cells = soft.flatten(2)
    first, last = defense.ranks(cells.shape[2])
    counted = cells.sort(dim=2).values[..., first - 1 : last].sum(2)
    total = cells.sum(2)
    return margin(counted + LEAK * (total - total.detach()), goal)


def pair_score(defense: DoubleMasking, soft: Maps, goal: Goal) -> Scores:
    r"""How far the aim c leads under one mask m and every second mask: double masking then answers c.

        max over m of  - max over m', k != c of  [ (S_k - S_c)(outside m and m') + (tau if m' = m else 0) ],
        score = that for the m that leaves the target y least, once the patch's own cells are gone, less the mean
                of what is lacking where it is.

    A second mask may hide the whole patch, so c must lead outside m and the patch as the image is: which m allows it
    is known beforehand, and whether some m does is what the certificate decides at tau 0. What is left to the patch is
    to make c lead for the second masks that do not hide it. Where no m allows it, and only tau keeps the masks around
    the patch from being believed for y, c must win most single masks instead: the same objective leads there, too.
    """
    aim = goal.aim if goal.aim is not None else strongest(soft, goal.target)
    gap = select_class(soft, goal.target) - select_class(soft, aim)
    rest = gap.detach() if goal.owned is None else gap.detach().masked_fill(goal.owned, 0)
    first = box_sums(rest.unsqueeze(1), defense.masks).squeeze(1).argmax(1)
    visible = ~_cells(defense.masks, soft.device)[first]
    required = defense.tau * F.one_hot(first, len(_cells(defense.masks, soft.device)))
    return _worst_mask_score(defense.masks, soft, aim, goal.target, visible, required)


def agreement_score(defense: MaskedAgreement, soft: Maps, goal: Goal) -> Scores:
    """How far the aim leads outside every mask: the label is then the aim and no mask raises an alert."""
    aim = goal.aim if goal.aim is not None else strongest(soft, goal.target)
    return _worst_mask_score(defense.masks, soft, aim, goal.target, None)


def _worst_mask_score(
    masks: Windows, soft: Maps, aim: Tensor, target: Tensor, visible: Tensor | None, required: Tensor | float = 0.0
) -> Scores:
    others = _others(soft, aim, target)
    lead = gather(soft, others) - select_class(soft, aim).unsqueeze(1)  # of the others over the aim
    plain = lead.sum((2, 3)).amax(1)
    lead = lead if visible is None else lead * visible.unsqueeze(1)
    outside = (lead.sum((2, 3)).unsqueeze(2) - box_sums(lead, masks)).amax(1) + required  # batch, masks
    lacking = outside.clamp(min=0).sum(1) / (outside > 0).sum(1).clamp(min=1)
    return -(outside.amax(1) + lacking + LEAK * (plain - plain.detach()))


def strongest(soft: Maps, target: Tensor) -> Int64[Tensor, " batch"]:
    """Return the class other than the target with the most evidence."""
    return soft.detach().sum((2, 3)).scatter(1, target.unsqueeze(1), -torch.inf).argmax(1)


def _others(soft: Maps, aim: Tensor, target: Tensor) -> Int64[Tensor, "batch some"]:
    """The target and the strongest further classes, without the aim."""
    total = soft.detach().sum((2, 3))
    total = total.scatter(1, target.unsqueeze(1), torch.inf).scatter(1, aim.unsqueeze(1), -torch.inf)
    return total.topk(min(FEW, total.shape[1] - 1), dim=1).indices


@final
@dataclass(frozen=True)
class Surrogate:
    """How to attack a rule: `score(defense, soft evidence, goal)` is positive where the rule fails.

    `needs_bait(defense)` says whether an attacker of the evidence may win by raising the label's own evidence, so that
    a mask is drawn away from the rival.
    """

    score: Callable[[Any, Maps, Goal], Scores] = sum_score
    needs_bait: Callable[[Any], bool] = lambda defense: False


# One entry per rule that is more than a sum of evidence. A defense that is not listed is attacked as a sum, which is
# weaker than an attack that follows it, and never wrong: success is always judged by the defense itself.
SURROGATES: dict[type, Surrogate] = {
    RobustMasking: Surrogate(masked_score, needs_bait=lambda defense: defense.threshold > 0),
    CellMasking: Surrogate(rank_score),
    Median: Surrogate(rank_score),
    TrimmedMean: Surrogate(rank_score),
    DoubleMasking: Surrogate(pair_score),
    MaskedAgreement: Surrogate(agreement_score),
}


def find_surrogate(defense: Defense[Any]) -> Surrogate:
    """Return the surrogate of a defense; of one that is not listed, the plain sum of evidence."""
    return SURROGATES.get(type(defense), Surrogate())


def defended_score(defense: Defense[Any], evidence: Evidence, local_logits: Maps, goal: Goal) -> Scores:
    """Return how close the defended answer is to the aim, or to any class but the target."""
    return find_surrogate(defense).score(defense, soft_evidence(evidence, local_logits), goal)


def witness_score(
    evidence: Evidence,
    local_logits: Maps,
    goal: Goal,
    witness: Float[Tensor, "batch 2 rows columns"],
) -> Scores:
    """Minus the distance, in the patch's cells, of the target's and the aim's evidence from what a witness holds."""
    if goal.aim is None or goal.owned is None:
        raise ValueError("a witness needs an aim and the cells it was written into")
    soft = soft_evidence(evidence, local_logits)
    values = torch.stack([select_class(soft, goal.target), select_class(soft, goal.aim)], 1)
    return -((values - witness).abs() * goal.owned.unsqueeze(1)).sum((1, 2, 3))


# -- sums over boxes, with gradients -----------------------------------------------------------------------------------


def box_sums(maps: Maps, windows: Windows) -> Float[Tensor, "batch classes regions"]:
    """Return the sum of each map over each region."""
    if windows.count == 1 and windows.pairs is None:
        rows, columns = _indicators(windows, maps.device)
        return (rows @ maps @ columns).flatten(2)
    return maps.flatten(2) @ _cells(windows, maps.device).flatten(1).to(maps.dtype).T


@lru_cache(maxsize=16)
def _indicators(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    indicators = []
    for intervals, size in zip((windows.rows, windows.columns), windows.grid, strict=True):
        starts, stops = np.array(intervals).T
        inside = (np.arange(size)[None] - starts[:, None]) % size < (stops - starts)[:, None]
        indicators.append(torch.from_numpy(inside).to(device).float())
    return indicators[0], indicators[1].T.contiguous()


@lru_cache(maxsize=16)
def _cells(windows: Windows, device: torch.device) -> Bool[Tensor, "regions rows columns"]:
    return torch.from_numpy(windows.cells).view(-1, *windows.grid).to(device)
