"""Host side of the kernel's operands: wgmma, shared-memory layouts and TMA descriptors."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from . import stores
from .config import CHUNK_M, CONSUMERS, TILE_K
from .dglu_config import DgluConfig
from .primitives import DTYPES


class Operands:
    """What a configuration's tensors become for TMA and wgmma; every load or store is (copy atom, coordinates)."""

    def __init__(self, config: DgluConfig) -> None:
        self.config, self.schedule = config, config.schedule
        self.dtype = DTYPES[config.ab_dtype]
        self.ring_dtype = cutlass.BFloat16  # stands for any 16-bit type
        # Column blocks of 32 rows stay inside a warp when its two 16-row pieces are neighbours in memory. Then dy and
        # C are seen as (16 rows, columns, 32-row blocks, 2): a box takes piece h of four blocks to four warps' places.
        # One box and not eight: a TMA instruction costs its producer about 75 clocks, seen at 9 a k step.
        self.pairs_rows = config.q_col_dtype is not None

    def layouts(self):
        """Shared-memory layouts of A stages, B stages and C/D chunks."""
        s = self.schedule
        tile = (s.tile_m, s.tile_n, TILE_K)
        b_layout = LayoutEnum.COL_MAJOR if self.config.b_major == "n" else LayoutEnum.ROW_MAJOR
        chunks = CONSUMERS * s.ring_chunks * stores.boxes(self.config.glu_layout)
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, s.ab_stages),
            sm90.make_smem_layout_b(b_layout, tile, self.dtype, s.ab_stages),
            self._ring_layout(CHUNK_M, chunks),
        )

    def load_a(self, dy, smem):
        if self.pairs_rows:
            return self._load_paired(dy, warpgroup.SmemLayoutAtomKind.K_SW128, TILE_K, 2)
        return self._load_atom(dy, smem, (self.schedule.tile_m, TILE_K), self.schedule.cluster_n)

    def partition_a(self, atom, coords, smem, row, rank_n):
        """(shared memory by stage, global memory by k step) of the TMA loads of the tile of A that begins at `row`."""
        s = self.schedule
        if self.pairs_rows:
            shape = (stores.WARP_ROWS, TILE_K, 4, 2)
            tile = cute.local_tile(cute.domain_offset((0, 0, row // 32, 0), coords), shape, (0, None, 0, 0))
            whole, modes = cute.group_modes(cute.flat_divide(smem, (stores.WARP_ROWS, TILE_K)), 0, 4), 4
        else:
            tile = cute.local_tile(cute.domain_offset((row, 0), coords), (s.tile_m, TILE_K), (0, None))
            whole, modes = cute.group_modes(smem, 0, 2), 2
        return cpasync.tma_partition(
            atom, rank_n, cute.make_layout(s.cluster_n), whole, cute.group_modes(tile, 0, modes)
        )

    def load_b(self, b_nkl, smem):
        return self._load_atom(b_nkl, smem, (self.schedule.tile_n, TILE_K), self.schedule.cluster_m)

    def load_c(self, c, smem):
        box = stores.box_columns(self.config.glu_layout)
        if self.pairs_rows:
            return self._load_paired(self._as_ring(c), self._ring_swizzle(), box, 1)
        return self._load_atom(self._as_ring(c), smem, (CHUNK_M, box), 1)

    def store_d(self, d):
        tile = (stores.WARP_ROWS, stores.box_columns(self.config.glu_layout))
        layout = cute.slice_(self._ring_layout(stores.WARP_ROWS, 1), (None, None, 0))
        return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), self._as_ring(d), layout, tile))

    def tiled_mma(self, accumulate: bool):
        s = self.schedule
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.MN if self.config.b_major == "n" else cute.nvgpu.OperandMajorMode.K,
            Float32,
            (1 if s.pingpong else 2, 1, 1),
            tiler_mn=(64, s.tile_n),
        )
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def _ring_swizzle(self):
        wide = stores.box_columns(self.config.glu_layout) == 64
        return warpgroup.SmemLayoutAtomKind.K_SW128 if wide else warpgroup.SmemLayoutAtomKind.K_SW64

    def _ring_layout(self, rows: int, count: int):
        columns = stores.box_columns(self.config.glu_layout)
        atom = warpgroup.make_smem_layout_atom(self._ring_swizzle(), self.ring_dtype)
        return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))

    def weights(self, dy, b, columns):
        """(N, K, L) view of the weights; discrete ones: one expert's shape at any address, as a template."""
        if not self.config.discrete_b:
            return cute.make_tensor(b.iterator, cute.select(b.layout, mode=[2, 1, 0]))
        n, k = Int64(columns), Int64(cute.size(dy, mode=[1]))
        stride = (1, n, n * k) if self.config.b_major == "n" else (k, 1, n * k)
        return cute.make_tensor(dy.iterator, cute.make_layout((columns, cute.size(dy, mode=[1]), 1), stride=stride))

    def _as_ring(self, tensor):
        """A 16-bit tensor as the ring's type: TMA moves bits."""
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=self.ring_dtype), tensor.layout)

    def _load_paired(self, tensor, swizzle, columns: int, pieces: int):
        """Load of (16 rows, `columns`, 4 blocks, `pieces`) boxes from a row-major matrix, see `pairs_rows`."""
        rows, width = cute.size(tensor, mode=[0]), cute.size(tensor, mode=[1])
        pitch = tensor.stride[0]
        view = cute.make_layout((16, width, rows // 32, 2), stride=(pitch, 1, pitch * 32, pitch * 16))
        tile = (16, columns, 4, pieces)
        layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(swizzle, tensor.element_type), tile, order=(0, 1, 2, 3)
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        return tuple(cpasync.make_tiled_tma_atom(op, cute.make_tensor(tensor.iterator, view), layout, tile))

    def _load_atom(self, tensor, layout_staged, tile, multicast: int):
        op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = cute.slice_(layout_staged, (None, None, 0))
        atom, coords = cpasync.make_tiled_tma_atom(op, tensor, layout, tile, num_multicast=multicast)
        return atom, coords
