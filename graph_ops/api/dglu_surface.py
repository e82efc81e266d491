"""The requirements of a grouped dGLU call, row by row of NVIDIA's page of the kernel, in the order of its sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..ir.dims import ceil_div
from .common import FP4_STORAGE, FP8_TYPES
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
    is_canonical_weight,
    loose_matrices,
    matrices,
    misaligned,
    vectors,
    wrong_scales,
    wrong_shapes,
    wrong_types,
)

ACTIVATIONS = ("dswiglu", "dgeglu", "dsituglu")
EPILOGUES = (None, "none", "identity", "relu", "srelu")
F32 = (torch.float32,)

C_TYPES: dict[str, tuple[torch.dtype, ...]] = {BFLOAT16: (torch.bfloat16, torch.float16, torch.float32)}
C_TYPES[FP8] = C_TYPES[FP4] = (*C_TYPES[BFLOAT16], *FP8_TYPES)
D_TYPES = {
    BFLOAT16: (torch.bfloat16, torch.float16, torch.float32),
    FP8: FP8_TYPES,
    FP4: (torch.bfloat16, torch.float16, torch.float32),
}
"""float16 D of FP4 operands is in the code of 1.32 and not on the page."""

SCALE_CONTROLS = ("sfa", "sfb", "sfb_ptrs", "d_col", "sfd_row", "sfd_col", "amax", "norm_const")


def _shapes(call: Call) -> dict[str, tuple[Shape, ...]]:
    m, n, experts = call.rows, call.columns, call.experts
    wide, each = matrices(m, 2 * n), ((experts,),)
    return {
        "c": wide, "d_row": wide, "d_col": wide, "padded_offsets": each, "alpha": each, "beta": each,
        "prob": vectors(m), "dprob": vectors(m), "dbias": ((experts, 2 * n, 1),), "amax": ((experts, 2, 1),),
        "norm_const": ((1,),), "b_ptrs": each, "sfb_ptrs": each, "activation": matrices(m, n),
    }  # fmt: skip


def _scale_shapes(call: Call) -> dict[str, tuple[int, int, int | None]]:
    m, n, block = call.rows, call.columns, call.block_size
    depth, width, height = (ceil_div(x, block) for x in (call.depth, 2 * n, m))
    assert isinstance(depth, int) and isinstance(width, int) and isinstance(height, int)
    return {"sfa": (m, depth, None), "sfb": (n, depth, call.experts), "sfd_row": (m, width, None),
            "sfd_col": (2 * n, height, None)}  # fmt: skip


def _types(call: Call) -> dict[str, tuple[torch.dtype, ...]]:
    return {
        "padded_offsets": (torch.int32,), "alpha": F32, "beta": F32, "prob": F32, "dprob": F32, "amax": F32,
        "norm_const": F32, "b_ptrs": (torch.int64,), "sfb_ptrs": (torch.int64,),
    }  # fmt: skip


def _controls(call: Call) -> list[str]:
    found = [n for n in SCALE_CONTROLS if n in call]
    options = call.options
    found += ["sf_vec_size"] * (options["sf_vec_size"] != 16) + ["discrete_col_sfd"] * bool(options["discrete_col_sfd"])
    return found + ["epilogue_op"] * (options["epilogue_op"] not in (None, "none", "identity"))


GEGLU = {"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0}
SITUGLU = {"situ_beta1": 4.0, "situ_beta2": 25.0}


def activation_parameters(options: Mapping[str, Any]) -> dict[str, float]:
    """The parameters that the graph's activation takes, from the call's. `linear_offset` None is 1 for GeGLU."""
    if options["act_func"].endswith("geglu"):
        offset = options.get("linear_offset")
        return {"geglu_alpha": float(options["geglu_alpha"]), "clamp_max": float(options["glu_clamp_max"]),
                "clamp_min": float(options["glu_clamp_min"]),
                "linear_offset": 1.0 if offset is None else float(offset)}  # fmt: skip
    if options["act_func"].endswith("situglu"):
        return {n: float(options[n]) for n in SITUGLU}
    return {}


def idle_parameters(options: Mapping[str, Any]) -> list[str]:
    """Activation parameters that are given and that the activation does not read."""
    act = options["act_func"]
    unread = {**({} if act.endswith("geglu") else GEGLU), **({} if act.endswith("situglu") else SITUGLU)}
    found = [f"{n} = {options[n]}" for n, default in unread.items() if n in options and options[n] != default]
    offset = options.get("linear_offset")
    if not act.endswith("geglu") and offset not in (None, 0.0):
        found.append(f"linear_offset = {offset}")
    return found


def bad_parameters(options: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters that the activation reads."""
    values = activation_parameters(options)
    found = [f"{n} = {v}" for n, v in values.items() if math.isnan(v)]
    positive = ("geglu_alpha", "situ_beta1", "situ_beta2")
    found += [f"{n} = {values[n]}" for n in positive if n in values and not 0 < values[n] < math.inf]
    if "clamp_max" in values and not values["clamp_min"] < values["clamp_max"]:
        found.append(f"glu_clamp_min = {values['clamp_min']}, glu_clamp_max = {values['clamp_max']}")
    return found


