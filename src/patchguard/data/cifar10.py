"""The official binary files of CIFAR-10: where they lie, their digests, and what they hold."""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from patchguard.errors import InputError

TRAIN = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
}
TEST = {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"}
FOLDER = "cifar-10-batches-bin"
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
FILE = 10_000 * RECORD  # bytes of each file


def read(
    root: Path, digests: dict[str, str]
) -> tuple[UInt8[np.ndarray, "count 3 height width"], Int64[np.ndarray, " count"]]:
    """Return images and targets of the named files at or below `root`, in file order; refuse any other content."""
    rows = np.concatenate([_read_records(root, name, digest) for name, digest in digests.items()])
    return rows[:, 1:].reshape(-1, 3, SIDE, SIDE).copy(), rows[:, 0].astype(np.int64)


def digest_of(content: bytes) -> str:
    """Return the md5 by which the files are known: it detects damage."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def find_file(root: Path, name: str) -> Path | None:
    """Look in `root` and two levels below: archives unpack into a folder, transfers into several."""
    for pattern in (name, f"*/{name}", f"*/*/{name}"):
        matches = sorted(root.glob(pattern))
        if matches:
            return matches[0]
    return None


def _read_records(root: Path, name: str, digest: str) -> UInt8[np.ndarray, "count record"]:
    """Return the records of one file: a byte for the class, then the red, green and blue plane, row by row."""
    if not root.is_dir():
        raise InputError(
            f"`root` must be a folder that holds CIFAR-10; got {root}. "
            "Fetch it with `patchguard data get cifar10`, or name the folder where you have it."
        )
    path = find_file(root, name)
    if path is None:
        raise InputError(
            f"{name} is not in {root} or the folders below it. Fetch it with `patchguard data get cifar10 --root "
            f"{root}`, or unpack the binary version of CIFAR-10 (cifar-10-binary.tar.gz) there."
        )
    content = path.read_bytes()
    if digest_of(content) != digest:
        raise InputError(
            f"{path} must be the official file with md5 {digest}; its md5 is {digest_of(content)} "
            f"({len(content):,} bytes). It is damaged or something else: delete it and fetch it again."
        )
    return np.frombuffer(content, np.uint8).reshape(-1, RECORD)
