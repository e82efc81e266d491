"""What the warps of both kernels do alike: the barriers that they meet at, and the loop of those that compute."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import mainloop, records, scheduler
from .config import CONSUMERS, WARPGROUP


def consumer_warps(schedule) -> int:
    """Warps that work on one tile."""
    return 4 if schedule.pingpong else 4 * CONSUMERS


@cute.jit
def init_barriers(
    storage,
    warp: Int32,
    schedule: cutlass.Constexpr,
    other_readers: cutlass.Constexpr = 0,
    rings: cutlass.Constexpr = (),
):
    """Warp 0 sets up the mbarriers that `storage` has, then all threads of the cluster meet. `other_readers` are the
    warps that read records beside a tile's consumers; `rings` the barriers beside those of operand stages and records,
    as (field, count, arrivals)."""
    if warp == 0:
        with cute.arch.elect_one():
            warps = consumer_warps(schedule)
            sharing = mainloop.sharing_ctas(schedule.cluster_m, schedule.cluster_n)
            _init_array(storage.ab_full, schedule.ab_stages, 1)
            _init_array(storage.ab_empty, schedule.ab_stages, warps * sharing)
            for field, count, arrivals in rings:
                _init_array(getattr(storage, field), count, arrivals)
            _init_array(storage.rec_full, scheduler.RECORDS, 1)
            _init_array(storage.rec_empty, scheduler.RECORDS, warps + other_readers)
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(schedule.cluster_size > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def _init_array(field, count: int, arrivals: int):
    for i in range(count):
        cute.arch.mbarrier_init(field.data_ptr() + i, arrivals)


def _read(storage, tile, has_slots: bool):
    if has_slots:
        return records.read_with_slot(storage, tile)
    row, n0, end, expert = records.read(storage, tile)
    return row, n0, end, expert, expert


@cute.jit
def compute(
    storage,
    schedule: cutlass.Constexpr,
    group: Int32,
    mma_first: cute.TiledMma,
    mma: cute.TiledMma,
    s_a: cute.Tensor,
    s_b: cute.Tensor,
    k_tiles: Int32,
    columns: Int32,
    epilogue,
    has_slots: cutlass.Constexpr,
):
    """A consumer warpgroup: mainloop and epilogue of its tiles, whose `n0` are before `columns`. The epilogue learns
    the tile's slot, or its expert where there are none."""
    s = schedule
    thread = group * WARPGROUP if cutlass.const_expr(not s.pingpong) else Int32(0)
    mma_slice = mma.get_slice(thread)
    frag_a = mma.make_fragment_A(mma_slice.partition_A(s_a))
    frag_b = mma.make_fragment_B(mma_slice.partition_B(s_b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((s.tile_m, s.tile_n)), Float32)
    full, empty = storage.ab_full.data_ptr(), storage.ab_empty.data_ptr()
    shares = mainloop.shares_of_lane(s.cluster_m, s.cluster_n)
    stage, phase, used = Int32(0), Int32(0), Int32(0)
    tile = group if cutlass.const_expr(s.pingpong) else Int32(0)
    stride = CONSUMERS if cutlass.const_expr(s.pingpong) else 1
    if cutlass.const_expr(s.pingpong):
        if group == 1:
            stage, phase = mainloop.skip_stages(stage, phase, k_tiles, s.ab_stages)
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=CONSUMERS * WARPGROUP)

    def hand_over():
        if cutlass.const_expr(s.pingpong):
            cute.arch.barrier_arrive(barrier_id=2 - group, number_of_threads=CONSUMERS * WARPGROUP)

    row, n0, end, expert, slot = _read(storage, tile, has_slots)
    while expert != scheduler.END:
        epilogue.begin_tile(row, end, expert)
        if cutlass.const_expr(s.pingpong):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=CONSUMERS * WARPGROUP)
        stage, phase = mainloop.multiply_tile(
            mma_first, mma, acc, frag_a, frag_b, k_tiles, stage, phase, full, empty, s.ab_stages, shares, hand_over
        )
        if cutlass.const_expr(s.pingpong):
            stage, phase = mainloop.skip_stages(stage, phase, k_tiles, s.ab_stages)
        # A cluster's last tile in M or N may lie past the expert's rows or past the columns.
        if row < end and n0 < columns:
            used = epilogue.run(acc, row, n0, end, slot, used)
        tile += stride
        row, n0, end, expert, slot = _read(storage, tile, has_slots)
    # Shared memory must outlive the stores that read it.
    cute.arch.cp_async_bulk_wait_group(0, read=False)
