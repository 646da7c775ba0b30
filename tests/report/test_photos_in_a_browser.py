"""The table of all images, used as a reader uses it; skipped where there is no browser to drive."""

import shutil

import pytest
from helpers.run_folders import fabricate

from patchguard.report import render
from patchguard.report.numbers import short, size
from patchguard.runs.records import Folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARGIN = f"Margin {size('5x5')}"
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = fabricate(tmp_path_factory.mktemp("browser") / "run", images=2000, patches=("5x5", "2x2"), errors=3)
    render.write([folder])
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser, folder):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(5000)
    mistakes: list[str] = []
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda message: mistakes.append(message.text) if message.type == "error" else None)
    page.goto((folder / "report.html").as_uri())
    yield page
    assert mistakes == []
    context.close()


def column(page, place: int) -> list[str]:
    cells = "(rows, place) => rows.map((row) => row.cells[place].innerText)"
    return page.locator("#photos-table tbody tr:not(.gap)").evaluate_all(cells, place)


def head(page, title: str):
    return page.locator("#photos-table thead th").filter(has_text=title)


def test_only_rows_in_view_exist_and_all_can_be_reached(page):
    assert page.locator("#photos-count").inner_text() == "2,003 images"
    assert 10 < len(column(page, 0)) < 60
    page.locator(".window-of-rows").focus()
    page.keyboard.press("End")
    playwright.expect(page.locator("#photos-table tbody")).to_contain_text("broken-2.jpg")
    assert column(page, 0)[-1] == "2002"
    assert column(page, 4)[-1] == "no answer: is truncated"
    assert len(column(page, 0)) < 60


def test_every_column_is_sorted_both_ways(page, folder):
    margins = sorted(record["patches"]["5x5"]["margin"] for record in Folder(folder).records() if "error" not in record)
    button = head(page, MARGIN).get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    assert head(page, MARGIN).get_attribute("aria-sort") == "ascending"
    assert head(page, "Number").get_attribute("aria-sort") is None
    assert column(page, 5)[:8] == [short(margin) for margin in margins[:8]]
    button.click()
    assert head(page, MARGIN).get_attribute("aria-sort") == "descending"
    assert column(page, 5)[:8] == [short(margin) for margin in margins[::-1][:8]]
    for place in range(page.locator("#photos-table thead th").count()):
        page.locator("#photos-table thead button").nth(place).click()
        assert page.locator("#photos-table thead th").nth(place).get_attribute("aria-sort") == "ascending"
        assert len(column(page, 0)) > 10


def test_words_of_names_labels_and_verdicts_are_found(page):
    page.get_by_role("searchbox").fill("00017")
    assert column(page, 1) == ["test/00017"]
    page.get_by_role("searchbox").fill("FROG wrong")
    rows = list(zip(column(page, 2), column(page, 3), column(page, 4), column(page, 6), strict=True))
    assert rows
    assert all("frog" in row and "wrong" in row for row in rows)
    page.get_by_role("searchbox").fill("truncated")
    assert column(page, 0) == ["2000", "2001", "2002"]
    page.get_by_role("searchbox").fill("no such thing")
    assert page.locator("#photos-count").inner_text() == "No image matches."
    assert column(page, 0) == []


def test_a_verdict_is_chosen_and_a_name_leads_to_its_picture(page, folder):
    choice = page.locator("#photos-verdict-4")
    choice.select_option(index=2)
    assert set(column(page, 4)) == {"correct, not certified"}
    choice.select_option(index=0)
    page.get_by_label("only with a picture here").check()
    assert page.locator("#photos-count").inner_text() == "24 of 2,003 images"
    link = page.locator("#photos-table tbody a").first
    number = column(page, 0)[0]
    link.click()
    assert page.url.endswith(f"#picture-{number}")
    assert page.locator(f"#picture-{number}").is_visible()
