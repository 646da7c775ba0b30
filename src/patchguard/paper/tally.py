"""Counting over maps: which labels are right and which are proved, for many settings in one pass over the files."""

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.paper.maps import Maps
from patchguard.paper.settled import Sheet
from patchguard.runs import metrics
from patchguard.runs.metrics import Share

# The paper charges no drift; nor do its tables here. LOGITS is its default: c_l = 0, c_h = infinity. Ten binary places
# are as many as float16, in which maps are kept, has for logits between 1 and 2; sums then fit 32 bits.
LOGITS = Evidence(kind="logits", low=0.0, bits=10)
SIGNED = Evidence(kind="logits", low=None, bits=10)
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
@dataclass(frozen=True, eq=False)
class _Batch:
    """Logits and true classes, and a sheet for each kind of evidence that is asked about."""

    local_logits: Tensor
    targets: Tensor
    sheets: dict[Evidence, Sheet] = field(default_factory=dict)

    def _sheet(self, evidence: Evidence) -> Sheet:
        if evidence not in self.sheets:
            self.sheets[evidence] = Sheet(evidence(self.local_logits), self.targets)
        return self.sheets[evidence]

    def is_right(self, question: Question) -> Bool[Tensor, " some"]:
        return self._sheet(question.evidence).right(question.defense, question.top_k)

    def is_proved(self, question: Question) -> Bool[Tensor, " some"]:
        if question.windows is None:
            return torch.zeros_like(self.targets, dtype=torch.bool)
        return self._sheet(question.evidence).proved(question.defense, question.windows, question.top_k)


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
    known: dict[str, int] | None = maps.answers.get(("rounding", question))
    if known is not None:
        return known
    targets = maps.targets[list(maps.sample_places)].to(device)
    exact, rounded = (_Batch(logits, targets) for logits in maps.sample(device))
    found = {
        "images": len(targets),
        "clean": int((exact.is_right(question) != rounded.is_right(question)).sum()),
        "robust": int((exact.is_proved(question) != rounded.is_proved(question)).sum()),
    }
    maps.answers["rounding", question] = found
    return found


def told(rounded: Mapping[str, int], model: str) -> str:
    """Return what `rounding` found as a sentence."""
    return (
        f"{model}: certificates are about maps in float16; on {rounded['images']} images they and those about the "
        f"network's float32 differ in {rounded['clean']} right labels and {rounded['robust']} proofs."
    )
