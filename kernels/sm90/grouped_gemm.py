"""Grouped GEMM for Hopper: y = alpha[expert]**e * (a @ b[expert]) + bias[expert] in one persistent kernel.

Warpgroup 0 feeds, warpgroups 1 and 2 compute, as in the forward kernel (grouped_gemm_glu.py), whose mainloop, scheduler
and roles these are. Per CTA (shared memory: operand stages, rings of output chunks, tile records):

    warp 0     scheduler and operand loads. Per tile: finds the expert, writes the tile record, then per k step waits
               for an empty stage, expects its bytes and issues the TMA loads (multicast inside a cluster).
    warps 1-3  write zeros to the rows past the last offset, of which there are none as a rule.
    wg 1, 2    ping-pong: they take tiles in turn, and one's epilogue runs under the other's mainloop; a pair of named
               barriers keeps the mainloops in tile order. Cooperative: they share each tile's rows.

A warp writes its own rows of a chunk and stores them by TMA itself, so the rings need no barriers, and the stores of a
tile go on under its warpgroup's next mainloop.

    barrier        arrivals                                               waits
    ab_full[s]     1, warp 0's expect-tx, plus the stage's bytes          consumer warps
    ab_empty[s]    consumer warps of a tile x CTAs of the cluster         warp 0
    rec_full[i]    1, warp 0                                              the consumer warps of the tile
    rec_empty[i]   consumer warps of the tile                             warp 0
"""

from __future__ import annotations

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from . import mainloop, records, roles, scheduler, stores
from . import primitives as p
from .config import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, TILE_K, WARPGROUP
from .experts import DescribeExperts, descriptor
from .gemm_config import GemmConfig, smem_bytes
from .gemm_epilogue import GemmEpilogue
from .gemm_operands import GemmOperands

THREADS = WARPGROUP * (1 + CONSUMERS)


