"""`write`: report.html from the files of finished runs alone; neither torch, model nor data are needed.

The page is one file that opens offline: styles, charts, pictures and the script of the table of all images are inside,
and it forbids the browser to load or run anything else. What it says is in templates/; here is what it shows.
photos.csv is written beside it.
"""

import base64
import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from patchguard.errors import InputError
from patchguard.report import numbers
from patchguard.report.charts import LINE_COLORS, Line, draw_histogram, draw_lines
from patchguard.report.files import FinishedRun, read_finished
from patchguard.report.photos import NAME as PHOTOS
from patchguard.report.photos import Photos, read_attacked_photos, read_certified_photos
from patchguard.report.pictures import Card, read_attack_cards, read_certify_cards
from patchguard.runs.summary import (
    AttackPicture,
    AttackSummary,
    CertifyPicture,
    CertifySummary,
    ClassSummary,
    Proportion,
    flatten,
    read_run,
)
from patchguard.storage.atomic import write_bytes

NAME, COMPARED = "report.html", "comparison.html"
TEMPLATES = Path(__file__).parent / "templates"
CLASSES_SHOWN = 10  # of the worst and of the best; with twice as many or fewer classes all are shown
REFUTED_SHOWN = 3
LONGEST_SETTING = 120  # letters of a setting in a comparison

CertifyRun = FinishedRun[CertifySummary]
AttackRun = FinishedRun[AttackSummary]


def write(folders: Sequence[Path]) -> Path:
    """Write a page into the first folder and return its path.

    One folder gives report.html, the report of a run; several give comparison.html: one row per run, curves overlaid.
    """
    if not folders:
        raise InputError("`folders` must name at least one run folder; got none.")
    paths = [Path(folder) for folder in folders]
    kinds = {read_run(path).kind for path in paths}
    if len(kinds) > 1:
        raise InputError(f"`folders` must hold runs of one kind; got {' and '.join(sorted(kinds))}. Report them apart.")
    page, photos = _show_attacks(paths) if kinds == {"attack"} else _show_certified(paths)
    target = paths[0] / (NAME if len(paths) == 1 else COMPARED)
    if target.exists() and not os.access(paths[0], os.W_OK):
        return target  # on a disk that can only be read, the page of the run is the one that is there
    if photos is not None:
        write_bytes(paths[0] / PHOTOS, photos.csv, durable=False)
    write_bytes(target, page.encode(), durable=False)
    return target


def _show_certified(paths: Sequence[Path]) -> tuple[str, Photos | None]:
    runs = [read_finished(path, CertifySummary) for path in paths]
    _require_one_space(runs)
    if len(runs) > 1:
        return render_comparison(runs), None
    cards = read_certify_cards(paths[0])
    photos = read_certified_photos(runs[0], [card.entry.index for card in cards])
    return render_run(runs[0], cards, photos), photos


def _show_attacks(paths: Sequence[Path]) -> tuple[str, Photos | None]:
    runs = [read_finished(path, AttackSummary) for path in paths]
    _require_one_space(runs)
    if len(runs) > 1:
        return render_attack_comparison(runs), None
    cards = read_attack_cards(paths[0])
    photos = read_attacked_photos(runs[0], [card.entry.index for card in cards])
    return render_attack(runs[0], cards, photos), photos


def _require_one_space(runs: Sequence[CertifyRun] | Sequence[AttackRun]) -> None:
    """Refuse runs whose patches of one name are not the same threat."""
    if len({run.summary.settings.patch_space for run in runs}) > 1:
        raise InputError(
            "`folders` must hold runs with patches in one place; got some in source images and some in the network's "
            "input (--patch-space). Report them apart."
        )


# -- pages -------------------------------------------------------------------------------------------------------------


def render_run(run: CertifyRun, cards: Sequence[Card[CertifyPicture]], photos: Photos | None = None) -> str:
    """Return the page of one run."""
    summary = run.summary
    kept, refitted, clean = split_curve(summary)
    lines = [
        Line("masks kept", kept, 0),
        Line("masks refitted to each size", refitted, 1),
        Line("masks refitted, clean accuracy", clean, 2, dashed=True),
    ]
    undefended = summary.undefended
    level = Line("undefended network, clean accuracy", {0: undefended}, 3) if undefended else None
    groups = _name_margin_groups(summary)
    about = "Number of images by margin; the same numbers are in the table below."
    histograms = {
        patch: (
            histogram,
            draw_histogram(histogram, groups, about=about, x_title="margin, in units of evidence")
            if all(map(math.isfinite, histogram.edges))
            else None,
        )
        for patch, histogram in summary.margins.items()
        if any(any(histogram.groups[group]) for group in groups)
    }
    return _render(
        "report",
        run,
        curve=_draw_curve([line for line in lines if line.points], summary, level=level),
        histograms=histograms,
        margin_groups=groups,
        classes=_rank_classes(summary, run.patch),
        cards=cards,
        photos=photos,
        **_describe(run),
    )


