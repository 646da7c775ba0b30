"""`Call`: one operation of the graph with its arguments, as the rules see it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from patchguard.geometry.rules.layout import Layout, Refused


@final
@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the image: a parameter, a buffer, or made from those."""

    shape: tuple[int, ...]


@final
@dataclass(frozen=True, eq=False)
class Call:
    """One operation: its arguments by the names in its schema, and the shape of each tensor it returns."""

    name: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    def get(self, *names: str) -> Any:
        """Return the first of these arguments that the operation has, or None."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)

    def layouts(self) -> list[Layout]:
        """Return every argument, or member of a list argument, that depends on the image."""
        flat: list[Any] = []
        for value in self.arguments.values():
            flat.extend(value if isinstance(value, (list, tuple)) else [value])
        return [value for value in flat if isinstance(value, Layout)]

    def only(self) -> Layout:
        """Return the first argument, after checking that no other one depends on the image."""
        first = next(iter(self.arguments.values()))
        if not isinstance(first, Layout) or len(self.layouts()) != 1:
            raise Refused("takes weights or settings that depend on the image")
        return first

    @property
    def axes(self) -> int:
        """The number of axes that the operation's name ends with: 2 for `avg_pool2d`."""
        digits = re.findall(r"([123])d", self.name)
        if not digits:
            raise Refused("has no rule for its number of axes")
        return int(digits[-1])

    def per_axis(self, value: Any, axes: int) -> list[int]:
        """Return an argument as one integer for each of `axes` axes; one value stands for all."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        return [int(entry) for entry in (values * axes if len(values) == 1 else values)]


Rule = Callable[[Call], Layout | tuple[Layout, ...]]
