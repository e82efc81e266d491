"""Grouped GEMM + dGLU for Hopper: D, dprob (and more) = dGLU(dy @ b[expert], C) in one persistent kernel.

Warpgroup 0 feeds, warpgroups 1 and 2 compute. Per CTA (shared memory: operand stages, two C/D rings, tile records):

    warp 0     scheduler and operand loads. Per tile: finds the expert, writes the tile record, then per k step waits
               for an empty stage, expects its bytes and issues the two TMA loads (multicast inside a cluster).
    warp 1     reads the records and loads C chunks by TMA into the ring of the warpgroup that will need them, as soon
               as chunks are free: during that warpgroup's mainloop, and before.
    warps 2-3  write zeros to the rows past the last offset, of which there are none as a rule, and to their scales.
    wg 1, 2    ping-pong: they take tiles in turn, and one's epilogue runs under the other's mainloop; a pair of named
               barriers keeps the mainloops in tile order. Cooperative: they share each tile's rows.

    barrier        arrivals                                               waits
    ab_full[s]     1, warp 0's expect-tx, plus the stage's bytes          consumer warps
    ab_empty[s]    consumer warps of a tile x CTAs of the cluster         warp 0
    c_full[w, i]   1, warp 1's expect-tx, plus the chunk's bytes          warps of warpgroup w
    c_empty[w, i]  4, the warps of warpgroup w, once their D has left     warp 1
    rec_full[i]    1, warp 0                                              warp 1 and the consumer warps of the tile
    rec_empty[i]   1 + consumer warps of the tile                         warp 0
"""

from __future__ import annotations

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from . import mainloop, padding, records, roles, scheduler, stores
from . import primitives as p
from .config import CHUNK_M, CHUNK_N, CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, TILE_K, WARPGROUP, log2
from .dglu_config import DgluConfig, finishes, scratch_bytes, smem_bytes
from .dglu_epilogue import DgluEpilogue
from .experts import DescribeExperts, descriptor
from .operands import Operands

THREADS = WARPGROUP * (1 + CONSUMERS)


