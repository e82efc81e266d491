"""Tile records: what the scheduler warp tells the warps that work on a tile, through a small ring in shared memory.

`storage` has rec_full, rec_empty (mbarriers, RECORDS each) and records (RECORDS x RECORD_WORDS words).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from . import primitives as p
from .config import log2
from .scheduler import RECORD_WORDS, RECORDS


@cute.jit
def write(storage, count: Int32, row: Int32, n0: Int32, end: Int32, expert: Int32):
    """Scheduler warp: the record of its `count`-th tile, once its readers have given the place back."""
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_empty.data_ptr() + i, ((count >> log2(RECORDS)) & 1) ^ 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    if cute.arch.lane_idx() == 0:
        p.store_shared_i32(at, row)
        p.store_shared_i32(at + 4, n0)
        p.store_shared_i32(at + 8, end)
        p.store_shared_i32(at + 12, expert)
        cute.arch.mbarrier_arrive(storage.rec_full.data_ptr() + i)
    cute.arch.sync_warp()


@cute.jit
def read(storage, count: Int32):
    """(row, n0, row end, expert) of the `count`-th tile; gives the record back."""
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_full.data_ptr() + i, (count >> log2(RECORDS)) & 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    row = cute.arch.make_warp_uniform(p.load_shared_i32(at))
    n0 = cute.arch.make_warp_uniform(p.load_shared_i32(at + 4))
    end = cute.arch.make_warp_uniform(p.load_shared_i32(at + 8))
    expert = cute.arch.make_warp_uniform(p.load_shared_i32(at + 12))
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(storage.rec_empty.data_ptr() + i)
    return row, n0, end, expert
