"""The sections of one run that show what was measured: headline, table, curve, margins, classes."""

import math
from collections.abc import Sequence

from patchguard.report.charts import (
    Line,
    colour_swatch,
    histogram,
    legend,
    line_chart,
    line_swatch,
    meter,
    stack,
)
from patchguard.report.files import Run
from patchguard.report.markup import Markup, join, tag
from patchguard.report.numbers import SPACE, count, interval, percent, placed, short, size, threat
from patchguard.runs.summary import ClassSummary, Histogram, PatchSummary, Proportion

CLASSES_SHOWN = 10  # of the worst and of the best; with twice as many or fewer classes all are shown
GROUP_LOOKS = {
    "certified": ("certified", "is-certified"),
    "proved": ("proved", "is-certified"),
    "not_certified": ("right, not certified", "is-open"),
    "not_proved": ("not proved", "is-open"),
    "wrong": ("wrong", "is-wrong"),
}
UNLABELLED_LOOKS = GROUP_LOOKS | {"certified": GROUP_LOOKS["proved"], "not_certified": GROUP_LOOKS["not_proved"]}


def harm(run: Run) -> str:
    """Return what a patch is proved unable to do, in the words of a sentence."""
    answer = "the right answer" if run.labeled else "the answer"
    best = run.settings.get("top_k", 1)
    if isinstance(best, int) and best > 1:
        return f"push {answer} out of the {best} best"
    return f"change {answer}{' without raising an alert' if detects(run) else ''}"


def detects(run: Run) -> bool:
    """Return whether the rule only promises the label or an alert."""
    return bool(run.settings["detects"])


def headline(run: Run) -> Markup:
    """Return the result as one sentence for someone who has never heard of certificates."""
    main = run.main
    statement = f"no {threat(run.patch)}{placed(run.settings)} can {harm(run)}"
    if main.total == 0:
        return join("No image could be read, so nothing is certified")
    if main.correct == 0:
        whom = (
            "the one image it is not proved"
            if main.total == 1
            else f"none of {count(main.total, 'image')} is it proved"
        )
        return join("For ", whom, f" that {statement}")
    if main.correct == main.total:
        whom = "the one image" if main.total == 1 else f"all {count(main.total, 'image')}"
        return join("For ", tag("em", whom), " ", statement)
    digits = 0 if 0.01 <= main.rate <= 0.99 else 1
    return join("For ", tag("em", percent(main.rate, digits)), " of images ", statement)


def opening(run: Run) -> Markup:
    """Return the bar and the paragraph below the headline."""
    against = run.patches[run.patch]
    main = run.main
    if main.total == 0:
        return tag("p", f"{count(run.errors, 'image')} got no answer; the reasons are below.", class_="lead")
    found = (
        f"{main.correct:,} of {count(main.total, 'image')} ({interval(main.low, main.high)} with 95{SPACE}% confidence)"
    )
    words = [
        f"{'Right and proved' if run.labeled else 'Proved'} for {found}, whatever the patch shows and wherever in the "
        "picture it lies."
    ]
    if against.clean is not None:
        words.append(f" Without an attack the defended classifier is right on {percent(against.clean.rate)}")
        if run.undefended is not None:
            words.append(f", the same network without the defense on {percent(run.undefended.rate)}")
        words.append(" of the images.")
    parts = _parts(against)
    entries = [(f"{found:,} {name}", colour_swatch(colour)) for name, found, colour in parts]
    bar = stack([(found, colour) for _, found, colour in parts])
    return join(tag("div", bar, legend(entries), class_="verdict"), tag("p", *words, class_="lead"))


def _parts(against: PatchSummary) -> list[tuple[str, int, str]]:
    if against.clean is None or against.certified is None:
        proved = against.proved
        return [("proved", proved.correct, "is-certified"), ("not proved", proved.total - proved.correct, "is-open")]
    certified, clean = against.certified, against.clean
    return [
        ("right and certified", certified.correct, "is-certified"),
        ("right, not certified", max(0, clean.correct - certified.correct), "is-open"),
        ("wrong", clean.total - max(clean.correct, certified.correct), "is-wrong"),
    ]


# -- table -------------------------------------------------------------------------------------------------------------


