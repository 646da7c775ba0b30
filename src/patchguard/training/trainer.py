"""`Trainer`: network, weight average, optimiser and data on one device, and the step that joins them."""

import copy
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchguard import runtime
from patchguard.data.datasets import Dataset
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models.ablation import Ablation
from patchguard.models.bagnet import BagNet
from patchguard.models.interval_cnn import IntervalCnn
from patchguard.models.srf import Srf
from patchguard.runtime import derive_seed
from patchguard.training import comb, losses
from patchguard.training.augment import Draws, augmented, mixed, quarter, recoloured, resized_crop
from patchguard.training.curriculum import Stage, coarse, rate, stage_at, stages, thinned
from patchguard.training.feed import feed_of
from patchguard.training.initial import start_from, teacher_of
from patchguard.training.interval_loss import Outlook, drawn, worst_scores
from patchguard.training.recipe import Recipe

logger = logging.getLogger(__name__)

_INITIAL, _EPOCH, _TRIAL, _PART = 0, 1, 2, 3  # what a seed derived from the recipe's is for
WARM_UP_STEPS, TIMED_STEPS = 3, 8
Tick: TypeAlias = Callable[[float], None]


@final
class Trainer:
    """Everything that changes while a network learns, and what does not: the recipe and the images.

    `model` learns; `guard.model` is its running average, which is evaluated and saved. `compile_mode` is a mode of
    torch.compile, or None; where compiling fails, training goes on without it.

    Among several processes, each computes its part of every batch and gradients are averaged, so that all hold the same
    weights. Batch normalisation then looks at the whole batch on GPUs, and at the part on CPUs, where torch knows no
    other way; its running statistics are averaged.
    """

    def __init__(
        self, recipe: Recipe, data: Dataset | Source, *, device: torch.device, compile_mode: str | None = None
    ) -> None:
        if len(data) < recipe.batch_size:
            raise InputError(
                f"`batch_size` must be at most the {len(data)} images to learn from; got {recipe.batch_size}. "
                "Lower it: --set batch_size=..."
            )
        self.recipe, self.device = recipe, device
        self.size = recipe.source_size if isinstance(data, Source) else data.size
        self.feed = feed_of(data, self.size, recipe.seed, device)
        self.part = part_of(recipe.batch_size)
        self.preprocess = recipe.preprocess()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, _INITIAL))
            self.guard = recipe.guard(self.size, data.class_names)
        if recipe.initial is not None:
            start_from(self.guard, recipe.initial)
        # Masks first: tracing a network is easiest on the CPU, where it was built.
        self.boxes = boxes_of_stages(recipe, self.guard, self.size, device)
        self.teacher = None if recipe.teacher is None else teacher_of(recipe.teacher, self.guard, device)
        # Channels last is what GPUs want. On CPUs torch 2.13 dies in the backward pass of strided 1x1 convolutions of
        # fewer than 16 channels that lie last.
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.guard.model.to(device=device, memory_format=self.layout)  # type: ignore[call-overload]
        self.guard.model.eval().requires_grad_(False)
        self.model = copy.deepcopy(self.guard.model).train().requires_grad_(True)
        if runtime.world_size() > 1 and device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        # What a step runs: the base classifier of an ablation sees a few regions, any other network everything.
        self.network: nn.Module = self.model
        if isinstance(self.model, IntervalCnn) and isinstance(self.guard, IntervalGuard):
            self.network = Outlook(self.model)
        elif recipe.regions > 0:
            if not isinstance(self.model, Ablation):
                raise InputError(
                    f"`regions` must be 0 for {recipe.model}: it is not an ablation and sees whole images."
                )
            self.network = self.model.backbone
        if runtime.world_size() > 1:
            self.network = DistributedDataParallel(self.network, broadcast_buffers=False)
        check_thin(recipe, self.model)
        self.forward: Any = self.network
        self.optimizer = self._optimizer()
        self.steps_done = 0
        self.compile_mode = compile_mode
        self.thin: bool | None = None  # not yet turned to a stage
        self._turn_to(stages(recipe)[0])

    # -- learning ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of one epoch; images that do not fill a batch wait for another epoch's draw."""
        return self.feed.count // self.recipe.batch_size

    def epoch(self, number: int, epochs: int, tick: Tick = lambda progress: None) -> dict[str, float]:
        """Learn from every image once, as epoch `number` of `epochs`; return the mean loss and accuracy.

        After every step, `tick` is told the share of all training that is done.
        """
        batch_size = self.recipe.batch_size
        generator = self._generator(_EPOCH, number)
        draws = Draws(generator, batch_size, self.part)
        stage = stage_at(self.recipe, number / epochs)
        self._turn_to(stage)
        totals = torch.zeros(2, device=self.device)
        done = 0
        for images, target in self.feed.epoch(number, batch_size, self.part, generator):
            progress = (number + done / self.steps) / epochs
            totals += self.step(images, target, stage, rate(self.recipe, progress), draws)
            done += 1
            tick((number + done / self.steps) / epochs)
        totals /= done
        runtime.average_over_processes(totals)
        loss, right = totals.tolist()
        if not abs(loss) < float("inf"):
            raise InputError(f"the loss of epoch {number + 1} is {loss}. Lower `peak_rate` or `clip_norm`.")
        return {"loss": loss, "train_accuracy": right}

    def step(
        self,
        pixels: UInt8[Tensor, "batch 3 height width"],
        target: Int64[Tensor, " batch"],
        stage: Stage,
        learning_rate: float,
        draws: Draws,
    ) -> Float[Tensor, "2"]:
        """Take one step; return loss and accuracy of the batch without waiting for the device."""
        recipe = self.recipe
        images = self._augmented(pixels, draws)
        labels = None
        if recipe.mixing > 0:
            classes = self.model.classes
            images, labels = mixed(images, target, draws, classes=classes, most=recipe.mixing)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            goal = losses.Goal(
                smoothing=recipe.label_smoothing, teacher=self._taught(images), trust=recipe.trust, labels=labels
            )
            compare = self._bounded if isinstance(self.guard, IntervalGuard) else self._masked
            loss, answers = compare(images, target, stage, draws, goal)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.steps_done += 1
        self._share_statistics()
        self._average()
        with torch.no_grad():
            right = (answers.argmax(1) == target).float().mean()
            return torch.stack([loss.detach(), right])

    def _masked(
        self, images: Tensor, target: Tensor, stage: Stage, draws: Draws, goal: losses.Goal
    ) -> tuple[Tensor, Tensor]:
        """Return the loss on evidence maps, and the mean logits. A thin BagNet sees a quarter of each image."""
        recipe = self.recipe
        shown = self.preprocess(images)
        if stage.thin and isinstance(self.model, BagNet):
            shown = quarter(shown, derive_seed(recipe.seed, _PART, self.steps_done))
        local_logits = self._local_logits(shown, draws).float()
        weights, low = (recipe.weights, recipe.low) if stage.mask_step is not None else ({"plain": 1.0}, None)
        boxes = self.boxes[stage.mask_step, stage.thin]
        with torch.autocast(self.device.type, enabled=False):
            loss = losses.mixed(weights, local_logits, target, boxes, kind=recipe.evidence, low=low, goal=goal)
        return loss, local_logits.detach().mean((2, 3))

    def _bounded(
        self, images: Tensor, target: Tensor, stage: Stage, draws: Draws, goal: losses.Goal
    ) -> tuple[Tensor, Tensor]:
        """Return the loss on interval bounds, and the logits; before the bounds count, nothing lies under a patch."""
        recipe = self.recipe
        inside = drawn(recipe.patch, self.size, draws, recipe.regions)
        radius = torch.full((), stage.radius, device=self.device)
        logits, lead = self.forward(images, inside, radius)
        weights = {"plain": 1.0} if stage.mask_step is None else recipe.weights
        with torch.autocast(self.device.type, enabled=False):
            scores = {"plain": logits.float(), losses.INTERVAL: worst_scores(lead, target)}
            loss = sum((weight * goal(scores[name], target) for name, weight in weights.items()), logits.new_zeros(()))
        return loss, logits.detach()

    def _augmented(self, images: Tensor, draws: Draws) -> Tensor:
        recipe = self.recipe
        if recipe.crop is not None:
            pixels = resized_crop(images, draws, area=recipe.crop, flip=recipe.flip)
        else:
            pixels = augmented(images, draws, pad=recipe.pad, flip=recipe.flip, cutout=recipe.cutout)
        return recoloured(pixels, draws, recipe.colour) if recipe.colour > 0 else pixels

    def _local_logits(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Return the map of local logits, or one row of cells for the regions that are shown."""
        regions = self.recipe.regions
        if regions == 0 or not isinstance(self.model, Ablation):
            logits: Tensor = self.forward(pixels.contiguous(memory_format=self.layout))
            return logits
        field = self.model.field(*pixels.shape[2:])
        starts = torch.cartesian_prod(torch.tensor(field.rows.starts), torch.tensor(field.columns.starts))
        chosen = starts.to(self.device)[comb.drawn(len(starts), regions, draws).flatten()]
        shown = self.model.ablate(pixels.repeat_interleave(regions, 0), chosen)
        answers: Tensor = self.forward(shown.contiguous(memory_format=self.layout))
        return answers.view(len(pixels), regions, -1).transpose(1, 2).unsqueeze(2)

    @torch.no_grad()
    def _taught(self, images: Tensor) -> Float[Tensor, "batch classes"] | None:
        if self.teacher is None:
            return None
        local_logits = self.teacher.model(self.teacher.preprocess(images)).float()
        return torch.softmax(local_logits.mean((2, 3)) / self.recipe.temperature, 1)

    @torch.no_grad()
    def _share_statistics(self) -> None:
        """Average the running statistics of normalisation over processes; on GPUs they are the same already."""
        if runtime.world_size() > 1 and self.device.type != "cuda":
            buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
            joined = torch.cat([buffer.flatten() for buffer in buffers])
            runtime.average_over_processes(joined)
            for buffer, part in zip(buffers, torch.split(joined, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    @torch.no_grad()
    def _average(self) -> None:
        # Early averages must forget the random start soon.
        decay = min(self.recipe.ema, (1 + self.steps_done) / (10 + self.steps_done)) if self.recipe.ema else 0.0
        pairs = [(a, b) for a, b in self._tensors() if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 1 - decay)

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the average beside that of the learning network."""
        for parts in ("parameters", "buffers"):
            yield from zip(getattr(self.guard.model, parts)(), getattr(self.model, parts)(), strict=True)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Decay matrices and kernels; scales and shifts of normalisation and biases only follow the data."""
        recipe = self.recipe
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        if recipe.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=recipe.peak_rate, fused=fused)
        return torch.optim.SGD(
            groups,
            lr=recipe.peak_rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            fused=fused,
        )

    def _generator(self, purpose: int, number: int) -> torch.Generator:
        seed = derive_seed(self.recipe.seed, purpose, number)
        return torch.Generator(self.device).manual_seed(seed)

    # -- speed ---------------------------------------------------------------------------------------------------------

    def _turn_to(self, stage: Stage) -> None:
        """Let the network compute the cells that `stage` looks at, compiled where that is wanted."""
        if stage.thin == self.thin:
            return
        self.thin = stage.thin
        if isinstance(self.model, Srf):
            self.model.keep_every(2 if stage.thin else 1)
        if self.compile_mode is not None:
            torch.compiler.reset()
            self.forward = torch.compile(self.network, mode=self.compile_mode)
            try:
                self.trial(stage, steps=1)
            except Exception as error:
                logger.warning("training goes on without torch.compile, which failed: %s", str(error).strip()[:500])
                self.forward, self.compile_mode = self.network, None
                self.trial(stage, steps=1)

    def trial(self, stage: Stage, steps: int) -> float:
        """Return the seconds that one step of `stage` takes; all that was learned meanwhile is forgotten."""
        self._turn_to(stage)
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        averaged = {name: tensor.clone() for name, tensor in self.guard.model.state_dict().items()}
        done, optimizer = self.steps_done, self.optimizer
        self.optimizer = self._optimizer()
        draws = Draws(self._generator(_TRIAL, 0), self.recipe.batch_size, self.part)
        images, target = self.feed.first(self.recipe.batch_size)
        try:
            start = time.monotonic()
            for step in range(WARM_UP_STEPS + steps):
                if step == WARM_UP_STEPS:
                    self._wait()
                    start = time.monotonic()
                self.step(images[self.part], target[self.part], stage, 0.0, draws)
            self._wait()
            return (time.monotonic() - start) / steps
        finally:
            self.model.load_state_dict(before)
            self.guard.model.load_state_dict(averaged)
            self.steps_done, self.optimizer = done, optimizer

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"averaged.{name}": tensor for name, tensor in self.guard.model.state_dict().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{key}"] = value
        return tensors

    def restore(self, tensors: dict[str, Tensor], steps_done: int) -> None:
        """Go back to what `state` returned after `steps_done` steps."""
        self.model.load_state_dict(_below("model.", tensors))
        self.guard.model.load_state_dict(_below("averaged.", tensors))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below("optimizer.", tensors).items():
            number, key = name.split(".", 1)
            like = parameters[int(number)]
            # In the layout of its parameter, which fused optimisers need.
            placed = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor
            entries.setdefault(int(number), {})[key] = placed
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self.steps_done = steps_done


def part_of(batch_size: int) -> slice:
    """Return the part of every batch that this process computes."""
    processes = runtime.world_size()
    if batch_size % processes != 0:
        raise InputError(
            f"`batch_size` must be a multiple of the {processes} processes that share a batch; got {batch_size}."
        )
    own = batch_size // processes
    return slice(runtime.rank() * own, (runtime.rank() + 1) * own)


def check_thin(recipe: Recipe, model: nn.Module) -> None:
    """Raise where the network cannot be thin for as long as the recipe wants."""
    if recipe.thin_share == 0 or isinstance(model, Srf):
        return
    if not isinstance(model, BagNet):
        raise InputError(f"`thin_share` must be 0 for {recipe.model}: only srf and BagNets can leave cells out.")
    if recipe.thin_share > recipe.plain_share:
        raise InputError(
            f"`thin_share` of a BagNet must be at most `plain_share`, {recipe.plain_share}: masks need whole images; "
            f"got {recipe.thin_share}."
        )


def boxes_of_stages(
    recipe: Recipe, guard: LocalGuard[Any] | IntervalGuard, size: tuple[int, int], device: torch.device
) -> dict[tuple[int | None, bool], Int64[Tensor, "_masks 4"]]:
    """Return the masks of each stage, by its step and whether it is thin; none where no loss looks at them."""
    plan = [(stage.mask_step, stage.thin) for stage in stages(recipe)]
    if isinstance(guard, IntervalGuard) or not losses.needs_masks(recipe.weights):
        return {key: torch.empty(0, 4, dtype=torch.int64, device=device) for key in plan}
    windows = guard.windows(recipe.patch, *size)
    if recipe.regions > 0 and isinstance(guard.model, Ablation):
        windows = comb.masks(windows, recipe.regions)
    if recipe.mask_cells is not None:
        side = recipe.mask_cells
        windows = Windows.sliding(grid=windows.grid, size=(min(side, windows.grid[0]), min(side, windows.grid[1])))
    found = {}
    for step, thin in plan:
        boxes = losses.boxes_of(coarse(windows, step or 1), device)
        found[step, thin] = thinned(boxes) if thin else boxes
    return found


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
