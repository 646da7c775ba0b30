"""`Job`: a guard, images and patches that belong together, from the words of a command line; checked before work."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, final, get_args

from torch import Tensor

from patchguard import runtime
from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source, open_source
from patchguard.defenses import Defense, DoubleMasking, MaskedAgreement, RobustMasking
from patchguard.defenses import serialization as config
from patchguard.defenses.evidence import Evidence, Kind
from patchguard.errors import InputError, nearest
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.patch import Space
from patchguard.runs.plan import Plan, WrittenPatch, curve_sides, make_plan
from patchguard.runs.summary import CertifySettings, split_rule
from patchguard.storage import zoo

LOOKED_AT = 8  # images that are decoded to learn a usual size
SMALL = 100  # pixels: below this side, a default patch is given in pixels
ANYTHING = Windows.sliding(grid=(1, 1), size=(1, 1))  # until masks are fitted to a patch and a size


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run computes: everything that its records depend on."""

    guard: LocalGuard[Any]
    source: Source
    patches: tuple[WrittenPatch, ...]
    curve: tuple[int, ...]
    top_k: int
    model: str
    digest: str
    data: str
    certificates: Path | None
    patch_space: Space = "source"  # "input": images are resized and cropped first, and `source` holds the results
    file: zoo.ModelFile | None = None  # that the guard was read from
    fitted: str | None = None  # to which patch in which size another defense was fitted; None keeps the model's masks

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the model's classes; numbers where nobody names them."""
        numbers = tuple(str(number) for number in range(self.guard.model.classes))
        return self.guard.class_names or self.source.class_names or numbers

    @property
    def model_file(self) -> dict[str, str] | None:
        """The name and digest of the guard's file, for run.json."""
        return None if self.file is None else {"name": self.file.path.name, "digest": self.file.digest}

    def settings(self) -> CertifySettings:
        """Return every setting, for run.json."""
        return CertifySettings(
            **self.shared_settings(),
            top_k=self.top_k,
            curve=self.curve,
            certificates=self.certificates is not None,
        )

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that any kind of run has."""
        return {
            "model": self.model,
            "model_digest": self.digest,
            "data": self.data,
            "data_digest": _digest(self.source),
            "images": len(self.source),
            "patches": tuple(written.key for written in self.patches),
            "patch_space": self.patch_space,
            **split_rule(self.guard.settings()),
            "class_names": self.class_names,
            "labeled": self.source.targets is not None,
            "fitted": self.fitted,
            "shards": runtime.world_size(),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return what is computed for images of this size."""
        return make_plan(self.guard, size, self.patches, self.curve, self.top_k, own=self.fitted is None)


def prepare(
    *,
    source: Source,
    data: str = "sample",
    model: str = "cifar10",
    patches: Sequence[str] = (),
    defense: str = "",
    evidence: str = "",
    threshold: str = "",
    tau: float | None = None,
    top_k: int = 1,
    certificates: Path | None = None,
    patch_space: str = "source",
    curve: bool = True,
    alerts: bool = False,
) -> Job:
    """Load the model, and check that it, the images, the patches and the defense fit together.

    `data` is what the user calls the images. `patch_space` is where patches lie: in the "source" images, or in the
    network's "input", that is, images are resized and cropped first, rounded to 8 bits, and then taken for the source.
    `curve` is whether other sizes of the patch are certified, too, and `alerts` whether a defense will do that promises
    the label or an alert.
    """
    written = _distinct(patches)
    if patch_space not in get_args(Space):
        raise InputError(f"`--patch-space` must be {' or '.join(get_args(Space))}; got {patch_space!r}.")
    space: Space = "input" if patch_space == "input" else "source"
    if space == "input" and not written:
        raise InputError("`--patch-space input` needs --patch: the model's own is one in source pixels.")
    loaded = zoo.load_guard(model)
    digest = loaded.digest
    source = matched(source, loaded)
    if space == "input":
        source, loaded = source.preprocess(loaded.preprocess), loaded.without_preprocess()
    size = usual_size(source)
    written = written or (default_patch(zoo.recipe(model), size),)
    asked = [each.at(*size) for each in written]
    guard = swapped(loaded, defense, evidence, threshold, tau, alerts=alerts)
    if defense:
        guard = guard.for_patch(asked[0], *size)
    job = Job(
        guard=guard,
        source=source,
        patches=written,
        curve=curve_sides(max(asked, key=lambda patch: patch.area), size) if curve else (),
        top_k=top_k,
        model=Path(model).stem,
        digest=digest,
        data=Path(data).name if Path(data).is_absolute() else data,
        certificates=certificates,
        patch_space=space,
        file=zoo.file_of(model),
        fitted=f"{asked[0].height}x{asked[0].width} in {size[0]}x{size[1]}" if defense else None,
    )
    job.plan(size)  # raises here, before anything is written, where nothing could be certified
    if certificates is not None:
        _check_certificates(job)
    return job


