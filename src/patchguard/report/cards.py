"""The gallery: pictures with the evidence of their cells laid over them, and the windows that matter drawn in."""

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from patchguard.report.charts import Number
from patchguard.report.files import Picture, Run
from patchguard.report.markup import Markup, join, tag
from patchguard.report.numbers import SPACE, short, threat

GROUPS = {
    "certified": ("Certified", "is-certified", "The label is right, and no patch of this size can change it."),
    "not certified": ("Right, but not certified", "is-open", "The label is right, but a patch might change it."),
    "wrong": ("Wrong", "is-wrong", "The label is wrong without any attack; proved or not, it does not count."),
    "proved": ("Proved", "is-certified", "No patch of this size can change the label."),
    "not proved": ("Not proved", "is-open", "A patch of this size might change the label."),
}
# Warm where a cell speaks for the class, cool where it speaks against it; both are seen on light and dark pictures.
WARM, COOL = (255, 72, 0), (0, 110, 255)
STRONGEST = 0.72  # opacity of the strongest cell: the picture stays visible below it
FADING = 1.4  # above 1, weak cells fade faster than strong ones and leave the picture clear
SMOOTH_FROM = 128  # pixels; smaller pictures are shown with square pixels instead of a blur


def gallery(run: Run, pictures: Sequence[Picture]) -> Markup:
    """Return the section with all cards; what lies over the pictures is chosen without scripts."""
    if not pictures:
        return tag("p", "This run kept no pictures.")
    sections = []
    for group in [*GROUPS, *sorted({picture.group for picture in pictures} - set(GROUPS))]:
        members = [picture for picture in pictures if picture.group == group]
        if members:
            name, colour, meaning = GROUPS.get(group, (group, "is-open", ""))
            cards = (_card(run, picture, colour) for picture in members)
            sections.append(tag("h3", tag("span", class_=f"dot {colour}"), name))
            sections.append(tag("p", meaning, class_="soft"))
            sections.append(tag("div", *cards, class_="cards"))
    return join(_introduction(run), _controls(), _key(), tag("div", *sections, class_="shown"))


def _introduction(run: Run) -> Markup:
    return tag(
        "p",
        "A random draw of images. Colour shows how strongly each cell of the network speaks for the label (warm) or "
        f"against it (cool), on one scale per picture. The attack that comes closest is a {threat(run.patch)} at "
        "the marked place, which corrupts the cells of the weakest window. Cells are drawn evenly over the picture; "
        "each of them reads a small box of pixels around its place.",
        tag("span", " Point at a picture to see it alone.", class_="pointing"),
    )


def _controls() -> Markup:
    choices = [
        ("overlay-label", "Evidence for the label", True),
        ("overlay-rival", "for the rival", False),
        ("overlay-none", "Picture only", False),
    ]
    parts: list[Markup] = []
    for identity, words, chosen in choices:
        parts.append(tag("input", type="radio", name="overlay", id=identity, checked=chosen, class_="choice"))
        parts.append(tag("label", words, for_=identity, class_="choice-label"))
    parts.append(tag("input", type="checkbox", id="overlay-windows", checked=True, class_="choice"))
    parts.append(tag("label", "Windows", for_="overlay-windows", class_="choice-label apart"))
    return join(*parts)


def _key() -> Markup:
    entries = [
        ("place", "a patch at the weakest place"),
        ("window", "cells it corrupts: the weakest window"),
        ("mask", "cells that the rule hides for the label"),
    ]
    swatches = []
    for name, words in entries:
        mark = tag("svg", rectangle(3, 3, 26, 14, name), viewBox="0 0 32 20", class_="swatch", aria_hidden="true")
        swatches.append(tag("li", mark, words))
    return tag("ul", *swatches, class_="legend key")


