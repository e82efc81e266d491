"""Zeros in the swizzled scales that belong to no expert's rows: those past the last offset, and up to a whole atom.

An atom is 128 rows x 4 blocks of the scale matrix, 512 bytes. Groups begin on atoms, so what lies outside them is whole
atoms: behind the last group's in the scales of rows, and in those of columns behind it in every row of atoms. With
2N a multiple of 128 the matrices have no padding along it, and every byte is written by somebody.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import primitives as p

ATOM_ROWS = 128
ATOM_BYTES = 512


@cute.jit
def zero_row_scales(scales: cute.Tensor, last: Int32, rows: Int32, columns: Int32, warp: Int32,
                    warps: cutlass.Constexpr):
    """(M, 2N / 32) scales of row blocks; `last` offset, 0 to M, `columns` N. `warps` warps of every CTA share the
    atoms."""
    across = (columns // 16 + 3) // 4
    first, count = _atoms(last), _atoms(rows)
    _zero_atoms(scales, first * across, Int32(1), (count - first) * across, Int32(0), warp, warps)


@cute.jit
def zero_column_scales(scales: cute.Tensor, last: Int32, rows: Int32, columns: Int32, warp: Int32,
                       warps: cutlass.Constexpr):
    """(2N, M / 32) scales of column blocks: the same."""
    first, count = _atoms(last), _atoms(rows)
    _zero_atoms(scales, first, _atoms(columns * 2), count - first, count, warp, warps)


@cute.jit
def _atoms(rows: Int32):
    return (rows + (ATOM_ROWS - 1)) // ATOM_ROWS


@cute.jit
def _zero_atoms(scales: cute.Tensor, first: Int32, runs: Int32, length: Int32, pitch: Int32, warp: Int32,
                warps: cutlass.Constexpr):
    """`runs` times `length` atoms, each run `pitch` atoms behind the one before; an atom a warp and step."""
    mine = cute.arch.block_idx()[0] * warps + warp
    base = scales.iterator.toint() + cute.arch.lane_idx() * 16
    for run in cutlass.range(runs, unroll=1):
        for at in cutlass.range(mine, length, cute.arch.grid_dim()[0] * warps, unroll=1):
            p.store_global(base + Int64(first + run * pitch + at) * ATOM_BYTES, [Uint32(0)] * 4)