def _idle_beta(call: Call) -> bool:
    """A beta that lies on the CPU, where looking is free, and that would be ignored although it is not all ones."""
    beta = call["beta"]
    return beta.device.type == "cpu" and not call.options.get("is_sample") and not bool((beta == 1).all())


def _is_act(*names: str) -> Any:
    return lambda c: c.options["act_func"] in names


ACTIVATION = (
    Requirement(
        "ACT", "act_func: 'dswiglu', 'dgeglu', or block-scaled 'dsituglu'", "an activation of these operands",
        lambda c: c.options["act_func"] in (ACTIVATIONS if c.block_scaled else ACTIVATIONS[:2]),
        lambda c: f"act_func = {c.options['act_func']!r} for {c.family} operands",
    ),
    Requirement(
        "ACT_PARAMETER_UNUSED", "These activation parameters must match forward", "only parameters that act_func reads",
        lambda c: not idle_parameters(c.options),
        lambda c: f"{', '.join(idle_parameters(c.options))} with act_func = {c.options['act_func']!r}",
        _is_act(*ACTIVATIONS), "leave it at its default",
    ),
    Requirement(
        "ACT_PARAMETER", "geglu_alpha, glu_clamp_*, linear_offset; situ_beta1, situ_beta2: positive finite",
        "numbers, positive and finite scales, glu_clamp_min < glu_clamp_max",
        lambda c: not bad_parameters(c.options), lambda c: ", ".join(bad_parameters(c.options)), _is_act(*ACTIVATIONS),
    ),
    Requirement(
        "BETA_UNUSED", "beta: dGeGLU consumes the saved C directly and ignores beta", "None, or ones",
        lambda c: not _idle_beta(c), lambda c: "a beta that is not all ones, for block-scaled dGeGLU",
        lambda c: c.block_scaled and "beta" in c and c.options["act_func"] == "dgeglu",
        "multiply C by beta beforehand",
    ),
    Requirement(
        "EPILOGUE_OP", "epilogue_op: None, 'identity', 'relu' or 'srelu'", f"one of {EPILOGUES}",
        lambda c: c.options["epilogue_op"] in EPILOGUES, lambda c: repr(c.options["epilogue_op"]),
    ),
)  # fmt: skip

