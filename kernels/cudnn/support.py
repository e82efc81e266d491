"""What cudnn-frontend 1.32's BF16 grouped GEMM + dGLU serves, as data. Imports neither torch, the DSL nor cuDNN.

Read from NVIDIA's page of the kernel (`row` names the row of its BF16 contract) and from the code of 1.32.0, which
decides where the two differ: `cudnn/gemm/cutedsl/grouped/dglu/_bf16_api.py` and `moe_grouped_gemm_dglu_dbias.py`.
The kernel takes prob, alpha, beta and dprob always; where the graph has none, the adapter passes ones (exact) or
scratch, so their absence declines nothing. `Problem.rounding["r"]` is where the product rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...graph_ops.ir.dims import Dim, known_divisor, upper_bound
from ...graph_ops.ir.dtypes import DATA_TYPES, DataType
from ...graph_ops.ir.layouts import GluLayout
from ...graph_ops.ir.tensor import TensorSpec
from ..arch import Arch, ArchRange
from ..condition import Condition
from ..problem import Problem
from . import versions

ARCHES = ArchRange((10, 0), (10, 7))
"""sm100 and sm103: the BF16 kernel is tcgen05 code without a Rubin path (the class itself accepts any SM from 100)."""

LAYOUT = GluLayout.interleaved(32)
ROW_MULTIPLE = 256
MAX_EXPERTS = 1024
ALIGNMENT, ACTIVATION_ALIGNMENT = 16, 32  # bytes; workspace pieces, where virtual tensors live, are aligned to more
DBIAS_TILE_ROWS = 128
STORED_TYPES = (DataType.BFLOAT16, DataType.HALF, DataType.FLOAT)
ACCUMULATED = ("dprob", "dbias")
"""Outputs that the kernel adds into: zeroed on the stream before each launch."""
VECTOR_ROLES = ("offsets", "alpha", "beta", "prob", "dprob")
QUANTIZED_ROLES = ("norm_const_row", "norm_const_col", "q_row", "sf_row", "q_col", "sf_col")


def dbias_error_factor(rows: int) -> float:
    """Bound of dbias's error, as a factor of the sum over an expert's 128-row tiles of |column sum of the tile|.

    Each tile sum is rounded to bf16 (unit roundoff 2**-8) and added to the others in bf16, in any order:
    the T tiles that `rows` of one expert fill make T + 1 roundings.
    """
    tiles = -(-rows // DBIAS_TILE_ROWS)
    return (1 + 2.0**-8) ** (tiles + 1) - 1


def extents(problem: Problem) -> tuple[Dim, Dim, Dim, Dim]:
    """(M, K, N, L): rows, reduction, columns of the product, experts."""
    experts, depth, columns = problem["b"].dim
    return problem["a"].dim[0], depth, columns, experts


def is_packed(tensor: TensorSpec, order: Sequence[int]) -> bool:
    """Whether the axes of `order`, slowest first, lie without gaps; axes of extent 1 have any stride."""
    step: Dim = 1
    for axis in reversed(order):
        if tensor.dim[axis] != 1 and tensor.stride[axis] != step:
            return False
        step = step * tensor.dim[axis]
    return True


def b_major(problem: Problem) -> str | None:
    """ "k" or "n", the contiguous axis of packed weights (L, K, N); None for any other layout."""
    b = problem["b"]
    outer = () if b.discrete else (0,)
    if is_packed(b, (*outer, 2, 1)):
        return "k"
    return "n" if is_packed(b, (*outer, 1, 2)) else None


def launches(problem: Problem) -> int:
    """Launches of one run: the kernel, for discrete weights their addresses and descriptors, zeroed accumulators, and
    ones where alpha, beta or prob is absent."""
    zeroed = sum(role in problem for role in ACCUMULATED)
    return 1 + 2 * problem["b"].discrete + zeroed + any(role not in problem for role in ("alpha", "beta", "prob"))


def product_type(problem: Problem) -> DataType:
    """Where the product rounds before the GLU's derivative reads it."""
    rounding: DataType = problem.rounding.get("r", DataType.FLOAT)
    return rounding


def gradient_type(problem: Problem) -> DataType:
    """Where the gradient rounds before group_sum reads it: d's type, unless a wider value stands before d."""
    wide: DataType = problem.rounding.get("d_wide", problem["d"].data_type)
    return wide


def _finite(value: float) -> bool:
    """Finite as float32."""
    return abs(value) <= (DATA_TYPES[DataType.FLOAT].largest or 0.0)


def _static(value: Dim) -> int:
    """The extent, -1 for a symbolic one (which STATIC_SHAPE reports)."""
    return value if isinstance(value, int) else -1


