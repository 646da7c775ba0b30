"""`patchguard report`: one page from the files of finished runs."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", metavar="DIR...")],
) -> None:
    """Write a page into the first folder: report.html of one run, comparison.html of several.

    The page is one file that opens offline. It is made from the files of the runs alone, without model and data.
    """
    from patchguard.report.render import write

    typer.echo(write(folders))
