"""The page of several runs: one row each, curves overlaid, and the settings in which they differ."""

from collections.abc import Sequence

from patchguard.report.attack_files import AttackRun
from patchguard.report.charts import COLOURS, Line, legend, line_chart, line_swatch, meter
from patchguard.report.files import Run
from patchguard.report.markup import Markup, join, tag
from patchguard.report.notes import flattened
from patchguard.report.numbers import count, interval, percent, threat
from patchguard.report.results import curve_table, scroll
from patchguard.runs.summary import Proportion

KEPT, REFITTED = "Masks kept", "Masks refitted to each size"
NOTES = {
    KEPT: "The classifiers as they are; sizes that their masks do not cover count as not certified.",
    REFITTED: "Another classifier for each size, whose labels may differ.",
}


def names(runs: Sequence[Run | AttackRun]) -> list[str]:
    """Return a different name for every run: its folder's, with the folder above it or a number where needed."""
    places = [run.folder.resolve() for run in runs]
    found = [place.name for place in places]
    if len(set(found)) < len(found):
        found = [f"{place.parent.name}/{place.name}" for place in places]
    return [
        name if found.count(name) == 1 else f"{name} ({1 + found[:place].count(name)})"
        for place, name in enumerate(found)
    ]


def shared_patch(runs: Sequence[Run]) -> str | None:
    """Return the first patch that every run was measured with, if all of them are labeled or none is."""
    if len({run.labeled for run in runs}) > 1:
        return None
    return next((patch for patch in runs[0].patches if all(patch in run.patches for run in runs)), None)


def headline(runs: Sequence[Run]) -> Markup:
    """Return who proves most, where that can be said."""
    patch = shared_patch(runs)
    if patch is None:
        return join(f"{len(runs)} runs compared")
    called = names(runs)
    ranked = sorted(zip(called, (run.patches[patch].main for run in runs), strict=True), key=lambda pair: -pair[1].rate)
    (best, most), (second, next_most) = ranked[:2]
    if most.rate == next_most.rate:
        return join(f"{best} and {second} are level against any {threat(patch)}: ", tag("em", percent(most.rate)))
    verb = "certifies" if runs[0].labeled else "proves"
    return join(
        f"{best} {verb} most against any {threat(patch)}: ",
        tag("em", percent(most.rate)),
        f", then {second} with {percent(next_most.rate)}",
    )


def opening(runs: Sequence[Run]) -> Markup:
    """Return what a reader must know before comparing."""
    words = []
    if len({(run.settings.get("data"), run.images) for run in runs}) > 1:
        words.append("These runs are not about the same images, so differences may come from the data. ")
    patch = shared_patch(runs)
    if patch is None:
        words.append(
            "They have no patch in common, or only some of them know the true labels, so they are not ranked. "
        )
    else:
        ranked = sorted((run.patches[patch].main for run in runs), key=lambda share: -share.rate)
        if ranked[0].rate - ranked[1].rate > 0 and ranked[1].high >= ranked[0].low:
            words.append("The 95 % intervals of the first two overlap: the difference may be chance. ")
    total = sum(run.errors for run in runs)
    if total:
        words.append(f"{count(total, 'image')} got no answer; each run leaves its own out. ")
    return tag("p", *words, class_="lead") if words else join()


def table(runs: Sequence[Run]) -> Markup:
    """Return one row per run with every patch that any of them was measured with."""
    patches = list(dict.fromkeys(patch for run in runs for patch in run.patches))
    labeled = any(run.labeled for run in runs)
    heads = ["Run", *(f"{'Certified' if labeled else 'Proved'}: {threat(patch)}" for patch in patches)]
    heads += ["Defended, clean", "Undefended, clean"] if labeled else []
    rows = []
    for name, run in zip(names(runs), runs, strict=True):
        about = ", ".join(str(run.settings.get(key, "?")) for key in ("model", "defense", "data"))
        cells = []
        for patch in patches:
            against = run.patches.get(patch)
            note = ", masks refitted" if against and against.masks != "own" else ""
            note += ", right or wrong" if against and labeled and not run.labeled else ""
            cells.append(cell(against.main if against else None, "is-certified", note))
        if labeled:
            clean = run.patches[run.patch].clean
            cells += [cell(clean, "is-clean"), cell(run.undefended, "is-plain")]
        details = tag("small", about, tag("br"), count(run.images, "image"))
        rows.append(tag("tr", tag("th", tag("b", name), details, scope="row"), *cells))
    head = tag("thead", tag("tr", *(tag("th", words, scope="col") for words in heads)))
    return scroll(tag("table", head, tag("tbody", *rows), class_="runs"), "One row per run")


def cell(share: Proportion | None, colour: str, note: str = "") -> Markup:
    """Return one share of one run."""
    if share is None:
        return tag("td", "not measured", class_="soft")
    small = tag("small", interval(share.low, share.high), tag("br"), f"{share.correct:,} of {share.total:,}{note}")
    return tag("td", tag("b", percent(share.rate)), meter(share, colour), small)


def curves(runs: Sequence[Run]) -> Markup | None:
    """Return two charts: masks kept and masks refitted, every run in its own colour."""
    called = names(runs)
    figures = []
    for title, points in (
        (KEPT, [run.kept for run in runs]),
        (REFITTED, [run.refitted for run in runs]),
    ):
        lines = [
            Line(name, each, place % COLOURS, dashed=place >= COLOURS)
            for place, (name, each) in enumerate(zip(called, points, strict=True))
            if each
        ]
        if lines:
            about = f"{title}: certified share against the side of a square patch, one curve per run; table below."
            x_title = f"side of a square patch, {runs[0].pixels}"
            drawn = line_chart(lines, about=about, x_title=x_title, bands=len(lines) <= 2)
            swatches = legend([(line.name, line_swatch(line)) for line in lines])
            numbers = curve_table([(line.name, line.points) for line in lines])
            note = tag("figcaption", NOTES[title])
            figures.append(tag("figure", tag("h3", title), drawn, swatches, note, numbers, class_="plot"))
    return tag("div", *figures, class_="columns") if figures else None


def differences(runs: Sequence[Run | AttackRun]) -> Markup:
    """Return the settings and versions in which the runs are not all alike."""
    found = [dict(flattened(run.settings)) | dict(flattened(run.environment, "environment ")) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in found for key in each) if len({e.get(key) for e in found}) > 1]
    if not keys:
        return tag("p", "All settings and versions are the same.")
    head = tag("thead", tag("tr", *(tag("th", words, scope="col") for words in ("Setting", *names(runs)))))
    rows = []
    for key in keys:
        cells = (tag("td", _shortened(each.get(key, "not given"))) for each in found)
        rows.append(tag("tr", tag("th", key.replace("_", " "), scope="row"), *cells))
    return scroll(tag("table", head, tag("tbody", *rows), class_="plain"), "Settings that differ")


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
