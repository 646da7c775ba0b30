"""Queries about defenses on cached logits: which images are labeled correctly, and which of these are certified.

A `Query` is a defense on some evidence against some windows; a `Batch` answers queries about some images. Tables need
no margins, only signs, which `fast_certificates` finds sooner than the defenses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor
from torch.nn.functional import one_hot, pad

from patchguard.defenses.base import Defense, select
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.order_statistics import ascending
from patchguard.defenses.window_products import integral_image
from patchguard.defenses.window_sums import sums
from patchguard.geometry.windows import Windows

# The paper charges no drift; nor do its tables here. LOGITS is its default: c_l = 0, c_h = infinity. Ten binary places
# are as many as float16, in which logits are cached, has between 1 and 2; sums then fit 32 bits.
LOGITS = Evidence(kind="logits", low=0.0, bits=10)
SIGNED = Evidence(kind="logits", low=None, bits=10)
CONFIDENCE = Evidence(kind="confidence")
PREDICTION = Evidence(kind="prediction")
VOTE = Evidence(kind="vote", threshold=0.2)
TANH = Evidence(kind="tanh")

LARGEST_SHORT = 2**27  # of a gap's absolute values: nine times it, and `nothing` with three times it, still fit 32 bits
SEARCHED_AT_ONCE = {"cpu": 256, "cuda": 4096}  # evidence maps whose pairs of windows are searched together

Marks: TypeAlias = Bool[Tensor, " batch"]


@final
@dataclass(frozen=True, kw_only=True)
class Query:
    """A defense on some evidence, and the windows that an attack may rewrite; without windows only its labels count.

    `fast` answers as the defense would, sooner.
    """

    evidence: Evidence
    defense: Defense[Any]
    windows: Windows | None = None
    top_k: int = 1
    fast: "FastPath | None" = None


@final
@dataclass(frozen=True, eq=False)
class FastPath:
    """How a batch answers queries about one kind of defense.

    `certified(batch, query, correct)`: whether the defense certifies those that are correct, without drift; None where
    the short forms do not hold. `correct(batch, query)`: whether the true class is among the k best; by default the
    defense says it.
    """

    certified: "Callable[[Batch, Query, Marks], Marks | None]"
    correct: "Callable[[Batch, Query], Marks] | None" = None


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """The evidence of some images, their true classes, and what several queries about them share."""

    evidence: EvidenceMap
    targets: Int64[Tensor, " batch"]
    _cache: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def correct(self, query: Query) -> Marks:
        """Whether the true class is the label, or among the k best."""
        return self.once((query.defense, query.top_k), lambda: self._correct(query))

    def _correct(self, query: Query) -> Marks:
        if query.fast is not None and query.fast.correct is not None:
            return query.fast.correct(self, query)
        prediction = query.defense.predict(self.evidence)
        if query.top_k == 1:
            return prediction.label == self.targets
        return among_best(prediction.scores, self.targets, query.top_k)

    def certified(self, query: Query) -> Marks:
        """Whether that is so and no contents of any window change it; nothing is computed for wrong labels."""
        correct = self.correct(query)
        if query.windows is None:
            return torch.zeros_like(correct)
        query.defense.validate(self.evidence, query.windows, query.top_k)
        driftless = self.evidence.lower is self.evidence.values is self.evidence.upper
        if query.fast is not None and driftless and bool(self.evidence.finite.all()):
            marks = query.fast.certified(self, query, correct)
            if marks is not None:
                return correct & marks
        return self.ask_defense(query, correct)

    def ask_defense(self, query: Query, chosen: Marks) -> Marks:
        """Whether the defense itself certifies the true class, for the chosen images."""
        assert query.windows is not None
        certified = torch.zeros_like(chosen)
        (images,) = chosen.nonzero().unbind(1)
        if len(images):
            evidence, targets = self.evidence[images], self.targets[images]
            certified[images] = query.defense.certify(evidence, query.windows, targets, query.top_k).certified
        return certified

    # -- what queries share --------------------------------------------------------------------------------------------

    def once(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` gives, computed at the first call with this key."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @cached_property
    def values(self) -> Int[Tensor, "batch classes rows columns"]:
        """The evidence u, in 32 bits where its sums fit."""
        return shorten(self.evidence.values)

    @cached_property
    def total(self) -> Int[Tensor, "batch classes"]:
        """S_k."""
        return self.values.sum((2, 3), dtype=self.values.dtype)

    @cached_property
    def gap(self) -> Int[Tensor, "batch classes rows columns"]:
        """g_k = u_y - u_k."""
        return select(self.values, self.targets).unsqueeze(1) - self.values

    @cached_property
    def rivals(self) -> Bool[Tensor, "batch classes"]:
        """All classes but the true one."""
        return ~one_hot(self.targets, self.total.shape[1]).bool()

    def inside(self, windows: Windows) -> Int[Tensor, "batch classes regions"]:
        """Return what each class has in each window."""
        return self.once(windows, lambda: self._window_sums("values", self.values, windows))

    def most_hidden(self, masks: Windows) -> Int[Tensor, "batch classes"]:
        """Return the most that a mask can hide of what is positive in g_k."""
        return self._window_sums("gap", self.gap.clamp(min=0), masks).amax(2)

    def _window_sums(self, name: str, maps: Tensor, windows: Windows) -> Tensor:
        table = self.once((name, windows.wrap), lambda: integral_image(maps.flatten(0, 1), windows.wrap))
        return sums(maps, windows, table)

    def ascending_sums(self) -> Int64[Tensor, "batch classes ranks"]:
        """Return the sum of the smallest cells of a class, for every number of them."""
        cells = self.values.flatten(2)
        return self.once("ranks", lambda: pad(ascending(cells).cumsum(2, dtype=torch.int64), (1, 0)))

    def chunks(self, chosen: Bool[Tensor, "batch *classes"]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the indices of what is chosen, some at a time."""
        indices = chosen.nonzero().unbind(1)
        step = SEARCHED_AT_ONCE.get(chosen.device.type, SEARCHED_AT_ONCE["cuda"])
        for first in range(0, len(indices[0]), step):
            yield tuple(each[first : first + step] for each in indices)


def shorten(values: Int64[Tensor, "batch classes rows columns"]) -> Int[Tensor, "batch classes rows columns"]:
    """Return evidence in 32 bits where no sum of differences of two classes comes near their end: twice as fast."""
    return values.int() if 2 * int(values.abs().sum((2, 3)).max()) < LARGEST_SHORT else values


def among_best(scores: Tensor, targets: Int64[Tensor, " batch"], top_k: int) -> Marks:
    """Whether fewer than k classes come before the true one (ties: smallest class first)."""
    own = scores.gather(1, targets.unsqueeze(1))
    classes = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (classes < targets.unsqueeze(1)))
    return before.sum(1) < top_k
