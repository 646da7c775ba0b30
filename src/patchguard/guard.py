"""`Prediction`, `Certificate` and `DetectionCertificate`: what a defense answers for a batch of images."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar, final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The defended label, the score of every class in evidence units, and the alert of a detection defense."""

    label: Int64[Tensor, " batch"]
    scores: Float64[Tensor, "batch classes"]
    alert: Bool[Tensor, " batch"] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No attack on any region of the windows takes `label` from the top k of the prediction, where `certified`.

    `margin` is the worst case over all regions, in evidence units, with drift already charged: strictly positive means
    proved. `weakest` is the region where it is attained (the boxes by number: one, or `Windows.count` of them) and
    `rival` the class that comes closest there: what an attack on an image that is not certified should aim at.
    Position-free certificates know no weakest region: None.
    """

    label: Int64[Tensor, " batch"]
    margin: Float64[Tensor, " batch"]
    weakest: Int64[Tensor, "batch *count"] | None
    rival: Int64[Tensor, " batch"]

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Whether the label is proved to stay."""
        return self.margin > 0


@final
@dataclass(frozen=True, kw_only=True)
class DetectionCertificate:
    """Every attack on any region of the windows yields `label` OR AN ALERT, where `label_or_alert`.

    This says less than a `Certificate`: an attacker may still force an alert. It has no attribute `certified` so that
    the two cannot be confused. `alert` tells whether the image as it is raises one (a false alarm if it is clean).
    """

    label: Int64[Tensor, " batch"]
    margin: Float64[Tensor, " batch"]
    weakest: Int64[Tensor, "batch *count"] | None
    rival: Int64[Tensor, " batch"]
    alert: Bool[Tensor, " batch"]

    @property
    def label_or_alert(self) -> Bool[Tensor, " batch"]:
        """Whether every attack is proved to give the label or an alert."""
        return self.margin > 0


Answer = TypeVar("Answer", Prediction, Certificate, DetectionCertificate)


def concatenate(answers: list[Answer]) -> Answer:
    """Join the answers for consecutive parts of a batch."""
    first = answers[0]
    if len(answers) == 1:
        return first
    joined: dict[str, Any] = {}
    for field in fields(first):
        parts = [getattr(answer, field.name) for answer in answers]
        joined[field.name] = None if parts[0] is None else torch.cat(parts)
    return type(first)(**joined)
