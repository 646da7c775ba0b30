"""What a classifier says of images behind masks: one round with single masks, then pairs as they are needed.

Questions of many images share batches, and a question is closed as soon as one answer decides it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from patchguard.defenses.ties import argmax
from patchguard.geometry.mask_sets import MaskSet
from patchguard.guard import Images
from patchguard.guards.classifier import Classifier

LARGEST = torch.finfo(torch.float64).max
Pair: TypeAlias = tuple[int, int, int]  # image, mask, second mask; the same mask twice is a single one
ROUNDING = 1e-9  # of a softmax of float32 scores in double precision, with room


@final
@dataclass(frozen=True, eq=False)
class MaskRounds:
    """A batch of images and their scores behind masks; x with m and m' hidden is the same as with m' and m."""

    classifier: Classifier
    masks: MaskSet
    fill: tuple[float, float, float]
    images: Images

    @cached_property
    def plain(self) -> Float64[Tensor, "batch classes"]:
        """The scores of the images as they are."""
        return self.classifier(self.images)

    @cached_property
    def single(self) -> Float64[Tensor, "batch masks classes"]:
        """The scores behind each single mask: the first round."""
        images, masks = len(self.images), len(self.masks.boxes)
        scores = self.ask([(image, mask, mask) for image in range(images) for mask in range(masks)])
        return scores.view(images, masks, -1)

    @cached_property
    def labels(self) -> Int64[Tensor, "batch masks"]:
        """The label behind each single mask."""
        return argmax(self.single, 2)

    @cached_property
    def log_odds(self) -> Float64[Tensor, "batch masks"]:
        """log p / (1 - p) of the label behind each single mask, p its softmax."""
        own, label = self.single.amax(2), self.labels.unsqueeze(2)
        return own - self.single.scatter(2, label, -torch.inf).logsumexp(2)

    @property
    def confidence(self) -> Float64[Tensor, "batch masks"]:
        """The softmax of the label behind each single mask."""
        return self.log_odds.sigmoid()

    def bound_confidence(self, drift: float) -> tuple[Float64[Tensor, "batch masks"], Float64[Tensor, "batch masks"]]:
        """Return what `confidence` is at least and at most when every score moves by up to `drift`.

        The log odds then move by up to twice as much: an upper bound where another class becomes the label, too.
        """
        lowest, highest = (self.log_odds - 2 * drift).sigmoid(), (self.log_odds + 2 * drift).sigmoid()
        return lowest - ROUNDING, highest + ROUNDING

    # -- asking --------------------------------------------------------------------------------------------------------

    @cached_property
    def _hidden(self) -> Bool[Tensor, "masks height width"]:
        return torch.from_numpy(self.masks.pixels).to(self.images.device)

    def hide(self, pairs: Sequence[Pair]) -> Images:
        """Return the images with the pixels of one or two masks set to `fill`."""
        image, one, other = torch.tensor(pairs, device=self.images.device).T
        fill = torch.tensor(self.fill, device=self.images.device, dtype=self.images.dtype).view(3, 1, 1)
        return torch.where((self._hidden[one] | self._hidden[other]).unsqueeze(1), fill, self.images[image])

    def ask(self, pairs: Sequence[Pair]) -> Float64[Tensor, "pairs classes"]:
        """Return the scores of images behind masks."""
        some = self.classifier.at_once(self.images)
        parts = [pairs[first : first + some] for first in range(0, len(pairs), some)]
        return torch.cat([self.classifier(self.hide(part)) for part in parts])

    def ask_in_turn(
        self,
        questions: Sequence[Sequence[Pair]],
        hear: Callable[[list[int], list[Pair], Float64[Tensor, "asked classes"]], set[int]],
    ) -> None:
        """Ask the pairs of every question, in their order, until `hear` says that it is decided.

        `hear` gets the questions' numbers, the pairs and their scores. Few questions get many pairs at once, many
        questions few each.
        """
        some, asked_before = self.classifier.at_once(self.images), 0
        undecided = [number for number, pairs in enumerate(questions) if pairs]
        while undecided:
            quota = max(1, some // len(undecided))
            asked = [
                (number, pair)
                for number in undecided
                for pair in questions[number][asked_before : asked_before + quota]
            ]
            numbers, pairs = [number for number, _ in asked], [pair for _, pair in asked]
            decided = hear(numbers, pairs, self.ask(pairs))
            asked_before += quota
            undecided = [
                number for number in undecided if number not in decided and len(questions[number]) > asked_before
            ]


@final
class PairLeads:
    """How far a label leads behind pairs of masks, less twice the drift; infinity where nobody has asked yet.

    `drift` is how far a score may move when the classifier is run again: a lead above 0 then stays one.
    """

    def __init__(self, rounds: MaskRounds, label: Int64[Tensor, " batch"], drift: float) -> None:
        self.rounds, self.label, self.drift = rounds, label, drift
        images, masks, classes = rounds.single.shape
        self.lead: Float64[np.ndarray, "batch masks masks"] = np.full((images, masks, masks), np.inf)
        self.rival: Int64[np.ndarray, "batch masks masks"] = np.zeros((images, masks, masks), dtype=np.int64)
        lead, rival = measure_lead(rounds.single.reshape(-1, classes), label.repeat_interleave(masks), drift)
        diagonal = np.arange(masks)
        self.lead[:, diagonal, diagonal] = lead.reshape(images, masks)
        self.rival[:, diagonal, diagonal] = rival.reshape(images, masks)

    @property
    def worst(self) -> Float64[np.ndarray, "batch masks"]:
        """The smallest lead of each mask, over all pairs that it is part of and that were asked."""
        return np.asarray(self.lead.min(2))

    def prove(self, covering: Bool[np.ndarray, "positions masks"], rows: Sequence[int] | None = None) -> None:
        """Ask pairs of each image until all are known, or some position has no mask left whose every pair leads.

        The likeliest to fail come first: the pairs whose two single masks lead least.
        """
        chosen = range(len(self.lead)) if rows is None else rows
        one, other = np.triu_indices(self.lead.shape[1], 1)
        questions: list[list[Pair]] = []
        for image in chosen:
            single = self.lead[image].diagonal()
            unknown = np.isposinf(self.lead[image, one, other]) & is_proved(self.lead[image], covering)
            order = np.argsort(single[one] + single[other], kind="stable")
            questions.append([(image, int(one[pair]), int(other[pair])) for pair in order if unknown[pair]])

        def hear(numbers: list[int], pairs: list[Pair], scores: Tensor) -> set[int]:
            image, first, second = np.array(pairs).T
            lead, rival = measure_lead(scores, self.label[torch.from_numpy(image).to(self.label.device)], self.drift)
            for a, b in ((first, second), (second, first)):
                self.lead[image, a, b], self.rival[image, a, b] = lead, rival
            return {number for number in set(numbers) if not is_proved(self.lead[chosen[number]], covering)}

        self.rounds.ask_in_turn(questions, hear)


def is_proved(lead: Float64[np.ndarray, "masks masks"], covering: Bool[np.ndarray, "positions masks"]) -> bool:
    """Whether every position lies in a mask m with a lead behind m and m', for every m' that was asked."""
    return bool((covering & (lead.min(1) > 0)).any(1).all())


def measure_lead(
    scores: Float64[Tensor, "some classes"], label: Int64[Tensor, " some"], drift: float
) -> tuple[Float64[np.ndarray, " some"], Int64[np.ndarray, " some"]]:
    """Return the lead of the label over the best other class, less twice the drift, and that class.

    Scores that are not finite have no lead that drift could be charged on: minus infinity. A lead is never above the
    largest number, so that infinity says that nobody has asked.
    """
    own = scores.gather(1, label.unsqueeze(1)).squeeze(1)
    others = scores.scatter(1, label.unsqueeze(1), -torch.inf)
    rival = argmax(others, 1)
    lead = own - others.gather(1, rival.unsqueeze(1)).squeeze(1) - 2 * drift
    finite = scores.abs().amax(1) < LARGEST
    return torch.where(finite, lead.clamp(max=LARGEST), -torch.inf).cpu().numpy(), rival.cpu().numpy()