def render_attack(run: AttackRun, cards: Sequence[Card[AttackPicture]], photos: Photos | None = None) -> str:
    """Return the page of one attack."""
    refuted = [(index, _read_commands(run.folder, index)) for index in run.summary.refuted[:REFUTED_SHOWN]]
    return _render("attack", run, refuted=refuted, cards=cards, photos=photos, **_describe(run))


def render_comparison(runs: Sequence[CertifyRun]) -> str:
    """Return the page that compares runs."""
    names = name_runs(runs)
    patches = list(dict.fromkeys(patch for run in runs for patch in run.summary.settings.patches))
    shared = find_shared_patch(runs)
    ranked = [(name, run.summary.patches[shared].main) for name, run in zip(names, runs, strict=True) if shared]
    charts = []
    for part, title in enumerate(("Masks kept", "Masks refitted to each size")):
        curves = [split_curve(run.summary)[part] for run in runs]
        lines = [
            Line(name, points, number % LINE_COLORS, dashed=number >= LINE_COLORS)
            for number, (name, points) in enumerate(zip(names, curves, strict=True))
            if points
        ]
        charts.append((title, _draw_curve(lines, runs[0].summary, bands=len(lines) <= 2)))
    return _render(
        "comparison",
        runs[0],
        runs=dict(zip(names, runs, strict=True)),
        patches=patches,
        shared=shared,
        same_images=have_same_images(runs),
        ranked=sorted(ranked, key=lambda pair: -pair[1].rate),
        charts=[(title, curve) for title, curve in charts if curve],
        differences=compare_settings(runs),
    )


def render_attack_comparison(runs: Sequence[AttackRun]) -> str:
    """Return the page that compares attacks."""
    named = dict(zip(name_runs(runs), runs, strict=True))
    return _render(
        "attack_comparison",
        runs[0],
        runs=named,
        same_images=have_same_images(runs),
        differences=compare_settings(runs),
    )


def _render(template: str, run: CertifyRun | AttackRun, **context: Any) -> str:
    listed = context.get("photos") is not None
    style = _read_asset("page.css") + (_read_asset("photos.css") if listed else "")
    script = _read_asset("photos.js") if listed else None
    summary = run.summary
    page = _environment().get_template(f"{template}.html.j2")
    return page.render(
        run=run,
        summary=summary,
        settings=summary.settings,
        style=style,
        script=script,
        policy=_forbid_others(script),
        **context,
    )


def _read_asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _forbid_others(script: str | None) -> str:
    """Return the policy by which a browser loads nothing and runs this script alone, whatever names are in the page."""
    digest = "" if script is None else base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = f"'sha256-{digest}'" if digest else "'none'"
    others = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {runs}; {others}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=numbers.replace_unprintable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: list[Callable[..., Any]] = [
        numbers.percent,
        numbers.interval,
        numbers.count,
        numbers.short,
        numbers.size,
        numbers.threat,
        numbers.setting,
        shlex.quote,
    ]
    environment.filters |= {function.__name__: function for function in filters}
    return environment


# -- one run -----------------------------------------------------------------------------------------------------------


def split_curve(summary: CertifySummary) -> list[dict[int, Proportion]]:
    """Return the numbers by side with masks kept, with masks refitted, and refitted without an attack.

    Sides of which nothing was measured, since masks for such a patch hide every cell, are left out.
    """
    refitted = summary.curve.refitted.items()
    curves: list[dict[int, Proportion | None]] = [
        {**summary.curve.kept},
        {side: entry.main for side, entry in refitted},
        {side: entry.clean for side, entry in refitted},
    ]
    return [{side: curve[side] for side in sorted(curve) if (curve[side] or _NOTHING).total} for curve in curves]  # type: ignore[misc]


_NOTHING = Proportion(correct=0, total=0, fraction=None, low=0.0, high=1.0)


