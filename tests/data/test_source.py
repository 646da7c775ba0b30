"""What `open_source` makes of names, folders and patterns, in which order, and what it refuses."""

import os
from pathlib import Path

import pytest
import torch
from helpers.image_folders import Write

from patchguard.data.catalog import IMAGENETTE_BY_WORDNET, IMAGENETTE_CLASSES
from patchguard.data.decode import Unreadable
from patchguard.data.source import open_source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize


def test_a_folder_of_class_folders_is_labeled_in_sorted_order(write: Write) -> None:
    root = write("b/1.png", "a/2.png", "a/10.png", "a-c/x.png", "b/deep/er/0.PNG")
    source = open_source(root)
    assert source.class_names == ("a", "a-c", "b")
    assert source.names == ("a/10.png", "a/2.png", "a-c/x.png", "b/1.png", "b/deep/er/0.PNG")
    assert source.targets == (0, 0, 1, 2, 2)
    assert source.read(0).shape == (3, 6, 8)
    assert [int(source.read(index)[0, 0, 0]) for index in range(5)] == [2, 1, 3, 0, 4]


def test_a_flat_folder_has_no_classes(write: Write) -> None:
    source = open_source(str(write("2.png", "1.jpg")))
    assert (source.names, source.targets, source.class_names) == (("1.jpg", "2.png"), None, ())


def test_other_and_hidden_files_are_ignored_and_counted(write: Write) -> None:
    root = write("a/1.png", "a/.hidden.png", "b/2.png", ".git/c.png")
    (root / "a" / "notes.txt").write_text("no image")
    (root / "empty").mkdir()
    source = open_source(root)
    assert (source.names, source.class_names, source.ignored) == (("a/1.png", "b/2.png"), ("a", "b"), 2)
    assert open_source(root / "a").ignored == 2


@pytest.mark.parametrize("part", ["val", "test"])
def test_of_a_split_folder_the_test_part_is_taken_with_the_classes_of_training(write: Write, part: str) -> None:
    root = write("train/a/1.png", "train/b/2.png", "train/c/3.png", f"{part}/c/5.png", f"{part}/a/4.png")
    source = open_source(root)
    assert source.names == (f"{part}/a/4.png", f"{part}/c/5.png")
    assert (source.targets, source.class_names) == ((0, 2), ("a", "b", "c"))


def test_a_folder_around_the_class_folders_is_stepped_into(write: Write) -> None:
    source = open_source(write("archive/PetImages/Dog/1.png", "archive/PetImages/Cat/2.png"))
    assert source.class_names == ("Cat", "Dog")
    assert source.names[0] == "archive/PetImages/Cat/2.png"
    assert int(source.read(0)[0, 0, 0]) == 1


def test_a_folder_around_a_split_is_stepped_into(write: Write) -> None:
    source = open_source(write("set/train/a/1.png", "set/train/b/2.png", "set/val/b/3.png"))
    assert (source.names, source.targets, source.class_names) == (("set/val/b/3.png",), (1,), ("a", "b"))


def test_one_class_folder_is_one_class(write: Write) -> None:
    assert open_source(write("cat/1.png", "cat/2.png")).class_names == ("cat",)


def test_a_pattern_and_a_file_have_no_classes(write: Write) -> None:
    root = write("photos/2.png", "photos/1.png", "photos/deep/3.png", "photos/4.jpg")
    assert open_source(root / "photos" / "*.png").names == ("1.png", "2.png")
    assert open_source(f"{root}/ph*/**/*.png").names == ("photos/1.png", "photos/2.png", "photos/deep/3.png")
    single = open_source(root / "photos" / "1.png")
    assert (single.names, single.targets, int(single.read(0)[0, 0, 0])) == (("1.png",), None, 1)


def test_a_folder_with_the_signs_of_a_pattern_is_a_folder(write: Write) -> None:
    assert open_source(write("[1]/a.png") / "[1]").names == ("a.png",)


