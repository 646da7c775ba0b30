"""The files of a finished run: run.json, summary.json and gallery.json as the run writes and the report reads them.

One schema for both sides. Files of earlier releases are read, too: `ALIASES` gives their old words. Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from patchguard.errors import InputError

FORMAT = 1

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Box: TypeAlias = tuple[Count, Count, Count, Count]
Size: TypeAlias = tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]
Masks: TypeAlias = Literal["own", "refitted", "mixed"]

# -- settings ----------------------------------------------------------------------------------------------------------


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that the records of a run depend on.

    `detects`: the rule promises the label or an alert. `defends`: it proves anything at all. `rule` is whatever else
    the guard says about its rule, in JSON values.
    """

    model: str
    data: str
    patches: tuple[str, ...]
    defense: str
    labeled: bool
    class_names: tuple[str, ...] = ()
    images: Count = 0
    model_digest: str = ""
    data_digest: str = ""
    patch_space: Literal["source", "input"] = "source"
    detects: bool = False
    defends: bool = True
    rule: dict[str, Any] = {}
    fitted: str | None = None
    shards: Count = 1

    def __post_init__(self) -> None:
        if not self.patches:
            raise ValueError("Expected at least one patch")

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number where it has none."""
        return self.class_names[number] if number < len(self.class_names) else f"class {number}"


def split_rule(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a guard says of itself (`Guard.settings`) as settings: what every guard says, and its `rule`."""
    common = {name: facts[name] for name in ("defense", "detects", "defends") if name in facts}
    return {**common, "rule": {name: value for name, value in facts.items() if name not in common}}


class CertifySettings(Settings, frozen=True, kw_only=True):
    """The settings of `certify`."""

    top_k: Annotated[int, Meta(ge=1)] = 1
    curve: tuple[int, ...] = ()
    certificates: bool = False


class AttackSettings(Settings, frozen=True, kw_only=True):
    """The settings of `attack`; there is one patch."""

    attack: str
    budget: dict[str, Any]
    aim: Count | None = None
    seed: int = 0
    numbers: tuple[int, ...] | None = None


class Run(Struct, frozen=True, kw_only=True):
    """run.json, written when a run begins."""

    format: Literal[1] = 1
    kind: Literal["certify", "attack"] = "certify"
    settings: dict[str, Any]
    environment: dict[str, Any] = {}
    model_file: dict[str, str] | None = None
    patches: dict[str, Any] = {}
    command: tuple[str, ...] = ()  # what a user types to get this run; empty where Python started it
    version: str = ""


# -- numbers -----------------------------------------------------------------------------------------------------------


class Proportion(Struct, frozen=True, kw_only=True):
    """So many of a total, with a 95 % interval; the fraction of nothing is None."""

    correct: Count
    total: Count
    fraction: Rate | None
    low: Rate
    high: Rate

    @property
    def rate(self) -> float:
        """The fraction, 0 of nothing."""
        return self.fraction or 0.0


class PatchSummary(Struct, frozen=True, kw_only=True):
    """The numbers for one patch. Without true labels, only `proved` is known."""

    clean: Proportion | None = None
    certified: Proportion | None = None
    proved: Proportion
    masks: Masks | None = None

    @property
    def main(self) -> Proportion:
        """The number that counts: certified accuracy, or without true labels the fraction proved."""
        return self.certified or self.proved


class Curve(Struct, frozen=True, kw_only=True):
    """Numbers by the side of a square patch, in pixels, with the model's own masks and with refitted ones."""

    kept: dict[int, Proportion] = {}
    refitted: dict[int, PatchSummary] = {}


class ClassSummary(Struct, frozen=True, kw_only=True):
    """Images of one true class: all, those with a correct label, and those certified, by patch."""

    name: str
    total: Count
    clean: Count
    certified: dict[str, Count]


class Histogram(Struct, frozen=True, kw_only=True):
    """Images by margin: the counts of each group between consecutive edges."""

    edges: list[float]
    certified: list[Count]
    not_certified: list[Count]
    wrong: list[Count]

    def __post_init__(self) -> None:
        bins = max(0, len(self.edges) - 1)
        if any(len(group) != bins for group in self.groups.values()):
            raise ValueError(f"Expected {bins} counts in each group, one per bin")
        if self.edges != sorted(self.edges):
            raise ValueError("Expected edges in ascending order")

    @property
    def groups(self) -> dict[str, list[int]]:
        """The counts by group."""
        return {"certified": self.certified, "not_certified": self.not_certified, "wrong": self.wrong}


class Seconds(Struct, frozen=True, kw_only=True):
    """How long a run took; one that had nothing left to do has no rate."""

    total: float | None = None
    network: float | None = None
    images_per_second: float | None = None


class CertifySummary(Struct, frozen=True, kw_only=True):
    """summary.json of `certify`.

    clean       the label is the true class
    certified   and no patch changes it
    proved      no patch changes the label, correct or not
    """

    format: Literal[1] = 1
    images: Count
    errors: Count
    labeled: bool
    undefended: Proportion | None = None
    patches: dict[str, PatchSummary]
    curve: Curve = Curve()
    classes: list[ClassSummary] = []
    margins: dict[str, Histogram] = {}
    seconds: Seconds = Seconds()
    settings: CertifySettings
    environment: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if set(self.patches) != set(self.settings.patches):
            raise ValueError("Expected one entry in `patches` for each patch of the settings")


