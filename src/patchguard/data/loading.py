"""Images of a source, decoded by threads ahead of use: one by one, in batches, or all of them in memory.

Pillow decodes and torch resizes outside of Python's lock, so threads suffice on every platform.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchguard.data import cifar10
from patchguard.data.catalog import CIFAR10_CLASSES
from patchguard.data.dataset import Dataset, Splits
from patchguard.data.decode import Unreadable
from patchguard.data.source import Source, open_splits
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.runtime import make_generator

logger = logging.getLogger(__name__)

Skipped = tuple[tuple[str, str], ...]
Batch = tuple[UInt8[Tensor, "batch 3 height width"], Int64[Tensor, " batch"]]

PHOTO_SIZE = (224, 224)
IMAGES_AHEAD = 4  # per thread
BATCHES_AHEAD = 2
NAMED = 3  # unreadable images that a warning names


def resize_image(image: UInt8[Tensor, "3 _ _"], size: tuple[int, int]) -> UInt8[Tensor, "3 height width"]:
    """Return an image squeezed or stretched to `size`, rounded to 8 bits; untouched if it has that size already."""
    if tuple(image.shape[1:]) == size:
        return image
    pixels = Preprocess((Resize(height=size[0], width=size[1]),))(image[None].float() / 255)
    return (pixels[0] * 255).round().to(torch.uint8)


def iterate_images(
    source: Source, workers: int | None = None, size: tuple[int, int] | None = None, *, ahead: int = 0
) -> Iterator[Tensor | Unreadable]:
    """Yield every image of a source in order, or why it cannot be read.

    Images come at their own size, or at `size`. `workers` threads decode, by default one per processor, and hold at
    most `ahead` images that nobody has asked for yet, by default four per thread; 0 threads decode on demand.
    """
    threads = _worker_count(workers)
    indices = iter(range(len(source)))
    if threads == 0:
        yield from (_read(source, index, size) for index in indices)
        return
    pending: deque[Future[Tensor | Unreadable]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            first = islice(indices, max(ahead, IMAGES_AHEAD * threads))
            pending.extend(pool.submit(_read, source, index, size) for index in first)
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(_read, source, index, size) for index in islice(indices, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def iterate_batches(
    source: Source,
    *,
    size: tuple[int, int],
    batch_size: int,
    workers: int | None = None,
    seed: int | None = 0,
    epoch: int = 0,
) -> Iterator[Batch]:
    """Yield images and targets of a labeled source that need not fit into memory.

    The order is a shuffle that depends on `seed`, `epoch` and the number of images alone, or the source's own where
    `seed` is None. Images that cannot be read are left out, with one warning in the log at the end; every batch but
    the last is full all the same.
    """
    targets = _target_tensor(source)
    _check_size(size)
    if batch_size < 1:
        raise InputError(f"`batch_size` must be a whole number, 1 or more; got {batch_size}.")
    _worker_count(workers)
    count = len(source)
    order = torch.arange(count) if seed is None else torch.randperm(count, generator=make_generator(seed, epoch, count))
    return _iterate_batches(source.subset(order.tolist()), targets[order], size, batch_size, workers)


def _iterate_batches(
    source: Source, targets: Int64[Tensor, " count"], size: tuple[int, int], batch_size: int, workers: int | None
) -> Iterator[Batch]:
    skipped: list[tuple[str, str]] = []
    images: list[Tensor] = []
    indices: list[int] = []
    for index, image in enumerate(iterate_images(source, workers, size, ahead=BATCHES_AHEAD * batch_size)):
        if isinstance(image, Unreadable):
            skipped.append((source.names[index], image.reason))
            continue
        images.append(image)
        indices.append(index)
        if len(images) == batch_size:
            yield torch.stack(images), targets[indices]
            images, indices = [], []
    if images:
        yield torch.stack(images), targets[indices]
    _report_skipped(skipped, len(source))


def load_images(
    source: Source,
    *,
    size: tuple[int, int],
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Dataset, Skipped]:
    """Return all images of a labeled source at one size, and name and reason of those that cannot be read.

    Those are left out, with one warning in the log. `progress` is told the number of images done so far.
    """
    targets = _target_tensor(source)
    _check_size(size)
    _check_memory(len(source) * 3 * size[0] * size[1])
    images = torch.empty((len(source), 3, *size), dtype=torch.uint8)
    readable: list[int] = []
    skipped: list[tuple[str, str]] = []
    for index, image in enumerate(iterate_images(source, workers, size)):
        if isinstance(image, Unreadable):
            skipped.append((source.names[index], image.reason))
        else:
            images[len(readable)] = image
            readable.append(index)
        if progress is not None:
            progress(index + 1)
    _report_skipped(skipped, len(source))
    return Dataset(images[: len(readable)], targets[readable], source.class_names), tuple(skipped)


def load_splits(
    name: str, root: str | Path, *, size: tuple[int, int] | None = None, workers: int | None = None
) -> Splits:
    """Return training and test images of the dataset `name`, from files at or below `root`, in the official order.

    `folder` is any folder with a folder per class, or with `train/` and `val/` of those. Photos are brought to `size`,
    by default 224 x 224; CIFAR-10 is checked against the official digests and stays as it is.
    """
    if name == "cifar10":
        if size not in (None, (cifar10.SIDE, cifar10.SIDE)):
            raise InputError(
                f"`size` of cifar10 must be 32 x 32; got {size}. Let the model's preprocessing enlarge the images, so "
                "that patches are counted in source pixels."
            )
        train, test = (_load_cifar10(Path(root), digests) for digests in (cifar10.TRAIN, cifar10.TEST))
    else:
        sources = open_splits(name, root)
        train, test = (load_images(source, size=size or PHOTO_SIZE, workers=workers)[0] for source in sources)
    return Splits(train, test)


def _load_cifar10(root: Path, digests: dict[str, str]) -> Dataset:
    images, targets = cifar10.read(root, digests)
    return Dataset(torch.from_numpy(images), torch.from_numpy(targets), CIFAR10_CLASSES)


def _read(source: Source, index: int, size: tuple[int, int] | None) -> Tensor | Unreadable:
    try:
        image = source.read(index)
    except Unreadable as error:
        return error
    return image if size is None else resize_image(image, size)


def _report_skipped(skipped: list[tuple[str, str]], total: int) -> None:
    if not skipped:
        return
    first = "; ".join(f"{name} {reason}" for name, reason in skipped[:NAMED])
    if len(skipped) == total:
        raise InputError(f"none of the {total} images can be read: {first}. Check the files.")
    more = ", and more" if len(skipped) > NAMED else ""
    logger.warning("%d of %d images cannot be read and are skipped: %s%s", len(skipped), total, first, more)


# -- checks ------------------------------------------------------------------------------------------------------------


def _target_tensor(source: Source) -> Int64[Tensor, " count"]:
    if source.targets is None:
        raise InputError("`source` must be labeled. Sort the images into one folder per class.")
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
            "Read them with `patchguard.data.loading.iterate_batches`, limit their number, or take a smaller `size`."
        )


def _worker_count(workers: int | None) -> int:
    if workers is None:
        return os.cpu_count() or 1
    if workers < 0:
        raise InputError(f"`workers` must be a whole number, 0 or more; got {workers}.")
    return workers