def _check_certificates(job: Job) -> None:
    if job.patch_space != "source":
        raise InputError("`--certificates` are about source images. Leave it out, or --patch-space input.")
    if not job.guard.defense.checkable or job.top_k != 1:
        known = ", ".join(name for name, kind in config.DEFENSES.items() if kind.checkable)
        raise InputError(
            f"`--certificates` needs one of {known} and --top-k 1; got {type(job.guard.defense).__name__} and "
            f"{job.top_k}. Leave it out."
        )


def _distinct(patches: Sequence[str]) -> tuple[WrittenPatch, ...]:
    found: dict[str, WrittenPatch] = {}
    for text in patches:
        written = WrittenPatch.read(text)
        found.setdefault(written.key, written)
    return tuple(found.values())


def default_patch(recipe: dict[str, Any] | None, size: tuple[int, int]) -> WrittenPatch:
    """Return the patch that the model was trained against; else 5 pixels in a small image, 2 % of a large one."""
    trained = (recipe or {}).get("patch")
    if isinstance(trained, dict) and trained.get("count") == 1:
        return WrittenPatch.read(f"{trained.get('height')}x{trained.get('width')}")
    return WrittenPatch.read("5" if min(size) < SMALL else "2%")


# -- images ------------------------------------------------------------------------------------------------------------


def opened(words: Sequence[str], root: Path | None = None, *, labelled: bool = True) -> Source:
    """Return the images that the words name, one set after the other; without classes where there are several."""
    sources = [open_source(word, root) for word in words]
    if len(sources) == 1 and labelled:
        return sources[0]
    names = [
        word if len(source) == 1 and Path(word).is_file() else name
        for word, source in zip(words, sources, strict=True)
        for name in source.names
    ]
    starts = list(accumulate((len(source) for source in sources), initial=0))
    read, state = partial(_read_joined, sources, starts), partial(_state_joined, sources, starts)
    return Source(tuple(names), None, (), read, sum(each.ignored for each in sources), state)


def _read_joined(sources: list[Source], starts: list[int], place: int) -> Tensor:
    number = bisect_right(starts, place) - 1
    return sources[number].read(place - starts[number])


def _state_joined(sources: list[Source], starts: list[int], place: int) -> str:
    number = bisect_right(starts, place) - 1
    return sources[number].fingerprint(place - starts[number])


def usual_size(source: Source) -> tuple[int, int]:
    """Return the size of the largest of the first images, by its shorter side; raise if none of all can be read."""
    first: list[tuple[int, int]] = []
    reason = ""
    for image in iterate_images(source):
        if isinstance(image, Unreadable):
            reason = reason or str(image)
            continue
        first.append((image.shape[1], image.shape[2]))
        if len(first) == LOOKED_AT:
            break
    if not first:
        raise InputError(f"none of the {len(source)} images can be read: {reason} Check the files.")
    return max(first, key=lambda size: (min(size), max(size)))


