"""Model files: a guard as one safetensors archive.

The metadata holds, as JSON, everything else that makes a guard: the network's name and settings, class names,
preprocessing, evidence, defense with its masks, the training recipe; and a SHA-256 digest over all of it. The digest
detects damage; it does not say who wrote the file.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from patchguard import __version__, models
from patchguard.defenses import serialization
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.guards.identity import FORMAT, canonical, collect_tensors, digest_tensors, find_origin
from patchguard.guards.interval import INTERVAL, IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.guards.pixel_masks import PIXEL_MASKS, PixelMaskGuard
from patchguard.models.base import LocalModel
from patchguard.storage.atomic import replace_file
from patchguard.storage.user_code import EXAMPLE, find_code, find_saved, get_network, make_network, wrap_cells

logger = logging.getLogger(__name__)

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
    is kept as it is: any JSON object that says how the weights were trained. Of a network that code of the user's
    makes, the file keeps the weights and the name of the function; loading it runs that code.
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
    origin = find_origin(guard.model)
    if origin is None:
        _check_shapes(_build_empty(settings["model"]), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    written = canonical(settings)
    metadata = {"patchguard": written, "digest": digest_tensors(tensors, written)}
    if not path.parent.is_dir():
        raise InputError(f"the folder of `path` must exist; got {path}. Make it first.")
    with replace_file(path) as draft:
        save_file(tensors, draft, metadata=metadata)
    if origin is not None and origin.sha256:
        logger.warning("loading %s will run %s: keep that code where it can be found", path.name, origin.call)


def inspect(path: str | Path) -> dict[str, Any]:
    """Return the settings in a file, with its digest, without building the network or reading its tensors."""
    with _open(Path(path)) as archive:
        settings, _, claimed = _read_metadata(archive, Path(path))
    return {**settings, "digest": claimed}


def read(path: Path, *, trust_code: bool = False) -> Guard:
    """Return the guard in a file: everything is checked, then built, so that a refused file leaves nothing behind.

    `trust_code` lets code of the user's run, where the file names such code; the digest is checked before it does.
    """
    with _open(path) as archive:
        settings, written, claimed = _read_metadata(archive, path)
        shapes = {name: tuple(archive.get_slice(name).get_shape()) for name in archive.keys()}  # noqa: SIM118
        own_code = find_code(settings["model"]["name"]) is not None
        if not own_code:
            expected: nn.Module = _build_empty(settings["model"])
            _check_shapes(expected, shapes)
        tensors = {name: archive.get_tensor(name) for name in shapes}
    if digest_tensors(tensors, written) != claimed:
        raise InputError(f"{path.name} is damaged: its digest does not match its contents. Fetch the file again.")
    if own_code:
        expected = _build_from_code(settings["model"], path, trust_code)
        _check_shapes(expected, shapes, settings["model"]["name"])
    for name, like in expected.state_dict().items():
        wanted = torch.float16 if settings["half"] and like.is_floating_point() else like.dtype
        if tensors[name].dtype != wanted:
            raise InputError(f"the tensor {name} in {path.name} must be {wanted}; got {tensors[name].dtype}.")
        if like.is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise InputError(f"the tensor {name} in {path.name} must be finite; it holds NaN or infinity.")
    names = tuple(
        serialization.text(name, "class_names")
        for name in serialization.sequence(settings["class_names"], "class_names")
    )
    model: Any = expected
    if not own_code:
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


def _build_from_code(network: dict[str, Any], path: Path, trust_code: bool) -> nn.Module:
    """Return the network that the code makes which the file names; refuse code that has changed since."""
    settings = serialization.exactly(network["settings"], "model.settings", ("sha256", "cells"))
    given, cells = settings["sha256"], settings["cells"]
    sha256 = serialization.text(given, "model.settings.sha256") if given else None
    code = find_saved(network["name"], path.parent, sha256 or "")
    assert code is not None
    made = make_network(code, trust_code=trust_code, asked_by=path.name, pretrained=False, sha256=sha256)
    model = get_network(made)
    if not isinstance(model, nn.Module):
        raise InputError(f"`{code.call}` must make a torch module, as it did when {path.name} was saved.")
    if cells is None or isinstance(model, models.LocalModel):
        return model
    return wrap_cells(model, serialization.whole(cells, "model.settings.cells"))


def _open(path: Path) -> Any:
    if path.suffix.lower() in (".pth", ".pt", ".ckpt", ".bin") or _is_pickle(path):
        raise InputError(
            f"`{path}` must be a model file of patchguard (.safetensors); PyTorch's own files hold weights without the "
            "network. Write a function that builds your network and loads these weights into it, and give that: "
            f"{EXAMPLE} (docs/your_own_network.md)."
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
            f"{path.name} was not written by patchguard: it holds weights without a network. Write a function that "
            f"builds your network and loads them, and give that: {EXAMPLE} (docs/your_own_network.md)."
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


def _is_pickle(path: Path) -> bool:
    """Return whether a file begins as those that torch.save writes: a zip archive, or a pickle."""
    try:
        with open(path, "rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))
    except OSError:
        return False


def _check_shapes(expected: nn.Module, shapes: Mapping[str, tuple[int, ...]], name: str = "") -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    for problem, names in (("lacks", wanted.keys() - shapes.keys()), ("has besides", shapes.keys() - wanted.keys())):
        if names:
            some = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise InputError(
                f"a file for {name or expected.name} must hold its {len(wanted)} tensors; this one {problem} {some}."
            )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise InputError(f"the tensor {name} must have shape {list(shape)}; got {list(shapes[name])}.")
