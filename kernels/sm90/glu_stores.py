"""How h and the activation leave: through a ring of chunks in shared memory, each warp its own 16 rows.

A box is 64 rows x 64 or 32 columns of 16-bit values, swizzled as TMA reads it. A chunk, 64 rows x 32 columns of the
activation, is a 32-column box of it and, for h, one 64-column box, or two 32-column boxes where gate and up columns lie
far apart. Words are those of a wgmma accumulator: of 8 columns, row lane // 4 + 8 * r, columns 2 * (lane % 4) + {0, 1}.
"""

from __future__ import annotations

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from . import primitives as p
from . import stores
from .stores import WARP_ROWS


class Box:
    """Addresses of one warp's rows in a box."""

    def __init__(self, columns: int, warp, lane) -> None:
        low = lane & 7
        row = warp * WARP_ROWS + low + ((lane >> 3) & 1) * 8
        if columns == 64:
            self.offset = row * 128 + (((lane >> 4) ^ low) << 4)
        else:
            self.offset = row * 64 + (((lane >> 4) ^ (low >> 1)) << 4)

    def write(self, base, sixteen: int, words) -> None:
        """16 columns, the `sixteen`-th of the box: words of 8 columns by row half, then of the next 8."""
        p.stmatrix4((base + self.offset) ^ (sixteen << 5), words)


class NarrowBox:
    """A 32-column box written from one value a lane, as interleaved1 leaves the activation: lane % 4 is its column of
    4. Two neighbouring lanes trade values, so that each writes a word of two columns."""

    def __init__(self, warp, lane) -> None:
        quad, pos = lane >> 2, lane & 3
        pair = (pos >> 1) | ((pos & 1) << 1)
        self.offset = (warp * WARP_ROWS + quad) * 64 + ((quad >> 1) << 4) + pair * 4
        # Even lanes keep the low halves (the first 4 columns), odd ones the high halves.
        self.selector = p.select((pos & 1) == 0, Uint32(0x5410), Uint32(0x3276))

    def write(self, base, eight: int, r: int, word) -> None:
        """8 columns of one row half: `word` has this lane's value of the first 4 columns, and of the next 4."""
        other = Uint32(cute.arch.shuffle_sync_bfly(word, 1))
        at = ((base + self.offset) ^ (eight << 4)) + r * 512
        p.store_shared_i32(at, p.byte_permute_by(word, other, self.selector))


def store_whole(atom, coords, boxes, index, columns: int, warp, row, column) -> None:
    """One warp's rows of a box by TMA, all of which are the expert's."""
    tile = (WARP_ROWS, columns)
    target = cute.local_tile(cute.domain_offset((row, column), coords), tile, (0, 0))
    source = cute.local_tile(boxes[None, None, index], tile, (warp, 0))
    part, place = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
    )
    cute.copy(atom, part, place, cache_policy=cutlass.Int64(stores.STREAM))


@cute.jit
def store_box(
    atom: cute.CopyAtom,
    coords: cute.Tensor,
    boxes: cute.Tensor,
    index: Int32,
    base,
    tensor: cute.Tensor,
    columns: cutlass.Constexpr,
    warp: Int32,
    row: Int32,
    row_end: Int32,
    column: Int32,
    limit: Optional[Int32] = None,
):
    """One warp's rows of a box: by TMA when all are the expert's, row by row when its last row is among them. `limit`,
    where a box may reach past it, is where the columns end: a multiple of 8."""
    if row + WARP_ROWS <= row_end:
        store_whole(atom, coords, boxes, index, columns, warp, row, column)
    elif row < row_end:
        _copy_rows(base, columns, warp, tensor, row, row_end, column, limit)


@cute.jit
def _copy_rows(
    base, columns: cutlass.Constexpr, warp: Int32, tensor: cute.Tensor, row: Int32, row_end: Int32, column: Int32,
    limit: Optional[Int32],
):  # fmt: skip
    """16 bytes a lane and step, rows before `row_end` and columns before `limit` only."""
    lane = p.fresh_lane()
    per_row = cutlass.const_expr(columns // 8)
    rows_a_step = cutlass.const_expr(32 // per_row)
    for step in cutlass.range_constexpr(WARP_ROWS // rows_a_step):
        r, piece = step * rows_a_step + lane // per_row, lane % per_row
        swizzle = (r & 7) if cutlass.const_expr(per_row == 8) else ((r >> 1) & 3)
        at = base + (warp * WARP_ROWS + r) * (per_row * 16) + ((piece ^ swizzle) << 4)
        inside = row + r < row_end
        if cutlass.const_expr(limit is not None):
            inside = inside & (column + piece * 8 < limit)
        if inside:
            p.store_global(p.row_address(tensor, row + r, column + piece * 8), p.load_shared_v4(at))
