"""Guards by name and as files: build, list, save, load.

A file is one safetensors archive. Its metadata holds, as JSON, everything else that makes a guard: the network's name
and settings, class names, preprocessing, evidence, defense with its masks, the training recipe; and a SHA-256 digest
over all of it. The digest detects damage; it does not say who wrote the file.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from patchguard import __version__, models
from patchguard.defenses import Undefended
from patchguard.defenses import serialization as config
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError, nearest
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.identity import FORMAT, canonical, collect_tensors, digest_tensors
from patchguard.guards.interval import INTERVAL, IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models.base import LocalModel
from patchguard.models.interval_cnn import IntervalCnn
from patchguard.patch import Patch
from patchguard.storage.presets import PRESETS
from patchguard.storage.published_models import PUBLISHED, SUFFIX, download_model, model_folders

ENTRIES = ("format", "patchguard", "model", "class_names", "preprocess", "evidence", "defense", "recipe", "half")
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
    trained = [Entry(path.stem, "checkpoint", f"trained {_described(path)}") for path in checkpoints()]
    here = {entry.name for entry in trained}
    elsewhere = [
        Entry(name, "published", f"trained, {model.size / 1e6:.0f} MB: patchguard models --download {name}")
        for name, model in PUBLISHED.items()
        if name not in here
    ]
    presets = [Entry(name, "preset", preset.description) for name, preset in PRESETS.items()]
    networks = []
    for name, factory in models.REGISTRY.items():
        line = (factory.__doc__ or "").strip().splitlines()[0].removeprefix("Return ").rstrip(".")
        networks.append(Entry(name, "network", line))
    return [*trained, *elsewhere, *presets, *networks]


def build(name: str, *, patch: Patch | None = None, **settings: Any) -> LocalGuard[Any]:
    """Return a preset with freshly initialised weights, or a network of the registry without a defense.

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


def load(name_or_path: str | Path) -> LocalGuard[Any] | IntervalGuard:
    """Return the LocalGuard in a file, or the trained one of this name that comes with the package.

    A path has a separator or a suffix (`./mine`, `mine.safetensors`); anything else is a name, also where a file or
    folder of that name exists.
    """
    return _read(_located(name_or_path))


def load_guard(name_or_path: str | Path) -> LocalGuard[Any]:
    """Return the same for callers that look at cells; refuse an `IntervalGuard`, which has none."""
    guard = load(name_or_path)
    if isinstance(guard, IntervalGuard):
        raise InputError(
            f"`{name_or_path}` has no cells to look at: it is certified by interval bounds. Use it in Python: "
            f"patchguard.load({str(name_or_path)!r}).certify(images, patch)."
        )
    return guard


def find(name_or_path: str | Path) -> LocalGuard[Any]:
    """Return the guard of any name or path: presets and networks as `build` makes them, all else as `load` does."""
    name = str(name_or_path)
    return build(name) if name in PRESETS or name in models.REGISTRY else load_guard(name_or_path)


@final
@dataclass(frozen=True)
class ModelFile:
    """The file behind a name or path, and the digest that it carries."""

    path: Path
    digest: str

    def __str__(self) -> str:
        return f"{self.path}, digest {self.digest[:16]}"


def file_of(name_or_path: str | Path) -> ModelFile | None:
    """Return the file that `find` reads; None for presets and networks, which are made afresh."""
    name = str(name_or_path)
    if name in PRESETS or name in models.REGISTRY:
        return None
    path = _located(name_or_path)
    return ModelFile(path, inspect(path)["digest"])


def usual_size(name: str) -> tuple[int, int]:
    """Return the size of source images that a preset or network is made for."""
    if name in PRESETS:
        return PRESETS[name].source_size
    if name in SIZES:
        return SIZES[name], SIZES[name]
    _located(name)
    raise InputError(f"a file does not say what images it is for; give the size of yours beside `{name}`.")


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


def _located(name_or_path: str | Path) -> Path:
    path, name = Path(name_or_path), str(name_or_path)
    if is_path(name_or_path):
        if path.is_file():
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
    found: dict[str, Path] = {}
    for folder in model_folders():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            found.setdefault(path.stem, path)
    return list(found.values())


def _described(path: Path) -> str:
    settings = inspect(path)
    return f"{settings['model']['name']} with {settings['defense']['name']}"


# -- files -------------------------------------------------------------------------------------------------------------


