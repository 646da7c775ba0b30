"""Folders of images: listed in a fixed order without opening a file, with classes and with train and test parts.

    <folder>/*.jpg                             images without classes
    <folder>/<class>/**/*.jpg                  a class per sub-folder, numbered in sorted order
    <folder>/<date>/**/*.jpg                   images without classes
    <folder>/train/<class>/, .../val/<class>/  an official split; `test/` where there is no `val/`

Hidden files and files without an extension of an image are ignored and counted. Links are followed.
"""

import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import final

from patchguard.data.catalog import CATALOG, CATS_VS_DOGS_CLASSES, FLOWERS_CLASSES, IMAGENETTE_BY_WORDNET
from patchguard.errors import InputError, nearest

logger = logging.getLogger(__name__)

EXTENSIONS = (
    *(
        ".avif",
        ".bmp",
        ".gif",
        ".heic",
        ".heif",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
    ),
    *(".tif", ".tiff", ".webp"),
)
DATE = re.compile(r"(19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?(0[1-9]|[12]\d|3[01]))?)?")  # 2024, 2024-05, 20240517
PARTS = ("train", "val", "test")
TEST_FRACTION = 5  # one image in this many is for testing, where a set has no official split


@final
@dataclass(frozen=True)
class Listing:
    """Image files by their names below `root`, with forward slashes; `targets` is None where they are not labeled."""

    root: Path
    names: tuple[str, ...]
    targets: tuple[int, ...] | None
    class_names: tuple[str, ...]
    ignored: int

    def subset(self, indices: Iterable[int]) -> "Listing":
        """Return the files of these numbers."""
        chosen = tuple(indices)
        targets = None if self.targets is None else tuple(self.targets[index] for index in chosen)
        return replace(self, names=tuple(self.names[index] for index in chosen), targets=targets)


def is_image(name: str) -> bool:
    """Return whether a file of this name is listed."""
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS)


# -- any folder --------------------------------------------------------------------------------------------------------


def list_folder(root: Path) -> Listing:
    """Return the images in a folder: those of its test part, of its class folders, or the images themselves.

    Folders that are all named by dates, as cameras and phones make them, are not classes.
    """
    prefix = _find_prefix(root)
    parts = _find_parts(root / prefix)
    if parts is not None:
        return _list_parts(root, prefix, *parts)[1]
    listing = _list_unsplit(root, prefix)
    if listing.class_names and all(DATE.fullmatch(name) for name in listing.class_names):
        return replace(listing, targets=None, class_names=())
    return listing


def match_pattern(pattern: str) -> Listing:
    """Return the images that a pattern such as photos/*.jpg matches, not labeled."""
    parts = PurePath(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:fixed])
    matches = [Path(match) for match in glob.iglob(pattern, recursive=True)]
    files = [match for match in matches if not match.is_dir()]
    names = sorted(match.relative_to(root).as_posix() for match in files if is_image(match.name))
    if not names:
        raise InputError(
            f"no image matches {pattern} ({len(files)} other files do). Check the pattern, and quote it in a shell."
        )
    return Listing(root, tuple(names), None, (), len(files) - len(names))