def table(run: Run) -> Markup:
    """Return every measured share with its interval, first without an attack, then per patch."""
    bodies = []
    if run.labeled:
        rows = [row("Undefended network", run.undefended, "is-plain")] if run.undefended else []
        seen: set[tuple[str, Proportion]] = set()
        for name, against in run.patches.items():
            masks = "own masks" if against.masks == "own" else f"masks refitted to {size(name)}"
            if against.clean is not None and (masks, against.clean) not in seen:
                seen.add((masks, against.clean))
                rows.append(row(f"Defended, {masks}", against.clean, "is-clean"))
        bodies.append(body("Right without an attack (clean accuracy)", rows))
    for name, against in run.patches.items():
        rows = [row("Certified accuracy: right, and proved to stay", against.certified, "is-certified")]
        if against.certified is None:
            rows.append(row("Label proved to stay", against.proved, "is-certified"))
        else:
            rows.append(row("Proved to stay, right or wrong", against.proved, "is-proved"))
        refitted = "" if against.masks == "own" else ", masks refitted to it"
        bodies.append(body(f"PatchSummary any {threat(name)}{refitted}", rows))
    return shares(bodies)


def shares(bodies: Sequence[Markup]) -> Markup:
    """Return the table of shares."""
    head = ("What is measured", "Share", f"95{SPACE}% interval", "Images")
    cells = (tag("th", words, scope="col") for words in head)
    return tag("table", tag("thead", tag("tr", *cells)), *bodies, class_="shares")


def body(title: str, rows: Sequence[Markup | None]) -> Markup:
    """Return rows of the table of shares below their title."""
    heading = tag("tr", tag("th", title, colspan=4, scope="rowgroup"), class_="group")
    return tag("tbody", heading, *rows)


def row(name: str, share: Proportion | None, colour: str) -> Markup | None:
    """Return one share with its interval."""
    if share is None:
        return None
    return tag(
        "tr",
        tag("th", name, meter(share, colour), scope="row"),
        tag("td", percent(share.rate), class_="strong"),
        tag("td", interval(share.low, share.high)),
        tag("td", f"{share.correct:,} of {share.total:,}"),
    )


# -- curve -------------------------------------------------------------------------------------------------------------