def _draw_curve(
    lines: list[Line], summary: CertifySummary, *, level: Line | None = None, bands: bool = True
) -> dict[str, Any] | None:
    """Return a chart of curves with its lines, for legend and table; None without any."""
    if not lines:
        return None
    pixels = "network pixels" if summary.settings.patch_space == "input" else "source pixels"
    chart = draw_lines(
        lines,
        about="Certified fraction by the side of a square patch; the same numbers are in the table below.",
        x_title=f"side of a square patch, {pixels}",
        level=level,
        bands=bands,
    )
    sides = sorted({side for line in lines for side in line.points})
    return {"chart": chart, "lines": lines, "level": level, "sides": sides}


def _name_margin_groups(summary: CertifySummary) -> dict[str, tuple[str, str]]:
    """Return name and color of the groups of a histogram."""
    if not summary.labeled:
        return {"certified": ("certified", "is-certified"), "not_certified": ("not certified", "is-open")}
    return {
        "certified": ("certified", "is-certified"),
        "not_certified": ("correct, not certified", "is-open"),
        "wrong": ("wrong", "is-wrong"),
    }


def _rank_classes(summary: CertifySummary, patch: str) -> dict[str, list[ClassSummary]]:
    """Return classes with images, best first; of many classes the worst, the best and the others apart."""

    def rank(row: ClassSummary) -> tuple[float, float, str]:
        return -row.certified.get(patch, 0) / row.total, -row.clean / row.total, row.name

    ranked = sorted((row for row in summary.classes if row.total), key=rank)
    if len(ranked) <= 2 * CLASSES_SHOWN:
        return {"all": ranked}
    best, rest, worst = ranked[:CLASSES_SHOWN], ranked[CLASSES_SHOWN:-CLASSES_SHOWN], ranked[-CLASSES_SHOWN:]
    return {"worst": worst[::-1], "best": best, "rest": rest}


def _describe(run: CertifyRun | AttackRun) -> dict[str, Any]:
    """Return settings, environment and times as pairs of a name and a value."""
    settings = flatten(msgspec.to_builtins(run.summary.settings))
    seconds = {name: value for name, value in msgspec.to_builtins(run.summary.seconds).items() if value is not None}
    return {
        "setting_pairs": [(name, value) for name, value in settings if name != "class_names"],
        "environment_pairs": list(run.summary.environment.items()),
        "seconds": seconds,
    }


def _read_commands(folder: Path, index: int) -> list[str]:
    """Return the commands that a saved case names; none where it cannot be read."""
    try:
        case = json.loads((folder / "refuted" / f"{index:06d}.json").read_bytes())
        return [case[name] for name in ("repeat", "see") if isinstance(case[name], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


# -- several runs ------------------------------------------------------------------------------------------------------


def name_runs(runs: Sequence[CertifyRun] | Sequence[AttackRun]) -> list[str]:
    """Return a different name for every run: its folder's, with the folder above it or a number where needed."""
    paths = [run.folder.resolve() for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    return [
        name if names.count(name) == 1 else f"{name} ({1 + names[:place].count(name)})"
        for place, name in enumerate(names)
    ]


def find_shared_patch(runs: Sequence[CertifyRun]) -> str | None:
    """Return the first patch that every run was measured with, if they are about the same images and labels."""
    if not have_same_images(runs) or len({run.summary.labeled for run in runs}) > 1:
        return None
    shared = (patch for patch in runs[0].summary.settings.patches if all(patch in run.summary.patches for run in runs))
    return next(shared, None)


def have_same_images(runs: Sequence[CertifyRun] | Sequence[AttackRun]) -> bool:
    """Return whether all runs are about the same images; runs of older releases are known by their name and number."""
    known = [run.summary.settings for run in runs]
    return len({each.data_digest or (each.data, each.images) for each in known}) == 1


def compare_settings(runs: Sequence[CertifyRun] | Sequence[AttackRun]) -> dict[str, list[str]]:
    """Return the settings and versions in which the runs are not all alike, one value per run."""
    columns = []
    for run in runs:
        known = {"": msgspec.to_builtins(run.summary.settings), "environment ": run.summary.environment}
        pairs = {name: value for before, values in known.items() for name, value in flatten(values, before)}
        columns.append({name: numbers.setting(value) for name, value in pairs.items()})
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: [_shorten(column.get(name, "not given")) for column in columns] for name in names}
    return {name: row for name, row in rows.items() if len({column.get(name) for column in columns}) > 1}


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"{text[: LONGEST_SETTING - 3]}..."
