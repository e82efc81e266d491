"""Host side: compile a configuration once, launch it with plain torch tensors on torch's current stream."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import DgluConfig, illegal, padded_bytes, scratch_tensors

if TYPE_CHECKING:
    import torch

ENTRY = "opfuse_sm90_dglu"  # symbol of an exported object
_lock = threading.Lock()
_functions: dict[DgluConfig, Callable] = {}


class UnsupportedConfig(ValueError):
    """A configuration that `config.illegal` declines; the message lists every reason."""


def workspace_bytes(config: DgluConfig, L: int, M: int, N: int) -> int:
    """Bytes of scratch memory one launch needs: L experts, M rows, N columns of the matmul's result."""
    return sum(padded_bytes(rows, columns) for _, rows, columns in scratch_tensors(config, L, M, N))


def scale_bytes(config: DgluConfig, M: int, N: int) -> dict[str, int]:
    """Bytes of the scale buffers, by side: the 128 x 4 atom's padding included where scales are swizzled.

    The kernel writes real scales only; padding is the caller's to zero.
    """
    sides = {"row": (M, 2 * N // 32), "col": (2 * N, -(-M // 32))}
    if not config.sf_swizzled:
        return {side: rows * blocks for side, (rows, blocks) in sides.items()}
    return {side: -(-rows // 128) * -(-blocks // 4) * 512 for side, (rows, blocks) in sides.items()}


def compile_dglu(config: DgluConfig) -> Callable:
    """Compiles a configuration for sm_90a (no GPU needed) and returns the function object.

    Raises UnsupportedConfig with every reason when the configuration is not legal.
    """
    reasons = illegal(config)
    if reasons:
        raise UnsupportedConfig("; ".join(reasons))
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from .entry import compile_entry

    return compile_entry(config)


def export_object(function: Any) -> bytes:
    """A compiled function as the bytes of a relocatable object, for a cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dglu.o")
        function.export_to_c(str(path), function_name=ENTRY)
        return path.read_bytes()


def load_object(data: bytes) -> Callable:
    """The function of an exported object; needs the DSL's runtime library, not its compiler."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dglu.o")
        path.write_bytes(data)
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)


def install(config: DgluConfig, function: Callable) -> None:
    """Makes `launch` use a function that was compiled or loaded elsewhere."""
    with _lock:
        _functions[config] = function


def function_of(config: DgluConfig) -> Callable:
    """The function of a configuration, compiled at most once in this process."""
    function = _functions.get(config)
    if function is None:
        with _lock:
            function = _functions.get(config)
            if function is None:
                function = _functions[config] = compile_dglu(config)
    return function


@functools.cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _needs_workspace(config: DgluConfig) -> bool:
    return bool(scratch_tensors(config, 1, 1, 1))


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    import torch

    assert tensor is not None, "the configuration asks for codes and scales"
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def launch(
    config: DgluConfig,
    *,
    dy: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (L, K, N), or (L,) int64 addresses of (K, N) buffers
    offsets: torch.Tensor,  # (L,) int32 end offsets
    c: torch.Tensor,  # (M, 2N)
    d: torch.Tensor | None = None,  # (M, 2N)
    prob: torch.Tensor | None = None,  # (M,) float32
    alpha: torch.Tensor | None = None,  # (L,) float32
    beta: torch.Tensor | None = None,  # (L,) float32
    dprob: torch.Tensor | None = None,  # (M,) float32
    activation: torch.Tensor | None = None,  # (M, N)
    dbias: torch.Tensor | None = None,  # (L, 2N)
    amax: torch.Tensor | None = None,  # (L, 2) float32
    q_row: torch.Tensor | None = None,  # (M, 2N) codes
    sf_row: torch.Tensor | None = None,  # scales as one contiguous buffer
    q_col: torch.Tensor | None = None,  # (M, 2N) codes
    sf_col: torch.Tensor | None = None,  # scales as one contiguous buffer
    workspace: torch.Tensor | None = None,  # uint8, `workspace_bytes`
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    The configuration says which tensors are present. Rows at or past offsets[-1] of d, activation, dprob and the codes
    become zero; bytes of the scale buffers that belong to no row are not written.
    Raises UnsupportedConfig on a configuration that is not legal.
    """
    M = c.shape[0]
    if M == 0 or (config.q_col_dtype is not None and M < 32):
        # No expert can own a row: column quantization has groups of whole 32-row blocks.
        for output in (d, dprob, activation, dbias, amax, q_row, q_col):
            if output is not None:
                output.zero_()
        return
    s = config.schedule
    clusters = _multiprocessors(dy.device.index) // s.cluster_size
    if not _needs_workspace(config):
        workspace = None
    if config.q_row_dtype is not None:
        q_row, sf_row = _bytes(q_row), _bytes(sf_row).view(-1)
    if config.q_col_dtype is not None:
        q_col, sf_col = _bytes(q_col), _bytes(sf_col).view(-1)
    function_of(config)(dy, b, offsets, c, d, prob, alpha, beta, activation, dprob, dbias, amax, q_row, sf_row, q_col,
                        sf_col, workspace, clusters)  # fmt: skip
