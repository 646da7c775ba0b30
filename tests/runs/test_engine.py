"""Batches of one size from images of many; threads that end."""

import threading
from functools import partial

import pytest
import torch

from patchguard.data.decode import Unreadable
from patchguard.data.source import Source
from patchguard.runs.engine import Batch, Failure, prefetch, split_by_size, split_into_blocks


def read(sizes, place):
    if sizes[place] == 0:
        raise Unreadable(str(place), "is empty")
    return torch.full((3, sizes[place], sizes[place]), place, dtype=torch.uint8)


def source_of(sizes):
    return Source(tuple(map(str, range(len(sizes)))), None, (), partial(read, sizes))


def places(items):
    return sorted(place for item in items for place in (item.indices if isinstance(item, Batch) else [item.index]))


SIZES = [4, 5, 4, 0, 5, 4, 6, 4, 4]


def test_every_image_is_in_one_batch_of_its_size_and_block():
    found = list(split_by_size(source_of(SIZES), split_into_blocks(len(SIZES), 4)))
    assert places(found) == list(range(len(SIZES)))
    assert [item for item in found if isinstance(item, Failure)] == [Failure(3, "is empty")]
    for batch in found:
        if isinstance(batch, Batch):
            assert len({place // 4 for place in batch.indices}) == 1
            assert [SIZES[place] for place in batch.indices] == [batch.size[0]] * len(batch.indices)
            assert batch.images[:, 0, 0, 0].tolist() == list(batch.indices)


def test_only_the_blocks_asked_for_are_read_and_their_batches_are_the_same():
    every = {
        item.indices
        for item in split_by_size(source_of(SIZES), split_into_blocks(len(SIZES), 4))
        if isinstance(item, Batch)
    }
    some = [item.indices for item in split_by_size(source_of(SIZES), [range(4, 8)])]
    assert sorted(place for batch in some for place in batch) == [4, 5, 6, 7]
    assert set(some) < every


def test_blocks_are_neighbours_and_the_last_is_smaller():
    assert split_into_blocks(5, 2) == [range(2), range(2, 4), range(4, 5)]


def test_items_made_ahead_are_the_same():
    assert list(prefetch(iter(range(20)), 3)) == list(range(20))


def test_an_error_of_the_maker_comes_through():
    def items():
        yield 1
        raise OSError("gone")

    made = prefetch(items(), 2)
    assert next(made) == 1
    with pytest.raises(OSError, match="gone"):
        next(made)


def test_a_maker_that_nobody_listens_to_ends():
    made = prefetch(iter(range(10**6)), 2)
    next(made)
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
