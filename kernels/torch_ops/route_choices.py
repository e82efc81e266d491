"""The row of each token's choices among rows grouped by expert: by a kernel of our own on Hopper, by a sort elsewhere.

(T, k) ids -> slot (T * k,) int64, the row of each choice; token (M,) int64, the token of each row, 0 where it is empty;
filled (M,) bool, the rows that hold a choice, None where all do; tokens_per_expert (L,) int64, padding included.
"""

from __future__ import annotations

import functools

import torch

from ..sm90.routing_config import BINS, CHUNK, MOST_PLACED, MOST_ROWS, RouteConfig, bins_for
from .small_kernels import Kernel, launch, load, place_obstacle

NAME = "sm90.route_choices"
SOURCES = ("route_choices.py", "routing_config.py")

Placed = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor]


def place_choices(expert: torch.Tensor, num_experts: int, multiple_of: int) -> Placed:
    """(slot, token, filled, tokens_per_expert) of the choices `expert` (T, k), in order of experts, then of choices."""
    if obstacle(expert, num_experts, multiple_of):
        return _sorted(expert, num_experts, multiple_of)
    tokens, top_k = expert.shape
    choices, rows = tokens * top_k, rows_for(tokens * top_k, num_experts, multiple_of)
    slot, token, tokens_per_expert = (
        expert.new_empty(size, dtype=torch.int64) for size in (choices, rows, num_experts)
    )
    filled = None if multiple_of == 1 else expert.new_empty(rows, dtype=torch.bool)
    bins = bins_for(num_experts)
    assert bins is not None
    counts = expert.new_empty(-(-choices // CHUNK) * bins, dtype=torch.int32)
    launch(
        _loaded(8 * expert.element_size(), bins), expert.device, expert.data_ptr(), counts.data_ptr(), slot.data_ptr(),
        token.data_ptr(), 0 if filled is None else filled.data_ptr(), tokens_per_expert.data_ptr(), choices, top_k,
        num_experts, multiple_of, rows,
    )  # fmt: skip
    return slot, token, filled, tokens_per_expert


def rows_for(choices: int, num_experts: int, multiple_of: int) -> int:
    """Rows that hold any routing: padding is for experts with a row, of which there are no more than choices."""
    if multiple_of == 1:
        return choices
    return -(-(choices + min(choices, num_experts) * (multiple_of - 1)) // multiple_of) * multiple_of


def obstacle(expert: torch.Tensor, num_experts: int, multiple_of: int) -> str:
    """Why the kernel does not serve these ids; "" where it does. Reads nothing on the device."""
    if reason := place_obstacle(expert):
        return reason
    if expert.dtype not in (torch.int64, torch.int32):
        return f"ids of {expert.dtype}"
    if not expert.is_contiguous():
        return f"ids with strides {expert.stride()}"
    if not 0 < expert.numel() <= MOST_PLACED:
        return f"{expert.numel()} choices; the kernel takes 1 to {MOST_PLACED}"
    if bins_for(num_experts) is None:
        return f"{num_experts} experts; the kernel counts {BINS[-1] - 2}"
    if rows_for(expert.numel(), num_experts, multiple_of) > MOST_ROWS:
        return f"experts padded to multiples of {multiple_of} rows; the kernel counts to {MOST_ROWS}"
    return ""


def _sorted(expert: torch.Tensor, num_experts: int, multiple_of: int) -> Placed:
    choices, top_k = expert.numel(), expert.shape[1]
    ids = expert.reshape(-1)
    ids = _narrow(ids.masked_fill(ids < 0, num_experts).clamp(max=num_experts), num_experts)  # (T * k,)
    by_expert, order = ids.sort(stable=True)
    bins = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    start, end = (torch.searchsorted(by_expert, bins, right=right) for right in (False, True))  # (L + 1,)
    count = end - start
    index = torch.arange(choices, device=ids.device)
    if multiple_of == 1:  # the rows are the choices in order of experts
        slot = torch.empty_like(index).index_copy_(0, order, index)
        return slot, order // top_k, None, count[:num_experts]
    padded = (count + (multiple_of - 1)) // multiple_of * multiple_of
    first = padded.cumsum(0) - padded  # (L + 1,); the last one's is the first row of no expert
    place = (first - start).index_select(0, by_expert.int()) + index  # (T * k,): rows in order of experts
    slot = torch.empty_like(place).index_copy_(0, order, place)
    rows = rows_for(choices, num_experts, multiple_of)
    token = torch.zeros(rows, dtype=torch.int64, device=ids.device).index_copy_(0, place, order // top_k)
    filled = torch.zeros(rows, dtype=torch.bool, device=ids.device).index_fill_(0, place, True)
    return slot, token, filled, padded[:num_experts]


def _narrow(ids: torch.Tensor, largest: int) -> torch.Tensor:
    """The ids in as few bytes as they need: a GPU sorts them by 8 bits a pass."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return ids.to(dtype)
    return ids


@functools.cache
def _loaded(id_bits: int, bins: int) -> Kernel:
    config = RouteConfig(id_bits, bins)

    def compile_kernel() -> Kernel:
        from ..sm90.route_choices import compile_route

        kernel: Kernel = compile_route(config)
        return kernel

    return load(NAME, SOURCES, config, compile_kernel)


__all__ = ["obstacle", "place_choices", "rows_for"]
