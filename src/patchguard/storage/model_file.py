"""Model files: a guard as one safetensors archive.

The metadata holds, as JSON, everything else that makes a guard: the network's name and settings, class names,
preprocessing, evidence, defense with its masks, the training recipe; and a SHA-256 digest over all of it. The digest
detects damage; it does not say who wrote the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from patchguard import __version__, models
from patchguard.defenses import serialization
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.guards.identity import FORMAT, canonical, collect_tensors, digest_tensors
from patchguard.guards.interval import INTERVAL, IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.guards.pixel_masks import PIXEL_MASKS, PixelMaskGuard
from patchguard.models.base import LocalModel
from patchguard.storage.atomic import replace_file

ENTRIES = ("format", "patchguard", "model", "class_names", "preprocess", "evidence", "defense", "recipe", "half")


def save(
    guard: Guard,
    path: str | Path,
    *,
    recipe: Mapping[str, Any] | None = None,
    half: bool = False,
) -> None:
    """Write the guard to one file, all or nothing.

    `half` stores weights as float16, in half the space; they are float32 again after loading, but rounded. `recipe`
    is kept as it is: any JSON object that says how the weights were trained.
    """
    path = Path(path)
    settings = {
        "format": FORMAT,
        "patchguard": __version__,
        **guard.to_json(),
        "recipe": None if recipe is None else dict(recipe),
        "half": half,
    }
    tensors = collect_tensors(guard.model, half=half)
    _check_shapes(_build_empty(settings["model"]), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    written = canonical(settings)
    metadata = {"patchguard": written, "digest": digest_tensors(tensors, written)}
    if not path.parent.is_dir():
        raise InputError(f"the folder of `path` must exist; got {path}. Make it first.")
    with replace_file(path) as draft:
        save_file(tensors, draft, metadata=metadata)


def inspect(path: str | Path) -> dict[str, Any]:
    """Return the settings in a file, with its digest, without building the network or reading its tensors."""
    with _open(Path(path)) as archive:
        settings, _, claimed = _read_metadata(archive, Path(path))
    return {**settings, "digest": claimed}


def read(path: Path) -> Guard:
    """Return the guard in a file: everything is checked, then built, so that a refused file leaves nothing behind."""
    with _open(path) as archive:
        settings, written, claimed = _read_metadata(archive, path)
        shapes = {name: tuple(archive.get_slice(name).get_shape()) for name in archive.keys()}  # noqa: SIM118
        expected = _build_empty(settings["model"])
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
    names = tuple(
        serialization.text(name, "class_names")
        for name in serialization.sequence(settings["class_names"], "class_names")
    )
    with torch.random.fork_rng(devices=[]):  # first weights are drawn at random, then replaced
        model = models.build(settings["model"]["name"], **settings["model"]["settings"])
    model.load_state_dict(tensors, strict=True)
    rule = settings["defense"]
    kind: type[IntervalGuard | PixelMaskGuard | LocalGuard[Any]] = LocalGuard
    if rule == INTERVAL:
        kind = IntervalGuard
    elif isinstance(rule, dict) and rule.get("name") == PIXEL_MASKS:
        kind = PixelMaskGuard
    return kind.from_json(model.eval(), settings, names)


def _open(path: Path) -> Any:
    if path.suffix.lower() in (".pth", ".pt", ".ckpt", ".bin"):
        raise InputError(
            f"`{path}` must be a model file of patchguard (.safetensors); PyTorch's own files hold weights without the "
            "network and may run code. In Python, build your network, load these weights into it and wrap it: "
            "patchguard.models.wrap, as in examples/certify_your_own_cnn.py."
        )
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"no file is at `{path}`.") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path.name} is not a whole safetensors file: {error}. Fetch it again.") from None


def _read_metadata(archive: Any, path: Path) -> tuple[dict[str, Any], str, str]:
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
    serialization.exactly(settings, "settings", ENTRIES)
    serialization.flag(settings["half"], "half")
    network = serialization.exactly(settings["model"], "model", ("name", "settings"))
    serialization.text(network["name"], "model.name")
    if not isinstance(network["settings"], dict):
        raise InputError(f"`model.settings` must be an object; got {type(network['settings']).__name__}.")
    if settings["recipe"] is not None and not isinstance(settings["recipe"], dict):
        raise InputError(f"`recipe` must be an object or null; got {type(settings['recipe']).__name__}.")
    return settings, metadata["patchguard"], metadata["digest"]


def _build_empty(network: dict[str, Any]) -> LocalModel:
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
