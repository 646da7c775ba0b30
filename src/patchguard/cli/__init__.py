"""The command line: the same verbs, words and defaults as in Python.

Results go to stdout, progress to stderr. torch is imported by the commands that need it, not by `--help`.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from patchguard import __version__
from patchguard.cli.attack import attack
from patchguard.cli.audit import audit
from patchguard.cli.certify import certify
from patchguard.cli.data import app as data
from patchguard.cli.models import models
from patchguard.cli.predict import predict
from patchguard.cli.report import report
from patchguard.cli.reproduce import reproduce
from patchguard.cli.train import train
from patchguard.cli.verify import verify
from patchguard.errors import InputError


class Commands(TyperGroup):
    """The commands; an `InputError` in any of them becomes one line on stderr and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.echo(f"patchguard: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="patchguard",
    cls=Commands,
    help="Certified robustness of image classifiers against adversarial patches.",
    epilog="Example: patchguard audit --model bagnet17",
    no_args_is_help=True,
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"patchguard {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Certified robustness of image classifiers against adversarial patches."""


app.command(epilog="Example: patchguard certify --data photos --patch 2%")(certify)
app.command(epilog="Example: patchguard predict 'photos/*.jpg' --patch 2%")(predict)
app.command(epilog="Example: patchguard attack --data sample --patch 5 --steps 20 --limit 100")(attack)
app.command(epilog="Example: patchguard models --download cifar10_mask_ds")(models)
app.command(epilog="Example: patchguard audit --model bagnet17 --size 224x300")(audit)
app.add_typer(data, name="data")
app.command(epilog="Example: patchguard report runs/sample runs/photos")(report)
app.command(epilog="Example: patchguard reproduce main --data cifar10 --root datasets")(reproduce)
app.command(epilog="Example: patchguard train --data photos --out runs/mine")(train)
app.command(epilog="Example: patchguard verify cat.pgc --model cifar10 --image cat.png")(verify)


def main() -> None:
    """Run the command line."""
    app()
