"""`Job`: a guard, images and patches that belong together, checked before any work begins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, final, get_args

from patchguard import runtime
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.guard import Guard, Plan
from patchguard.guards.local import LocalGuard
from patchguard.guards.pixel_masks import PIXEL_MASKS, PixelMaskGuard, defend
from patchguard.patch import Patch, Space
from patchguard.runs.images import align_classes, digest_source, find_usual_size
from patchguard.runs.summary import CertifySettings, split_rule
from patchguard.storage import zoo

SMALL = 100  # pixels: below this side, the default patch is given in pixels
CURVE = (Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(1), Fraction(8, 5))  # 1, 2, 3, 5, 8 for side 5


# -- patches -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class WrittenPatch:
    """A patch as a user writes it: 5, 24x88, or 2% of each image's area.

    >>> WrittenPatch.read("24x88").key, WrittenPatch.read("2%").at(224, 224)
    ('24x88', Patch(height=32, width=32, count=1))
    """

    text: str
    pixels: Patch | None
    fraction: Fraction | None

    @classmethod
    def read(cls, text: str) -> "WrittenPatch":
        """Read the text; refuse anything else."""
        pixels = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text)
        percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", text)
        if pixels and int(pixels[1]) and int(pixels[2] or pixels[1]):
            return cls(text, Patch(int(pixels[1]), int(pixels[2] or pixels[1])), None)
        if percent and 0 < Fraction(percent[1]) <= 100:
            return cls(text, None, Fraction(percent[1]) / 100)
        raise InputError(f"`--patch` must be pixels such as 5 or 24x88, or a percentage such as 2%; got {text!r}.")

    @property
    def key(self) -> str:
        """The name of this patch in records: 5x5, 24x88 or 2%."""
        if self.pixels is not None:
            return f"{self.pixels.height}x{self.pixels.width}"
        exact = f"{float((self.fraction or 0) * 100):.6f}".rstrip("0").rstrip(".")
        return f"{exact}%"

    def at(self, height: int, width: int) -> Patch:
        """Return the patch in the pixels of an image; refuse one that does not fit."""
        if self.pixels is None:
            return Patch.of_area(self.fraction or 0, height=height, width=width)
        self.pixels.check_fits(height, width)
        return self.pixels


def read_patches(texts: Sequence[str]) -> tuple[WrittenPatch, ...]:
    """Read patches; the same one is taken once."""
    patches: dict[str, WrittenPatch] = {}
    for patch in map(WrittenPatch.read, texts):
        patches.setdefault(patch.key, patch)
    return tuple(patches.values())


def choose_default_patch(recipe: dict[str, Any] | None, size: tuple[int, int]) -> WrittenPatch:
    """Return the patch that the model was trained against; else 5 pixels in a small image, 2 % of a large one."""
    trained = (recipe or {}).get("patch")
    if isinstance(trained, dict) and trained.get("count") == 1:
        return WrittenPatch.read(f"{trained.get('height')}x{trained.get('width')}")
    return WrittenPatch.read("5" if min(size) < SMALL else "2%")


def choose_curve_sides(patch: Patch, size: tuple[int, int]) -> tuple[int, ...]:
    """Return the sides of a curve over patch sizes: up to the patch, and one beyond it where the image has room."""
    side = max(patch.height, patch.width)
    return tuple(sorted({int(-(-side * part // 1)) for part in CURVE if side * part <= min(size)}))


# -- the job -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run computes: everything that its records depend on."""

    guard: Guard
    source: Source
    patches: tuple[WrittenPatch, ...]
    curve: tuple[int, ...]  # sides of squares that are certified with refitted masks
    top_k: int
    model: str
    digest: str
    data: str
    certificates: Path | None
    patch_space: Space = "source"  # "input": images are resized and cropped first, and `source` holds the results
    largest: bool = True  # whether the largest certified square is looked for
    file: zoo.ModelFile | None = None  # that the guard was read from
    fitted: str | None = None  # to which patch in which size another defense was fitted; None keeps the model's masks

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the model's classes; numbers where nobody names them."""
        numbers = tuple(str(number) for number in range(self.guard.classes))
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
            "data_digest": digest_source(self.source),
            "images": len(self.source),
            "patches": tuple(patch.key for patch in self.patches),
            "patch_space": self.patch_space,
            **split_rule(self.guard.settings()),
            "class_names": self.class_names,
            "labeled": self.source.targets is not None,
            "fitted": self.fitted,
            "shards": runtime.world_size(),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return what is computed for images of this size; raise where nothing can be."""
        patches = [patch.at(*size) for patch in self.patches]
        own = self.fitted is None
        return self.guard.plan(patches, *size, sides=self.curve, top_k=self.top_k, own=own, largest=self.largest)


def prepare(
    *,
    source: Source,
    data: str = "sample",
    model: str | Path | Guard = "cifar10",
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
    masks: int | None = None,
    trust_code: bool = False,
) -> Job:
    """Load the model, and check that it, the images, the patches and the defense fit together.

    `model` is a name, a path or a `Guard`, and `data` what the user calls the images. `patch_space` is where patches
    lie: in the "source" images, or in the network's "input": images are then resized and cropped first, rounded to 8
    bits, and taken for the source. `curve` is whether other sizes of the patch are certified, too, and `alerts` whether
    the guard may be one that promises the label or an alert. `masks` is how many masks lie along each axis for the
    defense PixelMasks, which takes the network as a whole. `trust_code` lets code run that `model` names.
    """
    written = read_patches(patches)
    if patch_space not in get_args(Space):
        raise InputError(f"`--patch-space` must be {' or '.join(get_args(Space))}; got {patch_space!r}.")
    space: Space = "input" if patch_space == "input" else "source"
    if space == "input" and not written:
        raise InputError("`--patch-space input` needs --patch: the model's own patch is one in source pixels.")
    loaded = model if isinstance(model, Guard) else _load(model, written, source, trust_code)
    recipe = None if isinstance(model, Guard) else zoo.recipe(model)
    in_file, digest = loaded, loaded.digest
    source = align_classes(source, loaded)
    if space == "input":
        source, loaded = source.preprocess(loaded.to_network_pixels), loaded.without_preprocess()
    size = find_usual_size(source)
    written = written or (choose_default_patch(recipe, size),)
    in_pixels = [patch.at(*size) for patch in written]
    if masks is not None and defense != PIXEL_MASKS:
        raise InputError(f"`--masks` is for --defense {PIXEL_MASKS}. Leave it out.")
    if defense == PIXEL_MASKS:
        guard: Guard = _mask_pixels(loaded, in_pixels[0], size, masks)
        guard = guard.override(evidence=evidence, threshold=threshold, tau=tau)
    else:
        guard = loaded.override(defense=defense, evidence=evidence, threshold=threshold, tau=tau)
    if guard.detects and not alerts:
        raise InputError(
            f"the defense must prove labels; {guard.settings()['defense']} only detects attacks. Use it from Python, "
            "or with `patchguard attack`."
        )
    if defense:
        guard = guard.for_patch(in_pixels[0], *size)
    job = Job(
        guard=guard,
        source=source,
        patches=written,
        curve=choose_curve_sides(max(in_pixels, key=lambda patch: patch.area), size) if curve else (),
        top_k=top_k,
        model=type(model).__name__ if isinstance(model, Guard) else zoo.short_name(model),
        digest=digest,
        data=Path(data).name if Path(data).is_absolute() else data,
        certificates=certificates,
        patch_space=space,
        largest=curve,
        file=None if isinstance(model, Guard) else zoo.file_of(model, in_file),
        fitted=f"{in_pixels[0].height}x{in_pixels[0].width} in {size[0]}x{size[1]}" if defense else None,
    )
    job.plan(size)  # raises here, before anything is written, where nothing could be certified
    if certificates is not None:
        _check_certificates(job)
    return job


def _mask_pixels(guard: Guard, patch: Patch, size: tuple[int, int], masks: int | None) -> PixelMaskGuard:
    """Return masks on pixels around the whole network of a guard."""
    if isinstance(guard, PixelMaskGuard):
        per_axis = guard.masks.per_axis if masks is None else masks
        return replace(guard, masks=MaskSet.covering(size, patch, per_axis))
    if not isinstance(guard, LocalGuard):
        raise InputError(f"`--defense {PIXEL_MASKS}` needs a network with logits; got {type(guard).__name__}.")
    return defend(guard, patch, size=size, masks=6 if masks is None else masks)


def _load(model: str | Path, written: Sequence[WrittenPatch], source: Source, trust_code: bool) -> Guard:
    """Return the guard; a network of the user's own is defended against the first patch, in the usual size."""
    if not zoo.is_own(model):
        return zoo.load(model, trust_code=trust_code)
    size = find_usual_size(source)
    patch = (written or (choose_default_patch(None, size),))[0]
    return zoo.load(model, trust_code=trust_code, patch=patch.at(*size), size=size)


def _check_certificates(job: Job) -> None:
    if job.patch_space != "source":
        raise InputError("`--certificates` are about source images. Leave it out, or --patch-space input.")
    job.guard.validate_claims()
    if job.top_k != 1:
        raise InputError(f"`--certificates` needs --top-k 1; got {job.top_k}. Leave it out.")
