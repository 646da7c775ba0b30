"""The state of a training run as a folder: all or nothing, never pickle, in parts that are easy to move.

`checkpoint-000012` holds the state after twelve epochs: `state.json`, and tensors in files of at most `PART` bytes.
Generators need no place in it: every epoch seeds its own from the recipe's seed and its number.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from patchguard.errors import InputError

PART = 14 * 2**20


def save(folder: Path, epoch: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write the state after `epoch` epochs, then remove older ones."""
    final = folder / f"checkpoint-{epoch:06d}"
    draft = folder / f".{final.name}.{os.getpid()}.draft"
    for left in folder.glob(".checkpoint-*.draft"):  # by a run that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    for number, part in enumerate(_parts(tensors)):
        save_file(part, draft / f"part-{number:02d}.safetensors")
    (draft / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
    older = [path for path in _saved(folder) if path != final]
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)
    for path in older:
        shutil.rmtree(path, ignore_errors=True)
    return final


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the state of the latest checkpoint, or None where there is none."""
    saved = _saved(folder)
    if not saved:
        return None
    latest = saved[-1]
    try:
        state = json.loads((latest / "state.json").read_text())
        tensors: dict[str, Tensor] = {}
        for path in sorted(latest.glob("part-*.safetensors")):
            tensors.update(load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{latest} is damaged: {error}. Delete it to start anew, or bring it back whole.") from None
    if sorted(tensors) != state["tensors"]:
        raise InputError(f"{latest} lacks some of its parts. Delete it to start anew, or bring it back whole.")
    return tensors, state


def _saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if parts[-1] and size + plain.nbytes > PART:
            parts.append({})
            size = 0
        parts[-1][name] = plain
        size += plain.nbytes
    return parts
