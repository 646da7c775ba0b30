"""The datasets known by name: what they hold, their classes, where they come from, on what terms. Imports no torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from patchguard.data.download import cache_folder
from patchguard.errors import InputError, nearest
from patchguard.registry import Registry

if TYPE_CHECKING:
    from patchguard.data.source import Source

VARIABLE = "PATCHGUARD_DATA"

# Names of classes, in the order of their numbers.
CIFAR10_CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FLOWERS_CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
CATS_VS_DOGS_CLASSES = ("Cat", "Dog")
# Folders are named by WordNet number, and their sorted order is the order of the classes.
IMAGENETTE_BY_WORDNET = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
IMAGENETTE_CLASSES = tuple(IMAGENETTE_BY_WORDNET.values())


@final
@dataclass(frozen=True, kw_only=True)
class KnownDataset:
    """One dataset. `train` and `test` count its images; 0 where the split is ours, with all images in `train`.

    `download` is the size of its archive in bytes, rounded up, where we fetch it.
    """

    name: str
    description: str
    train: int
    test: int
    origin: str
    terms: str
    layout: str
    download: int = 0


CATALOG = {
    dataset.name: dataset
    for dataset in (
        KnownDataset(
            name="sample",
            description="500 test images of CIFAR-10, 50 per class, embedded in the package",
            train=0,
            test=500,
            origin="https://www.cs.toronto.edu/~kriz/cifar.html",
            terms="cite Krizhevsky 2009",
            layout="comes with the package",
        ),
        KnownDataset(
            name="cifar10",
            description="small photos, 32 x 32, 10 classes",
            train=50_000,
            test=10_000,
            origin="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            terms="cite Krizhevsky 2009",
            layout="cifar-10-batches-bin/data_batch_1.bin ... test_batch.bin",
            download=171_000_000,
        ),
        KnownDataset(
            name="imagenette",
            description="photos, 10 easy classes of ImageNet",
            train=9_469,
            test=3_925,
            origin="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
            terms="those of ImageNet: research, not for redistribution",
            layout="train/n01440764/*.JPEG ... val/n03888257/*.JPEG",
            download=342_000_000,
        ),
        KnownDataset(
            name="imagenet",
            description="photos, the 1000 classes of ILSVRC 2012",
            train=1_281_167,
            test=50_000,
            origin="https://image-net.org/download.php",
            terms="register there; research, not for redistribution",
            layout="train/n01440764/*.JPEG ... val/n15075141/*.JPEG, the validation images sorted into class folders",
        ),
        KnownDataset(
            name="flowers",
            description="photos of 5 kinds of flowers (tf_flowers), split 80/20 by us",
            train=3_670,
            test=0,
            origin="http://download.tensorflow.org/example_images/flower_photos.tgz",
            terms="Creative Commons Attribution; authors in its LICENSE.txt",
            layout="flower_photos/daisy/*.jpg ... flower_photos/tulips/*.jpg",
        ),
        KnownDataset(
            name="cats_vs_dogs",
            description="photos of cats and dogs, split 80/20 by us; some files are damaged and skipped",
            train=25_000,
            test=0,
            origin="https://www.microsoft.com/en-us/download/details.aspx?id=54765",
            terms="Microsoft Research data license, in the archive",
            layout="PetImages/Cat/*.jpg, PetImages/Dog/*.jpg",
        ),
    )
}


# How the test part of a dataset is opened, from the folder where datasets lie.
TEST_SETS: "Registry[Callable[[Path], Source]]" = Registry(
    "datasets",
    {name: f"patchguard.data.source:open_{name}" for name in CATALOG},
    demand="a function that takes the folder of datasets and returns a Source",
    accept=lambda name, value: callable(value),
)


def find_dataset(name: str) -> KnownDataset:
    """Return the dataset of this name; refuse any other, with the nearest."""
    if name not in CATALOG:
        raise InputError(f"`name` must be a known dataset; got {name!r}. {nearest(name, list(CATALOG))}")
    return CATALOG[name]


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder where datasets lie: `root`, else $PATCHGUARD_DATA, else `data` in the folder of downloads."""
    chosen = root or os.environ.get(VARIABLE) or cache_folder() / "data"
    return Path(chosen).expanduser()
