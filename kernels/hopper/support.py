"""What our grouped GEMM + dGLU kernel for sm90 serves, as data. Imports neither torch nor the DSL.

Where a condition is one of the kernel's own (`sm90.config.illegal`), LEGAL asks that function: legality is stated once.
The conditions here are about tensors, layouts and meaning, which a configuration does not see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ...graph_ops.ir.dims import Dim, known_divisor
from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import GluLayout
from ...graph_ops.ir.tensor import TensorSpec
from ..arch import Arch, ArchRange
from ..condition import Condition
from ..problem import Problem
from ..sm90.config import GLU_LAYOUTS, MAX_EXPERTS, Activation, DgluConfig, finishes, illegal
from ..sm90.tune import SHIPPED, candidates, schedule_for

ARCHES = ArchRange((9, 0), (9, 1))
"""sm90 alone: wgmma exists nowhere else."""

DTYPE_NAMES = {
    DataType.BFLOAT16: "bf16",
    DataType.HALF: "fp16",
    DataType.FLOAT: "fp32",
    DataType.FP8_E4M3: "e4m3",
    DataType.FP8_E5M2: "e5m2",
}
LAYOUT_NAMES = {
    GluLayout.interleaved(32): "interleaved32",
    GluLayout.interleaved(1): "interleaved1",
    GluLayout.concatenated(): "concatenated",
}
ROW_PITCH = 8  # elements: TMA takes rows at multiples of 16 bytes, and narrower types keep the same pitch
CODE_PITCH = 16  # codes: 16 bytes
ALIGNMENT = 16
BLOCK = 32
CODE_TYPES = (DataType.FP8_E4M3, DataType.FP8_E5M2)
SWIZZLED_ROW_GROUPS = 128  # rows: a group's row scales start on an atom
SWIZZLED_COLUMN_GROUPS = 4 * BLOCK
MATRIX_ROLES = ("a", "c", "d", "activation")
VECTOR_ROLES = ("offsets", "alpha", "beta", "prob", "dprob")
VECTOR_TYPES = {"offsets": DataType.INT32} | dict.fromkeys(("alpha", "beta", "prob", "dprob"), DataType.FLOAT)
DERIVED_ROLES = ("dbias", "amax", "q_row", "q_col")
"""Outputs computed from the gradient: the kernel takes its float32 value."""


def extents(problem: Problem) -> tuple[Dim, Dim, Dim, Dim]:
    """(M, K, N, L): rows, depth, columns of the product, experts."""
    experts, depth, columns = problem["b"].dim
    return problem["a"].dim[0], depth, columns, experts


def b_major(problem: Problem) -> str | None:
    """ "k" or "n": the contiguous axis of the weights, the other's stride being fit for TMA; None for neither."""
    b = problem["b"]
    k_stride, n_stride = b.stride[1], b.stride[2]
    if b.discrete:  # addresses say nothing of strides: each expert's matrix is packed
        packed = {"k": (1, b.dim[1]), "n": (b.dim[2], 1)}
        return next((major for major, strides in packed.items() if (k_stride, n_stride) == strides), None)
    if not _divides(b.stride[0], ROW_PITCH):
        return None
    if k_stride == 1 and _divides(n_stride, ROW_PITCH):
        return "k"
    return "n" if n_stride == 1 and _divides(k_stride, ROW_PITCH) else None


def type_name(problem: Problem, role: str) -> str | None:
    """The configuration's name of a role's data type, None where the role is absent."""
    return DTYPE_NAMES.get(problem[role].data_type, repr(problem[role].data_type)) if role in problem else None


def activation(problem: Problem) -> Activation:
    """The activation and its parameters, as a kernel's configuration has them."""
    given = problem.attributes
    act = {"name": given["act"]}
    if given["act"] == "geglu":
        act |= {"alpha": given["geglu_alpha"], "clamp_max": given["clamp_max"], "clamp_min": given["clamp_min"],
                "offset": given["linear_offset"]}  # fmt: skip
    elif given["act"] == "situglu":
        act |= {"beta1": given["situ_beta1"], "beta2": given["situ_beta2"]}
    return Activation(**act)


