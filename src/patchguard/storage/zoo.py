"""Guards by name: list, build, load. What a file holds is in model_file.py."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from patchguard import models
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError, nearest
from patchguard.geometry.preprocess import Preprocess
from patchguard.guard import Guard
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch
from patchguard.storage import user_code
from patchguard.storage.model_file import inspect as inspect
from patchguard.storage.model_file import read
from patchguard.storage.model_file import save as save
from patchguard.storage.presets import PRESETS
from patchguard.storage.published_models import PUBLISHED, SUFFIX, download_model, model_folders
from patchguard.storage.user_code import is_own as is_own

# Side of the images that a network is usually run on.
SIZES = {
    **dict.fromkeys(("bagnet9", "bagnet17", "bagnet33", "resnet18", "resnet50"), 224),
    **dict.fromkeys(("srf", "srf_wide", "ds_resnet18", "block_resnet18", "interval_cnn"), 32),
    "ds_resnet50": 299,
}

Kind = Literal["checkpoint", "published", "preset", "network"]


# -- by name -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Entry:
    """One name of the zoo. A checkpoint has trained weights; a preset and a network start from random ones.

    A published checkpoint that is not on this machine yet is of the kind "published".
    """

    name: str
    kind: Kind
    description: str


def available() -> list[Entry]:
    """Return every name that `build`, `load` or the command line knows, with one line about each."""
    trained = [Entry(path.stem, "checkpoint", f"trained {_describe(path)}") for path in checkpoints()]
    here = {entry.name for entry in trained}
    elsewhere = [
        Entry(name, "published", f"trained, {model.size / 1e6:.0f} MB: patchguard models --download {name}")
        for name, model in PUBLISHED.items()
        if name not in here
    ]
    presets = [Entry(name, "preset", preset.description) for name, preset in PRESETS.items()]
    networks = []
    for name in models.REGISTRY:
        try:
            text = (models.REGISTRY[name].__doc__ or "").strip() or f"of the package {models.REGISTRY.package(name)}"
        except InputError as error:
            text = f"not usable: {error}"
        networks.append(Entry(name, "network", text.splitlines()[0].removeprefix("Return ").rstrip(".")))
    return [*trained, *elsewhere, *presets, *networks]


def build(name: str, *, patch: Patch | None = None, **settings: Any) -> LocalGuard[Any]:
    """Return a preset with freshly initialized weights, or a network of the registry without a defense.

    `settings` replace the network's own (such as `classes` or `width`). The masks of a preset fit its own patch, or
    `patch` if given, in the space that the preset names.
    """
    if name in PRESETS:
        return PRESETS[name].build(patch=patch, **settings)
    if name in models.REGISTRY:
        model = models.build(name, **settings).eval()
        return LocalGuard(Preprocess(), model, Evidence(low=None), Undefended())
    known = [*PRESETS, *models.REGISTRY]
    raise InputError(f"`name` must be a preset or a network; got {name!r}. {nearest(name, known)}")


def load(
    name_or_path: str | Path,
    *,
    trust_code: bool = False,
    patch: Patch | None = None,
    size: tuple[int, int] | None = None,
) -> Guard:
    """Return the guard in a file, the trained one of this name that comes with the package, or one around your network.

    A path has a separator or a suffix (`./mine`, `mine.safetensors`); anything else is a name, also where a file or
    folder of that name exists. A network of your own is `my_net.py:make_model`, `package.module:function`,
    `timm:resnet50`, `torchvision:resnet50` or an ONNX file: it is defended against `patch` in images of `size` (height,
    width), by cells where it has cells that see little, else by masks on pixels. `trust_code` lets your code run.
    """
    if user_code.is_own(name_or_path):
        return user_code.load_own(name_or_path, trust_code=trust_code, patch=patch, size=size)
    return read(_locate(name_or_path), trust_code=trust_code)


def load_guard(name_or_path: str | Path) -> LocalGuard[Any]:
    """Return the same for callers that look at cells; refuse guards that have none."""
    return require_cells(load(name_or_path), name_or_path)


def require_cells(guard: Guard, name_or_path: str | Path) -> LocalGuard[Any]:
    """Return a guard with cells; refuse one that has none."""
    if not isinstance(guard, LocalGuard):
        raise InputError(
            f"`{name_or_path}` has no cells to look at: it answers for the image as a whole, or every patch can touch "
            "all of its cells. `patchguard certify` works with it."
        )
    return guard


def find(
    name_or_path: str | Path,
    *,
    trust_code: bool = False,
    patch: Patch | None = None,
    size: tuple[int, int] | None = None,
) -> Guard:
    """Return the guard of any name or path: presets and networks as `build` makes them, all else as `load` does."""
    name = str(name_or_path)
    if name in PRESETS or name in models.REGISTRY:
        return build(name)
    return load(name_or_path, trust_code=trust_code, patch=patch, size=size)


@final
@dataclass(frozen=True)
class ModelFile:
    """The file behind a name or path, and the digest of the guard in it: the one that certificates name."""

    path: Path
    digest: str

    def __str__(self) -> str:
        return f"{self.path}, digest {self.digest[:16]}"


def file_of(name_or_path: str | Path, guard: Guard | None = None) -> ModelFile | None:
    """Return the file that `find` reads; None for presets and networks, which are made afresh.

    `guard` is the one in the file, where it was read already.
    """
    name = str(name_or_path)
    if name in PRESETS or name in models.REGISTRY:
        return None
    if guard is not None and user_code.is_own(name):
        return ModelFile(Path(name), guard.digest)
    path = _locate(name_or_path)
    return ModelFile(path, (guard or read(path)).digest)


def short_name(name_or_path: str | Path) -> str:
    """Return what runs call a model: its name, the stem of its file, or the function that makes it."""
    code = user_code.find_code(name_or_path)
    return Path(name_or_path).stem if code is None else code.call


def usual_size(name: str) -> tuple[int, int]:
    """Return the size of source images that a preset or network is made for, or a file's was trained on."""
    if name in PRESETS:
        return PRESETS[name].source_size
    if name in SIZES:
        return SIZES[name], SIZES[name]
    if user_code.is_own(name):
        raise InputError(f"`{name}` does not say what images it is for; give their size: --size 224.")
    trained = {} if name in models.REGISTRY else recipe(name) or {}
    data = trained.get("data")
    data = data if isinstance(data, dict) else {**trained, "image_size": trained.get("image_side")}
    side = data.get("image_size") or (32 if data.get("dataset") == "cifar10" else None)
    if not isinstance(side, int):
        raise InputError(f"`{name}` does not say what images it is for; give the size of yours beside it: --size 224.")
    return side, side


