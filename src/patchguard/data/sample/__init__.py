"""The embedded sample: 500 test images of CIFAR-10, so that everything can be tried without a download."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.data.catalog import CIFAR10_CLASSES
from patchguard.data.dataset import Dataset

FILE = Path(__file__).parent / "cifar10.npz"


def load() -> Dataset:
    """Return the 500 images, 50 of each class, in the order of the official test set."""
    with np.load(FILE, allow_pickle=False) as archive:
        images, targets = archive["images"], archive["targets"]
    return Dataset(torch.from_numpy(images), torch.from_numpy(targets.astype(np.int64)), CIFAR10_CLASSES)


def test_indices() -> Int64[Tensor, " count"]:
    """Return the number of each image in the official test set, counted from 0."""
    with np.load(FILE, allow_pickle=False) as archive:
        return torch.from_numpy(archive["index"].astype(np.int64))
