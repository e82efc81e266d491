"""Zero in the rows and slices that torch's grouped_mm leaves unwritten, in place.

On Hopper a small kernel of our own (kernels/sm90/uncovered.py) touches only those. Elsewhere, and without the CuTe DSL,
torch reads and writes the whole tensor.
"""

from __future__ import annotations

import functools

import torch

from .rows import counts, outside
from .small_kernels import CAPABILITY, Kernel, device_capability, from_cache

KERNEL = "sm90.zero_uncovered"
WORD_BYTES = 8


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


def _kernel_for(out: torch.Tensor, by_expert: bool) -> Kernel | None:
    row = out.shape[-1] * out.element_size()
    if not out.is_cuda or device_capability(out.device.index) != CAPABILITY:
        return None
    if not out.is_contiguous() or row % WORD_BYTES or out.data_ptr() % WORD_BYTES:
        return None
    return _load(by_expert)


@functools.cache
def _load(by_expert: bool) -> Kernel | None:
    """The compiled kernel; None without the packages of the extra `cuda`."""

    def compile_kernel() -> Kernel:
        from ..sm90.uncovered import compile_uncovered

        kernel: Kernel = compile_uncovered(by_expert)
        return kernel

    try:
        return from_cache(KERNEL, ["uncovered.py"], {"by_expert": by_expert}, compile_kernel)
    except ImportError:
        return None


__all__ = ["device_capability", "prepare", "zero_empty_experts", "zero_rows"]
