"""The parts of a `Guard` as JSON values, and back: every entry is checked, and nothing but data is read.

Classes are looked up among the package's own and those that installed packages register. A name from a file is never
evaluated, and imports nothing that the user has not installed under that name.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any, get_type_hints

from patchguard.defenses import Defense, DoubleMasking
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError, nearest
from patchguard.geometry.windows import Windows
from patchguard.registry import Registry

_OWN = (
    "RobustMasking",
    "DoubleMasking",
    "ClippedSum",
    "MajorityVote",
    "CellMasking",
    "Median",
    "TrimmedMean",
    "MaskedAgreement",
    "Undefended",
)


def _is_defense(name: str, value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Defense) and is_dataclass(value) and value.__name__ == name


DEFENSES: Registry[type[Defense[Any]]] = Registry(
    "defenses",
    {name: f"patchguard.defenses:{name}" for name in _OWN},
    demand="a subclass of Defense, a frozen dataclass, with the name of its entry point",
    accept=_is_defense,
)
# Settings younger than the first files: left out at this value, so that files and digests stay as they are.
_YOUNGER: dict[type[Defense[Any]], dict[str, Any]] = {DoubleMasking: {"tau": 0.0}}


def find_defense(name: str) -> type[Defense[Any]]:
    """Return the defense of this name; refuse another."""
    if name not in DEFENSES:
        raise InputError(f"`--defense` must be a known defense; got {name!r}. {nearest(name, [*DEFENSES])}")
    return DEFENSES[name]


# -- to JSON -----------------------------------------------------------------------------------------------------------


def windows_to_json(windows: Windows) -> dict[str, Any]:
    """Return windows as an object that JSON can hold."""
    return {
        "grid": list(windows.grid),
        "rows": [list(interval) for interval in windows.rows],
        "columns": [list(interval) for interval in windows.columns],
        "pairs": None if windows.pairs is None else [list(pair) for pair in windows.pairs],
        "wrap": list(windows.wrap),
        "count": windows.count,
    }


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return the settings of evidence as an object that JSON can hold."""
    return {setting.name: getattr(evidence, setting.name) for setting in fields(evidence)}


def defense_to_json(defense: Defense[Any]) -> dict[str, Any]:
    """Return a defense as its class name and its settings; fractions as text, so that they stay exact."""
    name = type(defense).__name__
    if name not in DEFENSES or DEFENSES[name] is not type(defense):
        raise InputError(
            f"`defense` must be registered to be saved; got {name}. Give its package an entry point in the group "
            f"{DEFENSES.group} (docs/add_a_defense.md)."
        )
    settings: dict[str, Any] = {"name": name}
    younger = _YOUNGER.get(type(defense), {})
    for setting, kind in _settings(type(defense)).items():
        value = getattr(defense, setting)
        if setting in younger and value == younger[setting]:
            continue
        if isinstance(value, Windows):
            value = windows_to_json(value)
        elif isinstance(value, Fraction):
            value = str(value)
        elif kind is float:
            value = float(value)
        settings[setting] = value
    return settings


# -- from JSON ---------------------------------------------------------------------------------------------------------


def windows_from_json(value: object, name: str = "windows") -> Windows:
    """Return the windows that `windows_to_json` wrote; refuse anything else."""
    entries = exactly(value, name, ("grid", "rows", "columns", "pairs", "wrap", "count"))
    pairs = entries["pairs"]
    return Windows(
        grid=_pair(entries["grid"], f"{name}.grid", whole),
        rows=_pairs(entries["rows"], f"{name}.rows"),
        columns=_pairs(entries["columns"], f"{name}.columns"),
        pairs=None if pairs is None else _pairs(pairs, f"{name}.pairs"),
        wrap=_pair(entries["wrap"], f"{name}.wrap", flag),
        count=whole(entries["count"], f"{name}.count"),
    )