def configuration(problem: Problem) -> DgluConfig:
    """The configuration that a problem asks for, with the default schedule; legal only if `illegal` says so."""
    given = problem.attributes
    layout = problem["c"].glu_layout
    scales = [problem[r].scale_layout for r in ("sf_row", "sf_col") if r in problem]
    return DgluConfig(
        ab_dtype=type_name(problem, "a") or "",
        b_major=b_major(problem) or "k",
        discrete_b=problem["b"].discrete,
        glu_layout=LAYOUT_NAMES.get(layout, str(layout)) if layout is not None else "none",
        act=activation(problem),
        c_dtype=type_name(problem, "c") or "",
        d_dtype=type_name(problem, "d"),
        has_prob="prob" in problem,
        has_alpha="alpha" in problem,
        alpha_exponent=given.get("alpha_exponent", 1) if "alpha" in problem else 2,
        has_beta="beta" in problem,
        has_dprob="dprob" in problem,
        activation_dtype=type_name(problem, "activation"),
        dbias_dtype=type_name(problem, "dbias"),
        has_amax="amax" in problem,
        q_row_dtype=type_name(problem, "q_row"),
        q_col_dtype=type_name(problem, "q_col"),
        sf_swizzled=all(s.swizzled for s in scales if s is not None),
        deterministic=problem.deterministic,
    )


def scheduled(problem: Problem, variant: str | None = None) -> DgluConfig:
    """The configuration with the schedule of that name, or with that which the table of measurements gives its shape
    class."""
    config = configuration(problem)
    if variant is not None:
        return replace(config, schedule=SHIPPED[variant])
    _, depth, columns, _ = extents(problem)
    return schedule_for(config, n=typical(columns), k=typical(depth))


def variants(problem: Problem) -> tuple[str, ...]:
    """The schedules worth measuring beside the table's choice, by name."""
    _, depth, columns, _ = extents(problem)
    first = scheduled(problem)
    legal = candidates(first, n=typical(columns), k=typical(depth))
    return tuple(name for name, schedule in SHIPPED.items() if schedule in legal and schedule != first.schedule)


