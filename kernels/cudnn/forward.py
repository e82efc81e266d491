"""What cudnn-frontend 1.32's forward and weight-gradient kernels serve, as data. Imports no torch, DSL or cuDNN.

Grouped GEMM + GLU in BF16 and block-scaled, the older discrete class, grouped GEMM + quantize, and the weight gradient.
Sources as in block_scaled.py. The forward kernels activate the unrounded product and write C rounded beside it.
"""

from __future__ import annotations

from ...graph_ops.ir.dims import known_divisor
from ...graph_ops.ir.dtypes import DataType
from ..condition import Condition
from ..problem import Problem
from . import support
from .block_scaled import (
    CODE_FORMAT,
    CODE_PAIR,
    D_LAYOUT,
    FINITE,
    FORWARD_ALPHA,
    FP4_CODES,
    FP4_MAJOR,
    FP8,
    HALVES,
    OPERANDS,
    RUBIN_ACT,
    SITU_PARAMETERS,
    STORED,
    bias_conditions,
    d_or_codes,
    derived_conditions,
    fp4_float_d,
    geglu,
    is_fp4,
    is_fp8,
    pick,
    source_type,
)

_SCALED = ("amax", *support.QUANTIZED_ROLES)
FIXED_GEGLU = {"geglu_alpha": 1.702, "clamp_min": -7.0, "clamp_max": 7.0}

_COLUMNS = Condition(
    "COLUMN_MULTIPLE", "N positive and a multiple of 64: pairs of 32 gate and 32 up columns",
    lambda p, a: f"N = {support.extents(p)[2]}",
    lambda p, a: known_divisor(support.extents(p)[2]) > 0 and known_divisor(support.extents(p)[2]) % 64 == 0,
    "pad the intermediate size to a multiple of 32", lambda p, a: isinstance(support.extents(p)[2], int),
    row="N is consumed in paired 32-column blocks",
)  # fmt: skip


def _glu_layout(p: Problem) -> object:
    return next((p[r].glu_layout for r in ("c", "b", "bias") if r in p and p[r].glu_layout is not None), None)


_LAYOUT = Condition(
    "GLU_LAYOUT", "weights whose columns are gate and up interleaved by 32", lambda p, a: f"b is {_glu_layout(p)}",
    lambda p, a: _glu_layout(p) == support.LAYOUT, "permute w1's columns once: convert_glu_layout(w1, interleaved(32))",
    row="Gate block, Up block: pairs of 32-wide column blocks",
)  # fmt: skip

_C_ROUNDING = Condition(
    "C_ROUNDING", "an activation of the unrounded product",
    lambda p, a: f"it reads a product rounded to {source_type(p, 'c')!r}",
    lambda p, a: source_type(p, "c") is DataType.FLOAT,
    "leave the product virtual FLOAT, and write identity of it with c's data type", row="C: written beside the product",
)  # fmt: skip

_C_TYPE = Condition(
    "C_TYPE", "BFLOAT16, HALF or FLOAT c", lambda p, a: f"c is {p['c'].data_type!r}",
    lambda p, a: p["c"].data_type in STORED, "FP8 C has no scales, which a graph cannot say", lambda p, a: "c" in p,
    row="c_dtype",
)  # fmt: skip

_FP4_C = Condition(
    "FP4_C_TYPE", "BFLOAT16 or HALF c of FP4 operands", lambda p, a: f"c is {p['c'].data_type!r}",
    lambda p, a: p["c"].data_type in HALVES, "write a 16-bit copy of the product",
    lambda p, a: "c" in p and is_fp4(p), row="FP4 ab_dtype requires c_dtype in {float16, bfloat16}",
)  # fmt: skip

_C_LAYOUT = Condition(
    "C_LAYOUT", "row-major c without gaps", lambda p, a: f"c stride {p['c'].stride}",
    lambda p, a: support.is_packed(p["c"], (0, 1)), "pass a contiguous copy", lambda p, a: "c" in p, row="C: N-major",
)  # fmt: skip

_NO_DBIAS = Condition(
    "COLUMN_SUMS", "no column sums of the output", lambda p, a: "group_sum of the output",
    lambda p, a: "dbias" not in p,
    "the forward kernels have none: it stays a node of its own", row="outputs",
)  # fmt: skip

_D_REQUIRED = Condition(
    "D_REQUIRED", "the activation as an output", lambda p, a: "no d", lambda p, a: "d" in p,
    "set_output(True) on it: the BF16 kernel has no codes", row="D: (valid_m, N/2, 1)",
)  # fmt: skip

