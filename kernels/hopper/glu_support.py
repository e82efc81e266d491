"""What our grouped GEMM + GLU kernel for sm90 serves, as data. Imports neither torch nor the DSL.

LEGAL asks the kernel's own `sm90.glu_config.illegal`, as in support.py, whose conditions these are where both kernels
require the same. Roles: a, b, offsets, alpha, bias, prob; c is the pre-activation, d the activation. With b_up, b is
the gate's half of the weights, and c is concatenated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...graph_ops.ir.dims import known_divisor
from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import GluLayout
from ..condition import Condition
from ..problem import Problem
from ..sm90.config import GLU_LAYOUTS
from ..sm90.glu_config import GluConfig, illegal
from ..sm90.glu_tune import SHIPPED, candidates, schedule_for
from .codes_support import (
    BLOCK_FORMAT,
    CODE_LAYOUT,
    GROUP_MULTIPLE,
    NO_NORM_CONST,
    SCALE_LAYOUTS_EQUAL,
    source_type,
)
from .support import (
    ACT_PARAMETERS,
    B_LAYOUT,
    CONTIGUOUS,
    DEPTH_MULTIPLE,
    DTYPE_NAMES,
    EXPERTS,
    LAYOUT_NAMES,
    OPERAND_TYPE,
    POINTERS,
    ROW_PITCH,
    activation,
    b_major,
    bad_matrices,
    bad_vectors,
    extents,
    present,
    type_name,
    typical,
)

HALVES = (DataType.BFLOAT16, DataType.HALF)
MATRIX_ROLES = ("a", "c", "d", "bias")
CODES = ("q_row", "q_col")
SUMS = ("dbias", "amax")
"""Outputs computed from the activation, of which this kernel writes none."""
PRODUCT_NAMES = {DataType.FLOAT: None, DataType.BFLOAT16: "bf16", DataType.HALF: "fp16"}


def product_type(problem: Problem) -> DataType:
    """Where the product rounds before the activation reads it: in its wide form, its own tensor, or nowhere."""
    stored = problem["c"].data_type if "c" in problem else DataType.FLOAT
    found: DataType = problem.rounding.get("c_wide", problem.rounding.get("c", stored))
    return found


def glu_layout(problem: Problem) -> GluLayout | None:
    """The layout of the product's columns, which the weights or the bias have where the product has no tensor."""
    if "b_up" in problem:
        return GluLayout.parse(problem.attributes["join.layout"])
    return next((problem[r].glu_layout for r in ("c", "b", "bias") if r in problem and problem[r].glu_layout), None)


def _has_codes(problem: Problem) -> bool:
    return any(role in problem for role in CODES)


def configuration(problem: Problem) -> GluConfig:
    """The configuration that a problem asks for, with the default schedule; legal only if `illegal` says so."""
    layout, product, source = glu_layout(problem), product_type(problem), source_type(problem)
    scales = [problem[r].scale_layout for r in ("sf_row", "sf_col") if r in problem]
    return GluConfig(
        ab_dtype=type_name(problem, "a") or "",
        b_major=b_major(problem) or "k",
        discrete_b=problem["b"].discrete,
        separate_up="b_up" in problem,
        glu_layout=LAYOUT_NAMES.get(layout, str(layout)) if layout is not None else "none",
        act=activation(problem),
        product_dtype=PRODUCT_NAMES.get(product, repr(product)),
        h_dtype=type_name(problem, "c"),
        d_dtype=type_name(problem, "d"),
        has_prob="prob" in problem,
        has_alpha="alpha" in problem,
        alpha_exponent=problem.attributes.get("alpha_exponent", 1) if "alpha" in problem else 1,
        bias_dtype=type_name(problem, "bias"),
        q_row_dtype=type_name(problem, "q_row"),
        q_col_dtype=type_name(problem, "q_col"),
        sf_swizzled=all(s.swizzled for s in scales if s is not None),
        source_dtype=PRODUCT_NAMES.get(source, repr(source)) if _has_codes(problem) else None,
    )


def gate_columns(problem: Problem) -> int:
    """How many columns of b one column of the activation takes: 1 where up has weights of its own, else 2."""
    return 1 if "b_up" in problem else 2


