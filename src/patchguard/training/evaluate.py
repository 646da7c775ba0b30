"""Clean and certified accuracy of a LocalGuard on labelled images, through its public verbs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from patchguard.data.datasets import Dataset
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.patch import Patch

AT_ONCE = 1000  # images that are turned from bytes into pixels together


@final
@dataclass(frozen=True)
class Accuracy:
    """How many of `count` images get the true label, and for how many that is proved against every such patch."""

    patch: Patch
    count: int
    right: int
    proved: int

    @property
    def clean(self) -> float:
        """Share of images whose defended label is the target."""
        return self.right / self.count

    @property
    def certified(self) -> float:
        """Share of images whose defended label is the target and cannot be changed by the patch."""
        return self.proved / self.count

    @property
    def score(self) -> tuple[int, int]:
        """What chooses among weights: an image counts for a right label, and once more for its proof."""
        return self.right + self.proved, self.proved

    def to_json(self) -> dict[str, Any]:
        """Return counts and shares as JSON values."""
        return {**asdict(self), "clean": self.clean, "certified": self.certified}

    def __str__(self) -> str:
        size = f"{self.patch.height}x{self.patch.width}"
        return f"clean {self.clean:.2%}, certified {self.certified:.2%} ({size} patch, {self.count} images)"


def evaluate(guard: Guard, data: Dataset, patch: Patch) -> Accuracy:
    """Return the accuracy of `guard`, with the masks it has, on all images of `data`."""
    if len(data) == 0:
        raise InputError("`data` must hold at least one image to measure accuracy on.")
    right = proved = 0
    with usual_kernels():
        for start in range(0, len(data), AT_ONCE):
            part = data.subset(slice(start, start + AT_ONCE))
            certificate = guard.certify(part.images.float() / 255, patch)
            true = certificate.label == part.targets
            right += int(true.sum())
            proved += int((true & certificate.certified).sum())
    return Accuracy(patch, len(data), right, proved)


@contextmanager
def usual_kernels() -> Iterator[None]:
    """Keep cuDNN from trying all kernels first, which for large batches in full precision takes a minute."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
