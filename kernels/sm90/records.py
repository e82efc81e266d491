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
    words = (row, n0, end, expert)
    write_words(storage, count, words if cutlass.const_expr(slot is None) else (*words, slot))


@cute.jit
def write_words(storage, count: Int32, words):
    """The same of a kernel whose records have other words."""
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_empty.data_ptr() + i, ((count >> log2(RECORDS)) & 1) ^ 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    if cute.arch.lane_idx() == 0:
        for place, word in enumerate(words):
            p.store_shared_i32(at + 4 * place, word)
        cute.arch.mbarrier_arrive(storage.rec_full.data_ptr() + i)
    cute.arch.sync_warp()


@cute.jit
def read(storage, count: Int32):
    """(row, n0, row end, expert) of the `count`-th tile; gives the record back."""
    return read_words(storage, count, 4)


@cute.jit
def read_with_slot(storage, count: Int32):
    """(row, n0, row end, expert, slot) of the `count`-th tile; gives the record back."""
    return read_words(storage, count, 5)


@cute.jit
def read_words(storage, count: Int32, words: cutlass.Constexpr):
    """The first `words` words of the `count`-th record; gives it back."""
    i = count & (RECORDS - 1)
    cute.arch.mbarrier_wait(storage.rec_full.data_ptr() + i, (count >> log2(RECORDS)) & 1)
    at = storage.records.data_ptr().toint() + i * (RECORD_WORDS * 4)
    read = tuple(cute.arch.make_warp_uniform(p.load_shared_i32(at + 4 * place)) for place in range(words))
    _give_back(storage, count)
    return read


@cute.jit
def _give_back(storage, count: Int32):
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(storage.rec_empty.data_ptr() + (count & (RECORDS - 1)))
