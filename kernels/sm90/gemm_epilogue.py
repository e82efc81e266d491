"""Epilogue of one consumer warpgroup of the plain grouped GEMM: accumulators in, y out.

16-bit y leaves through a ring of chunks in shared memory, 64 rows x 64 columns, each warp its own 16 rows by TMA. Of
float32 y a lane's pairs of columns go from registers to memory, a full 32-byte sector a row of four lanes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import glu_stores, stores
from . import primitives as p
from .gemm_config import BOX_COLUMNS, CHUNK_BYTES, COLUMN_MULTIPLE, GemmConfig


class GemmEpilogue:
    """State and steps of one warp's epilogue; every tensor that the configuration does not ask for is None."""

    def __init__(self, config: GemmConfig, storage, group, warp, store_y, y, alpha, bias, columns) -> None:
        self.config, self.schedule = config, config.schedule
        self.storage, self.group, self.warp = storage, group, warp
        self.store_y, self.y = store_y, y  # store: (copy atom, coordinates, boxes)
        self.alpha, self.bias = alpha, bias
        self.columns = columns
        self.box: Any = glu_stores.Box(BOX_COLUMNS, warp, cute.arch.lane_idx()) if config.through_ring else None
        self.base = storage.y.data_ptr().toint()
        self.scale: Any = cute.make_rmem_tensor((1,), Float32) if config.has_alpha else None

    # The object is constant: the DSL may carry it through loops as nothing.
    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def block_row(self, block: int):
        """First row, inside the tile, of this warp's 16 rows of a 64-row block."""
        if self.schedule.pingpong:
            return self.warp * stores.WARP_ROWS + block * 64
        return self.warp * stores.WARP_ROWS + block * 128 + self.group * 64

    @cute.jit
    def begin_tile(self, row: Int32, end: Int32, expert: Int32):
        """Loads the expert's scale ahead of the mainloop that hides it."""
        if cutlass.const_expr(self.config.has_alpha):
            value = self.alpha[expert]
            self.scale[0] = value * value if cutlass.const_expr(self.config.alpha_exponent == 2) else value

    @cute.jit
    def run(self, acc: cute.Tensor, row: Int32, n0: Int32, end: Int32, expert: Int32, used: Int32):
        """The tile's chunks, columns outside, 64-row blocks inside; returns how many chunks the ring has served."""
        for nc in cutlass.range_constexpr(self.schedule.tile_n // BOX_COLUMNS):
            if n0 + nc * BOX_COLUMNS < self.columns:
                self._column_chunks(acc, nc, row, n0 + nc * BOX_COLUMNS, end, expert, used)
                used += self.schedule.m_blocks
        return used

    def _column_chunks(self, acc, nc: int, row, column, end, expert, used) -> None:
        """Every 64-row block of the 64 columns from `column` on."""
        biases, write = self._biases(expert, column), self._chunk if self.config.through_ring else self._pairs
        for block in range(self.schedule.m_blocks):
            write(acc, nc, block, row + self.block_row(block), column, end, biases, used + block)

    @cute.jit
    def _chunk(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        row: Int32,
        column: Int32,
        end: Int32,
        biases,
        used: Int32,
    ):
        """64 columns of this warp's 16 rows, which begin at `row`, through the ring."""
        ring = self.schedule.ring_chunks
        index = self.group * ring + (used & (ring - 1))
        base = self.base + index * CHUNK_BYTES
        # The store that last left from here has read it when at most the ring's others are under way.
        cute.arch.cp_async_bulk_wait_group(ring - 1, read=True)
        cute.arch.sync_warp()
        for sixteen in cutlass.range_constexpr(BOX_COLUMNS // 16):
            pairs = [
                self._values(acc, nc, block, eight, r, biases)
                for eight in (2 * sixteen, 2 * sixteen + 1)
                for r in range(2)
            ]
            self.box.write(base, sixteen, [p.pack(low, high, self.config.y_dtype) for low, high in pairs])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        glu_stores.store_box(
            *self.store_y, index, base, self.y, BOX_COLUMNS, self.warp, row, end, column, self.columns
        )  # fmt: skip
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _pairs(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        row: Int32,
        column: Int32,
        end: Int32,
        biases,
        used: Int32,
    ):
        """From registers to memory: of each 8 columns a lane has two, of row lane // 4 and of the row 8 below."""
        lane = p.fresh_lane()
        mine = row + (lane >> 2)
        addresses = stores.lane_rows(self.y, mine, column + 2 * (lane & 3))
        for eight in cutlass.range_constexpr(BOX_COLUMNS // 8):
            if column + 8 * eight < self.columns:
                for r in cutlass.range_constexpr(2):
                    words = [p.bits(v) for v in self._values(acc, nc, block, eight, r, biases)]
                    stores.store_inside(addresses[r] + Int64(32 * eight), words, mine + 8 * r < end)

    def _values(self, acc, nc: int, block: int, eight: int, r: int, biases):
        """Two neighbouring columns of y before they round."""
        at = block * (self.schedule.tile_n // 2) + 4 * (nc * (BOX_COLUMNS // 8) + eight) + 2 * r
        values = [acc[at], acc[at + 1]]
        if self.config.has_alpha:
            values = [v * self.scale[0] for v in values]
        if biases is not None:
            values = [v + b for v, b in zip(values, biases[eight], strict=True)]
        return values

    def _biases(self, expert, column):
        """The bias of this lane's two columns of each 8 of a chunk, read once for all its rows. Columns past the last
        take the last's, and are not stored."""
        kind = self.config.bias_dtype
        if kind is None:
            return None
        found = []
        for eight in range(BOX_COLUMNS // 8):
            start = cutlass.min(column + 8 * eight, self.columns - COLUMN_MULTIPLE)
            address = p.row_address(self.bias, expert, start + 2 * (p.fresh_lane() & 3))
            if kind == "fp32":
                found.append(tuple(p.from_bits(word) for word in p.load_global_v2(address)))
            else:
                found.append(p.unpack(p.load_global(address, cutlass.Uint32), kind))
        return found
