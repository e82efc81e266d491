"""Zero in the rows and slices that torch's grouped_mm leaves unwritten, in place.

On Hopper a small kernel of our own (kernels/sm90/uncovered.py) touches only those. Elsewhere, and without the CuTe DSL,
torch reads and writes the whole tensor.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..cache import CacheKey, KernelCache, compiler_versions, source_digest
from .rows import counts, outside

KERNEL = "sm90.zero_uncovered"
SOURCE = Path(__file__).parents[1] / "sm90" / "uncovered.py"
CAPABILITY = (9, 0)
WORD_BYTES = 8

_LOCK = threading.Lock()


@functools.cache
def device_capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a GPU, asked once: torch looks it up anew for each call."""
    return torch.cuda.get_device_capability(index)


def zero_rows(out: torch.Tensor, offsets: torch.Tensor) -> None:
    """Zeroes the rows of `out` (M, N) from offsets[-1] on. `offsets` (L,) int32 with L > 0, on the same device."""
    kernel = _kernel_for(out, by_expert=False)
    if kernel is None:
        out.masked_fill_(outside(offsets, out.shape[0])[:, None], 0)
    else:
        kernel(offsets, out.view(torch.int64))


def zero_empty_experts(out: torch.Tensor, offsets: torch.Tensor) -> None:
    """Zeroes out[g] of `out` (L, K, N) for every expert g without rows. `offsets` as for `zero_rows`."""
    kernel = _kernel_for(out, by_expert=True)
    if kernel is None:
        out.masked_fill_((counts(offsets) == 0)[:, None, None], 0)
    else:
        kernel(offsets, out.view(out.shape[0], -1).view(torch.int64))


def prepare(device: torch.device) -> None:
    """Loads both kernels where they serve, so that no later call has to compile, inside graph capture for one."""
    if device.type == "cuda" and device_capability(device.index) == CAPABILITY:
        for by_expert in (False, True):
            _load(by_expert)


def _kernel_for(out: torch.Tensor, by_expert: bool) -> Callable[..., Any] | None:
    row = out.shape[-1] * out.element_size()
    if not out.is_cuda or device_capability(out.device.index) != CAPABILITY:
        return None
    if not out.is_contiguous() or row % WORD_BYTES or out.data_ptr() % WORD_BYTES:
        return None
    return _load(by_expert)


def _load(by_expert: bool) -> Callable[..., Any] | None:
    with _LOCK:
        return _loaded(by_expert)


@functools.cache
def _loaded(by_expert: bool) -> Callable[..., Any] | None:
    """The compiled kernel, from the cache on disk or into it; None without the packages of the extra `cuda`."""
    try:
        key = CacheKey(KERNEL, "sm90a", source_digest([SOURCE]), compiler_versions(), {"by_expert": by_expert})
        return KernelCache().get(key, functools.partial(_compile_to, by_expert), _load_from)
    except ImportError:
        return None


def _compile_to(by_expert: bool, path: Path) -> None:
    from ..sm90 import compiling

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from ..sm90.uncovered import compile_uncovered

    path.write_bytes(compiling.export_object(compile_uncovered(by_expert)))


def _load_from(path: Path) -> Callable[..., Any]:
    from ..sm90 import compiling

    return compiling.load_object(path.read_bytes())


__all__ = ["device_capability", "prepare", "zero_empty_experts", "zero_rows"]