def test_links_are_followed_and_a_loop_ends(write: Write) -> None:
    root = write("store/1.png", "set/b/2.png")
    os.symlink(root / "store", root / "set" / "a")
    os.symlink(root / "set" / "b", root / "set" / "b" / "again")
    os.symlink(root / "nowhere.png", root / "set" / "b" / "gone.png")
    source = open_source(root / "set")
    assert source.names == ("a/1.png", "b/2.png", "b/gone.png")
    with pytest.raises(Unreadable, match=r"^b/gone.png does not exist"):
        source.read(2)


def test_a_link_in_a_circle_is_one_unreadable_image_and_stops_nothing(write: Write) -> None:
    root = write("set/a/1.png", "set/b/2.png")
    for name in ("b/circle.png", "b/circle", "c"):
        os.symlink(root / "set" / name, root / "set" / name)
    source = open_source(root / "set")
    assert (source.names, source.class_names) == (("a/1.png", "b/2.png", "b/circle.png"), ("a", "b"))
    assert source.ignored == 1
    with pytest.raises(Unreadable, match=r"^b/circle.png "):
        source.read(2)


def test_folders_named_by_wordnet_number_get_readable_names(write: Write) -> None:
    source = open_source(write(*(f"{number}/1.png" for number in reversed(IMAGENETTE_BY_WORDNET))))
    assert source.class_names == IMAGENETTE_CLASSES
    assert source.names[0] == "n01440764/1.png"


@pytest.mark.parametrize(
    ("names", "what", "message"),
    [
        ((), "", "holds no images .0 other files."),
        ((), "nowhere/else", "no folder or file of images is at"),
        (("a/1.png", "1.png"), "", "both images and folders"),
        (("train/a/1.png",), "", "holds train, but no test part.*Name the part itself"),
        (("val/a/1.png",), "", "holds val, but no train"),
        (("train/a/1.png", "val/b/1.png", "val/a/1.png"), "", "it also has b"),
        (("train/a/1.png", "val/1.png"), "", "one folder of images per class"),
        (("a/1.png",), "*.gif", "no image matches"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_do(
    write: Write, names: tuple[str, ...], what: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        open_source(write(*names) / what)


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean 'imagenette'"):
        open_source("imagenete")


def test_a_known_set_that_is_not_there_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"imagenette is not in .*imagenette2-320.tgz and lay it out as train"):
        open_source("imagenette", tmp_path)
    with pytest.raises(InputError, match="patchguard data get cifar10"):
        open_source("cifar10", tmp_path)


def test_the_root_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGUARD_DATA", str(tmp_path / "here"))
    with pytest.raises(InputError, match=r"here"):
        open_source("cifar10")


def test_an_unreadable_image_is_named_as_in_the_source(write: Write) -> None:
    root = write("a/1.png", "a/2.png")
    (root / "a" / "1.png").write_bytes(b"")
    with pytest.raises(Unreadable, match=r"^a/1.png is empty.$"):
        open_source(root).read(0)


def test_prepared_images_are_resized_and_rounded_and_one_that_is_too_small_is_named(write: Write) -> None:
    source = open_source(write("a.png", "b.png"))
    prepared = source.preprocess(Preprocess((Resize(height=6, width=4), CenterCrop(height=4, width=4))))
    pixels = Resize(height=6, width=4)(source.read(1)[None].float() / 255)[0, :, 1:5]
    assert torch.equal(prepared.read(1), (pixels * 255).round().to(torch.uint8))
    assert prepared.names == source.names
    with pytest.raises(Unreadable, match=r"^b\.png cannot be prepared: images must be at least 60 x 60"):
        source.preprocess(Preprocess((CenterCrop(height=60, width=60),))).read(1)


def test_a_limited_source_holds_evenly_spaced_images(write: Write) -> None:
    source = open_source(write(*(f"{name}/{number}.png" for name in "abcd" for number in range(10))))
    limited = source.limit(8)
    assert limited.targets == (0, 0, 1, 1, 2, 2, 3, 3)
    assert limited.names == source.limit(8).names == tuple(sorted(limited.names))
    for index, name in enumerate(limited.names):
        assert torch.equal(limited.read(index), source.read(source.names.index(name)))
    assert source.limit(8, seed=1).names != limited.names
    assert source.limit(41) is source
    with pytest.raises(InputError, match="1 or more"):
        source.limit(0)