def list_splits(root: Path) -> tuple[Listing, Listing]:
    """Return the official parts of a folder, or a seeded choice of 80 % and 20 % of its files where it has none.

    The choice is even over the classes and depends on the number of files alone. Both parts keep the sorted order.
    """
    prefix = _find_prefix(root)
    parts = _find_parts(root / prefix)
    if parts is not None:
        return _list_parts(root, prefix, *parts)
    whole = _list_unsplit(root, prefix)
    if whole.targets is None:
        raise InputError(f"{root} must hold one folder per class; it holds images only. Sort them into folders.")
    if len(whole.names) < TEST_FRACTION:
        raise InputError(f"{root} must hold at least {TEST_FRACTION} images to be split; got {len(whole.names)}.")
    from patchguard.data.dataset import SPLIT_SEED, sample_evenly  # torch: listing alone must not wait for it

    test = sample_evenly(len(whole.names) // TEST_FRACTION, len(whole.names), SPLIT_SEED)
    train = sorted({*range(len(whole.names))} - {*test})
    return whole.subset(train), whole.subset(test)


def _find_prefix(root: Path) -> str:
    """Return the way into a folder that holds nothing but one folder of folders, as archives often do, or ""."""
    if not root.is_dir():
        raise InputError(f"{root} must be a folder of images; there is none. Check the path.")
    prefix = ""
    while True:
        inner = subfolders(root / prefix)
        if len(inner) != 1 or inner[0] in PARTS or _images(root / prefix):
            return prefix
        deeper = f"{prefix}{inner[0]}/"
        if _images(root / deeper) or not class_folders(root / deeper):
            return prefix
        prefix = deeper


def _find_parts(folder: Path) -> tuple[str, str] | None:
    """Return the names of the training and the test part, or None where the folder has no parts."""
    parts = [part for part in PARTS if (folder / part).is_dir()]
    if not parts:
        return None
    if parts == ["train"] or "train" not in parts:
        raise InputError(
            f"{folder} holds {' and '.join(parts)}, but {'no test part' if parts == ['train'] else 'no train'}. "
            f"Name the part itself, {folder / parts[0]}, or add `train/` and `val/`."
        )
    return "train", parts[1]


def _list_unsplit(root: Path, prefix: str) -> Listing:
    inner = root / prefix
    classes, images = class_folders(inner), _images(inner)
    if classes and images:
        raise InputError(
            f"{inner} holds both images and folders of images, so it is unclear whether the folders are classes. "
            f"Move one of them away, or name the images alone: '{inner}/*'."
        )
    if classes:
        return _list_classes(root, prefix, classes)
    others = sum(1 for name, folder in _entries(inner) if not folder and not is_image(name))
    if not images:
        raise InputError(
            f"{root} holds no images ({others} other files). "
            f"Put images ({', '.join(EXTENSIONS)}) there, or folders of images, one per class."
        )
    return Listing(root, tuple(prefix + name for name in images), None, (), others)


def _list_parts(root: Path, prefix: str, train: str, test: str) -> tuple[Listing, Listing]:
    """The classes are those of the training part; a part without one of them is allowed, with another is not."""
    train_folder, test_folder = root / prefix / train, root / prefix / test
    classes, test_classes = class_folders(train_folder), class_folders(test_folder)
    unknown = sorted(set(test_classes) - set(classes))
    if not classes or len(unknown) == len(test_classes):
        raise InputError(f"{train_folder} and {test_folder} must hold one folder of images per class, of equal names.")
    if unknown:
        raise InputError(
            f"{test_folder} must hold classes of {train_folder} only; it also has {', '.join(unknown[:3])}. "
            "Move that away or rename it."
        )
    return _list_classes(root, f"{prefix}{train}/", classes), _list_classes(root, f"{prefix}{test}/", classes)


def _list_classes(root: Path, prefix: str, classes: tuple[str, ...]) -> Listing:
    names: list[str] = []
    targets: list[int] = []
    others: list[str] = []
    for target, folder in enumerate(classes):
        images: list[str] = []
        if (root / prefix / folder).is_dir():
            for name in _walk(root / prefix / folder):
                (images if is_image(name.rpartition("/")[2]) else others).append(f"{prefix}{folder}/{name}")
        names += sorted(images)
        targets += [target] * len(images)
    if others:
        logger.info("%s: %d files are hidden or no images and ignored, such as %s", root, len(others), min(others))
    # Folders named by WordNet number get readable names where we know them all.
    known = all(folder in IMAGENETTE_BY_WORDNET for folder in classes)
    class_names = tuple(IMAGENETTE_BY_WORDNET[folder] for folder in classes) if known else classes
    return Listing(root, tuple(names), tuple(targets), class_names, len(others))


def subfolders(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder that are not hidden, sorted."""
    return tuple(sorted(name for name, inner in _entries(folder) if inner and not name.startswith(".")))


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder that hold an image at any depth, sorted."""
    return tuple(
        name for name in subfolders(folder) if any(is_image(inner.rpartition("/")[2]) for inner in _walk(folder / name))
    )


def _images(folder: Path) -> list[str]:
    return sorted(name for name, inner in _entries(folder) if not inner and is_image(name))


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, relative to it, and hidden folders not at all; a link into itself ends there."""
    waiting, seen = [""], set()
    while waiting:
        prefix = waiting.pop()
        state = os.stat(folder / prefix)
        if (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        for name, inner in _entries(folder / prefix):
            if not inner:
                yield prefix + name
            elif not name.startswith("."):
                waiting.append(f"{prefix}{name}/")


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name, _is_folder(entry)
    except OSError as error:
        raise InputError(f"{folder} cannot be listed: {error.strerror}.") from None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a folder; a link that leads nowhere or in a circle is a file that cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


# -- sets known by name ------------------------------------------------------------------------------------------------

# The class folders by which a set is recognised; None: the 1000 WordNet numbers of ImageNet.
CLASS_FOLDERS: dict[str, tuple[str, ...] | None] = {
    "imagenette": tuple(IMAGENETTE_BY_WORDNET),
    "imagenet": None,
    "flowers": FLOWERS_CLASSES,
    "cats_vs_dogs": CATS_VS_DOGS_CLASSES,
}
IMAGENET_CLASSES = 1000


def find_known_set(name: str, root: Path) -> Path | None:
    """Return the folder of a named set: `root` itself, or one up to two levels below it, first by name."""
    if name not in CLASS_FOLDERS:
        raise InputError(f"`name` must be a set of photos; got {name!r}. {nearest(name, list(CLASS_FOLDERS))}")
    if not root.is_dir():
        return None
    below = [root / each for each in subfolders(root) if each not in PARTS]
    below.sort(key=lambda path: path.name != name)
    deeper = [path / each for path in below if len(subfolders(path)) < 100 for each in subfolders(path)]
    return next((path for path in (root, *below, *deeper) if _is_set(name, path)), None)


def _is_set(name: str, path: Path) -> bool:
    split = CATALOG[name].test > 0
    if split and not all((path / part).is_dir() for part in ("train", "val")):
        return False
    folders, expected = subfolders(path / "train" if split else path), CLASS_FOLDERS[name]
    if expected is not None:
        return folders == expected
    return len(folders) == IMAGENET_CLASSES and all(each[0] == "n" and each[1:].isdigit() for each in folders)


def list_known_set(name: str, root: Path) -> tuple[Listing, Listing]:
    """Return the training and test files of a named set; log a warning that counts what is missing."""
    folder, dataset = find_known_set(name, root), CATALOG[name]
    if folder is None:
        raise InputError(
            f"{name} is not in {root} or the folders below it. Get it from {dataset.origin} and lay it out as "
            f"{dataset.layout}."
        )
    train, test = list_splits(folder)
    counts = {"": (len(train.names) + len(test.names), dataset.train)}
    if dataset.test:
        counts = {"training ": (len(train.names), dataset.train), "test ": (len(test.names), dataset.test)}
    for part, (count, whole) in counts.items():
        if count != whole:
            logger.warning(
                "%s: %s %simages are in %s; the whole set has %s", name, f"{count:,}", part, folder, f"{whole:,}"
            )
    return train, test
