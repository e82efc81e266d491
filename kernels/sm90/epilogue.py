"""Epilogue of one consumer warpgroup: accumulators and C chunks in, gradient, dprob and reductions out."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from . import primitives as p
from . import reductions, stores
from .config import CHUNK_N, DgluConfig, log2
from .epilogue_math import DeviceMath, glu_backward
from .quantizer import Quantizer


def rolls(config: DgluConfig) -> bool:
    """Whether the tile's columns are a loop of the epilogue, or straight code.

    With column blocks straight code of a 128-column tile is 140 KB. A loop keeps every accumulator alive to its end,
    which only tiles of 96 columns have the registers for.
    """
    return config.q_col_dtype is not None and config.schedule.tile_n <= 96


class Epilogue:
    """State and steps of one warp's epilogue; every tensor that the configuration does not ask for is None."""

    def __init__(self, config: DgluConfig, storage, group, warp, atom_d, coords_d, s_c, c, d, prob, alpha, beta,
                 activation, dprob_parts, dbias_parts, amax_parts, columns, rows, quantized) -> None:  # fmt: skip
        self.config, self.schedule = config, config.schedule
        self.storage, self.group, self.warp = storage, group, warp
        self.atom_d, self.coords_d, self.s_c, self.c, self.d = atom_d, coords_d, s_c, c, d
        self.prob, self.alpha, self.beta, self.activation = prob, alpha, beta, activation
        self.dprob_parts, self.dbias_parts, self.amax_parts = dprob_parts, dbias_parts, amax_parts
        self.columns = columns
        self.lane = cute.arch.lane_idx()
        self.ring = stores.Ring(config.glu_layout, warp, self.lane)
        self.ring_base = storage.c.data_ptr().toint()
        self.math = DeviceMath()
        self.rolled = rolls(config)
        self.loads_c, self.stores_d = config.c_dtype != "fp32", config.d_dtype in ("bf16", "fp16")
        self.quantizes = config.q_row_dtype is not None or config.q_col_dtype is not None
        self.quantizer: Any = Quantizer(config, columns, rows, self.lane, *quantized) if self.quantizes else None
        # Rows whose values must not reach a sum over rows: those past the expert's end.
        self.masks_rows = config.dbias_dtype is not None or config.has_amax
        # Whether an element's own row and column matter, beyond its place in the chunk.
        self.needs_rows = self.masks_rows or config.activation_dtype is not None or "fp32" in (
            config.c_dtype, config.d_dtype
        )  # fmt: skip
        blocks = self.schedule.m_blocks
        self.row_prob: Any = cute.make_rmem_tensor((2 * blocks,), Float32) if config.has_prob else None
        self.row_sum: Any = cute.make_rmem_tensor((2 * blocks,), Float32) if config.has_dprob else None
        self.scale = cute.make_rmem_tensor((2,), Float32)  # alpha**e, beta
        self.column_sum: Any = cute.make_rmem_tensor((16,), Float32) if config.dbias_dtype else None
        self.peak: Any = cute.make_rmem_tensor((2,), Float32) if config.has_amax else None

    # The object is constant: the DSL may carry it through loops as nothing.
    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def block_row(self, block: int):
        """First row, inside the tile, of this warp's 16 rows of a 64-row block."""
        if self.config.q_col_dtype is not None:
            return self.warp * 32 + block * stores.WARP_ROWS
        if self.schedule.pingpong:
            return self.warp * stores.WARP_ROWS + block * 64
        return self.warp * stores.WARP_ROWS + block * 128 + self.group * 64

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
        if cutlass.const_expr(config.has_beta):
            self.scale[1] = self.beta[expert]

    @cute.jit
    def run(self, acc: cute.Tensor, row: Int32, n0: Int32, end: Int32, slot: Int32, used: Int32):
        """The tile's chunks, columns outside, 64-row blocks inside; returns how many chunks the ring has served."""
        s = self.schedule
        if cutlass.const_expr(self.row_sum is not None):
            self.row_sum.fill(0.0)
        if cutlass.const_expr(self.peak is not None):
            self.peak.fill(0.0)
        if cutlass.const_expr(self.rolled):
            part = cute.make_rmem_tensor((16 * s.m_blocks,), Float32)
            for nc in cutlass.range(cutlass.min(s.tile_n, self.columns - n0) // CHUNK_N, unroll=1):
                self._pick(acc, nc, part)
                used = self._columns(part, 0, nc > 0, row, n0 + nc * CHUNK_N, end, slot, used)
        else:
            for nc in cutlass.range_constexpr(s.tile_n // CHUNK_N):
                if n0 + nc * CHUNK_N < self.columns:
                    used = self._columns(acc, nc, nc > 0, row, n0 + nc * CHUNK_N, end, slot, used)
        if cutlass.const_expr(self.stores_d):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._give_back(used - 1)
        if cutlass.const_expr(self.row_sum is not None):
            self._store_row_sums(row, n0, end)
        if cutlass.const_expr(self.peak is not None):
            reductions.store_peaks(self.peak, self.amax_parts, slot, n0 // s.tile_n, self.group, self.warp, s.pingpong)
        return used

    @cute.jit
    def _pick(self, acc: cute.Tensor, nc: Int32, part: cute.Tensor):
        """Copies the accumulators of 32 compact columns; registers have no dynamic index, so one branch per choice."""
        s = self.schedule
        for i in cutlass.range_constexpr(s.tile_n // CHUNK_N):
            if nc == i:
                for block in cutlass.range_constexpr(s.m_blocks):
                    for v in cutlass.range_constexpr(16):
                        part[16 * block + v] = p.copied(acc[block * (s.tile_n // 2) + 16 * i + v])

    @cute.jit
    def _columns(self, acc: cute.Tensor, nc: cutlass.Constexpr, follows, row: Int32, n0: Int32, end: Int32,
                 slot: Int32, used: Int32):
        """32 compact columns of the tile; `follows`: an earlier chunk of this tile is still to be released."""
        config = self.config
        if cutlass.const_expr(self.column_sum is not None):
            self.column_sum.fill(0.0)
        values = [None] * self.schedule.m_blocks
        for block in cutlass.range_constexpr(self.schedule.m_blocks):
            values[block] = self._chunk(acc, nc, block, row, n0, end, used)
            if cutlass.const_expr(self.stores_d):
                cute.arch.cp_async_bulk_commit_group()
                # All but the newest store have read their chunk: the one before it may be refilled.
                if cutlass.const_expr(block > 0) or follows:
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    self._give_back(used - 1)
            else:
                self._give_back(used)
            used += 1
            if cutlass.const_expr(config.q_row_dtype is not None and config.q_col_dtype is None):
                self.quantizer.quantize_rows(values[block], row + self.block_row(block), end, n0)
        if cutlass.const_expr(config.q_col_dtype is not None):
            self.quantizer.quantize_pair(values, row + self.block_row(0), end, n0)
        if cutlass.const_expr(self.column_sum is not None):
            reductions.store_column_sums(
                self.column_sum, self.storage.scratch.data_ptr().toint(), self.group, self.warp,
                self.dbias_parts, slot, n0, self.columns, config.glu_layout, self.schedule.pingpong,
            )  # fmt: skip
        return used

    @cute.jit
    def _give_back(self, chunk: Int32):
        ring = self.schedule.ring_chunks
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.storage.c_empty.data_ptr() + self.group * ring + (chunk & (ring - 1)))

    @cute.jit
    def _chunk(self, acc: cute.Tensor, nc: cutlass.Constexpr, block: cutlass.Constexpr, row: Int32, n0: Int32,
               end: Int32, used: Int32):
        """One chunk: read C, compute, write D over it, store this warp's rows; returns the values to quantize."""
        ring = self.schedule.ring_chunks
        index = self.group * ring + (used & (ring - 1))
        base = self.ring_base + index * stores.CHUNK_BYTES
        warp_row = row + self.block_row(block)
        cute.arch.mbarrier_wait(self.storage.c_full.data_ptr() + index, (used >> log2(ring)) & 1)
        values = ([None] * 16, [None] * 16)
        for half in cutlass.range_constexpr(2):
            gate, up = self.ring.read(base, half) if cutlass.const_expr(self.loads_c) else (None, None)
            dgate, dup = self._half(acc, nc, block, half, gate, up, warp_row, n0, end, values)
            if cutlass.const_expr(self.stores_d):
                self.ring.write(base, half, dgate, dup)
        if cutlass.const_expr(self.stores_d):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self._store_d(base, index, warp_row, n0, end)
        return values

    def _half(self, acc, nc: int, block: int, half: int, gate, up, warp_row, n0, end, values):
        """16 compact columns of one chunk: gradient words in the ring's order; fills `values` for the quantizer."""
        config = self.config
        dgate_words, dup_words = [], []
        lane = p.fresh_lane() if self.needs_rows else 0
        per_block = 16 if self.rolled else self.schedule.tile_n // 2
        for j in range(2):
            for r in range(2):
                first = block * per_block + 4 * (nc * 4 + half * 2 + j) + 2 * r
                row = warp_row + (lane >> 2) + 8 * r if self.needs_rows else warp_row
                column = n0 + half * 16 + j * 8 + 2 * (lane & 3) if self.needs_rows else n0
                if self.loads_c:
                    pairs = self._unpacked(gate[2 * j + r], up[2 * j + r])
                else:
                    pairs = self._loaded(row, end, column)
                grads = [
                    self._element(acc[first + i], g, u, block, r, row < end, (half * 2 + j) * 2 + i)
                    for i, (g, u) in enumerate(self._inputs(*pairs))
                ]
                (dg0, du0, y0), (dg1, du1, y1) = grads
                if self.quantizes:
                    at = (half * 2 + j) * 2 + 8 * r
                    values[0][at : at + 2] = dg0, dg1
                    values[1][at : at + 2] = du0, du1
                if config.d_dtype == "fp32":
                    self._store_f32(row, end, column, (dg0, dg1), (du0, du1))
                elif config.d_dtype is not None:
                    dgate_words.append(p.pack(dg0, dg1, config.d_dtype))
                    dup_words.append(p.pack(du0, du1, config.d_dtype))
                if config.activation_dtype is not None:
                    stores.store_words(self.activation, row, end, column, p.pack(y0, y1, config.activation_dtype))
        return dgate_words, dup_words

    def _unpacked(self, gate_word, up_word):
        return p.unpack(gate_word, self.config.c_dtype), p.unpack(up_word, self.config.c_dtype)

    def _loaded(self, row, end, column):
        """(gates, ups) of two neighbouring compact columns of a float32 C."""
        if self.config.glu_layout == "interleaved1":
            (g0, u0), (g1, u1) = (stores.load_pair(self.c, row, end, 2 * column + 2 * i) for i in (0, 1))
            return (g0, g1), (u0, u1)
        columns = (reductions.column_of(self.config.glu_layout, column, side, self.columns) for side in (0, 1))
        return tuple(stores.load_pair(self.c, row, end, at) for at in columns)

    def _store_f32(self, row, end, column, dgate, dup) -> None:
        if self.config.glu_layout == "interleaved1":
            for i in (0, 1):
                stores.store_pair(self.d, row, end, 2 * column + 2 * i, dgate[i], dup[i])
        else:
            for side, pair in enumerate((dgate, dup)):
                at = reductions.column_of(self.config.glu_layout, column, side, self.columns)
                stores.store_pair(self.d, row, end, at, *pair)

    def _inputs(self, gates, ups):
        """((gate, up), (gate, up)) of two neighbouring columns, after beta."""
        if self.config.has_beta:
            gates, ups = [x * self.scale[1] for x in gates], [x * self.scale[1] for x in ups]
        return tuple(zip(gates, ups, strict=True))

    def _element(self, r, gate, up, block: int, half_row: int, inside, column: int):
        """One element: (dgate, dup, activation); adds to the row sum, column sums and peaks."""
        config = self.config
        if config.has_alpha:
            r = r * self.scale[0]
        prob = self.row_prob[2 * block + half_row] if config.has_prob else None
        dgate, dup, term, y = glu_backward(r, gate, up, prob, config.act, self.math)
        if self.row_sum is not None:
            i = 2 * block + half_row
            self.row_sum[i] = self.row_sum[i] + term
        if self.masks_rows:
            safe_gate = self.math.zero_unless(inside, dgate)
            safe_up = self.math.zero_unless(inside, dup)
            if self.column_sum is not None:
                self.column_sum[column] = self.column_sum[column] + safe_gate
                self.column_sum[8 + column] = self.column_sum[8 + column] + safe_up
            if self.peak is not None:
                self.peak[0] = cute.arch.fmax(self.peak[0], p.absolute(safe_gate))
                self.peak[1] = cute.arch.fmax(self.peak[1], p.absolute(safe_up))
        if config.activation_dtype is not None and prob is not None:
            y = y * prob
        return dgate, dup, y

    @cute.jit
    def _store_d(self, base, index: Int32, warp_row: Int32, n0: Int32, end: Int32):
        """This warp's 16 rows: by TMA when all are the expert's, row by row when its last row is among them."""
        layout = self.config.glu_layout
        count = cutlass.const_expr(stores.boxes(layout))
        width = cutlass.const_expr(stores.box_columns(layout))
        if warp_row + stores.WARP_ROWS <= end:
            for box in cutlass.range_constexpr(count):
                column = stores.box_column(layout, n0, self.columns, box)
                tile = (stores.WARP_ROWS, width)
                g_d = cute.local_tile(cute.domain_offset((warp_row, column), self.coords_d), tile, (0, 0))
                s_d = cute.local_tile(self.s_c[None, None, index * count + box], tile, (self.warp, 0))
                part, target = cpasync.tma_partition(
                    self.atom_d, 0, cute.make_layout(1), cute.group_modes(s_d, 0, 2), cute.group_modes(g_d, 0, 2)
                )
                cute.copy(self.atom_d, part, target, cache_policy=cutlass.Int64(stores.STREAM))
        elif warp_row < end:
            stores.store_rows(base, layout, self.warp, self.lane, self.d, warp_row, end, n0, self.columns)

    @cute.jit
    def _store_row_sums(self, row: Int32, n0: Int32, end: Int32):
        """dprob of this N tile: four lanes hold a row."""
        part, lane = n0 // self.schedule.tile_n, p.fresh_lane()
        for block in cutlass.range_constexpr(self.schedule.m_blocks):
            for r in cutlass.range_constexpr(2):
                total = self.row_sum[2 * block + r]
                total += cute.arch.shuffle_sync_bfly(total, 1)
                total += cute.arch.shuffle_sync_bfly(total, 2)
                at = row + self.block_row(block) + (lane >> 2) + 8 * r
                if (lane & 3) == 0 and at < end:
                    self.dprob_parts[part, at] = total