def _strides(role: str) -> Callable[[Problem, Arch], Any]:
    return lambda p, a: f"{role} {p[role].dim} with stride {p[role].stride}"


def _type(role: str) -> Callable[[Problem, Arch], Any]:
    return lambda p, a: f"{role} is {p[role].data_type!r}"


def _present(*roles: str) -> Callable[[Problem, Arch], bool]:
    return lambda p, a: all(role in p for role in roles)


def _geglu(p: Problem) -> dict[str, float]:
    return {name: p.attributes[name] for name in ("geglu_alpha", "clamp_min", "clamp_max")}


def _loose_vectors(p: Problem) -> list[str]:
    return [f"{r} stride {p[r].stride}" for r in VECTOR_ROLES if r in p and not is_packed(p[r], (0,))]


def _misaligned(p: Problem) -> list[str]:
    return [f"{role} {t.alignment}" for role, t in p.tensors.items() if t.alignment % ALIGNMENT and not t.is_virtual]


def _activation_elements(p: Problem) -> int | None:
    return upper_bound(p["activation"].dim[0] * p["activation"].dim[1])


_CONVERT = (
    "convert_glu_layout(x, GluLayout.interleaved(32)) reorders the columns; permuting w1's columns once is cheaper"
)
_CONTIGUOUS = "pass a contiguous copy"
_UNFUSED_TYPE = "set the tensor's data_type, or let this part run unfused"

_OPERANDS = (
    Condition(
        "OPERAND_TYPE", "BFLOAT16 a and b",
        lambda p, a: f"a is {p['a'].data_type!r}, b is {p['b'].data_type!r}",
        lambda p, a: p["a"].data_type is p["b"].data_type is DataType.BFLOAT16,
        "identity(x) with data_type BFLOAT16 converts, with its rounding", row="A, B: BF16",
    ),
    Condition(
        "STATIC_SHAPE", "integers for K, N and L; only M may be a symbol",
        lambda p, a: f"K = {extents(p)[1]}, N = {extents(p)[2]}, L = {extents(p)[3]}",
        lambda p, a: all(isinstance(e, int) for e in extents(p)[1:]),
        "the kernel is compiled for K, N and L: declare them as integers", row="A, B, C shapes",
    ),
    Condition(
        "ROW_MULTIPLE", "M known to be a multiple of 256",
        lambda p, a: f"M = {extents(p)[0]}, known multiple of {known_divisor(extents(p)[0])}",
        lambda p, a: known_divisor(extents(p)[0]) % ROW_MULTIPLE == 0,
        "declare g.symbol('M', multiple_of=256) and pad the rows", row="A: padded rows M",
    ),
    Condition(
        "DEPTH_MULTIPLE", "K positive and a multiple of 8 (16 bytes a row)",
        lambda p, a: f"K = {extents(p)[1]}",
        lambda p, a: _static(extents(p)[1]) > 0 and _static(extents(p)[1]) % 8 == 0,
        "pad K with zeros in a and b", lambda p, a: isinstance(extents(p)[1], int), row="A: 16-byte rows",
    ),
    Condition(
        "COLUMN_MULTIPLE", "N positive and a multiple of 32",
        lambda p, a: f"N = {extents(p)[2]}",
        lambda p, a: _static(extents(p)[2]) > 0 and _static(extents(p)[2]) % 32 == 0,
        "pad the intermediate size to a multiple of 32", lambda p, a: isinstance(extents(p)[2], int), row="B: N",
    ),
    Condition(
        "EXPERTS", "1 to 1024 experts",
        lambda p, a: f"L = {extents(p)[3]}",
        lambda p, a: 1 <= _static(extents(p)[3]) <= MAX_EXPERTS,
        "split the experts over several graphs", lambda p, a: isinstance(extents(p)[3], int), row="L experts",
    ),
    Condition(
        "A_LAYOUT", "row-major a without gaps", _strides("a"), lambda p, a: is_packed(p["a"], (0, 1)), _CONTIGUOUS,
        row="A: stride (K, 1, M*K)",
    ),
    Condition(
        "B_LAYOUT", "weights (L, K, N) without gaps, K-major stride (K*N, 1, K) or N-major stride (K*N, N, 1); "
        "discrete ones (1, K) or (N, 1) each", _strides("b"), lambda p, a: b_major(p) is not None, _CONTIGUOUS,
        row="B: K-major stride (K, 1, N*K); b_ptrs: b_major k or n",
    ),
)  # fmt: skip

