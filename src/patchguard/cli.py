"""The command line: the same verbs, words and defaults as in Python."""

from typing import Annotated

import typer

from patchguard import __version__

app = typer.Typer(
    name="patchguard",
    help="Certified robustness of image classifiers against adversarial patches.",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patchguard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Certified robustness of image classifiers against adversarial patches."""


def main() -> None:
    """Run the command line."""
    app()