class AttackSummary(Struct, frozen=True, kw_only=True):
    """summary.json of `attack`.

    clean              the label is the true class
    attacked           and still is under this attack (or there is an alert, where the guard raises alerts)
    certified          and no patch whatever changes it
    proved             no patch changes the label, correct or not
    attempted          was attacked at all: wrong images without a certificate, and those of the aim's class, are not
    broken             of those that are correct, not certified and attempted: the attack succeeded. The rest of them is
                       the gap: neither proved nor broken
    certified_broken   of those that are proved and attempted: the label changed all the same, which must not happen
    alerts             of those attempted: an alert was raised
    aimed              of a targeted attack: the label is the aim, of the images that are not of that class
    refuted            the images that were certified and broken
    """

    format: Literal[1] = 1
    images: Count
    errors: Count
    labeled: bool
    clean: Proportion
    attacked: Proportion
    certified: Proportion
    proved: Proportion
    attempted: Proportion
    broken: Proportion
    certified_broken: Proportion
    alerts: Proportion
    aimed: Proportion | None = None
    masks: Masks | None = None
    refuted: list[Count]
    seconds: Seconds = Seconds()
    settings: AttackSettings
    environment: dict[str, Any] = {}


# -- pictures ----------------------------------------------------------------------------------------------------------


class CertifyPicture(Struct, frozen=True, kw_only=True):
    """An entry of gallery.json: an image, the weakest window and mask in cells, the patch (box) in pixels."""

    index: Count
    name: str
    group: str
    target: Count | None = None
    label: Count
    margin: float | None = None
    rival: Count
    size: Size
    grid: Size | None = None
    window: Box | None = None
    box: Box | None = None
    mask: Box | None = None


class AttackPicture(Struct, frozen=True, kw_only=True):
    """An entry of gallery.json of an attack: an image before and after; the other class won, or came closest."""

    index: Count
    name: str
    group: str
    target: Count | None = None
    label: Count
    margin: float | None = None
    attacked: Count
    other: Count
    alert: bool | None = None
    size: Size
    patch: Size
    places: list[tuple[Count, Count]]


# -- reading -----------------------------------------------------------------------------------------------------------

# Keys of earlier releases. A dotted path is where a setting lies now.
ALIASES = {
    "right": "correct",
    "of": "total",
    "share": "fraction",
    "labelled": "labeled",
    "tried": "attempted",
    "fallen": "certified_broken",
    "evidence": "rule.evidence",
    "threshold": "rule.threshold",
    "tau": "rule.tau",
}
# Settings that earlier releases left to the name of the defense; all their guards had cells.
IMPLIED = {"detects": ("MaskedAgreement", True), "defends": ("Undefended", False)}
OLD_RULE = {"guard": "cells"}

START_AGAIN = "Remove the folder and start the run again."
Schema = TypeVar("Schema")


def update_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, as any release wrote them, under the names of this one."""
    if "rule" in settings:
        return dict(settings)
    updated: dict[str, Any] = {"rule": {**OLD_RULE}}
    for name, value in settings.items():
        *outer, inner = ALIASES.get(name, name).split(".")
        (updated[outer[0]] if outer else updated)[inner] = value
    for name, (defense, value) in IMPLIED.items():
        updated[name] = value if settings.get("defense") == defense else not value
    return updated


def update(value: Any) -> Any:
    """Return the contents of a file, as any release wrote them, under the names of this one."""
    if isinstance(value, list):
        return [update(item) for item in value]
    if not isinstance(value, dict):
        return value
    updated = {ALIASES.get(name, name): update(item) for name, item in value.items() if name != "settings"}
    settings = value.get("settings")
    if settings is not None:
        updated["settings"] = update_settings(settings) if isinstance(settings, dict) else settings
    return updated


def flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings one by one; those inside another get its name in front, but for `rule`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, before if name == "rule" else f"{before}{name} ")
        else:
            yield f"{before}{name}", value


def read_json(path: Path, missing: str) -> Any:
    """Return the contents of a JSON file; `missing` is what must hold where it is not there."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{missing}; {path.name} is missing.") from None
    except OSError as error:
        raise InputError(f"`{path}` cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise InputError(f"`{path}` is damaged: it is not JSON. {START_AGAIN}") from None


def convert(value: Any, schema: type[Schema], path: Path) -> Schema:
    """Return the contents of a file as its schema; name the first entry that is wrong."""
    try:
        return msgspec.convert(value, schema, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        entry = place.replace("`", "").replace("$.", "").strip("$")
        where = f" at `{entry}`" if entry else ""
        raise InputError(f"`{path}` is damaged{where}: {problem[0].lower()}{problem[1:]}. {START_AGAIN}") from None


def read_run(folder: Path) -> Run:
    """Return run.json."""
    path = folder / "run.json"
    missing = f"`{folder}` must be a folder that `patchguard certify --out` or `patchguard attack --out` has written"
    return _read(path, missing, Run)


def read_summary(folder: Path, schema: type[Schema]) -> Schema:
    """Return summary.json of a finished run; refuse an unfinished or damaged one."""
    path = folder / "summary.json"
    missing = f"`{folder}` must hold a finished run; start it again with the same settings and it resumes"
    return _read(path, missing, schema)


def _read(path: Path, missing: str, schema: type[Schema]) -> Schema:
    content = update(read_json(path, missing))
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise InputError(f"`{path}` must have format {FORMAT}; got {content.get('format')!r}. Update patchguard.")
    return convert(content, schema, path)


def to_plain(settings: Settings) -> dict[str, Any]:
    """Return settings in JSON values, as run.json holds them."""
    plain: dict[str, Any] = json.loads(to_json(settings))
    return plain


def to_json(value: Any) -> str:
    """Return JSON text as files hold it; numbers that JSON does not know are refused."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=1, allow_nan=False) + "\n"
