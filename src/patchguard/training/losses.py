r"""Losses on the evidence map of a batch: plain, and at the place where a certificate is weakest.

Symbols.  e_k(i) is the evidence of class k in cell i, not rounded: local logits, clipped from below where the defense
          clips them, or confidences, or votes. y is the target, w, v, m are masks (boxes of cells), and S_k(A) = sum
          over i in A of e_k(i). CE(s) is the `CrossEntropy` of scores: -log softmax(s)_y, averaged over the batch.

Which mask is the worst is chosen without a gradient; the gradient then flows through the sums at that choice. A sum
over visible cells is divided by their number, so that all losses share the scale of the mean evidence. Everything is
float32, whatever the precision of the network, and nothing waits for the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.errors import InputError, nearest
from patchguard.geometry.windows import Windows

Map: TypeAlias = Float[Tensor, "batch classes rows columns"]
Targets: TypeAlias = Int64[Tensor, " batch"]
Boxes: TypeAlias = Int64[Tensor, "masks 4"]
Scalar: TypeAlias = Float[Tensor, ""]

ELEMENTS = 2**27  # sums held at once while pairs are compared: half a gigabyte
LEAST_CONFIDENCE = 1e-4  # means below it get no gradient: the logarithm of 0 would teach nothing


@final
@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of scores with the target distribution, averaged over the batch.

    Rule.  Scores s are logits, or, with `probabilities`, means of confidences or votes, of which the logarithm is
           taken. The target distribution is (1 - distill_weight) l_k + distill_weight q_k, where q is the answer of a
           teacher; without a teacher, l alone. A fraction `label_smoothing` of it is spread over all classes.
           l_k = 1[k = y], unless mixup gives `soft_labels`.
    """

    label_smoothing: float = 0.0
    teacher: Float[Tensor, "batch classes"] | None = None
    distill_weight: float = 0.5
    soft_labels: Float[Tensor, "batch classes"] | None = None
    probabilities: bool = False

    def __call__(self, scores: Float[Tensor, "batch classes *cells"], target: Targets) -> Scalar:
        """Return the cross-entropy of scores, of each image or of each of its cells."""
        if self.probabilities:
            scores = scores.clamp(min=LEAST_CONFIDENCE).log()
        labels = F.one_hot(target, scores.shape[1]) if self.soft_labels is None else self.soft_labels
        expected = labels.to(scores.dtype)
        if self.teacher is not None:
            expected = torch.lerp(expected, self.teacher.to(scores.dtype), self.distill_weight)
        expected = expected.view(*expected.shape, *(1 for _ in scores.shape[2:])).expand_as(scores)
        return F.cross_entropy(scores, expected, label_smoothing=self.label_smoothing)


HARD = CrossEntropy()
Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor, CrossEntropy], Tensor]


def to_boxes(masks: Windows, device: torch.device | None = None) -> Boxes:
    """Return masks as rows (row start, row stop, column start, column stop)."""
    if any(masks.wrap) or masks.count != 1:
        raise InputError("`masks` of a loss must be single boxes on a grid that does not wrap around.")
    return torch.from_numpy(masks.boxes).to(device)


# -- the losses --------------------------------------------------------------------------------------------------------


