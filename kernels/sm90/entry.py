"""What is compiled: one host function that launches the kernel and, where there are partials, one that adds them."""

from __future__ import annotations

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import DgluConfig, finishes, padded_bytes, scratch_tensors
from .grouped_gemm_dglu import GroupedGemmDglu
from .primitives import DTYPES
from .reductions import Finish


class Program:
    """The host function of one configuration."""

    def __init__(self, config: DgluConfig) -> None:
        self.config, self.kernel, self.finish = config, GroupedGemmDglu(config), Finish(config)

    def _scratch(self, workspace, experts, rows, columns) -> dict:
        """The workspace's tensors, row-major; a descriptor is 16 words of 64 bits, anything else float32."""
        out, offset = {}, cutlass.Int64(0)
        sizes = (cutlass.Int64(size) for size in (experts, rows, columns))
        for name, part_rows, part_columns in scratch_tensors(self.config, *sizes):
            dtype, per_row = cutlass.Float32, part_columns
            if name == "descriptors":
                dtype, per_row = cutlass.Int64, part_columns // 2
            base = cute.recast_ptr((workspace.iterator + offset).align(128), dtype=dtype)
            out[name] = cute.make_tensor(base, cute.make_layout((part_rows, per_row), stride=(per_row, 1)))
            offset += padded_bytes(part_rows, part_columns)
        return out

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, K, N), or (L,) addresses
        offsets: cute.Tensor,  # (L,)
        c: cute.Tensor,  # (M, 2N)
        d: Optional[cute.Tensor],  # (M, 2N)
        prob: Optional[cute.Tensor],  # (M,)
        alpha: Optional[cute.Tensor],  # (L,)
        beta: Optional[cute.Tensor],  # (L,)
        activation: Optional[cute.Tensor],  # (M, N)
        dprob: Optional[cute.Tensor],  # (M,)
        dbias: Optional[cute.Tensor],  # (L, 2N)
        amax: Optional[cute.Tensor],  # (L, 2)
        q_row: Optional[cute.Tensor],  # (M, 2N) bytes
        sf_row: Optional[cute.Tensor],  # bytes
        q_col: Optional[cute.Tensor],  # (M, 2N) bytes
        sf_col: Optional[cute.Tensor],  # bytes
        workspace: Optional[cute.Tensor],  # bytes
        clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        columns = cute.size(c, mode=[1]) // 2
        parts = self._scratch(workspace, cute.size(offsets), cute.size(dy, mode=[0]), columns)
        dprob_parts, dbias_parts, amax_parts = (parts.get(name) for name in ("dprob", "dbias", "amax"))
        self.kernel(
            dy, b, parts.get("descriptors"), offsets, c, d, prob, alpha, beta, activation, dprob_parts, dbias_parts,
            amax_parts, q_row, sf_row, q_col, sf_col, clusters, stream,
        )  # fmt: skip
        if cutlass.const_expr(finishes(self.config)):
            self.finish(offsets, dprob_parts, dprob, dbias_parts, dbias, amax_parts, amax, cute.size(c, mode=[0]),
                        cute.size(c, mode=[1]), stream)  # fmt: skip


def _fake_arguments(config: DgluConfig) -> list:
    """Fake tensors with every size symbolic: one compilation serves every M, L, N and K."""
    m, k, n, n2, experts = (cute.sym_int32() for _ in range(5))

    def matrix(dtype, shape, present=True, align=16, divide=8):
        if not present:
            return None
        stride = cute.sym_int64(divisibility=divide)
        return make_fake_tensor(DTYPES[dtype], shape, (stride, 1), assumed_align=align)

    def vector(dtype, size, present=True):
        return make_fake_tensor(dtype, (size,), (1,), assumed_align=4) if present else None

    ab = DTYPES[config.ab_dtype]
    major = cute.sym_int64(divisibility=8)
    strides = (cute.sym_int64(divisibility=8), *((1, major) if config.b_major == "k" else (major, 1)))
    f32 = cutlass.Float32
    byte = cutlass.Uint8
    quantized = []
    for present in (config.q_row_dtype, config.q_col_dtype):
        codes = make_fake_tensor(byte, (m, n2), (cute.sym_int64(divisibility=16), 1), assumed_align=16)
        scales = make_fake_tensor(byte, (cute.sym_int64(),), (1,), assumed_align=16)
        quantized += [codes, scales] if present else [None, None]
    needs_workspace = bool(scratch_tensors(config, 1, 1, 1))
    return [
        matrix(config.ab_dtype, (m, k)),
        make_fake_tensor(cutlass.Int64, (experts,), (1,), assumed_align=8)
        if config.discrete_b
        else make_fake_tensor(ab, (experts, k, n), strides, assumed_align=16),
        vector(cutlass.Int32, experts),
        matrix(config.c_dtype, (m, n2)),
        matrix(config.d_dtype, (m, n2), config.d_dtype is not None),
        vector(f32, m, config.has_prob),
        vector(f32, experts, config.has_alpha),
        vector(f32, experts, config.has_beta),
        matrix(config.activation_dtype, (m, n), config.activation_dtype is not None),
        vector(f32, m, config.has_dprob),
        matrix(config.dbias_dtype, (experts, n2), config.dbias_dtype is not None, 4, 1),
        matrix("fp32", (experts, cute.sym_int32()), config.has_amax, 4, 1),
        *quantized,
        make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=128) if needs_workspace else None,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def compile_entry(config: DgluConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(Program(config), *_fake_arguments(config), options="--enable-tvm-ffi")
