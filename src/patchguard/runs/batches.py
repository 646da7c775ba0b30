"""Images of many sizes as batches of one size, decoded ahead of use; few of them are in memory at a time."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeVar, final

import torch
from jaxtyping import UInt8
from torch import Tensor

from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source

Item = TypeVar("Item")


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Images of one size, with their places in the source."""

    places: tuple[int, ...]
    images: UInt8[Tensor, "batch 3 height width"]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]


@final
@dataclass(frozen=True)
class Failure:
    """An image that cannot be certified, why, and the digest of its pixels where it could be decoded."""

    place: int
    reason: str
    digest: str | None = None


def blocks_of(count: int, size: int) -> list[range]:
    """Cut `count` places into blocks of `size` neighbours; the last may be smaller."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def grouped(source: Source, blocks: Sequence[range]) -> Iterator[Batch | Failure]:
    """Yield the images of each block in batches of one size, and those that cannot be read.

    Which images share a batch depends on the source and the block alone. Networks round differently in batches of
    other sizes; so a run that is stopped, or divided among processes, still computes the same numbers.
    """
    images = iterate_images(source.subset([place for block in blocks for place in block]))
    for block in blocks:
        sizes: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for place, image in zip(block, images, strict=False):
            if isinstance(image, Unreadable):
                yield Failure(place, image.reason)
            else:
                sizes.setdefault((image.shape[1], image.shape[2]), []).append((place, image))
        for same in sizes.values():
            yield Batch(tuple(place for place, _ in same), torch.stack([image for _, image in same]))


def ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the same items, up to `count` of them made ahead of use by a thread of its own."""
    queue: Queue[tuple[bool, Item | BaseException | None]] = Queue(count)
    stopped = threading.Event()

    def offer(last: bool, item: Item | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                queue.put((last, item), timeout=0.1)
                return
            except Full:
                continue

    def fill() -> None:
        try:
            for item in items:
                offer(False, item)
                if stopped.is_set():
                    return
            offer(True, None)
        except BaseException as error:  # handed over, and raised where the items are used
            offer(True, error)

    thread = threading.Thread(target=fill, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            try:
                last, item = queue.get(timeout=0.1)  # not for ever: an interrupt must get through
            except Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
