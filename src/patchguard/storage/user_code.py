"""Networks of the user's own: `my_net.py:make_model`, `package.module:function`, `timm:resnet50`, `net.onnx`.

Whoever names a function here lets it run, so it must be trusted first (`trust_code=True`, `--trust-code`). What it
returns becomes a guard by `adopt`. A model file keeps the weights, the name of the function and the SHA-256 of the file
that defines it; code that it imports from elsewhere is not part of any digest.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from patchguard.defenses import DoubleMasking
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError, NoFieldError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.guard import Guard
from patchguard.guards.classifier import OnnxFile
from patchguard.guards.identity import Origin, find_origin, remember_origin
from patchguard.guards.local import ANY_MASKS, LocalGuard
from patchguard.guards.pixel_masks import DRIFT, defend
from patchguard.models import REGISTRY, LocalModel, wrap
from patchguard.models.base import IMAGENET_MEAN, IMAGENET_STD, Normalize
from patchguard.patch import Patch

logger = logging.getLogger(__name__)

LIBRARIES = ("timm", "torchvision")
TRUST = "add --trust-code (in Python: trust_code=True)"
EXAMPLE = "--model my_net.py:make_model --trust-code"
_CALL = re.compile(r"(?P<where>.+):(?P<function>[A-Za-z_]\w*)", re.DOTALL)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@final
@dataclass(frozen=True)
class Code:
    """A function that makes a network, by the file or the module that defines it; or a network of a library."""

    call: str  # as model files and digests name it: my_net.py:make_model, package.module:function, timm:resnet50
    function: str
    file: Path | None = None
    module: str = ""
    library: str = ""

    @property
    def where(self) -> str:
        """The file or module, for messages."""
        return self.call.rpartition(":")[0] if self.file is None else str(self.file)


def find_code(name: str | Path) -> Code | None:
    """Return the function that a name stands for; None for the name or path of a model. Nothing is run or looked up."""
    text = str(name)
    library, _, network = text.partition(":")
    if library in LIBRARIES and network:
        if not re.fullmatch(r"[A-Za-z0-9_.]+", network):
            raise InputError(f"`{text}` must name a network of {library}, such as {library}:resnet50.")
        return Code(text, network, library=library)
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    where, function = match["where"], match["function"]
    if where.endswith(".py"):
        return Code(f"{Path(where).name}:{function}", function, file=Path(where))
    return Code(text, function, module=where) if _MODULE.fullmatch(where) else None


def is_own(name: str | Path) -> bool:
    """Return whether a name stands for a network of the user's own, which gets its masks from the patch and size."""
    return find_code(name) is not None or Path(name).suffix.lower() == ".onnx"