def plain(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    """Cross-entropy of the mean evidence: CE(S(all cells) / number of cells). `boxes` plays no part."""
    return criterion(evidence.float().mean((2, 3)), target)


def local(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    """Cross-entropy of every cell by itself: how the base classifier of an ablation learns. `boxes` plays no part.

    It is always taken on logits: -log of a cell's confidence in the target.
    """
    return replace(criterion, probabilities=False)(evidence.float(), target)


def double_masking(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    r"""Cross-entropy at the pair of masks with the smallest margin.

        (m, m') = argmin over pairs, m = m' included, of  min over k != y of  (S_y - S_k)(outside m and m')
        loss    = CE( S(outside m and m') / number of cells outside )

    That smallest margin over all masks is, where positive, the margin of `DoubleMasking.certify` at `tau` 0.
    """
    pair = find_worst_pair(evidence, target, boxes)
    return criterion(mean_outside(evidence, pair), target)


def claims(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    r"""Cross-entropy at the pair of masks that a wrong claim of double masking would lose first.

        A(m)    = max over masks m' of  min over k != y of  (S_y - S_k)(outside m and m')
        (m, m') = argmin over m of A(m), and the m' that attains it
        loss    = CE( S(outside m and m') / number of cells outside )

    A mask m is believed against the majority only if its label holds behind every second mask. Where A(m) > 0 for every
    m, the target leads behind one of them, and no other label is believed: what costs double masking clean accuracy.
    """
    pair = find_wrong_claim(evidence, target, boxes)
    return criterion(mean_outside(evidence, pair), target)


def provable(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    """Provable adversarial training: hide, from every class, the window that says most for the target.

        w = argmax over masks of S_y(w),    loss = CE( S(outside w) / number of cells outside )

    The evidence should be clipped at 0, as the paper does.
    """
    window = find_strongest_window(evidence, target, boxes)
    return criterion(mean_outside(evidence, window.unsqueeze(1)), target)


def robust_masking(evidence: Map, target: Targets, boxes: Boxes, criterion: CrossEntropy = HARD) -> Scalar:
    r"""Cross-entropy at the exact worst window of Algorithm 2 (threshold 0), on evidence of at least 0.

    v(w) = argmax over masks v of  S_y(v outside w)              the mask that the defense then puts on y
    LB(w) = S_y(outside w and v(w)),    UB_k(w) = S_k(outside w)
    w    = argmin over masks of  LB(w) - max over k != y of UB_k(w)
    loss = CE( s / number of cells outside w )    with  s_y = LB(w), s_k = UB_k(w)
    """
    window, hidden = find_worst_window(evidence, target, boxes)
    values = evidence.float()
    seen = select_outside(window.unsqueeze(1), values)
    upper = (values * seen).sum((2, 3))
    lower = (values * select_outside(torch.stack([window, hidden], 1), values)).sum((2, 3))
    own = F.one_hot(target, evidence.shape[1]).bool()
    scores = torch.where(own, lower, upper) / seen.sum((2, 3)).clamp(min=1)
    return criterion(scores, target)


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "local": local,
    "double_masking": double_masking,
    "claims": claims,
    "provable": provable,
    "robust_masking": robust_masking,
}


INTERVAL = "interval"  # on bounds in place of evidence: guards/interval_loss.py


def combine(
    weights: Mapping[str, float],
    local_logits: Map,
    target: Targets,
    boxes: Boxes,
    *,
    kind: str = "logits",
    low: float | None = None,
    criterion: CrossEntropy = HARD,
) -> Scalar:
    """Return the weighted sum of losses on the evidence of `kind`; logits are clipped from below at `low`."""
    logits = local_logits.float()
    evidence = soft_evidence(logits, kind, low)
    criterion = replace(criterion, probabilities=kind != "logits")
    total = logits.new_zeros(())
    for name, weight in weights.items():
        total = total + weight * LOSSES[name](logits if name == "local" else evidence, target, boxes, criterion)
    return total


def soft_evidence(logits: Map, kind: str, low: float | None) -> Map:
    """Return evidence that gradients pass through.

    A vote, the one-hot argmax of a cell, has no gradient of its own and gets that of the cell's confidence.
    """
    if kind == "logits":
        return logits if low is None else logits.clamp(min=low)
    confidence = torch.softmax(logits, 1)
    if kind == "confidence":
        return confidence
    votes = F.one_hot(logits.argmax(1), logits.shape[1]).movedim(-1, 1).to(logits.dtype)
    return votes + confidence - confidence.detach()


def uses_masks(weights: Mapping[str, float]) -> bool:
    """Return whether some loss searches for its worst place among masks."""
    return any(weight > 0 and name not in ("plain", "local", INTERVAL) for name, weight in weights.items())


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise unless every entry names a loss and some weight is positive."""
    known = [*LOSSES, INTERVAL]
    for name in weights:
        if name not in known:
            raise InputError(f"`loss.weights` must name known losses; got {name!r}. {nearest(name, known)}")
    if not (min(weights.values(), default=0) >= 0 and 0 < sum(weights.values()) < float("inf")):
        raise InputError(f"`loss.weights` must be at least 0, and some above 0; got {dict(weights)}.")


# -- the worst place ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def find_worst_pair(evidence: Map, target: Targets, boxes: Boxes) -> Int64[Tensor, "batch 2 4"]:
    """Return, per image, the two masks outside which the target's margin over its best rival is smallest."""
    first, second = torch.triu_indices(len(boxes), len(boxes), device=boxes.device)
    worst = pair_margins(evidence, target, boxes, first, second).argmin(0)
    return torch.stack([boxes[first[worst]], boxes[second[worst]]], 1)


@torch.no_grad()
def find_wrong_claim(evidence: Map, target: Targets, boxes: Boxes) -> Int64[Tensor, "batch 2 4"]:
    """Return, per image, the mask that a second one brings back to the target's side least, and that second one."""
    count = len(boxes)
    first, second = torch.triu_indices(count, count, device=boxes.device)
    number = torch.zeros(count, count, dtype=torch.int64, device=boxes.device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=boxes.device)
    margins = pair_margins(evidence, target, boxes, first, second).index_select(0, number.flatten())
    best, which = margins.view(count, count, -1).max(1)  # masks, batch
    mask = best.argmin(0)
    return torch.stack([boxes[mask], boxes[which.gather(0, mask.unsqueeze(0)).squeeze(0)]], 1)


def pair_margins(
    evidence: Map, target: Targets, boxes: Boxes, first: Int64[Tensor, " pairs"], second: Int64[Tensor, " pairs"]
) -> Float[Tensor, "pairs batch"]:
    """Return the target's margin over its best rival outside each pair of boxes."""
    table = summed_area_table(evidence)
    whole, single = table[-1], sum_over(table, boxes, evidence.shape[3])  # classes, batch; masks, classes, batch
    at_once = max(1, ELEMENTS // whole.numel())
    margins = []
    for one, two in zip(torch.split(first, at_once), torch.split(second, at_once), strict=True):
        shared = sum_over(table, intersect(boxes[one], boxes[two]), evidence.shape[3])
        margins.append(margin(whole - single[one] - single[two] + shared, target))
    return torch.cat(margins)


@torch.no_grad()
def find_strongest_window(evidence: Map, target: Targets, boxes: Boxes) -> Int64[Tensor, "batch 4"]:
    """Return, per image, the mask that holds most evidence for the target."""
    own = evidence.gather(1, target.view(-1, 1, 1, 1).expand(-1, 1, *evidence.shape[2:]))
    return boxes[sum_over(summed_area_table(own), boxes, evidence.shape[3]).squeeze(1).argmax(0)]


@torch.no_grad()
def find_worst_window(
    evidence: Map, target: Targets, boxes: Boxes
) -> tuple[Int64[Tensor, "batch 4"], Int64[Tensor, "batch 4"]]:
    """Return, per image, the window w that lowers the masked margin of the target most, and the mask v(w)."""
    table = summed_area_table(evidence)
    whole, single = table[-1], sum_over(table, boxes, evidence.shape[3])  # classes, batch; masks, classes, batch
    own = table.gather(1, target.view(1, 1, -1).expand(len(table), 1, -1))
    mine = sum_over(own, boxes, evidence.shape[3]).squeeze(1)  # masks, batch
    hidden: list[Tensor] = []  # per window: how much the heaviest mask holds outside it, and which mask that is
    masks: list[Tensor] = []
    at_once = max(1, ELEMENTS // mine.numel())
    for some in torch.split(boxes, at_once):
        pairs = intersect(some.unsqueeze(1), boxes.unsqueeze(0)).flatten(0, 1)
        shared = sum_over(own, pairs, evidence.shape[3]).view(len(some), len(boxes), -1)
        most, which = (mine - shared).max(1)
        hidden.append(most)
        masks.append(which)
    window = (margin(whole - single, target) - torch.cat(hidden)).argmin(0)
    mask = torch.cat(masks).gather(0, window.unsqueeze(0)).squeeze(0)
    return boxes[window], boxes[mask]


# -- sums --------------------------------------------------------------------------------------------------------------


def summed_area_table(evidence: Map) -> Float[Tensor, "corners classes batch"]:
    """Return the sums over all boxes that start at cell (0, 0), by their corner, row by row.

    Corners come first and the batch last: boxes are then gathered as whole contiguous rows.
    """
    sums = evidence.float().permute(2, 3, 1, 0).contiguous().cumsum(0).cumsum(1)
    return F.pad(sums, (0, 0, 0, 0, 1, 0, 1, 0)).flatten(0, 1)


def sum_over(
    table: Float[Tensor, "corners classes batch"], boxes: Int64[Tensor, "boxes 4"], columns: int
) -> Float[Tensor, "boxes classes batch"]:
    """Return the sum over each box."""
    top, bottom, left, right = boxes.unbind(1)
    stride = columns + 1
    below = table.index_select(0, bottom * stride + right) - table.index_select(0, bottom * stride + left)
    above = table.index_select(0, top * stride + right) - table.index_select(0, top * stride + left)
    return below - above


def intersect(one: Int64[Tensor, "*#pairs 4"], two: Int64[Tensor, "*#pairs 4"]) -> Int64[Tensor, "*pairs 4"]:
    """Return what two boxes have in common; where that is nothing, a box without area."""
    start = torch.maximum(one[..., 0::2], two[..., 0::2])
    stop = torch.maximum(torch.minimum(one[..., 1::2], two[..., 1::2]), start)
    return torch.stack([start, stop], -1).flatten(-2)


def margin(
    sums: Float[Tensor, "places classes batch"], target: Int64[Tensor, " batch"]
) -> Float[Tensor, "places batch"]:
    """Return the margin of the target over its best rival."""
    own = target.view(1, 1, -1).expand(len(sums), 1, -1)
    return sums.gather(1, own).squeeze(1) - sums.scatter(1, own, -torch.inf).amax(1)


def select_outside(boxes: Int64[Tensor, "batch some 4"], like: Map) -> Bool[Tensor, "batch 1 rows columns"]:
    """Return which cells lie outside all boxes of their image."""
    row, column = (torch.arange(size, device=like.device) for size in like.shape[2:])
    top, bottom, left, right = boxes.unsqueeze(-1).unbind(2)  # each: batch, some, 1
    in_rows, in_columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    inside = (in_rows.unsqueeze(3) & in_columns.unsqueeze(2)).any(1, keepdim=True)
    return ~inside


def mean_outside(evidence: Map, boxes: Int64[Tensor, "batch some 4"]) -> Float[Tensor, "batch classes"]:
    """Return the mean evidence of the cells outside all boxes of each image."""
    seen = select_outside(boxes, evidence)
    return (evidence.float() * seen).sum((2, 3)) / seen.sum((2, 3)).clamp(min=1)
