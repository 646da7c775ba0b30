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
from patchguard.data.catalog import CATALOG, data_root
from patchguard.data.classes import CIFAR10
from patchguard.data.decode import Unreadable, decode
from patchguard.data.draw import spread
from patchguard.data.folder import Listing
from patchguard.errors import InputError, nearest


def unchanging(place: int) -> str:
    """Return the state of an image that cannot change."""
    return ""


@final
@dataclass(frozen=True, eq=False)
class Source:
    """Images with or without true classes, each read when it is asked for and at its own size.

    `names[i]` says which image i is: its path below the root, with forward slashes, or `test/00012` for image 12 of the
    test set of CIFAR-10. `state(i)` changes when the file behind it does (its size and time); it is empty for sets
    whose contents are checked by digest. `targets` is None where there are no classes. `read(i)` returns 8-bit pixels
    (3, height, width) or raises `Unreadable`. `ignored` counts files that were passed over as no images.

    A source can be pickled, and so be used by worker processes.
    """

    names: tuple[str, ...]
    targets: tuple[int, ...] | None
    class_names: tuple[str, ...]
    read: Callable[[int], Tensor]
    ignored: int = 0
    state: Callable[[int], str] = unchanging

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, places: Iterable[int]) -> "Source":
        """Return the images at these places, in this order."""
        kept = tuple(places)
        return Source(
            names=tuple(self.names[place] for place in kept),
            targets=None if self.targets is None else tuple(self.targets[place] for place in kept),
            class_names=self.class_names,
            read=partial(_read_at, self.read, kept),
            ignored=self.ignored,
            state=partial(_state_at, self.state, kept),
        )

    def limited(self, count: int, seed: int = 0) -> "Source":
        """Return `count` images, or all where there are fewer: the seeded, even choice of `spread`, in order."""
        if count < 1:
            raise InputError(f"`limit` must be a whole number, 1 or more; got {count}.")
        return self if count >= len(self) else self.subset(spread(count, len(self), seed))

    def prepared(self, preprocess: Callable[[Tensor], Tensor]) -> "Source":
        """Return the images as `preprocess` leaves them, rounded to 8 bits."""
        return replace(self, read=partial(_read_prepared, self.read, self.names, preprocess))


def open_source(what: str | Path, root: str | Path | None = None) -> Source:
    """Return the images that `what` names.

        sample                        the embedded images
        cifar10, imagenette, ...      the test part of a known set, from files at or below `root`
        a folder                      its images; with classes if it holds a folder per class, and of `train/` and
                                      `val/` (or `test/`) only the latter
        a pattern, photos/*.jpg       the images it matches, without classes
        a file                        that one image

    A known name wins over a folder of that name; write ./sample for the folder. `root` is by default
    $PATCHGUARD_DATA or ~/.cache/patchguard/data. Nothing is decoded yet.
    """
    name, path = str(what), Path(what).expanduser()
    if name == "sample":
        embedded = sample.load()
        return _numbered(embedded.images, sample.positions().tolist(), embedded.targets)
    if name == "cifar10":
        images, targets = cifar10.read(data_root(root), cifar10.TEST)
        return _numbered(torch.from_numpy(images), list(range(len(images))), torch.from_numpy(targets))
    if name in CATALOG:
        return of_listing(folder.named_parts(name, data_root(root))[1])
    if path.is_dir():
        return of_listing(folder.listed(path))
    if path.is_file():
        return of_listing(Listing(path.parent, (path.name,), None, (), 0))
    if glob.has_magic(name):
        return of_listing(_matched(str(path)))
    if len(PurePath(name).parts) > 1 or name.startswith("."):
        raise InputError(f"no folder or file of images is at {name}. Check the path.")
    raise InputError(f"`{name}` is neither a folder, a file nor a known set of images. {nearest(name, list(CATALOG))}")


def of_listing(listing: Listing) -> Source:
    """Return the images of a listing."""
    read = partial(_read_file, str(listing.root), listing.names)
    state = partial(_state_of_file, str(listing.root), listing.names)
    return Source(listing.names, listing.targets, listing.class_names, read, listing.ignored, state)


def _matched(pattern: str) -> Listing:
    parts = PurePath(pattern).parts
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    matches = [Path(match) for match in glob.iglob(pattern, recursive=True)]
    files = [match for match in matches if not match.is_dir()]
    names = sorted(match.relative_to(root).as_posix() for match in files if folder.is_image(match.name))
    if not names:
        raise InputError(
            f"no image matches {pattern} ({len(files)} other files do). Check the pattern, and quote it in a shell."
        )
    return Listing(root, tuple(names), None, (), len(files) - len(names))


def _numbered(
    images: UInt8[Tensor, "count 3 height width"], places: list[int], targets: Int64[Tensor, " count"]
) -> Source:
    names = tuple(f"test/{place:05d}" for place in places)
    return Source(names, tuple(targets.tolist()), CIFAR10, partial(_read_row, images))


# At module level, so that they can be pickled.


def _read_file(root: str, names: tuple[str, ...], place: int) -> UInt8[Tensor, "3 height width"]:
    try:
        return decode(Path(root) / names[place])
    except Unreadable as error:
        raise Unreadable(names[place], error.reason) from None


def _state_of_file(root: str, names: tuple[str, ...], place: int) -> str:
    try:
        found = (Path(root) / names[place]).stat()
    except OSError:
        return "gone"
    return f"{found.st_size} {found.st_mtime_ns}"


def _state_at(state: Callable[[int], str], places: tuple[int, ...], place: int) -> str:
    return state(places[place])


def _read_row(images: UInt8[Tensor, "count 3 height width"], place: int) -> UInt8[Tensor, "3 height width"]:
    return images[place]


def _read_prepared(
    read: Callable[[int], Tensor], names: tuple[str, ...], preprocess: Callable[[Tensor], Tensor], place: int
) -> UInt8[Tensor, "3 height width"]:
    image = read(place)
    try:
        pixels = preprocess(image[None].float() / 255)[0]
    except InputError as error:
        raise Unreadable(names[place], f"cannot be prepared: {str(error).rstrip('.')}") from None
    return (pixels * 255).round().to(torch.uint8)


def _read_at(read: Callable[[int], Tensor], places: tuple[int, ...], place: int) -> UInt8[Tensor, "3 height width"]:
    return read(places[place])