_SAVED = (
    Condition(
        "GLU_LAYOUT", "gate and up interleaved by 32 columns", lambda p, a: f"c is {p['c'].glu_layout}",
        lambda p, a: p["c"].glu_layout == LAYOUT, _CONVERT, row="C: alternating 32-wide gate/input blocks",
    ),
    Condition(
        "C_TYPE", "BFLOAT16, HALF or FLOAT c", _type("c"), lambda p, a: p["c"].data_type in STORED_TYPES, _UNFUSED_TYPE,
        row="C: BF16/FP16/FP32",
    ),
    Condition(
        "C_LAYOUT", "row-major c without gaps", _strides("c"), lambda p, a: is_packed(p["c"], (0, 1)), _CONTIGUOUS,
        row="C: stride (2N, 1, 2M*N)",
    ),
    Condition(
        "OFFSETS_TYPE", "INT32 end offsets", _type("offsets"), lambda p, a: p["offsets"].data_type is DataType.INT32,
        "offsets.to(torch.int32) before the graph", row="padded_offsets: (L,) int32",
    ),
    Condition(
        "OFFSETS_ALIGNMENT", "a promise that every end offset is a multiple of 256",
        lambda p, a: f"offsets promise multiples of {p['offsets'].multiple_of}",
        lambda p, a: p["offsets"].multiple_of % ROW_MULTIPLE == 0,
        "pad each expert's rows to 256 and declare g.tensor(..., multiple_of=256); unaligned offsets would overwrite "
        "the next expert's rows", row="padded_offsets: cumulative 256-aligned ends",
    ),
    Condition(
        "VECTOR_LAYOUT", "offsets, alpha, beta, prob and dprob without gaps", lambda p, a: ", ".join(_loose_vectors(p)),
        lambda p, a: not _loose_vectors(p), _CONTIGUOUS, row="alpha, beta: (L,) FP32; prob, dprob: (M, 1, 1)",
    ),
    Condition(
        "ALIGNMENT", "data pointers aligned to 16 bytes", lambda p, a: "promised bytes: " + ", ".join(_misaligned(p)),
        lambda p, a: not _misaligned(p), "torch's own allocations are aligned; set_alignment_value(16) promises it",
        row="16-byte data pointers",
    ),
)  # fmt: skip

_MEANING = (
    Condition(
        "ALPHA_EXPONENT", "alpha_exponent = 2: the kernel multiplies by alpha squared",
        lambda p, a: f"alpha_exponent = {p.attributes.get('alpha_exponent', 1)}",
        lambda p, a: p.attributes.get("alpha_exponent", 1) == 2,
        "pass the square root of a non-negative alpha with alpha_exponent=2", _present("alpha"),
        row="equation: R = alpha**2 A B^T",
    ),
    Condition(
        "PRODUCT_ROUNDING", "a product that stays FLOAT or rounds to BFLOAT16",
        lambda p, a: f"the product rounds to {product_type(p)!r}",
        lambda p, a: product_type(p) in (DataType.FLOAT, DataType.BFLOAT16),
        "leave the product virtual FLOAT", row="equation: R in FP32",
    ),
    Condition(
        "ACT", "act swiglu or geglu", lambda p, a: f"act = {p.attributes['act']!r}",
        lambda p, a: p.attributes["act"] in ("swiglu", "geglu"), "situglu is in the block-scaled kernel only",
        row="act_func: dsituglu is not available on the BF16 backend",
    ),
    Condition(
        "GEGLU_PARAMETERS", "a positive geglu_alpha and clamp bounds, all finite in float32", lambda p, a: _geglu(p),
        lambda p, a: all(map(_finite, _geglu(p).values())) and p.attributes["geglu_alpha"] > 0,
        "a finite bound beyond the data, 3e38 say, clamps nothing", lambda p, a: p.attributes["act"] == "geglu",
        row="geglu_alpha, glu_clamp_max, glu_clamp_min",
    ),
)  # fmt: skip

