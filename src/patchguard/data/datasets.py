"""Labelled images by name, in the official order and split, checked against the official digests."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchguard.errors import InputError, nearest
from patchguard.runtime import generator

CIFAR10_CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_TRAIN = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
}
CIFAR10_TEST = {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"}
CIFAR10_FILES = {**CIFAR10_TRAIN, **CIFAR10_TEST}
CIFAR10_SIDE = 32

# Apart from any training seed: runs with other seeds hold out the same images and stay comparable.
SPLIT_SEED = 0


@final
@dataclass(frozen=True, eq=False)
class Dataset:
    """Images of one size as 8-bit pixels, each with the number of its true class."""

    images: UInt8[Tensor, "count 3 height width"]
    targets: Int64[Tensor, " count"]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]

    def subset(self, index: Int64[Tensor, " some"] | slice) -> "Dataset":
        """Return the images at these places, in this order."""
        return Dataset(self.images[index], self.targets[index], self.class_names)


@final
@dataclass(frozen=True, eq=False)
class Splits:
    """The official training and test images."""

    train: Dataset
    test: Dataset


def load(name: str, root: str | Path) -> Splits:
    """Return the dataset `name` from files at or below `root`."""
    if name not in _LOADERS:
        raise InputError(f"`name` must be a known dataset; got {name!r}. {nearest(name, list(_LOADERS))}")
    return _LOADERS[name](Path(root))


def hold_out(train: Dataset, count: int) -> tuple[Dataset, Dataset]:
    """Split training images into those to learn from and `count` to choose settings and checkpoints by.

    The split is a seeded draw that depends on the numbers of images alone. Both parts keep the official order.
    """
    if not 0 <= count < len(train):
        raise InputError(
            f"`count` of held-out images must leave some to learn from; got {count} of {len(train)}. Hold out fewer."
        )
    order = torch.randperm(len(train), generator=generator(SPLIT_SEED, len(train)))
    return train.subset(order[count:].sort().values), train.subset(order[:count].sort().values)


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------


def _cifar10(root: Path) -> Splits:
    return Splits(_cifar10_part(root, CIFAR10_TRAIN), _cifar10_part(root, CIFAR10_TEST))


def _cifar10_part(root: Path, digests: dict[str, str]) -> Dataset:
    rows = np.concatenate([_cifar10_rows(root, name, digest) for name, digest in digests.items()])
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, CIFAR10_SIDE, CIFAR10_SIDE).copy())
    return Dataset(images, torch.from_numpy(rows[:, 0].astype(np.int64)), CIFAR10_CLASSES)


def _cifar10_rows(root: Path, name: str, digest: str) -> np.ndarray:
    """Return the records of one file: a byte for the class, then the red, green and blue plane, row by row."""
    path = _found(root, name)
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != digest:
        raise InputError(
            f"{path} must be the official file with md5 {digest}; its md5 is {found} ({len(content):,} bytes). "
            "It is damaged or something else: delete it and fetch it again."
        )
    return np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * CIFAR10_SIDE * CIFAR10_SIDE)


def _found(root: Path, name: str) -> Path:
    """Look in `root` and two levels below: archives unpack into a folder, transfers into several."""
    if not root.is_dir():
        raise InputError(
            f"`root` must be a folder that holds the dataset; got {root}. Make it and put the files there."
        )
    for pattern in (name, f"*/{name}", f"*/*/{name}"):
        matches = sorted(root.glob(pattern))
        if matches:
            return matches[0]
    raise InputError(
        f"{name} is not in {root} or the folders below it. Unpack the binary version of CIFAR-10 "
        f"(cifar-10-binary.tar.gz) there: {', '.join(CIFAR10_FILES)}."
    )


_LOADERS = {"cifar10": _cifar10}