def _card(run: Run, picture: Picture, colour: str) -> Markup:
    height, width = picture.size
    label, rival = run.class_name(picture.label), run.class_name(picture.rival)
    scale = strongest(picture.evidence, picture.rival_evidence)
    small = "pixelated" if max(picture.pixels.shape) < SMOOTH_FROM else None
    shown = tag("img", src=png(picture.pixels), alt=_described(picture, label), class_=small)
    maps = [
        tag("img", src=png(heat(values, scale)), alt="", class_=f"heat {name}")
        for name, values in (("of-label", picture.evidence), ("of-rival", picture.rival_evidence))
    ]
    # A tall picture must not make a card that fills a phone's screen twice.
    frame = f"aspect-ratio:{width}/{height};width:{min(100.0, 125 * width / height):.1f}%"
    figure = tag("div", shown, *maps, _drawn(picture), class_="picture", style=frame)
    return tag("figure", figure, _caption(run, picture, label, rival), class_=f"card {colour}")


def _described(picture: Picture, label: str) -> str:
    return f"Image {picture.index}, labeled {label}, with the evidence of its cells."


def _caption(run: Run, picture: Picture, label: str, rival: str) -> Markup:
    truth = None
    if picture.target is not None:
        look = "truth" if picture.target != picture.label else None
        truth = tag("span", f"truth: {run.class_name(picture.target)}", class_=look)
    facts = tag(
        "span", f"margin{SPACE}", tag("b", short(picture.margin)), " \u00b7 rival ", tag("b", rival), class_="facts"
    )
    name = tag("span", f"#{picture.index} {picture.name}", class_="file")
    return tag("figcaption", tag("strong", label), truth, facts, name)


def _drawn(picture: Picture) -> Markup:
    """Return mask and weakest window, in cells spread over the picture, and the patch in source pixels."""
    height, width = picture.size
    rows, columns = height / picture.grid[0], width / picture.grid[1]
    parts = []
    for name, box in (("mask", picture.mask), ("window", picture.window)):
        for top, bottom, left, right in _unrolled(box, picture.grid) if box else ():
            parts.append(rectangle(left * columns, top * rows, (right - left) * columns, (bottom - top) * rows, name))
    if picture.box is not None:
        top, left, tall, wide = picture.box
        parts.append(rectangle(left, top, wide, tall, "place"))
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", aria_hidden="true")


def _unrolled(box: Sequence[int], grid: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return a box of cells as boxes inside the grid: one that runs over the end of a circle goes on at its start."""
    top, bottom, left, right = box
    return [(a, b, c, d) for a, b in _arcs(top, bottom, grid[0]) for c, d in _arcs(left, right, grid[1])]


def _arcs(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(start, stop)] if stop <= size else [(start, size), (0, min(stop - size, size))]


def rectangle(x: Number, y: Number, width: Number, height: Number, name: str) -> Markup:
    """Return a rectangle drawn twice, dark below bright, so that it is seen on any picture."""
    place = {"x": round(x, 3), "y": round(y, 3), "width": round(width, 3), "height": round(height, 3)}
    return join(tag("rect", **place, class_="casing"), tag("rect", **place, class_=name))


def strongest(*maps: npt.NDArray[np.float32]) -> float:
    """Return the evidence that gets full colour: all but the strongest 2 % of cells stay below it."""
    levels = np.abs(finite(np.stack(maps)))
    return float(np.quantile(levels, 0.98)) or float(levels.max()) or 1.0


def finite(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return evidence with nothing in it that has no colour."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def heat(values: npt.NDArray[np.float32], strongest: float) -> npt.NDArray[np.uint8]:
    """Return evidence as colours with opacity (rows, columns, 4)."""
    level = np.clip(finite(values) / strongest, -1, 1)
    colours = np.zeros((*values.shape, 4), dtype=np.uint8)
    colours[..., :3] = np.where(level[..., None] >= 0, WARM, COOL)
    colours[..., 3] = np.round(255 * STRONGEST * np.abs(level) ** FADING)
    return colours


def png(pixels: npt.NDArray[np.uint8]) -> str:
    """Return pixels as the address of an image that the page carries itself."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
