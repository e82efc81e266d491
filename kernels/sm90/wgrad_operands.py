"""Host side of the weight gradient's operands: wgmma, shared-memory layouts and TMA descriptors.

Of the product a^T dy, whose k runs along the tensors' rows, both operands are M- or N-major: a stage holds, for each 64
columns of an operand, 64 rows of 128 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from . import stores
from .config import CHUNK_M, CONSUMERS, TILE_K
from .operands import Operands
from .primitives import DTYPES
from .wgrad_config import WgradConfig, chunk_columns


class WgradOperands(Operands):
    """What a configuration's tensors become for TMA and wgmma; every load or store is (copy atom, coordinates)."""

    def __init__(self, config: WgradConfig) -> None:
        self.config: Any = config
        self.schedule = config.schedule
        self.dtype = DTYPES[config.ab_dtype]
        self.ring_dtype = Float32 if config.dw_dtype == "fp32" else cutlass.BFloat16  # stands for any 16-bit type
        self.columns = chunk_columns(config)

    def layouts(self):
        """Shared-memory layouts of A stages, B stages and chunks of dw."""
        s = self.schedule
        tile = (s.tile_m, s.tile_n, TILE_K)
        return (
            sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, tile, self.dtype, s.ab_stages),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.dtype, s.ab_stages),
            self._chunks(CHUNK_M, CONSUMERS * s.ring_chunks),
        )

    def load_a(self, a, smem):
        """Of a (M, K), seen as (K, M)."""
        s = self.schedule
        return self._load_atom(_transposed(a), smem, (s.tile_m, TILE_K), s.cluster_n)

    def load_b(self, dy, smem):
        """Of dy (M, N), seen as (N, M)."""
        s = self.schedule
        return self._load_atom(_transposed(dy), smem, (s.tile_n, TILE_K), s.cluster_m)

    def store_dw(self, dw):
        """Of one warp's 16 rows of a chunk of dw (L, K, N), seen as (K, N, L)."""
        add = cpasync.CopyReduceBulkTensorTileS2GOp()
        op = add if self.config.accumulate else cpasync.CopyBulkTensorTileS2GOp()
        layout = cute.slice_(self._chunks(stores.WARP_ROWS, 1), (None, None, 0))
        view = cute.make_tensor(dw.iterator, cute.select(dw.layout, mode=[1, 2, 0]))
        return tuple(cpasync.make_tiled_tma_atom(op, self._as_ring(view), layout, (stores.WARP_ROWS, self.columns)))

    def tiled_mma(self, accumulate: bool):
        s = self.schedule
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.MN, OperandMajorMode.MN, Float32,
            (1 if s.pingpong else 2, 1, 1), tiler_mn=(64, s.tile_n),
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def _chunks(self, rows: int, count: int):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.ring_dtype)
        return cute.tile_to_shape(atom, (rows, self.columns, count), order=(0, 1, 2))


def _transposed(tensor):
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))
