"""`Recipe`: every setting of a training run, in groups. The recipes themselves are in recipes.py and paper_recipes.py.

    recipe = recipes.get_recipe("tiny").override({"schedule.epochs": 5, "max_lr": 0.1})
    recipe = read_recipe(json.loads(text))         # also what earlier releases wrote

A key names a setting by its group (`schedule.max_lr`) or, since no two groups share a name, alone (`max_lr`).
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import Meta, Struct, field, inspect

from patchguard.defenses.base import LARGEST_TAU
from patchguard.errors import InputError, nearest
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.patch import Patch
from patchguard.training.losses import INTERVAL, check_weights

CIFAR10_SIZE, PHOTO_SIZE = 32, 224
INTERVAL_BOUNDS = "IntervalBounds"

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
BelowOne: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings."""


@final
class DataSettings(Settings, frozen=True, kw_only=True):
    """What to learn from.

    `image_size` is the side that photos are resized to when they are read: the source images, in whose pixels patches
    are counted. CIFAR-10 stays as it is.
    """

    dataset: str = "cifar10"
    image_size: Positive | None = None


@final
class ModelSettings(Settings, frozen=True, kw_only=True):
    """The network: its name in the registry, its own settings, and the trained model whose weights it starts from.

    With `freeze`, only the last layer learns: features are computed once per image, without augmentation.
    """

    name: str = "srf"
    settings: dict[str, Any] = field(default_factory=dict)
    init_from: str | None = None
    freeze: bool = False

    def __post_init__(self) -> None:
        if self.freeze and self.init_from is None:
            raise InputError(
                "`model.freeze` needs trained features: set `model.init_from` to a model, or freeze=false."
            )


@final
class GuardSettings(Settings, frozen=True, kw_only=True):
    """What stands around the network.

    `input_size` is what the guard resizes source images to. `evidence` is the kind that the defense sees and the losses
    train; logits are clipped from below at `low`. `tau` belongs to `DoubleMasking`. "IntervalBounds" stands for an
    `IntervalGuard`, which has no evidence.
    """

    defense: Literal["DoubleMasking", "RobustMasking", "MajorityVote", "Undefended", "IntervalBounds"] = "DoubleMasking"
    tau: Annotated[float, Meta(ge=0, le=LARGEST_TAU)] = 0.0
    evidence: Literal["logits", "confidence", "vote", "prediction"] = "logits"
    low: float | None = None
    drift: NonNegative = 0.0
    input_size: Positive | None = None
    resize: Literal["bicubic", "bilinear", "nearest"] = "bicubic"

    def __post_init__(self) -> None:
        if self.tau and self.defense != "DoubleMasking":
            raise InputError(
                f"`guard.tau` must be 0 unless the defense is DoubleMasking; got {self.tau} with {self.defense}."
            )


@final
class LossSettings(Settings, frozen=True, kw_only=True):
    """What training minimizes, and when.

    Fractions are parts of all epochs, so that a recipe keeps its shape when `epochs` changes.

    `weights` gives each loss of losses.py its weight. For the first `warmup_fraction`, the plain loss of logits that
    are not clipped stands alone: clipped, the logits of a random network are mostly 0, and some networks never recover.
    `mask_steps` lists (start, step): from the fraction `start` on, losses search for the worst place among masks that
    each cover `step` x `step` neighboring windows of the patch; 1 is every window. `mask_cells` replaces the windows of
    the patch by squares of that many cells.

    For the first `subsample_fraction`, an `srf` network computes only every second cell of each row and column, in less
    than half of the time. A BagNet sees a random quarter of each image, during the warmup only.

    With `regions` above 0, an ablation learns from that many regions of each image (masks.py), and interval bounds from
    that many random positions of the patch; for the fraction `ramp` after the warmup, the contents of the patch grow to
    their full range.

    `teacher` names a trained model whose softened answers (logits divided by `temperature`) make up `distill_weight` of
    the target distribution.
    """

    weights: dict[str, NonNegative] = field(default_factory=lambda: {"plain": 1.0})
    label_smoothing: Fraction = 0.0
    warmup_fraction: Fraction = 0.2
    subsample_fraction: Fraction = 0.0
    mask_steps: tuple[tuple[float, int], ...] = ((0.0, 4),)
    mask_cells: Positive | None = None
    regions: Count = 0
    ramp: Fraction = 0.0
    teacher: str | None = None
    distill_weight: Fraction = 0.5
    temperature: Annotated[float, Meta(gt=0)] = 3.0

    def __post_init__(self) -> None:
        check_weights(self.weights)
        expected = "`loss.mask_steps` must be pairs (start, step) such as [[0, 4], [0.6, 2]]"
        starts = [start for start, _ in self.mask_steps]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
            raise InputError(f"{expected}, with starts that rise from 0 and stay below 1; got {self.mask_steps}.")
        if min(step for _, step in self.mask_steps) < 1:
            raise InputError(f"{expected}, with steps of at least 1; got {self.mask_steps}.")