class GroupedGemm:
    """The kernel of one configuration; `__call__` is the host side that builds descriptors and launches."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        s = self.schedule = config.schedule
        self.operands = GemmOperands(config)
        self.stage_bytes = (s.tile_m + s.tile_n) * TILE_K * 2

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, K, N), or (L,) addresses
        descriptors: Optional[cute.Tensor],  # (L, 16) words: TMA descriptors of discrete weights
        offsets: cute.Tensor,  # (L,)
        y: cute.Tensor,  # (M, N)
        alpha: Optional[cute.Tensor],  # (L,)
        bias: Optional[cute.Tensor],  # (L, N)
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        s, make = self.schedule, self.operands
        columns = cute.size(y, mode=[1])
        b_nkl = make.weights(a, b, columns)
        smem_a, smem_b, smem_y = make.layouts()
        load_a, load_b = make.load_a(a, smem_a), make.load_b(b_nkl, smem_b)
        if cutlass.const_expr(self.config.discrete_b):
            DescribeExperts()(load_b[0], b, descriptors, b_nkl, stream)
        through_ring = self.config.through_ring
        store_y = make.store_y(y) if cutlass.const_expr(through_ring) else (None, None)

        @cute.struct
        class Storage:
            ab_full: cute.struct.MemRange[Int64, s.ab_stages]
            ab_empty: cute.struct.MemRange[Int64, s.ab_stages]
            rec_full: cute.struct.MemRange[Int64, scheduler.RECORDS]
            rec_empty: cute.struct.MemRange[Int64, scheduler.RECORDS]
            records: cute.struct.MemRange[Int32, scheduler.RECORDS * scheduler.RECORD_WORDS]
            y: cute.struct.Align[
                cute.struct.MemRange[make.ring_dtype, cute.cosize(smem_y) if through_ring else 8],
                1024 if through_ring else 16,
            ]
            a: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_b)], 1024]

        used, modelled = Storage.size_in_bytes(), smem_bytes(self.config)  # type: ignore[attr-defined]
        assert used <= modelled, f"{used} bytes of shared memory, {modelled} by gemm_config.smem_bytes"
        self.storage = Storage
        self.kernel(
            *load_a, *load_b, *store_y, make.tiled_mma(False), make.tiled_mma(True), smem_a, smem_b, smem_y,
            descriptors, offsets, y, alpha, bias, cute.size(a, mode=[1]), columns,
        ).launch(
            grid=[clusters * s.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[s.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom_a: cute.CopyAtom,
        coords_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        coords_b: cute.Tensor,
        atom_y: Optional[cute.CopyAtom],
        coords_y: Optional[cute.Tensor],
        mma_first: cute.TiledMma,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        smem_y: cute.ComposedLayout,
        descriptors: Optional[cute.Tensor],
        offsets: cute.Tensor,
        y: cute.Tensor,
        alpha: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        depth: Int32,
        columns: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        roles.init_barriers(storage, warp, self.schedule)
        if warp == 0:
            for atom in (atom_a, atom_b, atom_y):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        s_a = storage.a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        s_b = storage.b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        s_y = None
        if cutlass.const_expr(self.config.through_ring):
            s_y = storage.y.get_tensor(smem_y.outer, swizzle=smem_y.inner)
        k_tiles = (depth + TILE_K - 1) // TILE_K
        rows = cute.size(y, mode=[0])

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                a, b = (atom_a, coords_a, s_a), (atom_b, coords_b, s_b)
                self._feed(storage, a, b, descriptors, offsets, rows, k_tiles, columns)
            else:
                stores.zero_rows(y, offsets[cute.size(offsets) - 1], rows, warp - 1, 3)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform(warp // 4 - 1)
            epilogue = GemmEpilogue(
                self.config, storage, group, warp % 4, (atom_y, coords_y, s_y), y, alpha, bias, columns
            )
            roles.compute(storage, self.schedule, group, mma_first, mma, s_a, s_b, k_tiles, columns, epilogue, False)

    @cute.jit
    def _feed(self, storage, a, b, descriptors, offsets: cute.Tensor, rows: Int32, k_tiles: Int32, columns: Int32):
        """Warp 0: one record and one stream of operand stages per tile."""
        s = self.schedule
        atom_a, coords_a, s_a = a
        atom_b, coords_b, s_b = b
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % s.cluster_m, rank // s.cluster_m
        # A goes to the CTAs of the same M (ranks cluster_m apart), B to those of the same N (neighbours).
        row_mask = sum(1 << (i * s.cluster_m) for i in range(s.cluster_n))
        mask_a = cutlass.Int16(row_mask << rank_m) if s.cluster_n > 1 else None
        mask_b = cutlass.Int16(((1 << s.cluster_m) - 1) << (rank_n * s.cluster_m)) if s.cluster_m > 1 else None
        experts = cute.size(offsets)
        width = cutlass.const_expr(s.tile_n * s.cluster_n)
        tiles_n = (columns + (width - 1)) // width
        # Rows of a that a single cluster reads need not stay in L2.
        policy_a = p.select(tiles_n == 1, Int64(stores.STREAM), Int64(stores.NORMAL))
        state = (Int32(0), Int32(0), *scheduler.load_window(offsets, Int32(0), experts, rows, s.tile_m, s.cluster_m))
        tile = cute.arch.block_idx()[0] // s.cluster_size
        step = cute.arch.grid_dim()[0] // s.cluster_size
        stage, phase, count = Int32(0), Int32(0), Int32(0)
        full, empty = storage.ab_full.data_ptr(), storage.ab_empty.data_ptr()
        found, expert, first, end, inner, m_tiles, _, state = scheduler.locate(
            tile, offsets, experts, rows, tiles_n, state, s.tile_m, s.cluster_m
        )
        while found:
            m, n = scheduler.order_in_expert(inner, m_tiles, tiles_n, s.band)
            row = first + (m * s.cluster_m + rank_m) * s.tile_m
            n0 = (n * s.cluster_n + rank_n) * s.tile_n
            records.write(storage, count, row, n0, end, expert)
            count += 1
            weights = None
            if cutlass.const_expr(self.config.discrete_b):
                weights = descriptor(descriptors, expert)
                cpasync.fence_tma_desc_acquire(weights)
            g_a = cute.local_tile(cute.domain_offset((row, 0), coords_a), (s.tile_m, TILE_K), (0, None))
            part_a, tile_a = cpasync.tma_partition(
                atom_a, rank_n, cute.make_layout(s.cluster_n), cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
            )
            of_expert = coords_b[None, None, 0 if self.config.discrete_b else expert]
            g_b = cute.local_tile(cute.domain_offset((n0, 0), of_expert), (s.tile_n, TILE_K), (0, None))
            part_b, tile_b = cpasync.tma_partition(
                atom_b, rank_m, cute.make_layout(s.cluster_m), cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
            )

            def copy_a(k, at, barrier):
                cute.copy(
                    atom_a, tile_a[None, k], part_a[None, at], tma_bar_ptr=barrier, mcast_mask=mask_a,
                    cache_policy=policy_a,
                )  # fmt: skip

            def copy_b(k, at, barrier):
                cute.copy(
                    atom_b, tile_b[None, k], part_b[None, at], tma_bar_ptr=barrier, mcast_mask=mask_b,
                    tma_desc_ptr=weights,
                )  # fmt: skip

            stage, phase = mainloop.load_tile(
                copy_a, copy_b, k_tiles, stage, phase, full, empty, self.stage_bytes, s.ab_stages
            )
            tile += step
            found, expert, first, end, inner, m_tiles, _, state = scheduler.locate(
                tile, offsets, experts, rows, tiles_n, state, s.tile_m, s.cluster_m
            )
        for _ in cutlass.range_constexpr(CONSUMERS if s.pingpong else 1):
            records.write(storage, count, Int32(0), Int32(0), Int32(0), Int32(scheduler.END))
            count += 1
        # Peers may still arrive here and multicast here; wait until every stage has been given back.
        for _ in cutlass.range(s.ab_stages, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            stage, phase = mainloop.next_stage(stage, phase, s.ab_stages)
