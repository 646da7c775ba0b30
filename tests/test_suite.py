"""The suite itself: it repeats in any order, and only this package's own warnings turn it red."""

import ast
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.small_guards import build_once
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# -- draws -------------------------------------------------------------------------------------------------------------

DRAWING = """
import json, pathlib, random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

IMPORTED = int(torch.randint(2**40, ()))


def draw():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def keep(name, value):
    with open("drawn.jsonl", "a") as file:
        file.write(json.dumps([name, value]) + "\\n")


@pytest.fixture(scope="module", params=[1, 2])
def shared(request):
    return draw()


@pytest.fixture(scope="session")
def common():
    return draw()


@pytest.fixture
def own():
    return draw()


def test_first(shared, common, own, request):
    keep(request.node.name, [IMPORTED, shared, common, own, draw()])


def test_second(common, own):
    keep("second", [common, own, draw()])


@settings(max_examples=5)
@given(number=st.integers(0, 2**60))
def test_third(number):
    keep("third", [number, float(torch.rand(()))])
"""
OTHER = "import random\nimport torch\n\n\ndef test_before():\n    random.random()\n    torch.rand(3)\n"


def drawn(folder: Path, *words: str) -> dict[str, list[object]]:
    """Run the little suite in `folder` and return what each test drew, in order."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_drawing.py").write_text(DRAWING)
    (folder / "test_another.py").write_text(OTHER)
    run_pytest(folder, *words)
    found: dict[str, list[object]] = {}
    for line in (folder / "drawn.jsonl").read_text().splitlines():
        name, value = json.loads(line)
        found.setdefault(name, []).append(value)
    return found


def run_pytest(folder: Path, *words: str, status: int = 0) -> str:
    """Run pytest with the project's settings on the tests in a folder."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    shown = subprocess.run(
        [*command, "-p", "no:cacheprovider", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert shown.returncode == status, shown.stdout + shown.stderr
    return shown.stdout


@pytest.mark.slow
def test_what_tests_draw_depends_neither_on_their_order_nor_on_other_tests(tmp_path: Path) -> None:
    one = drawn(tmp_path / "suite", "test_another.py", "test_drawing.py")
    parts = [f"test_drawing.py::test_{name}" for name in ("third", "second", "first[2]", "first[1]")]
    two = drawn(tmp_path / "suite", *parts)
    assert one == two
    assert sorted(one) == ["second", "test_first[1]", "test_first[2]", "third"]
    assert one["test_first[1]"] != one["test_first[2]"]
    numbers = [number for number, _ in one["third"]]
    assert len(set(numbers)) > 1
    assert len({after for _, after in one["third"]}) == 1  # each example starts from the same state
    other = drawn(tmp_path / "suite", *parts, "--hypothesis-profile=random")
    assert [number for number, _ in other.pop("third")] != numbers
    assert other == {name: value for name, value in one.items() if name != "third"}


def test_what_tests_share_is_the_same_whoever_asks_first_and_does_not_move_the_draws() -> None:
    draw = build_once(lambda: torch.rand(3))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw()
    assert torch.equal(torch.get_rng_state(), before)
    assert draw() is first
    draw.cache_clear()
    torch.manual_seed(2)
    assert torch.equal(draw(), first)


def test_examples_are_drawn_without_a_clock() -> None:
    for name in ("ci", "random"):
        assert settings.get_profile(name).deadline is None


def test_no_test_imports_from_another_test() -> None:
    tests = Path(__file__).parent
    files = {path.stem for path in tests.rglob("test_*.py")}
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            for name in names:
                assert not files & set(name.split(".")), f"{path.relative_to(tests)} imports {name}"


# -- warnings ----------------------------------------------------------------------------------------------------------


def module(name: str, **known: object) -> dict[str, object]:
    """Return the names of a module made up of two functions: one that warns, and one that blames its caller."""
    names: dict[str, object] = {"__name__": name, **known}
    code = "import warnings\n"
    for function, level in (("warn", 1), ("blame", 2)):
        code += f"def {function}(): warnings.warn('will go', DeprecationWarning, stacklevel={level})\n"
    exec(code + "def call(function): function()\n", names)
    return names


@pytest.mark.parametrize("name", ["patchguard", "patchguard.guards.local", "patchguard.report.files"])
def test_a_warning_about_our_own_code_is_an_error(name: str) -> None:
    ours, theirs = module(name), module("dependency")
    with pytest.raises(DeprecationWarning):
        ours["warn"]()
    with pytest.raises(DeprecationWarning):
        ours["call"](theirs["blame"])


@pytest.mark.parametrize("name", ["dependency", "patchguarded", "torch.patchguard"])
def test_a_warning_about_other_code_is_none(name: str) -> None:
    ours, theirs = module("patchguard.guards.local"), module(name)
    with warnings.catch_warnings(record=True) as seen:
        theirs["warn"]()
        ours["call"](theirs["warn"])
        theirs["call"](theirs["blame"])
    assert [str(each.message) for each in seen] == ["will go"] * 2  # the same line is shown once


@pytest.mark.slow
def test_a_dependency_that_warns_while_it_is_imported_leaves_the_suite_green(tmp_path: Path) -> None:
    (tmp_path / "dependency.py").write_text("import warnings\nwarnings.warn('will go', FutureWarning)\n")
    (tmp_path / "test_green.py").write_text("import dependency\n\n\ndef test_green():\n    pass\n")
    (tmp_path / "test_red.py").write_text(
        "import threading\n\n\ndef test_thread():\n    threading.Thread(target=lambda: 1 / 0).start()\n"
    )
    assert "will go" in run_pytest(tmp_path, "test_green.py")
    run_pytest(tmp_path, "test_red.py", status=1)  # an exception that nobody sees is no warning
