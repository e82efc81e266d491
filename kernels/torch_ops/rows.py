"""Rows grouped by expert, on whichever device the offsets are: nothing here reads them on the host.

Work over ragged groups becomes dense work over tiles: every expert's rows are cut into tiles of one height, the last
one padded. How many tiles there can be follows from shapes alone (`M // height + L`), so that the same launches serve
every routing and can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...graph_ops.ir.errors import VariantPackError


def owner(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each of `rows` rows, L for the rows past `offsets[-1]`. int64 (M,)."""
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets.contiguous(), index, right=True)


def outside(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of `rows` rows lie past `offsets[-1]` and belong to no expert. bool (M,)."""
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return index >= offsets[-1] if offsets.shape[0] else index >= 0


def counts(offsets: torch.Tensor) -> torch.Tensor:
    """How many rows each expert has. (L,)"""
    return torch.diff(offsets, prepend=torch.zeros_like(offsets[:1]))


def bounds(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Start and end row of each expert, for offsets in host memory.

    Raises VariantPackError("OFFSETS") where they decrease or pass `rows`.
    """
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if any(s > e for s, e in zip(starts, ends, strict=True)) or (ends and ends[-1] > rows):
        raise VariantPackError("OFFSETS", asked="end offsets", seen=ends,
                               required=f"non-decreasing, from 0 to at most {rows}",
                               hint="offsets are running totals of rows per expert")  # fmt: skip
    return list(zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Tiles:
    """Rows cut into T tiles of one height, every tile within one expert. Tiles past the last one needed are empty.

    `rows` (T, height): source row of each slot, somewhere in range where `empty` (T, height) says it has none.
    `expert` (T,): the tile's expert, somewhere in range for unneeded tiles. `count`, `first` (L,): how many tiles each
    expert has, and its first one. `start` (L,): its first row.
    """

    rows: torch.Tensor
    empty: torch.Tensor
    expert: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor
    start: torch.Tensor

    @property
    def height(self) -> int:
        return self.rows.shape[1]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C) -> (T, height, C) in the dtype of x; an empty slot holds some row of x, whatever its expert."""
        return x.index_select(0, self.rows.flatten()).view(*self.rows.shape, x.shape[1])

    def gather_zeroed(self, x: torch.Tensor) -> torch.Tensor:
        """As `gather`, with zero in empty slots: for sums over the rows of a tile."""
        return self.gather(x).masked_fill_(self.empty[:, :, None], 0)

    def scatter(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """(T, height, C) -> (M, C), zero for rows outside every group; `owners` (M,) as `owner` gives them."""
        expert = owners.clamp(max=self.first.shape[0] - 1)
        within = torch.arange(owners.shape[0], device=owners.device) - self.start[expert]
        slot = (self.first[expert] * self.height + within).clamp_(0, x.shape[0] * self.height - 1)
        return x.flatten(0, 1).index_select(0, slot).masked_fill_((owners == self.first.shape[0])[:, None], 0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (T, ...) -> (L, ...): the sum of each expert's tiles, in tile order, so always the same bits."""
        flat = x.flatten(1)
        total = torch.segment_reduce(flat, "sum", lengths=self.count, axis=0, unsafe=True, initial=0)
        return total.view(self.count.shape[0], *x.shape[1:])


def make_tiles(offsets: torch.Tensor, rows: int, height: int) -> Tiles:
    """Cuts `rows` > 0 rows into tiles of `height` within L > 0 experts."""
    ends = offsets.to(torch.int64)
    size = counts(ends)
    start = ends - size
    count = (size + (height - 1)) // height
    last = count.cumsum(0)
    first = last - count
    number = torch.arange(rows // height + ends.shape[0], device=ends.device)
    expert = torch.searchsorted(last, number, right=True)
    unneeded = expert == ends.shape[0]
    expert = expert.clamp(max=ends.shape[0] - 1)
    source = (start[expert] + (number - first[expert]) * height)[:, None] + torch.arange(height, device=ends.device)
    empty = (source >= ends[expert][:, None]) | unneeded[:, None]
    return Tiles(source.clamp_(0, rows - 1), empty, expert, count, first, start)
