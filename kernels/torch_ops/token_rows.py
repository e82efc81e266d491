"""Rows of tokens copied to the rows of their experts, and each token's rows added up.

`slot` (T * k,) int64 has the row of each choice, all different; `token` (M,) int64 the token of each row, any token
where the row is empty; `filled` (M,) bool the rows that hold a choice, None where all do.

On Hopper a kernel of our own (kernels/sm90/token_rows.py) does either in one launch; `obstacle` says where it does not
serve. There torch gathers, masks and sums.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...graph_ops.ir.errors import StateError
from ..cache import CacheKey, KernelCache, compiler_versions, source_digest
from .uncovered import CAPABILITY, device_capability

KERNEL = "sm90.token_rows"
SOURCES = [Path(__file__).parents[1] / "sm90" / name for name in ("token_rows.py", "primitives.py")]
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WORD_BYTES = 16
MOST_CHOICES = 32
MOST_ROWS = 2**31 - 1

_LOCK = threading.Lock()


def copy_to_rows(
    x: torch.Tensor,  # (T, H)
    slot: torch.Tensor,
    token: torch.Tensor,
    filled: torch.Tensor | None,
    top_k: int,
) -> torch.Tensor:
    """(T, H) -> (M, H): each token's row in the rows of its choices, zeros in empty ones. No rounding."""
    rows = token.shape[0]
    if obstacle(x, slot, top_k, rows):
        return _gathered(x, token, filled)
    out = x.new_empty(rows, x.shape[1])
    if out.numel():
        _, copy = _functions(top_k, x.dtype)
        marks, marked = (0, 0) if filled is None else (filled.data_ptr(), rows)
        _launch(copy, x, slot.data_ptr(), marks, out.data_ptr(), x.shape[0], marked)
    return out


def sum_of_choices(y: torch.Tensor, slot: torch.Tensor, top_k: int) -> torch.Tensor:
    """(M, H) -> (T, H): the sum of each token's rows, in float32 if not in float64, rounded once. Its order depends on
    top_k alone: no two writers meet."""
    tokens = slot.shape[0] // top_k
    if obstacle(y, slot, top_k, y.shape[0]):
        return y.index_select(0, slot).view(tokens, top_k, y.shape[1]).sum(1)
    out = y.new_empty(tokens, y.shape[1])
    if out.numel():
        add, _ = _functions(top_k, y.dtype)
        _launch(add, y, slot.data_ptr(), out.data_ptr(), tokens)
    return out


def obstacle(x: torch.Tensor, slot: torch.Tensor, top_k: int, rows: int) -> str:
    """Why the kernel does not serve rows `x`, to or from `rows` rows; "" where it does.

    Reads nothing on the device. The cheapest and most frequent reason comes first, and later ones are not looked for.
    """
    if torch.compiler.is_compiling():
        return "torch.compile, which fuses the expressions with what is around them"
    if not x.is_cuda:
        return f"a tensor on {x.device}"
    if type(x) not in (torch.Tensor, nn.Parameter) or _get_current_dispatch_mode() is not None:
        return "a subclass of Tensor or a dispatch mode, which has to see torch's operations"
    if torch.is_grad_enabled() and x.requires_grad:
        return "a gradient of the gradient, which autograd takes through the expressions"
    if x.dtype not in DTYPES:
        return f"data type {x.dtype}"
    if not 1 <= top_k <= MOST_CHOICES:
        return f"{top_k} choices a token; the kernel adds up to {MOST_CHOICES}"
    if x.stride(1) != 1 and x.shape[1] > 1:
        return f"strides {x.stride()}: a row is not contiguous"
    size = x.element_size()
    if x.shape[1] * size % WORD_BYTES or x.stride(0) * size % WORD_BYTES or x.data_ptr() % WORD_BYTES:
        return f"rows of {x.shape[1] * size} bytes, {x.stride(0) * size} apart: not multiples of {WORD_BYTES}"
    if max(rows, slot.shape[0]) > MOST_ROWS:
        return f"{max(rows, slot.shape[0])} rows; the kernel counts to {MOST_ROWS}"
    if slot.dtype is not torch.int64 or slot.device != x.device or not slot.is_contiguous():
        return f"slots {slot.dtype} on {slot.device}, strides {slot.stride()}"
    if device_capability(x.device.index) != CAPABILITY:
        return f"compute capability {device_capability(x.device.index)}; the kernel is for {CAPABILITY}"
    return "" if _installed() else "the extra `cuda` is not installed"


def _gathered(x: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None) -> torch.Tensor:
    rows = x.index_select(0, token)
    if filled is None:
        return rows
    empty = ~filled[:, None]
    # In place is one (M, H) copy less. Compiled, it is none; and torch 2.11 loses the gradient of what is written so.
    return rows.masked_fill(empty, 0) if torch.compiler.is_compiling() else rows.masked_fill_(empty, 0)


def _launch(function: Callable[..., Any], source: torch.Tensor, *words: int) -> None:
    """On torch's current stream of the rows' device, with their address, pitch and 16-byte words."""
    size, index = source.element_size(), source.device.index
    row = source.shape[1] * size
    given = (source.data_ptr(), source.stride(0) * size, *words, row // WORD_BYTES)
    if torch.cuda.current_device() == index:
        function(*given, torch._C._cuda_getCurrentRawStream(index))
    else:
        with torch.cuda.device(index):
            function(*given, torch._C._cuda_getCurrentRawStream(index))


@functools.cache
def _installed() -> bool:
    try:
        compiler_versions()
    except ImportError:
        return False
    return True


@functools.cache
def _functions(top_k: int, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(the sum, the copy), each of which is the other's derivative: after one of them, a capture may have both."""
    if torch.cuda.is_current_stream_capturing():
        raise StateError(
            "BUILD_IN_CAPTURE",
            asked="rows to or from experts in CUDA graph capture",
            seen=f"the kernels for {top_k} choices of {dtype} are not loaded",
            required="one dispatch or combine with these before the capture",
            hint="torch.cuda.make_graphed_callables warms up by itself; torch.cuda.graph does not",
        )
    with _LOCK:
        return _loaded(top_k, DTYPES[dtype]), _loaded(top_k, None)


@functools.cache
def _loaded(top_k: int, dtype: str | None) -> Callable[..., Any]:
    """The compiled kernel, from the cache on disk or into it."""
    configuration = {"top_k": top_k, "dtype": dtype}
    key = CacheKey(KERNEL, "sm90a", source_digest(SOURCES), compiler_versions(), configuration)
    loaded: Callable[..., Any] = KernelCache().get(key, functools.partial(_compile_to, top_k, dtype), _load_from)
    return loaded


def _compile_to(top_k: int, dtype: str | None, path: Path) -> None:
    from ..sm90 import compiling

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from ..sm90.token_rows import TokenRowsConfig, compile_token_rows

    path.write_bytes(compiling.export_object(compile_token_rows(TokenRowsConfig(top_k, dtype))))


def _load_from(path: Path) -> Callable[..., Any]:
    from ..sm90 import compiling

    return compiling.load_object(path.read_bytes())


__all__ = ["copy_to_rows", "obstacle", "sum_of_choices"]
