"""`Recipe`: every number of a training run. A recipe is a function here that returns one."""

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, final

from patchguard.data.preprocess import Preprocess, Resize
from patchguard.defenses import Defense, DoubleMasking, MajorityVote, RobustMasking, Undefended
from patchguard.errors import InputError, nearest
from patchguard.evidence import Evidence
from patchguard.guard import Guard
from patchguard.models import build
from patchguard.models.base import CIFAR10_MEAN, CIFAR10_STD
from patchguard.patch import Patch
from patchguard.training.losses import check_weights
from patchguard.windows import Windows

_ANYTHING = Windows.sliding(grid=(1, 1), size=(1, 1))  # until masks are fitted to a patch and a size
_DEFENSES: dict[str, Defense[Any]] = {
    "DoubleMasking": DoubleMasking(masks=_ANYTHING),
    "RobustMasking": RobustMasking(masks=_ANYTHING),
    "MajorityVote": MajorityVote(),
    "Undefended": Undefended(),
}
_OPTIONAL = {"low": float, "clip_norm": float, "input_side": int, "initial": str, "teacher": str, "crop": tuple}


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, network, defense, loss, optimiser and augmentation of one training run.

    Shares (`plain_share`, `warm_up`, the starts of `mask_steps`) are parts of all epochs, so that a recipe keeps its
    shape when `epochs` changes. `mask_steps` lists (start, step): from `start` on, losses search the worst place among
    masks that each hold `step` x `step` neighbouring windows of the patch; 1 is every window. The first `plain_share`
    of training uses the plain loss alone. `ema` is the decay per step of the weight average that is evaluated and
    saved; 0 takes the last weights. `held_out` training images choose settings and checkpoints; 0 learns from all.

    `evidence` is the kind that the defense sees and the losses train: logits clipped from below at `low`, confidence,
    or votes. With `regions` above 0, an ablation learns from so many random regions of each image in place of all.
    `initial` and `teacher` name trained models: weights to start from, and one whose softened answers (logits divided
    by `temperature`) make up the share `trust` of what is to be learned. `input_side` is what images are resized to.
    Crops shift by up to `pad` pixels; `crop`, for photos, is the range of the area that a crop takes; `colour` is how
    far colours move.
    """

    name: str
    dataset: str = "cifar10"
    model: str = "srf"
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    defense: str = "DoubleMasking"
    evidence: str = "logits"
    low: float | None = None
    drift: float = 0.0
    input_side: int | None = None
    resize: Literal["bicubic", "bilinear", "nearest"] = "bicubic"
    patch: Patch = field(default_factory=lambda: Patch(5))
    other_patches: tuple[int, ...] = (2, 8)
    weights: Mapping[str, float] = field(default_factory=lambda: {"plain": 1.0})
    regions: int = 0
    initial: str | None = None
    teacher: str | None = None
    trust: float = 0.5
    temperature: float = 3.0
    plain_share: float = 0.2
    mask_steps: tuple[tuple[float, int], ...] = ((0.0, 4),)
    epochs: int = 60
    batch_size: int = 512
    optimizer: str = "sgd"
    schedule: str = "one_cycle"
    peak_rate: float = 0.3
    warm_up: float = 0.15
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    ema: float = 0.998
    clip_norm: float | None = 5.0
    pad: int = 4
    crop: tuple[float, float] | None = None
    flip: bool = True
    cutout: int = 0
    colour: float = 0.0
    held_out: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        check_weights(self.weights)
        _one_of(self, "defense", tuple(_DEFENSES))
        _one_of(self, "evidence", ("logits", "confidence", "vote", "prediction"))
        _one_of(self, "resize", ("bicubic", "bilinear", "nearest"))
        _one_of(self, "optimizer", ("sgd", "adamw"))
        _one_of(self, "schedule", ("one_cycle", "step"))
        for name in ("epochs", "batch_size"):
            _number(self, name, least=1, whole=True)
        for name in ("pad", "cutout", "held_out", "seed", "regions"):
            _number(self, name, least=0, whole=True)
        for name in ("peak_rate", "weight_decay", "drift"):
            _number(self, name, least=0)
        for name in ("plain_share", "warm_up", "momentum", "label_smoothing", "ema", "trust", "colour"):
            _number(self, name, least=0, most=1.0)
        if self.momentum >= 1 or self.ema >= 1 or self.warm_up >= 1:
            raise InputError("`momentum`, `ema` and `warm_up` must lie below 1.")
        if not self.temperature > 0:
            raise InputError(f"`temperature` must be above 0; got {self.temperature}.")
        if self.input_side is not None:
            _number(self, "input_side", least=1, whole=True)
        if self.crop is not None and not (len(self.crop) == 2 and 0 < self.crop[0] <= self.crop[1] <= 1):
            raise InputError(f"`crop` must be two shares of the area, such as [0.35, 1.0]; got {self.crop}.")
        if self.clip_norm is not None:
            _number(self, "clip_norm", least=0)
            if self.clip_norm == 0:
                raise InputError("`clip_norm` must be above 0, or null for no clipping; got 0.")
        self._check_mask_steps()

    def _check_mask_steps(self) -> None:
        wanted = "`mask_steps` must be pairs (start, step) such as [[0, 4], [0.6, 2]]"
        starts = [start for start, _ in self.mask_steps]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
            raise InputError(f"{wanted}, with starts that rise from 0 and stay below 1; got {self.mask_steps}.")
        if min(step for _, step in self.mask_steps) < 1:
            raise InputError(f"{wanted}, with steps of at least 1; got {self.mask_steps}.")

    def guard(self, size: tuple[int, int], class_names: tuple[str, ...]) -> Guard[Any]:
        """Return the Guard to train: fresh weights, and masks that fit `patch` in source images of `size`."""
        model = build(self.model, classes=len(class_names), **self.model_settings)
        evidence = Evidence(kind=self.evidence, low=self.low, drift=self.drift)
        guard = Guard(self.preprocess(), model, evidence, _DEFENSES[self.defense], class_names)
        return guard.for_patch(self.patch, *size)

    def preprocess(self) -> Preprocess:
        """Return what happens to images before the network: nothing, or one resizing."""
        if self.input_side is None:
            return Preprocess()
        return Preprocess((Resize(height=self.input_side, width=self.input_side, mode=self.resize),))

    def to_json(self) -> dict[str, Any]:
        """Return every setting as JSON values."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return settings

    def changed(self, assignments: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with other settings; `weights.plain` names one entry of a mapping.

        >>> cifar10().changed({"epochs": 3, "weights.plain": 0.5}).weights["plain"]
        0.5
        """
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        for key, value in assignments.items():
            name, _, entry = key.partition(".")
            if name not in settings or (entry and not isinstance(settings[name], Mapping)):
                raise InputError(f"a recipe has no setting {key!r}. {nearest(name, list(settings))}")
            whole = {**settings[name], entry: value} if entry else value
            settings[name] = _converted(name, whole, settings[name])
        return replace(self, **settings)


def _converted(name: str, value: Any, current: Any) -> Any:
    """Return a JSON value in the type that the setting has; refuse one of another kind."""
    try:
        if name == "patch" and not isinstance(value, Patch):
            return Patch(*value) if isinstance(value, (list, tuple)) else Patch(value)
        if name == "mask_steps":
            return tuple((float(start), operator.index(step)) for start, step in value)
        if name == "other_patches":
            return tuple(operator.index(side) for side in value)
        if name == "weights":
            return {loss: float(weight) for loss, weight in value.items()}
        if name in _OPTIONAL:
            return None if value is None else _OPTIONAL[name](value)
        if isinstance(current, float):
            return float(value)
        if isinstance(value, type(current)) and isinstance(value, bool) == isinstance(current, bool):
            return value
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
    raise InputError(f"`{name}` must be a value like {_shown(current)}; got {_shown(value)}.")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, Patch) else json.dumps(value)


def _one_of(recipe: Recipe, name: str, known: tuple[str, ...]) -> None:
    value = getattr(recipe, name)
    if value not in known:
        raise InputError(f"`{name}` must be one of {', '.join(known)}; got {value!r}.")


def _number(recipe: Recipe, name: str, *, least: int, most: float = float("inf"), whole: bool = False) -> None:
    value = getattr(recipe, name)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        limit = f"from {least} to {most}" if most < float("inf") else f"of at least {least}"
        raise InputError(f"`{name}` must be a {'whole ' if whole else ''}number {limit}; got {value!r}.")


# -- recipes -----------------------------------------------------------------------------------------------------------


# Source images of any size are brought to the 32 pixels that the network knows; for CIFAR-10 itself nothing changes.
_CIFAR10: dict[str, Any] = {"input_side": 32, "resize": "bilinear"}


def cifar10() -> Recipe:
    """The default model: double masking of signed logits, trained at its own worst pair of masks."""
    return Recipe(
        name="cifar10",
        **_CIFAR10,
        # Multiples of 64 channels fill the tiles of a GPU's matrix units; 5.2 million parameters.
        model_settings={"field": 7, "widths": [192, 384, 384, 768, 768, 768]},
        drift=1e-3,
        weights={"double_masking": 0.7, "plain": 0.3},
        plain_share=0.15,
        mask_steps=((0.0, 4), (0.8, 2)),
        teacher="cifar10_resnet18",
        # Without these the network knows every training image by heart long before the end.
        weight_decay=1e-3,
        cutout=10,
        colour=0.4,
        epochs=80,
    )


def cifar10_mask_srf() -> Recipe:
    """Robust masking of logits clipped at 0: the default's network, learning on at the worst window of Algorithm 2."""
    return Recipe(
        name="cifar10_mask_srf",
        **_CIFAR10,
        model_settings={"field": 7, "widths": [192, 384, 384, 768, 768, 768]},
        defense="RobustMasking",
        low=0.0,
        drift=1e-3,
        weights={"robust_masking": 0.7, "plain": 0.3},
        plain_share=0.0,
        mask_steps=((0.0, 4), (0.5, 2)),
        initial="cifar10",
        teacher="cifar10_resnet18",
        weight_decay=1e-3,
        cutout=10,
        colour=0.4,
        peak_rate=0.1,
        epochs=12,
    )


def cifar10_mask_ds() -> Recipe:
    """Robust masking of the confidences of DS-ResNet-18: a ResNet-18 that sees bands of four columns."""
    return Recipe(
        name="cifar10_mask_ds",
        **_CIFAR10,
        model="ds_resnet18",
        defense="RobustMasking",
        evidence="confidence",
        drift=1e-4,
        weights={"local": 1.0},
        plain_share=0.0,
        regions=1,
        teacher="cifar10_resnet18",
        peak_rate=0.2,
        epochs=100,
    )


def cifar10_resnet18() -> Recipe:
    """An ordinary ResNet-18 without defense: what a certificate costs in accuracy, and a teacher."""
    return Recipe(
        name="cifar10_resnet18",
        **_CIFAR10,
        model="resnet18",
        model_settings={"small_images": True, "width": 0.75, "mean": list(CIFAR10_MEAN), "std": list(CIFAR10_STD)},
        defense="Undefended",
        other_patches=(),
        plain_share=1.0,
        peak_rate=0.2,
        cutout=8,
        epochs=60,
    )


def tiny() -> Recipe:
    """A thin network and small batches: seconds on a CPU, for tests and first steps."""
    return Recipe(
        name="tiny",
        model_settings={"field": 5, "widths": [12, 16]},
        patch=Patch(3),
        other_patches=(),
        weights={"double_masking": 0.5, "plain": 0.5},
        mask_steps=((0.0, 8), (0.6, 4)),
        epochs=3,
        batch_size=64,
        peak_rate=0.2,
        ema=0.9,
        held_out=200,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe for recipe in (cifar10, cifar10_mask_srf, cifar10_mask_ds, cifar10_resnet18, tiny)
}


def named(name: str) -> Recipe:
    """Return the recipe of this name."""
    if name not in RECIPES:
        raise InputError(f"`recipe` must be a known name; got {name!r}. {nearest(name, list(RECIPES))}")
    return RECIPES[name]()
