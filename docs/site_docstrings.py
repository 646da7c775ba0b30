"""Keep the layout of docstrings in the API reference: rules, theorems, tables and doctests become blocks of code."""

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"(Rule|Theorem)\. |={3,} ={3,}")


class KeepLayout(griffe.Extension):
    """Fence paragraphs whose line breaks carry meaning."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class or function."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(fence(each) for each in obj.docstring.value.split("\n\n"))


def fence(paragraph: str) -> str:
    """Return a paragraph, inside a fence where it must keep its line breaks."""
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph}\n```"
    return f"```text\n{paragraph}\n```" if ALIGNED.match(paragraph) else paragraph
