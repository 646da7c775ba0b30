"""Every kind of file against pixels computed by hand, and garbage that may only ever be `Unreadable`."""

import io
import os
import pickle
import struct
import sys
import tracemalloc
import types
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchguard.data import decode as module
from patchguard.data.decode import FORMATS, Unreadable, decode, decode_bytes
from patchguard.errors import InputError


def picture(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def packed(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def seen(content: bytes) -> np.ndarray:
    return decode_bytes(content).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_a_lossless_file_gives_its_pixels(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "picture"
    Image.fromarray(picture()).save(path, kind)
    pixels = decode(path)
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 5, 7))
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), picture())
    assert torch.equal(decode_bytes(path.read_bytes()), decode(str(path)))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_lossy_file_comes_close(kind: str) -> None:
    smooth = np.linspace(0, 255, 64 * 48 * 3).reshape(64, 48, 3).astype(np.uint8)
    assert np.abs(seen(packed(Image.fromarray(smooth), kind, quality=95)).astype(int) - smooth).mean() < 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_applied(kind: str, orientation: int) -> None:
    # What a viewer must show for each tag, from the definition: where the stored row 0 and column 0 lie.
    shown = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
        8: lambda a: np.rot90(a, 1),
    }
    stored = np.kron(np.array([[0, 80, 160], [200, 240, 120]], np.uint8), np.ones((16, 16), np.uint8))
    stored = np.repeat(stored[..., None], 3, axis=2)
    exif = Image.Exif()
    exif[module.ORIENTATION] = orientation
    found = seen(packed(Image.fromarray(stored), kind, exif=exif))
    expected = shown[orientation](stored)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() < 12


def test_a_damaged_orientation_counts_as_none() -> None:
    content = packed(Image.fromarray(picture(16, 16)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert seen(content).shape == (16, 16, 3)


def test_gray_and_black_and_white_fill_the_three_channels() -> None:
    gray = picture()[..., 0]
    assert np.array_equal(seen(packed(Image.fromarray(gray))), np.repeat(gray[..., None], 3, axis=2))
    bits = gray > 127
    assert np.array_equal(seen(packed(Image.fromarray(bits)))[..., 1], np.where(bits, 255, 0))


def test_cmyk_is_converted() -> None:
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 0] = 255  # all cyan, nothing else
    found = seen(packed(Image.fromarray(ink, "CMYK"), "JPEG", quality=100))
    assert np.abs(found.astype(int) - (0, 255, 255)).max() < 6
    assert np.array_equal(seen(packed(Image.fromarray(ink, "CMYK"), "TIFF"))[0, 0], (0, 255, 255))


def test_transparency_becomes_white() -> None:
    alpha = np.array([[0, 255, 51]], np.uint8)
    colors = np.full((1, 3, 3), (100, 0, 200), np.uint8)
    expected = np.round(255 + (colors - 255.0) * alpha[..., None] / 255)
    found = seen(packed(Image.fromarray(np.dstack([colors, alpha]), "RGBA")))
    assert np.abs(found - expected).max() <= 1
    assert tuple(found[0, 0]) == (255, 255, 255)
    assert tuple(found[0, 1]) == (100, 0, 200)
    gray = Image.fromarray(np.dstack([np.full((1, 3), 100, np.uint8), alpha]), "LA")
    assert np.abs(seen(packed(gray))[..., 2] - np.round(255 - 155.0 * alpha / 255)).max() <= 1


def test_a_palette_is_looked_up_with_and_without_transparency() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    plain = [(10, 20, 30), (40, 50, 60), (70, 80, 90)]
    assert [tuple(pixel) for pixel in seen(packed(image))[0]] == plain
    assert [tuple(pixel) for pixel in seen(packed(image, "GIF"))[0]] == plain
    for transparency in (1, b"\xff\x00\xff"):
        found = seen(packed(image, transparency=transparency))
        assert [tuple(pixel) for pixel in found[0]] == [plain[0], (255, 255, 255), plain[2]]


def test_a_transparent_color_becomes_white_also_when_the_image_is_turned() -> None:
    exif = Image.Exif()
    exif[module.ORIENTATION] = 3
    image = Image.fromarray(np.array([[[9, 9, 9], [50, 60, 70]]], np.uint8))
    found = seen(packed(image, transparency=(9, 9, 9), exif=exif))
    assert [tuple(pixel) for pixel in found[0]] == [(50, 60, 70), (255, 255, 255)]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_and_not_clipped(kind: str) -> None:
    values = np.array([[0, 128, 129, 257, 32768, 65407, 65535]], np.uint16)
    found = seen(packed(Image.fromarray(values), kind))
    assert found[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255, 255]
    assert (found[..., :1] == found).all()


def test_every_value_of_16_bits_is_rounded_to_the_nearest_of_8() -> None:
    values = np.arange(65536).reshape(256, 256)
    expected = np.floor(values * 255 / 65535 + 0.5)
    for kept in (values.astype(np.uint16), values.astype(np.int32)):
        assert np.array_equal(seen(packed(Image.fromarray(kept), "TIFF"))[..., 1], expected)


def test_16_bits_are_decoded_in_little_more_memory_than_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 1 << 14, raising=False)
    content = packed(Image.fromarray(np.full((1000, 1000), 700, np.uint16)))
    decode_bytes(content)
    tracemalloc.start()
    try:
        pixels = decode_bytes(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pixels.numel() == 3_000_000
    assert peak < 4_000_000


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I;16", "I"])
def test_an_image_converted_in_tiles_is_the_image(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (13, 11, 4), dtype=np.uint8))
    image = image.convert("L" if mode == "I;16" else "RGB" if mode == "CMYK" else image.mode).convert(mode)
    content = packed(image, "TIFF")
    whole = seen(content)
    for tile in (1, 7, 40):
        monkeypatch.setattr(module, "TILE", tile)
        assert np.array_equal(seen(content), whole)


