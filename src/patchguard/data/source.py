"""`Source`: images by number, decoded one at a time, from the embedded sample, a known set, a folder or a pattern."""

import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import final

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchguard.data import cifar10, folder, sample
from patchguard.data.catalog import CIFAR10_CLASSES, TEST_SETS, data_root
from patchguard.data.dataset import sample_evenly
from patchguard.data.decode import Unreadable, decode
from patchguard.data.folder import Listing
from patchguard.errors import InputError, nearest

DATASETS = ("cifar10", *folder.CLASS_FOLDERS, "folder")  # those with a training part


@final
@dataclass(frozen=True, eq=False)
class Source:
    """Images with or without true classes, each read when it is asked for and at its own size.

    `names[i]` says which image i is: its path below the root, with forward slashes, or `test/00012` for image 12 of the
    test set of CIFAR-10. `targets` is None where images are not labeled. `read(i)` returns 8-bit pixels (3, height,
    width) or raises `Unreadable`. `ignored` counts files that were passed over as no images. `fingerprint(i)` changes
    when the file behind image i does (its size and time); it is empty for sets whose contents are checked by digest.
    """

    names: tuple[str, ...]
    targets: tuple[int, ...] | None
    class_names: tuple[str, ...]
    read: Callable[[int], Tensor]
    ignored: int = 0
    fingerprint: Callable[[int], str] = lambda index: ""

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Iterable[int]) -> "Source":
        """Return the images of these numbers, in this order."""
        chosen = tuple(indices)
        return replace(
            self,
            names=tuple(self.names[index] for index in chosen),
            targets=None if self.targets is None else tuple(self.targets[index] for index in chosen),
            read=lambda index: self.read(chosen[index]),
            fingerprint=lambda index: self.fingerprint(chosen[index]),
        )

    def limit(self, count: int, seed: int = 0) -> "Source":
        """Return `count` evenly spaced images, by `sample_evenly`, or all where there are fewer."""
        if count < 1:
            raise InputError(f"`limit` must be a whole number, 1 or more; got {count}.")
        return self if count >= len(self) else self.subset(sample_evenly(count, len(self), seed))

    def preprocess(self, preprocess: Callable[[Tensor], Tensor]) -> "Source":
        """Return the images as `preprocess` leaves them, rounded to 8 bits."""

        def read(index: int) -> UInt8[Tensor, "3 height width"]:
            image = self.read(index)
            try:
                pixels = preprocess(image[None].float() / 255)[0]
            except InputError as error:
                raise Unreadable(self.names[index], f"cannot be prepared: {str(error).rstrip('.')}") from None
            return (pixels * 255).round().to(torch.uint8)

        return replace(self, read=read)


def open_source(what: str | Path, root: str | Path | None = None) -> Source:
    """Return the images that `what` names.

        sample                        the embedded images
        cifar10, imagenette, ...      the test part of a known set, from files at or below `root`; installed packages
                                      may add sets
        a folder                      its images; labeled if it holds a folder per class, and of `train/` and
                                      `val/` (or `test/`) only the latter
        a pattern, photos/*.jpg       the images it matches, not labeled
        a file                        that one image

    A known name wins over a folder of that name; write ./sample for the folder. `root` is by default
    $PATCHGUARD_DATA or ~/.cache/patchguard/data. Nothing is decoded yet.
    """
    name, path = str(what), Path(what).expanduser()
    if name in TEST_SETS:
        source = TEST_SETS[name](data_root(root))
        if not isinstance(source, Source):
            raise InputError(
                f"the dataset {name!r} must open as a Source; its function returned {type(source).__name__}."
            )
        return source
    if path.is_dir():
        return _from_listing(folder.list_folder(path))
    if path.is_file():
        return _from_listing(Listing(path.parent, (path.name,), None, (), 0))
    if glob.has_magic(name):
        return _from_listing(folder.match_pattern(str(path)))
    if len(PurePath(name).parts) > 1 or name.startswith("."):
        raise InputError(f"no folder or file of images is at {name}. Check the path.")
    raise InputError(
        f"`{name}` is neither a folder, a file nor a known set of images. {nearest(name, list(TEST_SETS))}"
    )


# -- the datasets of the package ---------------------------------------------------------------------------------------


def open_sample(root: Path) -> Source:
    """Return the embedded images."""
    embedded = sample.load()
    return _from_test_set(embedded.images, sample.test_indices().tolist(), embedded.targets)


def open_cifar10(root: Path) -> Source:
    """Return the test images of CIFAR-10."""
    images, targets = cifar10.read(root, cifar10.TEST)
    return _from_test_set(torch.from_numpy(images), range(len(images)), torch.from_numpy(targets))


def _open_known_set(name: str, root: Path) -> Source:
    return _from_listing(folder.list_known_set(name, root)[1])


open_imagenette = partial(_open_known_set, "imagenette")
open_imagenet = partial(_open_known_set, "imagenet")
open_flowers = partial(_open_known_set, "flowers")
open_cats_vs_dogs = partial(_open_known_set, "cats_vs_dogs")


def open_splits(name: str, root: str | Path) -> tuple[Source, Source]:
    """Return the training and test images of a set of photos, or of `folder`, the folder `root` itself.

    Where a set has no official split, a seeded fifth of its files is for testing. Nothing is decoded yet.
    """
    if name not in DATASETS:
        raise InputError(f"`name` must be a known dataset; got {name!r}. {nearest(name, list(DATASETS))}")
    path = Path(root)
    train, test = folder.list_splits(path) if name == "folder" else folder.list_known_set(name, path)
    return _from_listing(train), _from_listing(test)


def _from_listing(listing: Listing) -> Source:
    def read(index: int) -> UInt8[Tensor, "3 height width"]:
        try:
            return decode(listing.root / listing.names[index])
        except Unreadable as error:
            raise Unreadable(listing.names[index], error.reason) from None

    def fingerprint(index: int) -> str:
        try:
            file = (listing.root / listing.names[index]).stat()
        except OSError:
            return "gone"
        return f"{file.st_size} {file.st_mtime_ns}"

    return Source(listing.names, listing.targets, listing.class_names, read, listing.ignored, fingerprint)


def _from_test_set(
    images: UInt8[Tensor, "count 3 height width"], indices: Iterable[int], targets: Int64[Tensor, " count"]
) -> Source:
    names = tuple(f"test/{index:05d}" for index in indices)
    return Source(names, tuple(targets.tolist()), CIFAR10_CLASSES, lambda index: images[index])
