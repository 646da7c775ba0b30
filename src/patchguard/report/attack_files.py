"""What the report reads from the folder of an attack, checked entry by entry; neither torch, model nor data."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from patchguard.errors import InputError
from patchguard.report.files import Entry, read_arrays, read_failures, read_json
from patchguard.runs.summary import AttackSummary, Proportion, flatten, read_summary

FRACTIONS = ("clean", "attacked", "certified", "proved", "attempted", "broken", "certified_broken", "alerts")
AGAIN = "Let `patchguard attack` write the folder again."


@final
@dataclass(frozen=True)
class AttackRun:
    """A finished attack, as its folder tells it. A share of nothing is None."""

    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    images: int
    errors: int
    labeled: bool
    clean: Proportion | None
    attacked: Proportion | None
    certified: Proportion | None
    proved: Proportion | None
    attempted: Proportion | None
    broken: Proportion | None
    certified_broken: Proportion | None
    alerts: Proportion | None
    aimed: Proportion | None
    masks: str
    refuted: tuple[int, ...]
    seconds: dict[str, float]
    failures: list[tuple[str, str]]

    @property
    def patch(self) -> str:
        """The patch of the attack."""
        return str(self.settings["patches"][0])

    @property
    def detects(self) -> bool:
        """Whether the rule only promises the label or an alert."""
        return bool(self.settings["detects"])

    @property
    def certifies(self) -> bool:
        """Whether the rule proves anything at all."""
        return bool(self.settings["defends"])

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number where it has none."""
        names = self.settings.get("class_names") or []
        return str(names[number]) if number < len(names) else f"class {number}"


def read_attack(folder: Path) -> AttackRun:
    """Return the finished attack in a folder; refuse an unfinished or damaged one."""
    summary = read_summary(folder, AttackSummary)
    settings = msgspec.to_builtins(summary.settings)
    numbers = {name: getattr(summary, name) for name in (*FRACTIONS, "aimed")}
    return AttackRun(
        folder=folder,
        settings=dict(flatten(settings)) | {"budget": settings["budget"]},
        environment=summary.environment,
        images=summary.images,
        errors=summary.errors,
        labeled=summary.labeled,
        masks=summary.masks or "own",
        refuted=tuple(summary.refuted),
        seconds={name: value for name, value in msgspec.to_builtins(summary.seconds).items() if value is not None},
        failures=read_failures(folder, summary.errors),
        **{name: each if each is not None and each.total else None for name, each in numbers.items()},
    )


@final
@dataclass(frozen=True, eq=False)
class AttackPicture:
    """One image of the gallery before and after: pixels (height, width, 3), evidence of two classes, and the patch."""

    index: int
    name: str
    group: str
    target: int | None
    label: int
    attacked: int
    other: int
    alert: bool
    margin: float
    size: tuple[int, ...]
    patch: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    original: npt.NDArray[np.uint8]
    changed: npt.NDArray[np.uint8]
    before: npt.NDArray[np.float32]
    after: npt.NDArray[np.float32]
    other_before: npt.NDArray[np.float32]
    other_after: npt.NDArray[np.float32]


def read_attack_gallery(folder: Path) -> list[AttackPicture]:
    """Return the pictures of the folder of an attack."""
    wanted = f"`{folder}` must hold the pictures of its run; let `patchguard attack` write them again"
    entries = read_json(folder, "gallery.json", wanted, "attack").members()
    path = folder / "gallery.npz"
    with read_arrays(path, wanted, AGAIN) as archive:
        return [_picture(entry, place, archive, path) for place, entry in enumerate(entries)]


def _picture(entry: Entry, place: int, archive: Any, path: Path) -> AttackPicture:
    original, changed = (np.asarray(archive[f"{name}_{place}"]) for name in ("original", "attacked"))
    maps = [np.asarray(archive[f"{name}_{place}"]) for name in ("before", "after", "other_before", "other_after")]
    for pixels in (original, changed):
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
            raise InputError(f"`{path}`: image {place} must be 8-bit pixels (height, width, 3); got {pixels.shape}.")
    if any(each.ndim != 2 or each.shape != maps[0].shape or 0 in each.shape for each in maps):
        raise InputError(f"`{path}`: the evidence of image {place} must be maps of one shape (rows, columns).")
    size, target, alert = entry.at("size").wholes(2), entry.get("target"), entry.get("alert")
    if 0 in size:
        raise entry.wrong("an image of at least one pixel")
    before, after, other_before, other_after = (each.astype(np.float32) for each in maps)
    return AttackPicture(
        index=entry.at("index").whole(),
        name=entry.at("name").text(),
        group=entry.at("group").text(),
        target=target.whole() if target else None,
        label=entry.at("label").whole(),
        attacked=entry.at("attacked").whole(),
        other=entry.at("other").whole(),
        alert=alert.flag() if alert else False,
        margin=found.number() if (found := entry.get("margin")) else -math.inf,  # of a rule that proves nothing
        size=size,
        patch=entry.at("patch").wholes(2),
        places=tuple(member.wholes(2) for member in entry.at("places").members()),
        original=original,
        changed=changed,
        before=before,
        after=after,
        other_before=other_before,
        other_after=other_after,
    )
