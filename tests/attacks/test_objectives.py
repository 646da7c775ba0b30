"""Objectives follow their defense: what they call better, pushed to the extreme, changes the defended label."""

import pytest
import torch
from helpers.color_network import GUARDS, SIDE, color_guard, tinted_images

from patchguard.attacks.gradient_ascent import predict_from_logits
from patchguard.attacks.objectives import (
    SURROGATES,
    Goal,
    box_sums,
    cross_entropy,
    defended_score,
    margin,
    soft_evidence,
    sum_score,
    witness_score,
)
from patchguard.defenses import DoubleMasking, MaskedAgreement
from patchguard.defenses.evidence import Evidence
from patchguard.defenses.window_sums import sums
from patchguard.geometry.windows import Windows

WINDOWS = [
    Windows.sliding(grid=(6, 7), size=(2, 3)),
    Windows.sliding(grid=(6, 7), size=(2, 3), wrap=(False, True)),
    Windows.sliding(grid=(6, 7), size=(2, 2), count=2),
    Windows.from_boxes([(0, 2, 1, 4), (3, 6, 0, 2)], grid=(6, 7)),
]


@pytest.mark.parametrize("windows", WINDOWS, ids=["boxes", "circle", "unions", "listed"])
def test_sums_over_boxes_are_those_of_the_certificates(windows) -> None:
    maps = torch.randint(-50, 50, (3, 2, 6, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(box_sums(maps.float(), windows).long(), sums(maps, windows))


@pytest.mark.parametrize("name", GUARDS)
def test_soft_evidence_has_the_values_of_the_rule_and_gradients_everywhere(name) -> None:
    evidence = color_guard(name).evidence
    logits = (12 * torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))).requires_grad_(True)
    soft = soft_evidence(evidence, logits)
    exact = evidence(logits.detach())
    assert torch.allclose(soft, exact.values.float() / exact.scale, atol=1e-3)
    weights = torch.rand(soft.shape, generator=torch.Generator().manual_seed(2))
    (soft * weights).sum().backward()
    assert (logits.grad != 0).all()


@pytest.mark.parametrize("name", [name for name in GUARDS if name not in ("double", "double above tau", "agreement")])
def test_the_score_is_the_lead_in_the_defended_scores(name) -> None:
    victim = color_guard(name)
    images, target = tinted_images(20)
    answer = victim.predict(images)
    # Votes are whole: a cell whose best two classes tie after rounding may count for the other one.
    votes = victim.evidence.kind in ("vote", "prediction")
    for aim in (None, *(torch.full_like(target, label) for label in range(3))):
        goal = Goal(target=target, aim=aim)
        lead = defended_score(victim.defense, victim.evidence, victim.local_logits(images), goal)
        assert torch.allclose(lead, margin(answer.scores.float(), goal), atol=6 if votes else 2e-2)
    lead = defended_score(victim.defense, victim.evidence, victim.local_logits(images), Goal(target=target))
    clear = lead.abs() > (6 if votes else 0.05)
    assert torch.equal((lead > 0)[clear], (answer.label != target)[clear])


def test_a_defense_without_an_entry_is_attacked_as_a_sum_of_evidence(monkeypatch) -> None:
    victim = color_guard("robust")
    images, target = tinted_images(6)
    logits, goal = victim.local_logits(images), Goal(target=target)
    known = defended_score(victim.defense, victim.evidence, logits, goal)
    monkeypatch.delitem(SURROGATES, type(victim.defense))
    plain = defended_score(victim.defense, victim.evidence, logits, goal)
    assert torch.equal(plain, sum_score(None, soft_evidence(victim.evidence, logits), goal))
    assert not torch.equal(plain, known)


@pytest.mark.parametrize("name", GUARDS)
def test_increasing_the_score_in_the_logits_flips_the_label(name) -> None:
    victim = color_guard(name)
    images, _ = tinted_images(16)
    target = victim.predict(images).label
    aim = (target + 1) % 3
    goal = Goal(target=target, aim=aim, owned=torch.ones(16, SIDE - 2, SIDE - 2, dtype=torch.bool))
    logits = victim.local_logits(images)
    first = None
    for _ in range(150):
        logits = logits.detach().requires_grad_(True)
        score = defended_score(victim.defense, victim.evidence, logits, goal)
        first = score.detach() if first is None else first
        gradient = torch.autograd.grad(score.sum(), logits)[0]
        logits = logits + 0.3 * gradient.sign()
    last = defended_score(victim.defense, victim.evidence, logits.detach(), goal)
    assert (last > first).all()
    answer = predict_from_logits(victim, logits.detach())
    assert torch.equal(answer.label, aim)
    assert answer.alert is None or not answer.alert.any()


