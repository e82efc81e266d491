"""From tokens and their chosen experts to rows grouped by expert, and back, without reading anything on the host.

Axis letters: T tokens, k experts chosen by each, L experts, M rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...kernels.torch_ops.route_choices import place_choices
from ...kernels.torch_ops.token_rows import copy_to_rows, sum_of_choices
from ..ir.errors import VariantPackError
from .configuration import INDEX_TYPES


@dataclass(frozen=True)
class Routing:
    """Where each choice of each token lies among the rows.

    Rows past the sum of `tokens_per_expert` hold the choices of no expert here, and nothing.
    """

    slot: torch.Tensor  # (T * k,) int64: the row of each choice, all different
    token: torch.Tensor  # (M,) int64: the token of each row; any token where the row is empty
    filled: torch.Tensor | None  # (M,) bool: rows that hold a choice; None where all do
    tokens_per_expert: torch.Tensor  # (L,) int64: rows of each expert, padding included
    top_k: int


def route(expert: torch.Tensor, num_experts: int, *, multiple_of: int = 1) -> Routing:
    """The routing of `expert` (T, k), the choices of each token; a negative id, or one of `num_experts` or more, is no
    expert here.

    Each expert's rows are padded to a multiple of `multiple_of`; how many rows there are follows from shapes alone.
    Raises VariantPackError("ROUTING") for ids of another rank or type; `dispatch`, `combine` and `row_probs` do for
    what has not the routing's tokens, rows or choices.
    """
    if expert.dim() != 2 or expert.dtype not in INDEX_TYPES or multiple_of < 1:
        _refuse("ids of experts", f"{expert.dtype} {tuple(expert.shape)}, multiple_of={multiple_of}",
                "(T, k) of int32 or int64, multiple_of at least 1")  # fmt: skip
    return Routing(*place_choices(expert, num_experts, multiple_of), expert.shape[1])


def _refuse(asked: str, seen: object, required: str) -> NoReturn:
    raise VariantPackError("ROUTING", asked=asked, seen=seen, required=required)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None,
                top_k: int) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(slot)
        ctx.top_k = top_k
        return copy_to_rows(x, slot, token, filled, top_k)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot,) = ctx.saved_tensors
        return sum_of_choices(dy, slot, ctx.top_k), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slot: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None,
                top_k: int) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(slot, token, filled)
        ctx.top_k = top_k
        return sum_of_choices(y, slot, top_k)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slot, token, filled = ctx.saved_tensors
        return copy_to_rows(dy, slot, token, filled, ctx.top_k), None, None, None, None


def dispatch(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(T, H) -> (M, H): each token's row copied to its experts, zero in empty rows; deterministic both ways."""
    choices = routing.slot.shape[0]
    if x.dim() != 2 or x.shape[0] * routing.top_k != choices:
        _refuse("dispatch", f"x {tuple(x.shape)}", f"(T, H) with T * {routing.top_k} = {choices}, as was routed")
    rows: torch.Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x, routing.slot, routing.token, routing.filled, routing.top_k
    )
    return rows


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(M, H) -> (T, H): the sum of each token's rows, already weighted; deterministic both ways."""
    if y.dim() != 2 or y.shape[0] != routing.token.shape[0]:
        _refuse("combine", f"y {tuple(y.shape)}", f"({routing.token.shape[0]}, H), one for each row of the routing")
    total: torch.Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        y, routing.slot, routing.token, routing.filled, routing.top_k
    )
    return total


def row_probs(weight: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(T, k) -> (M,) float32: the router's weight of each row, zero in empty rows."""
    if weight.numel() != routing.slot.shape[0]:
        _refuse("row_probs", f"weights {tuple(weight.shape)}", f"(T, {routing.top_k}), one for each choice")
    flat = weight.reshape(-1).float()
    rows = routing.token.shape[0]
    probs = flat.new_empty(rows) if routing.filled is None else flat.new_zeros(rows)
    if torch.compiler.is_compiling():
        return probs.index_copy(0, routing.slot, flat)
    return probs.index_copy_(0, routing.slot, flat)  # without the copy of `probs`
