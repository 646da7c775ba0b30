"""Named sets of photos are recognized by their class folders, split in a fixed way, and counted."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from helpers.image_folders import Write

from patchguard.data import folder
from patchguard.data.catalog import CATALOG, FLOWERS_CLASSES, IMAGENETTE_BY_WORDNET, IMAGENETTE_CLASSES
from patchguard.data.loading import load_splits
from patchguard.data.source import open_source, open_splits
from patchguard.errors import InputError


@pytest.fixture
def imagenette(write: Write, tmp_path: Path) -> Path:
    """Write two training images and one test image per class, below a folder as the archive has it."""
    names = [
        f"{part}/{number}/{name}.JPEG" for part, name in (("train", 0), ("train", 1), ("val", 2)) for number in NUMBERS
    ]
    write(*(f"imagenette2-320/{name}" for name in names))
    return tmp_path


NUMBERS = tuple(IMAGENETTE_BY_WORDNET)


def test_imagenette_has_its_split_its_class_order_and_readable_names(imagenette: Path) -> None:
    splits = load_splits("imagenette", imagenette, size=(6, 8))
    assert (len(splits.train), len(splits.test), splits.test.size) == (20, 10, (6, 8))
    assert splits.train.class_names == splits.test.class_names == IMAGENETTE_CLASSES
    assert splits.test.targets.tolist() == list(range(10))
    assert splits.test.images[:, 0, 0, 0].tolist() == list(range(20, 30))
    assert open_source("imagenette", imagenette).names[0] == "val/n01440764/2.JPEG"


def test_photos_are_224_pixels_by_default(write: Write) -> None:
    root = write(*(f"{name}/{number}.png" for name in "ab" for number in range(5)))
    assert load_splits("folder", root).test.size == (224, 224)


def test_missing_files_are_counted_in_a_warning(
    imagenette: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        open_splits("imagenette", imagenette)
    assert ["20 training images" in caplog.messages[0], "10 test images" in caplog.messages[1]] == [True, True]
    assert "9,469" in caplog.messages[0]
    caplog.clear()
    monkeypatch.setitem(CATALOG, "imagenette", dataclasses.replace(CATALOG["imagenette"], train=20, test=10))
    open_splits("imagenette", imagenette)
    assert caplog.messages == []


def test_a_set_without_a_split_gets_a_fixed_one_of_80_and_20_percent(write: Write) -> None:
    root = write(*(f"flower_photos/{name}/{number:02d}.jpg" for name in FLOWERS_CLASSES for number in range(20)))
    train, test = open_splits("flowers", root)
    assert (len(train), len(test)) == (80, 20)
    assert set(train.names).isdisjoint(test.names)
    assert torch.tensor(test.targets).bincount().tolist() == [4] * 5
    assert train.class_names == FLOWERS_CLASSES
    assert open_splits("flowers", root)[1].names == test.names
    assert open_source("flowers", root).names == test.names
    assert list(test.names) == sorted(test.names)


def test_a_set_is_not_taken_for_another(imagenette: Path, write: Write) -> None:
    assert folder.find_known_set("imagenette", imagenette) == imagenette / "imagenette2-320"
    assert folder.find_known_set("imagenet", imagenette) is None
    write("imagenette2-320/train/n99999999/0.JPEG")
    assert folder.find_known_set("imagenette", imagenette) is None


def test_imagenet_is_known_by_its_thousand_folders(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / "train" / f"n{number:08d}").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    assert folder.find_known_set("imagenet", tmp_path) == tmp_path
    (tmp_path / "train" / "n00000000").rmdir()
    assert folder.find_known_set("imagenet", tmp_path) is None


def test_the_folder_that_has_the_name_of_the_set_comes_first(write: Write) -> None:
    root = write("a/Cat/1.png", "a/Dog/1.png", "cats_vs_dogs/Cat/1.png", "cats_vs_dogs/Dog/1.png")
    assert folder.find_known_set("cats_vs_dogs", root) == root / "cats_vs_dogs"


def test_images_without_classes_or_too_few_are_not_split(write: Write) -> None:
    with pytest.raises(InputError, match="one folder per class"):
        load_splits("folder", write("flat/1.png") / "flat")
    with pytest.raises(InputError, match="at least 5 images"):
        load_splits("folder", write("few/a/1.png") / "few")
    with pytest.raises(InputError, match=r"must be a folder of images; there is none"):
        load_splits("folder", "nowhere")


def test_an_unreadable_folder_is_one_sentence(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    root = write("a/1.png")
    monkeypatch.setattr(folder.os, "scandir", refused)
    with pytest.raises(InputError, match="cannot be listed: Permission denied"):
        folder.list_folder(root)


def test_nothing_is_decoded_and_no_file_is_examined_while_listing(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(*(f"{name}/{number}.png" for name in "ab" for number in range(50)))
    examined: list[object] = []
    kept = folder.os.stat
    monkeypatch.setattr(folder.os, "stat", lambda path, **how: examined.append(path) or kept(path, **how))
    assert len(folder.list_folder(root).names) == 100
    assert not any(str(path).endswith(".png") for path in examined)


def test_cifar10_is_not_resized() -> None:
    with pytest.raises(InputError, match="`size` of cifar10 must be 32 x 32"):
        load_splits("cifar10", ".", size=(64, 64))


@pytest.mark.parametrize("names", [("2023", "2024"), ("2024-05", "2024-06-17"), ("20240517",)])
def test_folders_named_by_dates_are_not_classes(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(b"")
    listing = folder.list_folder(tmp_path)
    assert (listing.targets, listing.class_names) == (None, ())
    assert listing.names == tuple(f"{name}/a.jpg" for name in names)
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.jpg").write_bytes(b"")
    assert folder.list_folder(tmp_path).class_names == (*names, "cats")


@pytest.mark.parametrize("name", ["1984x", "0001", "2024-13", "3021", "12"])
def test_other_numbers_are_classes(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.jpg").write_bytes(b"")
    assert folder.list_folder(tmp_path).class_names == (name,)