_OUTPUTS = (
    Condition(
        "D_REQUIRED", "the gradient as an output", lambda p, a: "no d", _present("d"),
        "the kernel always writes it: set_output(True) on dx", row="D_row: (M, 2N, 1)",
    ),
    Condition(
        "D_TYPE", "BFLOAT16, HALF or FLOAT d", _type("d"), lambda p, a: p["d"].data_type in STORED_TYPES, _UNFUSED_TYPE,
        _present("d"), row="D_row: BF16/FP16/FP32",
    ),
    Condition(
        "D_LAYOUT", "row-major d without gaps", _strides("d"), lambda p, a: is_packed(p["d"], (0, 1)), _CONTIGUOUS,
        _present("d"), row="D_row: stride (2N, 1, 2M*N)",
    ),
    Condition(
        "DPROB_TYPE", "FLOAT dprob", _type("dprob"), lambda p, a: p["dprob"].data_type is DataType.FLOAT,
        "the default of dprob", _present("dprob"), row="dprob: (M, 1, 1) FP32",
    ),
    Condition(
        "DBIAS_TYPE", "BFLOAT16 dbias", _type("dbias"), lambda p, a: p["dbias"].data_type is DataType.BFLOAT16,
        "a FLOAT dbias is a group_sum of its own, and more accurate", _present("dbias"), row="dbias: (L, 2N, 1) BF16",
    ),
    Condition(
        "DBIAS_LAYOUT", "row-major dbias without gaps", _strides("dbias"), lambda p, a: is_packed(p["dbias"], (0, 1)),
        _CONTIGUOUS, _present("dbias"), row="dbias: stride (2N, 1, 1)",
    ),
    Condition(
        "DBIAS_SOURCE", "dbias of the unrounded gradient",
        lambda p, a: f"it sums a gradient rounded to {gradient_type(p)!r}",
        lambda p, a: gradient_type(p) is DataType.FLOAT,
        "leave dx virtual FLOAT, sum it, and write identity(dx) with d's data type", _present("dbias", "d"),
        row="dbias: sums FP32 gradients before D_row rounds",
    ),
    Condition(
        "ACTIVATION_OUTPUT", "act geglu and BFLOAT16 c, d and activation for the recomputed activation",
        lambda p, a: f"act = {p.attributes['act']!r}, "
        + ", ".join(f"{r} is {p[r].data_type!r}" for r in ("c", "d", "activation") if r in p),
        lambda p, a: p.attributes["act"] == "geglu"
        and all(p[r].data_type is DataType.BFLOAT16 for r in ("c", "d", "activation") if r in p),
        "glu(x) recomputes it unfused", _present("activation"), row="activation: dgeglu with BF16 C/D",
    ),
    Condition(
        "ACTIVATION_LAYOUT", "row-major activation without gaps", _strides("activation"),
        lambda p, a: is_packed(p["activation"], (0, 1)), _CONTIGUOUS, _present("activation"),
        row="activation: stride (N, 1, M*N)",
    ),
    Condition(
        "ACTIVATION_ALIGNMENT", "the activation's pointer aligned to 32 bytes",
        lambda p, a: f"promised bytes: {p['activation'].alignment}",
        lambda p, a: p["activation"].is_virtual or p["activation"].alignment % ACTIVATION_ALIGNMENT == 0,
        "set_alignment_value(32) on the activation", _present("activation"), row="activation: 32-byte data pointer",
    ),
    Condition(
        "ACTIVATION_SIZE", "fewer than 2**31 elements of activation: its store indexes in 32 bits",
        lambda p, a: f"up to {_activation_elements(p)} elements",
        lambda p, a: (elements := _activation_elements(p)) is None or elements < 2**31,
        "split the rows over several calls", _present("activation"), row="activation: 32-bit indices",
    ),
    Condition(
        "AMAX", "no amax", lambda p, a: "group_amax of the gradient", lambda p, a: "amax" not in p,
        "amax is in the block-scaled kernel only", row="amax_tensor: None on BF16",
    ),
    Condition(
        "QUANTIZED_OUTPUT", "no block-scaled outputs",
        lambda p, a: "asked for " + ", ".join(r for r in QUANTIZED_ROLES if r in p),
        lambda p, a: not any(r in p for r in QUANTIZED_ROLES),
        "quantized outputs are in the block-scaled kernel only; here they stay nodes of their own",
        row="d_col_tensor, sfd_row_tensor, sfd_col_tensor, norm_const_tensor: None on BF16",
    ),
    Condition(
        "DETERMINISTIC_DPROB", "no dprob in a deterministic graph", lambda p, a: "dprob of a deterministic graph",
        lambda p, a: not p.deterministic, "dprob adds up in float32 atomics, one per 256 columns", _present("dprob"),
        row="dprob: accumulated by atomics",
    ),
    Condition(
        "DETERMINISTIC_DBIAS", "no dbias in a deterministic graph", lambda p, a: "dbias of a deterministic graph",
        lambda p, a: not p.deterministic, "dbias adds up in bfloat16 atomics, one per 128 rows", _present("dbias"),
        row="dbias: accumulated by atomics",
    ),
)  # fmt: skip

_INSTALLED = (
    Condition(
        "CUDNN_VERSION", "cudnn-frontend and cutlass-dsl that are not known to be wrong together",
        lambda p, a: f"{versions.installed()}: {getattr(versions.known_bad(versions.installed()), 'name', None)}",
        lambda p, a: versions.known_bad(versions.installed()) is None,
        "install the versions that opfuse's extra `cuda` names", row="cudnn-frontend 1.32 with cutlass-dsl 4.8",
    ),
)  # fmt: skip

BF16_DGLU: tuple[Condition, ...] = (*_OPERANDS, *_SAVED, *_MEANING, *_OUTPUTS, *_INSTALLED)
"""Every condition of the BF16 kernel, in the order in which reasons list them."""
