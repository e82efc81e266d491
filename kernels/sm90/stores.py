"""The C/D ring: how one chunk of the pre-activation lies in shared memory, and how its gradient leaves through it.

A chunk is 64 rows x 32 compact columns of one warpgroup: 64 columns of C. The gradient is written over the
pre-activation that it was computed from, in the same place, so that C and D share one buffer; each warp owns 16 rows,
reads and writes only those, and stores them itself, so the epilogue needs no barrier between warps.

A `Ring` translates (GLU layout, lane) to shared-memory addresses. Per half of a chunk (16 compact columns) a lane
holds 4 words of gate and 4 of up; word 2*j + r is row lane//4 + 8*r, columns 8*j + 2*(lane%4) + {0, 1}: the layout of
a wgmma accumulator.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import primitives as p
from .config import CHUNK_M, CHUNK_N

CHUNK_BYTES = CHUNK_M * 2 * CHUNK_N * 2
HALF_BOX_BYTES = CHUNK_BYTES // 2
WARP_ROWS = 16
PIECE_BYTES = 1024  # a warp's rows of a chunk are two pieces, wherever the layout puts them
# L2 policy "evict first" for C and D, which nobody reads again, so that dy and weights stay: 1 to 5 % on an H200.
STREAM = 0x12F0000000000000
NORMAL = 0x1000000000000000


def box_columns(glu_layout: str) -> int:
    """Columns of C that one TMA box of a chunk covers: 64, or 32 where gate and up columns lie far apart."""
    return CHUNK_N if glu_layout == "concatenated" else 2 * CHUNK_N


def boxes(glu_layout: str) -> int:
    """TMA boxes a chunk."""
    return 2 * CHUNK_N // box_columns(glu_layout)


def box_column(glu_layout: str, n0, columns, box: int):
    """Column of C where a box of the chunk at compact column `n0` begins; `columns` is N."""
    return n0 + columns * box if glu_layout == "concatenated" else n0 * 2


class Ring:
    """Addresses of one warp's rows in a chunk; `base` is the chunk's shared-memory address."""

    def __init__(self, glu_layout: str, warp, lane) -> None:
        self.layout = glu_layout
        self.warp, self.lane = warp, lane
        low = lane & 7
        row = warp * WARP_ROWS + low + ((lane >> 3) & 1) * 8
        if glu_layout == "interleaved32":
            self.offset = row * 128 + (((lane >> 4) ^ low) << 4)
        elif glu_layout == "concatenated":
            self.offset = row * 64 + (((lane >> 4) ^ (low >> 1)) << 4)
        else:
            quad, pos = lane >> 2, lane & 3
            self.offset = (warp * WARP_ROWS + quad) * 128 + (((pos >> 1) ^ quad) << 4) + (pos & 1) * 8

    def pieces(self, base):
        """Addresses of the two areas of PIECE_BYTES that hold this warp's rows of a chunk."""
        if self.layout == "concatenated":
            first = base + self.warp * PIECE_BYTES
            return first, first + HALF_BOX_BYTES
        first = base + self.warp * (2 * PIECE_BYTES)
        return first, first + PIECE_BYTES

    def read(self, base, half: int):
        """(gate words, up words) of half a chunk."""
        at = base + self.offset
        if self.layout == "interleaved32":
            return p.ldmatrix4(at ^ (half << 5)), p.ldmatrix4(at ^ (64 + (half << 5)))
        if self.layout == "concatenated":
            return p.ldmatrix4(at ^ (half << 5)), p.ldmatrix4((at ^ (half << 5)) + HALF_BOX_BYTES)
        gate, up = [None] * 4, [None] * 4
        for j in range(2):
            for r in range(2):
                w0, w1 = p.load_shared_v2((at ^ ((4 * half + 2 * j) << 4)) + r * 1024)
                gate[2 * j + r], up[2 * j + r] = p.byte_permute(w0, w1, 0x5410), p.byte_permute(w0, w1, 0x7632)
        return gate, up

    def write(self, base, half: int, gate, up) -> None:
        """Writes half a chunk of gradient words where `read` found the pre-activation."""
        at = base + self.offset
        if self.layout == "interleaved32":
            p.stmatrix4(at ^ (half << 5), gate)
            p.stmatrix4(at ^ (64 + (half << 5)), up)
        elif self.layout == "concatenated":
            p.stmatrix4(at ^ (half << 5), gate)
            p.stmatrix4((at ^ (half << 5)) + HALF_BOX_BYTES, up)
        else:
            for j in range(2):
                for r in range(2):
                    g, u = gate[2 * j + r], up[2 * j + r]
                    words = (p.byte_permute(g, u, 0x5410), p.byte_permute(g, u, 0x7632))
                    p.store_shared_v2((at ^ ((4 * half + 2 * j) << 4)) + r * 1024, words)


