"""The sections of an attack: what was broken, what is proved, what lies between, and pictures before and after."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from patchguard.report.attack_files import AttackPicture, AttackRun
from patchguard.report.cards import SMOOTH_FROM, heat, png, rectangle, strongest
from patchguard.report.charts import colour_swatch, legend, stack
from patchguard.report.comparison import cell, names
from patchguard.report.markup import Markup, join, prose, tag
from patchguard.report.numbers import SPACE, count, interval, percent, placed, short, threat
from patchguard.report.results import body, row, scroll, shares

REFUTED_SHOWN = 3
ARROW = "\u2192"
GROUPS = {
    "refuted": ("Proved, but broken", "is-wrong", "The proof, the field or the attack is wrong. This must not happen."),
    "broken": ("Not certified, and broken", "is-wrong", "No proof was given, and this attack took the label."),
    "withstood": ("Certified, and it held", "is-certified", "It is proved that no such patch takes the label."),
    "open": ("Neither proved nor broken", "is-open", "This attack failed. Another one may succeed: nothing is proved."),
}
ALERTED = (
    "It is proved that no such patch takes the label without an alert."  # in place of "withstood" where rules detect
)
NOT_PROVED = (
    (
        "Not that no attack exists.",
        "An attack that fails says only that this search, with this budget and seed, found nothing. More steps, other "
        "places or a better objective may. Defenses have often fallen to an attack that came later.",
    ),
    (
        "Not robustness.",
        "The share that is right under the attack is at best an upper bound: no more images than these are safe. Only "
        "the certified share is a lower bound that no attack can pass.",
    ),
    (
        "Not other patches.",
        "Other sizes, several patches and changes elsewhere were not tried.",
    ),
    (
        "Not a print.",
        "The pixels were set exactly. A patch that is printed and photographed is changed on the way, and may do less.",
    ),
)


def headline(run: AttackRun) -> Markup:
    """Return the result as one sentence."""
    if run.attacked is None or run.certified is None:
        return join("No image could be read, so nothing was attacked")
    if run.refuted:
        found = count(len(run.refuted), "certified image")
        return join(tag("em", found, class_="alarm"), f" {'was' if len(run.refuted) == 1 else 'were'} broken")
    stays = "stay right" if run.labeled else "stay"
    promise = " are proved to, or to raise an alert," if run.detects else " are proved to,"
    proved = join(", and ", tag("em", percent(run.certified.rate)), f"{promise} whatever the attack")
    return join(
        f"Under this attack {percent(run.attacked.rate)} of the answers {stays}",
        proved if run.certifies else "; nothing is proved",
    )


def opening(run: AttackRun) -> Markup:
    """Return the bar and the paragraph below the headline."""
    if run.clean is None or run.attacked is None or run.certified is None:
        return tag("p", f"{count(run.errors, 'image')} got no answer; the reasons are below.", class_="lead")
    held = min(run.certified.correct, run.attacked.correct)
    parts = [
        ("proved, and held" if run.certifies else "proved", held, "is-certified"),
        ("neither proved nor broken", run.attacked.correct - held, "is-open"),
        ("broken by the attack", max(0, run.clean.correct - run.attacked.correct), "is-wrong"),
        ("wrong without an attack", run.clean.total - run.clean.correct, "is-plain"),
    ]
    parts = [part for part in parts if part[1] or part[2] != "is-plain"]
    patch = f"{threat(run.patch)}{placed(run.settings)}"
    words = [f"A {patch} was placed and painted by the attack {run.settings['attack']}"]
    aim = run.settings.get("aim")
    words.append(f", aiming at the answer {run.class_name(aim)}. " if isinstance(aim, int) else ". ")
    if run.broken is not None:
        sure = f"{interval(run.broken.low, run.broken.high)} with 95{SPACE}% confidence"
        verb = "was" if run.broken.total == 1 else "were"
        words.append(
            f"Of {count(run.broken.total, 'image')} that {verb} {'right' if run.labeled else 'answered'} without a "
            f"proof, it broke {run.broken.correct:,} ({percent(run.broken.rate)}, {sure}). "
        )
    if run.certified_broken is not None:
        found = f"{run.certified_broken.correct:,}" if run.certified_broken.correct else "none"
        words.append(f"Of {count(run.certified_broken.total, 'certified image')} it broke {found}.")
    entries = [(f"{found:,} {name}", colour_swatch(colour)) for name, found, colour in parts]
    bar = stack([(found, colour) for _, found, colour in parts])
    return join(tag("div", bar, legend(entries), class_="verdict"), tag("p", *words, class_="lead"))


def refuted(run: AttackRun) -> Markup | None:
    """Return which certificates fell, where their files are, and how to repeat it."""
    if not run.refuted:
        return None
    items = []
    for index in run.refuted[:REFUTED_SHOWN]:
        lines = _commands(run.folder / "refuted" / f"{index:06d}.json")
        code = tag("pre", tag("code", Markup("\n".join(join(line) for line in lines)))) if lines else None
        items.append(tag("li", tag("b", f"Image {index}. "), prose(f"Files `refuted/{index:06d}*`."), code))
    more = len(run.refuted) - len(items)
    return join(
        tag(
            "p",
            "A certified label must not change. Either a certificate or the field it rests on is wrong, or the attack "
            "changed more than a patch. Both images, the evidence before and after, and the seed were kept.",
        ),
        tag("ul", *items, class_="steps"),
        tag("p", f"and {more:,} more in the folder refuted", class_="soft") if more else None,
    )


def _commands(path: Path) -> list[str]:
    """Return the commands that a saved case names; none where it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
        return [found[name] for name in ("repeat", "see") if isinstance(found[name], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def table(run: AttackRun) -> Markup:
    """Return every measured share with its interval."""
    right = "right" if run.labeled else "the label stays"
    bodies = []
    if run.labeled:
        bodies.append(body("Without an attack", [row("Clean accuracy: right", run.clean, "is-clean")]))
    under = [row(f"Attacked accuracy: still {right}" if run.labeled else "Label unchanged", run.attacked, "is-open")]
    if run.aimed is not None:
        under.append(row(f"Answered {run.class_name(run.settings['aim'])}, the aim", run.aimed, "is-wrong"))
    if run.detects:
        under.append(row("Attacked images that raise an alert", run.alerts, "is-proved"))
    bodies.append(body(f"Under this attack with a {threat(run.patch)}", under))
    certified = "Certified accuracy: right, and proved to stay" if run.labeled else "Label proved to stay"
    either = " (or an alert)" if run.detects else ""
    masks = "" if run.masks == "own" else ", masks refitted to it"
    bodies.append(
        body(f"PatchSummary any {threat(run.patch)}{masks}", [row(certified + either, run.certified, "is-certified")])
    )
    gap = row("Really broken, of those right but not proved", run.broken, "is-wrong")
    bodies.append(body("The gap between proof and attack", [gap, _fallen(run)]))
    return shares(bodies)


def _fallen(run: AttackRun) -> Markup | None:
    """Return how many certified labels were changed, of those that were attacked."""
    if run.certified_broken is None:
        return None
    name, found = (
        "Certified labels that were changed",
        f"{run.certified_broken.correct:,} of {run.certified_broken.total:,}",
    )
    cells = (tag("td", f"{run.certified_broken.correct:,}", class_="strong"), tag("td", "must be 0"), tag("td", found))
    return tag("tr", tag("th", name, scope="row"), *cells)


# -- pictures ----------------------------------------------------------------------------------------------------------


def gallery(run: AttackRun, pictures: Sequence[AttackPicture]) -> Markup:
    """Return the section with all cards; whose evidence lies over the pictures is chosen without scripts."""
    if not pictures:
        return tag("p", "This run kept no pictures.")
    sections = []
    for group, (name, colour, meaning) in GROUPS.items():
        members = [picture for picture in pictures if picture.group == group]
        if members:
            sections.append(tag("h3", tag("span", class_=f"dot {colour}"), name))
            only = group == "withstood" and run.detects
            sections.append(tag("p", ALERTED if only else meaning, class_="soft"))
            sections.append(tag("div", *(_card(run, each, colour) for each in members), class_="cards pairs"))
    choices = [("overlay-label", "Evidence for the label", True), ("overlay-rival", "for the other class", False)]
    parts: list[Markup] = []
    for identity, words, chosen in choices:
        parts.append(tag("input", type="radio", name="overlay", id=identity, checked=chosen, class_="choice"))
        parts.append(tag("label", words, for_=identity, class_="choice-label"))
    introduction = tag(
        "p",
        "A random draw of attacked images: left before, right after. Below, colour shows how strongly each cell of "
        "the network speaks for the label (warm) or against it (cool), on one scale per card. The white box is "
        "the patch. The other class is the one that won, or the closest rival of the proof.",
    )
    return join(introduction, *parts, tag("div", *sections, class_="shown"))


def _card(run: AttackRun, picture: AttackPicture, colour: str) -> Markup:
    scale = strongest(picture.before, picture.after, picture.other_before, picture.other_after)
    box = _box(picture)
    label, after = run.class_name(picture.label), run.class_name(picture.attacked)
    panels = [
        _panel(picture, picture.original, None, None, f"Image {picture.index} before: {label}."),
        _panel(picture, picture.changed, None, box, f"Image {picture.index} attacked: {after}."),
        _panel(picture, picture.original, [picture.before, picture.other_before], None, "Evidence before.", scale),
        _panel(picture, picture.changed, [picture.after, picture.other_after], box, "Evidence after.", scale),
    ]
    height, width = picture.size
    frame = f"width:{min(100.0, 125 * width / height):.1f}%"
    grid = tag("div", *panels, class_="quartet", style=frame)
    return tag("figure", grid, _caption(run, picture, label, after), class_=f"card {colour}")


def _panel(
    picture: AttackPicture,
    pixels: npt.NDArray[np.uint8],
    maps: Sequence[npt.NDArray[np.float32]] | None,
    box: Markup | None,
    about: str,
    scale: float = 1.0,
) -> Markup:
    height, width = picture.size
    small = "pixelated" if max(pixels.shape) < SMOOTH_FROM else None
    shown = [tag("img", src=png(pixels), alt=about, class_=small)]
    for name, values in zip(("of-label", "of-rival"), maps or (), strict=False):
        shown.append(tag("img", src=png(heat(values, scale)), alt="", class_=f"heat {name}"))
    look = "picture" if maps else "picture bare"
    return tag("div", *shown, box, class_=look, style=f"aspect-ratio:{width}/{height}")


def _box(picture: AttackPicture) -> Markup:
    """Return the rectangles of the patch."""
    height, width = picture.size
    tall, wide = picture.patch
    parts = [rectangle(left, top, wide, tall, "place") for top, left in picture.places]
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", aria_hidden="true")


def _caption(run: AttackRun, picture: AttackPicture, label: str, after: str) -> Markup:
    changed = picture.label != picture.attacked
    title = f"{label} {ARROW} {after}" if changed else f"{label} stays"
    truth = None
    if picture.target is not None and picture.target != picture.label:
        truth = tag("span", f"truth: {run.class_name(picture.target)}", class_="truth")
    margin = [f"margin{SPACE}", tag("b", short(picture.margin)), " \u00b7 "] if run.certifies else []
    other = [] if changed else ["other class ", tag("b", run.class_name(picture.other)), " \u00b7 "]
    places = "; ".join(f"row{SPACE}{top}, column{SPACE}{left}" for top, left in picture.places)
    facts = tag("span", *margin, *other, f"patch at {places}", class_="facts")
    alert = tag("span", "raises an alert") if picture.alert else None
    return tag(
        "figcaption",
        tag("strong", title),
        truth,
        alert,
        facts,
        tag("span", f"#{picture.index} {picture.name}", class_="file"),
    )


# -- words -------------------------------------------------------------------------------------------------------------


def meaning(run: AttackRun) -> Markup:
    """Return what a success shows, and what a failure does not."""
    yes = [
        "For each broken image: the picture that breaks it. It differs from the original only inside the patch, was "
        "rounded to 8 bits and judged anew by the defended classifier.",
        "For each certified image: that this attack, too, found nothing. The proof did not need it; a success would "
        "have shown a mistake in the proof, in the field of the network or in this program, and ends the run with exit "
        "status 3.",
        "For the images between: how far proof and attack are apart. A better proof or attack may settle them.",
    ]
    no = [*NOT_PROVED]
    if run.detects:
        no.append(
            ("Not that the label stays.", "This rule promises the label or an alert; an alert is no success here.")
        )
    if run.masks != "own":
        no.append(("Not the model's own masks.", "They were refitted to this patch: another classifier was attacked."))
    return tag(
        "div",
        tag("div", tag("h3", "It shows"), tag("ul", *(tag("li", words) for words in yes)), class_="panel is-yes"),
        tag(
            "div",
            tag("h3", "It does not prove"),
            tag("ul", *(tag("li", tag("b", first), " ", rest) for first, rest in no)),
            class_="panel is-no",
        ),
        class_="columns",
    )


def limits() -> Markup:
    """Return the note of a comparison."""
    return tag(
        "p",
        "What stays right under an attack is an upper bound of what is safe, and as good as the attack. What is "
        "certified is a lower bound that no attack can pass. Compare runs of the same images, patch and budget only.",
        class_="lead",
    )


# -- several attacks ---------------------------------------------------------------------------------------------------


def compared_headline(runs: Sequence[AttackRun]) -> Markup:
    """Return whether any certificate fell."""
    fallen = sum(len(run.refuted) for run in runs)
    if fallen:
        return join(tag("em", count(fallen, "certified image"), class_="alarm"), f" broken in {len(runs)} attacks")
    return join(f"{len(runs)} attacks compared: ", tag("em", "no certified image"), " was broken")


def compared(runs: Sequence[AttackRun]) -> Markup:
    """Return one row per attack: clean, attacked, certified, really broken."""
    heads = ["Run", "Clean", "Under the attack", "Certified", "Broken, of right but not proved", "Refuted"]
    rows = []
    for name, run in zip(names(runs), runs, strict=True):
        words = [str(run.settings[key]) for key in ("model", "defense", "attack", "data")]
        about = tag("small", ", ".join(words), tag("br"), f"{threat(run.patch)}, {count(run.images, 'image')}")
        looks = (
            (run.clean, "is-clean"),
            (run.attacked, "is-open"),
            (run.certified, "is-certified"),
            (run.broken, "is-wrong"),
        )
        fallen = tag("td", tag("b", f"{len(run.refuted):,}"))
        rows.append(tag("tr", tag("th", tag("b", name), about, scope="row"), *(cell(*look) for look in looks), fallen))
    head = tag("thead", tag("tr", *(tag("th", words, scope="col") for words in heads)))
    return scroll(tag("table", head, tag("tbody", *rows), class_="runs"), "One row per attack")
