"""`Dataset`: labeled images of one size in memory; `Splits`; and seeded choices of images."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchguard.errors import InputError
from patchguard.runtime import derive_seed, make_generator

# Apart from any training seed: runs with other seeds hold out the same images and stay comparable.
SPLIT_SEED = 0


@final
@dataclass(frozen=True, eq=False)
class Dataset:
    """Images of one size as 8-bit pixels, each with the number of its true class."""

    images: UInt8[Tensor, "count 3 height width"]
    targets: Int64[Tensor, " count"]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]

    def subset(self, index: Int64[Tensor, " some"] | slice) -> "Dataset":
        """Return the images of these numbers, in this order."""
        return Dataset(self.images[index], self.targets[index], self.class_names)


@final
@dataclass(frozen=True, eq=False)
class Splits:
    """The images to train and to test on: the official ones where a set has them."""

    train: Dataset
    test: Dataset


def hold_out(train: Dataset, count: int) -> tuple[Dataset, Dataset]:
    """Split training images into those to learn from and `count` to choose settings and checkpoints by.

    The split is a seeded draw that depends on the numbers of images alone. Both parts keep the official order.
    """
    learned, held_out = hold_out_indices(len(train), count)
    return train.subset(learned), train.subset(held_out)


def hold_out_indices(total: int, count: int) -> tuple[Int64[Tensor, " learned"], Int64[Tensor, " held_out"]]:
    """Return the numbers, among `total` images, of those to learn from and of `count` held-out ones."""
    if not 0 <= count < total:
        raise InputError(
            f"`evaluation.held_out` must leave images to learn from; got {count} of {total}. "
            "Hold out fewer: --set held_out=0.2"
        )
    order = torch.randperm(total, generator=make_generator(SPLIT_SEED, total))
    return order[count:].sort().values, order[:count].sort().values


def sample_evenly(count: int, total: int, seed: int = 0) -> list[int]:
    """Choose `count` of the numbers 0 .. total - 1, evenly spaced and in order.

    Rule.  Cut the numbers into `count` runs, the i-th from floor(i total / count) to before floor((i+1) total / count),
           and draw one number from each.

    Over images sorted by class, each class gets its fraction up to one image. The choice depends on the three
    arguments alone.
    """
    if not 0 <= count <= total:
        raise InputError(f"`count` must be a whole number from 0 to {total}, the images there are; got {count}.")
    edges = [run * total // count for run in range(count + 1)] if count else [0]
    draws = np.random.default_rng(derive_seed(seed, total, count)).random(count)
    return [start + int(draw * (stop - start)) for start, stop, draw in zip(edges[:-1], edges[1:], draws, strict=True)]
