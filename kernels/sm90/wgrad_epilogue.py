"""Epilogue of one consumer warpgroup of the weight gradient: accumulators through a ring of chunks into dw.

A chunk is 64 rows x 128 bytes, swizzled as TMA reads it. Each warp writes its own 16 rows and stores them itself, so
the ring needs no barriers. TMA clips what lies past K or N, and never reaches the next expert.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from . import glu_stores, stores
from . import primitives as p
from .stores import WARP_ROWS
from .wgrad_config import CHUNK_BYTES, CHUNK_ROW_BYTES, WgradConfig, chunk_columns


class FloatBox:
    """Addresses of one warp's rows in a chunk of float32."""

    def __init__(self, warp, lane) -> None:
        quad, pos = lane >> 2, lane & 3
        self.offset = (warp * WARP_ROWS + quad) * CHUNK_ROW_BYTES + (((pos >> 1) ^ quad) << 4) + (pos & 1) * 8

    def write(self, base, eight: int, r: int, words) -> None:
        """A lane's two columns of the `eight`-th 8 columns, of its row or, with r, of that 8 rows down."""
        p.store_shared_v2(((base + self.offset) ^ (eight << 5)) + r * (8 * CHUNK_ROW_BYTES), words)


class WgradEpilogue:
    """State and steps of one warp's epilogue."""

    def __init__(self, config: WgradConfig, storage, group, warp, store_dw, dw) -> None:
        self.config, self.schedule = config, config.schedule
        self.group, self.warp = group, warp
        self.atom, self.coords, self.chunks = store_dw  # coordinates are (K, N, L)
        self.rows, self.columns = cute.size(dw, mode=[1]), cute.size(dw, mode=[2])
        self.width = chunk_columns(config)
        self.base = storage.dw.data_ptr().toint()
        lane = cute.arch.lane_idx()
        self.box: Any = FloatBox(warp, lane) if config.dw_dtype == "fp32" else glu_stores.Box(self.width, warp, lane)

    # The object is constant: the DSL may carry it through loops as nothing.
    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def block_row(self, block: int):
        """First row, inside the tile, of this warp's 16 rows of a 64-row block."""
        if self.schedule.pingpong:
            return self.warp * WARP_ROWS + block * 64
        return self.warp * WARP_ROWS + block * 128 + self.group * 64

    @cute.jit
    def run(self, acc: cute.Tensor, m0: Int32, n0: Int32, expert: Int32, used: Int32):
        """The tile's chunks, columns outside, 64-row blocks inside; returns how many chunks the ring has served."""
        s = self.schedule
        for nc in cutlass.range_constexpr(s.tile_n // self.width):
            if n0 + nc * self.width < self.columns:
                for block in cutlass.range_constexpr(s.m_blocks):
                    self._chunk(acc, nc, block, m0 + self.block_row(block), n0 + nc * self.width, expert, used)
                    used += 1
        return used

    @cute.jit
    def _chunk(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        row: Int32,
        column: Int32,
        expert: Int32,
        used: Int32,
    ):
        """This warp's 16 rows of a chunk, which begin at `row`."""
        ring = self.schedule.ring_chunks
        index = self.group * ring + (used & (ring - 1))
        base = self.base + index * CHUNK_BYTES
        # The stores that last left from here have read it when at most the ring's others are under way.
        cute.arch.cp_async_bulk_wait_group(ring - 1, read=True)
        cute.arch.sync_warp()
        first = block * (self.schedule.tile_n // 2) + nc * (self.width // 2)  # 4 accumulators a thread and 8 columns
        if cutlass.const_expr(self.config.dw_dtype == "fp32"):
            for eight in cutlass.range_constexpr(self.width // 8):
                for r in cutlass.range_constexpr(2):
                    at = first + 4 * eight + 2 * r
                    self.box.write(base, eight, r, (p.bits(acc[at]), p.bits(acc[at + 1])))
        else:
            for sixteen in cutlass.range_constexpr(self.width // 16):
                at = first + 8 * sixteen
                words = [p.pack(acc[at + 2 * i], acc[at + 2 * i + 1], self.config.dw_dtype) for i in range(4)]
                self.box.write(base, sixteen, words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if row < self.rows:
            tile = (WARP_ROWS, self.width)
            of_expert = self.coords[None, None, expert]
            target = cute.local_tile(cute.domain_offset((row, column), of_expert), tile, (0, 0))
            source = cute.local_tile(self.chunks[None, None, index], tile, (self.warp, 0))
            part, place = cpasync.tma_partition(
                self.atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
            )
            cute.copy(self.atom, part, place, cache_policy=cutlass.Int64(stores.STREAM))
        cute.arch.cp_async_bulk_commit_group()
