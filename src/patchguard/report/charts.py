"""Charts and overlays as shapes of an SVG drawing; the templates write them, colors and fonts come from page.css.

Text in a chart shrinks with it on a phone, so charts are small drawings (440 units wide) that grow on a large screen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from patchguard.report.numbers import percent, short
from patchguard.runs.summary import Histogram, Proportion

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 46
LINE_COLORS = 6
Number = float | int  # types are enforced in tests, where a whole number is no float


@final
@dataclass(frozen=True)
class Shape:
    """An element of a drawing with its attributes, the text in it, and what a pointer shows."""

    tag: str
    attributes: Mapping[str, Any]
    text: str = ""
    title: str = ""


@final
@dataclass(frozen=True)
class Drawing:
    """Shapes in their order. `about` is read aloud in place of the drawing; empty means it adds nothing to the text."""

    size: tuple[int, int]
    shapes: list[Shape]
    look: str = ""
    about: str = ""
    stretched: bool = False


@final
@dataclass(frozen=True)
class Line:
    """A curve: numbers by the side of a patch, its name, and the number of its color and marker."""

    name: str
    points: Mapping[int, Proportion]
    look: int = 0
    dashed: bool = False

    @property
    def swatch(self) -> Drawing:
        """A piece of the curve for the legend."""
        marker = Shape("path", {"d": _draw_marker(self.look, 16, 7), "class": f"marker look{self.look}"})
        return Drawing((32, 14), [_path("M1 7H31", f"line {self._css}"), marker], "swatch")

    @property
    def level_swatch(self) -> Drawing:
        """A piece of a level for the legend."""
        return Drawing((32, 14), [_path("M1 7H31", f"level {self._css}")], "swatch")

    @property
    def _css(self) -> str:
        return f"look{self.look}{' dashed' if self.dashed else ''}"


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


def draw_lines(
    lines: Sequence[Line], *, about: str, x_title: str, level: Line | None = None, bands: bool = True
) -> Drawing:
    """Draw curves over patch sides; `level` is one number drawn all across, `bands` shows intervals."""
    sides = sorted({side for line in lines for side in line.points})
    pad = max(0.5, 0.04 * (sides[-1] - sides[0]))
    across = _Scale(sides[0] - pad, sides[-1] + pad, LEFT, WIDTH - RIGHT)
    up = _Scale(0, 1, HEIGHT - BOTTOM, TOP)
    shapes = [shape for rate in (0, 0.25, 0.5, 0.75, 1) for shape in _rule(up(rate), f"{100 * rate:.0f}\u00a0%")]
    shapes += [shape for side in _choose_ticks(sides, across) for shape in _tick(across(side), str(side))]
    shapes.append(_x_title(x_title))
    if level is not None:
        height = up(next(iter(level.points.values())).rate)
        shapes.append(_path(f"M{LEFT} {height}H{WIDTH - RIGHT}", f"level look{level.look}"))
    for line in lines:
        if bands and len(line.points) > 1:
            edge = [(across(side), up(number.high)) for side, number in line.points.items()]
            edge += [(across(side), up(number.low)) for side, number in reversed([*line.points.items()])]
            shapes.append(_path(_through(edge) + "Z", f"band look{line.look}"))
    for line in lines:
        places = {side: (across(side), up(number.rate)) for side, number in line.points.items()}
        shapes.append(_path(_through([*places.values()]), f"line look{line.look}{' dashed' if line.dashed else ''}"))
        for side, place in places.items():
            title = f"{line.name}, side {side}: {percent(line.points[side].rate)}"
            shapes.append(_path(_draw_marker(line.look, *place), f"marker look{line.look}", title))
    return Drawing((WIDTH, HEIGHT), shapes, "chart", about)


def draw_histogram(histogram: Histogram, names: Mapping[str, tuple[str, str]], *, about: str, x_title: str) -> Drawing:
    """Draw stacked bars; `names` gives each group that is shown its name and color. Margins above 0 are certified."""
    edges, groups = histogram.edges, {group: histogram.groups[group] for group in names}
    totals = [sum(column) for column in zip(*groups.values(), strict=True)]
    across = _Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    steps = choose_steps(0, max(totals), 4, whole=True)
    up = _Scale(0, max(steps[-1], max(totals)), HEIGHT - BOTTOM, TOP)
    shapes = [shape for step in steps for shape in _rule(up(step), f"{step:,.0f}")]
    shapes += [shape for step in choose_steps(edges[0], edges[-1], 5) for shape in _tick(across(step), short(step))]
    below = [0] * len(totals)
    for group, counts in groups.items():
        name, color = names[group]
        for index, count in enumerate(counts):
            if count:
                low, high = edges[index : index + 2]
                left, right, top, foot = across(low), across(high), up(below[index] + count), up(below[index])
                gap = min(1.0, (right - left) / 8)
                place = rectangle(left + gap / 2, top, right - left - gap, foot - top, f"bar {color}", digits=2)
                shapes.append(Shape("rect", place, title=f"{name}, margin {short(low)} to {short(high)}: {count:,}"))
                below[index] += count
    if edges[0] <= 0 <= edges[-1]:
        zero = across(0)
        shapes.append(_path(f"M{zero} {TOP - 14}V{HEIGHT - BOTTOM}", "zero"))
        if WIDTH - RIGHT - zero > 72:
            shapes.append(Shape("text", {"x": zero + 5, "y": TOP - 5, "class": "hint"}, "certified \u2192"))
    return Drawing((WIDTH, HEIGHT), [*shapes, _x_title(x_title)], "chart", about)


def rectangle(
    x: Number, y: Number, width: Number, height: Number, look: str, *, digits: int = 3
) -> dict[str, Number | str]:
    """Return the attributes of a rectangle."""
    place = {"x": x, "y": y, "width": width, "height": height}
    return {**{name: round(value, digits) for name, value in place.items()}, "class": look}


def _path(d: str, look: str, title: str = "") -> Shape:
    return Shape("path", {"d": d, "class": look}, title=title)


def _through(places: Sequence[tuple[Number, Number]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _rule(y: float, text: str) -> list[Shape]:
    label = Shape("text", {"x": LEFT - 7, "y": y + 4.5, "class": "end"}, text)
    return [_path(f"M{LEFT} {y}H{WIDTH - RIGHT}", "rule"), label]


def _tick(x: float, text: str) -> list[Shape]:
    foot = HEIGHT - BOTTOM
    return [_path(f"M{x} {foot}v4", "rule"), Shape("text", {"x": x, "y": foot + 18, "class": "middle"}, text)]


def _x_title(text: str) -> Shape:
    return Shape("text", {"x": (LEFT + WIDTH - RIGHT) / 2, "y": HEIGHT - 7, "class": "middle title"}, text)


def _draw_marker(look: int, x: Number, y: Number) -> str:
    """Return a disc, square, diamond or triangle, so that curves can be told apart without colors."""
    shape = look % 4
    if shape == 0:
        return f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z"
    if shape == 1:
        return f"M{x - 3.6:g} {y - 3.6:g}h7.2v7.2h-7.2Z"
    if shape == 2:
        return f"M{x} {y - 5}l5 5l-5 5l-5 -5Z"
    return f"M{x} {y - 5}l4.8 8.6h-9.6Z"


def _choose_ticks(sides: Sequence[int], across: _Scale) -> list[int]:
    """Return those sides whose labels do not run into each other; the last one always."""
    chosen = [sides[-1]]
    for side in reversed(sides[:-1]):
        if across(chosen[-1]) - across(side) >= 22:
            chosen.append(side)
    return chosen[::-1]


def choose_steps(low: Number, high: Number, wanted: int, *, whole: bool = False) -> list[float]:
    """Return round values from `low` to `high`, about as many as wanted."""
    reach = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(reach / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if reach / (power * factor) <= wanted + 2)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step), math.floor(high / step + (0.999 if whole else 1e-9))
    return [step * number for number in range(first, last + 1)]
