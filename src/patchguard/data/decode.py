"""`decode`: one image file as 8-bit RGB pixels, the same on every machine, or the reason why it cannot be read.

Pillow only decodes; resizing is the project's own. The rule for what a file may hold:

    orientation    the EXIF tag is applied; a damaged tag counts as none
    transparency   composited on white
    16-bit gray    scaled, round(value * 255 / 65535), never clipped; 16-bit color keeps its upper 8 bits
    color         CMYK and others are converted to RGB; embedded profiles are not applied
    animation      the first frame
"""

import importlib
import io
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from patchguard.errors import InputError
from patchguard.runtime import ignore_dependency_warnings

# Checked before any pixel is decoded: a file of some kilobytes may claim to hold terabytes.
MAX_PIXELS = 100_000_000
MAX_BYTES = 1 << 30  # of memory, at the peak of decoding one image
TILE = 1 << 22  # pixels that are converted at once

# Bytes per pixel that Pillow holds of an image in a mode, and that the decoder of a format takes besides, as measured.
STORED = {**dict.fromkeys(("1", "L", "P"), 1), **dict.fromkeys(("I;16", "I;16B", "I;16L", "I;16N"), 2)}
DECODER = {"AVIF": 8, "HEIF": 12, "JPEG": 6, "JPEG2000": 21, "MPO": 6, "TIFF": 8, "WEBP": 12}
OURS = 3

# No format that runs another program (EPS) or has no agreed meaning as a picture.
FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

HEIC = tuple(b"ftyp" + brand for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@final
class Unreadable(InputError):
    """Names a file that is no image, or not a whole one, and says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both, so that it survives the way between processes
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} {self.reason}."


def decode(path: str | Path) -> UInt8[Tensor, "3 height width"]:
    """Return the picture in a file; raise `Unreadable` if there is none."""
    name = str(path)
    try:
        # Anything but a plain file, such as a pipe, might keep us waiting for ever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Unreadable(name, "is not a file")
        with open(path, "rb") as file:
            return _decoded(file, name)
    except FileNotFoundError:
        raise Unreadable(name, "does not exist") from None
    except PermissionError:
        raise Unreadable(name, "may not be read by this user") from None
    except (OSError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(name, f"cannot be opened ({_brief(error)})") from None


def decode_bytes(content: bytes, name: str = "the image") -> UInt8[Tensor, "3 height width"]:
    """Return the picture in the content of a file; raise `Unreadable`, which calls it `name`, if there is none."""
    return _decoded(io.BytesIO(content), name)


def _decoded(file: io.BufferedReader | io.BytesIO, name: str) -> UInt8[Tensor, "3 height width"]:
    if not file.read(1):
        raise Unreadable(name, "is empty")
    file.seek(0)
    with ignore_dependency_warnings():
        try:
            with Image.open(file, formats=_formats()) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Unreadable(name, _too_large(f"{image.width} x {image.height}"))
                _check_memory(image, max(DECODER.get(image.format or "", 0), OURS))
                image.load()
                pixels = _pixels(_upright(image))
        except Unreadable as error:
            raise Unreadable(name, error.reason) from None
        except UnidentifiedImageError:
            if _is_heic(file):
                raise Unreadable(name, "is a HEIC photo; install pillow-heif to read it") from None
            raise Unreadable(name, f"is not an image of a known kind ({', '.join(_formats())})") from None
        except Image.DecompressionBombError:
            raise Unreadable(name, _too_large("more than twice as many")) from None
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
            raise Unreadable(name, f"is damaged or incomplete ({_brief(error)})") from None
    return torch.from_numpy(pixels)


def _too_large(size: str) -> str:
    return f"is larger than the limit of {MAX_PIXELS:,} pixels ({size})"


def _check_memory(image: Image.Image, besides: int) -> None:
    """Raise where Pillow's pixels and `besides` bytes per pixel are more than decoding may take."""
    needed = image.width * image.height * (STORED.get(image.mode, 4) + besides)
    if needed > MAX_BYTES:
        raise Unreadable(
            "",
            f"takes {needed / 2**30:.2f} GiB to decode, more than the limit of {MAX_BYTES / 2**30:.2f} GiB "
            f"({image.width} x {image.height} pixels of {image.mode}, {image.format})",
        )


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if 0 < len(text) <= 120 else type(error).__name__


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    with suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _is_heic(file: io.BufferedReader | io.BytesIO) -> bool:
    """Return whether a file says that it is a photo of a phone that Pillow alone does not read."""
    file.seek(4)
    return file.read(8) in HEIC


def _upright(image: Image.Image) -> Image.Image:
    try:
        way = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the tag is damaged, and the pixels are not
        way = None
    if way is None:
        return image
    _check_memory(image, STORED.get(image.mode, 4) + OURS)  # both lie in memory
    turned = image.transpose(way)
    turned.info.update({key: value for key, value in image.info.items() if key == "transparency"})
    return turned


# -- colors -----------------------------------------------------------------------------------------------------------


def _pixels(image: Image.Image) -> UInt8[np.ndarray, "3 height width"]:
    """Return the colors, converted tile by tile: what is held between lies in memory for one tile alone."""
    pixels = np.empty((3, image.height, image.width), np.uint8)
    columns = min(image.width, TILE)
    rows = max(1, TILE // columns)
    for top in range(0, image.height, rows):
        for left in range(0, image.width, columns):
            bottom, right = min(top + rows, image.height), min(left + columns, image.width)
            whole = (bottom - top, right - left) == (image.height, image.width)
            tile = image if whole else image.crop((left, top, right, bottom))
            pixels[:, top:bottom, left:right] = _colors(tile).transpose(2, 0, 1)
    return pixels


def _colors(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode == "F":
        raise Unreadable("", "holds floating point values, of which none is known to be white")
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _from_16_bits(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise Unreadable("", "holds values of more than 16 bits, of which none is known to be white")
    # round(value / 257), since 65535 = 255 * 257; value + 128 would not fit into 16 bits.
    gray = (values // 257 + (values % 257 > 128)).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray[values == clear] = 255
    return np.broadcast_to(gray[..., None], (*gray.shape, 3))
