"""Each loss against a literal version that lists every mask and adds up cell by cell."""

import itertools
import math

import pytest
import torch

from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.training import losses

GRID, CLASSES, BATCH = (6, 7), 4, 5
MASKS = [Windows.sliding(grid=GRID, size=(2, 3)), Windows(grid=GRID, rows=((0, 4), (2, 6)), columns=((0, 3), (2, 7)))]


def random_evidence(seed: int, low: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    evidence = torch.randn(BATCH, CLASSES, *GRID, generator=generator)
    target = torch.randint(CLASSES, (BATCH,), generator=generator)
    evidence[torch.arange(BATCH), target] += 0.3
    return (evidence if low is None else evidence.clamp(min=low)).requires_grad_(), target


def cells(box: tuple[int, ...]) -> set[tuple[int, int]]:
    top, bottom, left, right = box
    return set(itertools.product(range(top, bottom), range(left, right)))


ALL = cells((0, GRID[0], 0, GRID[1]))


def total(evidence: torch.Tensor, some: set[tuple[int, int]]) -> float:
    return sum(float(evidence[row, column]) for row, column in some)


def cross_entropy(scores: list[float], target: int) -> float:
    return math.log(sum(math.exp(score) for score in scores)) - scores[target]


def literal_double_masking(evidence: torch.Tensor, target: int, boxes: list[tuple[int, ...]]) -> float:
    worst, loss = math.inf, math.nan
    for one, two in itertools.product(boxes, boxes):
        seen = ALL - cells(one) - cells(two)
        scores = [total(each, seen) for each in evidence]
        lead = scores[target] - max(score for k, score in enumerate(scores) if k != target)
        if lead < worst:
            worst, loss = lead, cross_entropy([score / len(seen) for score in scores], target)
    return loss


def literal_claims(evidence: torch.Tensor, target: int, boxes: list[tuple[int, ...]]) -> float:
    worst, loss = math.inf, math.nan
    for one in boxes:
        best, there = -math.inf, math.nan
        for two in boxes:
            seen = ALL - cells(one) - cells(two)
            scores = [total(each, seen) for each in evidence]
            lead = scores[target] - max(score for k, score in enumerate(scores) if k != target)
            if lead > best:
                best, there = lead, cross_entropy([score / len(seen) for score in scores], target)
        if best < worst:
            worst, loss = best, there
    return loss


def literal_provable(evidence: torch.Tensor, target: int, boxes: list[tuple[int, ...]]) -> float:
    window = max(boxes, key=lambda box: total(evidence[target], cells(box)))
    seen = ALL - cells(window)
    return cross_entropy([total(each, seen) / len(seen) for each in evidence], target)


def literal_robust_masking(evidence: torch.Tensor, target: int, boxes: list[tuple[int, ...]]) -> float:
    worst, loss = math.inf, math.nan
    for window in boxes:
        seen = ALL - cells(window)
        scores = [total(each, seen) for each in evidence]
        scores[target] -= max(total(evidence[target], cells(mask) - cells(window)) for mask in boxes)
        lead = scores[target] - max(score for k, score in enumerate(scores) if k != target)
        if lead < worst:
            worst, loss = lead, cross_entropy([score / len(seen) for score in scores], target)
    return loss


LITERAL = {
    "double_masking": (literal_double_masking, None),
    "claims": (literal_claims, None),
    "provable": (literal_provable, 0.0),
    "robust_masking": (literal_robust_masking, 0.0),
}


@pytest.mark.parametrize("masks", MASKS, ids=["sliding", "uneven"])
@pytest.mark.parametrize("name", LITERAL)
def test_a_loss_equals_its_formula_written_out(name: str, masks: Windows) -> None:
    literal, low = LITERAL[name]
    evidence, target = random_evidence(1, low)
    loss = losses.LOSSES[name](evidence, target, losses.to_boxes(masks), losses.HARD)
    boxes = [tuple(box) for box in masks.boxes.tolist()]
    maps = evidence.detach()
    expected = [literal(image, int(y), boxes) for image, y in zip(maps, target, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(expected) / BATCH, abs=1e-5)


def test_the_plain_loss_is_the_cross_entropy_of_the_mean() -> None:
    evidence, target = random_evidence(2)
    loss = losses.plain(evidence, target, losses.to_boxes(MASKS[0]))
    means = evidence.detach().mean((2, 3)).tolist()
    expected = [cross_entropy(scores, int(y)) for scores, y in zip(means, target, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(expected) / BATCH, abs=1e-6)


@pytest.mark.parametrize("name", ["double_masking", "provable"])
def test_hidden_cells_get_no_gradient_and_visible_ones_do(name: str) -> None:
    evidence, target = random_evidence(3)
    boxes = losses.to_boxes(MASKS[0])
    losses.LOSSES[name](evidence, target, boxes, losses.HARD).backward()
    chosen = (
        losses.find_worst_pair(evidence, target, boxes)
        if name == "double_masking"
        else losses.find_strongest_window(evidence, target, boxes).unsqueeze(1)
    )
    seen = losses.select_outside(chosen, evidence).squeeze(1)
    moved = evidence.grad.abs().sum(1) > 0
    assert torch.equal(moved, seen)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    evidence, target = random_evidence(11, 0.0)
    boxes = losses.to_boxes(MASKS[0])
    losses.LOSSES[name](evidence, target, boxes, losses.HARD).backward()
    direction = torch.randn(evidence.shape, generator=torch.Generator().manual_seed(5))
    step = 1e-3

    def value(change: float) -> float:
        return float(losses.LOSSES[name](evidence.detach() + change * direction, target, boxes, losses.HARD))

    slope = (value(step) - value(-step)) / (2 * step)
    assert slope == pytest.approx(float((evidence.grad * direction).sum()), abs=2e-3)


def test_the_worst_pair_does_not_depend_on_how_many_sums_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, target = random_evidence(6)
    boxes = losses.to_boxes(MASKS[0])
    pair, windows = losses.find_worst_pair(evidence, target, boxes), losses.find_worst_window(evidence, target, boxes)
    claim = losses.find_wrong_claim(evidence, target, boxes)
    monkeypatch.setattr(losses, "ELEMENTS", 7 * BATCH * CLASSES)
    assert torch.equal(losses.find_worst_pair(evidence, target, boxes), pair)
    assert torch.equal(losses.find_wrong_claim(evidence, target, boxes), claim)
    assert all(
        torch.equal(a, b) for a, b in zip(losses.find_worst_window(evidence, target, boxes), windows, strict=True)
    )


def test_a_mix_is_the_weighted_sum_on_clipped_evidence_in_float32() -> None:
    local_logits, target = random_evidence(7)
    boxes = losses.to_boxes(MASKS[0])
    weights = {"plain": 0.25, "robust_masking": 2.0}
    smooth = losses.CrossEntropy(label_smoothing=0.1)
    loss = losses.combine(weights, local_logits.bfloat16(), target, boxes, low=0.0, criterion=smooth)
    evidence = local_logits.bfloat16().float().clamp(min=0)
    expected = 0.25 * losses.plain(evidence, target, boxes, smooth) + 2 * losses.robust_masking(
        evidence, target, boxes, smooth
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_a_pair_that_hides_everything_gives_a_finite_loss() -> None:
    evidence, target = random_evidence(8)
    whole = losses.to_boxes(Windows.sliding(grid=GRID, size=GRID))
    assert float(losses.double_masking(evidence, target, whole).detach()) == pytest.approx(math.log(CLASSES))


def test_masks_on_a_circle_and_unknown_losses_are_refused() -> None:
    with pytest.raises(InputError, match="wrap around"):
        losses.to_boxes(Windows.sliding(grid=(1, 8), size=(1, 3), wrap=(False, True)))
    with pytest.raises(InputError, match=r"known losses.*plain"):
        losses.check_weights({"plan": 1.0})
    with pytest.raises(InputError, match="at least 0"):
        losses.check_weights({"plain": -1.0})
    with pytest.raises(InputError, match="above 0"):
        losses.check_weights({"plain": 0.0})


def test_the_local_loss_is_the_mean_cross_entropy_of_single_cells() -> None:
    evidence, target = random_evidence(9)
    loss = losses.local(evidence, target, losses.to_boxes(MASKS[0]))
    each = [
        cross_entropy(evidence[image, :, row, column].tolist(), int(target[image]))
        for image in range(BATCH)
        for row, column in ALL
    ]
    assert float(loss.detach()) == pytest.approx(sum(each) / len(each), abs=1e-6)


def test_the_target_distribution_mixes_label_teacher_and_smoothing() -> None:
    scores, target = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([2])
    criterion = losses.CrossEntropy(label_smoothing=0.3, teacher=torch.tensor([[0.2, 0.7, 0.1]]), distill_weight=0.25)
    weights = [0.7 * (0.75 * own + 0.25 * said) + 0.1 for own, said in zip((0, 0, 1), (0.2, 0.7, 0.1), strict=True)]
    expected = sum(weight * cross_entropy(scores[0].tolist(), k) for k, weight in enumerate(weights))
    assert float(criterion(scores, target)) == pytest.approx(expected, abs=1e-6)


def test_soft_labels_replace_the_target() -> None:
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    target, other = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 3, 1, 0])
    labels = 0.7 * torch.eye(5)[target] + 0.3 * torch.eye(5)[other]
    loss = losses.CrossEntropy(soft_labels=labels)(scores, target)
    torch.testing.assert_close(loss, 0.7 * losses.HARD(scores, target) + 0.3 * losses.HARD(scores, other))


def test_means_of_confidences_are_compared_by_their_logarithm() -> None:
    local_logits, target = random_evidence(10)
    loss = losses.combine({"plain": 1.0}, local_logits, target, losses.to_boxes(MASKS[0]), kind="confidence")
    mean = local_logits.detach().softmax(1).mean((2, 3))
    expected = -mean[torch.arange(BATCH), target].log().mean()
    torch.testing.assert_close(loss.detach(), expected)


def test_votes_count_whole_and_learn_through_confidences() -> None:
    local_logits, _ = random_evidence(12)
    votes = losses.soft_evidence(local_logits, "prediction", None)
    winners = local_logits.argmax(1)
    assert torch.equal(votes.detach().round(), torch.nn.functional.one_hot(winners, CLASSES).movedim(-1, 1).float())
    (votes * torch.arange(votes.numel()).view_as(votes)).sum().backward()
    through_votes = local_logits.grad.clone()
    local_logits.grad = None
    confidence = local_logits.softmax(1)
    (confidence * torch.arange(votes.numel()).view_as(votes)).sum().backward()
    torch.testing.assert_close(through_votes, local_logits.grad)


def test_a_confidence_of_0_costs_what_the_least_confidence_does_and_teaches_nothing() -> None:
    means = torch.tensor([[0.0, 0.25, 0.75]], requires_grad=True)
    loss = losses.CrossEntropy(probabilities=True)(means, torch.tensor([0]))
    assert float(loss.detach()) == pytest.approx(
        math.log((1 + losses.LEAST_CONFIDENCE) / losses.LEAST_CONFIDENCE), abs=1e-5
    )
    loss.backward()
    assert means.grad[0, 0] == 0
    assert torch.isfinite(means.grad).all()
    above = torch.tensor([[2 * losses.LEAST_CONFIDENCE, 0.25, 0.75]], requires_grad=True)
    losses.CrossEntropy(probabilities=True)(above, torch.tensor([0])).backward()
    assert above.grad[0, 0] < 0
