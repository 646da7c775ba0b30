"""Where and how computations run: device, processes, precision, seeds, and the environment that a result records."""

import gc
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchguard import __version__
from patchguard.errors import InputError

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
# Images in one call of a network: above 65,535 torch picks other kernels on GPUs, and one graph would not fit all.
LARGEST_BATCH = 2**15
_TIMEOUT = timedelta(hours=6)  # how long the others wait while the first process measures or writes

# -- device ------------------------------------------------------------------------------------------------------------


def resolve_device(name: str = "auto") -> torch.device:
    """Return the named device, or for "auto" the first GPU where there is one and the CPU elsewhere."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"`device` must be auto, cpu, cuda, or a numbered GPU such as cuda:1; got {name!r}.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"`device` must be auto, cpu, cuda, or a numbered GPU such as cuda:1; got {name!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"`device` must be available on this machine; got {name!r} with {torch.cuda.device_count()} GPUs. Use cpu."
        )
    return device


def device_and_dtype(module: object) -> tuple[torch.device, torch.dtype]:
    """Return the device and type of a module's first floating tensor; CPU and float32 if it has none."""
    if isinstance(module, nn.Module):
        for tensors in (module.parameters(), module.buffers()):
            for tensor in tensors:
                if tensor.is_floating_point():
                    return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.float32


# -- processes ---------------------------------------------------------------------------------------------------------


def rank() -> int:
    """Return the rank of this process among those that torchrun started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the processes that torchrun started, over gloo on CPUs and nccl on GPUs; yield the device of this one.

    Without torchrun it does nothing. All processes leave together.
    """
    if world_size() == 1:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield device
        broadcast_from_first(0.0, device)
    finally:
        # A network that shares gradients holds the group; where it outlives it, torch now and then aborts at the exit.
        gc.collect()
        dist.destroy_process_group()


def broadcast_from_first(value: int | float, device: torch.device) -> int | float:
    """Return the value of the first process, in all of them."""
    if world_size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return shared.item()


def average_over_processes(tensor: Tensor) -> None:
    """Replace a tensor, in all processes, by its mean over them."""
    if world_size() > 1:
        dist.all_reduce(tensor)
        tensor /= world_size()


@contextmanager
def barrier_group() -> Iterator[Callable[[], None]]:
    """Join the processes that torchrun started; yield a barrier, at which each waits for all others.

    Without torchrun the barrier does nothing.
    """
    if world_size() == 1:
        yield lambda: None
        return
    # Shards may take hours longer than others; a process that dies is noticed by torchrun.
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield _barrier
    finally:
        dist.destroy_process_group()


def _barrier() -> None:
    dist.barrier()


# -- mode and precision ------------------------------------------------------------------------------------------------


@contextmanager
def eval_mode(module: object) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back into its own mode at the end."""
    modes = [(part, part.training) for part in module.modules()] if isinstance(module, nn.Module) else []
    try:
        if isinstance(module, nn.Module) and any(mode for _, mode in modes):
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def frozen_parameters(module: nn.Module) -> Iterator[None]:
    """Let no gradient flow to the parameters of what is computed inside; several threads may enter at once."""
    with _freezing:
        depth, learning = _frozen.get(id(module), (0, ()))
        if depth == 0:
            learning = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
            for parameter in learning:
                parameter.requires_grad_(False)
        _frozen[id(module)] = depth + 1, learning
    try:
        yield
    finally:
        with _freezing:
            depth, learning = _frozen.pop(id(module))
            if depth > 1:
                _frozen[id(module)] = depth - 1, learning
            else:
                for parameter in learning:
                    parameter.requires_grad_(True)


_freezing = threading.Lock()
_frozen: dict[int, tuple[int, tuple[nn.Parameter, ...]]] = {}  # by module: how often entered, what to restore


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 as float32, and every cell from what it reads alone.

    Without autocast on `device`, without TF32 or bfloat16 inside products, and without cuDNN: it may pick convolutions
    by Fourier or Winograd transforms, which mix neighboring cells and cancel them again up to rounding. That rounding
    grows with what a patch makes the network compute. torch's own convolutions on GPUs are matrix products of one
    image at a time: no cell takes part in another's sum, and no image in another's.
    """
    _precision.enter()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _precision.leave()


class _Precision:
    """The switches are global: the first thread to enter turns them off, the last to leave restores them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.restore: list[Callable[[], None]] = []

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.restore = [_disable_reduced_matmul(), _disable_tf32_convolutions(), _disable_cudnn()]

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                for restore in self.restore:
                    restore()


_precision = _Precision()


# torch has two sets of these switches and lets nobody read the older one once they disagree, itself included when it
# compiles a network. So each is turned by the older one, unless the user has already turned them one by one.


def _disable_reduced_matmul() -> Callable[[], None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        return _set_ieee([torch.backends.cuda.matmul, _mkldnn.matmul])
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _disable_tf32_convolutions() -> Callable[[], None]:
    try:
        before = _cudnn.allow_tf32
    except RuntimeError:
        return _set_ieee([_cudnn.conv, _cudnn.rnn])
    _cudnn.allow_tf32 = False

    def restore() -> None:
        _cudnn.allow_tf32 = before

    return restore


def _disable_cudnn() -> Callable[[], None]:
    before = _cudnn.enabled
    _cudnn.enabled = False

    def restore() -> None:
        _cudnn.enabled = before

    return restore


def _set_ieee(owners: list[Any]) -> Callable[[], None]:
    before = [(owner, owner.fp32_precision) for owner in owners]
    for owner in owners:
        owner.fp32_precision = "ieee"

    def restore() -> None:
        for owner, value in before:
            owner.fp32_precision = value

    return restore


def use_deterministic_kernels() -> None:
    """Allow only deterministic kernels; some are slower. Call it before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    _cudnn.deterministic, _cudnn.benchmark = True, False


# -- warnings ----------------------------------------------------------------------------------------------------------


@contextmanager
def ignore_dependency_warnings() -> Iterator[None]:
    """Silence warnings from Pillow and about deprecated features, which code of dependencies raises."""
    _warnings.enter()
    try:
        yield
    finally:
        _warnings.leave()


@final
class _IgnoredWarnings:
    """Filters are global: the first thread to enter sets them, the last to leave restores the ones before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.filters = warnings.catch_warnings()

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.filters = warnings.catch_warnings()
                self.filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.filters.__exit__(None, None, None)


_warnings = _IgnoredWarnings()


# -- seeds -------------------------------------------------------------------------------------------------------------


def derive_seed(seed: int, *index: int) -> int:
    """Return a 64-bit seed for item `index` of a run, a function of `seed` and `index` alone."""
    if seed < 0 or any(each < 0 for each in index):
        raise InputError(f"`seed` and `index` must be whole numbers of at least 0; got {(seed, *index)}.")
    state = np.random.SeedSequence([seed, *index]).generate_state(1, np.uint64)
    return int(state[0])


def make_generator(seed: int, *index: int) -> torch.Generator:
    """Return a generator for item `index` of a run: answers then depend on neither batch size nor order."""
    return torch.Generator().manual_seed(derive_seed(seed, *index))


# -- environment -------------------------------------------------------------------------------------------------------


def describe_environment() -> dict[str, str | int | None]:
    """Return what a measurement depends on: versions, processor and GPU, but no machine names or paths."""
    gpu = torch.cuda.is_available()
    return {
        "patchguard": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": _cudnn.version() if gpu else None,
    }
