"""`Context`: where experiments get images, models and maps from."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from patchguard import runtime
from patchguard.data.catalog import data_root
from patchguard.data.decode import Unreadable
from patchguard.data.loading import decoded
from patchguard.data.source import Source, open_source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models import REGISTRY
from patchguard.paper import maps as maps_on_disk
from patchguard.paper.experiment import Missing
from patchguard.paper.maps import Maps
from patchguard.paper.study_images import PHOTO, SMALL
from patchguard.runs.job import matched
from patchguard.storage import zoo
from patchguard.storage.presets import PRESETS
from patchguard.storage.published_models import ZOO
from patchguard.training import recipes

logger = logging.getLogger(__name__)

AT_ONCE = {"cpu": 64, "cuda": 256}

Progress = Callable[[str, int, int], None]  # what is counted, how many are done, of how many: 0 if not known


def _silent(what: str, done: int, of: int) -> None:
    """Say nothing."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What a run of experiments shares.

    `limit` takes so many test images, evenly spread and drawn with `seed`; `train` trains models that are not there,
    into `<cache>/models`, and otherwise `Missing` says how to. Maps are kept in `<cache>/maps`.
    """

    data_root: Path | None = None
    cache: Path = Path("runs/reproduce-cache")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: int | None = None
    batch_size: int | None = None
    seed: int = 0
    train: bool = False
    progress: Progress = _silent
    _opened: dict[tuple[str, str], Maps] = field(default_factory=dict, init=False, repr=False)

    # -- images --------------------------------------------------------------------------------------------------------

    def images(self, dataset: str) -> Source:
        """Return the labelled test images of a set; `Missing` where its files are not there."""
        try:
            source = open_source(dataset, self.data_root)
        except InputError as error:
            raise Missing(f"no {dataset} here: {error}") from None
        if source.targets is None:
            raise InputError(f"`dataset` must have classes to be right or wrong about; {dataset} has none.")
        return source if self.limit is None else source.limited(self.limit, self.seed)

    # -- models --------------------------------------------------------------------------------------------------------

    def find(self, names: str | Sequence[str]) -> str | None:
        """Return the first of the names, or paths, that has trained weights here; None where none has."""
        for name in [names] if isinstance(names, str) else names:
            if self._file(name) is not None:
                return name
        return None

    def choose(self, names: str | Sequence[str]) -> str:
        """Return the first name with trained weights; else train the first one, or raise `Missing` with the command.

        With `train`, the first name is trained even where a later one could stand in for it.
        """
        listed = [names] if isinstance(names, str) else list(names)
        found = self.find(listed[0] if self.train and listed[0] in recipes.RECIPES else listed)
        if found is not None:
            return found
        if self.train:
            self._train(listed[0])
            return listed[0]
        raise Missing(f"not run: no trained {listed[0]} here. {self.command(listed[0])}")

    def command(self, name: str) -> str:
        """Return the commands that make a model, those of what it begins with first."""
        return "; ".join(dict.fromkeys(self._commands(name)))

    def _commands(self, name: str) -> Iterator[str]:
        if name == "imagenette_resnet50":
            yield f"python -m patchguard.training.pretrained RESNET50_OF_IMAGENET.safetensors {self._made(name)}"
        elif name not in recipes.RECIPES:
            yield f"Put {name}.safetensors into a folder and set {ZOO} to that folder."
        else:
            for before in self._needed(name):
                yield from self._commands(before)
            recipe, root = recipes.named(name), "" if self.data_root is None else f" --data {self.data_root}"
            begins = {key: getattr(recipe, key) for key in ("initial", "teacher")}
            elsewhere = {key: each for key, each in begins.items() if each and not _in_zoo(each)}
            found = "".join(f" --set {key}={self._made(each)}" for key, each in elsewhere.items())
            yield f"patchguard train --recipe {name}{root} --out {self._made(name).parent}{found}"

    def guard(self, name: str) -> LocalGuard[Any]:
        """Return the trained LocalGuard of a name, on the CPU."""
        return zoo.load_guard(self._trained(name))

    def interval_guard(self, name: str) -> IntervalGuard:
        """Return the trained network of a name that is certified by interval bounds, on the CPU."""
        found = zoo.load(self._trained(self.choose(name)))
        if not isinstance(found, IntervalGuard):
            raise InputError(f"`{name}` must be certified by interval bounds; it has cells.")
        return found

    def _trained(self, name: str) -> Path:
        path = self._file(name)
        if path is None:
            raise Missing(f"not run: no trained {name} here. {self.command(name)}")
        return path

    def _file(self, name: str) -> Path | None:
        if zoo.is_path(name) and Path(name).is_file():
            return Path(name)
        return self._made(name) if self._made(name).is_file() else _in_zoo(name)

    def _made(self, name: str) -> Path:
        """Return where a model that is trained here lies."""
        return self.cache / "models" / name / f"{name}.safetensors"

    def _needed(self, name: str) -> list[str]:
        """The models that a recipe begins with and that are not here."""
        recipe = recipes.named(name)
        return [each for each in dict.fromkeys((recipe.initial, recipe.teacher)) if each and self._file(each) is None]

    def _train(self, name: str) -> None:
        from patchguard.training import run

        if name not in recipes.RECIPES or name in PRESETS or name in REGISTRY:
            raise Missing(f"not run: no trained {name} here, and no recipe. {self.command(name)}")
        while before := self._needed(name):
            self._train(before[0])
        recipe = recipes.named(name)
        known = {each: self._file(each) for each in (recipe.initial, recipe.teacher) if each}
        paths = {key: str(known[each]) for key in ("initial", "teacher") if (each := getattr(recipe, key))}
        out = self._made(name).parent
        logger.info("training %s into %s", name, out)
        options = run.Options(
            recipe=recipe.changed(paths) if paths else recipe,
            data=data_root(self.data_root),
            out=out,
            device=str(self.device),
        )
        try:
            run.train(options)
        except InputError as error:
            raise Missing(f"not run: {name} cannot be trained here: {error}") from error

    # -- maps ----------------------------------------------------------------------------------------------------------

    def maps(self, names: str | Sequence[str], dataset: str) -> Maps:
        """Return the local logits of a set by the first model of `names` that is here, from disk or computed now."""
        name = self.choose(names)
        if (name, dataset) not in self._opened:
            self._opened[name, dataset] = self._maps(name, dataset)
        return self._opened[name, dataset]

    def _maps(self, name: str, dataset: str) -> Maps:
        source = self.images(dataset)
        guard = self.guard(name)
        source = matched(source, guard)
        assert source.targets is not None
        own = guard.preprocess if guard.preprocess.steps else None
        prepare = None if dataset in SMALL else own or self.prepares(name)
        about = {
            "format": maps_on_disk.FORMAT,
            "model": Path(name).stem,
            "model_digest": zoo.inspect(self._file(name) or name)["digest"],
            "data": Path(dataset).name,
            "data_digest": _digest(source),
            "images": len(source),
            "prepared": None if prepare is None else prepare.to_json(),
        }
        folder = self.cache / "maps" / f"{about['model']}-{about['data']}-{maps_on_disk.key_of(about)}"
        stored = maps_on_disk.read(folder, about)
        taken = guard if prepare is None else replace(guard, preprocess=Preprocess())
        if stored is None:
            made = partial(self._block, source, taken, prepare)
            maps_on_disk.write(folder, about, len(source), made, self._told(about))
            stored = maps_on_disk.read(folder, about)
            assert stored is not None
        return Maps(
            model=str(about["model"]),
            dataset=dataset,
            guard=taken,
            size=self._size(source, prepare),
            local_logits=stored.local_logits,
            targets=stored.targets,
            sample_places=stored.sample_places,
            sample_logits=stored.sample_logits,
            about=about,
        )

    def prepares(self, name: str) -> Preprocess:
        """Return how photos become what a network sees, if it has no way of its own: as those that it learned from."""
        side = (zoo.inspect(self._file(name) or name)["recipe"] or {}).get("image_side")
        return Preprocess((Resize(height=side, width=side, mode="bilinear"),)) if side else PHOTO

    def _told(self, about: dict[str, Any]) -> Callable[[int], None]:
        return lambda done: self.progress(f"maps of {about['data']} by {about['model']}", done, int(about["images"]))

    def _size(self, source: Source, prepare: Preprocess | None) -> tuple[int, int]:
        for image in decoded(source, workers=0):
            if not isinstance(image, Unreadable):
                height, width = image.shape[1], image.shape[2]
                return (height, width) if prepare is None else prepare.output_size(height, width)
        raise InputError(f"none of the {len(source)} images can be read. Check the files.")

    def _block(
        self, source: Source, guard: LocalGuard[Any], prepare: Preprocess | None, places: range
    ) -> maps_on_disk.Block | None:
        """Return the logits of all images of `places` that can be read, in order."""
        assert source.targets is not None
        guard.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        at_once = self.batch_size or AT_ONCE.get(self.device.type, 256)
        found: list[int] = []
        images: list[Tensor] = []
        logits: list[Tensor] = []
        try:
            for place, image in zip(places, decoded(source.subset(places)), strict=True):
                if isinstance(image, Unreadable):
                    logger.warning("left out: %s", image)
                else:
                    pixels = image[None].to(self.device).float() / 255
                    with runtime.full_precision(self.device):
                        images.append(pixels if prepare is None else prepare(pixels))
                    found.append(place)
                if len(images) == at_once or (images and place == places[-1]):
                    logits.append(guard.local_logits(torch.cat(images)).cpu())
                    images = []
        finally:
            guard.model.to("cpu")
        if not found:
            return None
        return maps_on_disk.Block(found, torch.cat(logits), torch.tensor([source.targets[place] for place in found]))


def _in_zoo(name: str) -> Path | None:
    return zoo.named_file(name)


def _digest(source: Source) -> str:
    """Return the SHA-256 of names, classes and sizes of files; their times differ from one copy to the next."""
    total = hashlib.sha256()
    assert source.targets is not None
    for place, (name, target) in enumerate(zip(source.names, source.targets, strict=True)):
        size = source.state(place).split(" ")[0]
        total.update(f"{name}\0{target}\0{size}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
