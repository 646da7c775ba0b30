"""What all tests share: draws that repeat in any order of tests, and the profiles of hypothesis."""

import random
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

# `ci` tries the same examples in every run: only a change of the code turns a test red. `random` looks for new ones and
# prints what repeats a failure (`make test-all`, or --hypothesis-profile=random). Neither measures time.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **UNTIMED)
settings.register_profile("random", derandomize=False, print_blob=True, **UNTIMED)
settings.load_profile("ci")


class TorchRandom:
    """Torch's global generator as hypothesis takes one: each example starts from the same state."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()
register_random(TORCH_RANDOM)


def seed_global_generators(name: str) -> None:
    """Start all global generators from a seed that depends on the name alone."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a module draws while it is imported does not depend on the modules before it."""
    if isinstance(collector, pytest.Module):
        seed_global_generators(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws does not depend on the tests before it."""
    seed_global_generators(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """What a shared fixture draws does not depend on the test that asks first, nor that test on who asked first."""
    if fixturedef.scope == "function":
        return (yield)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed_global_generators(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")
    try:
        return (yield)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
