"""`Program`: a network as one fixed graph of operations, which a guard runs and from which its field is derived.

A Python module may do anything: look at the batch size or the memory layout, remember its last call, notice that it
is being traced. Its field would then describe a call that nobody makes. So a guard never certifies a module. It
exports the module once, derives the field from the exported graph, and runs that same graph with the module's weights.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.export import Dim, ExportedProgram

from patchguard.errors import InputError, NoFieldError
from patchguard.geometry.field import Field
from patchguard.geometry.trace import derive_field
from patchguard.runtime import LARGEST_BATCH, device_and_dtype, eval_mode, full_precision, ignore_dependency_warnings

_EXAMPLES = 3  # images that the module and its program are compared on, in batches of one, two and three


@final
@dataclass(frozen=True, eq=False)
class Program:
    """What a guard runs on images of one size, and the pixels that each cell of its result reads.

    `graph` is the exported graph and `field` was derived from it; or `graph` is a model that declares its own field,
    which is then taken on trust. `layers` are the fields of the layers on the way, by name, where they were derived.
    """

    graph: nn.Module
    field: Field
    layers: tuple[tuple[str, Field], ...] = ()

    def __call__(self, pixels: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits, computed the way that certificates are about: see `full_precision`."""
        device, dtype = device_and_dtype(self.graph)
        with full_precision(device):
            local_logits: Tensor = self.graph(to_fast_layout(pixels.to(device, dtype)))
        return local_logits


def to_fast_layout(
    pixels: Float[Tensor, "batch channels height width"],
) -> Float[Tensor, "batch channels height width"]:
    """Put the channels last on a CPU, where convolutions are faster so."""
    return pixels.contiguous(memory_format=torch.channels_last) if pixels.device.type == "cpu" else pixels


_programs: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Program | NoFieldError]] = WeakKeyDictionary()
_checked: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


def export_program(module: nn.Module, size: tuple[int, int], *, channels: int = 3) -> Program:
    """Return the program of `module` for images of `size` = (height, width), with its field, or refuse and say why.

    The module is exported in evaluation mode on its own device, for any number of images at once; its mode is then
    restored. Programs share the module's parameters and buffers and are kept as long as its structure stays the same:
    its modules, their settings, the shapes and types of its tensors. A change that cannot be seen there (in a closure,
    say) is not noticed; the program goes on computing what it did, and its field stays right.

    A module that disagrees with its program is refused: which of the two is meant, nobody could say.
    """
    height, width = size
    if height < 1 or width < 1 or channels < 1:
        raise InputError(f"`size` must be at least 1 x 1 pixel; got {height} x {width} with {channels} channels.")
    with torch.inference_mode(False):  # a graph cannot be exported from inference tensors
        known = _programs.setdefault(module, {})
        key = (height, width, channels, *device_and_dtype(module), _structure(module))
        program = known.get(key)
        if program is None:
            try:
                exported = _export(module, (2, channels, height, width))
                program = Program(exported.module(), *derive_field(exported, module, height, width))
                _check_agreement(module, program, (channels, height, width))
            except NoFieldError as refusal:
                program = refusal
            known[key] = program
        if isinstance(program, NoFieldError):
            raise NoFieldError(str(program)) from program.__cause__
        _share_tensors(module, program.graph)
    return program


def check_per_image_function(module: nn.Module, shape: tuple[int, int, int]) -> None:
    """Refuse a module that visibly computes more than a function of each image; `shape` is that of an image.

    For classifiers that a model shows parts of images and that nothing is derived from. It is a test, not a proof.
    """
    key = (shape, _structure(module))
    if key not in _checked.setdefault(module, set()):
        _check_agreement(module, module, shape)
        _checked[module].add(key)


def trace_field(module: nn.Module, size: tuple[int, int], *, channels: int = 3) -> Field:
    """Return which pixels of a `size` = (height, width) image each cell of the output (B, K, U, V) can read.

    Theorem.  In evaluation mode and in exact arithmetic, output (b, k, u, v) of `export_program(module, size)` is a
              function of the pixels of image b in the box of cell (u, v), whatever values the parameters have and
              however many images are in the batch.
    Proof.    Each operation of the exported graph has a rule that carries such a statement from its inputs to
              its result. An operation without a rule, or one that mixes positions or images, is refused.
    """
    return export_program(module, size, channels=channels).field


