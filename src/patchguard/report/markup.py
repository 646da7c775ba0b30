"""`Markup` and `tag`: HTML that is escaped and balanced by construction."""

import html
from typing import final

_VOID = {"img", "input", "meta", "link", "br"}


@final
class Markup(str):
    """Text that is HTML already; everything else is escaped when it becomes a child or an attribute."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Return any value as text that HTML shows as it is; what cannot be shown becomes a replacement character."""
    if isinstance(value, Markup):
        return value
    # Names of files may hold anything, even halves of characters that no encoding can write.
    shown = (letter if letter.isprintable() or letter == "\u00a0" else "\ufffd" for letter in str(value))
    return Markup(html.escape("".join(shown)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return one element; `class_` is written class, `aria_label` aria-label, None and False not at all, True bare."""
    written = [name]
    for key, value in attributes.items():
        key = key.removesuffix("_").replace("_", "-")
        if value is True:
            written.append(key)
        elif value is not None and value is not False:
            written.append(f'{key}="{escape(value)}"')
    opening = f"<{' '.join(written)}>"
    return Markup(opening) if name in _VOID else Markup(f"{opening}{join(*children)}</{name}>")


def prose(text: str) -> Markup:
    """Return text in which `words between backquotes` are code."""
    pieces = text.split("`")
    return join(*(tag("code", piece) if place % 2 else piece for place, piece in enumerate(pieces)))


def join(*children: object) -> Markup:
    """Return children one after the other; None is left out."""
    return Markup("".join(escape(child) for child in children if child is not None))