SAID_BEFORE: dict[str, tuple[str | None, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "glu_layout": GLU_LAYOUTS,
    "q_row_dtype": ("e4m3", "e5m2", None),
    "q_col_dtype": ("e4m3", "e5m2", None),
}
"""Fields of a configuration that a condition of its own judges, with what it lets through: one fault, one reason."""


def unbuilt(problem: Problem) -> list[str]:
    """Every other reason for which the kernel's own legality function declines the problem's configuration."""
    config = scheduled(problem)
    judged: dict[str, Any] = {name: let[0] for name, let in SAID_BEFORE.items() if getattr(config, name) not in let}
    return illegal(replace(config, **judged))


def launches(problem: Problem) -> int:
    """Launches of one run: the kernel, one that adds partials up; for separate experts the copy of their addresses and
    the launch that makes descriptors of them."""
    return 1 + _adds_up(problem) + 2 * problem["b"].discrete


def _adds_up(problem: Problem) -> bool:
    """Whether partials are added up: not those of dprob alone where one tile has every column, and writes dprob."""
    config = scheduled(problem)
    if config.has_amax or config.dbias_dtype is not None:
        return True
    return finishes(config) and typical(extents(problem)[2]) > config.schedule.tile_n


def typical(extent: Dim) -> int:
    """The extent; a symbol counts as a usual model's, so that it falls in the table's middle class."""
    return extent if isinstance(extent, int) else 2048


def _divides(stride: Dim, pitch: int) -> bool:
    """Whether a stride is known to be a multiple of `pitch`; none of a broadcast axis, 0, which TMA was never given."""
    return stride != 0 and known_divisor(stride) % pitch == 0


def _row_pitch(tensor: TensorSpec, pitch: int) -> bool:
    return tensor.stride[1] == 1 and _divides(tensor.stride[0], pitch)


def bad_matrices(p: Problem, roles: Iterable[str] = MATRIX_ROLES) -> list[str]:
    """Those of `roles` that are not row-major with rows as TMA takes them."""
    return [f"{r} stride {p[r].stride}" for r in roles if r in p and not _row_pitch(p[r], ROW_PITCH)]


def bad_vectors(p: Problem) -> list[str]:
    """Vectors of another type than the kernels read, or with gaps."""
    return [
        f"{r} {p[r].data_type!r} stride {p[r].stride}"
        for r in VECTOR_ROLES
        if r in p and (p[r].data_type is not VECTOR_TYPES[r] or p[r].stride[0] != 1)
    ]


def _misaligned(p: Problem) -> list[str]:
    return [f"{r} {t.alignment}" for r, t in p.tensors.items() if t.alignment % ALIGNMENT and not t.is_virtual]


def present(*roles: str) -> Callable[[Problem, Arch], bool]:
    """A condition's `applies`: one of the roles is there."""
    return lambda p, a: any(role in p for role in roles)


def _rounding(p: Problem, value: str) -> Any:
    return p.rounding.get(value, DataType.FLOAT)


def _source_type(p: Problem) -> Any:
    """The data type of the gradient that derived outputs are computed from."""
    return p.rounding.get("d_wide", p.rounding.get("d", p["d"].data_type if "d" in p else DataType.FLOAT))


def _formats(p: Problem) -> list[str]:
    wrong = []
    for side in ("row", "col"):
        if f"q_{side}" in p:
            block, scale = p.attributes[f"q_{side}.block_size"], p.attributes[f"q_{side}.scale_type"]
            codes = p[f"q_{side}"].data_type
            if (block, scale) != (BLOCK, "FP8_E8M0") or codes not in CODE_TYPES:
                wrong.append(f"q_{side}: {codes!r}, blocks of {block}, {scale} scales")
    return wrong


def _code_layouts(p: Problem) -> list[str]:
    codes = [f"{r} stride {p[r].stride}" for r in ("q_row", "q_col") if r in p and not _row_pitch(p[r], CODE_PITCH)]
    return codes + [f"{r} stride {p[r].stride}" for r in ("sf_row", "sf_col") if r in p and not p[r].is_contiguous]


def group_multiple(p: Problem) -> int:
    """What every end offset must divide by, for the scales that are asked for."""
    wanted = 1
    for role, plain, swizzled in (("sf_row", 1, SWIZZLED_ROW_GROUPS), ("sf_col", BLOCK, SWIZZLED_COLUMN_GROUPS)):
        if role in p and (layout := p[role].scale_layout) is not None:
            wanted = math.lcm(wanted, swizzled if layout.swizzled else plain)
    return wanted


CONTIGUOUS = "pass a contiguous copy"

DGLU: tuple[Condition, ...] = (
    Condition(
        "OPERAND_TYPE", "BFLOAT16 or HALF a and b",
        lambda p, a: f"a is {p['a'].data_type!r}, b is {p['b'].data_type!r}",
        lambda p, a: p["a"].data_type is p["b"].data_type and p["a"].data_type in (DataType.BFLOAT16, DataType.HALF),
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    Condition(
        "COLUMN_MULTIPLE", "N known to be a multiple of 32", lambda p, a: f"N = {extents(p)[2]}",
        lambda p, a: known_divisor(extents(p)[2]) % 32 == 0 and extents(p)[2] != 0,
        "pad the intermediate size to a multiple of 32",
    ),
    Condition(
        "DEPTH_MULTIPLE", "K positive and known to be a multiple of 8 (16 bytes a row)",
        lambda p, a: f"K = {extents(p)[1]}",
        lambda p, a: known_divisor(extents(p)[1]) % 8 == 0 and extents(p)[1] != 0, "pad K with zeros in a and b",
    ),
    Condition(
        "EXPERTS", f"1 to {MAX_EXPERTS} experts, as an integer", lambda p, a: f"L = {extents(p)[3]}",
        lambda p, a: isinstance(extents(p)[3], int) and 1 <= known_divisor(extents(p)[3]) <= MAX_EXPERTS,
        "split the experts over several graphs",
    ),
    Condition(
        "MATRIX_LAYOUT", f"row-major a, c, d and activation, rows at multiples of {ROW_PITCH} elements",
        lambda p, a: ", ".join(bad_matrices(p)), lambda p, a: not bad_matrices(p), CONTIGUOUS,
    ),
    Condition(
        "B_LAYOUT", f"K-major or N-major weights, the other strides multiples of {ROW_PITCH}; discrete ones packed",
        lambda p, a: f"b {p['b'].dim} with stride {p['b'].stride}", lambda p, a: b_major(p) is not None, CONTIGUOUS,
    ),
    Condition(
        "VECTOR_LAYOUT", "INT32 offsets and FLOAT alpha, beta, prob and dprob, without gaps",
        lambda p, a: ", ".join(bad_vectors(p)), lambda p, a: not bad_vectors(p), CONTIGUOUS,
    ),
    Condition(
        "ALIGNMENT", f"data pointers aligned to {ALIGNMENT} bytes",
        lambda p, a: "promised bytes: " + ", ".join(_misaligned(p)), lambda p, a: not _misaligned(p),
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    Condition(
        "GLU_LAYOUT", "gate and up interleaved by 32, by 1, or concatenated", lambda p, a: f"c is {p['c'].glu_layout}",
        lambda p, a: p["c"].glu_layout in LAYOUT_NAMES,
        "convert_glu_layout(x, GluLayout.interleaved(32)) reorders columns",
    ),
    Condition(
        "PRODUCT_ROUNDING", "a product that stays FLOAT", lambda p, a: f"the product rounds to {_rounding(p, 'r')!r}",
        lambda p, a: _rounding(p, "r") is DataType.FLOAT, "leave the product virtual FLOAT",
    ),
    Condition(
        "SOURCE_ROUNDING", "dbias, amax and codes of the unrounded gradient",
        lambda p, a: f"{', '.join(r for r in DERIVED_ROLES if r in p)} of a gradient rounded to {_source_type(p)!r}",
        lambda p, a: _source_type(p) is DataType.FLOAT,
        "leave dx virtual FLOAT, and write identity(dx) with d's data type", present(*DERIVED_ROLES),
    ),
    Condition(
        "ACT_PARAMETERS", "activation parameters that are finite in float32",
        lambda p, a: {k: v for k, v in p.attributes.items() if isinstance(v, float) and not math.isfinite(v)},
        lambda p, a: all(math.isfinite(v) for v in p.attributes.values() if isinstance(v, float)),
        "a finite bound beyond the data, 3e38 say, clamps nothing",
    ),
    Condition(
        "DBIAS_LAYOUT", "row-major dbias", lambda p, a: f"dbias stride {p['dbias'].stride}",
        lambda p, a: p["dbias"].stride[1] == 1, CONTIGUOUS, present("dbias"),
    ),
    Condition(
        "AMAX_FORM", "FLOAT amax (L, 2), gate and up apart, without gaps", lambda p, a: f"{p['amax']}",
        lambda p, a: p.attributes["amax.split_glu"]
        and p["amax"].data_type is DataType.FLOAT
        and p["amax"].is_contiguous,
        "group_amax(dx, offsets, split_glu=True)", present("amax"),
    ),
    Condition(
        "NORM_CONST", "no norm_const", lambda p, a: "norm_const on " + ", ".join(
            side for side in ("row", "col") if f"norm_const_{side}" in p),
        lambda p, a: "norm_const_row" not in p and "norm_const_col" not in p, "fold it into alpha or prob",
    ),
    Condition(
        "BLOCK_FORMAT", "MXFP8: E4M3 or E5M2 codes, E8M0 scales of 32", lambda p, a: "; ".join(_formats(p)),
        lambda p, a: not _formats(p), "another format is quantized unfused", present("q_row", "q_col"),
    ),
    Condition(
        "CODE_LAYOUT", f"row-major codes, rows at multiples of {CODE_PITCH}, and scales without gaps",
        lambda p, a: ", ".join(_code_layouts(p)), lambda p, a: not _code_layouts(p), CONTIGUOUS,
        present("q_row", "q_col"),
    ),
    Condition(
        "SCALE_LAYOUTS_EQUAL", "row and column scales both swizzled or both plain",
        lambda p, a: f"rows {p['sf_row'].scale_layout}, columns {p['sf_col'].scale_layout}",
        lambda p, a: p.attributes["q_row.swizzled"] == p.attributes["q_col.swizzled"], "give both the same `swizzled`",
        lambda p, a: "sf_row" in p and "sf_col" in p,
    ),
    Condition(
        "GROUP_MULTIPLE", "end offsets promised to be multiples of what the scales' layout needs (32 for plain column "
        "scales, 128 for swizzled ones)",
        lambda p, a: f"offsets promise multiples of {p['offsets'].multiple_of}, scales need {group_multiple(p)}",
        lambda p, a: p["offsets"].multiple_of % group_multiple(p) == 0,
        "pad each expert's rows and declare g.tensor(..., multiple_of=128)", present("sf_row", "sf_col"),
    ),
    Condition(
        "LEGAL", "a configuration that the kernel's legality function accepts", lambda p, a: "; ".join(unbuilt(p)),
        lambda p, a: not unbuilt(p), "sm90.config.illegal states every limit",
    ),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
