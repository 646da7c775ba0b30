"""The pieces of a page: markup, numbers, ticks, errors."""

import pytest

from patchguard.report.charts import _nice
from patchguard.report.files import Entry
from patchguard.report.markup import Markup, escape, prose, tag
from patchguard.report.numbers import percent, short, size, threat


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_markup_escapes_children_and_attributes_once():
    inner = tag("b", "<&>")
    assert (
        tag("p", inner, None, title='"x"', hidden=True, id=None)
        == '<p title="&quot;x&quot;" hidden><b>&lt;&amp;&gt;</b></p>'
    )
    assert escape(Markup("<i>")) == "<i>"
    assert prose("run `a < b` now") == "run <code>a &lt; b</code> now"


def test_percentages_do_not_round_to_certainty():
    assert [plain(percent(share)) for share in (0.0, 1e-9, 0.5, 0.99999, 1.0)] == [
        "0 %",
        "under 0.1 %",
        "50.0 %",
        "over 99.9 %",
        "100 %",
    ]


@pytest.mark.parametrize(
    ("share", "digits", "text"),
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
def test_only_what_would_round_to_an_end_is_called_under_or_over(share, digits, text):
    assert plain(percent(share, digits)) == text


def test_sizes_and_values_are_written_for_people():
    assert plain(size("24x88")) == "24 × 88"
    assert plain(threat("2%")) == "patch of 2 % of the picture"
    assert [short(value) for value in (0.0, 12.5, -1234.5, 0.00012)] == ["0", "12.5", "−1,234", "0.00012"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 9000), (0, 0), (-1e-6, 1e-6)])
def test_ticks_are_few_and_inside(low, high):
    ticks = _nice(low, high, 5)
    assert 1 <= len(ticks) <= 9
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_a_wrong_value_is_shown_shortened():
    assert "..." in str(Entry(["x" * 100], "here").wrong("text"))