def save(
    guard: LocalGuard[Any] | IntervalGuard,
    path: str | Path,
    *,
    recipe: Mapping[str, Any] | None = None,
    half: bool = False,
) -> None:
    """Write the LocalGuard to one file, all or nothing.

    `half` stores weights as float16, in half the space; they are float32 again after loading, but rounded. `recipe`
    is kept as it is: any JSON object that says how the weights were trained.
    """
    path = Path(path)
    settings = _config(guard, recipe, half)
    tensors = collect_tensors(guard.model, half=half)
    _check_shapes(_empty(settings["model"]), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    written = canonical(settings)
    metadata = {"patchguard": written, "digest": digest_tensors(tensors, written)}
    if not path.parent.is_dir():
        raise InputError(f"the folder of `path` must exist; got {path}. Make it first.")
    # Under its final name a file is always complete.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        save_file(tensors, draft, metadata=metadata)
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def inspect(path: str | Path) -> dict[str, Any]:
    """Return the settings in a file, with its digest, without building the network or reading its tensors."""
    with _opened(Path(path)) as archive:
        settings, _, claimed = _metadata(archive, Path(path))
    return {**settings, "digest": claimed}


def recipe(name_or_path: str | Path) -> dict[str, Any] | None:
    """Return how the weights behind a name or path were trained, as their file says it, if it does."""
    found: dict[str, Any] | None = inspect(_located(name_or_path))["recipe"]
    return found


def _config(guard: LocalGuard[Any] | IntervalGuard, recipe: Mapping[str, Any] | None, half: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "patchguard": __version__,
        **guard.to_json(),
        "recipe": None if recipe is None else dict(recipe),
        "half": half,
    }


def _read(path: Path) -> LocalGuard[Any] | IntervalGuard:
    """Check everything, then build: a file that is refused leaves nothing behind."""
    with _opened(path) as archive:
        settings, written, claimed = _metadata(archive, path)
        shapes = {name: tuple(archive.get_slice(name).get_shape()) for name in archive.keys()}  # noqa: SIM118
        expected = _empty(settings["model"])
        _check_shapes(expected, shapes)
        tensors = {name: archive.get_tensor(name) for name in shapes}
    for name, like in expected.state_dict().items():
        wanted = torch.float16 if settings["half"] and like.is_floating_point() else like.dtype
        if tensors[name].dtype != wanted:
            raise InputError(f"the tensor {name} in {path.name} must be {wanted}; got {tensors[name].dtype}.")
        if like.is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise InputError(f"the tensor {name} in {path.name} must be finite; it holds NaN or infinity.")
    if digest_tensors(tensors, written) != claimed:
        raise InputError(f"{path.name} is damaged: its digest does not match its contents. Fetch the file again.")
    names = tuple(config.text(name, "class_names") for name in config.sequence(settings["class_names"], "class_names"))
    with torch.random.fork_rng(devices=[]):  # first weights are drawn at random, then replaced
        model = models.build(settings["model"]["name"], **settings["model"]["settings"])
    model.load_state_dict(tensors, strict=True)
    if settings["defense"] == INTERVAL and isinstance(model, IntervalCnn):
        return IntervalGuard(model.eval(), names)
    preprocess = Preprocess.from_json(settings["preprocess"])
    evidence = config.evidence_from_json(settings["evidence"])
    defense = config.defense_from_json(settings["defense"])
    return LocalGuard(preprocess, model.eval(), evidence, defense, names)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"no file is at `{path}`.") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path.name} is not a whole safetensors file: {error}. Fetch it again.") from None


def _metadata(archive: Any, path: Path) -> tuple[dict[str, Any], str, str]:
    """Return the settings, their text, and the digest that the file claims."""
    metadata = archive.metadata() or {}
    if not {"patchguard", "digest"} <= set(metadata):
        raise InputError(
            f"{path.name} was not written by patchguard: it has no settings. Load bare weights into a built network."
        )

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        settings = json.loads(metadata["patchguard"], parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the settings in {path.name} are not JSON: {error}.") from None
    if isinstance(settings, dict) and settings.get("format") != FORMAT:
        raise InputError(
            f"{path.name} has format {settings.get('format')!r}; this release reads {FORMAT}. Use a newer patchguard."
        )
    config.exactly(settings, "settings", ENTRIES)
    config.flag(settings["half"], "half")
    network = config.exactly(settings["model"], "model", ("name", "settings"))
    config.text(network["name"], "model.name")
    if not isinstance(network["settings"], dict):
        raise InputError(f"`model.settings` must be an object; got {type(network['settings']).__name__}.")
    if settings["recipe"] is not None and not isinstance(settings["recipe"], dict):
        raise InputError(f"`recipe` must be an object or null; got {type(settings['recipe']).__name__}.")
    return settings, metadata["patchguard"], metadata["digest"]


def _empty(network: dict[str, Any]) -> LocalModel:
    """Return the network without memory for its tensors, so that settings from a file can ask for any size."""
    try:
        with torch.device("meta"):
            return models.build(network["name"], **network["settings"])
    except InputError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"`model.settings` do not make a {network['name']}: {reason}.") from None


def _check_shapes(expected: LocalModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    for problem, names in (("lacks", wanted.keys() - shapes.keys()), ("has besides", shapes.keys() - wanted.keys())):
        if names:
            some = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise InputError(
                f"a file for {expected.name} must hold its {len(wanted)} tensors; this one {problem} {some}."
            )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise InputError(f"the tensor {name} must have shape {list(shape)}; got {list(shapes[name])}.")
