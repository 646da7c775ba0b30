"""`Maps`: what every cell of a model says of every image of a set, computed once and kept on disk as float16.

    <cache>/maps/<model>-<set>-<key>/
        maps.npy      (images, classes, rows, columns) float16, memory-mapped
        sample.npy    the same of some images as the network gave them, in float32
        targets.npy   the true classes
        maps.json     the key in words, the places of the sample, SHA-256 of the three files; written last

A folder under its final name is complete; one whose files do not match their digests is made anew. Certificates on
maps are about the rounded numbers in them: `Maps.sample` says how many answers the rounding changes.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.lib.format import open_memmap
from torch import Tensor

from patchguard.data.draw import spread
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.patch import Patch, Space
from patchguard.windows import Windows

logger = logging.getLogger(__name__)

FORMAT = 1
CHECKED = 256  # images whose logits are kept in float32, too
ELEMENTS = {"cpu": 2**22, "cuda": 2**26}  # logits handled at once
IMAGES = {"cpu": 1024, "cuda": 2**20}  # at most: small maps, too, are shared by all cores

Batches = Iterator[tuple[Float[Tensor, "some classes rows columns"], Int64[Tensor, " some"]]]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Maps:
    """Local logits of a set of images.

    `guard` takes images of `size` = (height, width): the set's own for CIFAR-10; photos are already resized and
    cropped, so that patches lie in the network's input, as the paper's do.
    """

    model: str
    dataset: str
    guard: Guard[Any]
    size: tuple[int, int]
    local_logits: np.ndarray
    targets: Int64[Tensor, " images"]
    sample_places: tuple[int, ...]
    sample_logits: np.ndarray
    about: Mapping[str, Any]
    answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what was counted, by question

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.local_logits.shape[1])

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        return int(self.local_logits.shape[2]), int(self.local_logits.shape[3])

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of what the network itself sees."""
        return self.guard.preprocess.output_size(*self.size)

    def windows(self, patch: Patch, space: Space = "source") -> Windows:
        """Return the cells that a patch can reach, in pixels of the images or of what the network itself sees."""
        if space == "source":
            return self.guard.windows(patch, *self.size)
        return self.guard.without_preprocess().windows(patch, *self.input_size)

    def batches(self, device: torch.device) -> Batches:
        """Yield logits as float32 and targets, in parts that fit the memory."""
        kind = device.type if device.type in ELEMENTS else "cuda"
        some = max(1, min(IMAGES[kind], ELEMENTS[kind] // int(np.prod(self.local_logits.shape[1:]))))
        for first in range(0, len(self), some):
            part = torch.from_numpy(np.array(self.local_logits[first : first + some]))  # a copy: the file is read-only
            yield part.to(device).float(), self.targets[first : first + some].to(device)

    def sample(
        self, device: torch.device
    ) -> tuple[Float[Tensor, "some classes rows columns"], Float[Tensor, "some classes rows columns"]]:
        """Return logits of the same images as they were, and as they are kept."""
        exact = torch.from_numpy(np.array(self.sample_logits)).to(device)
        rounded = torch.from_numpy(np.array(self.local_logits[list(self.sample_places)])).to(device).float()
        return exact, rounded


def key_of(about: Mapping[str, Any]) -> str:
    """Return the digest of what maps depend on."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


@final
@dataclass(frozen=True)
class Stored:
    """The files of one `Maps`."""

    local_logits: np.ndarray
    sample_logits: np.ndarray
    sample_places: tuple[int, ...]
    targets: Int64[Tensor, " images"]


FILES = ("maps.npy", "sample.npy", "targets.npy")


def read(folder: Path, about: Mapping[str, Any]) -> Stored | None:
    """Return what a folder holds, or None where it is not there, damaged or of something else."""
    try:
        found = json.loads((folder / "maps.json").read_bytes())
        if found["about"] != dict(about) or any(_digest(folder / name) != found["digests"][name] for name in FILES):
            raise ValueError("its files are not those that were written")
        return Stored(
            local_logits=np.load(folder / "maps.npy", mmap_mode="r"),
            sample_logits=np.load(folder / "sample.npy", mmap_mode="r"),
            sample_places=tuple(found["sample_places"]),
            targets=torch.from_numpy(np.load(folder / "targets.npy")),
        )
    except OSError as error:
        if folder.is_dir() and error.filename:
            logger.warning("%s lacks %s and is made anew", folder, Path(error.filename).name)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and made anew: %s", folder, error)
    return None


def write(folder: Path, about: Mapping[str, Any], count: int, batches: Batches, done: Callable[[int], None]) -> None:
    """Write a folder of maps of at most `count` images, all or nothing."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process that had our number
        draft.mkdir(parents=True)
        places, targets, maps, filled = spread(min(CHECKED, count), count), [], None, 0
        wanted, kept, sample = set(places), [], []
        for local_logits, target in batches:
            plain = local_logits.cpu()
            if maps is None:
                shape = (count, *plain.shape[1:])
                maps = open_memmap(draft / "maps.npy", mode="w+", dtype=np.float16, shape=shape)
            half = plain.half()
            if not bool(half.isfinite().all()):
                raise InputError(f"the logits of {about['model']} do not fit float16 (65504 at most).")
            maps[filled : filled + len(half)] = half.numpy()
            for place in range(filled, filled + len(half)):
                if place in wanted:
                    kept.append(place)
                    sample.append(plain[place - filled].float().numpy())
            targets.append(target.cpu())
            filled += len(half)
            done(filled)
        if maps is None:
            raise InputError(f"none of the {count} images of {about['data']} can be read. Check the files.")
        maps.flush()
        if filled < count:  # images that could not be read
            np.save(draft / "fewer.npy", maps[:filled])
            os.replace(draft / "fewer.npy", draft / "maps.npy")
        del maps
        np.save(draft / "sample.npy", np.stack(sample))
        np.save(draft / "targets.npy", torch.cat(targets).numpy())
        digests = {name: _digest(draft / name) for name in FILES}
        described = {"about": dict(about), "digests": digests, "sample_places": kept, "images": filled}
        (draft / "maps.json").write_text(json.dumps(described, indent=1) + "\n")
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.replace(draft, folder)
    except OSError as error:
        raise InputError(f"`--cache` must be a folder with room for maps; {folder}: {error.strerror}.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
