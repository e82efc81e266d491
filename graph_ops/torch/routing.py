"""From tokens and their chosen experts to rows grouped by expert, and back, without reading anything on the host.

Axis letters: T tokens, k experts chosen by each, L experts, M rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.torch_ops.route_choices import place_choices
from ...kernels.torch_ops.token_rows import copy_to_rows, sum_of_choices


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
    """The routing of `expert` (T, k), the choices of each token; an id of `num_experts` or more is no expert here.

    Each expert's rows are padded to a multiple of `multiple_of`; how many rows there are follows from shapes alone.
    """
    return Routing(*place_choices(expert, num_experts, multiple_of), expert.shape[1])


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
    rows: torch.Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x, routing.slot, routing.token, routing.filled, routing.top_k
    )
    return rows


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(M, H) -> (T, H): the sum of each token's rows, already weighted; deterministic both ways."""
    total: torch.Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        y, routing.slot, routing.token, routing.filled, routing.top_k
    )
    return total


def row_probs(weight: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(T, k) -> (M,) float32: the router's weight of each row, zero in empty rows."""
    flat = weight.reshape(-1).float()
    rows = routing.token.shape[0]
    probs = flat.new_empty(rows) if routing.filled is None else flat.new_zeros(rows)
    if torch.compiler.is_compiling():
        return probs.index_copy(0, routing.slot, flat)
    return probs.index_copy_(0, routing.slot, flat)  # without the copy of `probs`
