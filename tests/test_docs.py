"""Documents say what the program does: commands, links and cards are up to date, and all examples run."""

import ast
import doctest
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import typer

import patchguard
from patchguard import Evidence, Windows
from patchguard.attacks import ATTACKS
from patchguard.cli import app
from patchguard.data.catalog import TEST_SETS
from patchguard.defenses import ClippedSum
from patchguard.defenses.serialization import DEFENSES
from patchguard.models import REGISTRY
from patchguard.runs import summary
from patchguard.runs.summary import update
from patchguard.storage import zoo
from patchguard.storage.published_models import CHECKPOINTS, CLONE, PUBLISHED
from patchguard.training import recipe
from patchguard.training.checkpoint import LOG_ALIASES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/*.md")])
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def load_script(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    script = load_script("make_cli")
    assert script.PAGE.read_text() == script.page(), "run `make docs`"


def test_the_page_of_recipe_settings_is_what_the_schema_says() -> None:
    script = load_script("make_recipe_settings")
    assert script.PAGE.read_text() == script.page(), "run `make docs`"


def test_the_figure_of_the_readme_is_what_its_script_draws() -> None:
    script = load_script("make_concept")
    assert script.FIGURE.read_text() == script.figure(), "run `make docs`"


def test_the_figure_of_the_readme_shows_the_margin_of_clipped_sums() -> None:
    script = load_script("make_concept")
    cells = [[[float(value) for value in line] for line in evidence] for evidence in (script.CAT, script.DOG)]
    windows = Windows.sliding(grid=(7, 7), size=(3, 3))
    settings = Evidence(kind="logits", low=0.0, high=float(script.HIGH))
    certificate = ClippedSum().certify(settings(torch.tensor([cells])), windows)
    assert f"smallest margin {certificate.margin.item():.0f}<" in script.figure()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


# -- names on pages ----------------------------------------------------------------------------------------------------

# The changelog names what was, and docs/reproduction.md what recorded runs were called with.
CURRENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "NOTES.md", "reproduction.md")]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*.py")}
    for name in re.findall(r"(?<![\w/.-])[\w/]+\.py\b", page.read_text()):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), f"{page.name} names {name}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_names_that_a_page_names_can_be_imported(page: Path) -> None:
    groups = {registry.group for registry in (DEFENSES, ATTACKS, REGISTRY, TEST_SETS)}  # of entry points
    for name in re.findall(r"(?<![\w./])patchguard(?:\.[a-zA-Z_]\w*)+", page.read_text()):
        assert name in groups or can_import(name), f"{page.name} names {name}"


def can_import(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return all((value := getattr(value, part, None)) is not None for part in parts[cut:])
    return False


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_a_page_that_uses_our_words_leads_to_the_glossary(page: Path) -> None:
    words = re.findall(r"\b(?:cells?|windows?|evidence|drift|masks?|tau)\b", page.read_text())
    assert not words or page.name == "glossary.md" or "glossary.md" in page.read_text(), f"{page.name} uses {words[0]}"


def test_the_glossary_defines_our_words() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert {"Cell", "Window", "Evidence", "Drift", "Mask", "Tau"} <= {*headings}


def test_the_citation_names_the_version_and_the_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {patchguard.__version__}\n" in text
    title = re.search(r"title     = [{]+(.*)[}],\n", (ROOT / "README.md").read_text())[1].replace("}", "")
    assert title in text
    assert re.findall(r"family-names: (\w+)", text) == ["Xiang", "Bhagoji", "Sehwag", "Mittal"]


def command_options() -> dict[str, set[str]]:
    """Return the options of every command."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        yield name, {option for parameter in command.params for option in parameter.opts}
        for below in getattr(command, "commands", {}).values():
            yield from walk(below, f"{name} {below.name}")

    return dict(walk(typer.main.get_command(app), "patchguard"))


def written_commands(text: str) -> list[str]:
    """Return the calls of patchguard in fenced blocks and code spans, without comments."""
    folded = re.sub(r"\\\n *", "", text)
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", folded, re.DOTALL)
    shells = [code for _, language, code in FENCE.findall(folded) if language == "sh"]
    lines = [line.split("  #")[0] for code in shells for line in code.splitlines()]
    calls = [re.search(r"patchguard [a-z].*", " ".join(text.split())) for text in [*lines, *spans]]
    return [call[0] for call in calls if call]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_have_these_options(page: Path) -> None:
    options = command_options()
    for call in written_commands(page.read_text()):
        words = call.split()
        command = next(name for size in (3, 2, 1) if (name := " ".join(words[:size])) in options)
        assert command != "patchguard" or len(words) == 1, f"{page.name}: there is no command `{call}`"
        for option in OPTION.findall(call):
            assert option in options[command], f"{page.name}: `{command}` has no {option}"


OTHER_OPTIONS = {"--json", "--stride-on"}  # of verify.py alone and of python -m patchguard.training.pretrained


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_single_options_that_a_page_names_belong_to_some_command(page: Path) -> None:
    known = set().union(*command_options().values()) | OTHER_OPTIONS
    for span in re.findall(r"`(--[^`]+)`", page.read_text()):
        for option in OPTION.findall(span):
            assert option in known, f"{page.name}: no command has {option}"


# -- numbers of the README ---------------------------------------------------------------------------------------------


def read_renames() -> list[tuple[str, str]]:
    """Before and now, row by row, of the one table of the changelog that lists what was renamed."""
    text = (ROOT / "CHANGELOG.md").read_text().split("\n### Renamed\n")[1].split("\n### ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert all(len(row) == 3 for row in rows[2:]), "a row has before and now"
    return [(before, now) for _, before, now in rows[2:]]


@pytest.mark.parametrize("aliases", [recipe.ALIASES, summary.ALIASES, LOG_ALIASES], ids=["recipe", "run", "log"])
def test_every_old_key_that_is_still_read_is_in_the_table_of_renames(aliases: dict[str, str]) -> None:
    renames = read_renames()
    for old, new in aliases.items():
        found = [row for row in renames if re.search(rf"\b{old}`", row[0]) and f"{new}`" in row[1]]
        assert found, f"{old} -> {new}"


def test_new_python_names_in_the_table_of_renames_can_be_imported() -> None:
    names = [name for _, now in read_renames() for name in re.findall(r"`(patchguard(?:\.\w+)+)`", now)]
    assert len(names) > 30
    for name in names:
        assert can_import(name), name


def test_every_row_of_the_readme_has_the_numbers_of_a_card_or_of_a_run() -> None:
    number = r"(?:\*\*)?([\d.]+|none)(?:\*\*)?"
    row = rf"^[|](.*)[|] ([\dx]+|-) [|] (?:own|refitted|none) [|] {number} [|] {number} [|] `(.*)` [|]$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 15
    run = update(json.loads((ROOT / "results" / "certify-cpu.json").read_text()))
    own_masks = run["curve"]["kept"]["2"]
    card = ""
    for about, patch, clean, certified, options in rows:
        linked = re.search(r"docs/models/(\w+)\.md", about)
        card = (ROOT / "docs" / "models" / f"{linked[1]}.md").read_text() if linked else card
        if patch == "2x2" and options == "--patch 2":  # measured in the run against 5x5, with the same masks
            numbers = (run["patches"]["5x5"]["clean"], own_masks)
            assert (clean, certified) == tuple(f"{100 * each['fraction']:.1f}" for each in numbers)
        else:
            assert re.search(rf"[|] {re.escape(clean)} [|] (\*\*)?{re.escape(certified)}(\*\*)? [|]", card), about
        assert f"--patch {patch.split('x')[0]}" in options or patch == "-"


# -- the documentation site --------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    outside = ["index.md", "CHANGELOG.md", *(f"results/{page.name}" for page in ROOT.glob("results/*.md"))]
    assert sorted(listed) == sorted(pages + [page.replace("README", "index") for page in outside])


# -- model cards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_card_names_the_digest_that_certificates_name(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    assert zoo.load(name).digest in card


@pytest.mark.parametrize("name", sorted({*PUBLISHED} - {"cifar10_masked_resnet18"}))  # which no recipe here has trained
def test_a_model_card_is_about_the_file_that_is_published(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    summary = json.loads((ROOT / "results" / "models" / name / "summary.json").read_text())
    folder = CHECKPOINTS if name == "cifar10" else CLONE
    file = folder / f"{name}.safetensors"
    found, digest = zoo.inspect(file), zoo.load(file).digest
    published = summary.get("published", {"digest": summary["digest"], "changed": {}})
    assert digest == published["digest"]
    assert digest in card
    assert found["recipe"] == {**summary["recipe"], **published["changed"]}
    for entry in [*summary.get("test", []), *summary.get("held_out", [])]:
        assert f"| {100 * entry['clean']:.1f} |" in card
    later = ROOT / "results" / "models" / name / "test.json"  # a test set that was measured after the training
    if later.is_file():
        measured = json.loads(later.read_text())
        assert measured["model_digest"] == digest
        for numbers in (each for rule in measured["defenses"].values() for each in rule.values()):
            clean, certified = (f"{100 * numbers[key]['share']:.1f}" for key in ("clean", "certified"))
            assert re.search(rf"[|] {re.escape(clean)} [|] (\*\*)?{re.escape(certified)}(\*\*)? [|]", card)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_row_of_a_card_names_its_masks(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    for row in re.findall(
        r"^[|][^|\n]*[|] \d+ ?x ?\d+[^|\n]*[|].*[|] (?:\*\*)?\d+\.\d(?:\*\*)? [|]$", card, re.MULTILINE
    ):
        assert "| own |" in row or "| refitted |" in row or "masked" in name, row


def test_the_embedded_model_is_small_and_the_others_fit_their_folder() -> None:
    assert (CHECKPOINTS / "cifar10.safetensors").stat().st_size <= 13_000_000
    assert sum(path.stat().st_size for path in CLONE.glob("*")) <= 115_000_000


# -- examples on pages -------------------------------------------------------------------------------------------------

NOT_RUN = "# Not run: "  # the first line of a block that cannot run here, with the reason
NOT_RUN_BLOCKS = 0
SLOW_PAGES = ("README.md", "attacks.md", "check_a_certificate.md", "defend_your_classifier.md")


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
