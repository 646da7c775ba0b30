"""The feature-space attack: writes the worst contents into the cells of a window.

It is the witness for "not certified": where a certificate is exact, a negative margin comes with contents that change
the label, and this file writes them. For the other defenses it tries the contents their bounds suggest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard.defenses.base import Defense, boxes_of
from patchguard.defenses.evidence import EvidenceMap
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, DetectionCertificate

LEVELS = 8  # strengths tried between the floor and the ceiling, each half of the one before


@final
@dataclass(frozen=True, kw_only=True)
class FeatureAttack:
    """The attacked evidence of each image and whether it takes the label away without raising an alert."""

    evidence: EvidenceMap
    succeeded: Bool[Tensor, " batch"]


def attack_features(
    defense: Defense[Certificate] | Defense[DetectionCertificate],
    evidence: EvidenceMap,
    windows: Windows,
    certificate: Certificate | DetectionCertificate,
    *,
    with_drift: bool = False,
) -> FeatureAttack:
    """Attack each image at the certificate's weakest region, aiming at its rival.

    `with_drift` also moves every unattacked cell against the label, as far as the evidence's drift allows.
    """
    weakest = certificate.weakest
    if weakest is None:  # a position-free certificate names no region: try the first
        weakest = boxes_of(torch.zeros_like(certificate.label), windows)
    owned = union_cells(weakest, windows)
    return attack_region(
        defense,
        evidence,
        owned,
        certificate.label,
        certificate.rival,
        with_drift=with_drift,
        search=not defense.exact(evidence, windows),  # an exact bound is attained by the first candidate or not at all
    )


def attack_region(
    defense: Defense[Certificate] | Defense[DetectionCertificate],
    evidence: EvidenceMap,
    owned: Bool[Tensor, "batch rows columns"],
    label: Int64[Tensor, " batch"],
    rival: Int64[Tensor, " batch"],
    *,
    with_drift: bool = False,
    search: bool = True,
) -> FeatureAttack:
    """Rewrite the `owned` cells of each image so that `label` loses to `rival`; keep the first contents that work.

    `search=False` tries only the generally worst contents: the label at its floor, the rival at its ceiling.
    """
    start = _apply_drift(evidence, label) if with_drift else evidence.values
    best: Tensor | None = None  # until something works, the first candidate
    succeeded = torch.zeros(len(evidence), dtype=torch.bool, device=start.device)
    for contents in _candidates(start, evidence, owned, label, rival):
        answer = defense.predict(evidence.with_values(contents))
        works = answer.label != label
        if answer.alert is not None:
            works &= ~answer.alert
        best = contents.clone() if best is None else best
        best[works & ~succeeded] = contents[works & ~succeeded]
        succeeded |= works
        if bool(succeeded.all()) or not search:
            break
    assert best is not None  # there is always a first candidate
    return FeatureAttack(evidence=evidence.with_values(best), succeeded=succeeded)


def union_cells(boxes: Int64[Tensor, "batch *count"], windows: Windows) -> Bool[Tensor, "batch rows columns"]:
    """Return which cells the boxes of each image own together."""
    rows = []
    for numbers in boxes.reshape(len(boxes), -1).tolist():
        cells = torch.stack([torch.from_numpy(windows.box_cells(number)) for number in numbers]).any(0)
        rows.append(cells.view(windows.grid))
    return torch.stack(rows).to(boxes.device)


def _apply_drift(evidence: EvidenceMap, label: Tensor) -> Tensor:
    """Return the evidence moved against the label in every cell: the label's down, the rivals' up."""
    here = torch.arange(len(label), device=label.device)
    values = evidence.upper.clone()
    values[here, label] = evidence.lower[here, label]
    return values


def _candidates(
    start: Tensor, evidence: EvidenceMap, owned: Tensor, label: Tensor, rival: Tensor
) -> Iterator[Int64[Tensor, "batch classes rows columns"]]:
    """Contents to try, the generally worst first."""
    low, high = evidence.low, evidence.high
    erased = torch.where(owned.unsqueeze(1), low, start)
    yield _write(erased, owned, rival, high)  # the label gone, the rival at its ceiling: worst for monotone rules
    strengths = [low + ((high - low) >> shift) for shift in range(1, 2 * LEVELS)]
    # Below the detection threshold of robust masking, or just enough to turn single masks.
    for strength in strengths:
        yield _write(erased, owned, rival, strength)
    # Bait: the label's own evidence raised, so that a mask that holds much of it is drawn to the window.
    for strength in (high, *strengths[:LEVELS]):
        baited = _write(erased, owned, label, strength)
        for other in (high, *strengths[:LEVELS], low):
            yield _write(baited, owned, rival, other)
    # Bait in half of the region only.
    for half in _halves(owned):
        baited = _write(erased, half, label, high)
        yield _write(baited, owned, rival, high)


def _halves(owned: Tensor) -> Iterator[Tensor]:
    rows = torch.arange(owned.shape[1], device=owned.device).view(1, -1, 1)
    columns = torch.arange(owned.shape[2], device=owned.device).view(1, 1, -1)
    for place in (rows, columns):
        where = torch.where(owned, place, -1)
        middle = where.amax((1, 2), keepdim=True)
        low = torch.where(owned, place, middle).amin((1, 2), keepdim=True)
        yield owned & (2 * place <= low + middle)
        yield owned & (2 * place >= low + middle)


def _write(maps: Tensor, owned: Tensor, label: Tensor, value: int) -> Tensor:
    written = maps.clone()
    here = torch.arange(len(label), device=label.device)
    written[here, label] = torch.where(owned, value, maps[here, label])
    return written
