"""Batches of training images, kept in the memory of the device or decoded anew in every epoch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, final

import torch
from jaxtyping import Float16, Int64, UInt8
from torch import Tensor

from patchguard.data.dataset import Dataset
from patchguard.data.loading import iterate_batches
from patchguard.data.source import Source
from patchguard.training.features import FeatureSet

Batch: TypeAlias = tuple[UInt8[Tensor, "batch 3 height width"], Int64[Tensor, " batch"]]
FeatureBatch: TypeAlias = tuple[Float16[Tensor, "batch channels rows columns"], Int64[Tensor, " batch"]]

MEMORY_FRACTION = 0.5  # that images may fill; the rest is for the network


@final
@dataclass(frozen=True, eq=False)
class InMemoryLoader:
    """Images and targets on the device."""

    images: UInt8[Tensor, "count 3 height width"]
    targets: Int64[Tensor, " count"]

    @property
    def count(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    def first(self, count: int) -> Batch:
        """Return the first images."""
        return self.images[:count], self.targets[:count]

    def epoch(
        self, number: int, batch_size: int, part: slice, generator: torch.Generator, skip: int = 0
    ) -> Iterator[Batch]:
        """Yield `part` of every full batch after the first `skip`, in the order of a first draw from `generator`."""
        order = torch.randperm(self.count, generator=generator, device=self.targets.device)
        for start in range(skip * batch_size, self.count - batch_size + 1, batch_size):
            index = order[start : start + batch_size][part]
            yield self.images[index], self.targets[index]


@final
@dataclass(frozen=True, eq=False)
class FeatureLoader:
    """Features of a frozen network, which may lie in a file, and targets."""

    data: FeatureSet
    device: torch.device

    @property
    def count(self) -> int:
        """Return the number of images."""
        return len(self.data)

    def first(self, count: int) -> FeatureBatch:
        """Return the first images."""
        return self.data.features[:count].to(self.device), self.data.targets[:count].to(self.device)

    def epoch(
        self, number: int, batch_size: int, part: slice, generator: torch.Generator, skip: int = 0
    ) -> Iterator[FeatureBatch]:
        """Yield `part` of every full batch after the first `skip`, in the order of a first draw from `generator`."""
        order = torch.randperm(self.count, generator=generator, device=generator.device).cpu()
        for start in range(skip * batch_size, self.count - batch_size + 1, batch_size):
            index = order[start : start + batch_size][part]
            yield self.data.features[index].to(self.device), self.data.targets[index].to(self.device)


@final
@dataclass(frozen=True, eq=False)
class StreamingLoader:
    """Images that are decoded on the way; every process of a group decodes all of them."""

    source: Source
    size: tuple[int, int]
    seed: int
    device: torch.device
    workers: int | None = None

    @property
    def count(self) -> int:
        """Return the number of images, those that cannot be read included."""
        return len(self.source)

    def first(self, count: int) -> Batch:
        """Return the first images that can be read."""
        some = self.source.subset(range(min(count, self.count)))
        images, targets = next(iterate_batches(some, size=self.size, batch_size=count, workers=0, seed=None))
        return images.to(self.device), targets.to(self.device)

    def epoch(
        self, number: int, batch_size: int, part: slice, generator: torch.Generator, skip: int = 0
    ) -> Iterator[Batch]:
        """Yield `part` of every full batch after the first `skip`; the order depends on seed and epoch alone."""
        shuffled = iterate_batches(
            self.source, size=self.size, batch_size=batch_size, workers=self.workers, seed=self.seed, epoch=number
        )
        for images, targets in islice(shuffled, skip, None):
            if len(targets) == batch_size:
                yield images[part].to(self.device, non_blocking=True), targets[part].to(self.device, non_blocking=True)


def make_loader(
    data: Dataset | Source, size: tuple[int, int], seed: int, device: torch.device
) -> InMemoryLoader | StreamingLoader:
    """Return a loader of the images in a dataset, or of those that a source decodes."""
    if isinstance(data, Source):
        return StreamingLoader(data, size, seed, device)
    return InMemoryLoader(data.images.to(device), data.targets.to(device))


def fits_in_memory(count: int, size: tuple[int, int], device: torch.device) -> bool:
    """Return whether `count` images fit into the memory of this machine and of the device."""
    memories = []
    if hasattr(os, "sysconf"):
        memories.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if device.type == "cuda":
        memories.append(torch.cuda.get_device_properties(device).total_memory)
    return all(count * 3 * size[0] * size[1] <= MEMORY_FRACTION * memory for memory in memories)
