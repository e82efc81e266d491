"""MXFP8 of the gradient: E4M3 or E5M2 codes with one E8M0 scale per 32 values of a row, of a column, or both.

The scale is amax / dtype_max with its exponent rounded up. Both formats' largest value is 1.75 * 2**p, so that is
"exponent of amax, plus one if its mantissa passes 1.75, minus p": integer arithmetic, exact, no division. Adding
`CARRY` to the bits of amax makes the mantissa carry into the exponent just then. The upper 16 bits of that sum, the
`key`, still grow with amax: a maximum over keys is the key of the maximum, and two keys share a word while they travel
between lanes. key >> 7 is the biased exponent `raw`.

    key >= INFINITE: an infinity, or a finite value within 0.4 % of float32's limit -> scale 254, saturated codes
    key >= NAN:      a NaN -> scale 255, NaN codes
Both are rare; a warp that meets one takes a branch.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import primitives as p
from .reductions import column_of

LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}  # 448 = 1.75 * 2**8, 57344 = 1.75 * 2**15
BLOCK = 32
CARRY = 0x1FFFFF
INFINITE, NAN = 0x7F9F, 0x8000


def peak_of(values):
    """Largest magnitude; a NaN wins."""
    peak = p.absolute(values[0])
    for value in values[1:]:
        peak = p.max_nan(peak, p.absolute(value))
    return peak


def key_pair(gate_peak, up_peak):
    """The keys of two peaks in one word, gate low."""
    return p.byte_permute(p.bits(gate_peak) + Uint32(CARRY), p.bits(up_peak) + Uint32(CARRY), 0x7632)


def exponent_pair(keys, dtype: str):
    """Biased exponents of 1 / scale of two keys; 254 minus one is the scale's byte, specials aside."""
    raw = (keys >> Uint32(7)) & Uint32(0x01FF01FF)
    bias = 254 + LARGEST_EXPONENT[dtype]
    return p.min_u16x2(Uint32(bias * 0x10001) - raw, Uint32(0x00FE00FE))


def special(keys):
    """Whether a word holds the key of an infinity or a NaN."""
    edge = Uint32((INFINITE - 1) * 0x10001)
    return p.max_u16x2(keys, edge) != edge


def special_factor(key, factor):
    """1 / decode(scale) where the key is special."""
    factor = p.select(key >= Uint32(INFINITE), Uint32(0x00400000), factor)
    return p.select(key >= Uint32(NAN), Uint32(0x7FFFFFFF), factor)


def scale_byte(key, exponent):
    """The E8M0 byte of a key whose reciprocal scale has this biased exponent."""
    code = Uint32(254) - exponent
    code = p.select(key >= Uint32(INFINITE), Uint32(254), code)
    return p.select(key >= Uint32(NAN), Uint32(255), code)


@cute.jit
def factors_of(keys, dtype: cutlass.Constexpr, rare):
    """Per word of `keys`: (1 / gate scale, 1 / up scale), each a power of two, as an rmem tensor (2 * len(keys),).

    `rare` says whether any key of the warp is special.
    """
    count = cutlass.const_expr(len(keys))
    out = cute.make_rmem_tensor((2 * count,), Uint32)
    for i in cutlass.range_constexpr(count):
        pair = exponent_pair(keys[i], dtype)
        out[2 * i] = pair << Uint32(23)
        out[2 * i + 1] = (pair >> Uint32(16)) << Uint32(23)
    if rare:
        for i in cutlass.range_constexpr(count):
            out[2 * i] = special_factor(keys[i] & Uint32(0xFFFF), out[2 * i])
            out[2 * i + 1] = special_factor(keys[i] >> Uint32(16), out[2 * i + 1])
    return out


def any_special(keys):
    """Whether any lane of the warp has a special key."""
    top = keys[0]
    for word in keys[1:]:
        top = p.max_u16x2(top, word)
    return cute.arch.vote_any_sync(special(top))


def byte_of(keys, side, dtype: str):
    """The scale byte of one side (0 gate, 1 up) of a word of keys."""
    shift = Uint32(side * 16)
    return scale_byte((keys >> shift) & Uint32(0xFFFF), (exponent_pair(keys, dtype) >> shift) & Uint32(0xFFFF))