def is_path(name_or_path: str | Path) -> bool:
    """Return whether this is a path: it has a separator or a suffix. Anything else is a name, whatever files exist.

    >>> is_path("cifar10"), is_path("./cifar10"), is_path("mine.safetensors")
    (False, True, True)
    """
    name = str(name_or_path)
    separators = [each for each in (os.sep, os.altsep) if each]
    return isinstance(name_or_path, Path) or bool(Path(name).suffix) or any(each in name for each in separators)


def named_file(name: str) -> Path | None:
    """Return the file of a name; None where there is none. Two different models of one name are refused."""
    first = next((path for path in checkpoints() if path.stem == name), None)
    if first is None:
        return None
    for path in (folder / first.name for folder in model_folders()):
        if path.is_file() and (digest := _claimed_digest(path)) != (ours := _claimed_digest(first)):
            raise InputError(
                f"{name!r} names two different models: {first} with digest {ours[:16]} and {path} with {digest[:16]}. "
                "Give the path of the one you mean."
            )
    return first


def _claimed_digest(path: Path) -> str:
    try:
        claimed: str = inspect(path)["digest"]
    except InputError:
        return "none: it is damaged"
    return claimed


def _locate(name_or_path: str | Path) -> Path:
    path, name = Path(name_or_path), str(name_or_path)
    if is_path(name_or_path):
        if path.is_file():
            if path.suffix == ".py":
                user_code.refuse_file_without_function(path)
            return path
        raise InputError(f"no file is at `{name}`. Check the path, or give a name that `patchguard models` lists.")
    file = named_file(name)
    if file is not None:
        return file
    if name in PRESETS or name in models.REGISTRY:
        raise InputError(
            f"{name!r} has no trained weights here. Train some (`patchguard train --list`), or name a checkpoint that "
            f"`patchguard models` lists; `zoo.build({name!r})` makes fresh ones."
        )
    if name in PUBLISHED:
        return download_model(name)
    known = [*(each.stem for each in checkpoints()), *PUBLISHED, *PRESETS, *models.REGISTRY]
    if name == "imagenette_resnet50":
        raise InputError(
            f"{name!r} is made of the weights of a ResNet-50 of your own: python -m patchguard.training.pretrained "
            f"resnet50.safetensors zoo/{name}.safetensors (docs/models/{name}.md)."
        )
    if path.is_file():
        raise InputError(f"`{name}` is not a known name. Write ./{name} for the file that is here.")
    raise InputError(f"`{name}` is neither a file nor a known name. {nearest(name, known)}")


def checkpoints() -> list[Path]:
    """Return the files with a name of their own: ours first, then those that the user put aside."""
    files: dict[str, Path] = {}
    for folder in model_folders():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            files.setdefault(path.stem, path)
    return list(files.values())


def _describe(path: Path) -> str:
    settings = inspect(path)
    runs = " (runs that code)" if user_code.find_code(settings["model"]["name"]) is not None else ""
    return f"{settings['model']['name']} with {settings['defense']['name']}{runs}"


def recipe(name_or_path: str | Path) -> dict[str, Any] | None:
    """Return how the weights behind a name or path were trained, as their file says it, if it does."""
    if user_code.is_own(name_or_path):
        return None
    trained: dict[str, Any] | None = inspect(_locate(name_or_path))["recipe"]
    return trained
