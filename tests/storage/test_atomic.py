"""Files are whole or not there at all, also with the semantics of Windows."""

import errno
import json
import os

import pytest

from patchguard.errors import InputError
from patchguard.storage import atomic


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_and_a_reader_keeps_the_old_one(tmp_path):
    path = tmp_path / "file.json"
    atomic.write_json(path, {"value": 1})
    os.link(path, tmp_path / "open")  # as a reader holds it
    atomic.write_json(path, {"value": 2}, durable=True)
    assert [json.loads(each.read_bytes()) for each in (path, tmp_path / "open")] == [{"value": 2}, {"value": 1}]
    assert names(tmp_path) == ["file.json", "open"]


def test_a_block_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "file"
    atomic.write_bytes(path, b"old")

    def stop(draft):
        draft.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError), atomic.replace_file(path) as draft:
        stop(draft)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic.write_bytes(path, b"old")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match=r"file cannot be written: No space left on device\. Free some space"):
        atomic.write_bytes(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.fixture
def windows(monkeypatch):
    """Windows refuses to open folders, and to replace a file that another program has open: the first three times."""
    open_, replace, busy = os.open, os.replace, [3]

    def open_files_alone(path, flags, *args, **settings):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, flags, *args, **settings)

    def replace_once_free(source, target):
        if busy[0]:
            busy[0] -= 1
            raise PermissionError(errno.EACCES, "Access is denied")
        replace(source, target)

    monkeypatch.setattr(os, "open", open_files_alone)
    monkeypatch.setattr(os, "replace", replace_once_free)
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.setattr(atomic, "PAUSE", 0.001)
    return busy


def test_on_windows_a_file_that_is_being_read_is_replaced_once_it_is_closed(tmp_path, windows):
    atomic.write_bytes(tmp_path / "file", b"old")
    windows[0] = 3
    atomic.write_bytes(tmp_path / "file", b"new", durable=True)
    assert windows == [0]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_that_stays_open_on_windows_is_one_sentence(tmp_path, windows):
    atomic.write_bytes(tmp_path / "file", b"old")
    windows[0] = 10**6
    with pytest.raises(InputError, match="file cannot be written: Access is denied"):
        atomic.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
