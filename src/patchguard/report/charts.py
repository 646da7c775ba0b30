"""Charts as SVG, drawn here so that the page needs nothing from elsewhere; colours and fonts come from page.css.

Text in a chart shrinks with it on a phone, so charts are small drawings (440 units wide) that grow on a large screen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from patchguard.report.markup import Markup, join, tag
from patchguard.report.numbers import percent, short
from patchguard.runs.summary import Proportion

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 46
COLOURS = 6
Number = float | int  # types are enforced in tests, where a whole number is no float


@final
@dataclass(frozen=True)
class Line:
    """A curve: shares by position, its name, and the number of its colour and marker."""

    name: str
    points: dict[int, Proportion]
    look: int = 0
    dashed: bool = False


@final
@dataclass(frozen=True)
class _Scale:
    """From values to places along one axis of a drawing."""

    low: Number
    high: Number
    first: Number
    last: Number

    def __call__(self, value: Number) -> float:
        reach = (self.high - self.low) or 1.0
        return round(self.first + (value - self.low) / reach * (self.last - self.first), 2)


def line_chart(lines: Sequence[Line], *, about: str, x_title: str, level: Line | None = None, bands: bool) -> Markup:
    """Return curves of shares over patch sides; `level` is one share drawn all across, `bands` shows intervals."""
    sides = sorted({side for line in lines for side in line.points})
    pad = max(0.5, 0.04 * (sides[-1] - sides[0]))
    across = _Scale(sides[0] - pad, sides[-1] + pad, LEFT, WIDTH - RIGHT)
    up = _Scale(0, 1, HEIGHT - BOTTOM, TOP)
    grid = [_horizontal(up(share), f"{100 * share:.0f}\u00a0%") for share in (0, 0.25, 0.5, 0.75, 1)]
    ticks = [_below(across(side), str(side)) for side in _spread(sides, across)]
    drawn = []
    if level is not None:
        height = up(next(iter(level.points.values())).rate)
        drawn.append(_path(f"M{LEFT} {height}H{WIDTH - RIGHT}", f"level look{level.look}"))
    for line in lines:
        if bands and len(line.points) > 1:
            edge = [(across(side), up(share.high)) for side, share in line.points.items()]
            edge += [(across(side), up(share.low)) for side, share in reversed(line.points.items())]
            drawn.append(_path(_through(edge) + "Z", f"band look{line.look}"))
    for line in lines:
        places = [(across(side), up(share.rate)) for side, share in line.points.items()]
        drawn.append(_path(_through(places), f"line look{line.look}{' dashed' if line.dashed else ''}"))
        for (x, y), (side, share) in zip(places, line.points.items(), strict=True):
            title = tag("title", f"{line.name}, side {side}: {percent(share.rate)}")
            drawn.append(tag("path", title, d=_marker(line.look, x, y), class_=f"marker look{line.look}"))
    return _svg(about, *grid, *ticks, _x_title(x_title), *drawn)


def histogram(
    edges: list[float], groups: dict[str, list[int]], *, about: str, x_title: str, looks: dict[str, tuple[str, str]]
) -> Markup:
    """Return stacked bars; `looks` gives each group its name and its class of colour. Right of zero lies the proof."""
    totals = [sum(column) for column in zip(*groups.values(), strict=True)]
    across = _Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    steps = _nice(0, max(totals), 4, whole=True)
    up = _Scale(0, max(steps[-1], max(totals)), HEIGHT - BOTTOM, TOP)
    parts = [_horizontal(up(step), f"{step:,.0f}") for step in steps]
    parts += [_below(across(step), short(step)) for step in _nice(edges[0], edges[-1], 5)]
    height = [0] * len(totals)
    for group, counts in groups.items():
        name, colour = looks[group]
        for place, found in enumerate(counts):
            if found:
                left, right = across(edges[place]), across(edges[place + 1])
                title = tag("title", f"{name}, margin {short(edges[place])} to {short(edges[place + 1])}: {found:,}")
                top, foot = up(height[place] + found), up(height[place])
                gap = min(1.0, (right - left) / 8)
                parts.append(
                    tag(
                        "rect",
                        title,
                        x=round(left + gap / 2, 2),
                        y=top,
                        width=round(right - left - gap, 2),
                        height=round(foot - top, 2),
                        class_=f"bar {colour}",
                    )
                )
                height[place] += found
    if edges[0] <= 0 <= edges[-1]:
        zero = across(0)
        parts.append(_path(f"M{zero} {TOP - 4}V{HEIGHT - BOTTOM}", "zero"))
        if WIDTH - RIGHT - zero > 64:
            parts.append(tag("text", "proved \u2192", x=zero + 5, y=TOP + 4, class_="hint"))
    return _svg(about, *parts, _x_title(x_title))


def legend(entries: Sequence[tuple[str, Markup]]) -> Markup:
    """Return a list of names with their swatches."""
    return tag("ul", *(tag("li", swatch, name) for name, swatch in entries), class_="legend")


def line_swatch(line: Line, *, marked: bool = True) -> Markup:
    """Return a piece of a curve for the legend."""
    look = f"look{line.look}"
    stroke = _path("M1 7H31", f"{'line' if marked else 'level'} {look}{' dashed' if line.dashed else ''}")
    marker = tag("path", d=_marker(line.look, 16, 7), class_=f"marker {look}") if marked else None
    return tag("svg", stroke, marker, viewBox="0 0 32 14", class_="swatch", aria_hidden="true")


def colour_swatch(colour: str) -> Markup:
    """Return a square of a colour for the legend."""
    square = tag("rect", x=1, y=1, width=12, height=12, rx=2, class_=f"bar {colour}")
    return tag("svg", square, viewBox="0 0 14 14", class_="swatch square", aria_hidden="true")


def meter(share: Proportion, colour: str) -> Markup:
    """Return a bar with its 95 % interval; the numbers stand beside it."""
    bar = tag("span", class_=f"fill {colour}", style=f"width:{100 * share.rate:.2f}%")
    reach = f"left:{100 * share.low:.2f}%;width:{100 * (share.high - share.low):.2f}%"
    return tag("span", bar, tag("span", class_="reach", style=reach), class_="meter", aria_hidden="true")


def stack(parts: Sequence[tuple[int, str]]) -> Markup:
    """Return one bar made of counts, each with its class of colour."""
    total = sum(found for found, _ in parts) or 1
    pieces = [
        tag("span", class_=f"fill {colour}", style=f"width:{100 * found / total:.2f}%")
        for found, colour in parts
        if found
    ]
    return tag("span", *pieces, class_="stack", aria_hidden="true")


# -- pieces ------------------------------------------------------------------------------------------------------------


def _svg(about: str, *parts: Markup) -> Markup:
    return tag("svg", join(*parts), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=about, class_="chart")


def _path(d: str, look: str) -> Markup:
    return tag("path", d=d, class_=look)


def _through(places: Sequence[tuple[Number, Number]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _horizontal(y: float, text: str) -> Markup:
    return join(_path(f"M{LEFT} {y}H{WIDTH - RIGHT}", "rule"), tag("text", text, x=LEFT - 7, y=y + 4.5, class_="end"))


def _below(x: float, text: str) -> Markup:
    foot = HEIGHT - BOTTOM
    return join(_path(f"M{x} {foot}v4", "rule"), tag("text", text, x=x, y=foot + 18, class_="middle"))


def _x_title(text: str) -> Markup:
    return tag("text", text, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 7, class_="middle title")


def _marker(look: int, x: Number, y: Number) -> str:
    """Return a disc, square, diamond or triangle, so that curves can be told apart without colours."""
    shape = look % 4
    if shape == 0:
        return f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z"
    if shape == 1:
        return f"M{x - 3.6:g} {y - 3.6:g}h7.2v7.2h-7.2Z"
    if shape == 2:
        return f"M{x} {y - 5}l5 5l-5 5l-5 -5Z"
    return f"M{x} {y - 5}l4.8 8.6h-9.6Z"


def _spread(sides: Sequence[int], across: _Scale) -> list[int]:
    """Return those sides whose labels do not run into each other; the last one always."""
    chosen = [sides[-1]]
    for side in reversed(sides[:-1]):
        if across(chosen[-1]) - across(side) >= 22:
            chosen.append(side)
    return chosen[::-1]


def _nice(low: Number, high: Number, wanted: int, *, whole: bool = False) -> list[float]:
    """Return round values from `low` to `high`, about as many as wanted."""
    reach = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(reach / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if reach / (power * factor) <= wanted + 2)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step), math.floor(high / step + (0.999 if whole else 1e-9))
    return [step * place for place in range(first, last + 1)]
