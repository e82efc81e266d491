"""Zeroes what no expert covers: rows past the last offset, or the slices of experts without rows.

A matmul cut by offsets leaves these unwritten. Where they are is known on the device only, so that zeroing with torch
passes over the whole result; this touches nothing else, and ends after a load or two where all is covered.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

THREADS = 256
ROW_BLOCKS = 528  # four CTAs a multiprocessor of an H200: enough to fill its memory system, few enough to end at once
BLOCKS_OF_EXPERT = 32


class ZeroUncovered:
    """The kernel for rows, or with `by_expert` for slices of experts."""

    def __init__(self, by_expert: bool) -> None:
        self.by_expert = by_expert

    @cute.jit
    def __call__(
        self,
        offsets: cute.Tensor,  # (L,) int32 end offsets
        out: cute.Tensor,  # (M, words of a row), or (L, words of an expert); 8-byte words
        stream: cuda.CUstream,
    ):
        grid = [ROW_BLOCKS, 1, 1]
        if cutlass.const_expr(self.by_expert):
            grid = [cute.size(offsets), BLOCKS_OF_EXPERT, 1]
        self.kernel(offsets, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, offsets: cute.Tensor, out: cute.Tensor):
        thread, (block, part, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        if cutlass.const_expr(self.by_expert):
            begin = Int32(0)
            if block > 0:
                begin = offsets[block - 1]
            if offsets[block] <= begin:
                self._zero(out, block, part * THREADS + thread, BLOCKS_OF_EXPERT * THREADS)
        else:
            rows = cute.size(out, mode=[0])
            first = cutlass.min(cutlass.max(offsets[cute.size(offsets) - 1], Int32(0)), rows)
            for row in cutlass.range(first + block, rows, ROW_BLOCKS):
                self._zero(out, row, thread, THREADS)

    @cute.jit
    def _zero(self, out: cute.Tensor, row: Int32, first: Int32, step: cutlass.Constexpr):
        for word in cutlass.range(first, cute.size(out, mode=[1]), step):
            out[row, word] = cutlass.Int64(0)


def compile_uncovered(by_expert: bool):
    """Compiles one of the two for the target architecture; returns the TVM-FFI function (offsets, out)."""
    rows, words, experts = (cute.sym_int32() for _ in range(3))
    out = make_fake_tensor(cutlass.Int64, (rows, words), (cute.sym_int64(), 1), assumed_align=8)
    offsets = make_fake_tensor(Int32, (experts,), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ZeroUncovered(by_expert), offsets, out, stream, options="--enable-tvm-ffi")
