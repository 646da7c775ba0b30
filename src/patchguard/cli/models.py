"""`patchguard models`: every name that --model takes, and how to get the published ones."""

from typing import Annotated

import typer

from patchguard.cli.common import screen, shown
from patchguard.cli.progress import show_download


def models(
    download: Annotated[
        list[str] | None,
        typer.Option(
            help="Download this published model from the address in $PATCHGUARD_ZOO; may be repeated.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List every name that --model takes: trained checkpoints, presets, bare networks."""
    if download:
        from patchguard.storage.published_models import download_model

        for name in download:
            with show_download(name) as progress:
                path = download_model(name, progress)
            screen().print(f"{name} is at {shown(str(path))}", soft_wrap=True)
        return
    from rich.table import Table

    from patchguard.storage import zoo

    table = Table("name", "kind", "description", box=None, pad_edge=False)
    for entry in zoo.available():
        table.add_row(entry.name, entry.kind, entry.description)
    screen().print(table)
