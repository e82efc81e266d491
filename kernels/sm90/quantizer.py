"""MXFP8 of the gradient, or of the forward's activation: E4M3 or E5M2 codes with one E8M0 scale per 32 values of a row,
of a column, or both. For the activation two neighbouring blocks of 32 columns stand for gate and up.

A lane holds pairs of neighbouring columns (a wgmma accumulator), so that a block's 32 values lie in 4 lanes (a row) or
8 (a column). They meet in shared memory, in the ring slots whose pre-activation the warp has just read:

    1. every lane writes its partial peaks; one lane a row and two columns a lane reads a block's partials back,
    2. encodes the scale, stores its byte, and writes its reciprocal, which all lanes read;
    3. codes go to shared memory by `stmatrix`, two bytes a column pair, and come back as 16 neighbouring ones.

The scale is amax / dtype_max with its exponent rounded up. Both formats' largest value is 1.75 * 2**p, so that is
"exponent of amax, plus one if its mantissa passes 1.75, minus p": integer arithmetic, exact, no division. Adding
`CARRY` to the bits of amax makes the mantissa carry into the exponent just then. One float a format differs: the least
one above 1.75 * 2**(p - 127), which the quotient in float32, subnormal there, rounds down to the smallest scale.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32

from . import primitives as p
from .reductions import column_of
from .stores import WARP_ROWS

LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}  # 448 = 1.75 * 2**8, 57344 = 1.75 * 2**15
BLOCK = 32
CARRY = 0x1FFFFF
INFINITY = 0x7F800000


def peak_of(values):
    """Largest magnitude; a NaN wins."""
    peak = p.max_magnitude(values[0], values[1])
    for value in values[2:]:
        peak = p.max_magnitude(peak, value)
    return peak


def largest(words):
    """Maximum of the bits of magnitudes; a NaN wins, its bits are above infinity's."""
    top = words[0]
    for word in words[1:]:
        top = cutlass.max(top, word)
    return top


def scale_of(peak, dtype: str):
    """(E8M0 byte, bits of 1 / scale as float32) of a block whose largest magnitude has these bits.

    A block with an infinity has the largest scale, one with a NaN has scale and codes NaN.
    """
    least = LARGEST_EXPONENT[dtype] << 23 | 0x600001
    raw = (p.select(peak == Uint32(least), Uint32(least - 1), peak) + Uint32(CARRY)) >> Uint32(23)
    byte = cutlass.max(Int32(raw) - LARGEST_EXPONENT[dtype], Int32(0))
    factor = Int32(0x7F000000) - byte * (1 << 23)
    infinite, nan = peak >= Uint32(INFINITY), peak > Uint32(INFINITY)
    byte = p.select(infinite, p.select(nan, Int32(255), Int32(254)), byte)
    factor = p.select(infinite, p.select(nan, Int32(0x7FFFFFFF), Int32(0x00400000)), factor)
    return byte, factor


def scale_offset(row, column_block, blocks_a_row, swizzled: bool):
    """Byte offset of the scale at (row, column_block) of a matrix with `blocks_a_row` scales a row."""
    if not swizzled:
        return Int64(row) * Int64(blocks_a_row) + Int64(column_block)
    atom = Int64(row >> 7) * Int64((blocks_a_row + 3) >> 2) + Int64(column_block >> 2)
    return (atom << 9) + Int64(((row & 31) << 4) + (((row >> 5) & 3) << 2) + (column_block & 3))


