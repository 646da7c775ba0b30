"""CIFAR-10 from its official files, and seeded choices of images."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from patchguard.data import cifar10 as cifar10_files
from patchguard.data.dataset import Dataset, hold_out, sample_evenly
from patchguard.data.loading import load_splits
from patchguard.errors import InputError


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in the official format, with seven random records each, and digests to match."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for digests in (cifar10_files.TRAIN, cifar10_files.TEST):
        for name in list(digests):
            rows = draw.integers(0, 256, (7, 3073), dtype=np.uint8)
            rows[:, 0] %= 10
            (folder / name).write_bytes(rows.tobytes())
            monkeypatch.setitem(digests, name, hashlib.md5(rows.tobytes()).hexdigest())
    return folder


def test_cifar10_comes_in_file_order_with_planes_and_targets_in_place(cifar10: Path) -> None:
    splits = load_splits("cifar10", cifar10)
    assert (len(splits.train), len(splits.test), splits.train.size) == (35, 7, (32, 32))
    assert splits.train.images.dtype == torch.uint8
    record = (cifar10 / "data_batch_3.bin").read_bytes()[3073 * 2 : 3073 * 3]
    image = splits.train.images[7 * 2 + 2]
    assert int(splits.train.targets[7 * 2 + 2]) == record[0]
    assert int(image[1, 5, 6]) == record[1 + 1024 + 5 * 32 + 6]


def test_files_are_found_below_the_root_and_in_separate_folders(cifar10: Path) -> None:
    expected = load_splits("cifar10", cifar10)
    apart = cifar10.parent / "chunks" / "0"
    apart.mkdir(parents=True)
    (cifar10 / "data_batch_1.bin").rename(apart / "data_batch_1.bin")
    assert torch.equal(load_splits("cifar10", cifar10.parent).train.images, expected.train.images)


def test_a_damaged_file_is_refused_by_name(cifar10: Path) -> None:
    path = cifar10 / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"data_batch_4.bin must be the official file.*fetch it again"):
        load_splits("cifar10", cifar10)


def test_a_missing_file_or_folder_says_what_to_do(cifar10: Path, tmp_path: Path) -> None:
    (cifar10 / "test_batch.bin").unlink()
    with pytest.raises(InputError, match=r"test_batch.bin is not in.*cifar-10-binary.tar.gz"):
        load_splits("cifar10", cifar10)
    with pytest.raises(InputError, match="must be a folder"):
        load_splits("cifar10", tmp_path / "nowhere")


def test_an_unknown_dataset_names_the_nearest() -> None:
    with pytest.raises(InputError, match="cifar10"):
        load_splits("cifar", ".")


def numbered(count: int) -> Dataset:
    images = torch.zeros(count, 3, 2, 2, dtype=torch.uint8)
    return Dataset(images, torch.arange(count), ("one",))


def test_held_out_images_are_no_longer_learned_from_and_both_parts_keep_the_order() -> None:
    learned, held_out = hold_out(numbered(100), 15)
    assert (len(learned), len(held_out)) == (85, 15)
    assert sorted([*learned.targets.tolist(), *held_out.targets.tolist()]) == list(range(100))
    assert learned.targets.tolist() == sorted(learned.targets.tolist())
    assert torch.equal(hold_out(numbered(100), 15)[1].targets, held_out.targets)


def test_no_held_out_images_is_allowed_and_all_is_not() -> None:
    learned, held_out = hold_out(numbered(10), 0)
    assert (len(learned), len(held_out)) == (10, 0)
    with pytest.raises(InputError, match="Hold out fewer"):
        hold_out(numbered(10), 10)


@pytest.mark.parametrize(("count", "total"), [(0, 0), (0, 5), (5, 5), (3, 10), (7, 1000), (999, 1000)])
def test_an_even_sample_takes_one_of_each_run(count: int, total: int) -> None:
    numbers = sample_evenly(count, total, seed=3)
    assert len(numbers) == count
    for run, number in enumerate(numbers):
        assert run * total // count <= number < (run + 1) * total // count
    with pytest.raises(InputError, match="from 0 to"):
        sample_evenly(total + 1, total)