def curve(run: Run) -> Markup | None:
    """Return certified accuracy against patch size, with masks kept and refitted."""
    lines = [
        Line("masks kept", run.kept, 0),
        Line("masks refitted to each size", run.refitted, 1),
        Line("masks refitted, without an attack", run.refitted_clean, 2, dashed=True),
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    level = Line("undefended network, without an attack", {0: run.undefended}, 3) if run.undefended else None
    about = f"{run.measure.capitalize()} against the side of a square patch; the same numbers are in the table below."
    x_title = f"side of a square patch, {run.pixels}"
    drawn = line_chart(lines, about=about, x_title=x_title, level=level, bands=True)
    entries = [(line.name, line_swatch(line)) for line in lines]
    if level is not None:
        entries.append((level.name, line_swatch(level, marked=False)))
    note = (
        "Masks kept: the classifier as it is; sizes that its masks do not cover count as not certified. Refitted: "
        "another classifier for each size, whose labels may differ. Bands are 95 % intervals."
    )
    numbers = curve_table([(line.name, line.points) for line in lines])
    heading = tag("h3", f"{run.measure.capitalize()} by patch size")
    return tag("figure", heading, drawn, legend(entries), tag("figcaption", note), numbers, class_="plot")


def curve_table(lines: Sequence[tuple[str, dict[int, Proportion]]]) -> Markup:
    """Return the numbers of curves, one row per side."""
    sides = sorted({side for _, points in lines for side in points})
    rows = []
    for side in sides:
        cells = []
        for _, points in lines:
            share = points.get(side)
            small = (
                tag("small", interval(share.low, share.high), tag("br"), f"{share.correct:,} of {share.total:,}")
                if share
                else ""
            )
            cells.append(tag("td", percent(share.rate), small) if share else tag("td", "not measured"))
        rows.append(tag("tr", tag("th", str(side), scope="row"), *cells))
    return numbers_folded(["Side", *(name for name, _ in lines)], rows)


def numbers_folded(head: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """Return the table behind a chart, folded until it is wanted."""
    shown = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", words, scope="col") for words in head))),
        tag("tbody", *rows),
    )
    held = scroll(shown, "Numbers of the chart")
    return tag("details", tag("summary", "The numbers"), held, class_="numbers")


def scroll(content: Markup, about: str) -> Markup:
    """Return content that scrolls by itself where the page is too narrow for it; keys reach it, too."""
    return tag("div", content, class_="scroll", role="region", aria_label=about, tabindex=0)


# -- margins -----------------------------------------------------------------------------------------------------------


def margins(run: Run) -> list[Markup]:
    """Return one histogram per patch."""
    return [_margins(run, patch, found) for patch, found in run.margins.items() if any(map(any, found.groups.values()))]


def _margins(run: Run, patch: str, found: Histogram) -> Markup:
    looks = GROUP_LOOKS if run.labeled else UNLABELLED_LOOKS
    shown = {group: counts for group, counts in found.groups.items() if run.labeled or group != "wrong" or any(counts)}
    heading = tag("h3", f"Margins against a {threat(patch)}")
    entries = [(looks[group][0], colour_swatch(looks[group][1])) for group in shown]
    drawn = None
    if all(map(math.isfinite, found.edges)):
        about = f"Number of images by margin against a {threat(patch)}; the same numbers are in the table below."
        drawn = histogram(found.edges, shown, about=about, x_title="margin, in units of evidence", looks=looks)
    note = "How much evidence the label keeps over its closest rival under the worst attack. Above zero it stays."
    rows = [
        tag(
            "tr",
            tag("th", f"{short(found.edges[place])} to {short(found.edges[place + 1])}", scope="row"),
            *(tag("td", f"{counts[place]:,}") for counts in shown.values()),
        )
        for place in range(len(found.edges) - 1)
    ]
    numbers = numbers_folded(["Margin", *(looks[group][0] for group in shown)], rows)
    return tag("figure", heading, drawn, legend(entries), tag("figcaption", note), numbers, class_="plot")


# -- classes -----------------------------------------------------------------------------------------------------------


def classes(run: Run) -> Markup | None:
    """Return the table of classes, best first; of many classes the worst and the best, the others folded."""
    if not run.classes:
        return None
    filled = [each for each in run.classes if each.total]
    rank = {each.name: (-each.certified.get(run.patch, 0) / each.total, -each.clean / each.total) for each in filled}
    ordered = sorted(filled, key=lambda each: (rank[each.name], each.name))
    empty = [each.name for each in run.classes if not each.total]
    parts: list[Markup] = []
    if len(ordered) <= 2 * CLASSES_SHOWN:
        parts.append(_class_table(run, ordered, "All classes, best first"))
    else:
        best, worst = ordered[:CLASSES_SHOWN], ordered[-CLASSES_SHOWN:]
        rest = ordered[CLASSES_SHOWN:-CLASSES_SHOWN]
        parts += [_class_table(run, worst[::-1], f"The {CLASSES_SHOWN} worst")]
        parts += [_class_table(run, best, f"The {CLASSES_SHOWN} best")]
        others = tag("summary", f"The other {count(len(rest), 'class', 'classes')}")
        parts.append(tag("details", others, _class_table(run, rest, "The others, best first"), class_="many"))
    if empty:
        summary = tag("summary", f"{count(len(empty), 'class', 'classes')} without images")
        parts.append(tag("details", summary, tag("p", ", ".join(empty), class_="soft"), class_="many"))
    key = legend([(name, colour_swatch(colour)) for name, colour in _class_looks(run)])
    return join(key, *parts)


def _class_looks(run: Run) -> list[tuple[str, str]]:
    return [
        (f"certified against a {threat(run.patch)}", "is-certified"),
        ("right, not certified", "is-open"),
        ("wrong", "is-wrong"),
    ]


def _class_table(run: Run, members: Sequence[ClassSummary], title: str) -> Markup:
    heads = ["Class", "", "Images", "Right", *(f"Certified {size(patch)}" for patch in run.patches)]
    cells = (tag("th", words, scope="col", class_="bars" if not words else None) for words in heads)
    rows = [_class_row(run, each) for each in members]
    shown = tag("table", tag("caption", title), tag("thead", tag("tr", *cells)), tag("tbody", *rows), class_="classes")
    return scroll(shown, title)


def _class_row(run: Run, each: ClassSummary) -> Markup:
    certified = each.certified.get(run.patch, 0)
    bar = stack(
        [
            (certified, "is-certified"),
            (max(0, each.clean - certified), "is-open"),
            (max(0, each.total - max(each.clean, certified)), "is-wrong"),
        ]
    )
    found = [each.clean, *(each.certified.get(patch, 0) for patch in run.patches)]
    return tag(
        "tr",
        tag("th", each.name, scope="row"),
        tag("td", bar, class_="bars"),
        tag("td", f"{each.total:,}"),
        *(tag("td", percent(number / each.total, 0), tag("small", f"{number:,}")) for number in found),
    )
