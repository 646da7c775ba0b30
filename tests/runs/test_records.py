"""Folders of runs: nothing lost, nothing doubled, one writer."""

import errno
import json
import os

import pytest
from filelock import SoftFileLock
from msgspec.structs import replace

from patchguard.errors import InputError
from patchguard.runs.records import Folder
from patchguard.runs.summary import CertifySummary, Run

RUN = Run(settings={"patches": ["5x5"], "rule": {}, "shards": 1})
HERE = {"patchguard": "1.0", "torch": "2.0", "python": "3"}


def with_environment(**versions: str) -> Run:
    return replace(RUN, environment={**HERE, **versions})


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run")


def fill(folder, indices, shard=0):
    with folder.lock(), folder.open_shard(shard) as records:
        records.append([{"index": index, "name": "ü" * 5} for index in indices])


def test_records_come_back_from_all_shards(folder):
    fill(folder, [0, 2])
    fill(folder, [1, 3], shard=1)
    assert sorted(record["index"] for record in folder.records()) == [0, 1, 2, 3]


def test_a_file_cut_anywhere_keeps_its_whole_lines_and_can_be_appended_to(folder):
    fill(folder, range(4))
    (shard,) = folder.shards()
    content = shard.read_bytes()
    for length in range(len(content) + 1):
        shard.write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        assert [record["index"] for record in folder.records()] == list(range(whole))
        fill(folder, range(whole, 4))
        assert shard.read_bytes() == content


def test_a_torn_line_longer_than_a_block_is_dropped_and_all_before_it_kept(folder):
    for count in (3, 3000):  # less and more than a block of 64 KiB
        fill(folder, range(count))
        (shard,) = folder.shards()
        whole = shard.read_bytes()
        for torn in (20, 65_535, 65_536, 65_537, 200_000):
            shard.write_bytes(whole + b"x" * torn)
            fill(folder, [count])
            assert [record["index"] for record in folder.records()] == list(range(count + 1))
            assert shard.read_bytes().startswith(whole)
        shard.unlink()


def test_a_system_that_writes_a_little_at_a_time_loses_nothing(folder, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    fill(folder, range(5))
    assert [record["index"] for record in folder.records()] == list(range(5))


def test_a_full_disk_is_one_sentence_and_what_comes_later_does_not_continue_half_a_line(folder, monkeypatch):
    write, left = os.write, [40]

    def full(descriptor, content):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, content[: left[0]])
        left[0] -= done
        return done

    fill(folder, [0])
    with folder.lock(), folder.open_shard(0) as records:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(InputError, match=r"records-00000\.jsonl cannot be written: No space left on device"):
            records.append([{"index": index} for index in range(1, 9)])
        monkeypatch.setattr(os, "write", write)  # as another thread that finds room again
        records.append([{"index": 9}])
    assert [record["index"] for record in folder.records()] == [0, 9]


def test_records_that_cannot_be_opened_are_one_sentence(folder):
    fill(folder, [0])
    (shard,) = folder.shards()
    shard.unlink()
    shard.mkdir()
    with pytest.raises(InputError, match=r"records-00000\.jsonl cannot be written: Is a directory"):
        fill(folder, [1])


def test_a_file_is_replaced_whole_or_not_at_all(folder, monkeypatch):
    fill(folder, [0])
    folder.write("run.json", {"value": 1})
    path, other = folder.path / "run.json", folder.path / "opened.json"
    os.link(path, other)  # as a reader holds it
    folder.write("run.json", {"value": 2})
    assert [json.loads(each.read_bytes()) for each in (path, other)] == [{"value": 2}, {"value": 1}]

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match=r"run\.json cannot be written: No space left on device"):
        folder.write("run.json", {"value": 3})
    assert json.loads(path.read_bytes()) == {"value": 2}
    assert not list(folder.path.glob(".*draft"))


