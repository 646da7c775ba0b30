"""`patchguard models`: every name that --model takes."""

from patchguard.cli.common import screen


def models() -> None:
    """List every name that --model takes: trained checkpoints, presets, bare networks."""
    from rich.table import Table

    from patchguard.storage import zoo

    table = Table("name", "kind", "description", box=None, pad_edge=False)
    for entry in zoo.available():
        table.add_row(entry.name, entry.kind, entry.description)
    screen().print(table)