def _shape(problem: Problem) -> tuple[int, int]:
    """(columns of the activation, depth), a symbol as a usual model's."""
    _, depth, columns, _ = extents(problem)
    return typical(columns) // gate_columns(problem), typical(depth)


def scheduled(problem: Problem, variant: str | None = None) -> GluConfig:
    """The configuration with the schedule of that name, or with that which the table gives its shape class."""
    config = configuration(problem)
    if variant is not None:
        return replace(config, schedule=SHIPPED[variant])
    n, k = _shape(problem)
    return schedule_for(config, n=n, k=k)


def variants(problem: Problem) -> tuple[str, ...]:
    """The schedules worth measuring beside the table's choice, by name."""
    n, k = _shape(problem)
    first = scheduled(problem)
    legal = candidates(first, n=n, k=k)
    return tuple(name for name, schedule in SHIPPED.items() if schedule in legal and schedule != first.schedule)


def launches(problem: Problem) -> int:
    """Launches of one run: the kernel; for separate experts the copy of their addresses and the launch that makes
    descriptors of them."""
    return 1 + 2 * problem["b"].discrete


SAID_BEFORE: dict[str, tuple[str | None, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "glu_layout": GLU_LAYOUTS,
    "product_dtype": (None, "bf16", "fp16"),
    "h_dtype": (None, "bf16", "fp16"),
    "d_dtype": ("bf16", "fp16", None),
    "q_row_dtype": ("e4m3", "e5m2", None),
    "q_col_dtype": ("e4m3", "e5m2", None),
    "source_dtype": (None, "bf16", "fp16"),
    "bias_dtype": (None, "bf16", "fp16", "fp32"),
}
"""Fields of a configuration that a condition of its own judges, with what it lets through: one fault, one reason."""


def unbuilt(problem: Problem) -> list[str]:
    """Every other reason for which the kernel's own legality function declines the problem's configuration."""
    config = scheduled(problem)
    judged: dict[str, Any] = {name: let[0] for name, let in SAID_BEFORE.items() if getattr(config, name) not in let}
    if config.separate_up:
        judged["discrete_b"] = False  # UP_WEIGHTS says so
    if "d" not in problem and not _has_codes(problem):
        judged["d_dtype"] = "bf16"  # D_TYPE says so
    if "d_dtype" in judged:
        judged["source_dtype"] = None
    return illegal(replace(config, **judged))


def _columns_fit(problem: Problem) -> bool:
    columns = extents(problem)[2]
    return known_divisor(columns) % (32 * gate_columns(problem)) == 0 and columns != 0


def _sides(problem: Problem) -> dict[str, DataType]:
    """Where gate and up round before they are put side by side."""
    return {side: problem.rounding[side] for side in ("gate", "up") if side in problem.rounding}


def _sides_fit(problem: Problem) -> bool:
    """Whether they round nowhere else than the product does."""
    return all(t in (DataType.FLOAT, product_type(problem)) for t in _sides(problem).values())


def _up(problem: Problem) -> Problem:
    """The problem with up's weights in the place of the gate's."""
    return replace(problem, tensors={**problem.tensors, "b": problem["b_up"]})


def _same_weights(problem: Problem) -> bool:
    gate, up = problem["b"], problem["b_up"]
    same = up.data_type is gate.data_type and b_major(_up(problem)) == b_major(problem)
    return same and not gate.discrete and not up.discrete


GLU: tuple[Condition, ...] = (
    OPERAND_TYPE,
    Condition(
        "COLUMN_MULTIPLE", "N known to be a multiple of 64: 32 gate and 32 up columns (of 32 with their weights apart)",
        lambda p, a: f"N = {extents(p)[2]}", lambda p, a: _columns_fit(p),
        "pad the intermediate size to a multiple of 32",
    ),
    DEPTH_MULTIPLE,
    EXPERTS,
    Condition(
        "MATRIX_LAYOUT", f"row-major a, c, d and bias, rows at multiples of {ROW_PITCH} elements",
        lambda p, a: ", ".join(bad_matrices(p, MATRIX_ROLES)), lambda p, a: not bad_matrices(p, MATRIX_ROLES),
        CONTIGUOUS,
    ),
    B_LAYOUT,
    Condition(
        "UP_WEIGHTS", "weights of up of the gate's type and layout, both dense",
        lambda p, a: f"b {p['b'].data_type!r} with stride {p['b'].stride}, b_up {p['b_up'].data_type!r} with stride "
        f"{p['b_up'].stride}", lambda p, a: _same_weights(p), CONTIGUOUS, present("b_up"),
    ),
    Condition(
        "UP_ROUNDING", "gate and up that round where their product does, or nowhere else",
        lambda p, a: ", ".join(f"{side} rounds to {t!r}" for side, t in _sides(p).items()), lambda p, a: _sides_fit(p),
        "leave gate and up virtual FLOAT", present("b_up"),
    ),
    Condition(
        "VECTOR_LAYOUT", "INT32 offsets and FLOAT alpha and prob, without gaps",
        lambda p, a: ", ".join(bad_vectors(p)), lambda p, a: not bad_vectors(p), CONTIGUOUS,
    ),
    POINTERS,
    Condition(
        "GLU_LAYOUT", "gate and up interleaved by 32, by 1, or concatenated", lambda p, a: f"b is {glu_layout(p)}",
        lambda p, a: glu_layout(p) in LAYOUT_NAMES, "convert_glu_layout(w1, GluLayout.interleaved(32))",
    ),
    Condition(
        "PRODUCT_ROUNDING", "a product that the activation reads in FLOAT, or rounded to BFLOAT16 or HALF",
        lambda p, a: f"it rounds to {product_type(p)!r}", lambda p, a: product_type(p) in PRODUCT_NAMES,
        "set_data_type on the product",
    ),
    Condition(
        "C_TYPE", "BFLOAT16 or HALF c", lambda p, a: f"c is {p['c'].data_type!r}",
        lambda p, a: p["c"].data_type in HALVES, "write identity of the product with a 16-bit data type", present("c"),
    ),
    Condition(
        "D_TYPE", "the activation as a BFLOAT16 or HALF tensor, or in codes alone",
        lambda p, a: f"d is {p['d'].data_type!r}" if "d" in p else "no d",
        lambda p, a: p["d"].data_type in HALVES if "d" in p else _has_codes(p), "set_data_type on the activation",
    ),
    Condition(
        "BIAS_TYPE", "BFLOAT16, HALF or FLOAT bias", lambda p, a: f"bias is {p['bias'].data_type!r}",
        lambda p, a: DTYPE_NAMES.get(p["bias"].data_type) in SAID_BEFORE["bias_dtype"], "set its data_type",
        present("bias"),
    ),
    Condition(
        "PLAIN_OUTPUTS", "no column sums or amax of the activation",
        lambda p, a: ", ".join(r for r in SUMS if r in p), lambda p, a: False,
        "they stay nodes of their own, of the activation as a tensor of 16 bits", present(*SUMS),
    ),
    Condition(
        "SOURCE_ROUNDING", "codes of the activation in FLOAT, or rounded to BFLOAT16 or HALF",
        lambda p, a: f"it rounds to {source_type(p)!r}", lambda p, a: source_type(p) in PRODUCT_NAMES,
        "set_data_type on the activation", present(*CODES),
    ),
    Condition(
        "CODE_COLUMNS", "columns of the activation known to be a multiple of 64 where they are quantized",
        lambda p, a: f"{p[next(r for r in CODES if r in p)].dim[1]}",
        lambda p, a: all(known_divisor(p[r].dim[1]) % 64 == 0 for r in CODES if r in p),
        "pad the intermediate size to a multiple of 64", present(*CODES),
    ),
    NO_NORM_CONST,
    BLOCK_FORMAT,
    CODE_LAYOUT,
    SCALE_LAYOUTS_EQUAL,
    GROUP_MULTIPLE,
    ACT_PARAMETERS,
    Condition(
        "LEGAL", "a configuration that the kernel's legality function accepts", lambda p, a: "; ".join(unbuilt(p)),
        lambda p, a: not unbuilt(p), "sm90.glu_config.illegal states every limit",
    ),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
