"""Counting over maps: which labels are right and which are proved, for many settings in one pass over the files."""

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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
from patchguard.experiments.paper.settled import doubly_masked
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
@dataclass(frozen=True)
class Counts:
    """How many of `of` images are right, and for how many of these that is proved."""

    of: int
    right: int
    proved: int

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
            evidence, defense = self.of(question.evidence)[places], question.defense
            if isinstance(defense, DoubleMasking) and defense.masks == question.windows and defense.masks.equal_boxes:
                found[places] = doubly_masked(evidence, defense.masks, self.targets[places])
                return found
            proof = question.defense.certify(evidence, question.windows, self.targets[places], question.top_k)
            found[places] = proof.certified
        return found


def among_best(scores: Float[Tensor, "some classes"], targets: Tensor, top_k: int) -> Bool[Tensor, " some"]:
    """Whether fewer than k classes come before the true one (ties: smallest class first)."""
    mine = scores.gather(1, targets.unsqueeze(1))
    classes = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > mine) | ((scores == mine) & (classes < targets.unsqueeze(1)))
    return before.sum(1) < top_k


def over_batches(
    maps: Maps, device: torch.device, work: Callable[[Tensor, Tensor], Counter[Hashable]]
) -> Counter[Hashable]:
    """Return the sum of what `work` counts in each batch of logits and targets.

    On a CPU, batches are shared by as many threads as there are processors, and each does its sums alone: the tensors
    are too small to be divided.
    """
    total: Counter[Hashable] = Counter()
    if device.type != "cpu":
        for batch in maps.batches(device):
            total.update(work(*batch))
        return total
    threads = torch.get_num_threads()
    workers = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(workers, "maps", partial(torch.set_num_threads, 1)) as pool:
            waiting: deque[Future[Counter[Hashable]]] = deque()
            for batch in maps.batches(device):
                waiting.append(pool.submit(work, *batch))
                if len(waiting) > workers:
                    total.update(waiting.popleft().result())
            for future in waiting:
                total.update(future.result())
    finally:
        torch.set_num_threads(threads)
    return total


def count(maps: Maps, questions: Mapping[Key, Question], device: torch.device) -> dict[Key, Counts]:
    """Answer questions about all maps, in one pass; what an earlier table asked is not counted again."""
    new = [question for question in dict.fromkeys(questions.values()) if question not in maps.answers]

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        batch = _Batch(local_logits, targets)
        found: Counter[Hashable] = Counter()
        for question in new:
            found[question, "right"] += int(batch.is_right(question).sum())
            found[question, "proved"] += int(batch.is_proved(question).sum())
        return found

    if new:
        total = over_batches(maps, device, work)
        for question in new:
            maps.answers[question] = Counts(len(maps), total[question, "right"], total[question, "proved"])
    return {key: maps.answers[question] for key, question in questions.items()}


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
