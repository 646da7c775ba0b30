"""What is checked before a run goes on, or is shown again: its records are about the images that are there now."""

from collections.abc import Iterator
from typing import Any

from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.runs.records import Folder
from patchguard.storage.certificate_file import image_digest

BEGIN_ANEW = "Remove the folder and start the run anew."


def mark_recorded(folder: Folder, count: int) -> bytearray:
    """Return, for each of `count` images, whether it is recorded; refuse records of other images or of one twice."""
    recorded = bytearray(count)
    for record in folder.records():
        index = record["index"]
        if not 0 <= index < count or recorded[index]:
            raise InputError(f"image {index} should not be in {folder.path}, or is there twice. {BEGIN_ANEW}")
        recorded[index] = 1
    return recorded


def check_images(folder: Folder, source: Source) -> None:
    """Raise unless every record is about the pixels that its image has now.

    Size and time of a file do not tell: each recorded image is decoded and its digest compared. That takes a small
    part of the network's time, and it sees a decoder that gives other pixels as well. Records of older releases that
    say `error` have no digest; they claim nothing.
    """
    mark_recorded(folder, len(source))
    recorded = list(_recorded(folder))
    changed: list[str] = []
    images = iterate_images(source.subset([index for index, _ in recorded]))
    for (index, digest), image in zip(recorded, images, strict=True):
        if digest != (None if isinstance(image, Unreadable) else image_digest(image)):
            changed.append(source.names[index])
    if changed:
        others = f" and {len(changed) - 1:,} others have" if len(changed) > 1 else " has"
        raise InputError(
            f"{changed[0]}{others} changed since {folder.path} recorded other pixels. "
            "Give another --out, or put the old images back."
        )


def _recorded(folder: Folder) -> Iterator[tuple[int, Any]]:
    """Yield the places of recorded images with the digests of their pixels, None for those that could not be read."""
    for record in folder.records():
        if "image" in record:
            yield record["index"], record["image"]
        elif "error" not in record:
            raise InputError(
                f"{folder.path} is of an older release and does not say which pixels it is about. "
                "Give another --out to begin anew."
            )
