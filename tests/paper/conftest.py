"""Contexts for the experiments of the paper."""

import pytest
from helpers.reproduction import sample_source, thin_context, thin_guard

from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context


@pytest.fixture(scope="session")
def guard():
    return thin_guard()


@pytest.fixture(scope="session")
def source():
    return sample_source()


@pytest.fixture
def own_context(tmp_path, monkeypatch) -> Context:
    """A context that a test may change: one thin model, the sample as CIFAR-10, an empty cache."""
    return thin_context(tmp_path / "cache", monkeypatch)


@pytest.fixture(scope="session")
def _shared_context(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return thin_context(tmp_path_factory.mktemp("reproduce"), patch)


@pytest.fixture
def context(_shared_context, monkeypatch) -> Context:
    """The same for tests that only read: what one of them counted is known to the next."""
    thin_context(_shared_context.cache, monkeypatch)
    return _shared_context


@pytest.fixture
def logits(context) -> CachedLogits:
    return context.logits("cifar10_mask_srf", "cifar10")
