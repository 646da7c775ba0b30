"""Folders of runs: nothing lost, nothing doubled, one writer."""

import json

import pytest

from patchguard.errors import InputError
from patchguard.experiments.records import Folder

RUN = {"kind": "certify", "settings": {"patches": ["5x5"], "shards": 1}}


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run")


def fill(folder, indices, shard=0):
    with folder.locked(first=True), folder.appending(shard) as records:
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


def test_a_damaged_line_is_reported_with_its_number(folder):
    fill(folder, range(3))
    (shard,) = folder.shards()
    shard.write_bytes(shard.read_bytes().replace(b'{"index":1', b'{"inde'))
    with pytest.raises(InputError, match=r"line 2 of .* is damaged"):
        list(folder.records())


def test_a_second_run_is_refused_while_the_first_works(folder):
    with folder.locked(first=True):
        for first in (True, False):
            with pytest.raises(InputError, match="another process is working"), folder.locked(first=first):
                pass


def test_other_processes_of_a_run_enter_once_the_first_shares(folder):
    with folder.locked(first=True) as lock:
        lock.share()
        with folder.locked(first=False):
            pass
        with pytest.raises(InputError, match="another process is working"), folder.locked(first=True):
            pass


def test_the_same_settings_go_on_and_others_are_refused_with_what_differs(folder):
    with folder.locked(first=True):
        folder.begin(RUN)
        folder.begin({**RUN, "settings": {**RUN["settings"], "shards": 4}})
        with pytest.raises(InputError, match=r'patches \["5x5"\], not \["3x3"\]. Give another --out'):
            folder.begin({**RUN, "settings": {"patches": ["3x3"], "shards": 1}})


def test_records_without_settings_are_refused(folder):
    fill(folder, [0])
    with pytest.raises(InputError, match=r"records without run\.json"):
        folder.begin(RUN)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": 99})])
def test_a_damaged_or_newer_file_is_refused(folder, content):
    fill(folder, [0])
    (folder.path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"summary\.json"):
        folder.summary()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="`--out` must be a folder"), Folder(tmp_path / "run").locked(first=True):
        pass
