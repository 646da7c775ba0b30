"""`Trainer`: network, weight average, optimizer and data on one device, and the step that joins them."""

import copy
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchguard import runtime
from patchguard.data.dataset import Dataset
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.runtime import derive_seed
from patchguard.training.augment import BatchRandom, augment, color_jitter, mixup, random_resized_crop
from patchguard.training.curriculum import Stage, learning_rate, plan_stages, stage_at
from patchguard.training.features import FeatureSet
from patchguard.training.loaders import FeatureLoader, InMemoryLoader, StreamingLoader, make_loader
from patchguard.training.losses import CrossEntropy
from patchguard.training.objectives import Batch, TrainableGuard, memory_format_of, objective_for
from patchguard.training.pretrained import init_from, load_teacher
from patchguard.training.recipe import Recipe

logger = logging.getLogger(__name__)

_INIT, _EPOCH, _TRIAL = 0, 1, 2  # what a seed derived from the recipe's is for; objectives.py has 3
WARMUP_STEPS, TIMED_STEPS = 3, 8
OnStep: TypeAlias = Callable[[float], None]


@final
@dataclass(frozen=True, eq=False)
class Position:
    """The middle of an epoch: its steps so far, the sums of their metrics, and the state of its random numbers."""

    step: int
    totals: Float[Tensor, "2"]
    generator: UInt8[Tensor, " bytes"]


