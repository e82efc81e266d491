"""Host side of the forward kernel's operands: the backward's, but for weights and outputs.

A tile's accumulators hold gate and up of the same activation columns. Where gate and up lie far apart in the weights
(concatenated), or in two tensors, the B tile is made of two boxes, its gate columns and its up columns; else it is one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from . import stores
from .config import CHUNK_M, CHUNK_N, CONSUMERS, TILE_K
from .glu_config import GluConfig
from .operands import Operands
from .primitives import DTYPES


class GluOperands(Operands):
    """What a configuration's tensors become for TMA and wgmma; every load or store is (copy atom, coordinates)."""

    def __init__(self, config: GluConfig) -> None:
        self.config: Any = config  # of the fields that both kernels' configurations have
        self.schedule = config.schedule
        self.dtype = DTYPES[config.ab_dtype]
        self.ring_dtype = cutlass.BFloat16  # stands for any 16-bit type
        self.pairs_rows = config.q_col_dtype is not None
        s = self.schedule
        self.b_boxes = 2 if config.glu_layout == "concatenated" else 1
        self.b_columns = s.tile_n // self.b_boxes
        # In a cluster of two along M each CTA loads one of the two boxes for both: one TMA instruction a k step. With
        # weights apart, each loads its half of both: which descriptor an instruction takes is compiled in.
        self.box_a_rank = self.b_boxes == s.cluster_m == 2 and not config.separate_up
        self.b_slices = 1 if self.box_a_rank else s.cluster_m

    def layouts(self):
        """Shared-memory layouts of A stages, B stages, B boxes, and chunks of h and d."""
        s = self.schedule
        n_major = self.config.b_major == "n"
        b_layout = LayoutEnum.COL_MAJOR if n_major else LayoutEnum.ROW_MAJOR
        kind = sm90.get_smem_layout_atom(b_layout, self.dtype, self.b_columns if n_major else TILE_K)
        atom, order = warpgroup.make_smem_layout_atom(kind, self.dtype), (1, 0, 2) if n_major else (0, 1, 2)
        chunks = CONSUMERS * s.ring_chunks
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (s.tile_m, s.tile_n, TILE_K), self.dtype, s.ab_stages),
            cute.tile_to_shape(atom, (s.tile_n, TILE_K, s.ab_stages), order=order),
            cute.tile_to_shape(atom, (self.b_columns, TILE_K, s.ab_stages * self.b_boxes), order=order),
            self._chunks(stores.box_columns(self.config.glu_layout), CHUNK_M,
                         chunks * stores.boxes(self.config.glu_layout)),
            self._chunks(CHUNK_N, CHUNK_M, chunks),
        )  # fmt: skip

    def load_b(self, b_nkl, smem):
        many = self.schedule.cluster_m > 1
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if many else cpasync.CopyBulkTensorTileG2SOp()
        layout = cute.slice_(smem, (None, None, 0))
        tile = (self.b_columns, TILE_K)
        return tuple(cpasync.make_tiled_tma_atom(op, b_nkl, layout, tile, num_multicast=self.b_slices))

    def store_rows(self, tensor, columns: int):
        """Store of one warp's 16 rows of a box of `columns`."""
        layout = cute.slice_(self._chunks(columns, stores.WARP_ROWS, 1), (None, None, 0))
        op, tile = cpasync.CopyBulkTensorTileS2GOp(), (stores.WARP_ROWS, columns)
        return tuple(cpasync.make_tiled_tma_atom(op, self._as_ring(tensor), layout, tile))

    def _chunks(self, columns: int, rows: int, count: int):
        swizzles = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(swizzles.K_SW128 if columns == 64 else swizzles.K_SW64, self.ring_dtype)
        return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))
