"""Images of many sizes as batches of one size, decoded ahead of use, a bounded number of them in memory."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeVar, final

import torch
from jaxtyping import UInt8
from torch import Tensor

from patchguard.data.decode import Unreadable
from patchguard.data.loading import decoded
from patchguard.data.source import Source

Item = TypeVar("Item")

MOST_BYTES = 2**28  # of pixels that wait for others of their size


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
    """An image that cannot be certified, and why."""

    place: int
    reason: str


def grouped(source: Source, places: Sequence[int], batch_size: int) -> Iterator[Batch | Failure]:
    """Yield the images at `places` in batches of one size, and those that cannot be read.

    Images wait for others of their size. Where too many wait, the size with the most pixels goes first.
    """
    waiting: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    held = 0
    for place, image in zip(places, decoded(source.subset(places)), strict=True):
        if isinstance(image, Unreadable):
            yield Failure(place, image.reason)
            continue
        size = (image.shape[1], image.shape[2])
        waiting.setdefault(size, []).append((place, image))
        held += image.numel()
        while len(waiting.get(size, ())) >= batch_size or held > MOST_BYTES:
            full = size if len(waiting.get(size, ())) >= batch_size else max(waiting, key=lambda s: _pixels(waiting, s))
            held -= 3 * _pixels(waiting, full)
            yield _batch(waiting.pop(full))
    for images in waiting.values():
        yield _batch(images)


def _pixels(waiting: dict[tuple[int, int], list[tuple[int, Tensor]]], size: tuple[int, int]) -> int:
    return size[0] * size[1] * len(waiting[size])


def _batch(images: list[tuple[int, Tensor]]) -> Batch:
    return Batch(tuple(place for place, _ in images), torch.stack([image for _, image in images]))


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
