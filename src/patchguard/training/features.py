"""Features that stay as they are, computed once: with `model.freeze`, only the last layer of a network learns.

features.f16, features.json    in the run folder, until the guard is saved; a stopped run resumes in the middle
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float16, Int64
from torch import Tensor, nn

from patchguard.data.dataset import Dataset
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.models.base import LocalModel, apply_linear_at_cells
from patchguard.storage.atomic import write_json

IMAGES_AT_ONCE = 16
FILE, STATE = "features.f16", "features.json"
OnFeatures = Callable[[int, int], None]


@final
@dataclass(frozen=True, eq=False)
class FeatureSet:
    """What the frozen layers say about labeled images of one size: a vector for every cell."""

    features: Float16[Tensor, "count channels rows columns"]
    targets: Int64[Tensor, " count"]
    class_names: tuple[str, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, index: slice) -> "FeatureSet":
        """Return the images of these numbers."""
        return replace(self, features=self.features[index], targets=self.targets[index])


@final
class LastLayer(nn.Module):
    """The only layer that learns."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, features: Tensor) -> Tensor:
        """Return the local logits."""
        return apply_linear_at_cells(self.linear, features)


def require_last_layer(model: LocalModel) -> nn.Linear:
    """Return the last layer of a network that can be frozen up to it."""
    linear = getattr(model, "fc", None)
    if not isinstance(linear, nn.Linear) or not hasattr(model, "features"):
        raise InputError(f"`model.freeze` must be false for {model.name}: only srf and BagNets can be frozen.")
    return linear


@torch.no_grad()
def features_of(model: Any, preprocess: Preprocess, data: Dataset) -> Float16[Tensor, "count channels rows columns"]:
    """Return the features of all images of `data`, without augmentation."""
    device = next(model.parameters()).device
    pixels = preprocess(data.images.to(device).float() / 255)
    features: Tensor = model.features(model.normalize(pixels))
    return features.half().cpu()


def compute_features(
    model: LocalModel,
    preprocess: Preprocess,
    parts: tuple[Dataset, ...],
    out: Path,
    *,
    key: dict[str, Any],
    on_features: OnFeatures = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[FeatureSet, ...] | None:
    """Return the features of each part, from the file in `out` as far as it holds them; None where time is up.

    `key` is everything that they depend on: a file with another one is made anew.
    """
    require_last_layer(model)
    total, path = sum(map(len, parts)), out / FILE
    shape = tuple(features_of(model, preprocess, parts[0].subset(slice(0, 1))).shape[1:])
    out.mkdir(parents=True, exist_ok=True)
    done = _read_done(out, {**key, "total": total})
    stored = torch.from_file(str(path), shared=True, size=total * torch.Size(shape).numel(), dtype=torch.float16)
    stored = stored.view(total, *shape)
    first, sets = 0, []
    for data in parts:
        while done < first + len(data):
            if should_stop():
                return None
            block = data.subset(slice(done - first, done - first + IMAGES_AT_ONCE))
            stored[done : done + len(block)] = features_of(model, preprocess, block)
            done += len(block)
            write_json(out / STATE, {**key, "total": total, "done": done})
            on_features(done, total)
        rows = stored[first : first + len(data)]
        sets.append(FeatureSet(rows, data.targets, data.class_names, data.size))
        first += len(data)
    return tuple(sets)


def remove_features(out: Path) -> None:
    """Remove the files, which nobody needs once the guard is saved."""
    for name in (FILE, STATE):
        (out / name).unlink(missing_ok=True)


def _read_done(out: Path, key: dict[str, Any]) -> int:
    try:
        state = json.loads((out / STATE).read_text())
        done = int(state.pop("done"))
    except (OSError, ValueError, KeyError):
        return 0
    return done if state == json.loads(json.dumps(key)) and (out / FILE).exists() else 0
