"""The sections that are text: what a certificate proves, how to check one, settings, images without an answer."""

import shlex
from collections.abc import Mapping
from typing import Any

from patchguard.report.attack_files import AttackRun
from patchguard.report.files import Run
from patchguard.report.markup import Markup, join, prose, tag
from patchguard.report.numbers import count, percent, short, size
from patchguard.report.results import detects, harm

ENVIRONMENT_WORDS = {"cpu_count": "processors", "gpu": "GPU", "cuda": "CUDA", "cudnn": "cuDNN", "torch": "PyTorch"}
SETTING_WORDS = {"top_k": "best answers counted", "model_digest": "model digest (SHA-256)", "class_names": "classes"}
SECONDS_WORDS = {
    "total": "seconds in all",
    "network": "seconds in the network",
    "images_per_second": "images per second",
}


LABEL_STAYS = "It says that the label stays. "
COUNTED = "Certified accuracy counts labels that are right and stay."
NOT_COUNTED = "No true labels were given here, so nothing on this page says how many are right."
NOT_PROVED = (
    (
        "Not that an image was clean.",
        "A certificate is about the image it was computed on. A picture met in the wild may already carry a patch; the "
        "certificate then speaks about what a further patch could do.",
    ),
    (
        "Not other attacks.",
        "Larger patches, several patches, changes spread over the whole picture, and a turned or moved scene are not "
        "covered.",
    ),
    (
        "Not other images.",
        "The intervals tell how well this sample speaks for images drawn like it, not for others.",
    ),
    (
        "Not without an assumption.",
        "It rests on the field: that a cell of the network reads no pixel outside its box. The field is derived from "
        "the network's graph; `patchguard audit` tests it on your device.",
    ),
)


PLACED = {
    "source pixels": "The patch is measured in the pixels of the image as it came, before any resizing or cropping.",
    "network pixels": "The patch is placed after resizing, cropping and rounding to 8 bits, as in the paper's tables. "
    "A patch on the image as it came may reach more; nothing is proved about that.",
}


def proof(run: Run) -> Markup:
    """Return what the numbers prove, and what they do not."""
    sizes = " or ".join(
        f"{size(patch)}{' of its area' if patch.endswith('%') else ' ' + run.pixels}" for patch in run.patches
    )
    drift = run.settings.get("evidence drift", 0)
    yes = [
        f"For each certified image: no single rectangle of {sizes}, wherever in the picture it lies and whatever it "
        f"shows, can {harm(run)}. This is a theorem about the computation, not the outcome of attacks that were tried.",
        "A smaller patch lies inside a larger one, so the same image is safe from smaller patches, too.",
        PLACED[run.pixels],
    ]
    no = [*NOT_PROVED]
    no.insert(1, ("Not that a label is right.", LABEL_STAYS + (COUNTED if run.labeled else NOT_COUNTED)))
    no.append(
        (
            "Not other computations.",
            "It holds for these weights, this preprocessing and this rule, with the network in evaluation mode, and "
            f"for runs whose unattacked cells differ by at most {written(drift)}, the drift that is charged here"
            f"{'.' if drift else ': they must give equal numbers there.'}",
        )
    )
    if detects(run):
        no.insert(
            0, ("Not that the label stays.", "This rule promises the label or an alert; an attacker may cause alerts.")
        )
    if any(against.masks != "own" for against in run.patches.values()):
        about = "Where masks were refitted to a patch, the proof is about the classifier with those masks."
        no.append(("Not one classifier for all.", f"{about} Its labels may differ."))
    return tag(
        "div",
        tag(
            "div", tag("h3", "It proves"), tag("ul", *(tag("li", prose(words)) for words in yes)), class_="panel is-yes"
        ),
        tag(
            "div",
            tag("h3", "It does not prove"),
            tag("ul", *(tag("li", tag("b", first), " ", prose(rest)) for first, rest in no)),
            class_="panel is-no",
        ),
        class_="columns",
    )