@pytest.mark.parametrize("name", ["double", "double tau", "agreement"])
def test_a_positive_pair_score_is_a_flipped_label(name) -> None:
    generator = torch.Generator().manual_seed(5)
    masks = Windows.sliding(grid=(6, 6), size=(2, 2))
    defense = {
        "double": DoubleMasking(masks=masks),
        "double tau": DoubleMasking(masks=masks, tau=3.0),
        "agreement": MaskedAgreement(masks=masks),
    }[name]
    evidence = Evidence(low=None)
    maps = torch.randn(400, 3, 6, 6, generator=generator)
    maps[:, 1] += 0.5
    maps[:, 2] += 0.4
    target, aim = torch.full((400,), 1), torch.full((400,), 2)
    score = defended_score(defense, evidence, maps, Goal(target=target, aim=aim))
    answer = defense.predict(evidence(maps))
    assert (answer.label[score > 0.01] == 2).all()
    assert (score > 0.01).any()
    assert (score < 0).any()


@pytest.mark.parametrize("tau", [0.0, 4.0])
@pytest.mark.parametrize("part", ["everything", "some cells"])
def test_the_pair_score_is_its_formula_written_out(part, tau) -> None:
    generator = torch.Generator().manual_seed(8)
    masks = Windows.sliding(grid=(3, 4), size=(2, 2))
    maps = torch.randn(30, 4, 3, 4, generator=generator)
    target, aim = torch.full((30,), 1), torch.full((30,), 2)
    owned = torch.zeros(30, 3, 4, dtype=torch.bool)
    owned[:, :2, 1:3] = part == "some cells"
    goal = Goal(target=target, aim=aim, owned=owned if part == "some cells" else None)
    found = defended_score(DoubleMasking(masks=masks, tau=tau), Evidence(low=None), maps, goal)
    boxes = [torch.from_numpy(box).view(3, 4) for box in masks.cells]
    decided = 0
    for i, u in enumerate(maps):
        lead = (u[1] - u[2]).masked_fill(owned[i], 0)  # of the target over the aim
        first = max(range(len(boxes)), key=lambda m: float(lead[boxes[m]].sum()))
        lacking = []
        for number, box in enumerate(boxes):
            seen = u * ~(box | boxes[first])
            ahead = max(float((seen[k] - seen[2]).sum()) for k in (0, 1, 3))
            lacking.append(ahead + (tau if number == first else 0.0))
        short = [each for each in lacking if each > 0]
        expected = -(max(lacking) + sum(short) / max(1, len(short)))
        assert float(found[i]) == pytest.approx(expected, abs=1e-4)
        decided += max(lacking) == lacking[first]
    assert decided >= (10 if tau else 1)


def test_cross_entropy_goes_away_from_the_target_or_towards_the_aim() -> None:
    logits = torch.zeros(1, 3, 2, 2, requires_grad=True)
    away = torch.autograd.grad(cross_entropy(logits, Goal(target=torch.tensor([0]))).sum(), logits)[0]
    assert (away[:, 0] < 0).all()
    assert (away[:, 1:] > 0).all()
    goal = Goal(target=torch.tensor([0]), aim=torch.tensor([2]))
    towards = torch.autograd.grad(cross_entropy(logits, goal).sum(), logits)[0]
    assert (towards[:, 2] > 0).all()
    assert (towards[:, :2] < 0).all()


def test_the_witness_pulls_only_where_the_patch_is() -> None:
    logits = torch.zeros(1, 3, 2, 2, requires_grad=True)
    owned = torch.tensor([[[True, False], [False, False]]])
    goal = Goal(target=torch.tensor([0]), aim=torch.tensor([2]), owned=owned)
    wished = torch.stack([torch.full((2, 2), -9.0), torch.full((2, 2), 9.0)])[None]
    gradient = torch.autograd.grad(witness_score(Evidence(low=None), logits, goal, wished).sum(), logits)[0]
    assert gradient[0, :, 0, 0].tolist() == [-1, 0, 1]
    assert gradient.abs().sum() == 2
