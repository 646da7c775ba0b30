"""Images of a source at one size: all of them in memory, or batch by batch from worker processes."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import final

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as Items

from patchguard.data.dataset import Dataset
from patchguard.data.decode import Unreadable
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.runtime import make_generator

logger = logging.getLogger(__name__)

Skipped = tuple[tuple[str, str], ...]
Batch = tuple[UInt8[Tensor, "batch 3 height width"], Int64[Tensor, " batch"]]

NAMED = 3  # unreadable images that a warning names


def resized(image: UInt8[Tensor, "3 _ _"], size: tuple[int, int]) -> UInt8[Tensor, "3 height width"]:
    """Return an image squeezed or stretched to `size`, rounded to 8 bits; untouched if it has that size already."""
    if tuple(image.shape[1:]) == size:
        return image
    pixels = Preprocess((Resize(height=size[0], width=size[1]),))(image[None].float() / 255)
    return (pixels[0] * 255).round().to(torch.uint8)


def decoded(
    source: Source, workers: int | None = None, size: tuple[int, int] | None = None
) -> Iterator[Tensor | Unreadable]:
    """Yield every image of a source in order, or why it cannot be read, decoded by `workers` threads ahead of use.

    Images come at their own size, or at `size`. Pillow decodes outside of Python's lock, so threads do. No more than a
    few images per thread are held at a time.
    """
    threads = _workers(workers)
    if threads == 0:
        yield from (_attempt(source, place, size) for place in range(len(source)))
        return
    waiting: deque[Future[Tensor | Unreadable]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            places = iter(range(len(source)))
            waiting.extend(pool.submit(_attempt, source, place, size) for place in islice(places, 4 * threads))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(_attempt, source, place, size) for place in islice(places, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def loaded(
    source: Source,
    *,
    size: tuple[int, int],
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Dataset, Skipped]:
    """Return all images of a labelled source at one size, and name and reason of those that cannot be read.

    Those are left out, with one warning in the log. `progress` is told the number of images done so far. `workers` are
    threads: by default one per processor.
    """
    targets = _targets(source)
    _check_size(size)
    _check_memory(len(source) * 3 * size[0] * size[1])
    images = torch.empty((len(source), 3, *size), dtype=torch.uint8)
    kept: list[int] = []
    skipped: list[tuple[str, str]] = []
    for place, image in enumerate(decoded(source, workers, size)):
        if isinstance(image, Unreadable):
            skipped.append((source.names[place], image.reason))
        else:
            images[len(kept)] = image
            kept.append(place)
        if progress is not None:
            progress(place + 1)
    _report(skipped, len(source))
    return Dataset(images[: len(kept)], targets[kept], source.class_names), tuple(skipped)


def batches(
    source: Source,
    *,
    size: tuple[int, int],
    batch_size: int,
    workers: int | None = None,
    seed: int | None = 0,
    epoch: int = 0,
) -> Iterator[Batch]:
    """Yield images and targets of a labelled source that need not fit into memory, decoded in worker processes.

    The order is a shuffle that depends on `seed`, `epoch` and the number of images alone, or the source's own where
    `seed` is None. Images that cannot be read are left out, with one warning in the log at the end; every batch but
    the last is full all the same. `workers` is by default one per processor; 0 decodes in this process.
    """
    targets = _targets(source)
    _check_size(size)
    if batch_size < 1:
        raise InputError(f"`batch_size` must be a whole number, 1 or more; got {batch_size}.")
    count = len(source)
    order = torch.arange(count) if seed is None else torch.randperm(count, generator=make_generator(seed, epoch, count))
    return _batches(source, targets, order, size, batch_size, _workers(workers))


def _batches(
    source: Source,
    targets: Int64[Tensor, " count"],
    order: Int64[Tensor, " count"],
    size: tuple[int, int],
    batch_size: int,
    workers: int,
) -> Iterator[Batch]:
    starts = range(0, len(order), batch_size)
    chunks = _Chunks(source, tuple(order[start : start + batch_size] for start in starts), size)
    loader = DataLoader(chunks, batch_size=None, num_workers=workers, collate_fn=_as_it_is)
    images, places = torch.empty((0, 3, *size), dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    skipped: list[tuple[str, str]] = []
    for more, more_places, more_skipped in loader:
        skipped += more_skipped
        images = torch.cat([images, more]) if len(images) else more
        places = torch.cat([places, more_places])
        if len(images) >= batch_size:
            yield images[:batch_size], targets[places[:batch_size]]
            images, places = images[batch_size:], places[batch_size:]
    if len(images):
        yield images, targets[places]
    _report(skipped, len(source))


@final
@dataclass(frozen=True)
class _Chunks(Items[tuple[Tensor, Tensor, list[tuple[str, str]]]]):
    """What a worker process makes of the places it is given: images, their places, and what it could not read."""

    source: Source
    places: tuple[Tensor, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, chunk: int) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
        images = torch.empty((len(self.places[chunk]), 3, *self.size), dtype=torch.uint8)
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for place in self.places[chunk].tolist():
            image = _attempt(self.source, place, self.size)
            if isinstance(image, Unreadable):
                skipped.append((self.source.names[place], image.reason))
            else:
                images[len(kept)] = image
                kept.append(place)
        return images[: len(kept)], torch.tensor(kept, dtype=torch.int64), skipped


def _as_it_is(chunk: object) -> object:
    return chunk


def _attempt(source: Source, place: int, size: tuple[int, int] | None) -> Tensor | Unreadable:
    try:
        image = source.read(place)
    except Unreadable as error:
        return error
    return image if size is None else resized(image, size)


def _report(skipped: list[tuple[str, str]], total: int) -> None:
    if not skipped:
        return
    first = "; ".join(f"{name} {reason}" for name, reason in skipped[:NAMED])
    if len(skipped) == total:
        raise InputError(f"none of the {total} images can be read: {first}. Check the files.")
    more = ", and more" if len(skipped) > NAMED else ""
    logger.warning("%d of %d images cannot be read and are skipped: %s%s", len(skipped), total, first, more)


# -- checks ------------------------------------------------------------------------------------------------------------


def _targets(source: Source) -> Int64[Tensor, " count"]:
    if source.targets is None:
        raise InputError("`source` must have classes to learn or to measure by. Sort the images into one folder each.")
    return torch.tensor(source.targets, dtype=torch.int64)


def _check_size(size: tuple[int, int]) -> None:
    if min(size) < 1:
        raise InputError(f"`size` must be a height and a width of at least 1 pixel; got {size}.")


def _check_memory(needed: int) -> None:
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InputError(
            f"the images take {needed / 2**30:.0f} GiB and this machine has {memory / 2**30:.0f} GiB. "
            "Read them with `patchguard.data.loading.batches`, limit their number, or take a smaller `size`."
        )


def _workers(workers: int | None) -> int:
    if workers is None:
        return os.cpu_count() or 1
    if workers < 0:
        raise InputError(f"`workers` must be a whole number, 0 or more; got {workers}.")
    return workers