class QuadTranspose:
    """Turns "four pairs of columns, one pair of each 8" into "8 neighbouring columns" inside four lanes.

    Lane q of four holds bytes of columns 8*j + 2*q + {0, 1}, j = 0..3; afterwards it holds columns 8*q .. 8*q + 7, so
    that the four lanes store 32 contiguous bytes of a row.
    """

    def __init__(self, lane) -> None:
        q = lane & 3
        upper, odd = q >= 2, (q & 1) == 1
        # Selectors of `prmt`: which half moves on, in which order halves of two words join. Each has a partner for the
        # other choice that differs in one bit of every digit; sources come as kept (q, q^2) and received (q^1, q^3).
        self.stay = p.select(upper, Int32(0x7654), Int32(0x3210))
        self.keep = p.select(odd, Int32(0x7632), Int32(0x5410))
        first = p.select(odd, Int32(0x1054), Int32(0x5410))
        self.first = p.select(upper, first ^ 0x2222, first)

    def __call__(self, w0, w1):
        kept = p.byte_permute_by(w0, w1, self.stay)
        got = cute.arch.shuffle_sync_bfly(p.byte_permute_by(w0, w1, self.stay ^ 0x4444), 2)
        mine = p.byte_permute_by(kept, got, self.keep)
        other = cute.arch.shuffle_sync_bfly(p.byte_permute_by(kept, got, self.keep ^ 0x2222), 1)
        return p.byte_permute_by(mine, other, self.first), p.byte_permute_by(mine, other, self.first ^ 0x2222)


def scale_offset(row, column_block, blocks_a_row, swizzled: bool):
    """Byte offset of the scale at (row, column_block) of a matrix with `blocks_a_row` scales a row."""
    if not swizzled:
        return Int64(row) * Int64(blocks_a_row) + Int64(column_block)
    atom = Int64(row >> 7) * Int64((blocks_a_row + 3) >> 2) + Int64(column_block >> 2)
    return (atom << 9) + Int64(((row & 31) << 4) + (((row >> 5) & 3) << 2) + (column_block & 3))


