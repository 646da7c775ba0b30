"""`patchguard data` with real files, wrong ones included."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.image_folders import Write
from typer.testing import CliRunner

from patchguard.cli import app


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["data", *words])


def rows(shown: Any) -> list[list[str]]:
    return [line.split() for line in shown.stdout.splitlines()]


@pytest.mark.parametrize("words", [(), ("list",), ("get",), ("check",)])
def test_every_help_has_an_example(words: tuple[str, ...]) -> None:
    shown = run(*words, "--help")
    assert shown.exit_code == 0
    assert "Example: patchguard data" in shown.stdout


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from patchguard.cli import app\n"
        "assert CliRunner().invoke(app, ['data', 'check', '--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_says_what_is_found_where_it_comes_from_and_on_what_terms(write: Write) -> None:
    root = write("pets/Cat/1.png", "pets/Dog/1.png")
    shown = run("list", "--root", str(root))
    assert shown.exit_code == 0, shown.stderr
    found = {row[0]: row[-1] for row in reversed(rows(shown)) if row}
    assert found["cats_vs_dogs"] == "pets"
    assert str(root) in shown.stdout
    assert found["imagenet"] == "no"
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in shown.stdout
    assert "cite Krizhevsky 2009" in shown.stdout


def test_a_check_counts_classes_sizes_and_what_cannot_be_read(write: Write) -> None:
    write("a/big.png", size=(40, 50))
    root = write("a/1.png", "a/2.png", "b/3.png", "b/[red]4.png")
    (root / "b" / "[red]4.png").write_bytes(b"")
    (root / "b" / "notes.txt").write_text("no image")
    shown = run("check", str(root))
    assert shown.exit_code == 0, shown.stderr
    text = "\n".join(" ".join(row) for row in rows(shown))
    for line in (
        "images 5",
        "can be read 4",
        "cannot 1",
        "other files, ignored 1",
        "classes 2",
        "most frequent size 6 x 8 (3 images, height x width)",
        "smallest size 6 x 8",
        "largest size 40 x 50",
        "0 a 3 0",
        "1 b 2 1",
        "b/[red]4.png is empty",
    ):
        assert line in text
    assert "images 2" in "\n".join(" ".join(row) for row in rows(run("check", str(root), "--limit", "2")))


def test_a_check_of_broken_files_alone_ends_with_status_1(write: Write) -> None:
    root = write("1.png")
    (root / "1.png").write_text("no image")
    shown = run("check", str(root / "*.png"))
    assert shown.exit_code == 1
    assert "1.png is not an image of a known kind" in " ".join(shown.stdout.split())


def test_the_sample_is_checked_by_name() -> None:
    shown = run("check", "sample")
    assert shown.exit_code == 0
    assert ["4", "deer", "50", "0"] in rows(shown)


def test_a_strange_name_of_a_file_can_be_shown(tmp_path: Path) -> None:
    name = b"\xff\x1b[31m.png"
    (tmp_path / "x.png").write_bytes(b"")
    Path(str(tmp_path)).joinpath("x.png").rename(tmp_path / name.decode("utf-8", "surrogateescape"))
    shown = run("check", str(tmp_path))
    assert shown.exit_code == 1
    assert "??[31m.png" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "nowhere/at/all"), "no folder or file of images is at nowhere/at/all"),
        (("check", "samples"), "Did you mean 'sample'?"),
        (("check", "sample", "--limit", "0"), "1 or more; got 0"),
        (("check", "sample", "--workers", "-1"), "`workers`"),
        (("check", "cifar10", "--root", "nowhere"), "patchguard data get cifar10"),
        (("get", "imagenet", "--root", "nowhere"), "https://image-net.org/download.php"),
        (("get", "mnist"), "`name` must be a known dataset"),
    ],
)
def test_mistakes_are_one_line_on_stderr(words: tuple[str, ...], message: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr.startswith("patchguard: ")
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
