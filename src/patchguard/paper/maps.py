"""`Maps`: what every cell of a model says of every image of a set, computed once and kept on disk as float16.

    <cache>/maps/<model>-<set>-<key>/
        maps.npy      (images, classes, rows, columns) float16, memory-mapped
        sample.npy    the same of some images as the network gave them, in float32
        targets.npy   the true classes
        maps.json     the key in words, the places of the sample, SHA-256 of the three files; written last

A folder under its final name is complete; one whose files do not match their digests is made anew. While it is made,
blocks of 256 images lie in .<model>-<set>-<key>.parts/, so that a killed process loses one block at most. Certificates
on maps are about the rounded numbers in them: `Maps.sample` says how many answers the rounding changes.
"""

import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch, Space

logger = logging.getLogger(__name__)

FORMAT = 1
BLOCK = 256  # images that are computed and kept together
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
    guard: LocalGuard[Any]
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


@final
@dataclass(frozen=True, eq=False)
class Block:
    """Local logits of those of some neighbouring images that can be read, and the places of these among all."""

    places: list[int]
    local_logits: Float[Tensor, "some classes rows columns"]
    targets: Int64[Tensor, " some"]


def write(
    folder: Path,
    about: Mapping[str, Any],
    count: int,
    made: Callable[[range], Block | None],
    done: Callable[[int], None],
) -> None:
    """Write a folder of maps of at most `count` images; `made` computes those of a range, None where none can be read.

    Blocks of an earlier process that was killed are taken over.
    """
    parts = folder.with_name(f".{folder.name}.parts")
    wanted = set(spread(min(CHECKED, count), count))
    try:
        parts.mkdir(parents=True, exist_ok=True)
        paths = []
        for first in range(0, count, BLOCK):
            path, places = parts / f"{first:09d}.npz", range(first, min(first + BLOCK, count))
            if not _whole(path):
                _keep(path, made(places), wanted, str(about["model"]))
            paths.append(path)
            done(places.stop)
        _join(folder, about, paths)
        shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise InputError(f"`--cache` must be a folder with room for maps; {folder}: {error.strerror}.") from None


def _whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, zipfile.BadZipFile):
        return False


def _keep(path: Path, block: Block | None, wanted: set[int], model: str) -> None:
    """Write one block, all or nothing: maps, classes, and some maps as they were, with their numbers in the block."""
    arrays: dict[str, np.ndarray] = {}
    if block is not None:
        half = block.local_logits.half()
        if not bool(half.isfinite().all()):
            raise InputError(f"the logits of {model} do not fit float16 (65504 at most).")
        chosen = [number for number, place in enumerate(block.places) if place in wanted]
        exact = block.local_logits[chosen].float()
        arrays = {"maps": half.numpy(), "targets": block.targets.numpy(), "exact": exact.numpy()}
        arrays["chosen"] = np.array(chosen, dtype=np.int64)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    with open(draft, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(draft, path)


def _join(folder: Path, about: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Make the folder of its blocks, all or nothing."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process that had our number
        draft.mkdir()
        blocks = [block for block in map(np.load, paths) if block.files]
        if not blocks:
            raise InputError(f"none of the {about['images']} images of {about['data']} can be read. Check the files.")
        targets = np.concatenate([block["targets"] for block in blocks])
        shape = (len(targets), *blocks[0]["maps"].shape[1:])
        maps = open_memmap(draft / "maps.npy", mode="w+", dtype=np.float16, shape=shape)
        kept: list[int] = []
        filled = 0
        for block in blocks:
            half = block["maps"]
            maps[filled : filled + len(half)] = half
            kept += [filled + int(number) for number in block["chosen"]]
            filled += len(half)
        maps.flush()
        del maps
        np.save(draft / "sample.npy", np.concatenate([block["exact"] for block in blocks]))
        np.save(draft / "targets.npy", targets)
        digests = {name: _digest(draft / name) for name in FILES}
        described = {"about": dict(about), "digests": digests, "sample_places": kept, "images": filled}
        (draft / "maps.json").write_text(json.dumps(described, indent=1) + "\n")
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