_PLAIN = Condition(
    "BF16_OUTPUTS", "no codes and no amax", lambda p, a: ", ".join(r for r in _SCALED if r in p),
    lambda p, a: not any(r in p for r in _SCALED), "they are in the block-scaled kernel only", row="BF16 backend",
)  # fmt: skip

_DENSE_K = Condition(
    "DENSE_MAJOR", "K-major dense weights", lambda p, a: f"b stride {p['b'].stride}",
    lambda p, a: support.b_major(p) == "k", "stride (K*N, 1, K); discrete weights may be N-major",
    lambda p, a: not p["b"].discrete and support.b_major(p) is not None, row="B: K-major",
)  # fmt: skip

_D_STORED = Condition(
    "D_TYPE", "BFLOAT16, HALF or FLOAT d", lambda p, a: f"d is {p['d'].data_type!r}",
    lambda p, a: p["d"].data_type in STORED, "set its data_type", lambda p, a: "d" in p, row="d_dtype",
)  # fmt: skip

_D_SCALED = Condition(
    "D_TYPE", "BFLOAT16 or HALF d of MXFP8 operands, FLOAT too of FP4 ones", lambda p, a: f"d is {p['d'].data_type!r}",
    lambda p, a: p["d"].data_type in (HALVES if is_fp8(p) else STORED), "set its data_type", lambda p, a: "d" in p,
    row="d_dtype",
)  # fmt: skip

_ACT = Condition(
    "ACT", "act swiglu or geglu", lambda p, a: f"act = {p.attributes['act']!r}",
    lambda p, a: p.attributes["act"] in ("swiglu", "geglu"), "situglu is in the unified block-scaled kernel only",
    row="act_func",
)  # fmt: skip

_FIXED = geglu(
    "GEGLU_PARAMETERS", "geglu_alpha 1.702 and clamps at -7 and 7, and a finite linear_offset",
    lambda g: all(g[n] == v for n, v in FIXED_GEGLU.items()) and abs(g["linear_offset"]) < 3.4e38,
    "the BF16 forward kernel has fixed bounds",
)  # fmt: skip

_DISCRETE = Condition(
    "WEIGHT_MODE", "discrete weights", lambda p, a: "dense b", lambda p, a: p["b"].discrete,
    "the unified kernel takes dense ones", row="b_ptrs, sfb_ptrs",
)  # fmt: skip

_BF16_OPERANDS = pick(
    support.BF16_DGLU, "OPERAND_TYPE", "STATIC_SHAPE", "ROW_MULTIPLE", "DEPTH_MULTIPLE", "EXPERTS", "A_LAYOUT",
    "B_LAYOUT",
)  # fmt: skip
_VECTORS = pick(support.BF16_DGLU, "OFFSETS_TYPE", "OFFSETS_ALIGNMENT", "VECTOR_LAYOUT", "ALIGNMENT")
_INSTALLED = pick(support.BF16_DGLU, "CUDNN_VERSION")
_UP_WEIGHTS = Condition(
    "UP_WEIGHTS", "one tensor for the weights of gate and up", lambda p, a: f"b_up {p['b_up'].dim}",
    lambda p, a: False, "join them once, when the model is made", lambda p, a: "b_up" in p, row="B",
)  # fmt: skip

_PRODUCT = (_COLUMNS, _UP_WEIGHTS, _LAYOUT, _C_ROUNDING, _C_TYPE, _C_LAYOUT, FORWARD_ALPHA, _NO_DBIAS)

BF16_GLU: tuple[Condition, ...] = (
    *_BF16_OPERANDS, _DENSE_K, *_VECTORS, *_PRODUCT, *bias_conditions(scaled=False), _ACT, _FIXED,
    _D_REQUIRED, _D_STORED, D_LAYOUT, _PLAIN, *_INSTALLED,
)  # fmt: skip
"""Every condition of the BF16 GLU kernel."""

_CODES = (
    d_or_codes("quantize the activation along both axes and leave it virtual, or leave the codes unfused"),
    CODE_PAIR, CODE_FORMAT, FP4_CODES,
)  # fmt: skip

