"""MXFP8 of a matrix along rows and columns for Hopper: x is read once, codes and scales of both sides are written.

A CTA of 8 warps takes 128 x 128 values, the area of one atom of either side's scales; a warp takes 32 rows x 64
columns, in which every block of its rows (1 x 32) and columns (32 x 1) is whole. Lane l holds 8 neighbouring columns,
8 * (l % 8) and on, of rows l // 8 + 4 * i: 16 or 32 bytes of x and 8 bytes of codes a row. Per warp:

    1. all of x is loaded; rows and columns past the end read the last ones again, which changes no maximum;
    2. lanes leave partial maxima of their 8 rows and 8 columns in shared memory; each lane then collects those of two
       row blocks and two columns, encodes the scales, and leaves bytes for the CTA and reciprocals for the warp;
    3. codes of both sides leave from registers.

After the CTA's one barrier the scales, which lie in shared memory as atoms, are stored. What a matrix does not fill of
an atom becomes zero: every byte of the scales is written.

Shared memory of a warp, in bytes: row maxima 1024, their factors 256, column maxima 1024, their factors 256.
"""

from __future__ import annotations

from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import primitives as p
from .quantize_config import PIECE, TILE, WARP_TILE, QuantizeConfig
from .quantizer import largest, scale_of

WARPS = 8
ROWS_A_LANE = 8
ROW_PEAKS, ROW_FACTORS, COLUMN_PEAKS, COLUMN_FACTORS, WARP_BYTES = 0, 1024, 1280, 2304, 2560
# CTAs of a multiprocessor at a time: 80 registers a thread hold 32 words of x, and 128 hold 64 (with 80 they spill).
CTAS = {"bf16": 3, "fp16": 3, "fp32": 2}
CARVEOUT = 40  # per cent of a multiprocessor's memory that is to be shared memory: three CTAs take 66 KB of it
ATOM_BYTES = 512
ABSOLUTE = {"bf16": 0x7FFF7FFF, "fp16": 0x7FFF7FFF, "fp32": 0x7FFFFFFF}


