"""Single instructions that the DSL has no name for, and packing. Every function works on one thread's scalars."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

DTYPES = {
    "bf16": BFloat16,
    "fp16": Float16,
    "fp32": Float32,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
LOG2_E = 1.4426950408889634


def select(condition, yes, no):
    """`yes` where the condition holds, else `no`; both of `yes`'s type."""
    return type(yes)(cutlass.select_(condition, yes, no))


def fresh_lane():
    """The lane index, read anew: the compiler cannot share what follows from it with earlier code, so no register
    holds such values across an epilogue that needs them all."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[cute.arch.lane_idx()]
    )


def fresh_warpgroup():
    """The warpgroup's number in the CTA, read anew, see `fresh_lane`. From `make_warp_uniform` it lies in a uniform
    register, of which the compiler made and spilled one copy for each use."""
    thread, _, _ = cute.arch.thread_idx()
    fresh = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[thread])
    return fresh >> 7


def sync_warp() -> None:
    """Lanes of a warp see what each has written to shared memory."""
    cute.arch.sync_warp()


def ldmatrix4(address):
    """Four 8x8 matrices of 16-bit elements from shared memory, one row address a lane: 4 words a lane."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def stmatrix4(address, words):
    """Stores what `ldmatrix4` loads."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def load_shared_v2(address):
    """Two 32-bit words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )


def store_shared_v4(address, words):
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def store_shared_v2(address, words):
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def load_shared_v4(address):
    """Four 32-bit words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def load_shared_i32(address):
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_shared_i32(address, value):
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, Int32(value)])


def load_shared_f32(address):
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def store_shared_f32(address, value):
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_global(address, dtype):
    """One 32-bit value of read-only global memory at a 64-bit address."""
    suffix = "f32" if dtype is Float32 else "b32"
    return cute.arch.inline_ptx(
        f"ld.global.nc.{suffix} {{$w0}}, [{{$r0}}];", write_only_types=[dtype], read_only_args=[address]
    )


def load_global_v2(address):
    return cute.arch.inline_ptx(
        "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )


def load_global_v4(address):
    return cute.arch.inline_ptx(
        "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def store_global(address, words, when=None):
    """1, 2 or 4 32-bit words to global memory at a 64-bit address, in the lanes where `when` holds."""
    n = len(words)
    vector = "" if n == 1 else f".v{n}"
    operands = "{$r1}" if n == 1 else "{" + ", ".join(f"{{$r{i + 1}}}" for i in range(n)) + "}"
    cute.arch.inline_ptx(
        f"st.global{vector}.b32 [{{$r0}}], {operands};", read_only_args=[address, *words], predicate=when
    )


def store_global_b16(address, word, when=None):
    """The low 16 bits of a word."""
    cute.arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[address, word], predicate=when)


def store_global_b8(address, word, when=None):
    """The low 8 bits of a word."""
    cute.arch.inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[address, word], predicate=when)


def store_shared_b8(address, word):
    """The low 8 bits of a word."""
    cute.arch.inline_ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[address, word])


def byte_permute(a, b, selector: int):
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def byte_permute_by(a, b, selector):
    """`byte_permute` with a selector that differs between lanes."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, selector]
    )


def max_u16x2(a, b):
    """Maxima of the two unsigned halves of words."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def max_nan(a, b):
    """Maximum; the canonical NaN if either is one."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def max_magnitude(a, b):
    """The larger magnitude; the canonical NaN if either is one."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 x, y; abs.f32 x, {$r0}; abs.f32 y, {$r1}; max.NaN.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def min_nan(a, b):
    """Minimum; the canonical NaN if either is one."""
    return cute.arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def pack_fp8x4(values, dtype: str):
    """Four float32, rounded to nearest even and saturated, as the 8-bit codes of a word."""
    convert = f"cvt.rn.satfinite.{dtype}x2.f32"
    return cute.arch.inline_ptx(
        f"{{ .reg .b16 low, high; {convert} low, {{$r1}}, {{$r0}}; {convert} high, {{$r3}}, {{$r2}};"
        " mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def bits(value):
    """The 32 bits of a float."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def absolute(x):
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def from_bits(word):
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def fma(a, b, c):
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def exp2(x):
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rcp(x):
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def sigmoid(x):
    """1 / (1 + 2**(-x log2 e)); relative error near 2**-22, also where the result is small.

    tanh.approx would save one special-function instruction, but its absolute error of 2**-11 is a relative error
    of several per cent for gates below -5.
    """
    return rcp(exp2(x * Float32(-LOG2_E)) + Float32(1.0))


def tanh(x):
    """2 sigmoid(2x) - 1: absolute error near 2**-22."""
    return fma(sigmoid(x + x), Float32(2.0), Float32(-1.0))


def unpack(word, dtype: str):
    """The two 16-bit floats of a word as float32: (low, high)."""
    if dtype == "bf16":
        return from_bits(word << Uint32(16)), from_bits(word & Uint32(0xFFFF0000))
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def pack(low, high, dtype: str):
    """Two float32 rounded to nearest even, as one word of 16-bit floats."""
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def row_address(tensor: cute.Tensor, row, column):
    """Byte address of tensor[row, column] in 64 bits; the tensor is row-major."""
    index = Int64(row) * Int64(tensor.stride[0]) + Int64(column)
    return tensor.iterator.toint() + index * Int64(tensor.element_type.width // 8)
