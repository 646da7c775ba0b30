"""Contexts for the experiments of the paper."""

import pytest
from helpers.reproduction import put, sample_source, thin_guard

from patchguard.paper.context import Context
from patchguard.storage import zoo


@pytest.fixture(scope="session")
def guard():
    return thin_guard()


@pytest.fixture(scope="session")
def source(guard):
    return sample_source(guard)


@pytest.fixture
def context(tmp_path, monkeypatch, guard, source):
    """Two thin models, the sample under the name of CIFAR-10, and nothing else."""
    monkeypatch.setattr(zoo, "checkpoints", list)
    monkeypatch.setattr(Context, "images", lambda self, dataset: source)
    made = Context(cache=tmp_path / "cache")
    put(made, "cifar10_mask_srf", guard)
    return made


@pytest.fixture
def maps(context):
    return context.maps("cifar10_mask_srf", "cifar10")
