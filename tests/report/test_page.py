"""The pieces of a page: numbers and ticks."""

import math

import pytest

from patchguard.report.charts import choose_steps
from patchguard.report.numbers import percent, setting, short, size, threat


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_percentages_do_not_round_to_certainty():
    assert [plain(percent(rate)) for rate in (0.0, 1e-9, 0.5, 0.99999, 1.0)] == [
        "0 %",
        "under 0.1 %",
        "50.0 %",
        "over 99.9 %",
        "100 %",
    ]


@pytest.mark.parametrize(
    ("rate", "digits", "text"),
    [
        (0.0004, 1, "under 0.1 %"),
        (0.0005, 1, "0.1 %"),  # half a step is rounded up, as any number is
        (0.0006, 1, "0.1 %"),
        (0.004, 0, "under 1 %"),
        (0.006, 0, "1 %"),
        (0.9994, 1, "99.9 %"),
        (0.9996, 1, "over 99.9 %"),
        (0.994, 0, "99 %"),
        (0.996, 0, "over 99 %"),
    ],
)
def test_only_what_would_round_to_an_end_is_called_under_or_over(rate, digits, text):
    assert plain(percent(rate, digits)) == text


def test_sizes_and_values_are_written_for_people():
    assert plain(size("24x88")) == "24 × 88"
    assert plain(threat("2%")) == "patch of 2 % of the image"
    assert [short(value) for value in (0.0, 12.5, -1234.5, 0.00012)] == ["0", "12.5", "−1,234", "0.00012"]
    assert [short(value) for value in (None, -math.inf)] == ["none", "minus infinity"]
    assert [setting(value) for value in (True, None, [], [1, 2.5], "x")] == ["yes", "none", "none", "1, 2.5", "x"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 9000), (0, 0), (-1e-6, 1e-6)])
def test_ticks_are_few_and_inside(low, high):
    ticks = choose_steps(low, high, 5)
    assert 1 <= len(ticks) <= 9
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
