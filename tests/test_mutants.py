"""The mistakes that `make mutants` plants: what they are, and how they are named."""

import ast
from pathlib import Path

from mutants.operators import explained, mutants_of

SOURCE = """
LIMIT = 3

class Box:
    size: int = 2

    def holds(self, low: int, high: int) -> bool:
        if low > high:
            raise ValueError(f"{low + 1} is too large")
        total = self.size + 1
        total += 1
        return low <= total and max(low, high) < 9

def reached(maps, first):
    check(maps)
    return maps.lower.sum((2, 3))[first | 1]
"""


def changes(source: str) -> list[str]:
    return [str(mutant) for mutant in mutants_of("box.py", source)]


def test_each_kind_of_mistake_is_made_once_and_messages_shapes_and_constants_are_spared() -> None:
    assert changes(SOURCE) == [
        "Box: `size: int = 2` -> `size: int = 3`",
        "Box: `size: int = 2` -> `size: int = 1`",
        "Box.holds: `if low > high` -> `if False`",
        "Box.holds: `low > high` -> `low >= high`",
        "Box.holds: `low > high` -> `low <= high`",
        "Box.holds: `low > high` -> `high > high`",
        "Box.holds: `low > high` -> `low > low`",
        "Box.holds: `total = self.size + 1` -> `total = self.size - 1`",
        "Box.holds: `total = self.size + 1` -> `total = self.size + 2`",
        "Box.holds: `total = self.size + 1` -> `total = self.size + 0`",
        "Box.holds: `total += 1` -> `total -= 1`",
        "Box.holds: `total += 1` -> `pass`",
        "Box.holds: `total += 1` -> `total += 2`",
        "Box.holds: `total += 1` -> `total += 0`",
        "Box.holds: `low <= total and max(low, high) < 9` -> `low <= total or max(low, high) < 9`",
        "Box.holds: `low <= total and max(low, high) < 9` -> `low < total and max(low, high) < 9`",
        "Box.holds: `low <= total and max(low, high) < 9` -> `low > total and max(low, high) < 9`",
        "Box.holds: `low <= total and max(low, high) < 9` -> `high <= total and max(low, high) < 9`",
        "Box.holds: `max(low, high) < 9` -> `max(low, high) <= 9`",
        "Box.holds: `max(low, high) < 9` -> `max(low, high) >= 9`",
        "Box.holds: `max(low, high) < 9` -> `min(low, high) < 9`",
        "Box.holds: `max(low, high) < 9` -> `max(high, high) < 9`",
        "Box.holds: `max(low, high) < 9` -> `max(low, low) < 9`",
        "Box.holds: `max(low, high) < 9` -> `max(low, high) < 10`",
        "Box.holds: `max(low, high) < 9` -> `max(low, high) < 8`",
        "reached: `check(maps)` -> `pass`",
        "reached: `maps.lower.sum((2, 3))` -> `maps.upper.sum((2, 3))`",
        "reached: `maps.lower.sum((2, 3))[first | 1]` -> `maps.lower.sum((2, 3))[first & 1]`",
        "reached: `maps.lower.sum((2, 3))[first | 1]` -> `maps.lower.sum((2, 3))[first | 2]`",
        "reached: `maps.lower.sum((2, 3))[first | 1]` -> `maps.lower.sum((2, 3))[first | 0]`",
    ]


def test_every_mutant_differs_from_the_source_and_can_be_compiled() -> None:
    plain = ast.unparse(ast.parse(SOURCE))
    sources = [mutant.source for mutant in mutants_of("box.py", SOURCE)]
    assert len(set(sources)) == len(sources)
    for source in sources:
        assert source != plain
        compile(source, "box.py", "exec")


def test_names_do_not_depend_on_the_layout_and_equal_ones_are_numbered() -> None:
    one = "def f(a):\n    b = (a.some.evidence.low)  # once\n    return b, a.some.evidence.low\n"
    two = "def f(a):\n  b=a.some.evidence.low; return (b,\n    a.some.evidence.low)"
    name = "f: `a.some.evidence.low` -> `a.some.evidence.high"
    assert changes(one) == changes(two) == [f"{name}`", f"{name}  (2)`"]


def test_the_table_of_explained_mutants_can_be_read() -> None:
    row = "| `f` | `a \\| b` | `a & b` | equal for booleans |"
    assert explained(
        f"# Mutants\n\n## `box.py`\n\n| function | before | after | why |\n|---|---|---|---|\n{row}\n"
    ) == {("box.py", "f", "a | b", "a & b")}
    table = (Path(__file__).parent / "MUTANTS.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(explained(table)) == len(rows) > 0
