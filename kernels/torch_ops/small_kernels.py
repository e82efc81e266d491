"""Small kernels of ours that are launched beside torch's: from the cache on disk or compiled into it on first use."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...graph_ops.ir.errors import StateError
from ..cache import CacheKey, KernelCache, compiler_versions, source_digest

CAPABILITY = (9, 0)
SOURCES = Path(__file__).parents[1] / "sm90"
Kernel = Callable[..., Any]

_LOCK = threading.Lock()


@functools.cache
def device_capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a GPU, asked once: torch looks it up anew for each call."""
    return torch.cuda.get_device_capability(index)


def place_obstacle(x: torch.Tensor) -> str:
    """Why no kernel of ours may take `x` where it is; "" where one may."""
    if torch.compiler.is_compiling():
        return "torch.compile, which fuses the expressions with what is around them"
    if not x.is_cuda:
        return f"a tensor on {x.device}"
    if type(x) not in (torch.Tensor, nn.Parameter) or _get_current_dispatch_mode() is not None:
        return "a subclass of Tensor or a dispatch mode, which has to see torch's operations"
    if device_capability(x.device.index) != CAPABILITY:
        return f"compute capability {device_capability(x.device.index)}; the kernel is for {CAPABILITY}"
    return "" if _installed() else "the extra `cuda` is not installed"


@functools.cache
def _installed() -> bool:
    try:
        compiler_versions()
    except ImportError:
        return False
    return True


def load(name: str, files: Sequence[str], config: Any, compile_kernel: Callable[[], Kernel]) -> Kernel:
    """`from_cache` outside of captures: call it, and keep what it gives, before one.

    Raises StateError("BUILD_IN_CAPTURE") inside CUDA graph capture.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise StateError(
            "BUILD_IN_CAPTURE",
            asked=f"kernel {name} in CUDA graph capture",
            seen=f"it is not loaded for {config}",
            required="one call with the same types and sizes of the routing before the capture",
            hint="torch.cuda.make_graphed_callables warms up by itself; torch.cuda.graph does not",
        )
    return from_cache(name, files, config.as_dict(), compile_kernel)


def from_cache(
    name: str, files: Sequence[str], configuration: Mapping[str, Any], compile_kernel: Callable[[], Kernel]
) -> Kernel:
    """The kernel of a configuration. `files` of kernels/sm90 are its sources; `compile_kernel` makes it where the cache
    does not have it. Raises ImportError without the packages of the extra `cuda`."""
    sources = source_digest([SOURCES / file for file in files])
    key = CacheKey(name, "sm90a", sources, compiler_versions(), configuration)
    with _LOCK:
        loaded: Kernel = KernelCache().get(key, functools.partial(_compile_to, compile_kernel), _load_from)
    return loaded


def launch(kernel: Kernel, device: torch.device, *words: int) -> None:
    """On torch's current stream of `device`, which is current meanwhile."""
    index = device.index
    if torch.cuda.current_device() == index:
        kernel(*words, torch._C._cuda_getCurrentRawStream(index))
    else:
        with torch.cuda.device(index):
            kernel(*words, torch._C._cuda_getCurrentRawStream(index))


def _compile_to(compile_kernel: Callable[[], Kernel], path: Path) -> None:
    from ..sm90 import compiling

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    path.write_bytes(compiling.export_object(compile_kernel()))


def _load_from(path: Path) -> Kernel:
    from ..sm90 import compiling

    return compiling.load_object(path.read_bytes())


__all__ = ["CAPABILITY", "Kernel", "device_capability", "from_cache", "launch", "load", "place_obstacle"]
