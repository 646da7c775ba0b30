"""Imports go one way, and the light entry points stay light."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchguard

ROOT = Path(patchguard.__file__).parent
# From bottom to top, as in the design. A room imports from itself and from rooms below it, and not from one beside it.
LAYERS = [
    {"errors", "verify"},
    {"patch", "registry"},
    {"guard"},  # the contract: every answer is one of its classes
    {"runtime"},
    {"geometry"},
    {"models", "data", "defenses"},
    {"guards", "oracle"},
    {"storage"},
    {"attacks", "training"},
    {"runs"},
    {"report"},
    {"paper", "server"},
    {"cli"},
    {"__main__", "windows", "evidence"},  # entry points and short names, for users only
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULE_NAME = re.compile(r"patchguard(\.\w+)+\.?")


def imported_rooms(source: str) -> set[str]:
    """The rooms that a module imports: at its top, inside functions, for type checkers, or by a name in a string."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room; write the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            names = [str(node.values[0].value)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        if isinstance(node, (ast.JoinedStr, ast.Constant)):  # for importlib: a whole name, or the beginning of one
            names = [name for name in names if name == "patchguard." or MODULE_NAME.fullmatch(name)]
        rooms |= {name.split(".")[1] for name in names if name.startswith("patchguard.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize(
    "source",
    [
        "from patchguard.cli import app",
        "from patchguard import cli",
        "import patchguard.cli.train as train",
        "def late():\n    from patchguard.cli import app",
        "if TYPE_CHECKING:\n    from patchguard.cli.train import Options",
        "importlib.import_module('patchguard.cli')",
        "TABLE = {'train': 'patchguard.cli.train'}",
        "import_module(f'patchguard.cli.{name}')",
    ],
)
def test_every_way_to_import_a_room_is_seen(source) -> None:
    assert imported_rooms(source) == {"cli"}


def test_names_that_import_nothing_are_passed_over() -> None:
    assert imported_rooms("import torch\nfrom patchguard import __version__\nx = 'see patchguard.cli'") == set()
    assert imported_rooms("import_module(f'patchguard.{room}')") == {""}  # a room that nobody can tell is none


@pytest.mark.parametrize(
    "path",
    sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_module_imports_from_a_room_above_or_beside_its_own(path) -> None:
    mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert mine in LEVEL, f"{mine} has no layer; add it to LAYERS where it belongs"
    wrong = {room for room in imported_rooms(path.read_text()) - {mine} if LEVEL.get(room, 99) >= LEVEL[mine]}
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def imports(path: Path, other: Path) -> bool:
    """Whether a module imports another one, at its top or inside a function."""
    name = ".".join(("patchguard", *other.relative_to(ROOT).with_suffix("").parts))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                return True
        elif isinstance(node, ast.Import) and name in [alias.name for alias in node.names]:
            return True
    return False


def test_the_walk_through_certify_that_the_docs_draw_goes_along_imports() -> None:
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    walk = page.split("## From `patchguard certify` to the report")[1].split("```")[1]
    files = [ROOT / name for name in re.findall(r"[\w/]+\.py", walk)]
    assert len(files) == len(set(files)) <= 15
    assert (files[0].name, files[-1].parent.name) == ("certify.py", "report")
    # These two are called through the classes that they extend: `Guard` and `Defense`.
    extending = {ROOT / "guards" / "local.py", ROOT / "defenses" / "double_masking.py"}
    for number, path in enumerate(files[1:], 1):
        called = path in extending or any(imports(before, path) for before in files[:number])
        assert called, f"nothing drawn before it imports {path.relative_to(ROOT)}"


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from patchguard.cli import app\n"
        "shown = CliRunner().invoke(app, ['--version'])\n"
        "assert shown.exit_code == 0 and shown.output.startswith('patchguard '), shown.output\n"
        "shown = CliRunner().invoke(app, ['--help'])\n"
        "assert shown.exit_code == 0 and '--version' in shown.output, shown.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", patchguard.__all__)
def test_every_public_name_can_be_imported(name) -> None:
    assert getattr(patchguard, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = patchguard.nonsense


@pytest.mark.parametrize("name", ["patch", "geometry.windows"])
def test_the_examples_in_docstrings_run(name) -> None:
    result = doctest.testmod(importlib.import_module(f"patchguard.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
