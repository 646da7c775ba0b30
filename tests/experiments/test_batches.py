"""Batches of one size from images of many; threads that end."""

import threading
from functools import partial

import pytest
import torch

from patchguard.data.decode import Unreadable
from patchguard.data.source import Source
from patchguard.experiments import batches
from patchguard.experiments.batches import Batch, Failure, ahead, grouped


def read(sizes, place):
    if sizes[place] == 0:
        raise Unreadable(str(place), "is empty")
    return torch.full((3, sizes[place], sizes[place]), place, dtype=torch.uint8)


def source_of(sizes):
    return Source(tuple(map(str, range(len(sizes)))), None, (), partial(read, sizes))


def places(items):
    return sorted(place for item in items for place in (item.places if isinstance(item, Batch) else [item.place]))


SIZES = [4, 5, 4, 0, 5, 4, 6, 4, 4]


def test_every_image_is_in_one_batch_of_its_size():
    found = list(grouped(source_of(SIZES), range(len(SIZES)), 2))
    assert places(found) == list(range(len(SIZES)))
    assert [item for item in found if isinstance(item, Failure)] == [Failure(3, "is empty")]
    for batch in found:
        if isinstance(batch, Batch):
            assert len(batch.places) <= 2
            assert [SIZES[place] for place in batch.places] == [batch.size[0]] * len(batch.places)
            assert batch.images[:, 0, 0, 0].tolist() == list(batch.places)


def test_only_the_places_asked_for_are_read():
    assert places(grouped(source_of(SIZES), [1, 7], 4)) == [1, 7]


def test_few_pixels_wait_however_many_sizes_there_are(monkeypatch):
    monkeypatch.setattr(batches, "MOST_BYTES", 3 * 10 * 10)
    sizes = list(range(4, 10)) * 3
    found = list(grouped(source_of(sizes), range(len(sizes)), 100))
    assert places(found) == list(range(len(sizes)))
    assert len(found) > 6


def test_items_made_ahead_are_the_same():
    assert list(ahead(iter(range(20)), 3)) == list(range(20))


def test_an_error_of_the_maker_comes_through():
    def items():
        yield 1
        raise OSError("gone")

    made = ahead(items(), 2)
    assert next(made) == 1
    with pytest.raises(OSError, match="gone"):
        next(made)


def test_a_maker_that_nobody_listens_to_ends():
    made = ahead(iter(range(10**6)), 2)
    next(made)
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