def refuse_file_without_function(path: Path) -> None:
    """Raise for a Python file given as a model without the name of a function; the file is read, not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        functions = []
    else:
        functions = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined = f" It defines {', '.join(functions[:5])}." if functions else ""
    raise InputError(
        f"`{path}` must be followed by the function that makes the model: {path}:{(functions or ['make_model'])[0]}."
        f"{defined}"
    )


# -- running it --------------------------------------------------------------------------------------------------------


def make_network(
    code: Code, *, trust_code: bool, asked_by: str = "", pretrained: bool = True, sha256: str | None = None
) -> Any:
    """Run the function and return what it made, with its origin; refuse code that is not trusted or not as saved.

    `asked_by` is the model file that names the function. `pretrained=False` is passed on where the function takes it:
    a model file brings its own weights. Weights that the function draws at random are the same every time.
    """
    if code.library:
        made, digest = _make_library_network(code.library, code.function, pretrained), ""
    else:
        if code.file is not None and not code.file.is_file():
            raise InputError(f"no file is at `{code.file}`. Check the path in {code.call}.")
        if not trust_code:
            told = f"{asked_by} holds the weights of a network that" if asked_by else f"`{code.call}` is code:"
            made_by = f" `{code.call}` makes, and loading it runs that code" if asked_by else " loading it runs it"
            raise InputError(f"{told}{made_by}. If you trust {code.where}, {TRUST}.")
        with _explain(code):
            source, read_module = _find_source(code)
            digest = hashlib.sha256(source).hexdigest()
            if sha256 is not None and digest != sha256:
                raise InputError(
                    f"{code.where} has changed since {asked_by} was saved: SHA-256 {digest[:16]}, not {sha256[:16]}. "
                    "Bring the old file back, or make and save the guard again."
                )
            made = _call(code, read_module(), pretrained)
    network = get_network(made)
    if isinstance(network, nn.Module) and getattr(network, "name", None) not in REGISTRY:
        remember_origin(network, Origin(code.call, digest))
    return made


def _find_source(code: Code) -> tuple[bytes, Callable[[], Any]]:
    """Return the text of the file and what runs it: exactly these bytes, for a file of the user's."""
    if code.file is None:
        _add_to_path(Path())
        spec = importlib.util.find_spec(code.module)
        if spec is None:
            raise InputError(
                f"no module `{code.module}` can be imported here. Check the name, or give a file: {EXAMPLE}."
            )
        source = Path(spec.origin).read_bytes() if spec.origin and spec.origin.endswith(".py") else b""
        return source, lambda: importlib.import_module(code.module)
    file = code.file.resolve()
    source = file.read_bytes()

    def read_module() -> Any:
        _add_to_path(file.parent)
        module = types.ModuleType(f"user_code_{file.stem}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module
        exec(compile(source, str(file), "exec"), module.__dict__)
        return module

    return source, read_module


def _add_to_path(folder: Path) -> None:
    """Let code import what lies beside it, as a script can."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def _call(code: Code, module: Any, pretrained: bool) -> Any:
    function = getattr(module, code.function, None)
    if function is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"{code.where} has no function `{code.function}`; it has {', '.join(known[:8]) or 'none'}.")
    if isinstance(function, (nn.Module, Guard)):
        made: Any = function
    elif not callable(function):
        raise InputError(f"`{code.call}` must be a function that makes a model; it is {type(function).__name__}.")
    else:
        takes = inspect.signature(function).parameters
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = function(pretrained=pretrained) if "pretrained" in takes and not pretrained else function()
    if isinstance(made, (Guard, nn.Module)) or (callable(made) and not isinstance(made, type)):
        return made
    got = "None" if made is None else f"a {type(made).__name__}"
    hint = " Build the network, load these weights into it, and return it." if isinstance(made, dict) else ""
    raise InputError(
        f"`{code.call}` must return a torch module, a function of images, or a Guard; it returned {got}.{hint}"
    )


@contextmanager
def _explain(code: Code) -> Iterator[None]:
    """Turn what goes wrong in the user's code into one sentence that names the line."""
    try:
        yield
    except InputError:
        raise
    except SyntaxError as error:
        name = Path(error.filename or code.where).name
        raise InputError(f"{name} has a syntax error in line {error.lineno}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        line, frames = "", error.__traceback__
        while frames is not None:
            if code.file is not None and frames.tb_frame.f_code.co_filename == str(code.file.resolve()):
                line = f" in line {frames.tb_lineno}"
            frames = frames.tb_next
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(f"`{code.call}` stopped{line} with {type(error).__name__}: {reason}.") from error


def get_network(made: Any) -> Any:
    """Return the network inside a guard."""
    if not isinstance(made, Guard):
        return made
    try:
        return made.model
    except AttributeError:
        return None


# -- libraries ---------------------------------------------------------------------------------------------------------


@final
class PhotoNetwork(nn.Module):
    """A network of a library as a classifier of photos: resized, cropped and normalized as it was trained."""

    def __init__(self, network: nn.Module, preprocess: Preprocess, mean: Any, std: Any, class_names: Any = ()) -> None:
        super().__init__()
        self.network, self.preprocess, self.class_names = network, preprocess, tuple(class_names)
        self.normalize = Normalize([float(value) for value in mean], [float(value) for value in std])

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of photos with pixels in [0, 1]."""
        scores: Tensor = self.network(self.normalize(self.preprocess(images)))
        return scores


def _make_library_network(library: str, name: str, pretrained: bool) -> PhotoNetwork:
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise InputError(f"`{library}:{name}` needs {library}, which is not here: pip install {library}.") from error
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"`{library}:{name}` needs {library}, which cannot be imported here: {reason}.") from error
    make = _make_timm if library == "timm" else _make_torchvision
    try:
        return make(module, name, pretrained).eval()
    except InputError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{library} cannot make `{name}`: {reason}. Its own list of models has the names.") from error


def _make_timm(timm: Any, name: str, pretrained: bool) -> PhotoNetwork:
    network = timm.create_model(name, pretrained=pretrained)
    settings = dict(getattr(network, "pretrained_cfg", None) or {})
    side = int((settings.get("input_size") or (3, 224, 224))[-1])
    shorter = int(side / float(settings.get("crop_pct") or 0.875))
    mode = "bicubic" if settings.get("interpolation") == "bicubic" else "bilinear"
    steps = Preprocess((Resize(shorter=shorter, mode=mode), CenterCrop(height=side, width=side)))  # type: ignore[arg-type]
    return PhotoNetwork(network, steps, settings.get("mean") or IMAGENET_MEAN, settings.get("std") or IMAGENET_STD)


def _make_torchvision(torchvision: Any, name: str, pretrained: bool) -> PhotoNetwork:
    models = importlib.import_module("torchvision.models")
    weights = models.get_model_weights(name).DEFAULT
    photos = weights.transforms()
    network = models.get_model(name, weights=weights if pretrained else None)
    mode = "bicubic" if "bicubic" in str(photos.interpolation).lower() else "bilinear"
    shorter, side = photos.resize_size[0], photos.crop_size[0]
    steps = Preprocess((Resize(shorter=shorter, mode=mode), CenterCrop(height=side, width=side)))  # type: ignore[arg-type]
    names = [str(each) for each in weights.meta.get("categories", ())]
    unique = [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names)]
    return PhotoNetwork(network, steps, photos.mean, photos.std, unique)


# -- making a guard ----------------------------------------------------------------------------------------------------


def load_own(name: str | Path, *, trust_code: bool, patch: Patch | None, size: tuple[int, int] | None) -> Guard:
    """Return the guard of a network of the user's own; a network without a defense needs a patch and a size."""
    code = find_code(name)
    if code is None:
        made, label = OnnxFile(name), ""
    else:
        made = make_network(code, trust_code=trust_code)
        label = code.call
    if isinstance(made, Guard):
        return made
    if patch is None or size is None:
        raise InputError(
            f"`patch` and `size` must be given: {name} makes a network without a defense. In Python: "
            f"patchguard.load({str(name)!r}, patch=Patch(32), size=(224, 224), trust_code=True)."
        )
    return adopt(made, patch, size, label)


def adopt(network: Any, patch: Patch, size: tuple[int, int], name: str = "") -> Guard:
    """Return a guard around a network: by cells where the patch leaves some alone, else by masks on pixels.

    A module that returns one vector of scores per image has no cells. One that returns (batch, classes, rows, columns)
    has; it gets pixels in [0, 1] and normalizes by itself, like any classifier here.
    """
    names = tuple(str(each) for each in getattr(network, "class_names", ()) or ())
    if isinstance(network, nn.Module):
        network.eval()
        local = network if isinstance(network, LocalModel) else _wrap_if_local(network, size)
        if local is not None:
            guard = LocalGuard(
                Preprocess(), local, Evidence(low=None, drift=DRIFT), DoubleMasking(masks=ANY_MASKS), names
            )
            if _leaves_cells_alone(guard, patch, size):
                return guard.for_patch(patch, *size)
            network = local
    return defend(network, patch, size=size, class_names=names, name="" if isinstance(network, nn.Module) else name)


@torch.no_grad()
def _wrap_if_local(network: nn.Module, size: tuple[int, int]) -> LocalModel | None:
    """Return the network as a local model if it returns feature maps; None if it returns scores, or cannot be run."""
    parameter = next(network.parameters(), torch.zeros(()))
    try:
        scores = network(torch.zeros(2, 3, *size, device=parameter.device, dtype=parameter.dtype))
    except Exception:
        return None  # `defend` says why
    if not isinstance(scores, Tensor) or scores.dim() != 4:
        return None
    return wrap_cells(network, scores.shape[1])


def wrap_cells(network: nn.Module, classes: int) -> LocalModel:
    """Return a network that returns feature maps of pixels in [0, 1] as a local model of the same origin."""
    local = wrap(network, classes=classes, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)).eval()
    origin = find_origin(network)
    if origin is not None:
        remember_origin(local, origin)
    return local


def _leaves_cells_alone(guard: LocalGuard[Any], patch: Patch, size: tuple[int, int]) -> bool:
    try:
        covered = guard.field(*size).is_covered_by(patch.height, patch.width)
        why = f"a patch of {patch.height} x {patch.width} pixels can touch every cell of this network"
    except NoFieldError as error:
        covered, why = True, str(error)
    if covered:
        logger.warning("the defense is masks on pixels, around the network as a whole: %s", why)
    return not covered


def find_saved(name: str, beside: Path, sha256: str) -> Code | None:
    """Return the code that a model file names: the file lies beside it, or in the working folder."""
    code = find_code(name)
    if code is None or code.file is None:
        return code
    places = [beside / code.file.name, Path(code.file.name)]
    there = [place for place in places if place.is_file()]
    right = [place for place in there if hashlib.sha256(place.read_bytes()).hexdigest() == sha256]
    return replace(code, file=(right or there or places)[0])
