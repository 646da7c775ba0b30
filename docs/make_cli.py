"""Write docs/cli.md from the commands themselves: python docs/make_cli.py (make docs). A test compares the two."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Typer

from patchguard.cli import app

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# The command line

Made by `make docs` from the commands' own help. Results go to stdout, progress to stderr. A mistake is one line and
exit status 1. The same words and defaults hold in Python; the [glossary](glossary.md) explains them.
`patchguard --install-completion` teaches your shell to complete commands and options.
"""


def page() -> str:
    """Return the whole page."""
    found = sorted(commands(app, "patchguard"), key=lambda entry: entry[0])
    return HEAD + "".join(section(*entry) for entry in found)


def commands(group: Typer, prefix: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield name, function and example of every command in a group and the groups below it."""
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        yield f"{prefix} {name}", command.callback, (command.epilog or "").removeprefix("Example: ")
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance, f"{prefix} {below.name}")


def section(name: str, function: Callable[..., Any], example: str) -> str:
    """Return what one command does, an example, and its options."""
    rows = [row(*entry) for entry in options(function)]
    text = f"\n## {name}\n\n{inspect.getdoc(function)}\n\n```sh\n{example}\n```\n"
    return text + ("\n| option | default | what it is |\n|---|---|---|\n" + "".join(rows) if rows else "")


def options(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, kind, description and default of every parameter that the help shows."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        assert get_origin(hints[name]) is Annotated, f"{name} of {function.__name__} is not described"
        kind, described = get_args(hints[name])[:2]
        if not described.hidden:
            yield name, kind, described, parameter.default


def row(name: str, kind: Any, described: Any, default: Any) -> str:
    """Return one line of the table of options."""
    if type(described).__name__ == "ArgumentInfo":
        shown = described.metavar or name.upper()
    else:
        # In an annotation, typer keeps the first name where the default would be.
        given = [described.default, *(described.param_decls or ())]
        words = [word for word in given if isinstance(word, str) and word.startswith("-")]
        words = words or [f"--{name.replace('_', '-')}"]
        shown = ", ".join(words) + ("" if kind is bool else f" {described.metavar or name.upper()}")
    chosen = "needed" if default in (inspect.Parameter.empty, ...) else f"`{default}`" if default else ""
    return f"| `{shown}` | {chosen} | {' '.join((described.help or '').split())} |\n".replace("||", "\\|\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
