"""Documents say what the program does: the page of commands is up to date, links lead somewhere, cards match files."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from patchguard import zoo

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


@pytest.mark.parametrize("name", zoo.PUBLISHED)
def test_a_model_card_is_about_the_file_that_is_published(name: str) -> None:
    card = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    summary = json.loads((ROOT / "results" / "models" / name / "summary.json").read_text())
    folder = zoo.CHECKPOINTS if name == "cifar10" else zoo.CLONE
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
    assert (zoo.CHECKPOINTS / "cifar10.safetensors").stat().st_size <= 13_000_000
    assert sum(path.stat().st_size for path in zoo.CLONE.glob("*")) <= 90_000_000