def evidence_from_json(value: object) -> Evidence:
    """Return the evidence that `evidence_to_json` wrote; refuse anything else."""
    names = [setting.name for setting in fields(Evidence)]
    entries = exactly(value, "evidence", names)
    return Evidence(
        kind=text(entries["kind"], "evidence.kind"),
        low=None if entries["low"] is None else number(entries["low"], "evidence.low"),
        high=None if entries["high"] is None else number(entries["high"], "evidence.high"),
        drift=number(entries["drift"], "evidence.drift"),
        threshold=number(entries["threshold"], "evidence.threshold"),
        bits=whole(entries["bits"], "evidence.bits"),
    )


def defense_from_json(value: object) -> Defense[Any]:
    """Return the defense that `defense_to_json` wrote; refuse anything else."""
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    name = given.get("name")
    if not isinstance(name, str) or name not in DEFENSES:
        raise InputError(f"`defense.name` must be a known defense; got {name!r}. {nearest(str(name), [*DEFENSES])}")
    kind: Any = DEFENSES[name]
    settings = _settings(kind)
    entries = exactly({**_YOUNGER.get(kind, {}), **given}, "defense", ["name", *settings])
    values = {each: _READERS[wanted](entries[each], f"defense.{each}") for each, wanted in settings.items()}
    defense: Defense[Any] = kind(**values)
    return defense


def _settings(kind: Any) -> dict[str, Any]:
    """Return the settings of a defense, each with its type; refuse a type that JSON would not give back."""
    types = get_type_hints(kind)
    settings = {setting.name: types[setting.name] for setting in fields(kind)}
    for name, wanted in settings.items():
        if wanted not in _READERS:
            raise InputError(
                f"`{name}` of {kind.__name__} must be an int, float, bool, str, Fraction or Windows to be saved; "
                f"it is declared as {wanted}."
            )
    return settings


# -- single values -----------------------------------------------------------------------------------------------------


def exactly(value: object, name: str, entries: Iterable[str]) -> dict[str, Any]:
    """Return `value` if it is an object with these entries and no others."""
    wanted = list(entries)
    if not isinstance(value, dict) or set(value) != set(wanted):
        got = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
        raise InputError(f"`{name}` must be an object with exactly the entries {', '.join(wanted)}; got {got}.")
    return value


def whole(value: object, name: str) -> int:
    """Return `value` if it is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"`{name}` must be a whole number; got {value!r}.")
    return value


def number(value: object, name: str) -> float:
    """Return `value` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"`{name}` must be a finite number; got {value!r}.")
    return float(value)


def flag(value: object, name: str) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be true or false; got {value!r}.")
    return value


def text(value: object, name: str) -> str:
    """Return `value` if it is text."""
    if not isinstance(value, str):
        raise InputError(f"`{name}` must be text; got {value!r}.")
    return value


def sequence(value: object, name: str) -> Sequence[Any]:
    """Return `value` if it is a list."""
    if not isinstance(value, list):
        raise InputError(f"`{name}` must be a list; got {type(value).__name__}.")
    return value


def fraction(value: object, name: str) -> Fraction:
    """Return the fraction that `value` spells, such as "1/5"."""
    numerator, _, denominator = text(value, name).partition("/")
    digits = (numerator + denominator).isascii() and numerator.isdigit() and (denominator or "1").isdigit()
    if not digits or len(numerator + denominator) > 40 or int(denominator or "1") == 0:
        raise InputError(f"`{name}` must be a fraction such as 1/5; got {value!r}.")
    return Fraction(int(numerator), int(denominator or "1"))


def _pair(value: object, name: str, read: Callable[[object, str], Any]) -> tuple[Any, Any]:
    entries = sequence(value, name)
    if len(entries) != 2:
        raise InputError(f"`{name}` must be a list of two; got {len(entries)} entries.")
    return read(entries[0], name), read(entries[1], name)


def _pairs(value: object, name: str) -> tuple[tuple[int, int], ...]:
    return tuple(_pair(entry, name, whole) for entry in sequence(value, name))


_READERS: dict[Any, Callable[[object, str], Any]] = {
    Windows: windows_from_json,
    Fraction: fraction,
    Fraction | float: fraction,
    float: number,
    int: whole,
    bool: flag,
    str: text,
}
