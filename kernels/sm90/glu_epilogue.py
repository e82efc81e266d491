"""Epilogue of one consumer warpgroup of the forward kernel: accumulators in, h and the activation out, as it is, as
MXFP8 codes, or both."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import glu_stores, stores
from . import primitives as p
from .config import CHUNK_N
from .epilogue_math import DeviceMath
from .glu_config import D_CHUNK_BYTES, H_CHUNK_BYTES, PIECE_BYTES, GluConfig, codes_in_h, quantizes
from .glu_math import glu
from .quantizer import Quantizer


class Sides:
    """What the quantizer is told of a forward configuration: the blocks of 32 columns are interleaved."""

    def __init__(self, config: GluConfig) -> None:
        self.glu_layout, self.sf_swizzled = "interleaved32", config.sf_swizzled
        self.q_row_dtype, self.q_col_dtype = config.q_row_dtype, config.q_col_dtype


class GluEpilogue:
    """State and steps of one warp's epilogue; every tensor that the configuration does not ask for is None."""

    def __init__(self, config: GluConfig, storage, group, warp, store_h, h, store_d, d, prob, alpha, bias, columns,
                 rows, codes) -> None:  # fmt: skip
        self.config, self.schedule = config, config.schedule
        self.storage, self.group, self.warp = storage, group, warp
        self.store_h, self.h, self.store_d, self.d = store_h, h, store_d, d  # store: (copy atom, coordinates, boxes)
        self.prob, self.alpha, self.bias = prob, alpha, bias
        self.columns = columns  # of the activation
        lane = cute.arch.lane_idx()
        self.h_columns = stores.box_columns(config.glu_layout)
        self.h_boxes = stores.boxes(config.glu_layout)
        self.neighbours = config.glu_layout == "interleaved1"  # a lane holds gate and up of one column side by side
        self.h_box: Any = glu_stores.Box(self.h_columns, warp, lane) if config.h_dtype else None
        self.d_box: Any = None
        if config.d_dtype is not None:
            self.d_box = glu_stores.NarrowBox(warp, lane) if self.neighbours else glu_stores.Box(CHUNK_N, warp, lane)
        self.quantizer: Any = None
        if quantizes(config):
            # Two neighbouring blocks of 32 columns are its sides, so that it sees N / 2 compact columns.
            self.quantizer = Quantizer(Sides(config), columns >> 1, rows, *codes)
            self.codes_base = storage.codes.data_ptr().toint()
            self.h_rows = stores.Ring(config.glu_layout, warp, lane)
        self.h_base = storage.h.data_ptr().toint()
        self.d_base = storage.d.data_ptr().toint()
        self.math = DeviceMath()
        self.row_prob: Any = cute.make_rmem_tensor((2 * self.schedule.m_blocks,), Float32) if config.has_prob else None
        self.scale: Any = cute.make_rmem_tensor((1,), Float32) if config.has_alpha else None

    # The object is constant: the DSL may carry it through loops as nothing.
    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def block_row(self, block: int):
        """First row, inside the tile, of this warp's 16 rows of a 64-row block."""
        if self.config.q_col_dtype is not None:
            return self.warp * 2 * stores.WARP_ROWS + block * stores.WARP_ROWS
        if self.schedule.pingpong:
            return self.warp * stores.WARP_ROWS + block * 64
        return self.warp * stores.WARP_ROWS + block * 128 + self.group * 64

    def _group(self):
        """The warpgroup among those that compute; with codes read anew, as the backward does for the registers."""
        return self.group if self.quantizer is None else p.fresh_warpgroup() - 1

    @cute.jit
    def begin_tile(self, row: Int32, end: Int32, expert: Int32):
        """Loads what the tile's epilogue needs per row and per expert, ahead of the mainloop that hides it."""
        config, lane = self.config, p.fresh_lane()
        if cutlass.const_expr(config.has_prob):
            for block in cutlass.range_constexpr(self.schedule.m_blocks):
                for r in cutlass.range_constexpr(2):
                    at = row + self.block_row(block) + (lane >> 2) + 8 * r
                    value = Float32(0.0)
                    if at < end:
                        value = self.prob[at]
                    self.row_prob[2 * block + r] = value
        if cutlass.const_expr(config.has_alpha):
            value = self.alpha[expert]
            self.scale[0] = value * value if cutlass.const_expr(config.alpha_exponent == 2) else value

    @cute.jit
    def run(self, acc: cute.Tensor, row: Int32, n0: Int32, end: Int32, expert: Int32, used: Int32):
        """The tile's chunks, columns outside, 64-row blocks inside; returns how many chunks the ring has served."""
        s = self.schedule
        if cutlass.const_expr(self.quantizer is not None):
            return self._run_quantized(acc, row, n0, end, expert, used)
        for nc in cutlass.range_constexpr(s.tile_n // (2 * CHUNK_N)):
            if n0 + nc * CHUNK_N < self.columns:
                for block in cutlass.range_constexpr(s.m_blocks):
                    self._chunk(acc, nc, block, row + self.block_row(block), n0 + nc * CHUNK_N, end, expert, used)
                    used += 1
        return used

    @cute.jit
    def _chunk(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        row: Int32,
        n0: Int32,
        end: Int32,
        expert: Int32,
        used: Int32,
    ):
        """32 columns of the activation, and 64 of h, of this warp's 16 rows, which begin at `row`; returns the
        activation as the quantizer takes it."""
        config, ring = self.config, self.schedule.ring_chunks
        index = self._group() * ring + (used & (ring - 1))
        d_base, h_base = self.d_base + index * D_CHUNK_BYTES, self.h_base + index * H_CHUNK_BYTES
        stores_any = cutlass.const_expr(config.d_dtype is not None or config.h_dtype is not None)
        if cutlass.const_expr(stores_any):
            # The stores that last left from here have read it when at most the ring's others are under way.
            cute.arch.cp_async_bulk_wait_group(ring - 1, read=True)
            cute.arch.sync_warp()
        values = [None] * 16
        for half in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.neighbours):
                self._half_of_neighbours(acc, nc, block, half, n0, expert, h_base, d_base)
            else:
                self._half(acc, nc, block, half, n0, expert, h_base, d_base, values)
        if cutlass.const_expr(stores_any):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
        if cutlass.const_expr(config.h_dtype is not None):
            for box in cutlass.range_constexpr(self.h_boxes):
                column = stores.box_column(config.glu_layout, n0, self.columns, box)
                at = h_base + box * stores.HALF_BOX_BYTES
                self._store(self.store_h, index * self.h_boxes + box, at, self.h, self.h_columns, row, end, column)
        if cutlass.const_expr(config.d_dtype is not None):
            self._store(self.store_d, index, d_base, self.d, CHUNK_N, row, end, n0)
        if cutlass.const_expr(stores_any):
            cute.arch.cp_async_bulk_commit_group()
        return values

    def _store(self, store, index, base, tensor, columns: int, row, end, column) -> None:
        """This warp's rows of a box. With column codes all of them are before `end`, as `_run_quantized` saw."""
        atom, coords, boxes = store
        if self.config.q_col_dtype is not None:
            glu_stores.store_whole(atom, coords, boxes, index, columns, self.warp, row, column)
        else:
            glu_stores.store_box(atom, coords, boxes, index, base, tensor, columns, self.warp, row, end, column)

    @cute.jit
    def _run_quantized(self, acc: cute.Tensor, row: Int32, n0: Int32, end: Int32, expert: Int32, used: Int32):
        """`run` where codes are asked for: two chunks of columns at a time, which are the quantizer's sides."""
        for pair in cutlass.range_constexpr(self.schedule.tile_n // (4 * CHUNK_N)):
            at = n0 + pair * 2 * CHUNK_N
            if at < self.columns:
                if cutlass.const_expr(self.config.q_col_dtype is not None):
                    first = row + self.block_row(0)
                    # All 32 rows of a warp are before `end` or none, which is the caller's promise. A block that `end`
                    # cuts is left out, so that a broken promise does not write over another expert's rows.
                    if first + 2 * stores.WARP_ROWS <= end:
                        self._quantize(acc, pair, (0, 1), first, at, end, expert, used)
                else:
                    for block in cutlass.range_constexpr(self.schedule.m_blocks):
                        first = row + self.block_row(block)
                        # A branch also keeps the compiler from moving the next block up, for which registers spilled.
                        if first < end:
                            self._quantize(acc, pair, (block,), first, at, end, expert, used + 2 * block)
                used += 2 * self.schedule.m_blocks
        return used

    def _quantize(self, acc, pair: int, blocks, row, n0, end, expert, used) -> None:
        """64 columns of one or two blocks of 16 rows, which follow one another from `row` on."""
        values: Any = [([], []) for _ in blocks]
        for side in (0, 1):
            for i, block in enumerate(blocks):
                values[i][side].extend(
                    self._chunk(acc, 2 * pair + side, block, row + stores.WARP_ROWS * i, n0 + CHUNK_N * side, end,
                                expert, used + len(blocks) * side + i)
                )  # fmt: skip
        if codes_in_h(self.config):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            p.sync_warp()
            ring = self.h_base + self._group() * (self.schedule.ring_chunks * H_CHUNK_BYTES)
            pieces = [self.h_rows.pieces(ring + i * H_CHUNK_BYTES) for i in range(len(blocks))]
        else:
            mine = self.codes_base + (self._group() * 4 + self.warp) * (len(blocks) * 2 * PIECE_BYTES)
            pieces = [(mine + 2 * i * PIECE_BYTES, mine + (2 * i + 1) * PIECE_BYTES) for i in range(len(blocks))]
        self.quantizer.run(values, pieces, row, end, n0 >> 1, p.sync_warp)

    def _half(self, acc, nc: int, block: int, half: int, n0, expert, h_base, d_base, values) -> None:
        """16 columns of the activation, where a lane's gate and up of one column are of different 8-column blocks;
        fills their part of `values`."""
        concatenated = self.config.glu_layout == "concatenated"
        first, apart = (4 * nc, self.schedule.tile_n // 16) if concatenated else (8 * nc, 4)
        gates, ups, words = [], [], []
        for j in range(2):
            eight = first + 2 * half + j
            biases = [self._bias(expert, n0, 16 * half + 8 * j, side) for side in (0, 1)]
            for r in range(2):
                gate, gate_word = self._product(acc, block, eight, r, biases[0])
                up, up_word = self._product(acc, block, eight + apart, r, biases[1])
                y = [self._activate(g, u, block, r) for g, u in zip(gate, up, strict=True)]
                gates.append(gate_word)
                ups.append(up_word)
                words.append(self._word(y, values, 4 * half + 2 * j + 8 * r))
        if self.config.h_dtype is not None:
            # Columns of up follow 32 columns of gate in one box, or fill a box of their own.
            self.h_box.write(h_base, half, gates)
            self.h_box.write(h_base + (stores.HALF_BOX_BYTES if concatenated else 0), half + (0 if concatenated else 2),
                             ups)  # fmt: skip
        if self.d_box is not None:
            self.d_box.write(d_base, half, words)

    def _word(self, y, values, at: int):
        """Two neighbouring columns as a word of d, None without d; puts what is quantized of them into `values`."""
        source, kind = self.config.source_dtype, self.config.source_dtype or self.config.d_dtype
        word = p.pack(y[0], y[1], kind) if kind is not None else None
        values[at : at + 2] = y if source is None else p.unpack(word, source)
        return word

    def _half_of_neighbours(self, acc, nc: int, block: int, half: int, n0, expert, h_base, d_base) -> None:
        """16 columns of the activation, 32 of the product: of each 8 of these a lane has one gate and its up. d is
        there: codes, which alone can stand for it, are not built in this layout."""
        for eight in range(2):  # columns of the activation; 16 of the product
            words, values = [], []
            for j in range(2):
                part = 4 * half + 2 * eight + j
                bias = self._bias(expert, n0, 8 * part, 0)
                for r in range(2):
                    (gate, up), word = self._product(acc, block, 8 * nc + part, r, bias)
                    words.append(word)
                    values.append(self._activate(gate, up, block, r))
            if self.config.h_dtype is not None:
                self.h_box.write(h_base, 2 * half + eight, words)
            for r in range(2):
                word = p.pack(values[r], values[2 + r], str(self.config.d_dtype))
                self.d_box.write(d_base, 2 * half + eight, r, word)

    def _bias(self, expert, n0, inside: int, side: int):
        """The bias of this lane's two columns of the 8 at `inside` of the chunk's gates (side 0) or ups (1)."""
        kind = self.config.bias_dtype
        if kind is None:
            return None
        start = n0 + self.columns * side if self.config.glu_layout == "concatenated" else 2 * n0 + CHUNK_N * side
        address = p.row_address(self.bias, expert, start + inside + 2 * (p.fresh_lane() & 3))
        if kind == "fp32":
            return tuple(p.from_bits(word) for word in p.load_global_v2(address))
        return p.unpack(p.load_global(address, cutlass.Uint32), kind)

    def _product(self, acc, block: int, eight: int, r: int, bias):
        """The product of two neighbouring columns as the activation reads it, and the word of h that holds it."""
        config = self.config
        at = block * (self.schedule.tile_n // 2) + 4 * eight + 2 * r
        values = [acc[at], acc[at + 1]]
        if config.has_alpha:
            values = [v * self.scale[0] for v in values]
        if bias is not None:
            values = [v + b for v, b in zip(values, bias, strict=True)]
        kind = config.product_dtype or config.h_dtype
        word = p.pack(values[0], values[1], kind) if kind is not None else None
        if config.product_dtype is not None:
            values = p.unpack(word, config.product_dtype)
        return values, word

    def _activate(self, gate, up, block: int, r: int):
        y = glu(gate, up, self.config.act, self.math)
        return y * self.row_prob[2 * block + r] if self.config.has_prob else y