class Quantizer:
    """Row and column quantization of 32 compact columns of one warp.

    `values[block][side][2*j + i + 8*r]` is the gradient in row lane//4 + 8*r of the block's 16 rows and column
    8*j + 2*(lane%4) + i of the side's 32 columns; side 0 is gate, 1 is up.
    """

    def __init__(self, config, columns, rows, lane, q_row, sf_row, q_col, sf_col) -> None:
        self.config, self.columns, self.rows = config, columns, rows
        self.q_row, self.sf_row, self.q_col, self.sf_col = q_row, sf_row, q_col, sf_col
        self.transpose = QuadTranspose(lane)

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    @cute.jit
    def quantize_rows(self, values, row: Int32, end: Int32, n0: Int32):
        """One block of 16 rows, some of them past `end` perhaps; `values[side]` as above."""
        keys = [self._row_key(values, r) for r in (0, 1)]
        rare = any_special(keys)
        for r in cutlass.range_constexpr(2):
            self._store_row(values, r, keys[r], row + 8 * r, end, n0, rare)

    @cute.jit
    def quantize_pair(self, values, row: Int32, end: Int32, n0: Int32):
        """32 rows of a warp (two blocks), all before `end` or none: columns, and rows where asked for.

        All keys travel at once and only then is anything encoded: one warp a scheduler is at work here, so what counts
        is how many independent instructions stand between two branches. Every value has a column key, so those alone
        tell whether something is special.
        """
        if row < end:
            config = self.config
            row_keys = []
            if cutlass.const_expr(config.q_row_dtype is not None):
                row_keys = [self._row_key(values[b], r) for b in (0, 1) for r in (0, 1)]
            keys = [self._column_key(values, c) for c in range(8)]
            rare = any_special(keys)
            for i in cutlass.range_constexpr(len(row_keys)):
                b, r = i // 2, i % 2
                self._store_row(values[b], r, row_keys[i], row + 16 * b + 8 * r, end, n0, rare)
            self._store_columns(values, keys, row, n0, rare)

    @cute.jit
    def _store_row(self, values, r: cutlass.Constexpr, keys, first: Int32, end: Int32, n0: Int32, rare):
        """Codes and scales of one row: eight codes a lane and side; lanes 0 and 1 of four store the scales."""
        dtype = self.config.q_row_dtype
        factors = factors_of([keys], dtype, rare)
        part = [values[side][8 * r : 8 * r + 8] for side in (0, 1)]
        words = [self._encode(part[side], [p.from_bits(factors[side])] * 8, dtype) for side in (0, 1)]
        lane = p.fresh_lane()
        at = first + (lane >> 2)
        if at < end:
            self._store_codes(self.q_row, at, n0, words, lane)
            side = lane & 3
            if side < 2:
                block = column_of(self.config.glu_layout, n0, side, self.columns) >> 5
                offset = scale_offset(at, block, self.columns >> 4, self.config.sf_swizzled)
                p.store_global_b8(self.sf_row.iterator.toint() + offset, byte_of(keys, side, dtype))

    @cute.jit
    def _store_columns(self, values, keys, row: Int32, n0: Int32, rare):
        """Codes and scales of 32 rows by columns."""
        dtype = self.config.q_col_dtype
        # Half of the columns at a time: their values are dead, as codes, before the other half needs registers.
        codes = [[None, None] for _ in range(8)]
        for half in cutlass.range_constexpr(2):
            words = factors_of(keys[4 * half : 4 * half + 4], dtype, rare)
            for piece in cutlass.range_constexpr(8):
                b, r, side = piece // 4, piece // 2 % 2, piece % 2
                first = 8 * r + 4 * half
                factors = [p.from_bits(words[2 * c + side]) for c in range(4)]
                codes[piece][half] = self._encode_four(values[b][side][first : first + 4], factors, dtype)
        lane = p.fresh_lane()
        for piece in cutlass.range_constexpr(4):
            b, r = piece // 2, piece % 2
            words = [self.transpose(*codes[2 * piece + side]) for side in (0, 1)]
            self._store_codes(self.q_col, row + b * 16 + (lane >> 2) + 8 * r, n0, words, lane)
        # Lane 4*s + q stores the scales of side s // 4, columns 8*(s % 4) + 2*q + {0, 1}.
        s = lane >> 2
        for i in cutlass.range_constexpr(2):
            low = p.select((s & 1) == 0, keys[i], keys[2 + i])
            high = p.select((s & 1) == 0, keys[4 + i], keys[6 + i])
            mine = p.select((s & 2) == 0, low, high)
            n = n0 + 8 * (s & 3) + 2 * (lane & 3) + i
            self._store_column_scale(row, n, s >> 2, byte_of(mine, s >> 2, dtype))

    def _row_key(self, values, r: int):
        """The keys of gate and up of one row, in the four lanes that hold it."""
        keys = key_pair(*(peak_of(values[side][8 * r : 8 * r + 8]) for side in (0, 1)))
        for step in range(2):
            keys = p.max_u16x2(keys, cute.arch.shuffle_sync_bfly(keys, 1 << step))
        return keys

    def _column_key(self, values, c: int):
        """The keys of gate and up column c over the warp's 32 rows, in every lane that holds the column."""
        rows = [(b, 8 * r + c) for b in (0, 1) for r in (0, 1)]
        keys = key_pair(*(peak_of([values[b][side][i] for b, i in rows]) for side in (0, 1)))
        for step in range(3):
            keys = p.max_u16x2(keys, cute.arch.shuffle_sync_bfly(keys, 4 << step))
        return keys

    def _store_codes(self, codes: cute.Tensor, row, n0, words, lane) -> None:
        """32 codes of a row and side: eight a lane."""
        layout = self.config.glu_layout
        gate = p.row_address(codes, row, column_of(layout, n0, 0, self.columns) + 8 * (lane & 3))
        apart = Int64(self.columns) if layout == "concatenated" else Int64(BLOCK)
        p.store_global(gate, words[0])
        p.store_global(gate + apart, words[1])

    def _store_column_scale(self, row, n, side: int, code):
        column = column_of(self.config.glu_layout, n, side, self.columns)
        block = row >> 5
        if self.config.sf_swizzled:
            offset = scale_offset(column, block, (self.rows + 31) >> 5, True)
        else:
            offset = scale_offset(block, column, self.columns * 2, False)
        p.store_global_b8(self.sf_col.iterator.toint() + offset, code)

    def _encode(self, values, factors, dtype: str):
        """Eight codes as two words, in the order in which four lanes store 32 contiguous bytes."""
        halves = [self._encode_four(values[i : i + 4], factors[i : i + 4], dtype) for i in (0, 4)]
        return self.transpose(*halves)

    def _encode_four(self, values, factors, dtype: str):
        """Four codes as one word."""
        scaled = [v * f for v, f in zip(values, factors, strict=True)]
        pairs = [p.pack_fp8(scaled[0], scaled[1], dtype), p.pack_fp8(scaled[2], scaled[3], dtype)]
        return p.byte_permute(pairs[0], pairs[1], 0x5410)
