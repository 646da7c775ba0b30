"""`Classifier`: any function from images to class scores, called as a black box.

A torch module, an ONNX file, a numpy function, an HTTP endpoint: `wrap_classifier` takes them all, and checks that what
it takes is a function of the image alone.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guard import Images
from patchguard.guards.identity import canonical, describe_model, digest_tensors, find_origin
from patchguard.models.base import LocalModel
from patchguard.runtime import LARGEST_BATCH, device_and_dtype, eval_mode, frozen_parameters, full_precision

Function: TypeAlias = Callable[[Tensor], Any]
# Pixels of all masked images in one call: 32 images of 32 x 32 or 5 of 224 x 224 on a CPU, 83 of 224 x 224 on a GPU.
PIXELS_AT_ONCE = {"cpu": 2**15, "cuda": 2**22}
FEWEST_AT_ONCE = 4


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Classifier:
    """A function from images (batch, 3, height, width) in [0, 1] to scores (batch, classes).

    A torch module runs on its own device and in its own precision, in evaluation mode, without autocast and TF32. Any
    other function gets the images as they are and is called by one thread at a time. `name` stands for it in digests.
    """

    function: Function
    classes: int
    name: str = ""
    batch_size: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def module(self) -> nn.Module | None:
        """The torch module, if it is one."""
        return self.function if isinstance(self.function, nn.Module) else None

    @torch.no_grad()
    def __call__(self, images: Images) -> Float64[Tensor, "batch classes"]:
        """Return the scores, on the device of the images; NaN counts as the lowest score there is."""
        return torch.cat([self._call(part) for part in torch.split(images, self.at_once(images))])

    def at_once(self, images: Images) -> int:
        """Return how many such images go into one call."""
        if self.batch_size is not None:
            return self.batch_size
        device = images.device if self.module is None else device_and_dtype(self.module)[0]
        pixels = PIXELS_AT_ONCE.get(device.type, PIXELS_AT_ONCE["cuda"])
        return min(max(FEWEST_AT_ONCE, pixels // images[0, 0].numel()), LARGEST_BATCH)

    def _call(self, images: Images) -> Float64[Tensor, "batch classes"]:
        try:
            if self.module is None:
                with self.lock:
                    scores = torch.as_tensor(self.function(images))
            else:
                device, dtype = device_and_dtype(self.module)
                with eval_mode(self.module), full_precision(device):
                    scores = self.module(images.to(device, dtype))
        except InputError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"`classifier` must take images {tuple(images.shape)}; it stopped with: {reason}. "
                "Give the `size` of images that it takes, or a `batch_size`."
            ) from error
        return self._validate(scores, len(images)).to(images.device)

    def _validate(self, scores: object, count: int) -> Float64[Tensor, "batch classes"]:
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != count:
            raise InputError(f"`classifier` must return scores ({count}, classes) for {count} images; got {shape}.")
        if scores.shape[1] < 2 or self.classes not in (0, scores.shape[1]):
            expected = self.classes or "two or more"
            raise InputError(f"`classifier` must return scores of {expected} classes; got {scores.shape[1]}.")
        lowest, highest = -torch.finfo(torch.float64).max, torch.finfo(torch.float64).max
        return scores.double().nan_to_num(nan=lowest, neginf=lowest, posinf=highest)

    def differentiate(self, images: Images) -> Float[Tensor, "batch classes"]:
        """Return the scores with their graph: gradients flow to the images; for torch modules alone."""
        if self.module is None:
            raise InputError(
                "`classifier` is no torch module and offers no gradients. Use an attack that needs none: noise, "
                "colors, copy."
            )
        device, dtype = device_and_dtype(self.module)
        with eval_mode(self.module), frozen_parameters(self.module):
            scores: Tensor = self.module(images.to(device, dtype))
        return scores.to(images.device)

    @property
    def digest(self) -> str:
        """SHA-256 of a module's tensors and layers; of the `name` of any other function, which must then have one."""
        if isinstance(self.function, WholeNetwork):
            described = {**describe_model(self.function.network, ()), "preprocess": self.function.preprocess.to_json()}
            return digest_tensors(_all_tensors(self.function), canonical(described))
        if self.module is not None:
            origin = find_origin(self.module)
            made_by = [] if origin is None else [origin.call, origin.sha256]
            return digest_tensors(_all_tensors(self.module), json.dumps([self.name, repr(self.module), *made_by]))
        if not self.name:
            raise InputError(
                "`name` must say which classifier this is, and which version of it: a function has no weights to make "
                "a digest of. Give it to `defend`."
            )
        return hashlib.sha256(self.name.encode()).hexdigest()


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module, those that it does not save included."""
    tensors = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


@final
class WholeNetwork(nn.Module):
    """A network of the registry as a classifier of source images: the mean of its local logits."""

    def __init__(self, preprocess: Preprocess, network: LocalModel) -> None:
        super().__init__()
        self.preprocess, self.network = preprocess, network

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes"]:
        """Return the logits of source images."""
        scores: Tensor = self.network(self.preprocess(images)).mean((2, 3))
        return scores


# -- making one --------------------------------------------------------------------------------------------------------


def wrap_classifier(
    function: Function | str | Path,
    size: tuple[int, int],
    *,
    drift: float,
    name: str = "",
    batch_size: int | None = None,
) -> Classifier:
    """Return a classifier; refuse what is visibly no function of single images, up to `drift` in every score.

    It is called on three images of noise, all at once, again, and in smaller batches.
    """
    if isinstance(function, (str, Path)):
        function = OnnxFile(function)
    if not callable(function):
        raise InputError(f"`classifier` must be a torch module, a function or an ONNX file; got {function!r}.")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"`batch_size` must be a whole number of at least 1; got {batch_size!r}.")
    if isinstance(function, LocalModel):
        function = WholeNetwork(Preprocess(), function)
    name = name or str(getattr(function, "digest", ""))
    classifier = Classifier(function=function, classes=0, name=name, batch_size=batch_size)
    images = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    together = classifier(images)
    for when, some in (("when called again", 3), ("on one image alone", 1), ("on two images alone", 2)):
        difference = float((classifier(images[:some]) - together[:some]).abs().max())
        if not difference <= drift:
            raise InputError(
                f"`classifier` must be a function of single images; {when}, its scores differ by {difference:.3g}, "
                f"more than the `drift` of {drift:g}. Put it into evaluation mode, or state a larger `drift`."
            )
    return replace(classifier, classes=together.shape[1])


@final
class NumpyFunction:
    """A function of float32 arrays (batch, 3, height, width), as a function of tensors."""

    def __init__(self, function: Callable[[Any], Any], name: str = "") -> None:
        self.function, self.digest = function, name

    def __call__(self, images: Tensor) -> Tensor:
        """Return the scores of the images."""
        return torch.as_tensor(self.function(images.cpu().float().numpy()))


@final
class OnnxFile:
    """An ONNX file with one input (batch, 3, height, width) and the scores as its first output; needs onnxruntime."""

    def __init__(self, path: str | Path) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise InputError(
                "onnxruntime must be installed to run ONNX files: pip install 'patchguard[onnx]'."
            ) from None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"`classifier` must be an ONNX file; got {path}: {error.strerror}.") from None
        try:
            self.session = onnxruntime.InferenceSession(content)
        except Exception as error:  # its own classes derive from Exception alone
            raise InputError(f"`classifier` must be an ONNX file that onnxruntime can read; {path}: {error}.") from None
        self.input = self.session.get_inputs()[0].name
        self.digest = hashlib.sha256(content).hexdigest()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the scores of the images."""
        return torch.as_tensor(self.session.run(None, {self.input: images.cpu().float().numpy()})[0])
