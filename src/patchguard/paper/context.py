"""`Context`: where experiments get images, models and cached logits from."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from patchguard import runtime
from patchguard.data.catalog import data_root
from patchguard.data.dataset import sample_evenly
from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source, open_source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models import REGISTRY
from patchguard.paper import cached_logits
from patchguard.paper.cached_logits import CachedLogits, open_logits
from patchguard.paper.experiment import Missing
from patchguard.runs.images import align_classes
from patchguard.storage import zoo
from patchguard.storage.presets import PRESETS
from patchguard.storage.published_models import ZOO
from patchguard.training import recipes
from patchguard.training.recipe import read_recipe

logger = logging.getLogger(__name__)

# A photo of 224 x 224 pixels, as ImageNette's often are, stays as it is.
PHOTO = Preprocess((Resize(shorter=224), CenterCrop(height=224, width=224)))
ATTACK_PIXEL_BYTES = 12 * 3 * 4  # a dozen float images: the image, its gradient, the momentum, the best so far, ...

Progress = Callable[[str, int, int], None]  # what is counted, how many are done, and of how many: 0 if unknown


@final
@dataclass(frozen=True, eq=False)
class StudyImages:
    """Images of one size in memory, with their true classes and their indices in the dataset."""

    images: UInt8[Tensor, "count 3 height width"]
    targets: Int64[Tensor, " count"]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]

    def batches(
        self, device: torch.device, pixels: int | None = None
    ) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "some 3 height width"], Int64[Tensor, " some"]]]:
        """Yield indices, images with pixels in [0, 1] and targets, about `pixels` in all at a time.

        By default batches are large: in an attack, one image that never breaks keeps its whole batch waiting. On a GPU
        they fill a quarter of the free memory.
        """
        if pixels is None:
            pixels = 2**17
            if device.type == "cuda":
                pixels = max(2**22, torch.cuda.mem_get_info(device)[0] // 4 // ATTACK_PIXEL_BYTES)
        step = max(1, pixels // (self.size[0] * self.size[1]))
        for first in range(0, len(self), step):
            here = slice(first, first + step)
            yield self.indices[here], self.images[here].to(device).float() / 255, self.targets[here].to(device)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What the experiments of one run share.

    `limit` takes that many test images, evenly spaced and drawn with `seed`; `train` trains models that are not there,
    into `<cache>/models`; without it `Missing` says how to. Logits are cached in `<cache>/maps`.
    """

    root: Path | None = None
    cache: Path = Path("runs/reproduce-cache")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: int | None = None
    batch_size: int | None = None
    seed: int = 0
    defense: str = ""  # that the main table shows beside the paper's
    train: bool = False
    progress: Progress = lambda what, done, total: None
    _logits: dict[tuple[str, str], CachedLogits] = field(default_factory=dict, init=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that a result depends on, and the versions."""
        settings = {"device": str(self.device), "limit": self.limit, "seed": self.seed}
        settings |= {"defense": self.defense} if self.defense else {}
        return {**settings, "environment": runtime.describe_environment()}

    def count_steps(self, name: str) -> Callable[[str, int], None]:
        """Return what adds up images, or images times steps, of each stage of a study and reports them."""
        done: Counter[str] = Counter()

        def report(stage: str, count: int) -> None:
            done[stage] += count
            self.progress(f"{name}, {stage}: images times steps", done[stage], 0)

        return report

    # -- images --------------------------------------------------------------------------------------------------------

    def images(self, dataset: str) -> Source:
        """Return the labeled test images of a dataset; `Missing` where its files are not there."""
        source = self._all_images(dataset)
        return source if self.limit is None else source.limit(self.limit, self.seed)

    def _all_images(self, dataset: str) -> Source:
        try:
            source = open_source(dataset, self.root)
        except InputError as error:
            raise Missing(f"no {dataset} here: {error}") from None
        if source.targets is None:
            raise InputError(f"`dataset` must be labeled; {dataset} has no classes. Give a folder per class.")
        return source

    def load_images(self, name: str, dataset: str, limit: int | None = None) -> tuple[LocalGuard[Any], StudyImages]:
        """Return a guard, on the device, and images as it takes them, without those that cannot be read.

        Photos are prepared first, so that a patch lies in the network's input. `limit` overrides the context's.
        """
        guard, prepare = self._prepared_guard(name, dataset)
        source, limit = align_classes(self._all_images(dataset), guard), limit or self.limit
        assert source.targets is not None
        indices = (
            list(range(len(source)))
            if limit is None
            else sample_evenly(min(limit, len(source)), len(source), self.seed)
        )
        chosen = source.subset(indices) if prepare is None else source.subset(indices).preprocess(prepare)
        readable = {
            index: image
            for index, image in zip(indices, iterate_images(chosen), strict=True)
            if not isinstance(image, Unreadable)
        }
        if not readable:
            raise InputError(f"none of the {len(indices)} images of {dataset} can be read. Check the files.")
        targets = torch.tensor([source.targets[index] for index in readable])
        # cudnn.benchmark stays off: batches shrink as images break, and it would try out every size anew.
        guard.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return guard, StudyImages(torch.stack(list(readable.values())), targets, tuple(readable))

    # -- models --------------------------------------------------------------------------------------------------------

    def find(self, names: str | Sequence[str]) -> str | None:
        """Return the first of the names, or paths, that has trained weights here; None where none has."""
        candidates = [names] if isinstance(names, str) else names
        return next((name for name in candidates if self._file(name) is not None), None)

    def choose(self, names: str | Sequence[str]) -> str:
        """Return the first name with trained weights; else train the first one, or raise `Missing` with the command.

        With `train`, the first name is trained even where a later one could stand in for it.
        """
        candidates = [names] if isinstance(names, str) else list(names)
        first = candidates[0]
        name = self.find(first if self.train and first in recipes.RECIPES else candidates)
        if name is None and self.train:
            self._train(first)
            return first
        if name is None:
            raise Missing(f"not run: no trained {first} here. {self.command(first)}")
        return name

    def command(self, name: str) -> str:
        """Return the commands that make a model, those for the models it starts from first."""
        return "; ".join(dict.fromkeys(self._commands(name)))

    def _commands(self, name: str) -> Iterator[str]:
        if name == "imagenette_resnet50":
            path = self._trained_path(name)
            yield f"python -m patchguard.training.pretrained RESNET50_OF_IMAGENET.safetensors {path}"
        elif name not in recipes.RECIPES:
            yield f"Put {name}.safetensors into a folder and set {ZOO} to that folder."
        else:
            for needed in self._missing_models(name):
                yield from self._commands(needed)
            root = "" if self.root is None else f" --root {self.root}"
            settings = "".join(
                f" --set {key}={self._trained_path(each)}"
                for key, each in self._starting_models(name).items()
                if zoo.named_file(each) is None
            )
            yield f"patchguard train --recipe {name}{root} --out {self._trained_path(name).parent}{settings}"

    def guard(self, name: str) -> LocalGuard[Any]:
        """Return the trained LocalGuard of a name, on the CPU."""
        return zoo.load_guard(self._require_file(name))

    def interval_guard(self, name: str) -> IntervalGuard:
        """Return the trained network of a name that is certified by interval bounds, on the CPU."""
        guard = zoo.load(self._require_file(self.choose(name)))
        if not isinstance(guard, IntervalGuard):
            raise InputError(f"`{name}` must be certified by interval bounds; it has cells.")
        return guard

    def _require_file(self, name: str) -> Path:
        path = self._file(name)
        if path is None:
            raise Missing(f"not run: no trained {name} here. {self.command(name)}")
        return path

    def _file(self, name: str) -> Path | None:
        if zoo.is_path(name) and Path(name).is_file():
            return Path(name)
        trained = self._trained_path(name)
        return trained if trained.is_file() else zoo.named_file(name)

    def _trained_path(self, name: str) -> Path:
        """Return where a model that is trained here lies."""
        return self.cache / "models" / name / f"{name}.safetensors"

    def _starting_models(self, name: str) -> dict[str, str]:
        """Return the models that a recipe starts from or is taught by, by the key of the recipe."""
        recipe = recipes.get_recipe(name)
        models = {"init_from": recipe.model.init_from, "teacher": recipe.loss.teacher}
        return {key: each for key, each in models.items() if each}

    def _missing_models(self, name: str) -> list[str]:
        needed = dict.fromkeys(self._starting_models(name).values())
        return [each for each in needed if self._file(each) is None]

    def _train(self, name: str) -> None:
        from patchguard.training import run

        if name not in recipes.RECIPES or name in PRESETS or name in REGISTRY:
            raise Missing(f"not run: no trained {name} here, and no recipe. {self.command(name)}")
        while needed := self._missing_models(name):
            self._train(needed[0])
        paths = {key: str(self._file(each)) for key, each in self._starting_models(name).items()}
        recipe, out = recipes.get_recipe(name), self._trained_path(name).parent
        logger.info("training %s into %s", name, out)
        options = run.Options(
            recipe=recipe.override(paths),
            root=data_root(self.root),
            out=out,
            device=str(self.device),
        )
        try:
            run.train(options)
        except InputError as error:
            raise Missing(f"not run: {name} cannot be trained here: {error}") from error

    # -- logits --------------------------------------------------------------------------------------------------------

    def logits(self, names: str | Sequence[str], dataset: str) -> CachedLogits:
        """Return the local logits of a dataset by the first model of `names` that is here."""
        name = self.choose(names)
        if (name, dataset) not in self._logits:
            self._logits[name, dataset] = self._open_logits(name, dataset)
        return self._logits[name, dataset]

    def _open_logits(self, name: str, dataset: str) -> CachedLogits:
        guard, prepare = self._prepared_guard(name, dataset)
        source = align_classes(self.images(dataset), guard)
        about = {
            "format": cached_logits.FORMAT,
            "model": Path(name).stem,
            "model_digest": zoo.inspect(self._file(name) or name)["digest"],
            "data": dataset,
            "data_digest": _digest(source),
            "images": len(source),
            "prepared": None if prepare is None else prepare.to_json(),
        }
        what = f"local logits of {dataset} by {about['model']}"
        return open_logits(
            self.cache / "maps",
            about,
            source,
            guard,
            prepare,
            device=self.device,
            batch_size=self.batch_size,
            progress=lambda done: self.progress(what, done, len(source)),
        )

    def _prepared_guard(self, name: str, dataset: str) -> tuple[LocalGuard[Any], Preprocess | None]:
        """Return the guard for images at the network's own size, and how a photo gets there.

        CIFAR-10 stays as it is: (guard, None). A network that brings no preprocessing gets that of its training.
        """
        guard = self.guard(name)
        if dataset == "cifar10":
            return guard, None
        side = read_recipe(zoo.inspect(self._file(name) or name)["recipe"] or {}).data.image_size
        as_trained = Preprocess((Resize(height=side, width=side, mode="bilinear"),)) if side else PHOTO
        return guard.without_preprocess(), guard.preprocess if guard.preprocess.steps else as_trained


def _digest(source: Source) -> str:
    """Return the SHA-256 of names, classes and sizes of files; their times differ from one copy to the next."""
    total = hashlib.sha256()
    assert source.targets is not None
    for index, (name, target) in enumerate(zip(source.names, source.targets, strict=True)):
        size = source.fingerprint(index).split(" ")[0]
        total.update(f"{name}\0{target}\0{size}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
