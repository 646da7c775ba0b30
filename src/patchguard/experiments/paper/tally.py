"""Counting over maps: which labels are right and which are proved, for many settings in one pass over the files."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.base import Defense
from patchguard.evidence import Evidence, EvidenceMap
from patchguard.experiments import metrics
from patchguard.experiments.metrics import Share
from patchguard.experiments.paper.maps import Maps
from patchguard.windows import Windows

# The paper charges no drift; nor do its tables here. LOGITS is its default: c_l = 0, c_h = infinity.
LOGITS = Evidence(kind="logits", low=0.0)
SIGNED = Evidence(kind="logits", low=None)
CONFIDENCE = Evidence(kind="confidence")
PREDICTION = Evidence(kind="prediction")
VOTE = Evidence(kind="vote", threshold=0.2)
TANH = Evidence(kind="tanh")

Key = TypeVar("Key", bound=Hashable)


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """A rule, and the windows that an attack may rewrite; without windows only its labels are asked for."""

    evidence: Evidence
    defense: Defense[Any]
    windows: Windows | None = None
    top_k: int = 1


def masking(windows: Windows, evidence: Evidence = LOGITS, **settings: Any) -> Question:
    """Return robust masking with masks as large as the windows."""
    return Question(evidence=evidence, defense=RobustMasking(masks=windows, **settings), windows=windows)


def double_masking(windows: Windows, evidence: Evidence = SIGNED) -> Question:
    """Return double masking with masks as large as the windows."""
    return Question(evidence=evidence, defense=DoubleMasking(masks=windows), windows=windows)


@final
@dataclass
class Counts:
    """How many of `of` images are right, and for how many of these that is proved."""

    of: int = 0
    right: int = 0
    proved: int = 0

    @property
    def clean(self) -> Share:
        """Clean accuracy: the true class is the label (among the k best)."""
        return metrics.share(self.right, self.of)

    @property
    def robust(self) -> Share:
        """Provable accuracy: and no attack on any window changes that."""
        return metrics.share(self.proved, self.of)


@final
@dataclass
class _Batch:
    """The answers about one batch that several questions share."""

    local_logits: Tensor
    targets: Tensor
    evidence: dict[Evidence, EvidenceMap] = field(default_factory=dict)
    right: dict[tuple[Evidence, Defense[Any], int], Tensor] = field(default_factory=dict)

    def of(self, evidence: Evidence) -> EvidenceMap:
        if evidence not in self.evidence:
            self.evidence[evidence] = evidence(self.local_logits)
        return self.evidence[evidence]

    def is_right(self, question: Question) -> Bool[Tensor, " some"]:
        key = (question.evidence, question.defense, question.top_k)
        if key not in self.right:
            answer = question.defense.predict(self.of(question.evidence))
            if question.top_k == 1:
                self.right[key] = answer.label == self.targets
            else:
                self.right[key] = among_best(answer.scores, self.targets, question.top_k)
        return self.right[key]

    def is_proved(self, question: Question) -> Bool[Tensor, " some"]:
        """Whether the label is right and proved; where it is wrong nothing needs to be computed."""
        right = self.is_right(question)
        found = torch.zeros_like(right)
        places = right.nonzero().squeeze(1)
        if question.windows is not None and len(places):
            evidence = self.of(question.evidence)[places]
            proof = question.defense.certify(evidence, question.windows, self.targets[places], question.top_k)
            found[places] = proof.certified
        return found


def among_best(scores: Float[Tensor, "some classes"], targets: Tensor, top_k: int) -> Bool[Tensor, " some"]:
    """Whether fewer than k classes come before the true one (ties: smallest class first)."""
    mine = scores.gather(1, targets.unsqueeze(1))
    classes = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > mine) | ((scores == mine) & (classes < targets.unsqueeze(1)))
    return before.sum(1) < top_k


def count(maps: Maps, questions: Mapping[Key, Question], device: torch.device) -> dict[Key, Counts]:
    """Answer questions about all maps, in one pass."""
    found = {key: Counts() for key in questions}
    for local_logits, targets in maps.batches(device):
        batch = _Batch(local_logits, targets)
        for key, question in questions.items():
            counts = found[key]
            counts.of += len(targets)
            counts.right += int(batch.is_right(question).sum())
            counts.proved += int(batch.is_proved(question).sum())
    return found


def rounding(maps: Maps, question: Question, device: torch.device) -> dict[str, int]:
    """Return in how many images of the sample the rounding to float16 changes what is right and what is proved."""
    targets = maps.targets[list(maps.sample_places)].to(device)
    exact, rounded = (_Batch(logits, targets) for logits in maps.sample(device))
    return {
        "images": len(targets),
        "clean": int((exact.is_right(question) != rounded.is_right(question)).sum()),
        "robust": int((exact.is_proved(question) != rounded.is_proved(question)).sum()),
    }


def told(rounded: Mapping[str, int], model: str) -> str:
    """Return what `rounding` found as a sentence."""
    return (
        f"{model}: certificates are about maps in float16; on {rounded['images']} images they and those about the "
        f"network's float32 differ in {rounded['clean']} right labels and {rounded['robust']} proofs."
    )