BLOCK_SCALED_GLU: tuple[Condition, ...] = (
    *OPERANDS, _DENSE_K, FP4_MAJOR, *_PRODUCT, *bias_conditions(), _FP4_C, RUBIN_ACT, FINITE, SITU_PARAMETERS,
    *_CODES, _D_SCALED, D_LAYOUT, fp4_float_d("bias"), *derived_conditions(amax_split=False), *_INSTALLED,
)  # fmt: skip
"""Every condition of the unified block-scaled GLU kernel."""

DISCRETE_GLU: tuple[Condition, ...] = (
    *OPERANDS, _DISCRETE, FP4_MAJOR, *_PRODUCT, *bias_conditions(), _FP4_C, _ACT, FINITE, *_CODES, _D_SCALED,
    D_LAYOUT, fp4_float_d(""), *derived_conditions(amax_split=False), *_INSTALLED,
)  # fmt: skip
"""Every condition of the discrete SwiGLU kernel, the page "Discrete Grouped GEMM + SwiGLU"."""

_QUANT_ROUNDING = Condition(
    "PRODUCT_ROUNDING", "a product that stays FLOAT until it is quantized",
    lambda p, a: ", ".join(f"{n} rounds to {t!r}" for n, t in _product_types(p).items()),
    lambda p, a: all(t is DataType.FLOAT for t in _product_types(p).values()), "leave the product virtual FLOAT",
    row="equation: D = quant(alpha A B^T)",
)  # fmt: skip

_CODES_ONLY = Condition(
    "CODES_ONLY", "codes of the product, and not the product itself",
    lambda p, a: "asked for " + ", ".join(r for r in ("d", "q_row", "q_col") if r in p),
    lambda p, a: "d" not in p and ("q_row" in p or "q_col" in p), "leave the product virtual, or the codes unfused",
    row="D: one d_dtype",
)  # fmt: skip


def _product_types(p: Problem) -> dict[str, DataType]:
    return {n: t for n, t in p.rounding.items() if n in ("y", "d", "d_wide")}


QUANT: tuple[Condition, ...] = (
    *OPERANDS,
    Condition(
        "CODE_COLUMNS", "N positive and a multiple of 16: whole 16 bytes of codes a row",
        lambda p, a: f"N = {support.extents(p)[2]}",
        lambda p, a: known_divisor(support.extents(p)[2]) > 0 and known_divisor(support.extents(p)[2]) % 16 == 0,
        "pad N", lambda p, a: isinstance(support.extents(p)[2], int), row="D: 16-byte rows",
    ),
    FP4_MAJOR, FORWARD_ALPHA, *bias_conditions(), _NO_DBIAS, _QUANT_ROUNDING, _CODES_ONLY, *_CODES[1:],
    D_LAYOUT, *derived_conditions(amax_split=False), *_INSTALLED,
)  # fmt: skip
"""Every condition of the quantizing grouped GEMM."""


def _wgrad_extents(p: Problem) -> tuple[object, ...]:
    return (p["a"].dim[1], p["dy"].dim[1], p["dw"].dim[0])


def _bad_matrices(p: Problem) -> list[str]:
    found = [f"{r} stride {p[r].stride}" for r in ("a", "dy") if not support.is_packed(p[r], (0, 1))]
    return found + ([] if support.is_packed(p["dw"], (0, 1, 2)) else [f"dw stride {p['dw'].stride}"])


def _wgrad_pitch(p: Problem) -> int:
    return 16 if p["a"].data_type in FP8 else 8


