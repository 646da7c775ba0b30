"""A pytest plugin that every installation of patchguard brings: the fixture `check_defense`.

It stands beside the package and imports nothing of it before a test asks, so that other test suites do not wait.
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def check_defense() -> Callable[..., int]:
    """Return `patchguard.oracle.check_defense`: raise a counterexample where a defense certifies what is not so.

    def test_my_rule_is_sound(check_defense):
        check_defense(MyRule())
    """
    from patchguard import oracle

    check: Callable[..., Any] = oracle.check_defense
    return check