@final
class OptimizerSettings(Settings, frozen=True, kw_only=True):
    """How a step changes the weights; `ema_decay` per step of the averaged weights, which are saved (0: the last)."""

    name: Literal["sgd", "adamw"] = "sgd"
    batch_size: Positive = 512
    momentum: BelowOne = 0.9
    nesterov: bool = True
    weight_decay: NonNegative = 5e-4
    clip_grad_norm: Annotated[float, Meta(gt=0)] | None = 5.0
    ema_decay: BelowOne = 0.998


@final
class ScheduleSettings(Settings, frozen=True, kw_only=True):
    """The number of epochs, and the learning rate over them.

    It rises linearly from 0 to `max_lr` over the first `lr_warmup_fraction` of all epochs. Then "one_cycle" falls along
    half a cosine, and "step" multiplies by `lr_gamma` at each of `lr_milestones`, which are fractions of all epochs.
    """

    name: Literal["one_cycle", "step"] = "one_cycle"
    epochs: Positive = 60
    max_lr: NonNegative = 0.3
    lr_warmup_fraction: BelowOne = 0.15
    lr_milestones: tuple[float, ...] = (0.5, 0.75)
    lr_gamma: Fraction = 0.1

    def __post_init__(self) -> None:
        steps = list(self.lr_milestones)
        if steps != sorted(set(steps)) or not all(0 < step < 1 for step in steps):
            raise InputError(f"`schedule.lr_milestones` must be rising fractions between 0 and 1; got {steps}.")


@final
class AugmentationSettings(Settings, frozen=True, kw_only=True):
    """Random changes of training images.

    Crops shift by up to `crop_padding` pixels; with `crop_scale`, for photos, they take that range of the area instead.
    `mixup` is the largest fraction of another image, and of its label, that is blended in.
    """

    crop_padding: Count = 4
    crop_scale: tuple[float, float] | None = None
    flip: bool = True
    cutout: Count = 0
    color_jitter: Fraction = 0.0
    mixup: Annotated[float, Meta(ge=0, le=0.5)] = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise InputError(
                "`augmentation.crop_scale` must be two fractions of the area, such as [0.35, 1.0]; "
                f"got {list(self.crop_scale)}."
            )


@final
class EvaluationSettings(Settings, frozen=True, kw_only=True):
    """`held_out` training images (a number or a fraction) choose among weights; `other_patches` are measured, too."""

    held_out: Count | BelowOne = 5000
    other_patches: tuple[Positive, ...] = (2, 8)


@final
class Recipe(Settings, frozen=True, kw_only=True):
    """Every setting of one training run; `patch` is the one that the guard should withstand, in source pixels."""

    name: str
    seed: Count = 0
    patch: Patch = Patch(5)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    guard: GuardSettings = GuardSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    augmentation: AugmentationSettings = AugmentationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    def __post_init__(self) -> None:
        weights, regions, input_size = self.loss.weights, self.loss.regions, self.guard.input_size
        if self.guard.defense == INTERVAL_BOUNDS:
            if not set(weights) <= {"plain", INTERVAL} or regions < 1 or input_size is not None:
                raise InputError(
                    f"with {INTERVAL_BOUNDS}, `loss.weights` must be those of plain and {INTERVAL}, `loss.regions` at "
                    f"least 1 and `guard.input_size` null; got {weights}, {regions} and {input_size}."
                )
        elif INTERVAL in weights:
            raise InputError(
                f"the loss {INTERVAL} must go with the defense {INTERVAL_BOUNDS}; got {self.guard.defense}."
            )

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source images."""
        side = CIFAR10_SIZE if self.data.dataset == "cifar10" else self.data.image_size or PHOTO_SIZE
        return side, side

    @property
    def preprocess(self) -> Preprocess:
        """What happens to images before the network: nothing, or one resizing."""
        side = self.guard.input_size
        return Preprocess() if side is None else Preprocess((Resize(height=side, width=side, mode=self.guard.resize),))

    def count_held_out(self, total: int) -> int:
        """Return how many of `total` training images are held out."""
        held_out = self.evaluation.held_out
        return held_out if isinstance(held_out, int) else round(held_out * total)

    def to_json(self) -> dict[str, Any]:
        """Return every setting as JSON values, in groups."""
        settings: dict[str, Any] = json.loads(msgspec.json.encode(self))
        return settings

    def override(self, assignments: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with other settings, each named with its group or alone.

        >>> recipe = Recipe(name="mine").override({"epochs": 3, "weights.local": 0.5, "optimizer": {"name": "adamw"}})
        >>> recipe.schedule.epochs, recipe.loss.weights, recipe.optimizer.name
        (3, {'plain': 1.0, 'local': 0.5}, 'adamw')
        """
        settings = self.to_json()
        for key, value in assignments.items():
            _assign(settings, key, value)
        return _validate(settings)

    def differences(self, other: "Recipe") -> list[str]:
        """Return the keys of the settings in which two recipes differ."""
        return [
            ".".join(path)
            for path in dict.fromkeys(PATHS.values())
            if functools.reduce(getattr, path, self) != functools.reduce(getattr, path, other)
        ]