def test_a_transparent_gray_of_16_bits_becomes_white() -> None:
    assert seen(packed(Image.fromarray(np.array([[700, 701]], np.uint16)), transparency=700))[0, :, 0].tolist() == [
        255,
        3,
    ]


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ((250, 0, 0), (0, 250, 0))]
    for kind in ("GIF", "PNG", "WEBP"):
        content = packed(frames[0], kind, save_all=True, append_images=frames[1:])
        assert np.abs(seen(content).astype(int) - (250, 0, 0)).max() < 6


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_that_claims(width: int, height: int, color: int = 0) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_001, 10_000), (1, 100_000_001), (60_000, 60_000)])
def test_a_bomb_is_refused_by_its_header_without_a_warning(width: int, height: int) -> None:
    with pytest.raises(Unreadable, match="larger than the limit of 100,000,000 pixels"):
        decode_bytes(png_that_claims(width, height), "bomb.png")


def test_what_takes_too_much_memory_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 29)
    told = r"takes 0\.65 GiB to decode, more than the limit of 0\.50 GiB \(10000 x 10000 pixels of RGB, PNG\)"
    with pytest.raises(Unreadable, match=told):
        decode_bytes(png_that_claims(10_000, 10_000, color=2))
    with pytest.raises(Unreadable, match="damaged or incomplete"):  # gray takes less
        decode_bytes(png_that_claims(10_000, 10_000))


def test_memory_for_turning_an_image_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[module.ORIENTATION] = 3
    plain, turned = (packed(Image.new("RGB", (100, 100)), exif=each) for each in (Image.Exif(), exif))
    monkeypatch.setattr(module, "MAX_BYTES", 100 * 100 * 10)
    assert decode_bytes(plain).shape == (3, 100, 100)
    with pytest.raises(Unreadable, match="more than the limit"):
        decode_bytes(turned)


def test_the_limit_itself_is_not_refused_as_too_large_and_pillow_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with pytest.raises(Unreadable, match="damaged or incomplete"):
            decode_bytes(png_that_claims(10_000, 10_000))
    assert heard == []


def test_the_filters_of_warnings_come_back_after_threads_have_decoded() -> None:
    before = list(warnings.filters)
    content = packed(Image.fromarray(picture(64, 64)))
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(decode_bytes, [content] * 100))) == 100
    assert warnings.filters == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"hello, world", "is not an image of a known kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is not an image of a known kind"),
        (packed(Image.fromarray(picture(64, 64)), "JPEG")[:-300], "is damaged or incomplete"),
        (packed(Image.fromarray(picture(64, 64)))[:200], "is damaged or incomplete"),
        (packed(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), "holds floating point values"),
        (packed(Image.fromarray(np.full((2, 2), 70_000, np.int32)), "TIFF"), "holds values of more than 16 bits"),
    ],
)
def test_the_reason_is_one_sentence_that_begins_with_the_name(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=reason) as caught:
        decode(path)
    assert str(caught.value) == f"{path} {caught.value.reason}."
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_unreadable_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="does not exist"):
        decode(tmp_path / "nowhere.png")
    with pytest.raises(Unreadable, match="is not a file"):
        decode(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(Unreadable, match="is not a file"):
        decode(tmp_path / "pipe.png")
    with pytest.raises(Unreadable, match="cannot be opened"):
        decode("a\0b.png")


def test_the_error_is_an_input_error_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(Unreadable("a.png", "is empty")))
    assert isinstance(error, InputError)
    assert (error.name, error.reason, str(error)) == ("a.png", "is empty", "a.png is empty.")


def test_memory_that_runs_out_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "_colors", full)
    with pytest.raises(Unreadable, match="MemoryError"):
        decode_bytes(packed(Image.fromarray(picture())))


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_mutated_files_are_pictures_or_unreadable_and_nothing_else(kind: str) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow cannot write {kind}")
    whole = packed(Image.fromarray(picture(12, 10)), kind)
    draw = np.random.default_rng(7)
    readable = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.integers(1, 6)):
            # Most of what a header says lies at the beginning.
            place = int(draw.integers(0, len(content) if draw.random() < 0.5 else min(64, len(content))))
            content[place] = int(draw.integers(0, 256))
        if draw.random() < 0.3:
            del content[int(draw.integers(0, len(content))) :]
        try:
            pixels = decode_bytes(bytes(content))
        except Unreadable:
            continue
        readable += 1
        assert pixels.dtype == torch.uint8
        assert pixels.shape[0] == 3
    assert decode_bytes(whole).shape == (3, 12, 10)
    assert readable < 150


def test_a_heic_photo_says_what_to_install(tmp_path):
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    with pytest.raises(Unreadable, match="is a HEIC photo; install pillow-heif to read it"):
        decode(tmp_path / "a.heic")


def test_heic_photos_are_read_where_pillow_heif_is_installed(monkeypatch):
    called = []
    stub = types.SimpleNamespace(register_heif_opener=lambda: called.append(True))
    monkeypatch.setitem(sys.modules, "pillow_heif", stub)
    module._formats.cache_clear()
    module._formats()
    module._formats.cache_clear()
    assert called == [True]