class Quantizer:
    """Row and column quantization of 32 compact columns of one warp: 16 rows (one block), or 32 (two).

    `values[block][side][2*j + i + 8*r]` is the gradient in row lane//4 + 8*r of the block's 16 rows and column
    8*j + 2*(lane%4) + i of the side's 32 columns; side 0 is gate, 1 is up. `pieces[block]` are the shared-memory
    addresses of two areas of PIECE_BYTES that belong to the warp alone.
    """

    def __init__(self, config, columns, rows, q_row, sf_row, q_col, sf_col) -> None:
        self.config, self.columns, self.rows = config, columns, rows
        self.q_row, self.sf_row, self.q_col, self.sf_col = q_row, sf_row, q_col, sf_col

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def run(self, values, pieces, row, end, n0, release) -> None:
        """Quantizes the rows from `row` on; with columns, all of them are before `end`.

        `release()` runs when `pieces` are free. Row codes leave registers before column codes are made: with both at
        once, and a gradient to store besides, 128-column tiles spill.
        """
        config, lane, blocks = self.config, p.fresh_lane(), len(values)
        by_row, by_column = config.q_row_dtype is not None, config.q_col_dtype is not None
        areas = self._areas(pieces)
        if by_row:
            self._put_row_peaks(values, areas["row peaks"], lane)
        if by_column:
            self._put_column_peaks(values, areas["column peaks"], lane)
        p.sync_warp()
        if by_row:
            self._scale_rows(blocks, areas, row, end, n0, lane)
        if by_column:
            self._scale_columns(areas, row, n0, lane)
        p.sync_warp()
        if by_row:
            factors = self._row_factors(blocks, areas["row factors"], lane)
            codes = self._encode(values, lambda b, r, side, c: factors[2 * b + r][side], config.q_row_dtype)
            self._put_codes(codes, areas["codes"][0], lane)
        if by_column:
            columns = self._column_factors(areas["column factors"], lane)
        if by_row:
            p.sync_warp()
            words = self._take_codes(blocks, areas["codes"][0], lane)
        if by_column:
            codes = self._encode(values, lambda b, r, side, c: columns[side][c], config.q_col_dtype)
            self._put_codes(codes, areas["codes"][-1], lane)
            if by_row:
                self._store_codes(self.q_row, words, row, end, n0)
            p.sync_warp()
            words = self._take_codes(blocks, areas["codes"][-1], lane)
        release()
        self._store_codes(self.q_col if by_column else self.q_row, words, row, end, n0)

    def _store_codes(self, tensor, words, row, end, n0) -> None:
        """Writes what `_take_codes` returned: 64 bytes a row by four lanes."""
        lane = p.fresh_lane()
        first = row + (lane >> 2)
        at, step = p.row_address(tensor, first, self._code_column(n0, lane)), Int64(tensor.stride[0]) * 8
        for t, w in enumerate(words):
            codes = [p.byte_permute(w[i], w[i + 1], half) for half in (0x5410, 0x7632) for i in (0, 2)]
            p.store_global(at, codes, self._partial(first + 8 * t, end))
            at = at + step

    def _partial(self, row, end):
        """The condition under which a row is stored; None where all rows are, see `run`."""
        return row < end if self.config.q_col_dtype is None else None

    def _areas(self, pieces) -> dict:
        """Where what lies. One slot: row peaks and then row codes; row factors. Two slots: column peaks and then the
        first codes; row peaks, factors, and then the second codes, once every lane has read its factors."""
        first, last = pieces[0], pieces[-1]
        if self.config.q_col_dtype is None:
            return {"row peaks": first[0], "row factors": first[1], "codes": [first]}
        return {
            "column peaks": first, "row peaks": last[0], "row factors": last[1], "column factors": last[1] + 256,
            "codes": [first, last] if self.config.q_row_dtype is not None else [first],
        }  # fmt: skip

    def _put_row_peaks(self, values, area, lane) -> None:
        """Partial peaks (gate, up) at 8 * (4 * row + lane%4)."""
        for b, block in enumerate(values):
            for r in (0, 1):
                pair = [p.bits(peak_of(block[side][8 * r : 8 * r + 8])) for side in (0, 1)]
                p.store_shared_v2(area + (lane << 3) + (16 * b + 8 * r) * 32, pair)

    def _put_column_peaks(self, values, areas, lane) -> None:
        """Partial peaks of columns 16*m + {2*q, 2*q + 1, 2*q + 8, 2*q + 9} of a side at 16 * lane of its part m.

        Bit 6 of the address is turned in odd parts, so that no two lanes that read at once meet in a bank.
        """
        for side in (0, 1):
            for m in (0, 1):
                quad = [p.bits(peak_of([block[side][8 * r + c] for block in values for r in (0, 1)]))
                        for c in range(4 * m, 4 * m + 4)]  # fmt: skip
                p.store_shared_v4(areas[side] + ((lane << 4) ^ (m << 6)) + 512 * m, quad)

    def _scale_rows(self, blocks: int, areas, row, end, n0, lane) -> None:
        """One lane a row: its gate and up scale."""
        config, rows = self.config, WARP_ROWS * blocks
        mine = lane & (rows - 1)
        # Which half first: lanes that read at once then lie in different banks.
        one = (areas["row peaks"] + (mine << 5)) ^ (((lane >> 2) & 1) << 4)
        halves = p.load_shared_v4(one), p.load_shared_v4(one ^ 16)
        sides = [
            scale_of(largest([half[i] for half in halves for i in (s, s + 2)]), config.q_row_dtype) for s in (0, 1)
        ]
        p.store_shared_v2(areas["row factors"] + (mine << 3), [factor for _, factor in sides])
        at, (gate, up) = row + mine, (byte for byte, _ in sides)
        when = self._partial(at, end)
        if blocks == 1:
            when = (at < end) & (lane < rows)
        block = column_of(config.glu_layout, n0, 0, self.columns) >> 5
        base = self.sf_row.iterator.toint()

        def place(column_block):
            if not config.sf_swizzled:
                return base + scale_offset(at, column_block, self.columns >> 4, False)
            # The warp's rows lie in one 32-row stripe of an atom.
            return base + scale_offset(row, column_block, self.columns >> 4, True) + Int64(mine << 4)

        # Interleaved, gate and up blocks are neighbours, and gate's number is even.
        if config.glu_layout == "interleaved32":
            p.store_global_b16(place(block), gate | (up << 8), when)
        else:
            p.store_global_b8(place(block), gate, when)
            p.store_global_b8(place(block + (self.columns >> 5)), up, when)

    def _scale_columns(self, areas, row, n0, lane) -> None:
        """Two neighbouring columns a lane: lane bits are (side, m, q, q, j%2), the columns 16*m + 8*(j%2) + 2*q."""
        config = self.config
        side, m, q, odd = lane >> 4, (lane >> 3) & 1, (lane >> 1) & 3, lane & 1
        first, second = areas["column peaks"]
        even = p.select(side == 0, first, second) + (m << 9) + (((lane & 7) << 3) ^ (m << 6))
        parts = [p.load_shared_v2((even ^ 64 if g % 2 else even) + 128 * (g // 2)) for g in range(8)]
        pair = [scale_of(largest([part[i] for part in parts]), config.q_col_dtype) for i in (0, 1)]
        factors = areas["column factors"] + (side << 7) + (q << 5) + (m << 4) + (odd << 3)
        p.store_shared_v2(factors, [factor for _, factor in pair])
        base, (one, two) = self.sf_col.iterator.toint(), (byte for byte, _ in pair)
        within = 16 * m + 8 * odd + 2 * q
        if config.sf_swizzled:
            # 32 columns of a side are one stripe of an atom; interleaved, gate's and up's are neighbours.
            blocks = (self.rows + 31) >> 5
            first = scale_offset(column_of(config.glu_layout, n0, 0, self.columns), row >> 5, blocks, True)
            if config.glu_layout == "interleaved32":
                offset = base + first + Int64((within << 4) + (side << 2))
            else:
                second = scale_offset(column_of(config.glu_layout, n0, 1, self.columns), row >> 5, blocks, True)
                offset = base + p.select(side == 0, first, second) + Int64(within << 4)
            p.store_global_b8(offset, one)
            p.store_global_b8(offset + 16, two)
        else:
            column = column_of(config.glu_layout, n0 + within, side, self.columns)
            offset = base + scale_offset(row >> 5, column, self.columns * 2, False)
            p.store_global_b16(offset, one | (two << 8))

    def _row_factors(self, blocks: int, area, lane):
        """[2*b + r] -> (gate, up) of the lane's rows."""
        pairs = [p.load_shared_v2(area + ((lane >> 2) << 3) + 64 * t) for t in range(2 * blocks)]
        return [[p.from_bits(x) for x in pair] for pair in pairs]

    def _column_factors(self, area, lane):
        """[side][2*j + i] of the lane's columns."""
        at = area + ((lane & 3) << 5)
        return [[p.from_bits(x) for m in (0, 1) for x in p.load_shared_v4(at + 128 * side + 16 * m)] for side in (0, 1)]

    def _encode(self, values, factor, dtype: str):
        """[2*b + r] -> four words: side, then m: codes of columns 16*m + {2*q, 2*q + 1, 2*q + 8, 2*q + 9}."""
        return [
            [
                p.pack_fp8x4(
                    [values[b][side][8 * r + c] * factor(b, r, side, c) for c in range(4 * m, 4 * m + 4)], dtype
                )
                for side in (0, 1)
                for m in (0, 1)
            ]
            for b in range(len(values))
            for r in (0, 1)
        ]

    def _put_codes(self, codes, areas, lane) -> None:
        """64 bytes a row: pieces of 16, side and then m, turned by the row's bits 1 and 2 against bank conflicts."""
        low = lane & 7
        for t, words in enumerate(codes):
            at = areas[t // 2] + (t % 2) * 512 + (low << 6) + (((lane >> 3) ^ (low >> 1)) << 4)
            p.stmatrix4(at, words)

    def _take_codes(self, blocks: int, areas, lane):
        """[t] -> the 16 codes of row lane//4 + 8*t, piece lane%4, pairs of columns in the order of `_encode`."""
        at = (lane << 4) ^ ((lane >> 3) << 4)
        return [p.load_shared_v4(areas[t // 2] + (t % 2) * 512 + at) for t in range(2 * blocks)]

    def _code_column(self, n0, lane):
        """First of the 16 columns of C whose codes a lane stores."""
        gate = column_of(self.config.glu_layout, n0, 0, self.columns) + ((lane & 1) << 4)
        apart = self.columns if self.config.glu_layout == "concatenated" else Int32(BLOCK)
        return gate + p.select((lane & 2) == 0, Int32(0), apart)
