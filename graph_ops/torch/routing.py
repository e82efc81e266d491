"""From tokens and their chosen experts to rows grouped by expert, and back, without reading anything on the host.

Axis letters: T tokens, k experts chosen by each, L experts, M rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
    tokens, top_k = expert.shape
    choices = tokens * top_k
    ids = expert.reshape(-1).clamp(max=num_experts)  # (T * k,)
    by_expert, order = ids.sort(stable=True)
    bins = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    end = torch.searchsorted(by_expert, bins, right=True)  # (L + 1,)
    count = torch.diff(end, prepend=torch.zeros_like(end[:1]))
    padded = (count + (multiple_of - 1)) // multiple_of * multiple_of
    first = padded.cumsum(0) - padded  # (L + 1,); the last one's is the first row of no expert
    index = torch.arange(choices, device=ids.device)
    place = (first - (end - count))[by_expert] + index  # (T * k,): the row of each choice in order of experts
    slot = torch.empty_like(place).index_copy(0, order, place)
    rows = choices
    if multiple_of != 1:  # padding is for experts with a row, of which there are no more than choices
        rows = -(-(choices + min(choices, num_experts) * (multiple_of - 1)) // multiple_of) * multiple_of
    token = torch.zeros(rows, dtype=torch.int64, device=ids.device).index_copy(0, slot, index // top_k)
    filled = None
    if multiple_of != 1:
        filled = torch.zeros(rows, dtype=torch.bool, device=ids.device).index_fill(0, slot, True)
    return Routing(slot, token, filled, padded[:num_experts], top_k)


def _copy_to_rows(x: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None) -> torch.Tensor:
    rows = x.index_select(0, token)
    if filled is None:
        return rows
    empty = ~filled[:, None]
    # In place is one (M, H) copy less. Compiled, it is none; and torch 2.11 loses the gradient of what is written so.
    return rows.masked_fill(empty, 0) if torch.compiler.is_compiling() else rows.masked_fill_(empty, 0)


def _sum_of_choices(y: torch.Tensor, slot: torch.Tensor, top_k: int) -> torch.Tensor:
    """A view and a sum: no two writers meet, so the order of additions is always the same."""
    return y.index_select(0, slot).view(slot.shape[0] // top_k, top_k, y.shape[1]).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None,
                top_k: int) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(slot)
        ctx.top_k = top_k
        return _copy_to_rows(x, token, filled)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot,) = ctx.saved_tensors
        return _sum_of_choices(dy, slot, ctx.top_k), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slot: torch.Tensor, token: torch.Tensor, filled: torch.Tensor | None,
                top_k: int) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(token, filled)
        return _sum_of_choices(y, slot, top_k)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        token, filled = ctx.saved_tensors
        return _copy_to_rows(dy, token, filled), None, None, None, None


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
    return flat.new_zeros(routing.token.shape[0]).index_copy(0, routing.slot, flat)