# -- reading -----------------------------------------------------------------------------------------------------------

GROUPS: dict[str, type[Settings]] = {
    each.name: each.type
    for each in msgspec.structs.fields(Recipe)
    if isinstance(each.type, type) and issubclass(each.type, Settings)
}
# What earlier releases called a setting, in files and on the command line. Their recipes had no groups.
ALIASES = {
    "model": "model.name",
    "model_settings": "model.settings",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "image_side": "data.image_size",
    "input_side": "guard.input_size",
    "initial": "model.init_from",
    "trust": "loss.distill_weight",
    "plain_share": "loss.warmup_fraction",
    "thin_share": "loss.subsample_fraction",
    "peak_rate": "schedule.max_lr",
    "warm_up": "schedule.lr_warmup_fraction",
    "rate_steps": "schedule.lr_milestones",
    "rate_factor": "schedule.lr_gamma",
    "clip_norm": "optimizer.clip_grad_norm",
    "ema": "optimizer.ema_decay",
    "pad": "augmentation.crop_padding",
    "crop": "augmentation.crop_scale",
    "colour": "augmentation.color_jitter",
    "mixing": "augmentation.mixup",
}

# Where each name leads: with its group, alone, or as it was before.
PATHS: dict[str, tuple[str, ...]] = {
    **{name: (group, name) for group, kind in GROUPS.items() for name in kind.__struct_fields__},
    **{f"{group}.{name}": (group, name) for group, kind in GROUPS.items() for name in kind.__struct_fields__},
    **{name: (name,) for name in Recipe.__struct_fields__ if name not in GROUPS},
}
PATHS |= {old: PATHS[new] for old, new in ALIASES.items()}
MAPPINGS = (PATHS["loss.weights"], PATHS["model.settings"])  # whose entries can be set one by one


def make_recipe(name: str, base: Recipe | None = None, **settings: Any) -> Recipe:
    """Return a recipe with these settings, by group; all others are those of `base`, or the defaults."""
    return (base or Recipe(name=name)).override({"name": name, **settings})


def read_recipe(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a model file, a checkpoint or a JSON file holds, in the words of any release.

    A setting that is missing is younger than the file and has its default.
    """
    return Recipe(name="").override(settings)


def _assign(settings: dict[str, Any], key: str, value: Any) -> None:
    """Put one value into grouped settings; a mapping given for a group changes the settings that it names."""
    if key in GROUPS and isinstance(value, Mapping):
        for name, each in value.items():
            _assign(settings, f"{key}.{name}", each)
        return
    *groups, name = _locate(key)
    for group in groups:
        settings = settings[group]
    settings[name] = _read_patch(value) if name == "patch" else value


def _locate(key: str) -> tuple[str, ...]:
    """Return the path of a setting, or of an entry of one that is a mapping."""
    if key in PATHS:
        return PATHS[key]
    setting, _, entry = key.rpartition(".")
    if PATHS.get(setting) in MAPPINGS:
        return (*PATHS[setting], entry)
    known = [name for name in PATHS if name not in ALIASES and "." not in name]
    raise InputError(f"a recipe has no setting {key!r}. {nearest(key.rpartition('.')[2], known)}")


def _read_patch(value: Any) -> dict[str, int]:
    try:
        if isinstance(value, Mapping):
            return asdict(Patch(**value))
        return asdict(Patch(*value) if isinstance(value, (list, tuple)) else Patch(value))
    except TypeError:
        raise InputError(f"`patch` must be a side such as 5, or [height, width]; got {value!r}.") from None


def _validate(settings: dict[str, Any]) -> Recipe:
    """Return the recipe of complete settings; say in one sentence which of them is wrong and what it must be."""
    try:
        return msgspec.convert(settings, Recipe)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        location = re.search(r"`\$\.([\w.]+)", str(error))
    path = location[1].split(".") if location else []
    kind: Any = inspect.type_info(Recipe)
    value: Any = settings
    default: Any = Recipe(name="").to_json()
    for name in path:
        kind = next(each.type for each in kind.fields if each.name == name)
        value, default = value[name], default[name]
    raise InputError(f"`{'.'.join(path)}` must be {describe_kind(kind, default)}; got {json.dumps(value)}.")


def describe_kind(kind: Any, default: Any) -> str:
    """Return in words what values a setting takes."""
    match kind:
        case inspect.UnionType():
            return " or ".join(describe_kind(each, default) for each in kind.types)
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.IntType() | inspect.FloatType():
            limits = {"of at least": kind.ge, "above": kind.gt, "at most": kind.le, "below": kind.lt}
            words = " and ".join(f"{word} {limit:.15g}" for word, limit in limits.items() if limit is not None)
            return f"a {'whole ' if isinstance(kind, inspect.IntType) else ''}number {words}".rstrip()
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.StrType():
            return "text"
        case inspect.TupleType():
            return f"{len(kind.item_types)} numbers in a list"
        case _:
            return f"a value like {json.dumps(default)}"
