"""The requirements of a discrete grouped SwiGLU call, row by row of NVIDIA's page of the kernel."""

from __future__ import annotations

import torch

from ..ir.dims import ceil_div
from .common import FP4_STORAGE, FP8_TYPES
from .dglu_surface import bad_parameters, idle_parameters
from .surface import (
    BFLOAT16,
    BLOCK_SCALES,
    COMMON,
    FP4,
    FP8,
    HALF_TYPES,
    Call,
    Requirement,
    Shape,
    loose_matrices,
    matrices,
    misaligned,
    vectors,
    wrong_scales,
    wrong_shapes,
    wrong_types,
)

F32 = (torch.float32,)
C_TYPES = {FP4: HALF_TYPES, FP8: (torch.float32, *HALF_TYPES, *FP8_TYPES, *FP4_STORAGE)}
D_TYPES = {FP4: (*HALF_TYPES, torch.float32), FP8: (*HALF_TYPES, *FP8_TYPES, *FP4_STORAGE)}


def _c_type(call: Call) -> torch.dtype:
    dtype: torch.dtype = call.options["c_dtype"]
    return dtype


def _shapes(call: Call) -> dict[str, tuple[Shape, ...]]:
    m, n, each = call.rows, call.columns, ((call.experts,),)
    narrow = matrices(m, n // (4 if call.d_dtype in FP4_STORAGE else 2))
    return {
        "c": matrices(m, n // 2 if _c_type(call) in FP4_STORAGE else n), "d": narrow, "d_col": narrow, "alpha": each,
        "padded_offsets": each, "b_ptrs": each, "sfb_ptrs": each, "prob": vectors(m), "amax": ((call.experts, 1),),
        "norm_const": ((1,),), "bias": ((n, call.experts),),
    }  # fmt: skip


def _scale_shapes(call: Call) -> dict[str, tuple[int, int, int | None]]:
    m, half, block = call.rows, call.columns // 2, call.block_size
    depth, width, height = (ceil_div(x, block) for x in (call.depth, half, m))
    assert isinstance(depth, int) and isinstance(width, int) and isinstance(height, int)
    return {"sfa": (m, depth, None), "sfd_row": (m, width, None), "sfd_col": (half, height, None)}


def _types(call: Call) -> dict[str, tuple[torch.dtype, ...]]:
    return {"padded_offsets": (torch.int32,), "alpha": F32, "prob": F32, "amax": F32, "norm_const": F32,
            "b_ptrs": (torch.int64,), "sfb_ptrs": (torch.int64,), "bias": HALF_TYPES}  # fmt: skip


def _scaled(call: Call) -> bool:
    return "norm_const" in call if call.options.get("is_class") else call.family == FP8


def _is_code(dtype: torch.dtype) -> bool:
    return dtype in (*FP8_TYPES, *FP4_STORAGE)


def _unaligned(call: Call) -> list[str]:
    half = call.columns // 2
    return misaligned(call, {"D": (half, call.d_dtype)})


DISCRETE_SWIGLU: tuple[Requirement, ...] = (
    Requirement(
        "OPERAND_TYPE", "ab_dtype: {float4_e2m1fn_x2, uint8, float8_e4m3fn, float8_e5m2}", "FP8 or FP4 operands",
        lambda c: c.family != BFLOAT16, lambda c: f"A and B are {c.b_dtype}",
        hint="a Graph with discrete weights and glu takes BF16",
    ),
    *BLOCK_SCALES,
    Requirement(
        "TYPE", "padded_offsets int32; alpha, prob, amax, norm_const float32; pointers int64; bias 16-bit",
        "the fixed types",
        lambda c: not wrong_types(c, _types(c)), lambda c: "; ".join(wrong_types(c, _types(c))),
    ),
    Requirement(
        "C_TYPE", "FP4 ab_dtype requires c_dtype in {float16, bfloat16}; FP8 also float32, FP8, FP4", "a type of C",
        lambda c: _c_type(c) in C_TYPES[c.family], lambda c: f"C is {_c_type(c)} for {c.family} operands",
        lambda c: c.block_scaled,
    ),
    Requirement(
        "D_TYPE", "d_dtype: {float16, bfloat16, FP8, FP4} for FP8, {float16, bfloat16, float32} for FP4", "a type of D",
        lambda c: c.d_dtype in D_TYPES[c.family], lambda c: f"D is {c.d_dtype} for {c.family} operands",
        lambda c: c.block_scaled,
    ),
    Requirement(
        "FP4_BLOCK_16_FLOAT", "FP4 ab_dtype with sf_vec_size=16 and d_dtype=float32 is not supported",
        "another D, or sf_vec_size 32", lambda c: c.block_size != 16,
        lambda c: "FP4 operands, sf_vec_size = 16, D float32",
        lambda c: c.family == FP4 and c.d_dtype is torch.float32,
    ),
    Requirement(
        "NORM_CONST_REQUIRED", "norm_const: required when sfd_row/sfd_col are provided", "norm_const_tensor",
        lambda c: "norm_const" in c, lambda c: "no norm_const, with scales for D", _scaled,
    ),
    Requirement(
        "NORM_CONST_UNUSED", "norm_const: for FP8 quantization", "None: D has no scales",
        lambda c: "norm_const" not in c, lambda c: f"norm_const with {c.family} operands",
        lambda c: not c.options.get("is_class") and c.family != FP8,
    ),
    Requirement(
        "SFD_REQUIRED", "SFD outputs", "scales for a D of codes", _scaled, lambda c: f"D {c.d_dtype} without scales",
        lambda c: _is_code(c.d_dtype),
    ),
    Requirement(
        "D_COL_REQUIRED", "sample_d_col", "a D_col beside the scales", lambda c: "d_col" in c, lambda c: "no D_col",
        lambda c: bool(c.options.get("is_class")) and _scaled(c),
    ),
    Requirement(
        "DISCRETE_COL_SFD", "discrete_col_sfd: Only applies when SFD outputs are enabled", "scales for D",
        _scaled, lambda c: "discrete_col_sfd without scales", lambda c: bool(c.options["discrete_col_sfd"]),
    ),
    Requirement(
        "ACT", "act_func: 'swiglu', 'geglu'", "'swiglu' or 'geglu'",
        lambda c: c.options["act_func"] in ("swiglu", "geglu"), lambda c: repr(c.options["act_func"]),
    ),
    Requirement(
        "ACT_PARAMETER_UNUSED", "geglu parameters", "only parameters that act_func reads",
        lambda c: not idle_parameters(c.options),
        lambda c: f"{', '.join(idle_parameters(c.options))} with act_func = {c.options['act_func']!r}",
        lambda c: c.options["act_func"] in ("swiglu", "geglu"), "leave it at its default",
    ),
    Requirement(
        "ACT_PARAMETER", "geglu_alpha, glu_clamp_*, linear_offset",
        "numbers, a positive and finite geglu_alpha, glu_clamp_min < glu_clamp_max",
        lambda c: not bad_parameters(c.options), lambda c: ", ".join(bad_parameters(c.options)),
        lambda c: c.options["act_func"] == "geglu",
    ),
    Requirement(
        "SHAPE", "Shapes", "the documented shapes",
        lambda c: not wrong_shapes(c, _shapes(c)), lambda c: "; ".join(wrong_shapes(c, _shapes(c))),
    ),
    Requirement(
        "SCALE_SHAPE", "SFA, SFD: (32, 4, ceil(M/128), 4, ceil(ceil(K/sf_vec_size)/4), 1)", "whole scale atoms",
        lambda c: not wrong_scales(c, _scale_shapes(c)), lambda c: "; ".join(wrong_scales(c, _scale_shapes(c))),
        lambda c: c.block_size in (16, 32),
    ),
    Requirement(
        "COLUMNS", "N is consumed in paired 32-column blocks (use N divisible by 64)",
        "N positive and a multiple of 64",
        lambda c: c.columns > 0 and c.columns % 64 == 0, lambda c: f"N = {c.columns}",
    ),
    Requirement(
        "LAYOUT", "A must be K-major; C, D, and D_col must be N-major", "rows without gaps",
        lambda c: not loose_matrices(c, ("a", "c", "d", "d_col")),
        lambda c: ", ".join(loose_matrices(c, ("a", "c", "d", "d_col"))),
    ),
    Requirement(
        "BIAS_LAYOUT", "bias: (n, experts) with stride (1, n)", "each expert's bias contiguous",
        lambda c: c["bias"].t().is_contiguous(), lambda c: f"bias stride {c['bias'].stride()}", lambda c: "bias" in c,
    ),
    Requirement(
        "ALIGNMENT_16", "All tensors must be 16-byte aligned along the contiguous dimension", "multiples of 16 bytes",
        lambda c: not _unaligned(c), lambda c: ", ".join(_unaligned(c)),
    ),
    *COMMON,
)  # fmt: skip
"""Every requirement of the call, in the order in which reasons are given."""
