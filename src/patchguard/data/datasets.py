"""Labelled images by name, ready to train and test on."""

from pathlib import Path

import torch

from patchguard.data import cifar10, folder
from patchguard.data.classes import CIFAR10
from patchguard.data.dataset import Dataset as Dataset
from patchguard.data.dataset import Splits as Splits
from patchguard.data.dataset import hold_out as hold_out
from patchguard.data.loading import loaded
from patchguard.data.source import Source, of_listing
from patchguard.errors import InputError, nearest

NAMES = ("cifar10", *folder.CLASS_FOLDERS, "folder")
PHOTO_SIZE = (224, 224)


def load(name: str, root: str | Path, *, size: tuple[int, int] | None = None, workers: int | None = None) -> Splits:
    """Return the dataset `name` from files at or below `root`, in the official order and split.

    `folder` is any folder with a folder per class, or with `train/` and `val/` of those. Photos are brought to `size`,
    by default 224 x 224; CIFAR-10 is checked against the official digests and stays as it is.
    """
    if name not in NAMES:
        raise InputError(f"`name` must be a known dataset; got {name!r}. {nearest(name, list(NAMES))}")
    if name == "cifar10":
        return _cifar10(Path(root), size)
    train, test = sources(name, root)
    wanted = size or PHOTO_SIZE
    return Splits(loaded(train, size=wanted, workers=workers)[0], loaded(test, size=wanted, workers=workers)[0])


def sources(name: str, root: str | Path) -> tuple[Source, Source]:
    """Return the training and test images of a set of photos without decoding any, for `loading.batches`.

    Where a set has no official split, a seeded fifth of its files is for testing.
    """
    path = Path(root)
    train, test = folder.train_and_test(path) if name == "folder" else folder.named_parts(name, path)
    return of_listing(train), of_listing(test)


def _cifar10(root: Path, size: tuple[int, int] | None) -> Splits:
    if size not in (None, (cifar10.SIDE, cifar10.SIDE)):
        raise InputError(
            f"`size` of cifar10 must be 32 x 32; got {size}. Let the model's preprocessing enlarge the images, so that "
            "patches are counted in source pixels."
        )
    parts = [cifar10.read(root, digests) for digests in (cifar10.TRAIN, cifar10.TEST)]
    train, test = (Dataset(torch.from_numpy(images), torch.from_numpy(targets), CIFAR10) for images, targets in parts)
    return Splits(train, test)
