"""The published models: their digests, and how they come to this machine.

The file of a name is looked for in the package, in the folder `zoo` of a clone, in the folder that $PATCHGUARD_ZOO
names, and among earlier downloads. Where $PATCHGUARD_ZOO is a web address, a published file that is nowhere is
downloaded from there once and checked.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote, urlsplit

from filelock import FileLock

from patchguard.data.download import CACHE, Progress, cache_folder, download
from patchguard.errors import InputError, nearest

logger = logging.getLogger(__name__)

ZOO = "PATCHGUARD_ZOO"  # the environment variable: one more folder of model files, or the address of one
SUFFIX = ".safetensors"
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"  # files that come with the package
CLONE = Path(__file__).parents[3] / "zoo"  # other published files, in a clone of the repository


@final
@dataclass(frozen=True)
class PublishedModel:
    """The file of a published model, with a page of its own in docs/models: size in bytes and SHA-256."""

    size: int
    sha256: str


PUBLISHED = {
    "cifar10": PublishedModel(10_343_260, "f158b6d592911455f57616b0c144471225f167f4a45adcaa438ea4ebd57ccda0"),
    "cifar10_mask_srf": PublishedModel(10_343_100, "9a0de3f6e48fd127e5d064c811ff5545b16e754ba5182fddfa5464f68072f87d"),
    "cifar10_mask_ds": PublishedModel(22_384_644, "66f8cc16be9fa33fbe0fa95e40311db8db56bd0ebf9b3b70f103133db0140346"),
    "cifar10_mask_bn17": PublishedModel(11_213_308, "69eec30fb6434705d5693b736035c0d19c864482bf31f664de80d82ec58cd042"),
    "cifar10_resnet18": PublishedModel(12_604_852, "25d51f36c00a3b04665223068ce45207ffabb32f9bb6d7f08f9c1555a63d85b8"),
    "cifar10_masked_resnet18": PublishedModel(
        22_379_820, "0f7f041720529e4946cec71859e0d62879404f383454ad08efde67d1f71903a9"
    ),
    "imagenette_bn17": PublishedModel(28_506_308, "212064a3dbf7a691ea9f2934edd8bf384f3e52afeec0c19b5024c3ef6438ff95"),
}


def model_folders() -> list[Path]:
    """Return the folders where the file of a name may lie, ours first."""
    chosen = os.environ.get(ZOO, "")
    return [CHECKPOINTS, CLONE, *([Path(chosen).expanduser()] if chosen and not _is_url(chosen) else []), _downloads()]


def download_model(name: str, progress: Progress | None = None) -> Path:
    """Return the file of a published model, downloaded from the address in $PATCHGUARD_ZOO unless it is here."""
    if name not in PUBLISHED:
        raise InputError(f"`name` must be a published model; got {name!r}. {nearest(name, list(PUBLISHED))}")
    model, file = PUBLISHED[name], f"{name}{SUFFIX}"
    here = next((folder / file for folder in model_folders() if (folder / file).is_file()), None)
    if here is not None:
        return here
    base = os.environ.get(ZOO, "")
    if not _is_url(base):
        raise InputError(
            f"the weights of {name!r} are not here: they come with a clone of the repository, in its folder zoo. Set "
            f"{ZOO} to that folder, or to the web address of a copy of it, such as https://example.org/zoo."
        )
    url, path = f"{base.rstrip('/')}/{quote(file)}", _downloads() / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{file}.lock")):
            if not path.is_file():  # another process may have brought it meanwhile
                logger.warning("downloading %s (%.0f MB) from %s to %s", name, model.size / 1e6, url, path.parent)
                download(
                    url,
                    path,
                    limit=model.size,
                    digest=f"sha256:{model.sha256}",
                    progress=progress,
                    advice=f"Check the connection and {ZOO}; the next try goes on where this one ended.",
                )
    except OSError as error:
        raise InputError(
            f"{path.parent} cannot be written: {error.strerror or error}. Make room, or set {CACHE} to another folder."
        ) from None
    return path


def _downloads() -> Path:
    return cache_folder() / "models"


def _is_url(address: str) -> bool:
    """Return whether this is a web address; refuse addresses of any other kind. C:\\zoo is a folder."""
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme not in ("", "http", "https"):
        raise InputError(f"{ZOO} must be a folder, or an address that begins with http:// or https://; got {address}.")
    return bool(scheme)
