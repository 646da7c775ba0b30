"""The images of a run: opened by name, with classes numbered as the model's are."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source, open_source
from patchguard.errors import InputError
from patchguard.guard import Guard

SAMPLED = 8  # images that are decoded to learn the usual size
NAMED = 5  # classes that a message names


def open_sources(names: Sequence[str], root: Path | None = None, *, labeled: bool = True) -> Source:
    """Return the images that the names stand for, one set after another; several sets together have no classes."""
    sources = [open_source(name, root) for name in names]
    if len(sources) == 1 and labeled:
        return sources[0]
    image_names = [
        name if len(source) == 1 and Path(name).is_file() else image_name
        for name, source in zip(names, sources, strict=True)
        for image_name in source.names
    ]
    images = [(source, index) for source in sources for index in range(len(source))]

    def read(index: int) -> Tensor:
        source, own_index = images[index]
        return source.read(own_index)

    def fingerprint(index: int) -> str:
        source, own_index = images[index]
        return source.fingerprint(own_index)

    return Source(tuple(image_names), None, (), read, sum(each.ignored for each in sources), fingerprint)


def find_usual_size(source: Source) -> tuple[int, int]:
    """Return the size of the largest of the first images, by its shorter side; raise if no image can be read."""
    sizes: list[tuple[int, int]] = []
    reason = ""
    for image in iterate_images(source):
        if isinstance(image, Unreadable):
            reason = reason or str(image)
            continue
        sizes.append((image.shape[1], image.shape[2]))
        if len(sizes) == SAMPLED:
            break
    if not sizes:
        raise InputError(f"none of the {len(source)} images can be read: {reason} Check the files.")
    return max(sizes, key=lambda size: (min(size), max(size)))


def align_classes(source: Source, guard: Guard) -> Source:
    """Return the source with its classes numbered as the model's are, by name."""
    if source.targets is None:
        return source
    theirs, ours = source.class_names, guard.class_names
    if not ours:
        if len(theirs) != guard.classes:
            raise InputError(
                f"the images must have the model's {guard.classes} classes, which have no names; got {len(theirs)}. "
                "Give images of those classes, or --unlabeled to ignore classes."
            )
        return source
    numbers = {name.casefold(): number for number, name in enumerate(ours)}
    unknown = [name for name in theirs if name.casefold() not in numbers]
    if unknown or len({name.casefold() for name in theirs}) < len(theirs):
        raise InputError(
            f"the classes of the images must be the model's ({_list(ours)}); got {_list(unknown or theirs)}. "
            "Rename the folders, or give --unlabeled to ignore classes."
        )
    number_of = [numbers[name.casefold()] for name in theirs]
    return replace(source, targets=tuple(number_of[target] for target in source.targets), class_names=ours)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def digest_source(source: Source) -> str:
    """Return the SHA-256 of names, classes and states of files: records of other images must not be taken for these."""
    total = hashlib.sha256()
    for index, name in enumerate(source.names):
        target = None if source.targets is None else source.targets[index]
        total.update(f"{name}\0{target}\0{source.fingerprint(index)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
