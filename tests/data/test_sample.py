"""The embedded sample is what its README says, and what its script makes."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from patchguard.data import cifar10, sample
from patchguard.data.catalog import CIFAR10_CLASSES, data_root
from patchguard.data.sample import make
from patchguard.data.source import open_source


def test_the_sample_has_50_images_of_each_class() -> None:
    data = sample.load()
    assert data.images.shape == (500, 3, 32, 32)
    assert data.images.dtype == torch.uint8
    assert data.targets.bincount().tolist() == [50] * 10
    assert data.class_names == CIFAR10_CLASSES
    places = sample.test_indices()
    assert (places.diff() > 0).all()
    assert 0 <= int(places[0]) < int(places[-1]) < 10_000


def test_the_digest_in_the_readme_is_that_of_the_file() -> None:
    stated = (sample.FILE.parent / "README.md").read_text()
    assert f"SHA-256 {hashlib.sha256(sample.FILE.read_bytes()).hexdigest()}\n" in stated


def test_the_source_names_images_by_their_place_in_the_official_test_set() -> None:
    source, data = open_source("sample"), sample.load()
    assert source.names[7] == f"test/{int(sample.test_indices()[7]):05d}"
    assert source.targets == tuple(data.targets.tolist())
    assert torch.equal(source.read(7), data.images[7])
    assert source.limit(20).targets is not None


def test_writing_the_arrays_again_gives_the_same_bytes(tmp_path: Path) -> None:
    with np.load(sample.FILE, allow_pickle=False) as archive:
        make.write({name: archive[name] for name in archive.files}, tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == sample.FILE.read_bytes()


def test_the_sample_is_made_of_the_official_file(tmp_path: Path) -> None:
    root = data_root(os.environ.get("PATCHGUARD_DATA"))
    if not root.is_dir() or cifar10.found(root, "test_batch.bin") is None:
        pytest.skip("CIFAR-10 is not here")
    make.write(make.sample(root), tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == sample.FILE.read_bytes()