@final
class Trainer:
    """Everything that changes while a network learns, and what does not: the recipe and the images.

    `model` learns; `guard.model` is its running average, which is evaluated and saved. `compile_mode` is a mode of
    torch.compile, or None; where compiling fails, training continues without it.

    Among several processes, each computes its part of every batch and gradients are averaged, so that all hold the same
    weights. Batch normalization then sees the whole batch on GPUs, and the part on CPUs, where torch knows no other
    way; its running statistics are averaged.
    """

    def __init__(
        self, recipe: Recipe, data: Dataset | Source, *, device: torch.device, compile_mode: str | None = None
    ) -> None:
        self.recipe, self.device, self.batch_size = recipe, device, recipe.optimizer.batch_size
        if len(data) < self.batch_size:
            raise InputError(
                f"`optimizer.batch_size` must be at most the {len(data)} images to learn from; got {self.batch_size}. "
                f"Lower it: --set batch_size={max(1, len(data) // 4)}"
            )
        self.size = recipe.source_size if isinstance(data, Source) else data.size
        self.loader: InMemoryLoader | StreamingLoader | FeatureLoader = make_loader(
            data, self.size, recipe.seed, device
        )
        self.part = slice_of_batch(self.batch_size)
        self.objective = objective_for(recipe, self.size, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, _INIT))
            self.guard: TrainableGuard = self.objective.build_guard(data.class_names)
        if recipe.model.init_from is not None:
            init_from(self.guard.model, recipe.model.init_from)
        teacher = recipe.loss.teacher
        self.teacher = None if teacher is None else load_teacher(teacher, self.guard.model.classes, device)
        self.guard.model.to(device=device, memory_format=memory_format_of(device))
        self.guard.model.eval().requires_grad_(False)
        self.model = copy.deepcopy(self.guard.model).train().requires_grad_(True)
        if runtime.world_size() > 1 and device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        self.network = self.objective.attach(self.model)
        if runtime.world_size() > 1:
            self.network = DistributedDataParallel(self.network, broadcast_buffers=False)
        self.forward: Any = self.network
        self.optimizer = self._make_optimizer()
        self.steps_done = 0
        self.position: Position | None = None
        self.compile_mode = compile_mode
        self.subsampled: bool | None = None  # no stage entered yet
        self._enter(plan_stages(recipe)[0])

    def learn_from(self, data: FeatureSet) -> None:
        """Learn from features of a frozen network in place of images."""
        self.loader = FeatureLoader(data, self.device)

    # -- learning ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of one epoch; images that do not fill a batch wait for another epoch's draw."""
        return self.loader.count // self.batch_size

    def run_epoch(
        self,
        number: int,
        epochs: int,
        on_step: OnStep = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Learn from every image once, as epoch `number` of `epochs`; return the mean loss and accuracy.

        After every step, `on_step` gets the fraction of training that is done. Once `should_stop()`, the epoch ends in
        the middle and None is returned: `position` then says where, and the next call continues there.
        """
        generator = self._generator(_EPOCH, number)
        position, self.position = self.position, None
        random = BatchRandom(generator, self.batch_size, self.part)
        stage = stage_at(self.recipe, number / epochs)
        self._enter(stage)
        totals = torch.zeros(2, device=self.device)
        done = 0 if position is None else position.step
        for images, target in self.loader.epoch(number, self.batch_size, self.part, generator, done):
            if position is not None:  # the order of the epoch is drawn by now
                generator.set_state(position.generator)
                totals, position = position.totals.to(self.device), None
            progress = (number + done / self.steps) / epochs
            totals += self.step(images, target, stage, learning_rate(self.recipe.schedule, progress), random)
            done += 1
            on_step((number + done / self.steps) / epochs)
            if done < self.steps and should_stop():
                self.position = Position(done, totals.cpu(), generator.get_state())
                return None
        totals /= done
        runtime.average_over_processes(totals)
        loss, accuracy = totals.tolist()
        if not abs(loss) < float("inf"):
            raise InputError(
                f"the loss must stay finite; in epoch {number + 1} it is {loss}. Lower `max_lr` or `clip_grad_norm`."
            )
        return {"loss": loss, "train_accuracy": accuracy}

    def step(
        self,
        pixels: Tensor,
        target: Int64[Tensor, " batch"],
        stage: Stage,
        lr: float,
        random: BatchRandom,
    ) -> Float[Tensor, "2"]:
        """Take one step on 8-bit images, or on features of a frozen network.

        Returns loss and accuracy of the batch without waiting for the device.
        """
        settings, max_norm = self.recipe.loss, self.recipe.optimizer.clip_grad_norm
        images = self._augment(pixels, random)
        soft_labels = None
        if (strength := self.recipe.augmentation.mixup) > 0:
            images, soft_labels = mixup(images, target, random, classes=self.model.classes, strength=strength)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            criterion = CrossEntropy(
                label_smoothing=settings.label_smoothing,
                teacher=self._ask_teacher(images),
                distill_weight=settings.distill_weight,
                soft_labels=soft_labels,
            )
            batch = Batch(images, target, stage, random, self.steps_done, criterion)
            loss, logits = self.objective.compute(self.forward, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.steps_done += 1
        self._synchronize_statistics()
        self._update_average()
        with torch.no_grad():
            accuracy = (logits.argmax(1) == target).float().mean()
            return torch.stack([loss.detach(), accuracy])

    def _augment(self, images: Tensor, random: BatchRandom) -> Tensor:
        settings = self.recipe.augmentation
        if self.recipe.model.freeze:
            return images.float()
        if settings.crop_scale is not None:
            pixels = random_resized_crop(images, random, scale=settings.crop_scale, flip=settings.flip)
        else:
            padding, cutout = settings.crop_padding, settings.cutout
            pixels = augment(images, random, padding=padding, flip=settings.flip, cutout=cutout)
        return color_jitter(pixels, random, settings.color_jitter) if settings.color_jitter > 0 else pixels

    @torch.no_grad()
    def _ask_teacher(self, images: Tensor) -> Float[Tensor, "batch classes"] | None:
        if self.teacher is None:
            return None
        local_logits = self.teacher.model(self.teacher.preprocess(images)).float()
        return torch.softmax(local_logits.mean((2, 3)) / self.recipe.loss.temperature, 1)

    @torch.no_grad()
    def _synchronize_statistics(self) -> None:
        """Average the running statistics of normalization over processes; on GPUs they are the same already."""
        if runtime.world_size() > 1 and self.device.type != "cuda":
            buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
            joined = torch.cat([buffer.flatten() for buffer in buffers])
            runtime.average_over_processes(joined)
            for buffer, part in zip(buffers, torch.split(joined, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    @torch.no_grad()
    def _update_average(self) -> None:
        # Early averages must forget the random start soon.
        decay = min(self.recipe.optimizer.ema_decay, (1 + self.steps_done) / (10 + self.steps_done))
        pairs = [(a, b) for a, b in self._tensors() if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 1 - decay)

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the average beside that of the learning network."""
        for parts in ("parameters", "buffers"):
            yield from zip(getattr(self.guard.model, parts)(), getattr(self.model, parts)(), strict=True)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Apply weight decay to matrices and kernels only, not to biases and the parameters of normalization."""
        settings, lr = self.recipe.optimizer, self.recipe.schedule.max_lr
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        if settings.name == "adamw":
            return torch.optim.AdamW(groups, lr=lr, fused=fused)
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, nesterov=nesterov, fused=fused)

    def _generator(self, purpose: int, number: int) -> torch.Generator:
        seed = derive_seed(self.recipe.seed, purpose, number)
        return torch.Generator(self.device).manual_seed(seed)

    # -- speed ---------------------------------------------------------------------------------------------------------

    def _enter(self, stage: Stage) -> None:
        """Let the network compute the cells that `stage` uses, and compile it again if they changed."""
        if stage.subsampled == self.subsampled:
            return
        self.subsampled = stage.subsampled
        self.objective.enter(stage)
        if self.compile_mode is not None:
            torch.compiler.reset()
            self.forward = torch.compile(self.network, mode=self.compile_mode)
            try:
                self.time_step(stage, steps=1)
            except Exception as error:
                logger.warning("training continues without torch.compile, which failed: %s", str(error).strip()[:500])
                self.forward, self.compile_mode = self.network, None
                self.time_step(stage, steps=1)

    def time_step(self, stage: Stage, steps: int) -> float:
        """Return the seconds that one step of `stage` takes, and restore what these steps changed."""
        self._enter(stage)
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        averaged = {name: tensor.clone() for name, tensor in self.guard.model.state_dict().items()}
        done, optimizer = self.steps_done, self.optimizer
        self.optimizer = self._make_optimizer()
        random = BatchRandom(self._generator(_TRIAL, 0), self.batch_size, self.part)
        images, target = self.loader.first(self.batch_size)
        try:
            start = time.monotonic()
            for step in range(WARMUP_STEPS + steps):
                if step == WARMUP_STEPS:
                    self._wait()
                    start = time.monotonic()
                self.step(images[self.part], target[self.part], stage, 0.0, random)
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
        if self.position is not None:
            tensors |= {"position.totals": self.position.totals, "position.generator": self.position.generator}
        return tensors

    def restore(self, tensors: dict[str, Tensor], steps_done: int, step: int = 0) -> None:
        """Restore what `state` returned after `steps_done` steps, of which `step` belong to an unfinished epoch."""
        if step:
            self.position = Position(step, tensors["position.totals"], tensors["position.generator"])
        self.model.load_state_dict(_strip_prefix("model.", tensors))
        self.guard.model.load_state_dict(_strip_prefix("averaged.", tensors))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _strip_prefix("optimizer.", tensors).items():
            number, key = name.split(".", 1)
            like = parameters[int(number)]
            # In the memory layout of its parameter, which fused optimizers need.
            value = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor
            entries.setdefault(int(number), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self.steps_done = steps_done


def slice_of_batch(batch_size: int) -> slice:
    """Return the part of every batch that this process computes."""
    processes = runtime.world_size()
    if batch_size % processes != 0:
        raise InputError(
            f"`optimizer.batch_size` must be a multiple of the {processes} processes that share a batch; "
            f"got {batch_size}."
        )
    own = batch_size // processes
    return slice(runtime.rank() * own, (runtime.rank() + 1) * own)


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
