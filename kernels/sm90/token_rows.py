"""Rows of tokens to the rows of their experts and back: one kernel that adds up each token's rows, one that copies.

A token chose `top_k` experts; slot[t * top_k + j] is the row of its choice j, and all of them are different. The sum
is out[t] = sum over j of source[slot[t * top_k + j]], added in float32 in the order of j and rounded once. The copy
reads each token once and writes it top_k times, where a gather by rows would read it as often: 704 MB instead of 940
for 16384 tokens of 7168 bf16 with two choices. Both have no shared memory and no barrier.

us on an H200, and the share of a copy's 4.27 TB/s; Inductor's gather and sum, and torch's, in the same rounds:

    tokens, choices, columns    copy         Inductor  torch    sum          Inductor  torch
    16384   2        7168       188  0.88    243       247      180  0.92    180       728
    16384   4        2048        91  0.86    133       136       88  0.90     91       285
     8192   8        2048        86  0.83    121       124       80  0.89    321       245

Threads: 2**shift neighbouring ones take a row's 16-byte words in turn, in batches of words that make `loads` loads a
thread, of which the compiler issues 4 to 8 before the first is used. Blocks are (tokens, parts of a row): more than one
part only where there are too few tokens to fill the GPU. Behind the tokens' blocks of the copy come those that zero
empty rows. Loads past a row's end or the last token read again what is there: a predicate on a load keeps its registers
alive around the loop.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from . import primitives as p
from .routing_config import WORD_BYTES, TokenRowsConfig

FILL = 1056  # blocks that fill the GPU: 8 a multiprocessor of an H200
ROWS_A_BLOCK = 64  # of those that look for empty rows


class TokenRows:
    """What both kernels share: the grid, and each thread's place in it."""

    def __init__(self, config: TokenRowsConfig) -> None:
        self.config, self.top_k, self.loads = config, config.top_k, config.loads
        self.dtype = config.dtype or ""
        loads_a_word = max(2, config.top_k) if config.dtype else 1  # two where one would do: with 8 registers spill
        self.batch = max(1, config.loads // loads_a_word)

    def _shift(self, words: Int32):
        """log2 of the threads of a row: as few as it has words, rounded up, or all."""
        shift = Int32(0)
        for power in range(self.config.threads.bit_length() - 1):
            shift += Int32(words > (1 << power))
        return shift

    def _grid(self, tokens: Int32, words: Int32, shift: Int32):
        """(blocks that the tokens take, parts of a row)."""
        blocks = (tokens + (Int32(self.config.threads) >> shift) - 1) >> (Int32(self._log_threads()) - shift)
        batch_words = Int32(self.batch) << shift
        batches = (words + batch_words - 1) // batch_words
        return blocks, cutlass.min(batches, cutlass.max(Int32(FILL) // cutlass.max(blocks, Int32(1)), Int32(1)))

    def _log_threads(self) -> int:
        return self.config.threads.bit_length() - 1

    def _place(self, tokens: Int32, words: Int32, shift: Int32):
        """(token, the thread's place in its row, words that it may store, the block's first batch of words, the words
        from one batch to the next). Threads behind the last token load its rows too, so that warps stay together."""
        thread = cute.arch.thread_idx()[0]
        block, part, _ = cute.arch.block_idx()
        token = (block << (Int32(self._log_threads()) - shift)) + (thread >> shift)
        limit = p.select(token < tokens, words, Int32(0))
        batch_words = Int32(self.batch) << shift
        place = thread & ((Int32(1) << shift) - 1)
        return cutlass.min(token, tokens - 1), place, limit, part * batch_words, cute.arch.grid_dim()[1] * batch_words

    def _rows(self, base: Int64, pitch: Int64, slot: Int64, token: Int32):
        """Addresses of the rows of a token's choices."""
        first = slot + Int64(token) * (8 * self.top_k)
        return [base + _load_i64(first + 8 * j) * pitch for j in range(self.top_k)]


class SumOfChoices(TokenRows):
    """out[t] = sum over j of source[slot[t * top_k + j]]."""

    @cute.jit
    def __call__(self, source: Int64, pitch: Int64, slot: Int64, out: Int64, tokens: Int32, words: Int32, stream):
        shift = self._shift(words)
        blocks, parts = self._grid(tokens, words, shift)
        self.kernel(source, pitch, slot, out, tokens, words, shift).launch(
            grid=[blocks, parts, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, source: Int64, pitch: Int64, slot: Int64, out: Int64, tokens: Int32, words: Int32, shift: Int32):
        token, place, limit, first, step = self._place(tokens, words, shift)
        rows = self._rows(source, pitch, slot, token)
        into = out + Int64(token) * Int64(words) * WORD_BYTES
        for start in cutlass.range(first, words, step, unroll=1):
            self._batch(rows, into, start + place, words, limit, shift)

    @cute.jit
    def _batch(self, rows, into: Int64, first: Int32, words: Int32, limit: Int32, shift: Int32):
        places = [first + (Int32(b) << shift) for b in range(self.batch)]
        inside = [cutlass.min(place, words - 1) for place in places]
        loaded = [[_load(row + Int64(word) * WORD_BYTES) for row in rows[: self.loads]] for word in inside]
        for b in cutlass.range_constexpr(self.batch):
            total = loaded[b][0]
            if cutlass.const_expr(self.top_k > 1):
                total = self._unpacked(total)
                for j in cutlass.range_constexpr(1, self.top_k):
                    # Past the first ones, a word is loaded where it is added: registers are for `loads` of them.
                    word = loaded[b][j] if j < self.loads else _load(rows[j] + Int64(inside[b]) * WORD_BYTES)
                    total = [a + b for a, b in zip(total, self._unpacked(word), strict=True)]
                total = self._packed(total)
            p.store_global(into + Int64(places[b]) * WORD_BYTES, total, places[b] < limit)

    def _unpacked(self, words):
        if self.dtype == "fp32":
            return [p.from_bits(word) for word in words]
        return [value for word in words for value in p.unpack(word, self.dtype)]

    def _packed(self, values):
        if self.dtype == "fp32":
            return [p.bits(value) for value in values]
        return [p.pack(low, high, self.dtype) for low, high in zip(values[::2], values[1::2], strict=True)]


class CopyToChoices(TokenRows):
    """out[slot[t * top_k + j]] = source[t] for every j, and zeros in the rows that are not `filled`."""

    @cute.jit
    def __call__(self, source: Int64, pitch: Int64, slot: Int64, filled: Int64, out: Int64, tokens: Int32, rows: Int32,
                 words: Int32, stream):  # fmt: skip
        """`filled` (rows,) bool; 0 for `rows` where all are."""
        shift = self._shift(words)
        blocks, parts = self._grid(tokens, words, shift)
        looking = (rows + (ROWS_A_BLOCK - 1)) // ROWS_A_BLOCK
        self.kernel(source, pitch, slot, filled, out, tokens, rows, words, shift, blocks).launch(
            grid=[blocks + looking, parts, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, source: Int64, pitch: Int64, slot: Int64, filled: Int64, out: Int64, tokens: Int32, rows: Int32,
               words: Int32, shift: Int32, blocks: Int32):  # fmt: skip
        block, part, _ = cute.arch.block_idx()
        if block < blocks:
            token, place, limit, first, step = self._place(tokens, words, shift)
            targets = self._rows(out, Int64(words) * WORD_BYTES, slot, token)
            base = source + Int64(token) * pitch
            for start in cutlass.range(first, words, step, unroll=1):
                self._batch(base, targets, start + place, words, limit, shift)
        elif part == 0:
            self._zero_empty(filled, out, (block - blocks) * ROWS_A_BLOCK, rows, words)

    @cute.jit
    def _batch(self, base: Int64, targets, first: Int32, words: Int32, limit: Int32, shift: Int32):
        places = [first + (Int32(b) << shift) for b in range(self.batch)]
        loaded = [_load(base + Int64(cutlass.min(place, words - 1)) * WORD_BYTES) for place in places]
        for b in cutlass.range_constexpr(self.batch):
            for target in targets:
                p.store_global(target + Int64(places[b]) * WORD_BYTES, loaded[b], places[b] < limit)

    @cute.jit
    def _zero_empty(self, filled: Int64, out: Int64, first: Int32, rows: Int32, words: Int32):
        """Zeros in the empty ones of ROWS_A_BLOCK rows, a warp a row."""
        thread = cute.arch.thread_idx()[0]
        last = cutlass.min(first + ROWS_A_BLOCK, rows)
        for row in cutlass.range(first + thread // 32, last, self.config.threads // 32, unroll=4):
            if _load_u8(filled + Int64(row)) == 0:
                base = out + Int64(row) * Int64(words) * WORD_BYTES
                for word in cutlass.range(thread % 32, words, 32, unroll=1):
                    p.store_global(base + Int64(word) * WORD_BYTES, [Uint32(0)] * 4)


def _load(address):
    """16 bytes that nobody else here reads."""
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def _load_i64(address):
    return cute.arch.inline_ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def _load_u8(address):
    return cute.arch.inline_ptx("ld.global.nc.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def compile_token_rows(config: TokenRowsConfig):
    """The TVM-FFI function of a configuration; its arguments are those of the class's `__call__`, as integers."""
    kernel = SumOfChoices(config) if config.dtype else CopyToChoices(config)
    addresses = [Int64(16)] * (4 if config.dtype else 5)
    sizes = [Int32(1)] * (2 if config.dtype else 3)
    return cute.compile(kernel, *addresses, *sizes, make_fake_stream(), options="--enable-tvm-ffi")
