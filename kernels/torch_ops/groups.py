"""Reductions over the rows of each expert: always the same bits for the same input, with or without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .glu import halves, layout_at
from .matmul import Inputs, Outputs, Specs
from .rows import make_tiles, owner

SUM_TILE = 128
"""Rows that one partial sum takes: long enough to be few, short enough that float32 errors do not pile up."""


def group_sum(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(M, N) -> (L, N) in float32: tiles of rows first, then tiles in order."""
    x, offsets, y = inputs["x"], inputs["offsets"], outputs["y"]
    if x.numel() == 0 or y.numel() == 0:
        y.zero_()
        return
    tiles = make_tiles(offsets, x.shape[0], SUM_TILE)
    y.copy_(tiles.sum(tiles.gather_zeroed(x).sum(dim=1, dtype=torch.float32)))


def _amax_of_rows(x: torch.Tensor) -> torch.Tensor:
    """(M, ...) -> float32 (M,): the largest magnitude in each row, NaN if one is NaN."""
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    return x.abs().amax(dim=tuple(range(1, x.dim()))).to(torch.float32)


def group_amax(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(M, N) -> (L,) or (L, 2): largest magnitude of each expert's rows.

    Magnitudes are compared as the integers that their bits are: the same order, with NaN above infinity, so that
    whatever order the rows come in, a NaN stays.
    """
    x, offsets, y = inputs["x"], inputs["offsets"], outputs["y"]
    parts = halves(x, layout_at(specs, "x")) if attributes["split_glu"] else (x,)
    experts = offsets.shape[0]
    owners = owner(offsets, x.shape[0])
    for column, part in enumerate(parts):
        bits = _amax_of_rows(part).view(torch.int32) & 0x7FFFFFFF
        largest = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
        largest.scatter_reduce_(0, owners, bits, "amax")
        target = y.select(-1, column) if attributes["split_glu"] else y
        target.copy_(largest[:experts].view(torch.float32))


RUN = {"group_sum": group_sum, "group_amax": group_amax}