def _structure(module: nn.Module) -> tuple[object, ...]:
    """Return what the graph depends on, as far as can be seen: a new stride must not find the old program."""
    parts: list[tuple[object, ...]] = []
    for name, part in module.named_modules():
        inner = {"training", "_parameters", "_buffers", "_modules"}
        settings = {key: value for key, value in vars(part).items() if key not in inner}
        settings_seen = tuple((key, _fingerprint(value)) for key, value in settings.items())
        hooks = tuple(map(id, (*part._forward_pre_hooks.values(), *part._forward_hooks.values())))
        parts.append((name, type(part), settings_seen, hooks))
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple(parts), tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _fingerprint(value: object) -> object:
    """Return something that changes when the value does; for tensors and functions, which object it is."""
    if isinstance(value, Tensor) or callable(value):
        return id(value)
    if isinstance(value, dict):
        return tuple((repr(key), _fingerprint(entry)) for key, entry in value.items())
    return repr(value)


def _share_tensors(module: nn.Module, graph: nn.Module) -> None:
    """Let the graph compute with the tensors that the module has now: `.to(device)` gives it new buffers."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    owners = dict(graph.named_modules())
    for name, tensor in tensors:
        path, _, leaf = name.rpartition(".")
        owner = owners.get(path)
        for store in (owner._parameters, owner._buffers) if owner is not None else ():
            if leaf in store and store[leaf] is not tensor:
                store[leaf] = tensor


def _export(module: nn.Module, shape: tuple[int, ...]) -> ExportedProgram:
    device, dtype = device_and_dtype(module)
    with (
        eval_mode(module),
        full_precision(device),
        torch.no_grad(),
        ignore_dependency_warnings(),
        _suppress_logging(),
        _restore_transforms(),
    ):
        # torch.export calls its own deprecated parts; which ones changes with every release.
        example = torch.zeros(shape, device=device, dtype=dtype)
        # The batch is symbolic, so that a graph made for some numbers of images only is refused.
        batch = ({0: Dim("batch", min=1, max=LARGEST_BATCH)},)
        try:
            program: ExportedProgram = torch.export.export(module, (example,), dynamic_shapes=batch, strict=False)
            # Functional form: the plain export may still write into tensors in place.
            functional: ExportedProgram = program.run_decompositions({})
        except Exception as error:
            reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__
            if "batch" in reason and "onstraint" in reason:
                raise InputError(
                    "`module` must treat every image by itself, however many there are; its operations depend on the "
                    f"number of images in the batch ({reason}). Leave the first dimension alone."
                ) from error
            raise NoFieldError(
                f"`module` must be a network that torch.export can trace on a {shape[2]} x {shape[3]} image; "
                f"it stopped with: {reason} Fix the network, or declare its field yourself and audit it."
            ) from error
    return functional


@contextmanager
def _suppress_logging() -> Iterator[None]:
    """Keep torch from logging the errors that are reported here as one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _restore_transforms() -> Iterator[None]:
    """Leave the function transforms (`torch.func.jvp`, `vmap`) that a failed export would leave entered."""
    functorch: Any = torch._C._functorch
    depth, level = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


@torch.no_grad()
def _check_agreement(module: nn.Module, reference: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> None:
    """Refuse a module that computes something else than `reference` for three images at once.

    Certificates do not rest on this: they are about the program. It tells users whose module is not what was traced.
    """
    device, dtype = device_and_dtype(module)
    noise = torch.rand(_EXAMPLES, *shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    images = to_fast_layout(noise)
    calls = [
        ("for one image", images[:1]),
        ("for two images", images[:2]),
        ("for three images", images),
        ("when called again", images[:1]),
        ("for another memory layout", noise[:1].contiguous()),
    ]
    with eval_mode(module), full_precision(device), ignore_dependency_warnings():
        expected = reference(images)
        tolerance = torch.finfo(dtype).eps ** 0.5 * max(1.0, expected.abs().nan_to_num(posinf=0.0).max().item())
        for when, batch in calls:
            try:
                difference = _largest_difference(module(batch), expected[: len(batch)])
            except Exception as error:
                raise InputError(
                    f"`module` must also run outside torch.export; {when}, it stopped with: {error}"
                ) from error
            if not difference <= tolerance:
                raise InputError(
                    "`module` must be a function of the image alone, the same as the program traced from it; "
                    f"{when}, it differs by {difference:.3g}. Let it keep nothing between calls, and look at neither "
                    "the number of images, the memory layout nor whether it is being traced."
                )


def _largest_difference(result: object, expected: Tensor) -> float:
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return float("inf")
    same = (result == expected) | (result.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, (result - expected).abs()).max())
