"""What a run folder keeps to resume from: the latest state, the best weights so far, and the log.

`checkpoint-000012` holds the state after twelve epochs: `state.json`, and tensors in files of at most `PART_BYTES`,
which are easy to move. It is complete or absent, and never pickle. Generators need no place in it: every epoch seeds
its own from the recipe's seed and its number.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.storage.atomic import replace_file
from patchguard.training.evaluate import Accuracy

PART_BYTES = 14 * 2**20
LOG = "log.jsonl"
LOG_ALIASES = {"rate": "lr", "left": "seconds_left"}  # what earlier releases called an entry of the log


def remove_drafts(folder: Path) -> None:
    """Remove what a run that was killed had not finished writing."""
    for draft in folder.glob(".*.draft"):
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


# -- the latest state --------------------------------------------------------------------------------------------------


def save(folder: Path, epoch: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write the state after `epoch` epochs, and `state["step"]` steps of the next one, then remove older ones."""
    step = state.get("step", 0)
    final = folder / (f"checkpoint-{epoch:06d}-{step:06d}" if step else f"checkpoint-{epoch:06d}")
    draft = folder / f".{final.name}.{os.getpid()}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for number, part in enumerate(_split(tensors)):
        save_file(part, draft / f"part-{number:02d}.safetensors")
    (draft / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
    older = [path for path in _list_checkpoints(folder) if path != final]
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)
    for path in older:
        shutil.rmtree(path, ignore_errors=True)
    return final


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the state of the latest checkpoint, or None where there is none."""
    paths = _list_checkpoints(folder)
    if not paths:
        return None
    latest = paths[-1]
    try:
        state = json.loads((latest / "state.json").read_text())
        tensors: dict[str, Tensor] = {}
        for path in sorted(latest.glob("part-*.safetensors")):
            tensors.update(load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{latest} is damaged: {error}. Delete it to start again, or restore it.") from None
    if sorted(tensors) != state["tensors"]:
        raise InputError(f"{latest} lacks some of its parts. Delete it to start again, or restore it.")
    return tensors, state


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


def _split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu().contiguous()
        if parts[-1] and size + stored.nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = stored
        size += stored.nbytes
    return parts


# -- the best weights --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Best:
    """The averaged weights with the best score on held-out images so far, in a file of their own."""

    folder: Path

    @property
    def path(self) -> Path:
        """Return where the weights are."""
        return self.folder / "best.safetensors"

    def offer(self, model: nn.Module, epoch: int, accuracy: Accuracy) -> None:
        """Keep the weights of `epoch` if they are better than those kept."""
        score = list(accuracy.score)
        state = self.state()
        if state is None or score > state["score"]:
            metadata = {"state": json.dumps({"epoch": epoch, "score": score})}
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            with replace_file(self.path) as draft:
                save_file(tensors, draft, metadata=metadata)

    def state(self) -> dict[str, Any] | None:
        """Return the epoch and the score of what is kept, or None."""
        if not self.path.exists():
            return None
        with safe_open(self.path, "pt") as archive:
            state: dict[str, Any] = json.loads(archive.metadata()["state"])
            return state

    def tensors(self) -> dict[str, Tensor] | None:
        """Return the weights that are kept, or None."""
        return load_file(self.path) if self.path.exists() else None

    def drop_after(self, epoch: int) -> None:
        """Drop what a stopped run kept after its last checkpoint."""
        state = self.state()
        if state is not None and state["epoch"] > epoch:
            self.path.unlink()


# -- the log -----------------------------------------------------------------------------------------------------------


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all epochs, in order; none where there is no log."""
    path = folder / LOG
    lines = path.read_text().splitlines() if path.exists() else []
    return [{LOG_ALIASES.get(key, key): value for key, value in json.loads(line).items()} for line in lines]


def trim_log(folder: Path, epochs: int) -> None:
    """Drop what a stopped run logged after its last checkpoint, and a line that it did not finish."""
    path = folder / LOG
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    complete = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if line.endswith("\n") and record["epoch"] <= epochs:
            complete.append(line)
    if complete != lines:
        with replace_file(path) as draft:
            draft.write_text("".join(complete))
