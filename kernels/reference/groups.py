"""Reductions over the rows of each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .glu import layout_of, split
from .matmul import Specs, Values, expert_rows


def group_sum(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, N) -> (L, N): the sum of each expert's rows, zero for an empty expert."""
    return {"y": torch.stack([inputs["x"][rows].sum(dim=0) for _, rows in expert_rows(inputs["offsets"])])}


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def group_amax(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, N) -> (L,), or (L, 2) for gate and up apart: largest magnitude, zero for an empty expert, NaN for a NaN."""
    x, offsets = inputs["x"], inputs["offsets"]
    halves = split(x, layout_of(specs, "x")) if attributes["split_glu"] else (x,)
    found = [torch.stack([_amax(half[rows]) for _, rows in expert_rows(offsets)]) for half in halves]
    return {"y": torch.stack(found, dim=1) if attributes["split_glu"] else found[0]}


EVALUATE = {"group_sum": group_sum, "group_amax": group_amax}
