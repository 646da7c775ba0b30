"""Clean and certified accuracy of a guard on labeled images, through its public methods."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from patchguard.data.dataset import Dataset
from patchguard.errors import InputError
from patchguard.guard import Certificate, Guard, move, require_label
from patchguard.guards.local import LocalGuard
from patchguard.models.base import apply_linear_at_cells
from patchguard.patch import Patch
from patchguard.training.features import FeatureSet, require_last_layer

CHUNK = 1000  # images that are turned from bytes into pixels together


@final
@dataclass(frozen=True)
class Accuracy:
    """How many of `total` images get the correct label, and how many of those are certified against the patch."""

    patch: Patch
    total: int
    correct: int
    certified_correct: int

    @property
    def clean(self) -> float:
        """Fraction of images whose defended label is the target."""
        return self.correct / self.total

    @property
    def certified(self) -> float:
        """Fraction of images whose defended label is the target and cannot be changed by the patch."""
        return self.certified_correct / self.total

    @property
    def score(self) -> tuple[int, int]:
        """What chooses among weights: one point for a correct label, and another one for its certificate."""
        return self.correct + self.certified_correct, self.certified_correct

    def to_json(self) -> dict[str, Any]:
        """Return counts and fractions as JSON values."""
        return {**asdict(self), "clean": self.clean, "certified": self.certified}

    def __str__(self) -> str:
        size = f"{self.patch.height}x{self.patch.width}"
        return f"clean {self.clean:.2%}, certified {self.certified:.2%} ({size} patch, {self.total} images)"


def evaluate(guard: Guard, data: Dataset | FeatureSet, patch: Patch) -> Accuracy:
    """Return the accuracy of `guard`, with the masks it has, on all images of `data`."""
    if len(data) == 0:
        raise InputError("`data` must hold at least one image to measure accuracy on.")
    correct = certified_correct = 0
    with without_cudnn_benchmark():
        for start in range(0, len(data), CHUNK):
            part = data.subset(slice(start, start + CHUNK))
            certificate = _certify(guard, part, patch)
            hits = certificate.label == part.targets
            correct += int(hits.sum())
            certified_correct += int((hits & certificate.certified).sum())
    return Accuracy(patch, len(data), correct, certified_correct)


def _certify(guard: Guard, data: Dataset | FeatureSet, patch: Patch) -> Certificate:
    """Return the certificates of a part; of features, by the last layer of the guard's network alone."""
    if isinstance(data, Dataset):
        return require_label(guard.certify(data.images.float() / 255, patch))
    assert isinstance(guard, LocalGuard)
    linear = require_last_layer(guard.model)
    with torch.no_grad():
        local_logits = apply_linear_at_cells(linear, data.features.to(linear.weight))
    answer = guard.defense.certify(guard.evidence(local_logits), guard.windows(patch, *data.size))
    return move(require_label(answer), data.targets.device)


@contextmanager
def without_cudnn_benchmark() -> Iterator[None]:
    """Keep cuDNN from trying all kernels first, which for large batches in full precision takes a minute."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