class Tile:
    """What the threads of one CTA do. Rows and columns are those of x; `exchange` and `atoms` are shared memory: areas
    of WARP_BYTES for each warp, and the row side's atom before the column side's."""

    def __init__(self, config: QuantizeConfig, x, row_side, col_side, tile, exchange, atoms) -> None:
        self.config: Any = config  # of the fields that a side has: types of codes are there where it is
        self.x = x
        self.rows, self.columns = x.shape
        (self.q_row, self.sf_row, self.norm_row), (self.q_col, self.sf_col, self.norm_col) = row_side, col_side
        self.tile_m, self.tile_n = tile
        self.exchange, self.atoms = exchange, atoms

    def codes(self, warp) -> None:
        """Stores a warp's codes, and leaves its scales in the atoms."""
        config, lane = self.config, p.fresh_lane()
        stripe, half = warp & 3, warp >> 2
        row, column = self.tile_m * TILE + stripe * WARP_TILE[0], self.tile_n * TILE + half * WARP_TILE[1]
        area = self.exchange + warp * WARP_BYTES
        words = self._load(row, column, lane)
        norms = [None if norm is None else p.load_global(norm.iterator.toint(), cutlass.Float32)
                 for norm in (self.norm_row, self.norm_col)]  # fmt: skip
        magnitudes = [[word & Uint32(ABSOLUTE[config.x_dtype]) for word in one] for one in words]
        if config.q_row_dtype is not None:
            self._put_row_peaks(magnitudes, area + ROW_PEAKS, lane)
        if config.q_col_dtype is not None:
            self._put_column_peaks(magnitudes, area + COLUMN_PEAKS, lane)
        p.sync_warp()
        if config.q_row_dtype is not None:
            self._scale_rows(area, row, column, stripe, half, norms[0], lane)
        if config.q_col_dtype is not None:
            self._scale_columns(area, row, column, stripe, half, norms[1], lane)
        p.sync_warp()
        self._store_codes(words, area, row, column, norms, lane)

    def _load(self, row, column, lane):
        """[i] -> the words of the lane's columns in row `row + lane // 8 + 4 * i`."""
        at, first = cutlass.min(column + ((lane & 7) << 3), self.columns - PIECE), row + (lane >> 3)
        out = []
        for i in range(ROWS_A_LANE):
            address = p.row_address(self.x, cutlass.min(first + 4 * i, self.rows - 1), at)
            words = list(p.load_global_v4(address))
            if self.config.x_dtype == "fp32":
                words += p.load_global_v4(address + 16)
            out.append(words)
        return out

    def _larger(self, words):
        """Of magnitudes as words of x, each half of a word apart; a NaN wins, its bits are above infinity's."""
        if self.config.x_dtype == "fp32":
            return largest(words)
        top = words[0]
        for word in words[1:]:
            top = p.max_u16x2(top, word)
        return top

    def _values(self, word):
        """The values of one word of x as float32."""
        if self.config.x_dtype == "fp32":
            return [p.from_bits(word)]
        return p.unpack(word, self.config.x_dtype)

    def _wide(self, word):
        """The values of one word of x as bits of float32."""
        return [word] if self.config.x_dtype == "fp32" else [p.bits(value) for value in self._values(word)]

    def _put_row_peaks(self, magnitudes, area, lane) -> None:
        """A lane's maximum of row l // 8 + 4 * i at 4 * lane + 128 * i: block (row, column // 32) is 16 bytes."""
        for i, one in enumerate(magnitudes):
            p.store_shared_i32(area + (lane << 2) + 128 * i, largest(self._wide(self._larger(one))))

    def _put_column_peaks(self, magnitudes, area, lane) -> None:
        """A lane's 8 maxima at 32 * lane: those of column c, over the rows of l // 8, at 256 * (l // 8) + 4 * c."""
        peaks = [w for words in zip(*magnitudes, strict=True) for w in self._wide(self._larger(words))]
        for i in (0, 4):
            p.store_shared_v4(area + (lane << 5) + 4 * i, peaks[i : i + 4])

    def _scale_rows(self, area, row, column, stripe, half, norm, lane) -> None:
        """A lane's two blocks: columns 32 * (lane % 2) of rows lane // 2 and lane // 2 + 16."""
        for turn in (0, 1):
            inside, block = (lane >> 1) + 16 * turn, lane & 1
            parts = p.load_shared_v4(area + ROW_PEAKS + (lane << 4) + 512 * turn)
            byte, factor = scale_of(_scaled(largest(parts), norm), self.config.q_row_dtype)
            # The factors of a lane's rows lie together: word 8 * (2 * (row % 4) + block) + row // 4.
            p.store_shared_i32(area + ROW_FACTORS + ((lane & 7) << 5) + ((lane >> 3) << 2) + 16 * turn, factor)
            there = (row + inside < self.rows) & (column + (block << 5) < self.columns)
            at = self.atoms + (inside << 4) + (stripe << 2) + (half << 1) + block
            p.store_shared_b8(at, p.select(there, byte, Int32(0)))

    def _scale_columns(self, area, row, column, stripe, half, norm, lane) -> None:
        """A lane's two columns, 2 * lane and the next."""
        parts = [p.load_shared_v2(area + COLUMN_PEAKS + (lane << 3) + 256 * quarter) for quarter in range(4)]
        pair = [scale_of(_scaled(largest([part[i] for part in parts]), norm), self.config.q_col_dtype) for i in (0, 1)]
        p.store_shared_v2(area + COLUMN_FACTORS + (lane << 3), [factor for _, factor in pair])
        there = (column + (lane << 1) < self.columns) & (row < self.rows)
        first = (lane << 1) & 31
        at = self.atoms + ATOM_BYTES + (first << 4) + (half << 3) + ((lane >> 4) << 2) + stripe
        for i, (byte, _) in enumerate(pair):
            p.store_shared_b8(at + 16 * i, p.select(there, byte, Int32(0)))

    def _store_codes(self, words, area, row, column, norms, lane) -> None:
        """8 bytes a row, of either side."""
        config = self.config
        first, at = row + (lane >> 3), column + ((lane & 7) << 3)
        row_factors = self._factors(area + ROW_FACTORS + ((lane >> 2) << 5)) if config.q_row_dtype else None
        column_factors = self._factors(area + COLUMN_FACTORS + ((lane & 7) << 5)) if config.q_col_dtype else None
        places: list[Any] = [None if q is None else (p.row_address(q, first, at), Int64(q.stride[0]) * 4)
                  for q in (self.q_row, self.q_col)]  # fmt: skip
        for i, one in enumerate(words):
            there = (first + 4 * i < self.rows) & (at < self.columns)
            values = [value for word in one for value in self._values(word)]
            for side, (factors, dtype) in enumerate(
                ((row_factors, config.q_row_dtype), (column_factors, config.q_col_dtype))
            ):
                if factors is None:
                    continue
                mine = [factors[i]] * PIECE if side == 0 else factors
                norm = norms[side]
                given = values if norm is None else [value * norm for value in values]
                scaled = [value * factor for value, factor in zip(given, mine, strict=True)]
                address, step = places[side]
                codes = [p.pack_fp8x4(scaled[k : k + 4], dtype) for k in (0, 4)]
                p.store_global(address, codes, there)
                places[side] = address + step, step

    def _factors(self, address):
        """Eight floats of shared memory."""
        return [p.from_bits(word) for at in (0, 16) for word in p.load_shared_v4(address + at)]

    def scales(self, thread) -> None:
        """Stores the CTA's scales, once all of its warps have left them: half of the threads a side."""
        across, down = (self.columns + (TILE - 1)) >> 7, (self.rows + (TILE - 1)) >> 7
        mine, second = thread & (TILE - 1), thread >= TILE
        if self.config.q_row_dtype is not None:
            if self.config.row_swizzled:
                self._store_atom(self.sf_row, self.tile_m, self.tile_n, across, 0, mine, thread < 32)
            else:
                self._store_plain_rows(mine, thread < TILE)
        if self.config.q_col_dtype is not None:
            if self.config.col_swizzled:
                self._store_atom(self.sf_col, self.tile_n, self.tile_m, down, 1, mine, second & (mine < 32))
            else:
                self._store_plain_columns(mine, second)

    def _store_atom(self, scales, m, k, atoms_a_row, side: int, mine, when) -> None:
        """An atom by 32 threads."""
        at = (mine & 31) << 4
        words = p.load_shared_v4(self.atoms + side * ATOM_BYTES + at)
        offset = ((Int64(m) * Int64(atoms_a_row) + Int64(k)) << 9) + Int64(at)
        p.store_global(scales.iterator.toint() + offset, words, when)

    def _store_plain_rows(self, mine, when) -> None:
        """Four bytes of one row a thread, at once where rows of scales are whole words."""
        word = p.load_shared_i32(self.atoms + ((mine & 31) << 4) + ((mine >> 5) << 2))
        row, block, blocks = self.tile_m * TILE + mine, self.tile_n * 4, (self.columns + 31) >> 5
        address = self.sf_row.iterator.toint() + Int64(row) * Int64(blocks) + Int64(block)
        when = when & (row < self.rows)
        p.store_global(address, [word], when & (blocks & 3 == 0))
        for k in range(4):
            there = when & (blocks & 3 != 0) & (block + k < blocks)
            p.store_global_b8(address + k, word >> (8 * k), there)

    def _store_plain_columns(self, mine, when) -> None:
        """One byte of a column a thread and 32 rows."""
        word = p.load_shared_i32(self.atoms + ATOM_BYTES + ((mine & 31) << 4) + ((mine >> 5) << 2))
        column, block = self.tile_n * TILE + mine, self.tile_m * 4
        address = self.sf_col.iterator.toint() + Int64(block) * Int64(self.columns) + Int64(column)
        for k in range(4):
            there = when & (column < self.columns) & ((block + k) * 32 < self.rows)
            p.store_global_b8(address, word >> (8 * k), there)
            address = address + Int64(self.columns)


