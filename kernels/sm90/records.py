"""Tile records: what the scheduler warp tells the warps that work on a tile, through a small ring in shared memory.

`storage` has rec_full, rec_empty (mbarriers, RECORDS each) and records (RECORDS x RECORD_WORDS words).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import primitives as p
from .config import log2
from .scheduler import RECORD_WORDS, RECORDS


@cute.jit
def write(storage, count: Int32, row: Int32, n0: Int32, end: Int32, expert: Int32, slot=None):
    """Scheduler warp: the record of its `count`-th tile, once its readers have given the place back. `slot`, in a
    kernel that has any, is where the tile's partial sums lie."""
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_empty.data_ptr() + i, ((count >> log2(RECORDS)) & 1) ^ 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    if cute.arch.lane_idx() == 0:
        p.store_shared_i32(at, row)
        p.store_shared_i32(at + 4, n0)
        p.store_shared_i32(at + 8, end)
        p.store_shared_i32(at + 12, expert)
        if cutlass.const_expr(slot is not None):
            p.store_shared_i32(at + 16, slot)
        cute.arch.mbarrier_arrive(storage.rec_full.data_ptr() + i)
    cute.arch.sync_warp()


@cute.jit
def read(storage, count: Int32):
    """(row, n0, row end, expert) of the `count`-th tile; gives the record back."""
    row, n0, end, expert, _ = _words(storage, count)
    _give_back(storage, count)
    return row, n0, end, expert


@cute.jit
def read_with_slot(storage, count: Int32):
    """(row, n0, row end, expert, slot) of the `count`-th tile; gives the record back."""
    row, n0, end, expert, at = _words(storage, count)
    slot = cute.arch.make_warp_uniform(p.load_shared_i32(at + 16))
    _give_back(storage, count)
    return row, n0, end, expert, slot


@cute.jit
def _words(storage, count: Int32):
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_full.data_ptr() + i, (count >> log2(RECORDS)) & 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    row = cute.arch.make_warp_uniform(p.load_shared_i32(at))
    n0 = cute.arch.make_warp_uniform(p.load_shared_i32(at + 4))
    end = cute.arch.make_warp_uniform(p.load_shared_i32(at + 8))
    expert = cute.arch.make_warp_uniform(p.load_shared_i32(at + 12))
    return row, n0, end, expert, at


@cute.jit
def _give_back(storage, count: Int32):
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(storage.rec_empty.data_ptr() + (count & (RECORDS - 1)))
