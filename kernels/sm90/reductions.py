"""Sums and maxima over an expert's rows: partials of a tile, and the small kernel that adds them up.

Every partial has a place of its own and the sums run in a fixed order, so the results repeat bit by bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import primitives as p
from .config import CHUNK_N, WARPGROUP
from .scheduler import cluster_tiles_m, rows_of


def _fold(values, lane, step_lane: int):
    """Halves a list of partial sums across lanes `step_lane` apart: each lane keeps the half that its bit chooses."""
    keep_high = (lane & step_lane) != 0
    half = len(values) // 2
    out = []
    for low, high in zip(values[:half], values[half:], strict=True):
        mine = p.select(keep_high, high, low)
        theirs = p.select(keep_high, low, high)
        out.append(mine + cute.arch.shuffle_sync_bfly(theirs, step_lane))
    return out


@cute.jit
def store_column_sums(sums: cute.Tensor, scratch, group: Int32, warp: Int32, parts: cute.Tensor,
                      slot: Int32, n0: Int32, columns: Int32, glu_layout: cutlass.Constexpr,
                      pingpong: cutlass.Constexpr):
    """Adds 16 column sums a lane over the warp's rows and the warpgroup's warps; writes 64 columns of partials.

    Lane (8 rows apart in lane//4) holds columns 8*j + 2*(lane%4) + i at index 2*j + i, gate first, up from 8 on.
    Two warpgroups that share a tile write to halves of the slot's rows: parts is (slots * groups, 2N).
    """
    values, lane = [sums[i] for i in range(16)], p.fresh_lane()
    for step in (16, 8, 4):
        values = _fold(values, lane, step)
    # Index bits left to right were chosen by lane bits 4, 3, 2: side, j // 2, j % 2.
    side, j = (lane >> 4) & 1, ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1)
    column = 8 * j + 2 * (lane & 3)
    area = scratch + group * (4 * 2 * CHUNK_N * 4)
    at = area + warp * (2 * CHUNK_N * 4) + (side * CHUNK_N + column) * 4
    p.store_shared_f32(at, values[0])
    p.store_shared_f32(at + 4, values[1])
    cute.arch.barrier(barrier_id=4 + group, number_of_threads=WARPGROUP)
    thread = warp * 32 + lane
    if thread < 2 * CHUNK_N:
        total = Float32(0.0)
        for w in cutlass.range_constexpr(4):
            total += p.load_shared_f32(area + (w * 2 * CHUNK_N + thread) * 4)
        part = slot if cutlass.const_expr(pingpong) else slot * 2 + group
        half, within = thread // CHUNK_N, thread % CHUNK_N
        parts[part, column_of(glu_layout, n0 + within, half, columns)] = total
    cute.arch.barrier(barrier_id=4 + group, number_of_threads=WARPGROUP)


def column_of(glu_layout: str, n, side, columns):
    """Column of C and D that holds gate (side 0) or up (side 1) of compact column n."""
    if glu_layout == "concatenated":
        return n + side * columns
    if glu_layout == "interleaved1":
        return n * 2 + side
    return ((n >> 5) << 6) + (n & 31) + side * CHUNK_N


@cute.jit
def store_peaks(peak: cute.Tensor, parts: cute.Tensor, slot: Int32, n_tile: Int32, group: Int32, warp: Int32,
                pingpong: cutlass.Constexpr):
    """The warp's largest |dgate| and |dup|: parts is (M tiles, N tiles * warps a tile * 2)."""
    warps = cutlass.const_expr(4 if pingpong else 8)
    writer = warp if cutlass.const_expr(pingpong) else group * 4 + warp
    for side in cutlass.range_constexpr(2):
        value = peak[side]
        for step in cutlass.range_constexpr(5):
            value = p.max_nan(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
        if cute.arch.lane_idx() == 0:
            parts[slot, (n_tile * warps + writer) * 2 + side] = value


FINISH_THREADS = 256


class Finish:
    """The kernel that adds partials up: one CTA per 256 rows for dprob, per (expert, 32 columns) for dbias, per expert
    for amax. Partials of rows past the last offset do not exist; their dprob is zero.

    Not the last CTA of a row block: that needs counters which are zero at the start and belong to one launch alone, and
    a captured launch repeats its arguments, on two streams at once if two graphs hold it. Instead the kernel is placed
    while the other still runs (programmatic dependent launch), and waits for its end.
    """

    def __init__(self, config) -> None:
        self.config = config
        s = config.schedule
        self.step_m = s.tile_m * s.cluster_m
        self.parts_a_slot = 1 if s.pingpong else 2

    @cute.jit
    def __call__(self, offsets, dprob_parts, dprob, dbias_parts, dbias, amax_parts, amax, rows: Int32, columns: Int32,
                 stream):
        experts = cute.size(offsets)
        row_blocks = Int32(0)
        if cutlass.const_expr(dprob is not None):
            row_blocks = (rows + FINISH_THREADS - 1) // FINISH_THREADS
            if cute.size(dprob_parts, mode=[0]) == 1:
                row_blocks = Int32(0)  # the one partial of a row is dprob itself
        groups = columns // 32
        sum_blocks = experts * groups if cutlass.const_expr(dbias is not None) else Int32(0)
        peak_blocks = experts if cutlass.const_expr(amax is not None) else Int32(0)
        self.kernel(offsets, dprob_parts, dprob, dbias_parts, dbias, amax_parts, amax, rows, groups, row_blocks,
                    sum_blocks).launch(
            grid=[row_blocks + sum_blocks + peak_blocks, 1, 1], block=[FINISH_THREADS, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, offsets, dprob_parts, dprob, dbias_parts, dbias, amax_parts, amax, rows: Int32, groups: Int32,
               row_blocks: Int32, sum_blocks: Int32):
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        shared = cutlass.memory.SmemAllocator().allocate_array(Float32, FINISH_THREADS * 2)
        if block < row_blocks:
            if cutlass.const_expr(dprob is not None):
                self._rows(offsets, dprob_parts, dprob, block * FINISH_THREADS + thread, rows)
        elif block < row_blocks + sum_blocks:
            if cutlass.const_expr(dbias is not None):
                index = block - row_blocks
                self._columns(offsets, dbias_parts, dbias, shared, index // groups, rows, index % groups * 32, thread)
        else:
            if cutlass.const_expr(amax is not None):
                self._peaks(offsets, amax_parts, amax, shared, block - row_blocks - sum_blocks, rows, thread)

    @cute.jit
    def _rows(self, offsets, parts, dprob, row: Int32, rows: Int32):
        if row < rows:
            total = Float32(0.0)
            if row < offsets[cute.size(offsets) - 1]:
                for i in cutlass.range(cute.size(parts, mode=[0])):
                    total += parts[i, row]
            dprob[row] = total

    @cute.jit
    def _slots(self, offsets, expert: Int32, rows: Int32, shared, thread: Int32):
        """(first partial slot, slots) of an expert: every thread adds up some experts before it.

        No more slots than there are, should the offsets descend.
        """
        before = Int32(0)
        for i in cutlass.range((expert + FINISH_THREADS - 1) // FINISH_THREADS):
            e = i * FINISH_THREADS + thread
            if e < expert:
                before += self._tiles(offsets, e, rows)
        words = cute.recast_ptr(shared, dtype=Int32)
        table = cute.make_tensor(words, cute.make_layout(FINISH_THREADS))
        for step in cutlass.range_constexpr(5):
            before += cute.arch.shuffle_sync_bfly(before, 1 << step)
        if thread % 32 == 0:
            table[thread // 32] = before
        cute.arch.sync_threads()
        total = Int32(0)
        for w in cutlass.range_constexpr(FINISH_THREADS // 32):
            total += table[w]
        cute.arch.sync_threads()
        most = rows // self.step_m + cute.size(offsets)
        total = cutlass.min(total, most)
        per_tile = self.config.schedule.cluster_m * self.parts_a_slot
        return total * per_tile, cutlass.min(self._tiles(offsets, expert, rows), most - total) * per_tile

    @cute.jit
    def _tiles(self, offsets, expert: Int32, rows: Int32):
        begin, end = rows_of(offsets, expert, rows)
        return cluster_tiles_m(end - begin, self.config.schedule.tile_m, self.config.schedule.cluster_m)

    @cute.jit
    def _columns(self, offsets, parts, dbias, shared, expert: Int32, rows: Int32, column: Int32, thread: Int32):
        """32 columns of an expert: 8 warps take every eighth slot, then their sums are added in order."""
        first, slots = self._slots(offsets, expert, rows, shared, thread)
        lane, warp = thread % 32, thread // 32
        total = Float32(0.0)
        for i in cutlass.range((slots - warp + 7) // 8):
            slot = first + warp + i * 8
            if self._written(offsets, expert, rows, slot - first):
                total += parts[slot, column + lane]
        table = cute.make_tensor(shared, cute.make_layout(FINISH_THREADS))
        table[thread] = total
        cute.arch.sync_threads()
        if warp == 0:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(FINISH_THREADS // 32):
                total += table[w * 32 + lane]
            dbias[expert, column + lane] = total.to(dbias.element_type)

    @cute.jit
    def _written(self, offsets, expert: Int32, rows: Int32, slot: Int32):
        """Whether the tile of a slot has rows: the last cluster tile of an expert may have CTAs without any."""
        begin, end = rows_of(offsets, expert, rows)
        return (slot // self.parts_a_slot) * self.config.schedule.tile_m < end - begin

    @cute.jit
    def _peaks(self, offsets, parts, amax, shared, expert: Int32, rows: Int32, thread: Int32):
        first, slots = self._slots(offsets, expert, rows, shared, thread)
        tiles = slots // self.parts_a_slot
        width = cute.size(parts, mode=[1])
        peak = Float32(0.0)
        # Even threads take gate, odd ones up: partials alternate.
        for i in cutlass.range(tiles):
            if self._written(offsets, expert, rows, i * self.parts_a_slot):
                for j in cutlass.range((width - thread + FINISH_THREADS - 1) // FINISH_THREADS):
                    peak = p.max_nan(peak, parts[first // self.parts_a_slot + i, thread + j * FINISH_THREADS])
        for step in cutlass.range_constexpr(1, 5):
            peak = p.max_nan(peak, cute.arch.shuffle_sync_bfly(peak, 1 << step))
        table = cute.make_tensor(shared, cute.make_layout(FINISH_THREADS))
        if thread % 32 < 2:
            table[(thread // 32) * 2 + thread % 32] = peak
        cute.arch.sync_threads()
        if thread < 2:
            for w in cutlass.range_constexpr(FINISH_THREADS // 32):
                peak = p.max_nan(peak, table[w * 2 + thread])
            amax[expert, thread] = peak
