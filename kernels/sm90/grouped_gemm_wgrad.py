"""Grouped weight gradient for Hopper: dw[g] = a[rows of g]^T @ dy[rows of g] in one persistent kernel.

Warpgroup 0 feeds, warpgroups 1 and 2 compute, as in the other kernels (grouped_gemm_glu.py), whose mainloop and records
these are. Every expert has the same output tiles, but a k loop of its own length. Per CTA (shared memory: operand
stages, a ring of output chunks, tile records):

    warp 0     operand loads. Per tile: finds the expert's rows, writes the tile record, then per k step waits for an
               empty stage, expects its bytes and issues the TMA loads (multicast inside a cluster).
    warps 1-3  nothing.
    wg 1, 2    ping-pong: they take tiles in turn, and one's epilogue runs under the other's mainloop; a pair of named
               barriers keeps the mainloops in tile order. Cooperative: they share each tile's rows.

An expert's rows are read backwards from its end to a whole number of k steps, so that the first step alone may hold
rows of others: the consumers overwrite these with zeros in shared memory, in both operands, because NaN times zero is
NaN. An expert without rows has one step of nothing but such rows.

    barrier        arrivals                                               waits
    ab_full[s]     1, warp 0's expect-tx, plus the stage's bytes          consumer warps
    ab_empty[s]    consumer warps of a tile x CTAs of the cluster         warp 0
    rec_full[i]    1, warp 0                                              the consumer warps of the tile
    rec_empty[i]   consumer warps of the tile                             warp 0
    named 1, 2     ping-pong: the order of the mainloops                  the warpgroup whose turn it is
    named 3, 4     the threads that zero a step's rows                    the same
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from . import mainloop, records, roles, scheduler
from . import primitives as p
from .config import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS, TILE_K, WARPGROUP
from .wgrad_config import OPERAND_COLUMNS, WgradConfig, smem_bytes
from .wgrad_epilogue import WgradEpilogue
from .wgrad_operands import WgradOperands

THREADS = WARPGROUP * (1 + CONSUMERS)
ROW_BYTES = OPERAND_COLUMNS * 2  # one row of 64 columns of an operand in shared memory
ZEROING_BARRIER = 3


@cute.jit
def k_steps(rows: Int32):
    """k steps of an expert's tiles: at least one, so that there is something to multiply."""
    return cutlass.max((rows + (TILE_K - 1)) // TILE_K, Int32(1))


class GroupedGemmWgrad:
    """The kernel of one configuration; `__call__` is the host side that builds descriptors and launches."""

    def __init__(self, config: WgradConfig) -> None:
        self.config = config
        s = self.schedule = config.schedule
        self.operands = WgradOperands(config)
        self.stage_bytes = (s.tile_m + s.tile_n) * TILE_K * 2

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        dy: cute.Tensor,  # (M, N)
        offsets: cute.Tensor,  # (L,)
        dw: cute.Tensor,  # (L, K, N)
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        s, make = self.schedule, self.operands
        smem_a, smem_b, smem_dw = make.layouts()

        @cute.struct
        class Storage:
            ab_full: cute.struct.MemRange[Int64, s.ab_stages]
            ab_empty: cute.struct.MemRange[Int64, s.ab_stages]
            rec_full: cute.struct.MemRange[Int64, scheduler.RECORDS]
            rec_empty: cute.struct.MemRange[Int64, scheduler.RECORDS]
            records: cute.struct.MemRange[Int32, scheduler.RECORDS * scheduler.RECORD_WORDS]
            a: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[make.dtype, cute.cosize(smem_b)], 1024]
            dw: cute.struct.Align[cute.struct.MemRange[make.ring_dtype, cute.cosize(smem_dw)], 1024]

        used, modelled = Storage.size_in_bytes(), smem_bytes(self.config)  # type: ignore[attr-defined]
        assert used <= modelled, f"{used} bytes of shared memory, {modelled} by wgrad_config.smem_bytes"
        self.storage = Storage
        self.kernel(
            *make.load_a(a, smem_a), *make.load_b(dy, smem_b), *make.store_dw(dw), make.tiled_mma(False),
            make.tiled_mma(True), smem_a, smem_b, smem_dw, offsets, dw, cute.size(a, mode=[0]),
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
        atom_dw: cute.CopyAtom,
        coords_dw: cute.Tensor,
        mma_first: cute.TiledMma,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        smem_dw: cute.ComposedLayout,
        offsets: cute.Tensor,
        dw: cute.Tensor,
        rows: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        roles.init_barriers(storage, warp, self.schedule)
        if warp == 0:
            for atom in (atom_a, atom_b, atom_dw):
                cpasync.prefetch_descriptor(atom)
        s_a = storage.a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        s_b = storage.b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        s_dw = storage.dw.get_tensor(smem_dw.outer, swizzle=smem_dw.inner)

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self._feed(storage, (atom_a, coords_a, s_a), (atom_b, coords_b, s_b), offsets, dw, rows)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform(warp // 4 - 1)
            epilogue = WgradEpilogue(self.config, storage, group, warp % 4, (atom_dw, coords_dw, s_dw), dw)
            self._compute(storage, group, mma_first, mma, s_a, s_b, epilogue)

    @cute.jit
    def _feed(self, storage, a, b, offsets: cute.Tensor, dw: cute.Tensor, rows: Int32):
        """Warp 0: one record and one stream of operand stages per tile."""
        s = self.schedule
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % s.cluster_m, rank // s.cluster_m
        # A goes to CTAs of the same rows of dw (ranks cluster_m apart), B to those of the same columns (neighbours).
        row_mask = sum(1 << (i * s.cluster_m) for i in range(s.cluster_n))
        mask_a = cutlass.Int16(row_mask << rank_m) if s.cluster_n > 1 else None
        mask_b = cutlass.Int16(((1 << s.cluster_m) - 1) << (rank_n * s.cluster_m)) if s.cluster_m > 1 else None
        height = cutlass.const_expr(s.tile_m * s.cluster_m)
        width = cutlass.const_expr(s.tile_n * s.cluster_n)
        experts = cute.size(offsets)
        m_tiles = (cute.size(dw, mode=[1]) + (height - 1)) // height
        n_tiles = (cute.size(dw, mode=[2]) + (width - 1)) // width
        per_expert = m_tiles * n_tiles
        tile = cute.arch.block_idx()[0] // s.cluster_size
        step = cute.arch.grid_dim()[0] // s.cluster_size
        stage, phase, count = Int32(0), Int32(0), Int32(0)
        full, empty = storage.ab_full.data_ptr(), storage.ab_empty.data_ptr()
        expert = tile // per_expert
        begin, end = scheduler.rows_of(offsets, cutlass.min(expert, experts - 1), rows)
        while expert < experts:
            m, n = scheduler.order_in_expert(tile - expert * per_expert, m_tiles, n_tiles, s.band)
            m0 = (m * s.cluster_m + rank_m) * s.tile_m
            n0 = (n * s.cluster_n + rank_n) * s.tile_n
            records.write(storage, count, m0, n0, end - begin, expert, stage * 2 + phase)
            count += 1
            k_tiles = k_steps(end - begin)
            first_row = end - k_tiles * TILE_K  # TMA reads zeros before row 0
            # The next tile's rows are asked for before this one's loads, which hide the wait.
            tile += step
            expert = tile // per_expert
            begin, end = scheduler.rows_of(offsets, cutlass.min(expert, experts - 1), rows)
            copy_a = _loads(a, (m0, first_row), s.tile_m, rank_n, s.cluster_n, mask_a)
            copy_b = _loads(b, (n0, first_row), s.tile_n, rank_m, s.cluster_m, mask_b)
            stage, phase = mainloop.load_tile(
                copy_a, copy_b, k_tiles, stage, phase, full, empty, self.stage_bytes, s.ab_stages
            )
        for _ in cutlass.range_constexpr(CONSUMERS if s.pingpong else 1):
            records.write(storage, count, Int32(0), Int32(0), Int32(0), Int32(scheduler.END), Int32(0))
            count += 1
        # Peers may still arrive here and multicast here; wait until every stage has been given back.
        for _ in cutlass.range(s.ab_stages, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            stage, phase = mainloop.next_stage(stage, phase, s.ab_stages)

    @cute.jit
    def _compute(
        self, storage, group: Int32, mma_first: cute.TiledMma, mma: cute.TiledMma, s_a: cute.Tensor, s_b: cute.Tensor,
        epilogue,
    ):  # fmt: skip
        """A consumer warpgroup: mainloop and epilogue of its tiles. Where in the ring of stages a tile begins follows
        from the lengths of all before it, and stands in its record."""
        s = self.schedule
        thread = group * WARPGROUP if cutlass.const_expr(not s.pingpong) else Int32(0)
        mma_slice = mma.get_slice(thread)
        frag_a = mma.make_fragment_A(mma_slice.partition_A(s_a))
        frag_b = mma.make_fragment_B(mma_slice.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((s.tile_m, s.tile_n)), Float32)
        full, empty = storage.ab_full.data_ptr(), storage.ab_empty.data_ptr()
        shares = mainloop.shares_of_lane(s.cluster_m, s.cluster_n)
        used = Int32(0)
        tile = group if cutlass.const_expr(s.pingpong) else Int32(0)
        stride = CONSUMERS if cutlass.const_expr(s.pingpong) else 1
        if cutlass.const_expr(s.pingpong):
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP)

        def hand_over():
            if cutlass.const_expr(s.pingpong):
                cute.arch.barrier_arrive(barrier_id=2 - group, number_of_threads=CONSUMERS * WARPGROUP)

        m0, n0, rows, expert, place = records.read_with_slot(storage, tile)
        while expert != scheduler.END:
            k_tiles = k_steps(rows)

            def zero_foreign(stage, foreign=k_tiles * TILE_K - rows):
                self._zero_rows(storage, group, stage, foreign)

            if cutlass.const_expr(s.pingpong):
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=CONSUMERS * WARPGROUP)
            mainloop.multiply_tile(
                mma_first, mma, acc, frag_a, frag_b, k_tiles, place >> 1, place & 1, full, empty, s.ab_stages, shares,
                hand_over, zero_foreign,
            )  # fmt: skip
            # A gradient that is added to keeps its bits where there is nothing to add.
            if cutlass.const_expr(not self.config.accumulate) or rows > 0:
                used = epilogue.run(acc, m0, n0, expert, used)
            tile += stride
            m0, n0, rows, expert, place = records.read_with_slot(storage, tile)
        # Shared memory must outlive the stores that read it.
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def _zero_rows(self, storage, group: Int32, stage: Int32, count: Int32):
        """Zeros over the first `count` rows of a stage of both operands, before wgmma reads it."""
        s = self.schedule
        threads = cutlass.const_expr(WARPGROUP if s.pingpong else CONSUMERS * WARPGROUP)
        if count > 0:
            thread = cute.arch.thread_idx()[0] % threads
            for field, columns in ((storage.a, s.tile_m), (storage.b, s.tile_n)):
                base = field.data_ptr().toint() + stage * (columns * TILE_K * 2)
                for block in cutlass.range_constexpr(columns // OPERAND_COLUMNS):
                    for at in cutlass.range(thread * 16, count * ROW_BYTES, threads * 16, unroll=1):
                        p.store_shared_v4(base + block * (TILE_K * ROW_BYTES) + at, [Uint32(0)] * 4)
            cute.arch.fence_proxy("async.shared", space="cta")
            barrier = ZEROING_BARRIER + group if cutlass.const_expr(s.pingpong) else ZEROING_BARRIER
            cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def _loads(operand, origin, columns: int, rank, slices: int, mask):
    """The function that starts a k step's load of one operand, (copy atom, coordinates, stages), whose tile begins at
    `origin`: `(k, stage, barrier)`."""
    atom, coords, shared = operand
    source = cute.local_tile(cute.domain_offset(origin, coords), (columns, TILE_K), (0, None))
    part, tile = cpasync.tma_partition(
        atom, rank, cute.make_layout(slices), cute.group_modes(shared, 0, 2), cute.group_modes(source, 0, 2)
    )

    def copy(k, at, barrier):
        cute.copy(atom, tile[None, k], part[None, at], tma_bar_ptr=barrier, mcast_mask=mask)

    return copy
