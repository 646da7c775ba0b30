"""`write`: report.html from the files of finished runs alone; neither torch, model nor data are needed.

The page is one file that opens offline: styles, charts and pictures are inside, and there are no scripts.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patchguard.errors import InputError
from patchguard.report import attack, cards, comparison, notes, results
from patchguard.report.attack_files import AttackPicture, AttackRun, read_attack, read_attack_gallery
from patchguard.report.files import Picture, Run, read_gallery, read_kind, read_run
from patchguard.report.markup import Markup, join, tag
from patchguard.report.numbers import count

NAME, COMPARED = "report.html", "comparison.html"
ATTACK_STYLES = ("page.css", "attack.css")
SHORT = {
    "charts": "Charts",
    "failures": "Unread images",
    "settings": "Settings",
    "proof": "What it proves",
    "check": "How to check",
    "refuted": "Refuted",
    "meaning": "What it does not prove",
}


def write(folders: Sequence[Path]) -> Path:
    """Write a page into the first folder and return its path.

    One folder gives report.html, the report of a run; several give comparison.html: one row per run, curves overlaid.
    """
    if not folders:
        raise InputError("`folders` must name at least one run folder; got none.")
    places = [Path(folder) for folder in folders]
    kinds = {read_kind(place) for place in places}
    if len(kinds) > 1:
        raise InputError(f"`folders` must hold runs of one kind; got {' and '.join(sorted(kinds))}. Report them apart.")
    page = _of_attacks(places) if kinds == {"attack"} else _of_certified(places)
    path = places[0] / (NAME if len(places) == 1 else COMPARED)
    try:
        _replace(path, page)
    except OSError as error:
        raise InputError(f"`{path}` cannot be written: {error.strerror or error}.") from None
    return path


def _of_certified(places: Sequence[Path]) -> str:
    runs = [read_run(place) for place in places]
    _check_space(runs)
    return of_runs(runs) if len(runs) > 1 else of_run(runs[0], read_gallery(places[0]))


def _of_attacks(places: Sequence[Path]) -> str:
    runs = [read_attack(place) for place in places]
    _check_space(runs)
    return of_attacks(runs) if len(runs) > 1 else of_attack(runs[0], read_attack_gallery(places[0]))


def _check_space(runs: Sequence[Run | AttackRun]) -> None:
    """Refuse runs whose patches of one name are not the same threat."""
    if len({run.settings.get("patch_space", "source") for run in runs}) > 1:
        raise InputError(
            "`folders` must hold runs with patches in one place; got some in source images and some in the network's "
            "input (--patch-space). Report them apart."
        )


def of_run(run: Run, pictures: Sequence[Picture]) -> str:
    """Return the page of one run."""
    figures = [results.curve(run), *results.margins(run)]
    drawn = [figure for figure in figures if figure is not None]
    sections = [
        ("results", "Results", tag("div", results.table(run), class_="wide") if run.main.total else None),
        ("charts", "Patch size and margins", tag("div", *drawn, class_="columns") if drawn else None),
        ("classes", "Classes", results.classes(run)),
        ("pictures", "Pictures", cards.gallery(run, pictures)),
        ("failures", "Images without an answer", notes.failures(run)),
        ("settings", "Settings and environment", notes.settings(run)),
        ("proof", "What this proves and what it does not", notes.proof(run)),
        ("check", "How to check a certificate", notes.check(run)),
    ]
    about = [str(run.settings.get(key)) for key in ("model", "defense", "data") if run.settings.get(key)]
    kicker = " \u00b7 ".join(["PatchGuard report", *about, count(run.images, "image")])
    return _page(kicker, results.headline(run), results.opening(run), sections, run)


def of_runs(runs: Sequence[Run]) -> str:
    """Return the page that compares runs."""
    sections = [
        ("runs", "Runs", comparison.table(runs)),
        ("charts", "Patch size", comparison.curves(runs)),
        ("differences", "Settings that differ", comparison.differences(runs)),
        ("proof", "What this proves and what it does not", notes.limits()),
    ]
    kicker = f"PatchGuard comparison \u00b7 {len(runs)} runs"
    return _page(kicker, comparison.headline(runs), comparison.opening(runs), sections, runs[0])


def of_attack(run: AttackRun, pictures: Sequence[AttackPicture]) -> str:
    """Return the page of one attack."""
    sections = [
        ("refuted", "Refuted certificates", attack.refuted(run)),
        ("results", "Results", tag("div", attack.table(run), class_="wide") if run.clean else None),
        ("pictures", "Pictures", attack.gallery(run, pictures)),
        ("failures", "Images without an answer", notes.failures(run)),
        ("settings", "Settings and environment", notes.settings(run)),
        ("meaning", "What a failed attack does not prove", attack.meaning(run)),
    ]
    about = [str(run.settings[key]) for key in ("attack", "model", "defense", "data")]
    kicker = " \u00b7 ".join(["PatchGuard attack", *about, count(run.images, "image")])
    return _page(kicker, attack.headline(run), attack.opening(run), sections, run, ATTACK_STYLES)


def of_attacks(runs: Sequence[AttackRun]) -> str:
    """Return the page that compares attacks."""
    sections = [
        ("runs", "Runs", attack.compared(runs)),
        ("differences", "Settings that differ", comparison.differences(runs)),
    ]
    kicker = f"PatchGuard comparison \u00b7 {len(runs)} attacks"
    return _page(kicker, attack.compared_headline(runs), attack.limits(), sections, runs[0], ATTACK_STYLES)


def _page(
    kicker: str,
    headline: Markup,
    opening: Markup,
    sections: Sequence[tuple[str, str, Markup | None]],
    run: Run | AttackRun,
    styles: Sequence[str] = ("page.css",),
) -> str:
    filled = [(identity, title, content) for identity, title, content in sections if content is not None]
    links = (tag("a", SHORT.get(identity, title), href=f"#{identity}") for identity, title, _ in filled)
    home = Path(__file__).parent
    style = "".join(home.joinpath(name).read_text(encoding="utf-8") for name in styles)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", kicker),
        tag("style", Markup(style)),
    )
    version = run.environment.get("patchguard")
    body = tag(
        "body",
        tag("header", tag("p", kicker, class_="kicker"), tag("h1", headline), opening),
        tag("nav", *links, aria_label="Sections"),
        tag("main", *(_section(*each) for each in filled)),
        tag("footer", tag("p", f"Written by PatchGuard{f' {version}' if version else ''} from the files of the run.")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _section(identity: str, title: str, content: Markup) -> Markup:
    return join(tag("section", tag("h2", title, id=f"{identity}-title"), content, id=identity), Markup("\n"))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a browser that is looking at the old one never sees half of the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