def test_a_damaged_line_is_reported_with_its_number(folder):
    fill(folder, range(3))
    (shard,) = folder.shards()
    shard.write_bytes(shard.read_bytes().replace(b'{"index":1', b'{"inde'))
    with pytest.raises(InputError, match=r"line 2 of .* is damaged"):
        list(folder.records())


def test_a_second_run_is_refused_while_the_first_works(folder):
    with folder.lock(), pytest.raises(InputError, match="another process is working"), folder.lock():
        pass
    with folder.lock():
        pass
    assert not list(folder.path.iterdir())  # locks leave nothing behind


def test_a_second_run_is_refused_while_any_process_of_the_first_is_left(folder):
    with folder.lock(), folder.lock(1), folder.lock(2):
        pass
    with folder.lock(2):  # noqa: SIM117  (of a torchrun whose first process was killed)
        with pytest.raises(InputError, match="another process is working"), folder.lock():
            pass
    with folder.lock():
        pass


def test_a_lock_that_a_killed_process_left_holds_nobody_up(folder):
    folder.path.mkdir()
    for name in (".lock", ".lock-00001"):
        (folder.path / name).touch()
    with folder.lock(), folder.lock(1):
        pass


def test_where_the_system_has_no_locks_a_marker_takes_their_place(folder, monkeypatch):
    """As on a file system without flock, and with the lock of a system without fcntl."""
    monkeypatch.setattr("patchguard.runs.records.FileLock", SoftFileLock)
    with folder.lock(), pytest.raises(InputError, match="another process is working"), folder.lock():
        pass
    with folder.lock():
        pass


def test_the_same_settings_go_on_and_others_are_refused_with_what_differs(folder):
    with folder.lock():
        folder.begin(RUN)
        folder.begin(replace(RUN, settings={**RUN.settings, "shards": 4}))
        with pytest.raises(InputError, match=r'patches \["5x5"\], not \["3x3"\]. Give another --out'):
            folder.begin(replace(RUN, settings={**RUN.settings, "patches": ["3x3"]}))


def test_other_versions_are_refused_with_a_choice_and_mixed_ones_are_kept(folder):
    with folder.lock():
        folder.begin(with_environment())
        folder.begin(with_environment(python="4"))
        for name in ("patchguard", "torch"):
            told = f"other versions, .*: {name} {HERE[name]}, not 9. Give --mix-versions .* or another --out"
            with pytest.raises(InputError, match=told):
                folder.begin(with_environment(**{name: "9"}))
        with pytest.raises(InputError, match=r"torch 2\.0, not 2\."):
            folder.begin(with_environment(torch="2."))
        assert folder.run().environment == HERE
        folder.begin(with_environment(torch="9"), mix_versions=True)
        assert folder.run().environment == {**HERE, "torch": "2.0 and 9"}
        for version in ("2.0", "9"):  # both are known by now
            folder.begin(with_environment(torch=version))
        with pytest.raises(InputError, match=r"torch 2\.0 and 9, not 10"):
            folder.begin(with_environment(torch="10"))


def test_nothing_is_written_where_the_check_of_what_is_there_fails(folder):
    def refuse():
        raise InputError("no")

    with folder.lock():
        with pytest.raises(InputError, match="no"):
            folder.begin(RUN, refuse)
        assert folder.run() is None
        folder.begin(with_environment())
        with pytest.raises(InputError, match="no"):
            folder.begin(with_environment(torch="9"), refuse, mix_versions=True)
        assert folder.run().environment == HERE


def test_records_without_settings_are_refused(folder):
    fill(folder, [0])
    with pytest.raises(InputError, match=r"records without run\.json"):
        folder.begin(RUN)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": 99})])
def test_a_damaged_or_newer_file_is_refused(folder, content):
    fill(folder, [0])
    (folder.path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"summary\.json"):
        folder.summary(CertifySummary)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="`--out` must be a folder"), Folder(tmp_path / "run").lock():
        pass
