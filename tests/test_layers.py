"""Imports go one way, and the light entry points stay light."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import patchguard

ROOT = Path(patchguard.__file__).parent
LAYERS = [
    {"errors"},
    {"patch", "verify"},
    {"runtime"},
    {"guard"},  # the contract: every answer is one of its classes
    {"geometry", "windows"},
    {"models", "data", "defenses", "evidence"},
    {"guards"},
    {"storage"},
    {"attacks", "training"},
    {"runs"},
    {"report"},
    {"paper", "server"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_upward(path) -> None:
    mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert mine in LEVEL, f"{mine} has no layer; add it to LAYERS where it belongs"
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] != "patchguard" or len(parts) < 2 or parts[1] not in LEVEL:
                continue
            assert LEVEL[parts[1]] <= LEVEL[mine], f"{path.name} imports {name} from a layer above it"


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
