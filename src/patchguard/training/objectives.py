"""`Objective`: what depends on the kind of guard that is trained: how it is built, what a step runs, and its loss.

`CellObjective` trains a `LocalGuard` on the evidence of its cells, `IntervalObjective` an `IntervalGuard` on interval
bounds. The defense in the recipe chooses one of them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchguard.defenses import Defense, DoubleMasking, MajorityVote, RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.models.ablation import Ablation
from patchguard.models.bagnet import BagNet
from patchguard.models.base import LocalModel
from patchguard.models.srf import Srf
from patchguard.runtime import derive_seed
from patchguard.training import losses
from patchguard.training.augment import BatchRandom, crop_quarter
from patchguard.training.curriculum import Stage, plan_stages
from patchguard.training.features import LastLayer, require_last_layer
from patchguard.training.interval_loss import BoundedNetwork, sample_patches, worst_scores
from patchguard.training.masks import coarsen, project_to_regions, sample_regions, subsample_boxes
from patchguard.training.recipe import INTERVAL_BOUNDS, Recipe

TrainableGuard: TypeAlias = LocalGuard[Any] | IntervalGuard
Size: TypeAlias = tuple[int, int]

QUARTER = 3  # what this seed is for; trainer.py has 0 to 2
_ANY = Windows.sliding(grid=(1, 1), size=(1, 1))  # until masks are fitted to a patch and a size


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """What one step learns from, and how its answers are compared with the target.

    `images` are pixels, or the features of a frozen network.
    """

    images: Float[Tensor, "batch channels height width"]
    target: Int64[Tensor, " batch"]
    stage: Stage
    random: BatchRandom
    step: int
    criterion: losses.CrossEntropy


class Objective(ABC):
    """The loss of one recipe, for a guard with source images of `size`."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        self.recipe, self.size, self.device = recipe, size, device
        self.preprocess = recipe.preprocess

    @abstractmethod
    def build_guard(self, class_names: tuple[str, ...]) -> Any:
        """Return the guard to train, with fresh weights."""

    @abstractmethod
    def attach(self, model: LocalModel) -> nn.Module:
        """Train this network; return the module that a step runs, which may be compiled or replicated."""

    def enter(self, stage: Stage) -> None:  # noqa: B027
        """Set up the network for a stage."""

    @abstractmethod
    def compute(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the logits of each image."""


def objective_for(recipe: Recipe, size: Size, device: torch.device) -> Objective:
    """Return the objective that trains the guard of this recipe."""
    kind = IntervalObjective if recipe.guard.defense == INTERVAL_BOUNDS else CellObjective
    return kind(recipe, size, device)


def build_guard(recipe: Recipe, size: Size, class_names: tuple[str, ...]) -> Any:
    """Return the guard of a recipe with fresh weights, for source images of `size`."""
    return objective_for(recipe, size, torch.device("cpu")).build_guard(class_names)


# -- cells -------------------------------------------------------------------------------------------------------------


@final
class CellObjective(Objective):
    """Losses on the evidence of cells; an ablation may learn from a few regions of each image only."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        super().__init__(recipe, size, device)
        none = torch.empty(0, 4, dtype=torch.int64, device=device)
        self.masks = {(stage.mask_step, stage.subsampled): none for stage in plan_stages(recipe)}

    def build_guard(self, class_names: tuple[str, ...]) -> LocalGuard[Any]:
        """Return a guard with masks that fit the recipe's patch, and compute those that the losses search."""
        recipe, settings = self.recipe, self.recipe.guard
        defenses: dict[str, Defense[Any]] = {
            "DoubleMasking": DoubleMasking(masks=_ANY, tau=settings.tau),
            "RobustMasking": RobustMasking(masks=_ANY),
            "MajorityVote": MajorityVote(),
            "Undefended": Undefended(),
        }
        model = build(recipe.model.name, classes=len(class_names), **recipe.model.settings)
        evidence = Evidence(kind=settings.evidence, low=settings.low, drift=settings.drift)
        guard = LocalGuard(self.preprocess, model, evidence, defenses[settings.defense], class_names)
        if losses.uses_masks(recipe.loss.weights):
            self._compute_masks(guard.windows(recipe.patch, *self.size), model)
        return guard.for_patch(recipe.patch, *self.size)

    def _compute_masks(self, windows: Windows, model: LocalModel) -> None:
        """Compute the masks of each stage, by its step and whether it is subsampled."""
        loss = self.recipe.loss
        if loss.regions > 0 and isinstance(model, Ablation):
            windows = project_to_regions(windows, loss.regions)
        if (side := loss.mask_cells) is not None:
            windows = Windows.sliding(grid=windows.grid, size=(min(side, windows.grid[0]), min(side, windows.grid[1])))
        for stage in plan_stages(self.recipe):
            boxes = losses.to_boxes(coarsen(windows, stage.mask_step or 1), self.device)
            self.masks[stage.mask_step, stage.subsampled] = subsample_boxes(boxes) if stage.subsampled else boxes

    def attach(self, model: LocalModel) -> nn.Module:
        """Run the whole network; of an ablation that sees regions, the classifier behind it."""
        loss, name = self.recipe.loss, self.recipe.model.name
        if loss.subsample_fraction > 0 and not isinstance(model, Srf):
            if not isinstance(model, BagNet):
                raise InputError(
                    f"`loss.subsample_fraction` must be 0 for {name}: only srf and BagNets can leave cells out."
                )
            if loss.subsample_fraction > loss.warmup_fraction:
                raise InputError(
                    "`loss.subsample_fraction` of a BagNet must be at most `loss.warmup_fraction`, "
                    f"{loss.warmup_fraction}: masks need whole images; got {loss.subsample_fraction}."
                )
        if loss.regions > 0 and not isinstance(model, Ablation):
            raise InputError(f"`loss.regions` must be 0 for {name}: it is not an ablation and sees whole images.")
        self.model = model
        if self.recipe.model.freeze:
            return LastLayer(require_last_layer(model))
        return model.backbone if isinstance(model, Ablation) and loss.regions > 0 else model

    def enter(self, stage: Stage) -> None:
        """Let the network compute only the cells that the stage uses."""
        if isinstance(self.model, Srf):
            self.model.keep_every(2 if stage.subsampled else 1)

    def compute(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss on evidence maps, and the mean logits."""
        recipe, stage = self.recipe, batch.stage
        if recipe.model.freeze:
            local_logits = forward(batch.images)
        else:
            pixels = self.preprocess(batch.images)
            if stage.subsampled and isinstance(self.model, BagNet):
                pixels = crop_quarter(pixels, derive_seed(recipe.seed, QUARTER, batch.step))
            local_logits = self._local_logits(forward, pixels, batch.random).float()
        plain = stage.mask_step is None
        with torch.autocast(self.device.type, enabled=False):
            loss = losses.combine(
                {"plain": 1.0} if plain else recipe.loss.weights,
                local_logits,
                batch.target,
                self.masks[stage.mask_step, stage.subsampled],
                kind=recipe.guard.evidence,
                low=None if plain else recipe.guard.low,
                criterion=batch.criterion,
            )
        return loss, local_logits.detach().mean((2, 3))

    def _local_logits(self, forward: Any, pixels: Tensor, random: BatchRandom) -> Tensor:
        """Return the map of local logits, or one row of cells for the sampled regions of an ablation."""
        layout, regions = memory_format_of(self.device), self.recipe.loss.regions
        if regions == 0 or not isinstance(self.model, Ablation):
            local_logits: Tensor = forward(pixels.contiguous(memory_format=layout))
            return local_logits
        field = self.model.field(*pixels.shape[2:])
        starts = torch.cartesian_prod(torch.tensor(field.rows.starts), torch.tensor(field.columns.starts))
        sampled = starts.to(self.device)[sample_regions(len(starts), regions, random).flatten()]
        ablated = self.model.ablate(pixels.repeat_interleave(regions, 0), sampled)
        logits: Tensor = forward(ablated.contiguous(memory_format=layout))
        return logits.view(len(pixels), regions, -1).transpose(1, 2).unsqueeze(2)


# -- interval bounds ---------------------------------------------------------------------------------------------------


@final
class IntervalObjective(Objective):
    """Cross-entropy of the worst logits that interval bounds allow, for patches at random positions."""

    def build_guard(self, class_names: tuple[str, ...]) -> IntervalGuard:
        """Return a guard whose network takes source images as they are."""
        model: Any = build(self.recipe.model.name, classes=len(class_names), **self.recipe.model.settings)
        model.check_size(*self.size)
        return IntervalGuard(model, class_names)

    def attach(self, model: LocalModel) -> nn.Module:
        """Run the network on images and, by interval bounds, on everything that patches can show."""
        network: Any = model
        return BoundedNetwork(network)

    def compute(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss on interval bounds, and the logits; during the warmup the patch shows the image itself."""
        recipe, stage = self.recipe, batch.stage
        inside = sample_patches(recipe.patch, self.size, batch.random, recipe.loss.regions)
        logits, lead = forward(batch.images, inside, torch.full((), stage.radius, device=self.device))
        weights = {"plain": 1.0} if stage.mask_step is None else recipe.loss.weights
        with torch.autocast(self.device.type, enabled=False):
            scores = {"plain": logits.float(), losses.INTERVAL: worst_scores(lead, batch.target)}
            parts = (weight * batch.criterion(scores[name], batch.target) for name, weight in weights.items())
            loss = sum(parts, logits.new_zeros(()))
        return loss, logits.detach()


def memory_format_of(device: torch.device) -> torch.memory_format:
    """Return the fastest layout: channels last on GPUs.

    On CPUs torch 2.13 crashes in the backward pass of strided 1x1 convolutions of fewer than 16 channels that lie last.
    """
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format
