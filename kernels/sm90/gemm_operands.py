"""Host side of the plain grouped GEMM's operands: the backward kernel's, but for the output."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from . import stores
from .config import CHUNK_M, CONSUMERS, TILE_K
from .gemm_config import BOX_COLUMNS, GemmConfig
from .operands import Operands
from .primitives import DTYPES


class GemmOperands(Operands):
    """What a configuration's tensors become for TMA and wgmma; every load or store is (copy atom, coordinates)."""

    def __init__(self, config: GemmConfig) -> None:
        self.config: Any = config  # of the fields that both kernels' configurations have
        self.schedule = config.schedule
        self.dtype = DTYPES[config.ab_dtype]
        self.ring_dtype = cutlass.BFloat16  # stands for any 16-bit type
        self.pairs_rows = False

    def layouts(self):
        """Shared-memory layouts of A stages, B stages and chunks of y."""
        s = self.schedule
        tile = (s.tile_m, s.tile_n, TILE_K)
        b_layout = LayoutEnum.COL_MAJOR if self.config.b_major == "n" else LayoutEnum.ROW_MAJOR
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, s.ab_stages),
            sm90.make_smem_layout_b(b_layout, tile, self.dtype, s.ab_stages),
            self._chunks(CHUNK_M, CONSUMERS * s.ring_chunks),
        )

    def store_y(self, y):
        """Store of one warp's 16 rows of a chunk."""
        layout, tile = cute.slice_(self._chunks(stores.WARP_ROWS, 1), (None, None, 0)), (stores.WARP_ROWS, BOX_COLUMNS)
        return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), self._as_ring(y), layout, tile))

    def _chunks(self, rows: int, count: int):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.ring_dtype)
        return cute.tile_to_shape(atom, (rows, BOX_COLUMNS, count), order=(0, 1, 2))
