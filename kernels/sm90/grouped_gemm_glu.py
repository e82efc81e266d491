"""Grouped GEMM + GLU for Hopper: h = x @ b[expert] and d = GLU(h) * prob in one persistent kernel.

Warpgroup 0 feeds, warpgroups 1 and 2 compute, as in the backward kernel (grouped_gemm_dglu.py), whose mainloop,
scheduler and roles these are. Per CTA (shared memory: operand stages, rings of output chunks, tile records):

    warp 0     scheduler and operand loads. Per tile: finds the expert, writes the tile record, then per k step waits
               for an empty stage, expects its bytes and issues the TMA loads (multicast inside a cluster).
    warps 1-3  write zeros to the rows past the last offset, of which there are none as a rule, and to their scales.
    wg 1, 2    ping-pong: they take tiles in turn, and one's epilogue runs under the other's mainloop; a pair of named
               barriers keeps the mainloops in tile order. Cooperative: they share each tile's rows.

A warp writes its own rows of a chunk and stores them by TMA itself, so the rings need no barriers. With codes it takes
two chunks of columns at a time, and for column blocks both of its 16-row blocks, which then are neighbours
(`Operands.pairs_rows`): 32 x 64 values, all that it has of a 128-column tile of the product. Its lanes meet in shared
memory that is the warp's own (`codes`), or where h was, see `glu_config.codes_in_h`.

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

from . import mainloop, padding, records, roles, scheduler, stores
from . import primitives as p
from .config import CHUNK_N, CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, TILE_K, WARPGROUP
from .experts import DescribeExperts, descriptor
from .glu_config import GluConfig, codes_bytes, quantizes, smem_bytes
from .glu_epilogue import GluEpilogue
from .glu_operands import GluOperands

THREADS = WARPGROUP * (1 + CONSUMERS)


def _first(*tensors):
    """The first that is there."""
    return next(tensor for tensor in tensors if tensor is not None)


class GroupedGemmGlu:
    """The kernel of one configuration; `__call__` is the host side that builds descriptors and launches."""

    def __init__(self, config: GluConfig) -> None:
        self.config = config
        s = self.schedule = config.schedule
        self.operands = GluOperands(config)
        self.stage_bytes = (s.tile_m + s.tile_n) * TILE_K * 2
        self.columns_a_tile = s.tile_n // 2  # of the activation

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, K, 2N), or (L, K, N) of the gate, or (L,) addresses
        b_up: Optional[cute.Tensor],  # (L, K, N)
        descriptors: Optional[cute.Tensor],  # (L, 16) words: TMA descriptors of discrete weights
        offsets: cute.Tensor,  # (L,)
        h: Optional[cute.Tensor],  # (M, 2N)
        d: Optional[cute.Tensor],  # (M, N)
        prob: Optional[cute.Tensor],  # (M,)
        alpha: Optional[cute.Tensor],  # (L,)
        bias: Optional[cute.Tensor],  # (L, 2N)
        q_row: Optional[cute.Tensor],  # (M, N) bytes
        sf_row: Optional[cute.Tensor],  # bytes
        q_col: Optional[cute.Tensor],  # (M, N) bytes
        sf_col: Optional[cute.Tensor],  # bytes
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        s, make = self.schedule, self.operands
        columns = cute.size(_first(d, q_row, q_col), mode=[1])
        b_nkl = make.weights(x, b, columns * 2)
        smem_a, smem_b, smem_box, smem_h, smem_d = make.layouts()
        load_a, load_b = make.load_a(x, smem_a), make.load_b(b_nkl, smem_box)
        load_up = (None, None)
        if cutlass.const_expr(b_up is not None):
            load_up = make.load_b(make.weights(x, b_up, columns), smem_box)
        if cutlass.const_expr(self.config.discrete_b):
            DescribeExperts()(load_b[0], b, descriptors, b_nkl, stream)
        store_h = (None, None)
        if cutlass.const_expr(h is not None):
            store_h = make.store_rows(h, stores.box_columns(self.config.glu_layout))
        store_d = (None, None)
        if cutlass.const_expr(d is not None):
            store_d = make.store_rows(d, CHUNK_N)
        h_size = cute.cosize(smem_h) if self.config.h_dtype else 8
        d_size = cute.cosize(smem_d) if self.config.d_dtype else 0

        @cute.struct
        class Storage:
            ab_full: cute.struct.MemRange[Int64, s.ab_stages]
            ab_empty: cute.struct.MemRange[Int64, s.ab_stages]
            rec_full: cute.struct.MemRange[Int64, scheduler.RECORDS]
            rec_empty: cute.struct.MemRange[Int64, scheduler.RECORDS]
            records: cute.struct.MemRange[Int32, scheduler.RECORDS * scheduler.RECORD_WORDS]
            codes: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, max(16, codes_bytes(self.config))], 128]
            h: cute.struct.Align[cute.struct.MemRange[make.ring_dtype, h_size], 1024 if self.config.h_dtype else 16]
            a: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_b)], 1024]
            d: cute.struct.Align[cute.struct.MemRange[make.ring_dtype, d_size], 1024 if self.config.d_dtype else 16]

        used, modelled = Storage.size_in_bytes(), smem_bytes(self.config)  # type: ignore[attr-defined]
        assert used <= modelled, f"{used} bytes of shared memory, {modelled} by glu_config.smem_bytes"
        self.storage = Storage
        self.kernel(
            *load_a, *load_b, *load_up, *store_h, *store_d, make.tiled_mma(False), make.tiled_mma(True),
            smem_a, smem_b, smem_box, smem_h, smem_d, descriptors, offsets, h, d, prob, alpha, bias, q_row, sf_row,
            q_col, sf_col, cute.size(x, mode=[1]), columns,
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
        atom_up: Optional[cute.CopyAtom],
        coords_up: Optional[cute.Tensor],
        atom_h: Optional[cute.CopyAtom],
        coords_h: Optional[cute.Tensor],
        atom_d: Optional[cute.CopyAtom],
        coords_d: Optional[cute.Tensor],
        mma_first: cute.TiledMma,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        smem_box: cute.ComposedLayout,
        smem_h: cute.ComposedLayout,
        smem_d: cute.ComposedLayout,
        descriptors: Optional[cute.Tensor],
        offsets: cute.Tensor,
        h: Optional[cute.Tensor],
        d: Optional[cute.Tensor],
        prob: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        q_row: Optional[cute.Tensor],
        sf_row: Optional[cute.Tensor],
        q_col: Optional[cute.Tensor],
        sf_col: Optional[cute.Tensor],
        depth: Int32,
        columns: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        roles.init_barriers(storage, warp, self.schedule)
        if warp == 0:
            for atom in (atom_a, atom_b, atom_up, atom_h, atom_d):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        s_a = storage.a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        s_b = storage.b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        s_box = storage.b.get_tensor(smem_box.outer, swizzle=smem_box.inner)
        s_d = None
        if cutlass.const_expr(d is not None):
            s_d = storage.d.get_tensor(smem_d.outer, swizzle=smem_d.inner)
        s_h = None
        if cutlass.const_expr(h is not None):
            s_h = storage.h.get_tensor(smem_h.outer, swizzle=smem_h.inner)
        k_tiles = (depth + TILE_K - 1) // TILE_K
        rows = cute.size(_first(d, q_row, q_col), mode=[0])

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                a, b = (atom_a, coords_a, s_a), ((atom_b, atom_up), (coords_b, coords_up), s_box)
                self._feed(storage, a, b, descriptors, offsets, rows, k_tiles, columns)
            else:
                for tensor in (h, d, q_row, q_col):
                    if cutlass.const_expr(tensor is not None):
                        stores.zero_rows(tensor, offsets[cute.size(offsets) - 1], rows, warp - 1, 3)
                if cutlass.const_expr(quantizes(self.config) and self.config.sf_swizzled):
                    self._zero_scales(sf_row, sf_col, offsets, rows, columns, warp - 1)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform(warp // 4 - 1)
            epilogue = GluEpilogue(
                self.config, storage, group, warp % 4, (atom_h, coords_h, s_h), h, (atom_d, coords_d, s_d), d, prob,
                alpha, bias, columns, rows, (q_row, sf_row, q_col, sf_col),
            )  # fmt: skip
            roles.compute(storage, self.schedule, group, mma_first, mma, s_a, s_b, k_tiles, columns, epilogue, False)

    @cute.jit
    def _zero_scales(self, sf_row, sf_col, offsets: cute.Tensor, rows: Int32, columns: Int32, warp: Int32):
        """Zeros in the swizzled scales that belong to no expert's row; three warps of every CTA share them."""
        last = cutlass.min(cutlass.max(offsets[cute.size(offsets) - 1], Int32(0)), rows)
        # Two neighbouring blocks of 32 columns are what gate and up are to `padding`.
        if cutlass.const_expr(sf_row is not None):
            padding.zero_row_scales(sf_row, last, rows, columns // 2, warp, 3)
        if cutlass.const_expr(sf_col is not None):
            padding.zero_column_scales(sf_col, last, rows, columns // 2, warp, 3)

    @cute.jit
    def _feed(self, storage, a, b, descriptors, offsets: cute.Tensor, rows: Int32, k_tiles: Int32, columns: Int32):
        """Warp 0: one record and one stream of operand stages per tile."""
        s = self.schedule
        atom_a, coords_a, s_a = a
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % s.cluster_m, rank // s.cluster_m
        # A goes to the CTAs of the same M (ranks cluster_m apart).
        row_mask = sum(1 << (i * s.cluster_m) for i in range(s.cluster_n))
        mask_a = cutlass.Int16(row_mask << rank_m) if s.cluster_n > 1 else None
        experts = cute.size(offsets)
        width = cutlass.const_expr(self.columns_a_tile * s.cluster_n)
        tiles_n = (columns + (width - 1)) // width
        # Rows of x that a single cluster reads need not stay in L2.
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
            n0 = (n * s.cluster_n + rank_n) * self.columns_a_tile
            records.write(storage, count, row, n0, end, expert)
            count += 1
            part_a, tile_a = self.operands.partition_a(atom_a, coords_a, s_a, row, rank_n)
            copy_b = self._weights_of(b, descriptors, expert, n0, columns, rank_m, rank_n)

            def copy_a(k, at, barrier):
                cute.copy(
                    atom_a, tile_a[None, k], part_a[None, at], tma_bar_ptr=barrier, mcast_mask=mask_a,
                    cache_policy=policy_a,
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

    def _weights_of(self, b, descriptors, expert, n0, columns, rank_m, rank_n):
        """The function that starts a k step's loads of one tile's weights: `(k, stage, barrier)`."""
        s, make = self.schedule, self.operands
        atoms, coords, s_box = b
        # B goes to the CTAs of the same N (neighbours).
        mask = cutlass.Int16(((1 << s.cluster_m) - 1) << (rank_n * s.cluster_m)) if s.cluster_m > 1 else None
        weights = None
        if self.config.discrete_b:
            weights = descriptor(descriptors, expert)
            cpasync.fence_tma_desc_acquire(weights)
        loads = []
        for box in [rank_m] if make.box_a_rank else range(make.b_boxes):
            which, column = 0, stores.box_column(self.config.glu_layout, n0, columns, box)
            if self.config.separate_up:
                which, column = box, n0
            atom, of_expert = atoms[which], coords[which][None, None, 0 if self.config.discrete_b else expert]
            tile = cute.local_tile(cute.domain_offset((column, 0), of_expert), (make.b_columns, TILE_K), (0, None))
            part, source = cpasync.tma_partition(
                atom, 0 if make.box_a_rank else rank_m, cute.make_layout(make.b_slices), cute.group_modes(s_box, 0, 2),
                cute.group_modes(tile, 0, 2),
            )  # fmt: skip
            loads.append((atom, box, part, source))

        def copy(k, at, barrier):
            for atom, box, part, source in loads:
                cute.copy(
                    atom, source[None, k], part[None, at * make.b_boxes + box], tma_bar_ptr=barrier, mcast_mask=mask,
                    tma_desc_ptr=weights,
                )  # fmt: skip

        return copy