BF16_ROWS = (
    Requirement(
        "SCALE_CONTROL", "BF16: sfa, sfb, norm_const None; sf_vec_size=16; discrete_col_sfd=False; epilogue_op=None",
        "none of them with BF16 operands", lambda c: not _controls(c), lambda c: ", ".join(_controls(c)),
        lambda c: not c.block_scaled,
    ),
    Requirement(
        "SINGLE_GROUP", "use_single_group_runtime_offsets: only block-scaled, with exactly one expert",
        "block-scaled operands and one expert", lambda c: c.block_scaled and c.experts == 1,
        lambda c: f"{c.family} operands, L = {c.experts}",
        lambda c: bool(c.options["use_single_group_runtime_offsets"]),
    ),
    Requirement(
        "ROUND_DGRAD", "round_dgrad_to_input_dtype: only the BF16 kernel", "BF16 operands",
        lambda c: not c.block_scaled, lambda c: f"{c.family} operands",
        lambda c: bool(c.options["round_dgrad_to_input_dtype"]),
    ),
    Requirement(
        "ACTIVATION_OUTPUT", "activation output: only the BF16 kernel, dgeglu with BF16 C/D",
        "BF16 A, B, C, D and activation with act_func = 'dgeglu'",
        lambda c: not c.block_scaled and c.options["act_func"] == "dgeglu"
        and c["c"].dtype is c.d_dtype is c["activation"].dtype is torch.bfloat16,
        lambda c: f"{c.family} operands, act_func = {c.options['act_func']!r}, C {c['c'].dtype}, D {c.d_dtype}, "
        f"activation {c['activation'].dtype}",
        lambda c: "activation" in c,
    ),
)  # fmt: skip

TYPES = (
    Requirement(
        "TYPE", "padded_offsets int32; alpha, beta, prob, dprob, amax, norm_const float32; pointers int64",
        "the fixed types", lambda c: not wrong_types(c, _types(c)), lambda c: "; ".join(wrong_types(c, _types(c))),
    ),
    Requirement(
        "C_TYPE", "C: {float32, float16, bfloat16}, block-scaled also {float8_e4m3fn, float8_e5m2}", "a type of C",
        lambda c: c["c"].dtype in C_TYPES[c.family], lambda c: f"C is {c['c'].dtype} for {c.family} operands",
    ),
    Requirement(
        "D_TYPE", "d_dtype: {bfloat16, float32} for FP4, {float8_e4m3fn, float8_e5m2} for FP8, BF16/FP16/FP32 for BF16",
        "a type of D for these operands", lambda c: c.d_dtype in D_TYPES[c.family],
        lambda c: f"D is {c.d_dtype} for {c.family} operands",
        hint="the default, bfloat16, is none of the types that FP8 operands give: pass d_dtype=torch.float8_e4m3fn",
    ),
    Requirement(
        "DBIAS_TYPE", "dbias must be bfloat16", "torch.bfloat16",
        lambda c: c["dbias"].dtype is torch.bfloat16, lambda c: c["dbias"].dtype, lambda c: "dbias" in c,
    ),
    Requirement(
        "FP4_BLOCK_16_FLOAT", "non-dbias FP4 with sf_vec_size=16 and d_dtype=float32 is not supported",
        "another D, sf_vec_size 32, or a dbias", lambda c: c.block_size != 16 or _has_dbias(c),
        lambda c: "FP4 operands, sf_vec_size = 16, D float32, no dbias",
        lambda c: c.family == FP4 and c.d_dtype is torch.float32,
    ),
    Requirement(
        "VECTOR_F32", "FP8 c_dtype with vector_f32=True is not supported", "vector_f32 = False for an FP8 C",
        lambda c: not c.options["vector_f32"], lambda c: f"vector_f32 with C {c['c'].dtype}",
        lambda c: c["c"].dtype in FP8_TYPES,
    ),
    Requirement(
        "SCALE_OVERRIDE", "sf_fp8_dtype_override: 'e5m3' is Rubin-only",
        "None: torch has no E5M3, and no path here reads it",
        lambda c: c.options["sf_fp8_dtype_override"] is None, lambda c: repr(c.options["sf_fp8_dtype_override"]),
    ),
    Requirement(
        "AMAX_UNUSED", "amax (when d_dtype is bf16/float16)", "amax with a 16-bit D",
        lambda c: c.d_dtype in HALF_TYPES, lambda c: f"amax with D {c.d_dtype}",
        lambda c: "amax" in c and c.block_scaled,
    ),
)  # fmt: skip

