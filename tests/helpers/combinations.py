"""Parameters that are combined: some combinations for every run, all of them for the slow one."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest


def combine(one_in: int, **axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of named values; one in `one_in` is quick, the others are marked slow.

    The quick ones are those whose positions along the axes add up to a multiple of `one_in`, like the cells of one
    symbol in a Latin square: each value of each axis occurs among them, with others beside it.
    """
    cases = []
    for numbered in product(*(enumerate(axis.items()) for axis in axes.values())):
        quick = sum(position for position, _ in numbered) % one_in == 0
        values, names = [value for _, (_, value) in numbered], [name for _, (name, _) in numbered]
        cases.append(pytest.param(*values, id="-".join(names), marks=() if quick else pytest.mark.slow))
    for axis, values in enumerate(axes.values()):
        for value in values.values():
            assert any(case.values[axis] is value and not case.marks for case in cases), f"{value} is never quick"
    return pytest.mark.parametrize(tuple(axes), cases)
