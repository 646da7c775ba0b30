"""`CachedLogits`: the local logits of a model on a dataset, computed once and kept on disk as float16.

    <cache>/maps/<model>-<dataset>-<key>/
        maps.npy      (images, classes, rows, columns) float16, memory-mapped
        sample.npy    float32 logits of some of the images, as the network gave them
        targets.npy   the true classes
        maps.json     what the key is made of, the indices of the sample, SHA-256 of the three files; written last

A folder under its final name is complete; one whose files do not match their digests is computed again. While it is
computed, blocks of 256 images lie in .<model>-<dataset>-<key>.parts/, so that a killed process loses one block at most.
Certificates on cached logits are about the rounded numbers: the sample says how many answers the rounding changes.
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

from patchguard import runtime
from patchguard.data.dataset import sample_evenly
from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch, Space
from patchguard.storage.atomic import replace_file

logger = logging.getLogger(__name__)

FORMAT = 1
FILES = ("maps.npy", "sample.npy", "targets.npy")
BLOCK = 256  # images that are computed and written together
SAMPLE = 256  # images whose logits are kept in float32 as well
ELEMENTS = {"cpu": 2**22, "cuda": 2**26}  # logits handled at once
IMAGES = {"cpu": 1024, "cuda": 2**20}  # at most: batches of small grids, too, are shared by all cores
FORWARD_BATCH = {"cpu": 64, "cuda": 256}

LocalLogits = Float[Tensor, "some classes rows columns"]
Batches = Iterator[tuple[LocalLogits, Int64[Tensor, " some"]]]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class CachedLogits:
    """Local logits of the images of a dataset.

    `guard` takes images of `size` = (height, width): the dataset's own for CIFAR-10; photos are already resized and
    cropped, so that patches lie in the network's input, as the paper's do.
    """

    model: str
    dataset: str
    guard: LocalGuard[Any]
    size: tuple[int, int]
    local_logits: np.ndarray
    targets: Int64[Tensor, " images"]
    sample_indices: tuple[int, ...]
    sample_logits: np.ndarray
    about: Mapping[str, Any]
    counts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what was counted, by query

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        return int(self.local_logits.shape[2]), int(self.local_logits.shape[3])

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of what the network itself sees."""
        return self.guard.preprocess.output_size(*self.size)

    @property
    def enlargement(self) -> int:
        """How much larger the network's input is than the image, for images that are enlarged as a whole."""
        return self.input_size[0] // self.size[0] if self.input_size != self.size else 1

    def windows(self, patch: Patch, space: Space = "source") -> Windows:
        """Return the cells that a patch can reach, in pixels of the images or of what the network itself sees."""
        if space == "source":
            return self.guard.windows(patch, *self.size)
        return self.guard.without_preprocess().windows(patch, *self.input_size)

    def batches(self, device: torch.device) -> Batches:
        """Yield logits as float32 and targets, in parts that fit the memory."""
        kind = device.type if device.type in ELEMENTS else "cuda"
        step = max(1, min(IMAGES[kind], ELEMENTS[kind] // int(np.prod(self.local_logits.shape[1:]))))
        for first in range(0, len(self), step):
            part = torch.from_numpy(np.array(self.local_logits[first : first + step]))  # a copy: the file is read-only
            yield part.to(device).float(), self.targets[first : first + step].to(device)

    def sample(self, device: torch.device) -> tuple[LocalLogits, LocalLogits]:
        """Return logits of the same images as the network gave them, and as they are cached."""
        exact = torch.from_numpy(np.array(self.sample_logits)).to(device)
        rounded = torch.from_numpy(np.array(self.local_logits[list(self.sample_indices)])).to(device).float()
        return exact, rounded


def open_logits(
    folder: Path,
    about: Mapping[str, Any],
    source: Source,
    guard: LocalGuard[Any],
    prepare: Preprocess | None,
    *,
    device: torch.device,
    batch_size: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> CachedLogits:
    """Return the logits of a labeled source by a guard, from `<folder>/<model>-<dataset>-<key>` or computed now.

    `about` is what they depend on. `prepare` turns an image into what the guard takes; None: as it is. Images that
    cannot be read are left out.
    """
    key = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{about['model']}-{about['data']}-{key}"
    stored = _read(path, about)
    if stored is None:
        step = batch_size or FORWARD_BATCH.get(device.type, FORWARD_BATCH["cuda"])

        def compute(indices: range) -> dict[str, np.ndarray]:
            return compute_block(source, guard, prepare, indices, device, step)

        _write(path, about, len(source), compute, progress)
        stored = _read(path, about)
        assert stored is not None
    return CachedLogits(
        model=str(about["model"]),
        dataset=str(about["data"]),
        guard=guard,
        size=_image_size(source, prepare),
        about=about,
        **stored,
    )


# -- computing ---------------------------------------------------------------------------------------------------------


def compute_block(
    source: Source,
    guard: LocalGuard[Any],
    prepare: Preprocess | None,
    indices: range,
    device: torch.device,
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Return the arrays of one block: logits and targets of all images of `indices` that can be read, in order.

    `exact` are float32 logits of those that belong to the sample, `chosen` their numbers in the block.
    """
    assert source.targets is not None
    guard.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    readable: list[int] = []
    parts: list[Tensor] = []
    try:
        for places, images in prepared_batches(source.subset(indices), prepare, device, batch_size):
            readable += [indices[place] for place in places]
            parts.append(guard.local_logits(images).cpu())
    finally:
        guard.model.to("cpu")
    if not readable:
        return {}
    logits = torch.cat(parts)
    if not bool(logits.half().isfinite().all()):
        raise InputError("local logits must fit float16 (65504 at most); these do not. Scale the last layer down.")
    sample = set(sample_evenly(min(SAMPLE, len(source)), len(source)))
    chosen = np.array([number for number, index in enumerate(readable) if index in sample], dtype=np.int64)
    targets = np.array([source.targets[index] for index in readable], dtype=np.int64)
    return {
        "maps": logits.half().numpy(),
        "targets": targets,
        "exact": logits.float().numpy()[chosen],
        "chosen": chosen,
    }


def prepared_batches(
    source: Source, prepare: Preprocess | None, device: torch.device, batch_size: int
) -> Iterator[tuple[list[int], Float[Tensor, "some 3 height width"]]]:
    """Yield batches of the images that can be read, as the network sees them, with their indices in the source."""
    indices: list[int] = []
    images: list[Tensor] = []
    for index, image in enumerate(iterate_images(source)):
        if isinstance(image, Unreadable):
            logger.warning("left out: %s", image)
        else:
            pixels = image[None].to(device).float() / 255
            with runtime.full_precision(device):
                images.append(pixels if prepare is None else prepare(pixels))
            indices.append(index)
        if images and (len(images) == batch_size or index == len(source) - 1):
            yield indices, torch.cat(images)
            indices, images = [], []


def _image_size(source: Source, prepare: Preprocess | None) -> tuple[int, int]:
    for image in iterate_images(source, workers=0):
        if not isinstance(image, Unreadable):
            height, width = image.shape[1], image.shape[2]
            return (height, width) if prepare is None else prepare.output_size(height, width)
    raise InputError(f"none of the {len(source)} images can be read. Check the files.")


# -- on disk -----------------------------------------------------------------------------------------------------------


def _read(folder: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arrays of a folder, or None where it does not exist, is damaged or holds something else."""
    try:
        described = json.loads((folder / "maps.json").read_bytes())
        if described["about"] != dict(about) or any(
            _digest(folder / name) != described["digests"][name] for name in FILES
        ):
            raise ValueError("its files are not those that were written")
        return {
            "local_logits": np.load(folder / "maps.npy", mmap_mode="r"),
            "sample_logits": np.load(folder / "sample.npy", mmap_mode="r"),
            "sample_indices": tuple(described["sample_places"]),
            "targets": torch.from_numpy(np.load(folder / "targets.npy")),
        }
    except OSError as error:
        if folder.is_dir() and error.filename:
            logger.warning("%s lacks %s and is computed again", folder, Path(error.filename).name)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and computed again: %s", folder, error)
    return None


def _write(
    folder: Path,
    about: Mapping[str, Any],
    total: int,
    compute: Callable[[range], dict[str, np.ndarray]],
    progress: Callable[[int], None],
) -> None:
    """Compute and write a folder block by block; blocks that an earlier process finished are used again."""
    parts = folder.with_name(f".{folder.name}.parts")
    try:
        parts.mkdir(parents=True, exist_ok=True)
        paths = []
        for first in range(0, total, BLOCK):
            path, indices = parts / f"{first:09d}.npz", range(first, min(first + BLOCK, total))
            if not _is_complete(path):
                arrays = compute(indices)
                with replace_file(path) as draft, open(draft, "wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
            paths.append(path)
            progress(indices.stop)
        _join_blocks(folder, about, paths)
        shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise InputError(f"`--cache` must be a folder with enough space; got {folder}: {error.strerror}.") from None


def _is_complete(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, zipfile.BadZipFile):
        return False


def _join_blocks(folder: Path, about: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Join the blocks into the final folder, all or nothing."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a killed process that had our number
        draft.mkdir()
        blocks = [block for block in map(np.load, paths) if block.files]
        if not blocks:
            raise InputError(f"none of the {about['images']} images of {about['data']} can be read. Check the files.")
        targets = np.concatenate([block["targets"] for block in blocks])
        shape = (len(targets), *blocks[0]["maps"].shape[1:])
        logits = open_memmap(draft / "maps.npy", mode="w+", dtype=np.float16, shape=shape)
        sample: list[int] = []
        filled = 0
        for block in blocks:
            half = block["maps"]
            logits[filled : filled + len(half)] = half
            sample += [filled + int(number) for number in block["chosen"]]
            filled += len(half)
        logits.flush()
        del logits
        np.save(draft / "sample.npy", np.concatenate([block["exact"] for block in blocks]))
        np.save(draft / "targets.npy", targets)
        digests = {name: _digest(draft / name) for name in FILES}
        described = {"about": dict(about), "digests": digests, "sample_places": sample, "images": filled}
        (draft / "maps.json").write_text(json.dumps(described, indent=1) + "\n")
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
