"""What cudnn-frontend 1.32's block-scaled grouped kernels serve, as data. Imports neither torch, the DSL nor cuDNN.

Read from NVIDIA's pages (`row` names the row) and from the code of 1.32.0, which decides where the two differ:
`cudnn/gemm/cutedsl/grouped/{dglu,glu,quant}/` and `discrete_grouped/swiglu/`. Where the graph has no prob, alpha, beta
or norm_const the adapters pass ones, which is exact; an absent dprob or pre-activation is scratch.

Known differences within what is served: E8M0 scales round up as ours; a block whose largest magnitude needs a scale
below 2**-126 is scaled by FLT_MAX and may saturate; a NaN of the output does not reach amax; a negative norm_const
gives scales of zero (ours take its magnitude).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...graph_ops.ir.dims import known_divisor
from ...graph_ops.ir.dtypes import DataType
from ..arch import ARCHES as ALL_ARCHES
from ..arch import Arch, ArchRange
from ..condition import Condition
from ..problem import Problem
from . import support

ARCHES = ArchRange((10, 0), (11, 0))
"""sm100 and sm103 by one kernel; sm107 by another, for MXFP8 alone (RUBIN_FORMAT)."""
DISCRETE_ARCHES = ArchRange((10, 0), (10, 7))
RUBIN = ALL_ARCHES["sm107"]

FP8 = (DataType.FP8_E4M3, DataType.FP8_E5M2)
FP4 = DataType.FP4_E2M1
CODES = ("q_row", "sf_row", "q_col", "sf_col")
HALVES = (DataType.BFLOAT16, DataType.HALF)
STORED = (*HALVES, DataType.FLOAT)
FORMATS = (
    (FP8, 32, DataType.FP8_E8M0),
    ((FP4,), 16, DataType.FP8_E4M3),
    ((FP4,), 16, DataType.FP8_E8M0),
    ((FP4,), 32, DataType.FP8_E8M0),
)
"""(codes, block, scale) of the operands: MXFP8, NVFP4, FP4 with E8M0 scales, MXFP4."""


def pick(conditions: Sequence[Condition], *codes: str) -> tuple[Condition, ...]:
    """The conditions of these codes, in the order asked for."""
    known = {c.code: c for c in conditions}
    return tuple(known[code] for code in codes)


def is_fp8(problem: Problem) -> bool:
    return problem["a"].data_type in FP8


def is_fp4(problem: Problem) -> bool:
    return problem["a"].data_type is FP4


def block_size(problem: Problem) -> int:
    """Elements that share a scale of a; 0 without scales."""
    layout = problem["sf_a"].scale_layout if "sf_a" in problem else None
    return layout.block_size if layout is not None else 0


def source_type(problem: Problem, role: str) -> DataType:
    """Where the value behind `role` rounds before anything reads it: its wide form, its own tensor, or nowhere."""
    stored = problem[role].data_type if role in problem else DataType.FLOAT
    found: DataType = problem.rounding.get(f"{role}_wide", problem.rounding.get(role, stored))
    return found


def _scale(problem: Problem, role: str) -> tuple[int, DataType] | None:
    tensor = problem.get(role)
    if tensor is None or tensor.scale_layout is None:
        return None
    return tensor.scale_layout.block_size, tensor.data_type


def _operands(p: Problem) -> str:
    found = [f"{r} is {p[r].data_type!r}" + (f" with {s[1]!r} scales of {s[0]}" if (s := _scale(p, f"sf_{r}")) else "")
             for r in ("a", "b")]  # fmt: skip
    return ", ".join(found)


def _is_format(p: Problem) -> bool:
    first, second = _scale(p, "sf_a"), _scale(p, "sf_b")
    if first is None or first != second or p["a"].data_type is not p["b"].data_type:
        return False
    return any(p["a"].data_type in codes and first == (block, scale) for codes, block, scale in FORMATS)


def _scale_roles(p: Problem) -> list[str]:
    return [r for r in ("sf_a", "sf_b", "sf_row", "sf_col") if r in p]


def _bad_scales(p: Problem) -> list[str]:
    """Scales that are not the packed 128x4 atoms of a matrix."""
    bad = []
    for role in _scale_roles(p):
        tensor, layout = p[role], p[role].scale_layout
        order = (0, 1) if tensor.rank == 2 or tensor.discrete else (0, 1, 2)
        order = (1, 2) if tensor.discrete and tensor.rank == 3 else order
        if layout is None or not layout.swizzled or not support.is_packed(tensor, order):
            bad.append(f"{role} {layout} stride {tensor.stride}")
    return bad


def depth_multiple(p: Problem) -> int:
    """Codes in 16 bytes."""
    return 16 if is_fp8(p) else 32


def _major_extent_ok(p: Problem) -> bool:
    depth, columns = support.extents(p)[1:3]
    wanted = columns if support.b_major(p) == "n" else depth
    return all(isinstance(e, int) and e > 0 and e % depth_multiple(p) == 0 for e in (depth, wanted))


def _norm_consts(p: Problem) -> str:
    return ", ".join(f"{r}: {p[r].name}" for r in ("norm_const_row", "norm_const_col") if r in p)


def _same_norm_const(p: Problem) -> bool:
    row, col = p.get("norm_const_row"), p.get("norm_const_col")
    return (row is None) == (col is None) and (row is None or (col is not None and row.uid == col.uid))


def _code_types(p: Problem) -> str:
    found = [f"{r} is {p[r].data_type!r}" + (f", scales {s[1]!r} of {s[0]}" if (s := _scale(p, f"sf_{r[2:]}")) else "")
             for r in ("q_row", "q_col") if r in p]  # fmt: skip
    return "; ".join(found)


def _codes_ok(p: Problem) -> bool:
    wanted = _scale(p, "sf_a")
    return all(
        p[r].data_type is DataType.FP8_E4M3 and _scale(p, f"sf_{r[2:]}") == wanted for r in ("q_row", "q_col") if r in p
    )


def _asked(p: Problem) -> str:
    return "asked for " + (", ".join(r for r in ("d", *CODES) if r in p) or "neither")


def _presence(*roles: str) -> Callable[[Problem, Arch], bool]:
    return lambda p, a: all(r in p for r in roles)


def _layouts(*roles: str) -> tuple[Callable[[Problem, Arch], Any], Callable[[Problem, Arch], bool]]:
    def bad(p: Problem) -> list[str]:
        return [f"{r} {p[r].dim} stride {p[r].stride}" for r in roles if r in p and not support.is_packed(p[r], (0, 1))]

    return (lambda p, a: ", ".join(bad(p))), (lambda p, a: not bad(p))


_CONTIGUOUS = "pass a contiguous copy"

OPERANDS = (
    Condition(
        "OPERAND_FORMAT", "codes a and b of one type with scales of one kind: MXFP8 (E4M3 or E5M2, E8M0 scales of 32), "
        "NVFP4 (E4M3 scales of 16), or FP4 with E8M0 scales of 16 or 32", lambda p, a: _operands(p),
        lambda p, a: _is_format(p), "quantize both operands in one format; MXFP8 with E4M3 scales exists nowhere",
        row="Data types: ab_dtype, sf_dtype, sf_vec_size; A and B must have the same dtype",
    ),
    Condition(
        "RUBIN_FORMAT", "MXFP8 operands on sm107", lambda p, a: _operands(p), lambda p, a: is_fp8(p),
        "on sm107 other formats run unfused", lambda p, a: a == RUBIN, row="Environment: Rubin MXFP8",
    ),
    Condition(
        "SCALE_STORAGE", "scales swizzled into 128x4 atoms, without gaps", lambda p, a: ", ".join(_bad_scales(p)),
        lambda p, a: not _bad_scales(p), "swizzle the scales once, when they are made",
        row="SFA, SFB, SFD: (32, 4, ceil(M/128), 4, ceil(ceil(K/sf_vec_size)/4), L)",
    ),
    *pick(support.BF16_DGLU, "STATIC_SHAPE", "ROW_MULTIPLE", "EXPERTS", "A_LAYOUT", "B_LAYOUT"),
    Condition(
        "CODE_ALIGNMENT", "rows of a and of b in whole 16 bytes: 16 FP8 or 32 FP4 codes",
        lambda p, a: f"K = {support.extents(p)[1]}, N = {support.extents(p)[2]}, b {support.b_major(p)}-major",
        lambda p, a: _major_extent_ok(p), "pad with zero codes",
        lambda p, a: all(isinstance(e, int) for e in support.extents(p)[1:3]),
        row="All tensors must be 16-byte aligned along the contiguous dimension",
    ),
    *pick(support.BF16_DGLU, "OFFSETS_TYPE", "OFFSETS_ALIGNMENT", "VECTOR_LAYOUT", "ALIGNMENT"),
    Condition(
        "NORM_CONST", "one norm_const for both directions, or none", lambda p, a: _norm_consts(p),
        lambda p, a: _same_norm_const(p), "give both block_scale_quantize nodes the same tensor",
        lambda p, a: "q_row" in p or "q_col" in p, row="norm_const: (1,)",
    ),
)  # fmt: skip

FP4_MAJOR = Condition(
    "FP4_MAJOR", "K-major FP4 weights", lambda p, a: f"b {support.b_major(p)}-major",
    lambda p, a: support.b_major(p) == "k", "FP4 weights pack along K: stride (K*N, 1, K)",
    lambda p, a: is_fp4(p) and support.b_major(p) is not None, row="B must be K-major for FP4",
)  # fmt: skip

FORWARD_ALPHA = Condition(
    "ALPHA_EXPONENT", "alpha_exponent = 1: the forward kernels multiply by alpha once",
    lambda p, a: f"alpha_exponent = {p.attributes.get('alpha_exponent', 1)}",
    lambda p, a: p.attributes.get("alpha_exponent", 1) == 1, "square alpha before the graph", _presence("alpha"),
    row="equation: C = alpha A B^T",
)  # fmt: skip

CODE_PAIR = Condition(
    "CODE_PAIR", "codes along rows and along columns together", lambda p, a: _asked(p),
    lambda p, a: ("q_row" in p) == ("q_col" in p), "declare both: the kernel always writes both",
    lambda p, a: "q_row" in p or "q_col" in p, row="SFD_row, SFD_col and norm_const are required together",
)  # fmt: skip

CODE_FORMAT = Condition(
    "CODE_FORMAT", "E4M3 codes with scales as the operands'", lambda p, a: _code_types(p), lambda p, a: _codes_ok(p),
    "E5M2 codes are scaled by 1/128 there instead of 1/57344, and in dGLU do not compile; FP4 codes of MXFP8 operands "
    "were not verified", lambda p, a: "sf_a" in p and ("q_row" in p or "q_col" in p),
    row="d_dtype; SFA and SFD share dtype",
)  # fmt: skip

FP4_CODES = Condition(
    "FP4_CODES", "no codes of FP4 operands", lambda p, a: _asked(p), lambda p, a: not any(r in p for r in CODES),
    "the kernel quantizes its output only behind FP8 operands", lambda p, a: is_fp4(p),
    row="FP4 ab_dtype only supports d_dtype in {bfloat16, float16, float32}",
)  # fmt: skip


def d_or_codes(hint: str) -> Condition:
    """One D: values or codes, never both and never neither."""
    return Condition(
        "D_OR_CODES", "either d or its codes as output: the kernel has one D",
        lambda p, a: _asked(p), lambda p, a: ("d" in p) != ("q_row" in p or "q_col" in p), hint,
        row="D_row, D_col: one d_dtype",
    )  # fmt: skip


def bias_conditions(*, scaled: bool = True) -> tuple[Condition, ...]:
    """The bias of the forward kernels. The block-scaled ones take no FLOAT beside discrete weights."""
    observe, holds = _layouts("bias")
    return (
        Condition(
            "BIAS_TYPE", "BFLOAT16, HALF or" + " (dense weights)" * scaled + " FLOAT bias",
            lambda p, a: f"bias is {p['bias'].data_type!r}",
            lambda p, a: p["bias"].data_type in (HALVES if scaled and p["b"].discrete else STORED), "set its data_type",
            _presence("bias"), row="bias: (N, L)",
        ),
        Condition("BIAS_LAYOUT", "row-major (L, N) bias without gaps", observe, holds, _CONTIGUOUS, _presence("bias"),
                  row="bias: stride (1, N)"),
    )  # fmt: skip


_D_OBSERVED, _D_HOLDS = _layouts("d", "q_row", "q_col")
D_LAYOUT = Condition(
    "D_LAYOUT", "row-major d and codes without gaps", _D_OBSERVED, _D_HOLDS, _CONTIGUOUS, row="D, D_col: N-major"
)


def fp4_float_d(needs: str) -> Condition:
    """NVFP4 (and FP4 in blocks of 16) with a FLOAT D is there only beside the role `needs`; with "" never."""
    return Condition(
        "FP4_FLOAT_D",
        "BFLOAT16 or HALF d of FP4 operands with scales of 16" + (f", unless with {needs}" if needs else ""),
        lambda p, a: f"d is {p['d'].data_type!r}, blocks of {block_size(p)}",
        lambda p, a: p["d"].data_type is not DataType.FLOAT or needs in p, "scales of 32, or a 16-bit d",
        lambda p, a: "d" in p and is_fp4(p) and block_size(p) == 16,
        row="FP4 ab_dtype with sf_vec_size=16 and d_dtype=float32 is not supported",
    )  # fmt: skip


def derived_conditions(amax_split: bool) -> tuple[Condition, ...]:
    """amax and codes of the unrounded value."""
    shape = "(L, 2), gate and up apart" if amax_split else "(L,)"
    return (
        Condition(
            "AMAX_FORM", f"FLOAT amax {shape}, without gaps", lambda p, a: str(p["amax"]),
            lambda p, a: p.attributes["amax.split_glu"] is amax_split and p["amax"].data_type is DataType.FLOAT
            and p["amax"].is_contiguous, f"group_amax(x, offsets, split_glu={amax_split})", _presence("amax"),
            row="amax: (L, 2, 1) or (L, 1)",
        ),
        Condition(
            "SOURCE_ROUNDING", "codes and amax of the unrounded value",
            lambda p, a: f"they read a value rounded to {source_type(p, 'd')!r}",
            lambda p, a: source_type(p, "d") is DataType.FLOAT,
            "leave the value virtual FLOAT, and write identity of it with d's data type",
            lambda p, a: any(r in p for r in (*CODES, "amax")), row="D rounds after amax and quantization",
        ),
    )  # fmt: skip


def geglu(code: str, requires: str, holds: Callable[[dict[str, float]], bool], hint: str) -> Condition:
    """A condition on the parameters of geglu."""
    names = ("geglu_alpha", "clamp_min", "clamp_max", "linear_offset")
    return Condition(
        code, requires, lambda p, a: {n: p.attributes[n] for n in names},
        lambda p, a: holds({n: p.attributes[n] for n in names}), hint, lambda p, a: p.attributes["act"] == "geglu",
        row="geglu_alpha, glu_clamp_max, glu_clamp_min, linear_offset",
    )  # fmt: skip


def finite32(values: Sequence[float]) -> bool:
    """Whether all are finite as float32."""
    return all(math.isfinite(v) and abs(v) <= (DataType.FLOAT.info.largest or 0.0) for v in values)


FINITE = geglu("GEGLU_PARAMETERS", "parameters that are finite in float32", lambda g: finite32(list(g.values())),
               "a finite bound beyond the data, 3e38 say, clamps nothing")  # fmt: skip

SITU_PARAMETERS = Condition(
    "SITU_PARAMETERS", "situ_beta1 and situ_beta2 positive and finite in float32",
    lambda p, a: {n: p.attributes[n] for n in ("situ_beta1", "situ_beta2")},
    lambda p, a: all(p.attributes[n] > 0 and finite32([p.attributes[n]]) for n in ("situ_beta1", "situ_beta2")),
    "the bounds of tanh", lambda p, a: p.attributes["act"] == "situglu", row="situ_beta1, situ_beta2",
)  # fmt: skip

RUBIN_ACT = Condition(
    "RUBIN_ACT", "act swiglu or geglu on sm107", lambda p, a: f"act = {p.attributes['act']!r}",
    lambda p, a: p.attributes["act"] != "situglu", "situglu is not in the sm107 kernel", lambda p, a: a == RUBIN,
    row="dsituglu is not available on the Rubin backend",
)  # fmt: skip

UNROUNDED_PRODUCT = Condition(
    "PRODUCT_ROUNDING", "a product that stays FLOAT", lambda p, a: f"the product rounds to {support.product_type(p)!r}",
    lambda p, a: support.product_type(p) is DataType.FLOAT, "leave the product virtual FLOAT",
    row="equation: ref in FP32",
)  # fmt: skip

_D_TYPE = Condition(
    "D_TYPE", "codes of MXFP8 operands; BFLOAT16, HALF or FLOAT d of FP4 operands",
    lambda p, a: f"d is {p['d'].data_type!r}", lambda p, a: not is_fp8(p) and p["d"].data_type in STORED,
    "behind MXFP8 operands dGLU writes codes alone: quantize dx along both axes, or let this part run unfused",
    _presence("d"), row="FP8 ab_dtype only supports d_dtype in {float8_e4m3fn, float8_e5m2}",
)  # fmt: skip

DGLU: tuple[Condition, ...] = (
    *OPERANDS,
    *pick(support.BF16_DGLU, "COLUMN_MULTIPLE"),
    FP4_MAJOR,
    *pick(support.BF16_DGLU, "GLU_LAYOUT", "C_TYPE", "C_LAYOUT", "ALPHA_EXPONENT"),
    UNROUNDED_PRODUCT,
    RUBIN_ACT,
    FINITE,
    SITU_PARAMETERS,
    Condition(
        "BETA_GEGLU", "no beta with act geglu", lambda p, a: "beta is given",
        lambda p, a: p.attributes["act"] != "geglu", "the block-scaled kernel ignores beta there: scale c before",
        _presence("beta"), row="dGeGLU consumes the saved C directly and ignores beta",
    ),
    d_or_codes("quantize dx along both axes and leave dx virtual, or leave the codes to nodes of their own"),
    CODE_PAIR, CODE_FORMAT, FP4_CODES, _D_TYPE, D_LAYOUT, fp4_float_d("dbias"),
    *pick(support.BF16_DGLU, "DPROB_TYPE", "DBIAS_TYPE", "DBIAS_LAYOUT"),
    Condition(
        "DBIAS_SOURCE", "dbias of the unrounded gradient",
        lambda p, a: f"it sums a gradient rounded to {source_type(p, 'd')!r}",
        lambda p, a: source_type(p, "d") is DataType.FLOAT,
        "leave dx virtual FLOAT, sum it, and write identity(dx) with d's data type", _presence("dbias"),
        row="dbias: sums FP32 gradients before D_row rounds",
    ),
    *derived_conditions(amax_split=True),
    Condition(
        "ACTIVATION_OUTPUT", "no recomputed activation", lambda p, a: "the recomputed activation",
        lambda p, a: False, "glu(x) recomputes it unfused", _presence("activation"),
        row="activation output is supported only by the BF16 kernel",
    ),
    *pick(support.BF16_DGLU, "DETERMINISTIC_DBIAS"),
    Condition(
        "DETERMINISTIC_RUBIN", "deterministic=False on sm107", lambda p, a: "a deterministic graph",
        lambda p, a: not p.deterministic, "the sm107 kernel adds dprob up by atomics", lambda p, a: a == RUBIN,
        row="deterministic dprob is implemented only for the SM100 kernel",
    ),
    *pick(support.BF16_DGLU, "CUDNN_VERSION"),
)  # fmt: skip
"""Every condition of the block-scaled dGLU kernel, in the order in which reasons list them."""


def launches(problem: Problem) -> int:
    """Launches of one run: the kernel, address arrays and their descriptors, zeroed outputs, ones, and the sum of a
    deterministic dprob's parts."""
    zeroed = sum(role in problem for role in ("dprob", "dbias", "amax"))
    names = ("alpha", "prob", "beta") if problem.rule == "grouped_gemm_dglu" else ("alpha", "prob")
    ones = any(role not in problem for role in names)
    discrete = problem["b"].discrete if "b" in problem else False
    parts = 2 if problem.deterministic and known_divisor(support.extents(problem)[2]) > 256 else 0
    return 1 + 3 * discrete + zeroed + ones + (parts if problem.rule == "grouped_gemm_dglu" else 0)


__all__ = ["ARCHES", "DGLU", "DISCRETE_ARCHES", "launches"]