def _scaled(peak, norm):
    """The bits of |peak * norm|; only the magnitude of norm_const reaches the scale."""
    if norm is None:
        return peak
    return p.bits(p.from_bits(peak) * norm) & Uint32(0x7FFFFFFF)


class QuantizeRowCol:
    """The kernel of one configuration; `__call__` is the host side that launches it."""

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (M, N)
        q_row: Optional[cute.Tensor],  # (M, N)
        sf_row: Optional[cute.Tensor],  # bytes
        norm_row: Optional[cute.Tensor],  # (1,)
        q_col: Optional[cute.Tensor],  # (M, N)
        sf_col: Optional[cute.Tensor],  # bytes
        norm_col: Optional[cute.Tensor],  # (1,)
        stream: cuda.CUstream,
    ):
        rows, columns = x.shape
        tiles = ((rows + (TILE - 1)) // TILE) * ((columns + (TILE - 1)) // TILE)
        self.kernel(x, q_row, sf_row, norm_row, q_col, sf_col, norm_col).launch(
            grid=[tiles, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=CTAS[self.config.x_dtype],
            preferred_smem_carveout=CARVEOUT, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        q_row: Optional[cute.Tensor],
        sf_row: Optional[cute.Tensor],
        norm_row: Optional[cute.Tensor],
        q_col: Optional[cute.Tensor],
        sf_col: Optional[cute.Tensor],
        norm_col: Optional[cute.Tensor],
    ):
        memory = cutlass.memory.SmemAllocator()
        atoms = memory.allocate(2 * ATOM_BYTES, 16).toint()
        exchange = memory.allocate(WARPS * WARP_BYTES, 16).toint()
        # Neighbouring CTAs take neighbouring columns, so that whole rows are read at a time.
        across = (x.shape[1] + (TILE - 1)) // TILE
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        at = (block // across, block % across)
        tile = Tile(self.config, x, (q_row, sf_row, norm_row), (q_col, sf_col, norm_col), at, exchange, atoms)
        tile.codes(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        cute.arch.barrier()
        tile.scales(thread)