def check(run: Run) -> Markup:
    """Return how someone else checks a certificate of this run."""
    model = shlex.quote(str(run.settings.get("model", "MODEL")))
    steps = [
        (
            "The proof alone.",
            "Label, windows and margin are recomputed from the file with whole numbers, by one short program that "
            "needs only Python and numpy:",
            "patchguard verify FILE.pgc\npython verify.py FILE.pgc",
        ),
        (
            "The proof, the model and the image.",
            "The field and the evidence are computed anew, and every digest is compared:",
            f"patchguard verify FILE.pgc --model {model} --image IMAGE",
        ),
        (
            "The field itself.",
            "Patches are changed on your device, and no cell outside their reach may move:",
            f"patchguard audit --model {model}",
        ),
    ]
    written = run.settings.get("certificates")
    first = (
        "This run wrote one certificate file (.pgc) per image. Nobody has to trust this page:"
        if written
        else "This run wrote no certificate files. Run it again with `--certificates DIR` to get one (.pgc) per image, "
        "which others can check without trusting this page:"
    )
    items = (
        tag("li", tag("b", title), " ", words, tag("pre", tag("code", Markup(_lines(code)))))
        for title, words, code in steps
    )
    return join(tag("p", prose(first)), tag("ol", *items, class_="steps"))


def _lines(code: str) -> str:
    """Return commands one per line; `escape` would replace the ends of lines."""
    return "\n".join(join(line) for line in code.split("\n"))


def failures(run: Run | AttackRun) -> Markup | None:
    """Return how many images could not be read or do not hold the patch, and the first of them."""
    if not run.errors:
        return None
    first = f"{count(run.errors, 'image')} of {run.images:,} got no answer and {'is' if run.errors == 1 else 'are'} "
    words = tag("p", tag("b", first, "not counted in any share."))
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", reason)) for name, reason in run.failures]
    if not rows:
        return words
    more = run.errors - len(rows)
    head = tag("thead", tag("tr", tag("th", "Image", scope="col"), tag("th", "Reason", scope="col")))
    return join(
        words,
        tag("table", head, tag("tbody", *rows), class_="plain"),
        tag("p", f"and {more:,} more, listed in the records of the run", class_="soft") if more else None,
    )


def settings(run: Run | AttackRun) -> Markup:
    """Return every setting, the environment and the times."""
    shown = [
        (SETTING_WORDS.get(name, _words(name)), value)
        for name, value in flattened(run.settings)
        if name != "class_names"
    ]
    names = run.settings.get("class_names") or []
    listed = None
    if names:
        summary = tag("summary", f"Names of the {count(len(names), 'class', 'classes')}")
        listed = tag("details", summary, tag("p", ", ".join(map(str, names)), class_="soft"), class_="many")
    environment = [(ENVIRONMENT_WORDS.get(key, _words(key)), value) for key, value in run.environment.items()]
    times = [(SECONDS_WORDS.get(key, _words(key)), short(value)) for key, value in run.seconds.items()]
    total, network = run.seconds.get("total"), run.seconds.get("network")
    if total and network:
        times.append(("share of the network", percent(min(1.0, network / total), 0)))
    return join(
        tag(
            "div",
            tag("div", tag("h3", "Settings"), _pairs(shown)),
            tag("div", tag("h3", "Environment"), _pairs(environment), tag("h3", "Time"), _pairs(times)),
            class_="columns",
        ),
        listed,
    )


def flattened(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return settings as names and text; those of an inner object get its name in front."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += flattened(value, f"{before}{key} ")
        else:
            found.append((f"{before}{key}", written(value)))
    return found


def written(value: object) -> str:
    """Return a JSON value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(written, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _pairs(pairs: list[tuple[str, Any]]) -> Markup | None:
    if not pairs:
        return None
    rows = (tag("tr", tag("th", name, scope="row"), tag("td", written(value))) for name, value in pairs)
    return tag("table", tag("tbody", *rows), class_="plain")


def limits() -> Markup:
    """Return the note of a comparison; the report of a single run says it in full."""
    return tag(
        "p",
        prose(
            "A certified image is one whose right label no such patch can change, wherever it lies and whatever it "
            "shows. This says nothing about images that already carried a patch, larger patches, or wrong labels. "
            "`patchguard report DIR` with one folder says in full what its run proves and what it does not."
        ),
    )
