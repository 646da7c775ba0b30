"""Cards of the gallery: pictures with the evidence of their cells laid over them, and boxes drawn in."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, final

import numpy as np
import numpy.typing as npt

from patchguard.report.charts import Drawing, Number, Shape, rectangle
from patchguard.report.files import Arrays, read_gallery
from patchguard.runs.summary import AttackPicture, CertifyPicture, Schema

# Warm where a cell speaks for the class, cool where it speaks against it; both are seen on light and dark pictures.
WARM, COOL = (255, 72, 0), (0, 110, 255)
STRONGEST = 0.72  # opacity of the strongest cell: the picture stays visible below it
FADING = 1.4  # above 1, weak cells fade faster than strong ones and leave the picture clear
PICTURE_BYTES = {"certify": 60_000, "attack": 12_000}  # of one picture; a page has up to 24, or 32 cards of four
QUALITIES = (90, 75, 60, 45, 30, 15)  # of a picture that must become smaller
SMOOTH_FROM = 128  # pixels; smaller pictures are shown with square pixels instead of a blur


@final
@dataclass(frozen=True)
class Panel:
    """A picture as the address of an image that the page carries itself, and what lies over it."""

    picture: str
    pixelated: bool
    heat: list[str]
    boxes: Drawing | None


@final
@dataclass(frozen=True)
class Card(Generic[Schema]):
    """An entry of the gallery with its panels."""

    entry: Schema
    panels: list[Panel]


def read_certify_cards(folder: Path) -> list[Card[CertifyPicture]]:
    """Return one card per picture: the image with the evidence of label and rival, weakest window, patch and mask."""
    cards = []
    for entry, arrays in read_gallery(folder, CertifyPicture, ["image"], ["evidence", "rival"]):
        heat = paint_evidence(arrays, ["evidence", "rival"])
        cards.append(Card(entry, [_make_panel(arrays["image"], heat, _draw_certified(entry))]))
    return cards


def read_attack_cards(folder: Path) -> list[Card[AttackPicture]]:
    """Return one card per picture: the image before and after, then both with their evidence where there is any."""
    names = ["before", "after", "other_before", "other_after"]
    cards = []
    for entry, arrays in read_gallery(folder, AttackPicture, ["original", "attacked"], names):
        boxes = _draw_boxes(entry.size, [(left, top, *entry.patch[::-1], "place") for top, left in entry.places])
        limit = PICTURE_BYTES["attack"]
        panels = [_make_panel(arrays["original"], [], None, limit), _make_panel(arrays["attacked"], [], boxes, limit)]
        if "before" in arrays:
            before, after, other_before, other_after = paint_evidence(arrays, names)
            panels.append(_make_panel(arrays["original"], [before, other_before], None, limit))
            panels.append(_make_panel(arrays["attacked"], [after, other_after], boxes, limit))
        cards.append(Card(entry, panels))
    return cards


def _make_panel(
    pixels: npt.NDArray[np.uint8], heat: list[str], boxes: Drawing | None, limit: int = PICTURE_BYTES["certify"]
) -> Panel:
    return Panel(embed_picture(pixels, limit), max(pixels.shape) < SMOOTH_FROM, heat, boxes)


def _draw_certified(entry: CertifyPicture) -> Drawing | None:
    """Return mask and weakest window, in cells spread over the picture, and the patch in source pixels."""
    boxes: list[tuple[Number, Number, Number, Number, str]] = []
    for look, cells in (("mask", entry.mask), ("window", entry.window)):
        if cells is not None and entry.grid is not None:
            rows, columns = entry.size[0] / entry.grid[0], entry.size[1] / entry.grid[1]
            for top, bottom in _unroll(*cells[:2], entry.grid[0]):
                for left, right in _unroll(*cells[2:], entry.grid[1]):
                    box = (left * columns, top * rows, (right - left) * columns, (bottom - top) * rows, look)
                    boxes.append(box)
    if entry.box is not None:
        top, left, height, width = entry.box
        boxes.append((left, top, width, height, "place"))
    return _draw_boxes(entry.size, boxes) if boxes else None


def _unroll(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Return a range of cells as ranges inside the grid: over the end of a circle it goes on at its start."""
    return [(start, stop)] if stop <= size else [(start, size), (0, min(stop - size, size))]


def _draw_boxes(size: tuple[int, int], boxes: Sequence[tuple[Number, Number, Number, Number, str]]) -> Drawing:
    """Draw each box (x, y, width, height, look) twice, dark below bright, so that it is seen on any picture."""
    shapes = [Shape("rect", rectangle(*box[:4], look)) for box in boxes for look in ("casing", box[4])]
    return Drawing((size[1], size[0]), shapes, stretched=True)


def paint_evidence(arrays: Arrays, names: Sequence[str]) -> list[str]:
    """Return maps of evidence as images, on one scale; none where there are no maps."""
    if names[0] not in arrays:
        return []
    maps = np.nan_to_num(np.stack([arrays[name] for name in names]).astype(np.float32), posinf=0.0, neginf=0.0)
    # All but the strongest 2 % of cells stay below full color.
    scale = float(np.quantile(np.abs(maps), 0.98)) or float(np.abs(maps).max()) or 1.0
    level = np.clip(maps / scale, -1, 1)
    colors = np.zeros((*maps.shape, 4), dtype=np.uint8)
    colors[..., :3] = np.where(level[..., None] >= 0, WARM, COOL)
    colors[..., 3] = np.round(255 * STRONGEST * np.abs(level) ** FADING)
    return [to_png(painted) for painted in colors]


def embed_picture(pixels: npt.NDArray[np.uint8], limit: int) -> str:
    """Return a picture as the address of an image: small ones exactly, others compressed until `limit` bytes hold them.

    Noise can still be larger at the lowest quality.
    """
    content = encode(pixels, "PNG", optimize=True) if max(pixels.shape) < SMOOTH_FROM else None
    if content is not None and len(content) <= limit:
        return to_address(content, "png")
    for quality in QUALITIES:
        content = encode(pixels, "JPEG", quality=quality)
        if len(content) <= limit:
            break
    assert content is not None
    return to_address(content, "jpeg")


def to_png(pixels: npt.NDArray[np.uint8]) -> str:
    """Return pixels as the address of an image that the page carries itself."""
    return to_address(encode(pixels, "PNG", optimize=True), "png")


def to_address(content: bytes, kind: str) -> str:
    """Return the contents of an image file as an address."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encode(pixels: npt.NDArray[np.uint8], kind: str, **settings: Any) -> bytes:
    """Return pixels as the contents of an image file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **settings)
    return file.getvalue()