QUANTIZED = (
    Requirement(
        "SFD_REQUIRED", "sfd_row, sfd_col and norm_const are required for FP8 input and output",
        "norm_const, and the scales",
        lambda c: "norm_const" in c and (not c.options.get("is_class") or {"sfd_row", "sfd_col", "d_col"} <= _given(c)),
        lambda c: "no " + ", ".join(sorted({"sfd_row", "sfd_col", "norm_const", "d_col"} - _given(c))),
        lambda c: c.quantized,
    ),
    Requirement(
        "SFD_UNUSED", "SFD_row, SFD_col (when d_dtype is FP8)", "scales and norm_const only with an FP8 D",
        lambda c: not {"sfd_row", "sfd_col", "norm_const"} & _given(c),
        lambda c: f"{', '.join(sorted({'sfd_row', 'sfd_col', 'norm_const'} & _given(c)))} with D {c.d_dtype}",
        lambda c: c.block_scaled and not c.quantized,
    ),
    Requirement(
        "DISCRETE_COL_SFD", "discrete_col_sfd: Generate discrete col-major scale factors", "an FP8 D, which has scales",
        lambda c: c.quantized, lambda c: f"discrete_col_sfd with D {c.d_dtype}",
        lambda c: bool(c.options["discrete_col_sfd"]) and c.block_scaled,
    ),
)  # fmt: skip


def _given(call: Call) -> set[str]:
    return {n for n in call.operands if n in call}


def _has_dbias(call: Call) -> bool:
    return "dbias" in call or bool(call.options.get("generate_dbias"))


LAYOUTS = (
    Requirement(
        "SHAPE", "Shapes", "the documented shapes",
        lambda c: not wrong_shapes(c, _shapes(c)), lambda c: "; ".join(wrong_shapes(c, _shapes(c))),
    ),
    Requirement(
        "SCALE_SHAPE", "SFA, SFB, SFD: (32, 4, ceil(M/128), 4, ceil(ceil(K/sf_vec_size)/4), L)", "whole scale atoms",
        lambda c: not wrong_scales(c, _scale_shapes(c)), lambda c: "; ".join(wrong_scales(c, _scale_shapes(c))),
        lambda c: c.block_scaled and c.block_size in (16, 32),
    ),
    Requirement(
        "COLUMNS", "N must be divisible by 32", "N positive and a multiple of 32",
        lambda c: c.columns > 0 and c.columns % 32 == 0, lambda c: f"N = {c.columns}",
    ),
    Requirement(
        "LAYOUT", "A must be K-major; C, D_row, D_col must be N-major", "rows without gaps",
        lambda c: not loose_matrices(c, ("a", "c", "d_row", "d_col", "activation")),
        lambda c: ", ".join(loose_matrices(c, ("a", "c", "d_row", "d_col", "activation"))),
    ),
    Requirement(
        "B_LAYOUT", "B: K-major, for FP8 also N-major", "dense weights without gaps, K-major, or for FP8 N-major",
        lambda c: c.b_major == "k" or (c.b_major == "n" and (c.family == FP8 or _is_canonical_n_major(c))),
        lambda c: f"B stride {c['b'].stride()}", lambda c: not c.discrete,
        "discrete weights and canonical ones (L, K, N) with b_major='n' may be N-major for BF16",
    ),
    Requirement(
        "ALIGNMENT_16", "All tensors must be 16-byte aligned along the contiguous dimension", "multiples of 16 bytes",
        lambda c: not _unaligned(c), lambda c: ", ".join(_unaligned(c)),
    ),
)  # fmt: skip


def _is_canonical_n_major(call: Call) -> bool:
    return call.family == BFLOAT16 and call.options["b_major"] == "n" and is_canonical_weight(call["b"])


def _unaligned(call: Call) -> list[str]:
    written = {"C": (2 * call.columns, call["c"].dtype), "D": (2 * call.columns, call.d_dtype)}
    return misaligned(call, {} if call.d_dtype in FP4_STORAGE else written)


DGLU: tuple[Requirement, ...] = (
    *BF16_ROWS, *BLOCK_SCALES, *TYPES, *QUANTIZED, *ACTIVATION, *LAYOUTS, *COMMON,
)  # fmt: skip
"""Every requirement of a dGLU call, in the order in which reasons are given."""
