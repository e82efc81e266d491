"""What our grouped GEMM + dGLU kernel for sm90 serves, as data. Imports neither torch nor the DSL.

Where a condition is one of the kernel's own (`sm90.dglu_config.illegal`), LEGAL asks that function: legality is stated
once. The conditions here are about tensors, layouts and meaning, which a configuration does not see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...graph_ops.ir.dims import known_divisor
from ...graph_ops.ir.dtypes import DataType
from ..condition import Condition
from ..problem import Problem
from ..sm90.config import GLU_LAYOUTS
from ..sm90.dglu_config import DgluConfig, finishes, illegal
from ..sm90.dglu_tune import SHIPPED, candidates, schedule_for
from .codes_support import BLOCK_FORMAT, CODE_LAYOUT, GROUP_MULTIPLE, NO_NORM_CONST, SCALE_LAYOUTS_EQUAL, source_type
from .support import (
    ACT_PARAMETERS,
    B_LAYOUT,
    CONTIGUOUS,
    DEPTH_MULTIPLE,
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
    rounding,
    type_name,
    typical,
)

MATRIX_ROLES = ("a", "c", "d", "activation")
DERIVED_ROLES = ("dbias", "amax", "q_row", "q_col")
"""Outputs computed from the gradient: the kernel takes its float32 value."""


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


DGLU: tuple[Condition, ...] = (
    OPERAND_TYPE,
    Condition(
        "COLUMN_MULTIPLE", "N known to be a multiple of 32", lambda p, a: f"N = {extents(p)[2]}",
        lambda p, a: known_divisor(extents(p)[2]) % 32 == 0 and extents(p)[2] != 0,
        "pad the intermediate size to a multiple of 32",
    ),
    DEPTH_MULTIPLE,
    EXPERTS,
    Condition(
        "MATRIX_LAYOUT", f"row-major a, c, d and activation, rows at multiples of {ROW_PITCH} elements",
        lambda p, a: ", ".join(bad_matrices(p, MATRIX_ROLES)), lambda p, a: not bad_matrices(p, MATRIX_ROLES),
        CONTIGUOUS,
    ),
    B_LAYOUT,
    Condition(
        "VECTOR_LAYOUT", "INT32 offsets and FLOAT alpha, beta, prob and dprob, without gaps",
        lambda p, a: ", ".join(bad_vectors(p)), lambda p, a: not bad_vectors(p), CONTIGUOUS,
    ),
    POINTERS,
    Condition(
        "GLU_LAYOUT", "gate and up interleaved by 32, by 1, or concatenated", lambda p, a: f"c is {p['c'].glu_layout}",
        lambda p, a: p["c"].glu_layout in LAYOUT_NAMES,
        "convert_glu_layout(x, GluLayout.interleaved(32)) reorders columns",
    ),
    Condition(
        "PRODUCT_ROUNDING", "a product that stays FLOAT", lambda p, a: f"the product rounds to {rounding(p, 'r')!r}",
        lambda p, a: rounding(p, "r") is DataType.FLOAT, "leave the product virtual FLOAT",
    ),
    Condition(
        "SOURCE_ROUNDING", "dbias, amax and codes of the unrounded gradient",
        lambda p, a: f"{', '.join(r for r in DERIVED_ROLES if r in p)} of a gradient rounded to {source_type(p)!r}",
        lambda p, a: source_type(p) is DataType.FLOAT,
        "leave dx virtual FLOAT, and write identity(dx) with d's data type", present(*DERIVED_ROLES),
    ),
    ACT_PARAMETERS,
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
    NO_NORM_CONST,
    BLOCK_FORMAT,
    CODE_LAYOUT,
    SCALE_LAYOUTS_EQUAL,
    GROUP_MULTIPLE,
    Condition(
        "LEGAL", "a configuration that the kernel's legality function accepts", lambda p, a: "; ".join(unbuilt(p)),
        lambda p, a: not unbuilt(p), "sm90.dglu_config.illegal states every limit",
    ),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
