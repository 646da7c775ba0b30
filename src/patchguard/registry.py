"""`Registry`: things of one kind by name, the package's own and those that installed packages add.

A package adds a defense, an attack, a model or a dataset by an entry point in its pyproject.toml:

    [project.entry-points."patchguard.defenses"]
    MeanConfidence = "mean_confidence:MeanConfidence"

The package's own are entry points, too, written in its code, so that they are there without an installation. Nothing is
imported before its name is asked for: a broken package harms nobody who does not use it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, final

from patchguard.errors import InputError

T = TypeVar("T")


@final
class Registry(Mapping[str, T]):
    """All of one kind, such as "defenses": `registry[name]` imports; `name in registry` and `list(registry)` do not.

    `own` maps the package's names to `module:attribute`. What another package gives must pass `accept(name, value)`;
    `demand` says in words what that asks for. A name that is taken twice and a value that cannot be imported raise
    `InputError` when they are asked for.
    """

    def __init__(self, kind: str, own: Mapping[str, str], *, demand: str, accept: Callable[[str, Any], bool]) -> None:
        self.group, self.noun = ".".join(("patchguard", kind)), kind.removesuffix("s")
        self.own = {name: EntryPoint(name, value, self.group) for name, value in own.items()}
        self.demand, self.accept = demand, accept

    def __iter__(self) -> Iterator[str]:
        added = {entry.name for entry in self._added()}
        return iter([*self.own, *sorted(added - self.own.keys())])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.own or any(entry.name == name for entry in self._added())

    def __getitem__(self, name: str) -> T:
        own = self.own.get(name)
        added = [entry for entry in self._added() if entry.name == name]
        if own is None and not added:
            raise KeyError(name)
        if len(added) + (own is not None) > 1:
            homes = [*(["patchguard itself"] if own else []), *(f"the package {_package(entry)}" for entry in added)]
            raise InputError(
                f"the name of a {self.noun} must be taken once; {name!r} comes from {' and from '.join(homes)}. "
                f"Uninstall one of them, or rename its entry point in the group {self.group}."
            )
        if own is not None:
            value: T = own.load()
            return value
        return self._load(added[0])

    def package(self, name: str) -> str:
        """Return the installed package that adds a name; nothing for one of our own."""
        return next((_package(entry) for entry in self._added() if entry.name == name and name not in self.own), "")

    def _added(self) -> tuple[EntryPoint, ...]:
        return _installed(self.group, tuple(sys.path))

    def _load(self, entry: EntryPoint) -> T:
        origin = f"the {self.noun} {entry.name!r} of the package {_package(entry)} ({entry.value})"
        try:
            value: T = entry.load()
        except Exception as error:
            raise InputError(
                f"{origin} must be importable; got {type(error).__name__}: {error}. Mend or uninstall that package."
            ) from error
        if not self.accept(entry.name, value):
            raise InputError(f"{origin} must be {self.demand}; got {value!r}. Mend or uninstall that package.")
        return value


@lru_cache(maxsize=16)
def _installed(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of the packages on `sys.path`; looked for again when that changes."""
    return tuple(entry_points(group=group))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "of unknown name"