@cute.jit
def store_rows(
    base,
    glu_layout: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    tensor: cute.Tensor,
    row: Int32,
    row_end: Int32,
    n0: Int32,
    columns: Int32,
):
    """Copies one warp's 16 chunk rows from shared to global memory, rows before `row_end` only."""
    per_row = cutlass.const_expr(box_columns(glu_layout) // 8)
    rows_a_step = cutlass.const_expr(32 // per_row)
    for box in cutlass.range_constexpr(boxes(glu_layout)):
        for step in cutlass.range_constexpr(WARP_ROWS // rows_a_step):
            r = step * rows_a_step + lane // per_row
            piece = lane % per_row
            swizzle = (r & 7) if cutlass.const_expr(per_row == 8) else ((r >> 1) & 3)
            at = base + box * HALF_BOX_BYTES + (warp * WARP_ROWS + r) * (per_row * 16) + ((piece ^ swizzle) << 4)
            if row + r < row_end:
                column = box_column(glu_layout, n0, columns, box) + piece * 8
                p.store_global(p.row_address(tensor, row + r, column), p.load_shared_v4(at))


@cute.jit
def zero_rows(tensor: cute.Tensor, first: Int32, rows: Int32, warp: Int32, warps: cutlass.Constexpr):
    """Zeros in the rows from `first` on; `warps` warps of every CTA share them, 16 bytes a lane and step."""
    bytes_a_row = cute.size(tensor, mode=[1]) * (tensor.element_type.width // 8)
    mine = cute.arch.block_idx()[0] * warps + warp
    zero = Uint32(0)
    first = cutlass.min(cutlass.max(first, Int32(0)), rows)
    for row in cutlass.range(first + mine, rows, cute.arch.grid_dim()[0] * warps, unroll=1):
        base = p.row_address(tensor, row, 0)
        for at in cutlass.range(cute.arch.lane_idx() * 16, bytes_a_row, 512, unroll=1):
            p.store_global(base + at, [zero] * 4)


def lane_rows(tensor: cute.Tensor, row, column):
    """Addresses of tensor[row, column] and tensor[row + 8, column]: a lane's two rows of a chunk. Where gate and up lie
    32 or more apart, its other columns are at constant distances from there."""
    first = p.row_address(tensor, row, column)
    return first, first + Int64(tensor.stride[0]) * (8 * tensor.element_type.width // 8)


@cute.jit
def load_pair(address, inside):
    """Two neighbouring float32; zeros outside."""
    first, second = Uint32(0), Uint32(0)
    if cutlass.const_expr(inside is not None):
        if inside:
            first, second = p.load_global_v2(address)
    else:
        first, second = p.load_global_v2(address)
    return p.from_bits(first), p.from_bits(second)


@cute.jit
def store_inside(address, words, inside):
    """Words of a lane's row, if it is the expert's. A branch: with a predicate in its place the compiler moved so much
    of the next chunk up that 50 registers spilled."""
    if cutlass.const_expr(inside is not None):
        if inside:
            p.store_global(address, words)
    else:
        p.store_global(address, words)
