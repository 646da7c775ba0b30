"""Images at one size, whole or in batches: order, rounding, and files that cannot be read."""

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.image_folders import Write
from PIL import Image

from patchguard.data import loading
from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_batches, iterate_images, load_images, resize_image
from patchguard.data.source import Source, open_source
from patchguard.errors import InputError


@pytest.fixture
def folder(write: Write) -> Path:
    """Write two classes of ten images, of which numbers 3 and 12 cannot be read."""
    root = write(*(f"{name}/{number}.png" for name in "ab" for number in range(10)))
    (root / "a" / "3.png").write_bytes(b"")
    (root / "b" / "2.png").write_text("no image")
    return root


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_images_come_in_order_and_unreadable_ones_are_skipped_with_one_warning(
    folder: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    with caplog.at_level(logging.WARNING):
        data, skipped = load_images(open_source(folder), size=(6, 8), workers=workers, progress=seen.append)
    assert data.images[:, 0, 0, 0].tolist() == [shade for shade in range(20) if shade not in (3, 12)]
    assert data.targets.tolist() == [0] * 9 + [1] * 9
    assert data.class_names == ("a", "b")
    assert [name for name, _ in skipped] == ["a/3.png", "b/2.png"]
    assert skipped[0][1] == "is empty"
    assert len(caplog.records) == 1
    assert "2 of 20 images cannot be read" in caplog.text
    assert "a/3.png is empty" in caplog.text
    assert seen == list(range(1, 21))


def test_an_image_is_resized_as_pillow_does_and_one_of_the_right_size_is_untouched() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 31, 47), dtype=np.uint8)
    image = torch.from_numpy(pixels)
    found = resize_image(image, (20, 25))
    expected = Image.fromarray(pixels.transpose(1, 2, 0)).resize((25, 20), Image.Resampling.BILINEAR)
    assert found.dtype == torch.uint8
    assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected)).max() <= 1
    assert resize_image(image, (31, 47)) is image
    assert (resize_image(torch.full((3, 9, 9), 255, dtype=torch.uint8), (5, 14)) == 255).all()


def test_images_of_several_sizes_become_one_size(write: Write) -> None:
    write("a/0.png", "a/1.png", size=(4, 30))
    source = open_source(write("b/0.png", "b/1.png", size=(9, 5)))
    data, skipped = load_images(source, size=(7, 7))
    assert (data.size, skipped) == ((7, 7), ())
    assert data.images[:, 1, 3, 3].tolist() == [0, 1, 0, 1]


def test_a_folder_of_broken_files_is_refused(write: Write) -> None:
    root = write("a/0.png", "b/1.png")
    for name in ("a/0.png", "b/1.png"):
        (root / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"none of the 2 images can be read: a/0.png is empty"):
        load_images(open_source(root), size=(4, 4))


def test_images_without_classes_and_impossible_settings_are_refused(write: Write) -> None:
    flat, labeled = open_source(write("1.png")), open_source(write("set/a/1.png") / "set")
    with pytest.raises(InputError, match="must be labeled"):
        load_images(flat, size=(4, 4))
    with pytest.raises(InputError, match="must be labeled"):
        iterate_batches(flat, size=(4, 4), batch_size=2)
    with pytest.raises(InputError, match="`size`"):
        load_images(labeled, size=(0, 4))
    with pytest.raises(InputError, match="`batch_size`"):
        iterate_batches(labeled, size=(4, 4), batch_size=0)
    with pytest.raises(InputError, match="`workers`"):
        load_images(labeled, size=(4, 4), workers=-1)
    with pytest.raises(InputError, match=r"GiB.*batches"):
        load_images(labeled, size=(10**8, 10**8))


def test_only_a_few_images_are_decoded_ahead() -> None:
    asked: list[int] = []

    def read(index: int) -> torch.Tensor:
        asked.append(index)
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    source = Source(tuple(map(str, range(1000))), None, (), read)
    images = iterate_images(source, workers=2)
    next(images)
    time.sleep(0.05)
    assert 1 <= len(asked) <= 9
    images.close()  # type: ignore[attr-defined]
    assert len(asked) <= 9


def test_batches_are_decoded_two_ahead() -> None:
    asked: list[int] = []

    def read(index: int) -> torch.Tensor:
        asked.append(index)
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    source = Source(tuple(map(str, range(1000))), (0,) * 1000, ("one",), read)
    batches = iterate_batches(source, size=(1, 1), batch_size=50, workers=2)
    next(batches)
    time.sleep(0.05)
    assert 100 <= len(asked) <= 150
    batches.close()  # type: ignore[attr-defined]


def collected(found: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int]]:
    return [
        (int(image[0, 0, 0]), int(target))
        for images, targets in found
        for image, target in zip(images, targets, strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_hold_every_readable_image_once_and_are_full_but_for_the_last(
    folder: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = list(iterate_batches(open_source(folder), size=(3, 5), batch_size=4, workers=workers, seed=1))
    assert [len(images) for images, _ in found] == [4, 4, 4, 4, 2]
    assert all(images.shape[1:] == (3, 3, 5) and images.dtype == torch.uint8 for images, _ in found)
    expected = [(shade, int(shade >= 10)) for shade in range(20) if shade not in (3, 12)]
    assert collected(found) != expected
    assert sorted(collected(found)) == expected
    assert len(caplog.records) == 1
    assert "2 of 20 images" in caplog.text


def test_the_order_of_batches_depends_on_seed_and_epoch_and_on_nothing_else(folder: Path) -> None:
    source = open_source(folder)

    def order(seed: int | None, epoch: int, batch_size: int = 5) -> list[tuple[int, int]]:
        made = iterate_batches(source, size=(6, 8), batch_size=batch_size, workers=0, seed=seed, epoch=epoch)
        return collected(list(made))

    assert order(0, 0) == order(0, 0, batch_size=7)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(None, 3) == sorted(order(0, 0))


def test_more_than_a_few_unreadable_images_are_counted_and_the_first_named(caplog: pytest.LogCaptureFixture) -> None:
    def read(index: int) -> torch.Tensor:
        if index < 6:
            raise Unreadable(str(index), "is broken")
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    source = Source(tuple(map(str, range(8))), (0,) * 8, ("one",), read)
    with caplog.at_level(logging.WARNING):
        assert len(load_images(source, size=(1, 1), workers=2)[1]) == 6
    assert caplog.messages == [
        "6 of 8 images cannot be read and are skipped: 0 is broken; 1 is broken; 2 is broken, and more"
    ]
    assert loading.NAMED == 3