_WGRAD = (
    Condition(
        "STATIC_SHAPE", "integers for K, N and L; only M may be a symbol",
        lambda p, a: "K = {}, N = {}, L = {}".format(*_wgrad_extents(p)),
        lambda p, a: all(isinstance(e, int) for e in _wgrad_extents(p)), "declare them as integers", row="shapes",
    ),
    Condition(
        "ROW_MULTIPLE", "M known to be a multiple of 256",
        lambda p, a: f"M = {p['a'].dim[0]}, known multiple of {known_divisor(p['a'].dim[0])}",
        lambda p, a: known_divisor(p["a"].dim[0]) % support.ROW_MULTIPLE == 0,
        "declare g.symbol('M', multiple_of=256) and pad the rows", row="tokens",
    ),
    Condition(
        "EXPERTS", "1 to 1024 experts", lambda p, a: f"L = {p['dw'].dim[0]}",
        lambda p, a: 1 <= known_divisor(p["dw"].dim[0]) <= support.MAX_EXPERTS, "split the experts",
        lambda p, a: isinstance(p["dw"].dim[0], int), row="num_experts",
    ),
    Condition(
        "ROW_PITCH", "K and N positive, in whole 16 bytes", lambda p, a: "K = {}, N = {}".format(*_wgrad_extents(p)),
        lambda p, a: all(isinstance(e, int) and e > 0 and e % _wgrad_pitch(p) == 0 for e in _wgrad_extents(p)[:2]),
        "pad with zero columns", lambda p, a: all(isinstance(e, int) for e in _wgrad_extents(p)), row="16-byte rows",
    ),
    Condition(
        "MATRIX_LAYOUT", "row-major a, dy and dw without gaps", lambda p, a: ", ".join(_bad_matrices(p)),
        lambda p, a: not _bad_matrices(p), "pass a contiguous copy", row="A M-major, B N-major, wgrad contiguous",
    ),
    *pick(support.BF16_DGLU, "OFFSETS_TYPE", "OFFSETS_ALIGNMENT", "ALIGNMENT"),
    Condition(
        "DW_TYPE", "BFLOAT16, HALF or FLOAT dw", lambda p, a: f"dw is {p['dw'].data_type!r}",
        lambda p, a: p["dw"].data_type in STORED, "set its data_type", row="wgrad_dtype",
    ),
    Condition(
        "ACCUMULATE", "accumulate=False", lambda p, a: "accumulate=True",
        lambda p, a: not p.attributes.get("accumulate", False),
        "the kernel adds with an atomic of dw's type, which rounds where the graph does not",
        row="accumulate_on_output",
    ),
)  # fmt: skip

BF16_WGRAD: tuple[Condition, ...] = (
    Condition(
        "OPERAND_TYPE", "BFLOAT16 a and dy", lambda p, a: f"a is {p['a'].data_type!r}, dy is {p['dy'].data_type!r}",
        lambda p, a: p["a"].data_type is p["dy"].data_type is DataType.BFLOAT16,
        "identity(x) with data_type BFLOAT16 converts, with its rounding", row="A, B: BF16",
    ),
    *_WGRAD, *_INSTALLED,
)  # fmt: skip
"""Every condition of the BF16 weight gradient."""


def _wgrad_format(p: Problem) -> str:
    return ", ".join(f"{r} is {p[r].data_type!r}" for r in ("a", "dy", "sf_a", "sf_dy") if r in p)


def _is_mxfp8(p: Problem) -> bool:
    if not ("sf_a" in p and "sf_dy" in p) or p["a"].data_type is not p["dy"].data_type:
        return False
    layouts = [p[r].scale_layout for r in ("sf_a", "sf_dy")]
    return p["a"].data_type in FP8 and all(
        p[r].data_type is DataType.FP8_E8M0 and s is not None and s.block_size == 32
        for r, s in zip(("sf_a", "sf_dy"), layouts, strict=True)
    )


def _loose_scales(p: Problem) -> list[str]:
    return [
        f"{r} {s} stride {p[r].stride}"
        for r in ("sf_a", "sf_dy")
        if r in p and ((s := p[r].scale_layout) is None or not s.swizzled or not support.is_packed(p[r], (0, 1)))
    ]


BLOCK_SCALED_WGRAD: tuple[Condition, ...] = (
    Condition(
        "OPERAND_FORMAT", "MXFP8 a and dy of one type, with E8M0 scales of 32", lambda p, a: _wgrad_format(p),
        lambda p, a: _is_mxfp8(p),
        "FP4 operands would have to pack along the rows, and a graph's pack along the columns",
        row="NVFP4, MXFP4: K-major sample_a and sample_b",
    ),
    Condition(
        "SCALE_STORAGE", "scales swizzled into 128x4 atoms, without gaps", lambda p, a: ", ".join(_loose_scales(p)),
        lambda p, a: not _loose_scales(p), "swizzle the scales once, when they are made", row="SFA, SFB",
    ),
    *_WGRAD, *_INSTALLED,
)  # fmt: skip
"""Every condition of the block-scaled weight gradient."""


def wgrad_launches(problem: Problem) -> int:
    """Launches of one run: the kernel, and for scales the descriptors of each expert's rows."""
    return 1 + ("sf_a" in problem)


__all__ = [
    "BF16_GLU",
    "BF16_WGRAD",
    "BLOCK_SCALED_GLU",
    "BLOCK_SCALED_WGRAD",
    "DISCRETE_GLU",
    "QUANT",
    "wgrad_launches",
]
