"""What `patchguard train` adds for a folder of own photos: a recipe, a certified report, a card, the next command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from patchguard.cli.progress import show_progress
from patchguard.errors import InputError

if TYPE_CHECKING:
    from patchguard.training.recipe import Recipe

PATCH = "2%"


def choose(folder: Path) -> "Recipe":
    """Return the recipe for the photos in a folder, and say what it does."""
    from patchguard.data.source import open_splits
    from patchguard.runs.images import find_usual_size
    from patchguard.training import own_photos

    photos, _ = open_splits("folder", folder)
    if len(photos.class_names) < 2:
        raise InputError(f"{folder} must hold at least two folders of photos, one per class; it holds one.")
    recipe = own_photos.choose_recipe(len(photos), min(find_usual_size(photos)))
    typer.echo(own_photos.describe(recipe, len(photos), len(photos.class_names)), err=True)
    return recipe


def certify_held_out(folder: Path, out: Path, device: str) -> Any:
    """Certify the photos that training never saw, into `out/certified`; return the summary and the page."""
    from patchguard.data.source import open_splits
    from patchguard.report import render
    from patchguard.runs.certify import certify
    from patchguard.runs.job import prepare
    from patchguard.training.own_photos import NAME

    source = open_splits("folder", folder)[1]
    job = prepare(source=source, data=str(folder), model=out / f"{NAME}.safetensors", patches=[PATCH], curve=False)
    with show_progress("certifying", len(source), unit="images") as progress:
        outcome = certify(job, out / "certified", device=device, progress=lambda tally: progress.update(tally.images))
    assert outcome is not None  # there is one process here
    return outcome.summary, render.write([out / "certified"])


def finish(folder: Path, out: Path, device: str, summary: dict[str, Any], seconds: float) -> None:
    """Certify, write the card, and print the results and the next command."""
    from patchguard.cli.certify import make_table
    from patchguard.cli.common import screen
    from patchguard.storage.atomic import replace_file

    certified, page = certify_held_out(folder, out, device)
    output, model = screen(), out / summary["file"]
    command = f"patchguard certify --model {model} --data NEW_PHOTOS --patch {PATCH}"
    entry = next(iter(certified.patches.values()))
    recipe = summary["recipe"]
    card = out / "card.md"
    with replace_file(card) as draft:
        draft.write_text(
            f"# {model.stem}\n\n"
            f"A {recipe['model']['name']} with {recipe['guard']['defense']}, trained on {summary['train_images']:,} "
            f"photos of `{folder.name}`, {recipe['schedule']['epochs']} epochs; digest `{summary['digest'][:16]}`.\n\n"
            f"| {certified.images:,} photos that training never saw | correct | correct and certified |\n"
            "|---|---|---|\n"
            f"| patch of {PATCH} of the image | {_percent(entry.clean)} | {_percent(entry.certified)} |\n\n"
            "It knows only the classes of these folders. Other cameras, scenes and classes were not measured.\n\n"
            f"    {command}\n"
        )
    output.print(make_table(certified))
    output.print(
        f"{seconds / 60:.1f} min. Model: {model}  card: {card}  report: {page}", soft_wrap=True, highlight=False
    )
    output.print(f"next: {command}", soft_wrap=True, highlight=False)


def _percent(proportion: Any) -> str:
    return f"{100 * proportion.fraction:.1f} % ({100 * proportion.low:.1f} to {100 * proportion.high:.1f})"
