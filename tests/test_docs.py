"""Documents say what the program does: commands, links and cards are up to date, and all examples run."""

import ast
import doctest
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import patchguard
from patchguard.storage import zoo
from patchguard.storage.published_models import CHECKPOINTS, CLONE, PUBLISHED

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/*.md")])


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text() == made.page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_card_names_the_digest_of_its_file(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    assert zoo.file_of(name).digest in card


@pytest.mark.parametrize("name", sorted({*PUBLISHED} - {"cifar10_masked_resnet18"}))  # which no recipe here has trained
def test_a_model_card_is_about_the_file_that_is_published(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    summary = json.loads((ROOT / "results" / "models" / name / "summary.json").read_text())
    folder = CHECKPOINTS if name == "cifar10" else CLONE
    found = zoo.inspect(folder / f"{name}.safetensors")
    published = summary.get("published", {"digest": summary["digest"], "changed": {}})
    assert found["digest"] == published["digest"]
    assert found["digest"] in card
    assert found["recipe"] == {**summary["recipe"], **published["changed"]}
    for entry in [*summary.get("test", []), *summary.get("held_out", [])]:
        assert f"| {100 * entry['clean']:.1f} |" in card
    later = ROOT / "results" / "models" / name / "test.json"  # a test set that was measured after the training
    if later.is_file():
        measured = json.loads(later.read_text())
        assert measured["model_digest"] == found["digest"]
        for numbers in (each for rule in measured["defenses"].values() for each in rule.values()):
            clean, certified = (f"{100 * numbers[key]['share']:.1f}" for key in ("clean", "certified"))
            assert re.search(rf"[|] {re.escape(clean)} [|] (\*\*)?{re.escape(certified)}(\*\*)? [|]", card)


def test_the_embedded_model_is_small_and_the_others_fit_their_folder() -> None:
    assert (CHECKPOINTS / "cifar10.safetensors").stat().st_size <= 13_000_000
    assert sum(path.stat().st_size for path in CLONE.glob("*")) <= 115_000_000


# -- examples on pages -------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
NOT_RUN = "# Not run: "  # the first line of a block that cannot run here, with the reason
NOT_RUN_BLOCKS = 0
SLOW_PAGES = ("attacks.md", "check_a_certificate.md")


class Block(NamedTuple):
    """A block of Python on a page, and the line that it begins on."""

    page: Path
    line: int
    code: str

    @property
    def reason(self) -> str:
        """Return why it cannot run here; nothing if it can."""
        first = self.code.splitlines()[0]
        return first.removeprefix(NOT_RUN).strip() if first.startswith(NOT_RUN.strip()) else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        indent, language, code = fence.groups()
        assert language not in ("py", "python3", "pycon", "Python"), f"{page.name}: say python, so that it is run"
        if language == "python":
            assert not indent, f"{page.name}: a block of Python must begin in the first column"
            found.append(Block(page, text[: fence.start(3)].count("\n"), code))
    return found


BLOCKS = {page: blocks for page in PAGES if (blocks := blocks_of(page))}


def marked(page: Path) -> object:
    marks = [pytest.mark.slow] if page.name in SLOW_PAGES else []
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", [marked(page) for page in BLOCKS])
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for block in BLOCKS[page]:
        if not block.reason:
            # Empty lines before the code: a traceback then names the line of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


def test_every_block_is_run_or_says_why_not() -> None:
    blocks = [block for found in BLOCKS.values() for block in found]
    assert len(blocks) == sum(page.read_text().count("```python") for page in PAGES) >= 7
    for block in blocks:
        assert NOT_RUN.strip() not in block.code or block.reason, f"{block.page.name}:{block.line} gives no reason"
    assert sum(bool(block.reason) for block in blocks) == NOT_RUN_BLOCKS


# -- examples in docstrings --------------------------------------------------------------------------------------------

SOURCE = Path(patchguard.__file__).parent


def examples_written(path: Path) -> int:
    """Return how many examples the docstrings of a file hold, as its text has them."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    written = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return sum(len(doctest.DocTestParser().get_examples(text)) for text in written if text)


EXAMPLES = {path: count for path in sorted(SOURCE.rglob("*.py")) if (count := examples_written(path))}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_examples_in_docstrings_give_what_they_say(path: Path) -> None:
    name = ".".join(["patchguard", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name))
    assert (found.failed, found.attempted) == (0, EXAMPLES[path])


def test_docstrings_have_examples() -> None:
    assert sum(EXAMPLES.values()) >= 20
