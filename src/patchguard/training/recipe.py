"""`Recipe`: every number of a training run. The recipes themselves are functions in recipes.py and paper_recipes.py."""

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast, final

from patchguard.defenses import Defense, DoubleMasking, MajorityVote, RobustMasking, Undefended
from patchguard.defenses.base import LARGEST_TAU
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError, nearest
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.models.interval_cnn import IntervalCnn
from patchguard.patch import Patch
from patchguard.training.losses import INTERVAL, check_weights

_ANYTHING = Windows.sliding(grid=(1, 1), size=(1, 1))  # until masks are fitted to a patch and a size
INTERVAL_BOUNDS = "IntervalBounds"
_DEFENSES: dict[str, Defense[Any]] = {
    "DoubleMasking": DoubleMasking(masks=_ANYTHING),
    "RobustMasking": RobustMasking(masks=_ANYTHING),
    "MajorityVote": MajorityVote(),
    "Undefended": Undefended(),
}
_OPTIONAL = {
    "low": float,
    "clip_norm": float,
    "initial": str,
    "teacher": str,
    "crop": tuple,
    **dict.fromkeys(("input_side", "image_side", "mask_cells"), int),
}
CIFAR10_SIDE, PHOTO_SIDE = 32, 224


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, network, defense, loss, optimiser and augmentation of one training run.

    Shares (`plain_share`, `warm_up`, the starts of `mask_steps`) are parts of all epochs, so that a recipe keeps its
    shape when `epochs` changes. `mask_steps` lists (start, step): from `start` on, losses search the worst place among
    masks that each hold `step` x `step` neighbouring windows of the patch; 1 is every window. The first `plain_share`
    of training uses the plain loss alone, of logits that are not clipped: clipped, those of a random network are mostly
    0, and some networks never get away from there. For the first `thin_share` an `srf` network computes only every
    second cell of each row and column, in less than half of the time; a BagNet, which has no padding that would tell a
    part from the whole, looks at a random quarter of the images, in the plain part of training alone. `ema` is the
    decay per step of the weight average that is evaluated and saved; 0 takes the last weights. `held_out` training
    images choose settings and checkpoints: a number of them, or, below 1, a share; 0 learns from all.

    `evidence` is the kind that the defense sees and the losses train: logits clipped from below at `low`, confidence,
    or votes. `tau` is `DoubleMasking`'s own. With `regions` above 0, an ablation learns from so many regions of each
    image in place of all: spaced evenly in their order, from a random one on (comb.py). `initial` and `teacher` name
    trained models: weights to start from, and one whose softened answers (logits divided by `temperature`) make up the
    share `trust` of what is to be learned. Crops shift by up to `pad` pixels; `crop`, for photos, is the range of the
    area that a crop takes; `colour` is how far colours move. `mixing` is the largest share of another image that shines
    through, and of its label that is to be learned; among processes, of the same one's.

    `image_side` is the side that photos are brought to when they are read: the source images, in whose pixels patches
    are counted (CIFAR-10 stays as it is). `input_side` is what the guard itself then resizes them to. `mask_cells`, if
    given, makes the masks of losses squares of so many cells in place of the windows of `patch`. The step schedule
    multiplies the rate by `rate_factor` at each of `rate_steps`, which are shares of all epochs.

    The defense "IntervalBounds" is an `IntervalGuard`. Its loss, "interval", takes `regions` random positions of the
    patch per image; for the share `ramp` of training after the plain one, the patch's contents grow to the full range.
    """

    name: str
    dataset: str = "cifar10"
    model: str = "srf"
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    defense: str = "DoubleMasking"
    tau: float = 0.0
    evidence: str = "logits"
    low: float | None = None
    drift: float = 0.0
    input_side: int | None = None
    image_side: int | None = None
    resize: Literal["bicubic", "bilinear", "nearest"] = "bicubic"
    patch: Patch = field(default_factory=lambda: Patch(5))
    other_patches: tuple[int, ...] = (2, 8)
    weights: Mapping[str, float] = field(default_factory=lambda: {"plain": 1.0})
    regions: int = 0
    ramp: float = 0.0
    initial: str | None = None
    teacher: str | None = None
    trust: float = 0.5
    temperature: float = 3.0
    plain_share: float = 0.2
    thin_share: float = 0.0
    mask_steps: tuple[tuple[float, int], ...] = ((0.0, 4),)
    mask_cells: int | None = None
    epochs: int = 60
    batch_size: int = 512
    optimizer: str = "sgd"
    schedule: str = "one_cycle"
    rate_steps: tuple[float, ...] = (0.5, 0.75)
    rate_factor: float = 0.1
    peak_rate: float = 0.3
    warm_up: float = 0.15
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    ema: float = 0.998
    clip_norm: float | None = 5.0
    pad: int = 4
    crop: tuple[float, float] | None = None
    flip: bool = True
    cutout: int = 0
    colour: float = 0.0
    mixing: float = 0.0
    held_out: int | float = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        check_weights(self.weights)
        _one_of(self, "defense", (*_DEFENSES, INTERVAL_BOUNDS))
        _one_of(self, "evidence", ("logits", "confidence", "vote", "prediction"))
        _one_of(self, "resize", ("bicubic", "bilinear", "nearest"))
        _one_of(self, "optimizer", ("sgd", "adamw"))
        _one_of(self, "schedule", ("one_cycle", "step"))
        for name in ("epochs", "batch_size"):
            _number(self, name, least=1, whole=True)
        for name in ("pad", "cutout", "seed", "regions"):
            _number(self, name, least=0, whole=True)
        for name in ("peak_rate", "weight_decay", "drift"):
            _number(self, name, least=0)
        for name in (
            "plain_share",
            "thin_share",
            "warm_up",
            "momentum",
            "label_smoothing",
            "ema",
            "trust",
            "colour",
            "rate_factor",
            "ramp",
        ):
            _number(self, name, least=0, most=1.0)
        _number(self, "mixing", least=0, most=0.5)
        _number(self, "tau", least=0, most=LARGEST_TAU)
        if self.tau and self.defense != "DoubleMasking":
            raise InputError(
                f"`tau` belongs to the defense DoubleMasking; got {self.tau} with {self.defense}. Set it to 0."
            )
        if self.momentum >= 1 or self.ema >= 1 or self.warm_up >= 1:
            raise InputError("`momentum`, `ema` and `warm_up` must lie below 1.")
        if not self.temperature > 0:
            raise InputError(f"`temperature` must be above 0; got {self.temperature}.")
        for name in ("input_side", "image_side", "mask_cells"):
            if getattr(self, name) is not None:
                _number(self, name, least=1, whole=True)
        _number(self, "held_out", least=0, whole=isinstance(self.held_out, int) or self.held_out >= 1)
        if list(self.rate_steps) != sorted(set(self.rate_steps)) or not all(0 < step < 1 for step in self.rate_steps):
            raise InputError(f"`rate_steps` must be rising shares between 0 and 1; got {list(self.rate_steps)}.")
        if self.crop is not None and not (len(self.crop) == 2 and 0 < self.crop[0] <= self.crop[1] <= 1):
            raise InputError(f"`crop` must be two shares of the area, such as [0.35, 1.0]; got {self.crop}.")
        if self.clip_norm is not None:
            _number(self, "clip_norm", least=0)
            if self.clip_norm == 0:
                raise InputError("`clip_norm` must be above 0, or null for no clipping; got 0.")
        self._check_mask_steps()
        self._check_interval()

    def _check_mask_steps(self) -> None:
        wanted = "`mask_steps` must be pairs (start, step) such as [[0, 4], [0.6, 2]]"
        starts = [start for start, _ in self.mask_steps]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
            raise InputError(f"{wanted}, with starts that rise from 0 and stay below 1; got {self.mask_steps}.")
        if min(step for _, step in self.mask_steps) < 1:
            raise InputError(f"{wanted}, with steps of at least 1; got {self.mask_steps}.")

    def _check_interval(self) -> None:
        if self.defense == INTERVAL_BOUNDS:
            if not set(self.weights) <= {"plain", INTERVAL} or self.regions < 1 or self.input_side is not None:
                raise InputError(
                    f"`weights` of {INTERVAL_BOUNDS} must be those of plain and {INTERVAL}, `regions` at least 1 and "
                    f"`input_side` null; got {dict(self.weights)}, {self.regions} and {self.input_side}."
                )
        elif INTERVAL in self.weights:
            raise InputError(f"the loss {INTERVAL} must go with the defense {INTERVAL_BOUNDS}; got {self.defense}.")

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source images."""
        side = CIFAR10_SIDE if self.dataset == "cifar10" else self.image_side or PHOTO_SIDE
        return side, side

    def held_out_of(self, count: int) -> int:
        """Return how many of `count` training images are held out."""
        return self.held_out if isinstance(self.held_out, int) else round(self.held_out * count)

    def guard(self, size: tuple[int, int], class_names: tuple[str, ...]) -> LocalGuard[Any] | IntervalGuard:
        """Return the LocalGuard to train: fresh weights, and masks that fit `patch` in source images of `size`."""
        model = build(self.model, classes=len(class_names), **self.model_settings)
        if self.defense == INTERVAL_BOUNDS:
            model.check_size(*size)
            return IntervalGuard(cast(IntervalCnn, model), class_names)
        evidence = Evidence(kind=self.evidence, low=self.low, drift=self.drift)
        defense = DoubleMasking(masks=_ANYTHING, tau=self.tau) if self.tau else _DEFENSES[self.defense]
        guard = LocalGuard(self.preprocess(), model, evidence, defense, class_names)
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

        >>> Recipe(name="mine").changed({"epochs": 3, "weights.plain": 0.5}).weights["plain"]
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
        if name == "rate_steps":
            return tuple(float(step) for step in value)
        if name == "held_out" and not isinstance(value, bool):
            return value if isinstance(value, int) else float(value)
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