def matched(source: Source, guard: LocalGuard[Any]) -> Source:
    """Return the source with its classes numbered as the model's are, by name."""
    if source.targets is None:
        return source
    theirs, ours = source.class_names, guard.class_names
    if not ours:
        if len(theirs) != guard.model.classes:
            raise InputError(
                f"the images have {len(theirs)} classes and the model {guard.model.classes}, which have no names. "
                "Give images of those classes, or name files with a pattern to go without classes."
            )
        return source
    numbers = {name.casefold(): number for number, name in enumerate(ours)}
    strange = [name for name in theirs if name.casefold() not in numbers]
    if strange or len({name.casefold() for name in theirs}) < len(theirs):
        raise InputError(
            f"the classes of the images must be the model's ({_listed(ours)}); got {_listed(strange or theirs)}. "
            "Rename the folders, or name the files with a pattern such as 'photos/*/*' to go without classes."
        )
    number_of = [numbers[name.casefold()] for name in theirs]
    return replace(source, targets=tuple(number_of[target] for target in source.targets), class_names=ours)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(islice(names, 5)) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _digest(source: Source) -> str:
    """Return the SHA-256 of names, classes and states of files: records of other images must not be taken for these."""
    total = hashlib.sha256()
    for place, name in enumerate(source.names):
        target = None if source.targets is None else source.targets[place]
        total.update(f"{name}\0{target}\0{source.fingerprint(place)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


# -- the rule ----------------------------------------------------------------------------------------------------------


def swapped(
    guard: LocalGuard[Any], defense: str, evidence: str, threshold: str, tau: float | None, *, alerts: bool = False
) -> LocalGuard[Any]:
    """Return the guard with another aggregation, evidence, threshold or tau; the same guard where none is given.

    Another defense brings its own kind of evidence; `evidence` names one instead. The drift stays; a tau does not,
    since it counts units of the model's own evidence. Its masks are not yet fitted: `Guard.for_patch` does that.
    """
    rule: Defense[Any] = _named(defense) if defense else guard.defense
    if evidence and evidence not in get_args(Kind):
        raise InputError(f"`--evidence` must be one of {', '.join(get_args(Kind))}; got {evidence!r}.")
    settings: Evidence = guard.evidence
    if defense or evidence:
        usual = rule.default_evidence
        low = usual.low if usual.kind == "logits" else 0.0
        settings = Evidence(kind=evidence, low=low if evidence == "logits" else 0.0) if evidence else usual
        settings = replace(settings, drift=guard.evidence.drift)
    if threshold:
        if not isinstance(rule, RobustMasking):
            raise InputError(f"`--threshold` belongs to RobustMasking; got {type(rule).__name__}. Leave it out.")
        rule = replace(rule, threshold=_fraction(threshold))
    if isinstance(rule, (DoubleMasking, MaskedAgreement)):
        new_units = settings.kind != guard.evidence.kind
        rule = replace(rule, tau=tau or 0.0) if tau is not None or new_units else rule
    elif tau is not None:
        raise InputError(
            f"`--tau` belongs to DoubleMasking and MaskedAgreement; got {type(rule).__name__}. Leave it out."
        )
    if isinstance(rule, MaskedAgreement) and not alerts:
        raise InputError("`--defense` must prove labels; MaskedAgreement detects attacks. Use it from Python.")
    return (
        guard
        if rule is guard.defense and settings == guard.evidence
        else replace(guard, defense=rule, evidence=settings)
    )


def _named(name: str) -> Defense[Any]:
    if name not in config.DEFENSES:
        raise InputError(f"`--defense` must be a known defense; got {name!r}. {nearest(name, [*config.DEFENSES])}")
    kind: Any = config.DEFENSES[name]
    unfitted: dict[str, Any] = {"masks": ANYTHING, "cells": 0, "trim": 0}
    made: Defense[Any] = kind(**{each.name: unfitted[each.name] for each in fields(kind) if each.name in unfitted})
    return made


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"`--threshold` must be a share such as 0.2 or 1/5; got {text!r}.") from None


def as_floats(images: Tensor) -> Tensor:
    """Return 8-bit pixels as floats in [0, 1]."""
    return images.float() / 255
