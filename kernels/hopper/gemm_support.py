"""What our plain grouped GEMM for sm90 serves, as data. Imports neither torch nor the DSL.

LEGAL asks the kernel's own `sm90.gemm_config.illegal`, as the other kernels' conditions do theirs. Roles: a, b,
offsets, alpha, bias, y.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...graph_ops.ir.dims import known_divisor
from ..condition import Condition
from ..problem import Problem
from ..sm90.gemm_config import COLUMN_MULTIPLE, GemmConfig, illegal
from ..sm90.gemm_tune import SHIPPED, candidates, schedule_for
from .support import (
    B_LAYOUT,
    CONTIGUOUS,
    DEPTH_MULTIPLE,
    DTYPE_NAMES,
    EXPERTS,
    OPERAND_TYPE,
    POINTERS,
    ROW_PITCH,
    b_major,
    bad_matrices,
    bad_vectors,
    extents,
    present,
    type_name,
    typical,
)

MATRIX_ROLES = ("a", "y", "bias")


def configuration(problem: Problem) -> GemmConfig:
    """The configuration that a problem asks for, with the default schedule; legal only if `illegal` says so."""
    return GemmConfig(
        ab_dtype=type_name(problem, "a") or "",
        b_major=b_major(problem) or "k",
        discrete_b=problem["b"].discrete,
        y_dtype=type_name(problem, "y") or "",
        has_alpha="alpha" in problem,
        alpha_exponent=problem.attributes.get("alpha_exponent", 1) if "alpha" in problem else 1,
        bias_dtype=type_name(problem, "bias"),
    )


def _shape(problem: Problem) -> tuple[int, int]:
    """(columns, depth), a symbol as a usual model's."""
    _, depth, columns, _ = extents(problem)
    return typical(columns), typical(depth)


def scheduled(problem: Problem, variant: str | None = None) -> GemmConfig:
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
    "y_dtype": ("bf16", "fp16", "fp32"),
    "bias_dtype": (None, "bf16", "fp16", "fp32"),
}
"""Fields of a configuration that a condition of its own judges, with what it lets through: one fault, one reason."""


def unbuilt(problem: Problem) -> list[str]:
    """Every other reason for which the kernel's own legality function declines the problem's configuration."""
    config = scheduled(problem)
    judged: dict[str, Any] = {name: let[0] for name, let in SAID_BEFORE.items() if getattr(config, name) not in let}
    return illegal(replace(config, **judged))


def _columns_fit(problem: Problem) -> bool:
    columns = extents(problem)[2]
    return known_divisor(columns) % COLUMN_MULTIPLE == 0 and columns != 0


def _type_fits(problem: Problem, role: str) -> bool:
    return DTYPE_NAMES.get(problem[role].data_type) in SAID_BEFORE[f"{role}_dtype"]


GEMM: tuple[Condition, ...] = (
    OPERAND_TYPE,
    Condition(
        "COLUMN_MULTIPLE", f"N positive and known to be a multiple of {COLUMN_MULTIPLE}",
        lambda p, a: f"N = {extents(p)[2]}", lambda p, a: _columns_fit(p), "pad N with zeros in b",
    ),
    DEPTH_MULTIPLE,
    EXPERTS,
    Condition(
        "MATRIX_LAYOUT", f"row-major a, y and bias, rows at multiples of {ROW_PITCH} elements",
        lambda p, a: ", ".join(bad_matrices(p, MATRIX_ROLES)), lambda p, a: not bad_matrices(p, MATRIX_ROLES),
        CONTIGUOUS,
    ),
    B_LAYOUT,
    Condition(
        "VECTOR_LAYOUT", "INT32 offsets and FLOAT alpha, without gaps",
        lambda p, a: ", ".join(bad_vectors(p)), lambda p, a: not bad_vectors(p), CONTIGUOUS,
    ),
    POINTERS,
    Condition(
        "Y_TYPE", "BFLOAT16, HALF or FLOAT y", lambda p, a: f"y is {p['y'].data_type!r}",
        lambda p, a: _type_fits(p, "y"), "set_data_type on the product",
    ),
    Condition(
        "BIAS_TYPE", "BFLOAT16, HALF or FLOAT bias", lambda p, a: f"bias is {p['bias'].data_type!r}",
        lambda p, a: _type_fits(p, "bias"), "set its data_type", present("bias"),
    ),
    Condition(
        "LEGAL", "a configuration that the kernel's legality function accepts", lambda p, a: "; ".join(unbuilt(p)),
        lambda p, a: not unbuilt(p), "sm90.gemm_config.illegal states every limit",
    ),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
