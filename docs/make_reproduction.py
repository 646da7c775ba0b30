"""Write docs/reproduction.md from results/reproduction: python docs/make_reproduction.py (make docs). A test compares.

A run becomes a published one by copying its result.json to results/reproduction/<name>-<data>.json, pictures beside it
as <name>-<data>-<picture>.png; not the picture of `occlusion`, which shows images of the dataset.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchguard.paper import EXPERIMENTS
from patchguard.paper.experiment import TITLES, Row, to_percent

PAGE = Path(__file__).with_name("reproduction.md")
RUNS = Path(__file__).parents[1] / "results" / "reproduction"
LARGE = 2.0  # points: a larger gap is listed with its reason

HEAD = """# The paper's tables, run again

Made by `make docs` from results/reproduction. Numbers are percentages of all test images unless a row says otherwise:
ours first, the published one in brackets, `-` where nothing was measured. `patchguard reproduce NAME --root DIR` runs
one of them, `patchguard reproduce --list` shows all. The words are in the [glossary](glossary.md).

Of every table: our certificates are the corrected ones ([theory](theory.md)): ties are not certified, a detection
threshold above 0 is charged for what an attack can add, and windows come from the traced network. No weights
pretrained as BagNets on ImageNet are available; each row names the model that was used. Certificates are about local
logits kept as float16, rounded to 10 binary places, and, as in the paper, charge no drift: they hold for a network that
repeats its numbers exactly outside the patch. `patchguard certify` charges the drift of the model. The notes say how
many answers float16 changes.
"""


def page(runs: Path = RUNS) -> str:
    """Return the whole page."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(runs.glob("*.json"))}
    text = [HEAD, *contents(results)]
    for experiment in EXPERIMENTS.values():
        for dataset in experiment.datasets or ("",):
            name = experiment.result_name(dataset)
            if name in results:
                title = f"{experiment.title}{': ' + TITLES[dataset] if dataset else ''}"
                text.append(f"\n## {title}\n\n`patchguard reproduce {experiment.name}`")
                text.append((f" on {device(results[name])}" if device(results[name]) else "") + "\n")
                text += section(results[name], name, runs)
    return "".join(text)


def contents(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what the paper has, and what was run on what."""
    yield "\n| experiment | in the paper | run | not run |\n|---|---|---|---|\n"
    for experiment in EXPERIMENTS.values():
        if not experiment.where:
            continue
        names = {
            TITLES[dataset] or "needs no data": experiment.result_name(dataset)
            for dataset in experiment.datasets or ("",)
        }
        done = [title for title, name in names.items() if name in results]
        rest = [title for title, name in names.items() if name not in results]
        words = (experiment.title, ", ".join(experiment.where), ", ".join(done), ", ".join(rest))
        yield f"| `{experiment.name}`: {' | '.join(words)} |\n"


def device(run: dict[str, Any]) -> str:
    """Return where a run was made, and on how many images if not on all."""
    words = str(run.get("environment", {}).get("device_name") or run.get("device", ""))
    return words + (f", {run['limit']} images" if run.get("limit") else "")


def section(run: dict[str, Any], name: str, runs: Path) -> Iterator[str]:
    """Yield the tables of one run, the reasons for large gaps, its pictures and notes."""
    for table in run["tables"]:
        if not table["rows"]:
            continue
        where = f" ({table['where']})" if table["where"] else ""
        yield f"\n**{table['title']}**{where}\n\n"
        yield f"| | {' | '.join(table['columns'])} |\n|---|{'---|' * len(table['columns'])}\n"
        for row in table["rows"]:
            yield f"| {row['label']} | {' | '.join(Row.from_json(row).texts())} |\n"
        yield from remarks(table)
    for picture in run["figures"]:
        if (runs / f"{name}-{picture}.png").is_file():
            yield f"\n![{picture}](../results/reproduction/{name}-{picture}.png)\n"
    if run["notes"]:
        yield "\n" + "".join(f"- {note}\n" for note in run["notes"])


def remarks(table: dict[str, Any]) -> Iterator[str]:
    """Yield each remark once, with the rows it is about and their largest gap to the paper, and the reason for it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        groups.setdefault(Row.from_json(row).remark, []).append(row)
    lines = []
    for remark, rows in groups.items():
        widest = max((gap for row in rows for gap in differences(table, row)), key=abs, default=0.0)
        far = f" (up to {widest:+.1f} points from the paper)" if abs(widest) > LARGE else ""
        if remark:
            lines.append(f"- {', '.join(row['label'] for row in rows)}{far}: {remark}\n")
    if lines:
        yield "\n" + "".join(lines)


def unexplained(run: dict[str, Any]) -> list[str]:
    """Return the rows that differ by more than `LARGE` points from the paper's and give no reason."""
    return [
        f"{table['title']}: {row['label']}"
        for table in run["tables"]
        for row in table["rows"]
        if not row["reason"] and any(abs(gap) > LARGE for gap in differences(table, row))
    ]


def differences(table: dict[str, Any], row: dict[str, Any]) -> list[float]:
    """Return ours minus the paper's in percentage points, where there are both."""
    if table["unit"] != "%":
        return []
    values = Row.from_json(row)
    numbers = [(to_percent(ours), theirs) for ours, theirs in zip(values.ours, values.published, strict=False)]
    return [ours - theirs for ours, theirs in numbers if ours is not None and theirs is not None]


if __name__ == "__main__":
    PAGE.write_text(page())
