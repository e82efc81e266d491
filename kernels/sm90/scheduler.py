"""Tile scheduler: which tile of which expert a cluster computes next, from end offsets that live on the device.

One warp walks the experts; every lane holds one expert of a window of 32, so that a step is a ballot and four
shuffles instead of a chain of dependent loads. The result travels to the other warps as a record of
`RECORD_WORDS` 32-bit words in a small ring in shared memory.

Order inside an expert: bands of `band` N tiles; inside a band N is fastest, so that the clusters at work at one
moment share a near-square patch of dy rows and weight columns in L2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

RECORD_WORDS = 8  # row, column, row_end, expert, partial slot, 3 unused: one 32-byte record
RECORDS = 4  # the producer may run this many tiles ahead of the slowest reader
END = -1  # expert of the record that says "no more tiles"


def cluster_tiles_m(rows, tile_m: int, cluster_m: int):
    """Cluster tiles that cover an expert's rows."""
    return (rows + (tile_m * cluster_m - 1)) // (tile_m * cluster_m)


@cute.jit
def rows_of(offsets: cute.Tensor, expert: Int32, rows: Int32):
    """(first row, end row) of an expert: inside the tensor whatever the offsets say, and none where they descend."""
    begin = Int32(0)
    if expert > 0:
        begin = cutlass.max(cutlass.min(offsets[expert - 1], rows), begin)
    return begin, cutlass.max(cutlass.min(offsets[expert], rows), begin)


@cute.jit
def load_window(
    offsets: cute.Tensor, base: Int32, experts: Int32, rows: Int32, tile_m: cutlass.Constexpr,
    cluster_m: cutlass.Constexpr, taken: Int32 = 0,
):  # fmt: skip
    """This lane's expert of the window at `base`: (first row, end row, cluster tiles in M, their inclusive prefix).

    `taken` rows belong to earlier experts. An expert begins where the largest end offset before it lies: groups never
    overlap, so that tiles and partial slots are as few as their buffers have room for, whatever the offsets say.
    """
    lane = cute.arch.lane_idx()
    expert = base + lane
    end = Int32(taken)
    if expert < experts:
        end = cutlass.max(cutlass.min(offsets[expert], rows), end)
    for step in cutlass.range_constexpr(5):
        end = cutlass.max(end, cute.arch.shuffle_sync_up(end, 1 << step))  # a lane without a source reads itself
    begin = cute.arch.shuffle_sync_up(end, 1)
    if lane == 0:
        begin = Int32(taken)
    tiles = cluster_tiles_m(end - begin, tile_m, cluster_m)
    prefix = tiles
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(prefix, 1 << step)
        if lane >= (1 << step):
            prefix += other
    return begin, end, tiles, prefix


@cute.jit
def locate(
    tile: Int32,
    offsets: cute.Tensor,
    experts: Int32,
    rows: Int32,
    tiles_n: Int32,  # cluster tiles in N
    state,  # (base, tiles in M before the window, begin, end, tiles, prefix)
    tile_m: cutlass.Constexpr,
    cluster_m: cutlass.Constexpr,
):
    """Finds the expert of a cluster tile; tiles must be asked for in ascending order.

    Returns (found, expert, first row, end row, tile inside the expert, its M tiles, M tiles before it, state).
    """
    base, before, begin, end, tiles, prefix = state
    total = before + cute.arch.shuffle_sync(prefix, 31)
    while tile >= total * tiles_n and base + 32 < experts:
        base += 32
        before = total
        taken = cute.arch.shuffle_sync(end, 31)
        begin, end, tiles, prefix = load_window(offsets, base, experts, rows, tile_m, cluster_m, taken)
        total = before + cute.arch.shuffle_sync(prefix, 31)
    past = cute.arch.vote_ballot_sync((before + prefix) * tiles_n > tile)
    # The first lane whose prefix passes the tile: bits below the lowest set one.
    owner = cute.arch.popc((past & -past) - 1)
    m_tiles = cute.arch.shuffle_sync(tiles, owner)
    m_before = before + cute.arch.shuffle_sync(prefix, owner) - m_tiles
    first = cute.arch.shuffle_sync(begin, owner)
    last = cute.arch.shuffle_sync(end, owner)
    return (
        past != 0,
        base + owner,
        first,
        last,
        tile - m_before * tiles_n,
        m_tiles,
        m_before,
        (base, before, begin, end, tiles, prefix),
    )


@cute.jit
def order_in_expert(tile: Int32, m_tiles: Int32, tiles_n: Int32, band: cutlass.Constexpr):
    """(M tile, N tile) of a tile inside its expert, band by band."""
    per_band = m_tiles * band
    index = tile // per_band
    rest = tile - index * per_band
    width = cutlass.min(Int32(band), tiles_n - index * band)
    m = rest // width
    return m, index * band + rest - m * width
