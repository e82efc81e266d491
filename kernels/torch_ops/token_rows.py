"""Rows of tokens copied to the rows of their experts, and each token's rows added up.

`slot` (T * k,) int64 has the row of each choice, all different; `token` (M,) int64 the token of each row, any token
where the row is empty; `filled` (M,) bool the rows that hold a choice, None where all do.

On Hopper a kernel of our own (kernels/sm90/token_rows.py) does either in one launch; `obstacle` says where it does not
serve. There torch gathers, masks and sums.
"""

from __future__ import annotations

import functools

import torch

from ..sm90.routing_config import MOST_CHOICES, MOST_ROWS, WORD_BYTES, TokenRowsConfig
from .small_kernels import Kernel, launch, load, place_obstacle

NAME = "sm90.token_rows"
SOURCES = ("token_rows.py", "routing_config.py", "primitives.py")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


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
        _, copy = _kernels(top_k, DTYPES[x.dtype])
        marks, marked = (0, 0) if filled is None else (filled.data_ptr(), rows)
        launch(copy, x.device, *_rows(x), slot.data_ptr(), marks, out.data_ptr(), x.shape[0], marked, _words(x))
    return out


def sum_of_choices(y: torch.Tensor, slot: torch.Tensor, top_k: int) -> torch.Tensor:
    """(M, H) -> (T, H): the sum of each token's rows, in float32 if not in float64, rounded once. Its order depends on
    top_k alone: no two writers meet."""
    tokens = slot.shape[0] // top_k
    if obstacle(y, slot, top_k, y.shape[0]):
        return y.index_select(0, slot).view(tokens, top_k, y.shape[1]).sum(1)
    out = y.new_empty(tokens, y.shape[1])
    if out.numel():
        add, _ = _kernels(top_k, DTYPES[y.dtype])
        launch(add, y.device, *_rows(y), slot.data_ptr(), out.data_ptr(), tokens, _words(y))
    return out


def obstacle(x: torch.Tensor, slot: torch.Tensor, top_k: int, rows: int) -> str:
    """Why the kernels do not serve rows `x`, to or from `rows` rows; "" where they do.

    Reads nothing on the device. The first reason found is the answer; those of the place come first.
    """
    if reason := place_obstacle(x):
        return reason
    if torch.is_grad_enabled() and x.requires_grad:
        return "a gradient of the gradient, which autograd takes through the expressions"
    if x.dtype not in DTYPES:
        return f"data type {x.dtype}"
    if not 1 <= top_k <= MOST_CHOICES:
        return f"{top_k} choices a token; the kernel adds up to {MOST_CHOICES}"
    (pitch, step), size = x.stride(), x.element_size()
    if step != 1 or (x.shape[1] * size | pitch * size | x.data_ptr()) % WORD_BYTES:
        return f"shape {tuple(x.shape)}, strides {x.stride()}: rows are not contiguous multiples of {WORD_BYTES} bytes"
    if max(rows, slot.shape[0]) > MOST_ROWS:
        return f"{max(rows, slot.shape[0])} rows; the kernel counts to {MOST_ROWS}"
    if slot.dtype is not torch.int64 or slot.device != x.device or not slot.is_contiguous():
        return f"slots {slot.dtype} on {slot.device}, strides {slot.stride()}"
    return ""


def _gathered(x: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None) -> torch.Tensor:
    rows = x.index_select(0, token)
    if filled is None:
        return rows
    empty = ~filled[:, None]
    # In place is one (M, H) copy less. Compiled, it is none; and torch 2.11 loses the gradient of what is written so.
    return rows.masked_fill(empty, 0) if torch.compiler.is_compiling() else rows.masked_fill_(empty, 0)


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Address of the rows, and bytes from one to the next."""
    return x.data_ptr(), x.stride(0) * x.element_size()


def _words(x: torch.Tensor) -> int:
    """16-byte words of a row."""
    return x.shape[1] * x.element_size() // WORD_BYTES


@functools.cache
def _kernels(top_k: int, dtype: str) -> tuple[Kernel, Kernel]:
    """(the sum, the copy), each of which is the other's derivative: after one of them a capture may have both."""
    return _loaded(top_k, dtype), _loaded(top_k, None)


@functools.cache
def _loaded(top_k: int, dtype: str | None) -> Kernel:
    config = TokenRowsConfig(top_k, dtype)

    def compile_kernel() -> Kernel:
        from ..sm90.token_rows import compile_token_rows

        kernel: Kernel = compile_token_rows(config)
        return kernel

    return load(NAME, SOURCES, config, compile_kernel)


__all__ = ["copy_to_rows", "obstacle", "sum_of_choices"]