class GroupedGemmDglu:
    """The kernel of one configuration; `__call__` is the host side that builds descriptors and launches."""

    def __init__(self, config: DgluConfig) -> None:
        self.config = config
        s = self.schedule = config.schedule
        self.operands = Operands(config)
        self.pairs_rows = self.operands.pairs_rows
        self.loads_c, self.stores_d = config.c_dtype != "fp32", config.d_dtype in ("bf16", "fp16")
        self.stage_bytes = (s.tile_m + s.tile_n) * TILE_K * 2

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, K, N), or (L,) addresses
        descriptors: Optional[cute.Tensor],  # (L, 16) words: TMA descriptors of discrete weights
        offsets: cute.Tensor,  # (L,)
        c: cute.Tensor,  # (M, 2N)
        d: Optional[cute.Tensor],  # (M, 2N)
        prob: Optional[cute.Tensor],  # (M,)
        alpha: Optional[cute.Tensor],  # (L,)
        beta: Optional[cute.Tensor],  # (L,)
        activation: Optional[cute.Tensor],  # (M, N)
        dprob_parts: Optional[cute.Tensor],  # (N tiles, M)
        dbias_parts: Optional[cute.Tensor],  # (M tiles, 2N)
        amax_parts: Optional[cute.Tensor],  # (M tiles, N tiles * 16)
        q_row: Optional[cute.Tensor],  # (M, 2N) bytes
        sf_row: Optional[cute.Tensor],  # bytes
        q_col: Optional[cute.Tensor],  # (M, 2N) bytes
        sf_col: Optional[cute.Tensor],  # bytes
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        s = self.schedule
        make = self.operands
        b_nkl = make.weights(dy, b, cute.size(c, mode=[1]) // 2)
        smem_a, smem_b, smem_c = make.layouts()
        load_a, load_b = make.load_a(dy, smem_a), make.load_b(b_nkl, smem_b)
        if cutlass.const_expr(self.config.discrete_b):
            DescribeExperts()(load_b[0], b, descriptors, b_nkl, stream)
        load_c = make.load_c(c, smem_c) if cutlass.const_expr(self.loads_c) else (None, None)
        store_d = make.store_d(d) if cutlass.const_expr(self.stores_d) else (None, None)

        @cute.struct
        class Storage:
            ab_full: cute.struct.MemRange[Int64, s.ab_stages]
            ab_empty: cute.struct.MemRange[Int64, s.ab_stages]
            c_full: cute.struct.MemRange[Int64, CONSUMERS * s.ring_chunks]
            c_empty: cute.struct.MemRange[Int64, CONSUMERS * s.ring_chunks]
            rec_full: cute.struct.MemRange[Int64, scheduler.RECORDS]
            rec_empty: cute.struct.MemRange[Int64, scheduler.RECORDS]
            records: cute.struct.MemRange[Int32, scheduler.RECORDS * scheduler.RECORD_WORDS]
            scratch: cute.struct.MemRange[Float32, max(1, scratch_bytes(self.config) // 4)]
            a: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_b)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[make.ring_dtype, cute.cosize(smem_c)], 1024]

        used, modelled = Storage.size_in_bytes(), smem_bytes(self.config)  # type: ignore[attr-defined]
        assert used <= modelled, f"{used} bytes of shared memory, {modelled} by dglu_config.smem_bytes"
        self.storage = Storage
        self.kernel(
            *load_a, *load_b, *load_c, *store_d, make.tiled_mma(False), make.tiled_mma(True),
            smem_a, smem_b, smem_c, descriptors, offsets, c, d, prob, alpha, beta, activation, dprob_parts, dbias_parts,
            amax_parts,
            q_row, sf_row, q_col, sf_col, cute.size(dy, mode=[1]), cute.size(b_nkl, mode=[0]),
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
        atom_c: Optional[cute.CopyAtom],
        coords_c: Optional[cute.Tensor],
        atom_d: Optional[cute.CopyAtom],
        coords_d: Optional[cute.Tensor],
        mma_first: cute.TiledMma,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        smem_c: cute.ComposedLayout,
        descriptors: Optional[cute.Tensor],
        offsets: cute.Tensor,
        c: cute.Tensor,
        d: Optional[cute.Tensor],
        prob: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        beta: Optional[cute.Tensor],
        activation: Optional[cute.Tensor],
        dprob_parts: Optional[cute.Tensor],
        dbias_parts: Optional[cute.Tensor],
        amax_parts: Optional[cute.Tensor],
        q_row: Optional[cute.Tensor],
        sf_row: Optional[cute.Tensor],
        q_col: Optional[cute.Tensor],
        sf_col: Optional[cute.Tensor],
        depth: Int32,
        columns: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        chunks = CONSUMERS * self.schedule.ring_chunks
        roles.init_barriers(storage, warp, self.schedule, 1, (("c_full", chunks, 1), ("c_empty", chunks, 4)))
        if warp == 0:
            for atom in (atom_a, atom_b, atom_c, atom_d):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        s_a = storage.a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        s_b = storage.b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        s_c = storage.c.get_tensor(smem_c.outer, swizzle=smem_c.inner)
        k_tiles = (depth + TILE_K - 1) // TILE_K
        rows = cute.size(c, mode=[0])

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                a, b = (atom_a, coords_a, s_a), (atom_b, coords_b, s_b)
                self._feed(storage, a, b, descriptors, offsets, rows, k_tiles, columns)
                if cutlass.const_expr(finishes(self.config)):
                    cute.arch.griddepcontrol_launch_dependents()
            if warp == 1:
                self._load_c(storage, atom_c, coords_c, s_c, columns)
            if warp >= 2:
                last = cutlass.min(cutlass.max(offsets[cute.size(offsets) - 1], Int32(0)), rows)
                for tensor in (d, activation, q_row, q_col):
                    if cutlass.const_expr(tensor is not None):
                        stores.zero_rows(tensor, last, rows, warp - 2, 2)
                if cutlass.const_expr(self.config.sf_swizzled):
                    if cutlass.const_expr(sf_row is not None):
                        padding.zero_row_scales(sf_row, last, rows, columns, warp - 2, 2)
                    if cutlass.const_expr(sf_col is not None):
                        padding.zero_column_scales(sf_col, last, rows, columns, warp - 2, 2)
                if cutlass.const_expr(dprob_parts is not None):
                    # One tile: the partials are dprob.
                    if cute.size(dprob_parts, mode=[0]) == 1:
                        self._zero_sums(dprob_parts, last, rows, warp - 2)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform(warp // 4 - 1)
            epilogue = DgluEpilogue(
                self.config, storage, group, warp % 4, atom_d, coords_d, s_c, c, d, prob, alpha, beta, activation,
                dprob_parts, dbias_parts, amax_parts, columns, rows, (q_row, sf_row, q_col, sf_col),
            )  # fmt: skip
            roles.compute(storage, self.schedule, group, mma_first, mma, s_a, s_b, k_tiles, columns, epilogue, True)

    @cute.jit
    def _zero_sums(self, sums: cute.Tensor, first: Int32, rows: Int32, warp: Int32):
        """Zeros in the row sums from `first` on; two warps of every CTA share them."""
        mine = (cute.arch.block_idx()[0] * 2 + warp) * 32 + cute.arch.lane_idx()
        for row in cutlass.range(first + mine, rows, cute.arch.grid_dim()[0] * 64, unroll=1):
            sums[0, row] = Float32(0.0)

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
        tiles_n = (columns + (s.tile_n * s.cluster_n - 1)) // (s.tile_n * s.cluster_n)
        # Rows of dy that a single cluster reads need not stay in L2.
        policy_a = p.select(tiles_n == 1, Int64(stores.STREAM), Int64(stores.NORMAL))
        state = (Int32(0), Int32(0), *scheduler.load_window(offsets, Int32(0), experts, rows, s.tile_m, s.cluster_m))
        tile = cute.arch.block_idx()[0] // s.cluster_size
        step = cute.arch.grid_dim()[0] // s.cluster_size
        stage, phase, count = Int32(0), Int32(0), Int32(0)
        full, empty = storage.ab_full.data_ptr(), storage.ab_empty.data_ptr()
        found, expert, first, end, inner, m_tiles, m_before, state = scheduler.locate(
            tile, offsets, experts, rows, tiles_n, state, s.tile_m, s.cluster_m
        )
        while found:
            m, n = scheduler.order_in_expert(inner, m_tiles, tiles_n, s.band)
            m_tile = m * s.cluster_m + rank_m
            row = first + m_tile * s.tile_m
            n0 = (n * s.cluster_n + rank_n) * s.tile_n
            slot = m_before * s.cluster_m + m_tile
            records.write(storage, count, row, n0, end, expert, slot)
            count += 1
            g_b = cute.local_tile(
                cute.domain_offset((n0, 0), coords_b[None, None, 0 if self.config.discrete_b else expert]),
                (s.tile_n, TILE_K),
                (0, None),
            )
            weights = None
            if cutlass.const_expr(self.config.discrete_b):
                weights = descriptor(descriptors, expert)
                cpasync.fence_tma_desc_acquire(weights)
            part_b, tile_b = cpasync.tma_partition(
                atom_b, rank_m, cute.make_layout(s.cluster_m), cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
            )

            if cutlass.const_expr(self.pairs_rows):
                tile_shape = (16, TILE_K, 4, 2)
                g_a = cute.local_tile(cute.domain_offset((0, 0, row // 32, 0), coords_a), tile_shape, (0, None, 0, 0))
                whole_a = cute.group_modes(cute.flat_divide(s_a, (16, TILE_K)), 0, 4)
            else:
                g_a = cute.local_tile(cute.domain_offset((row, 0), coords_a), (s.tile_m, TILE_K), (0, None))
                whole_a = cute.group_modes(s_a, 0, 2)
            part_a, tile_a = cpasync.tma_partition(
                atom_a, rank_n, cute.make_layout(s.cluster_n), whole_a,
                cute.group_modes(g_a, 0, 4 if self.pairs_rows else 2),
            )  # fmt: skip

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
            found, expert, first, end, inner, m_tiles, m_before, state = scheduler.locate(
                tile, offsets, experts, rows, tiles_n, state, s.tile_m, s.cluster_m
            )
        for _ in cutlass.range_constexpr(CONSUMERS if s.pingpong else 1):
            records.write(storage, count, Int32(0), Int32(0), Int32(0), Int32(scheduler.END), Int32(0))
            count += 1
        # Peers may still arrive here and multicast here; wait until every stage has been given back.
        for _ in cutlass.range(s.ab_stages, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            stage, phase = mainloop.next_stage(stage, phase, s.ab_stages)

    @cute.jit
    def _load_c(self, storage, atom_c: cute.CopyAtom, coords_c: cute.Tensor, s_c: cute.Tensor, columns: Int32):
        """Warp 1: the C chunks of every tile, in the order in which their warpgroup reads them."""
        s = self.schedule
        block_step = cutlass.const_expr(16 if self.pairs_rows else 64)
        tile, used0, used1 = Int32(0), Int32(0), Int32(0)
        row, n0, end, expert, _ = records.read_with_slot(storage, tile)
        while expert != scheduler.END:
            if row < end:
                for nc in cutlass.range_constexpr(s.tile_n // CHUNK_N):
                    if n0 + nc * CHUNK_N < columns:
                        for mi in cutlass.range_constexpr(s.m_blocks):
                            column = n0 + nc * CHUNK_N
                            if cutlass.const_expr(s.pingpong):
                                group = tile & (CONSUMERS - 1)
                                used = used0 if group == 0 else used1
                                at = row + mi * block_step
                                self._load_chunk(storage, atom_c, coords_c, s_c, group, used, at, column, columns)
                                if group == 0:
                                    used0 += 1
                                else:
                                    used1 += 1
                            else:
                                for g in cutlass.range_constexpr(CONSUMERS):
                                    group, at = Int32(g), row + mi * 128 + g * 64
                                    self._load_chunk(storage, atom_c, coords_c, s_c, group, used0, at, column, columns)
                                used0 += 1
            tile += 1
            row, n0, end, expert, _ = records.read_with_slot(storage, tile)

    @cute.jit
    def _load_chunk(
        self,
        storage,
        atom_c: cute.CopyAtom,
        coords_c: cute.Tensor,
        s_c: cute.Tensor,
        group: Int32,
        used: Int32,
        row: Int32,
        n0: Int32,
        columns: Int32,
    ):
        ring = self.schedule.ring_chunks
        slot = used & (ring - 1)
        i = group * ring + slot
        cute.arch.mbarrier_wait(storage.c_empty.data_ptr() + i, ((used >> log2(ring)) & 1) ^ 1)
        full = storage.c_full.data_ptr() + i
        if cutlass.const_expr(self.loads_c):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, stores.CHUNK_BYTES)
            self._copy_chunk(atom_c, coords_c, s_c, i, full, row, n0, columns)
        else:
            # The epilogue reads C itself; the chunk only carries D.
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)

    def _copy_chunk(self, atom_c, coords_c, s_c, i, full, row, n0, columns) -> None:
        """Starts the TMA loads of one chunk into ring position i: one per box."""
        layout = self.config.glu_layout
        count, width = stores.boxes(layout), stores.box_columns(layout)
        whole = cute.group_modes(s_c, 0, 2)
        if self.pairs_rows:
            whole = cute.group_modes(cute.flat_divide(s_c, (16, width)), 0, 4)
        for box in range(count):
            column = stores.box_column(layout, n0, columns, box)
            if self.pairs_rows:
                # Block and piece of the chunk's first row.
                start = (0, column, row // 32, row // 16 % 2)
                g_c = cute.local_tile(cute.domain_offset(start, coords_c), (16, width, 4, 1), (0, 0, 0, 0))
                g_c = cute.group_modes(g_c, 0, 4)
            else:
                g_c = cute.local_tile(cute.domain_offset((row, column), coords_c), (CHUNK_M, width), (0, 0))
                g_c = cute.group_modes(g_c, 0, 2)
            part, source = cpasync.tma_partition(atom_c, 0, cute.make_layout(1), whole, g_c)
            target = part[None, i * count + box]
            cute.copy(atom_c, source, target, tma_bar_ptr=full, cache_policy=Int64(stores.STREAM))
