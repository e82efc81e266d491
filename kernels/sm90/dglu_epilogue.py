"""DgluEpilogue of one consumer warpgroup: accumulators and C chunks in, gradient, dprob and reductions out."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from . import primitives as p
from . import reductions, stores
from .config import CHUNK_N, log2
from .dglu_config import DgluConfig
from .epilogue_math import DeviceMath, glu_backward
from .quantizer import Quantizer


class DgluEpilogue:
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
        self.loads_c, self.stores_d = config.c_dtype != "fp32", config.d_dtype in ("bf16", "fp16")
        self.quantizes = config.q_row_dtype is not None or config.q_col_dtype is not None
        self.quantizer: Any = Quantizer(config, columns, rows, *quantized) if self.quantizes else None
        # Rows past the expert's end must not reach a sum over rows. With column codes there are none, see `_pair`.
        self.sums_columns = config.dbias_dtype is not None or config.has_amax
        self.masks_rows = self.sums_columns and config.q_col_dtype is None
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
        for nc in cutlass.range_constexpr(s.tile_n // CHUNK_N):
            if n0 + nc * CHUNK_N < self.columns:
                used = self._columns(acc, nc, row, n0 + nc * CHUNK_N, end, slot, used)
        if cutlass.const_expr(self.stores_d and not self.quantizes):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._give_back(self._slot(used - 1))
        if cutlass.const_expr(self.row_sum is not None):
            self._store_row_sums(row, n0, end)
        if cutlass.const_expr(self.peak is not None):
            group = p.fresh_warpgroup() - 1
            reductions.store_peaks(self.peak, self.amax_parts, slot, n0 // s.tile_n, group, self.warp, s.pingpong)
        return used

    @cute.jit
    def _columns(
        self, acc: cute.Tensor, nc: cutlass.Constexpr, row: Int32, n0: Int32, end: Int32, slot: Int32, used: Int32
    ):
        """32 compact columns of the tile."""
        if cutlass.const_expr(self.column_sum is not None):
            self.column_sum.fill(0.0)
        if cutlass.const_expr(self.config.q_col_dtype is not None):
            self._pair(acc, nc, row + self.block_row(0), n0, end, slot, used)
            used += self.schedule.m_blocks
        else:
            for block in cutlass.range_constexpr(self.schedule.m_blocks):
                self._block(acc, nc, block, row + self.block_row(block), n0, end, used)
                used += 1
            self._store_column_sums(slot, n0)
        return used

    @cute.jit
    def _store_column_sums(self, slot: Int32, n0: Int32):
        if cutlass.const_expr(self.column_sum is not None):
            scratch, group = self.storage.scratch.data_ptr().toint(), p.fresh_warpgroup() - 1
            reductions.store_column_sums(
                self.column_sum, scratch, group, self.warp, self.dbias_parts, slot, n0, self.columns,
                self.config.glu_layout, self.schedule.pingpong,
            )  # fmt: skip

    @cute.jit
    def _block(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        warp_row: Int32,
        n0: Int32,
        end: Int32,
        used: Int32,
    ):
        """One chunk: gradient, its store, and its row codes."""
        chunk = self._slot(used)
        self._wait(chunk, used)
        values = self._chunk(acc, nc, block, warp_row, n0, end, chunk)
        if cutlass.const_expr(self.stores_d):
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(self.quantizes):
            self._quantize([values], warp_row, n0, end, chunk)
        elif cutlass.const_expr(self.stores_d):
            # All but the newest store have read their chunk: the one before it in this tile may be refilled.
            if cutlass.const_expr(block > 0 or nc > 0):
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                self._give_back(self._slot(used - 1))
        else:
            self._give_back(chunk)

    @cute.jit
    def _pair(
        self, acc: cute.Tensor, nc: cutlass.Constexpr, warp_row: Int32, n0: Int32, end: Int32, slot: Int32, used: Int32
    ):
        """Two chunks, 32 rows of a warp: all before `end` or none, which is the caller's promise. A block that `end`
        cuts is left out, so that a broken promise writes neither past a tensor nor over another expert's rows.

        Sums over columns leave their registers before codes need them, and meet the other warps' in both branches.
        """
        # Tiles take chunks in pairs, so the second one's slot follows.
        chunk = self._slot(used)
        self._wait(chunk, used)
        self._wait(chunk + 1, used)
        if warp_row + 2 * stores.WARP_ROWS <= end:
            values = []
            for block in cutlass.range_constexpr(2):
                at = warp_row + stores.WARP_ROWS * block
                values.append(self._chunk(acc, nc, block, at, n0, end, chunk + block))
            if cutlass.const_expr(self.stores_d):
                cute.arch.cp_async_bulk_commit_group()
            self._add_columns(values)
            self._store_column_sums(slot, n0)
            self._quantize(values, warp_row, n0, end, chunk)
        else:
            self._store_column_sums(slot, n0)
            self._give_back(chunk)
            self._give_back(chunk + 1)

    def _add_columns(self, values) -> None:
        """Column sums of two chunks; one by one in `_element` they would hold 16 registers more for all that time."""
        if self.column_sum is not None:
            for i in range(16):
                (a, b), (c, d) = ((block[i // 8][i % 8], block[i // 8][8 + i % 8]) for block in values)
                self.column_sum[i] = (a + b) + (c + d)

    def _quantize(self, values, warp_row: Int32, n0: Int32, end: Int32, first: Int32) -> None:
        """Codes and scales of one or two chunks, by way of their own ring slots, which then are free."""
        if self.stores_d:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        chunks = [first + i for i in range(len(values))]

        def release() -> None:
            # Without the fence the next TMA load into a slot may overtake these accesses: codes differed on an H200.
            cute.arch.fence_proxy("async.shared", space="cta")
            for chunk in chunks:
                self._give_back(chunk)

        pieces = [self.ring.pieces(self._address(chunk)) for chunk in chunks]
        self.quantizer.run(values, pieces, warp_row, end, n0, release)

    def _slot(self, used):
        """Number of the ring slot, over both warpgroups, that the warpgroup's chunk `used` lies in."""
        ring = self.schedule.ring_chunks
        return (p.fresh_warpgroup() - 1) * ring + (used & (ring - 1))

    def _address(self, chunk):
        """Shared-memory address of a slot."""
        return self.ring_base + chunk * stores.CHUNK_BYTES

    @cute.jit
    def _wait(self, chunk: Int32, used: Int32):
        phase = (used >> log2(self.schedule.ring_chunks)) & 1
        cute.arch.mbarrier_wait(self.storage.c_full.data_ptr() + chunk, phase)

    @cute.jit
    def _give_back(self, chunk: Int32):
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.storage.c_empty.data_ptr() + chunk)

    @cute.jit
    def _chunk(
        self,
        acc: cute.Tensor,
        nc: cutlass.Constexpr,
        block: cutlass.Constexpr,
        warp_row: Int32,
        n0: Int32,
        end: Int32,
        chunk: Int32,
    ):
        """One chunk: read C, compute, write D over it, store this warp's rows; returns the values to quantize."""
        base = self._address(chunk)
        values = ([None] * 16, [None] * 16)
        lines = self._lines(warp_row, n0, end)
        for half in cutlass.range_constexpr(2):
            gate, up = self.ring.read(base, half) if cutlass.const_expr(self.loads_c) else (None, None)
            dgate, dup = self._half(acc, nc, block, half, gate, up, lines, values)
            if cutlass.const_expr(self.stores_d):
                self.ring.write(base, half, dgate, dup)
        if cutlass.const_expr(self.stores_d):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self._store_d(base, chunk, warp_row, n0, end)
        return values

    def _half(self, acc, nc: int, block: int, half: int, gate, up, lines, values):
        """16 compact columns of one chunk: gradient words in the ring's order; fills `values` for the quantizer."""
        config = self.config
        dgate_words, dup_words = [], []
        for j in range(2):
            for r in range(2):
                first = block * (self.schedule.tile_n // 2) + 4 * (nc * 4 + half * 2 + j) + 2 * r
                column = half * 16 + j * 8
                if self.loads_c:
                    pairs = self._unpacked(gate[2 * j + r], up[2 * j + r])
                else:
                    pairs = self._loaded(lines, r, column)
                grads = [
                    self._element(acc[first + i], g, u, block, r, lines["inside"][r], (half * 2 + j) * 2 + i)
                    for i, (g, u) in enumerate(self._inputs(*pairs))
                ]
                (dg0, du0, y0), (dg1, du1, y1) = grads
                if self.quantizes:
                    at = (half * 2 + j) * 2 + 8 * r
                    values[0][at : at + 2] = dg0, dg1
                    values[1][at : at + 2] = du0, du1
                if config.d_dtype == "fp32":
                    self._store_f32(lines, r, column, (dg0, dg1), (du0, du1))
                elif config.d_dtype is not None:
                    dgate_words.append(p.pack(dg0, dg1, config.d_dtype))
                    dup_words.append(p.pack(du0, du1, config.d_dtype))
                if config.activation_dtype is not None:
                    word = p.pack(y0, y1, config.activation_dtype)
                    stores.store_inside(lines["activation"][r] + 2 * column, [word], lines["inside"][r])
        return dgate_words, dup_words

    def _lines(self, warp_row, n0, end) -> dict:
        """Where in global memory a lane's part of a chunk lies, and whether its two rows are the expert's ("inside";
        None where that is known)."""
        if not self.needs_rows:
            return {"inside": (None, None)}
        config, lane = self.config, p.fresh_lane()
        row, column = warp_row + (lane >> 2), n0 + 2 * (lane & 3)
        out: dict[str, Any] = {"inside": (None, None)}
        if config.q_col_dtype is None:
            out["inside"] = row < end, row + 8 < end
        for name, tensor, kind in (("c", self.c, config.c_dtype), ("d", self.d, config.d_dtype)):
            if kind == "fp32":
                starts = (reductions.column_of(config.glu_layout, column, side, self.columns) for side in (0, 1))
                out[name] = [stores.lane_rows(tensor, row, at) for at in starts]
        if config.activation_dtype is not None:
            out["activation"] = stores.lane_rows(self.activation, row, column)
        return out

    def _unpacked(self, gate_word, up_word):
        return p.unpack(gate_word, self.config.c_dtype), p.unpack(up_word, self.config.c_dtype)

    def _loaded(self, lines, r: int, column: int):
        """(gates, ups) of two neighbouring compact columns of a float32 C."""
        (gate, up), inside = (side[r] for side in lines["c"]), lines["inside"][r]
        if self.config.glu_layout == "interleaved1":
            (g0, u0), (g1, u1) = (stores.load_pair(gate + 8 * (column + i), inside) for i in (0, 1))
            return (g0, g1), (u0, u1)
        return stores.load_pair(gate + 4 * column, inside), stores.load_pair(up + 4 * column, inside)

    def _store_f32(self, lines, r: int, column: int, dgate, dup) -> None:
        (gate, up), inside = (side[r] for side in lines["d"]), lines["inside"][r]
        if self.config.glu_layout == "interleaved1":
            for i in (0, 1):
                stores.store_inside(gate + 8 * (column + i), [p.bits(dgate[i]), p.bits(dup[i])], inside)
        else:
            stores.store_inside(gate + 4 * column, [p.bits(x) for x in dgate], inside)
            stores.store_inside(up + 4 * column, [p.bits(x) for x in dup], inside)

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
        if self.sums_columns:
            safe_gate, safe_up = dgate, dup
            if self.masks_rows:
                safe_gate, safe_up = (self.math.zero_unless(inside, x) for x in (dgate, dup))
            if self.column_sum is not None and config.q_col_dtype is None:
                self.column_sum[column] = self.column_sum[column] + safe_gate
                self.column_sum[8 + column] = self.column_sum[8 + column] + safe_up
            if self.peak is not None:
                self.peak[0] = p.max_magnitude(self.peak[0], safe_gate)
                self.peak[1] = p.max_magnitude(self.peak[1], safe_up)
        if config.activation_dtype is not None and prob is not None:
            y = y * prob
        return dgate, dup, y

    @cute.jit
    def _store_d(self, base, chunk: Int32, warp_row: Int32, n0: Int32, end: Int32):
        """This warp's 16 rows: by TMA when all are the expert's, row by row when its last row is among them."""
        if cutlass.const_expr(self.config.q_col_dtype is not None):
            # `_pair` says that all are. The other branch, compiled in, made 128-column tiles spill.
            self._store_box(chunk, warp_row, n0)
        elif warp_row + stores.WARP_ROWS <= end:
            self._store_box(chunk, warp_row, n0)
        elif warp_row < end:
            layout = self.config.glu_layout
            stores.store_rows(base, layout, self.warp, self.lane, self.d, warp_row, end, n0, self.columns)

    def _store_box(self, chunk, warp_row, n0) -> None:
        layout = self.config.glu_layout
        count, tile = stores.boxes(layout), (stores.WARP_ROWS, stores.box_columns(layout))
        for box in range(count):
            column = stores.box_column(layout, n0, self.columns, box)
            g_d = cute.local_tile(cute.domain_offset((warp_row, column), self.coords_d), tile, (0, 0))
            s_d = cute.local_tile(self.s_c[None, None, chunk * count + box], tile, (self.warp, 0))
            part, target = cpasync.tma_partition(
                self.atom_d, 0, cute.make_layout(1), cute.group_modes(s_d, 0, 2), cute.group_modes(g_d, 0, 2)
            )
            cute.copy(self.atom_d, part, target, cache_policy=cutlass.Int64(stores.STREAM))

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
