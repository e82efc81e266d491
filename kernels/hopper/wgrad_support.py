"""What our grouped weight gradient for sm90 serves, as data. Imports neither torch nor the DSL.

LEGAL asks the kernel's own `sm90.wgrad_config.illegal`, as the other kernels' conditions do theirs. Roles: a, dy,
offsets, dw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...graph_ops.ir.dims import Dim, known_divisor
from ...graph_ops.ir.dtypes import DataType
from ..condition import Condition
from ..problem import Problem
from ..sm90.config import MAX_EXPERTS
from ..sm90.wgrad_config import WgradConfig, illegal
from ..sm90.wgrad_tune import SHIPPED, candidates, schedule_for
from .support import (
    CONTIGUOUS,
    DTYPE_NAMES,
    POINTERS,
    ROW_PITCH,
    bad_matrices,
    bad_vectors,
    divides,
    type_name,
    typical,
)

COLUMN_MULTIPLE = 8
HALVES = (DataType.BFLOAT16, DataType.HALF)


def extents(problem: Problem) -> tuple[Dim, Dim, Dim, Dim]:
    """(M, K, N, L): rows, rows and columns of one expert's gradient, experts."""
    experts, k, n = problem["dw"].dim
    return problem["a"].dim[0], k, n, experts


def configuration(problem: Problem) -> WgradConfig:
    """The configuration that a problem asks for, with the default schedule; legal only if `illegal` says so."""
    return WgradConfig(
        ab_dtype=type_name(problem, "a") or "",
        dw_dtype=type_name(problem, "dw") or "",
        accumulate=bool(problem.attributes.get("accumulate", False)),
    )


def _shape(problem: Problem) -> dict[str, int]:
    """K, N and the experts, a symbol as a usual model's."""
    _, k, n, experts = extents(problem)
    return {"k": typical(k), "n": typical(n), "experts": typical(experts)}


def scheduled(problem: Problem, variant: str | None = None) -> WgradConfig:
    """The configuration with the schedule of that name, or with that which the table gives its shape class."""
    config = configuration(problem)
    if variant is not None:
        return replace(config, schedule=SHIPPED[variant])
    return schedule_for(config, **_shape(problem))


def variants(problem: Problem) -> tuple[str, ...]:
    """The schedules worth measuring beside the table's choice, by name."""
    first = scheduled(problem)
    legal = candidates(first, **_shape(problem))
    return tuple(name for name, schedule in SHIPPED.items() if schedule in legal and schedule != first.schedule)


SAID_BEFORE: dict[str, tuple[str, ...]] = {"ab_dtype": ("bf16", "fp16"), "dw_dtype": ("bf16", "fp16", "fp32")}
"""Fields of a configuration that a condition of its own judges, with what it lets through: one fault, one reason."""


def unbuilt(problem: Problem) -> list[str]:
    """Every other reason for which the kernel's own legality function declines the problem's configuration."""
    config = scheduled(problem)
    judged: dict[str, Any] = {name: let[-1] for name, let in SAID_BEFORE.items() if getattr(config, name) not in let}
    return illegal(replace(config, **judged))


def _fits(extent: Dim) -> bool:
    return extent != 0 and known_divisor(extent) % COLUMN_MULTIPLE == 0


def _loose(problem: Problem) -> list[str]:
    found = bad_matrices(problem, ("a", "dy"))
    dw = problem["dw"]
    if dw.stride[2] != 1 or not (divides(dw.stride[0], ROW_PITCH) and divides(dw.stride[1], ROW_PITCH)):
        found.append(f"dw stride {dw.stride}")
    return found


WGRAD: tuple[Condition, ...] = (
    Condition(
        "OPERAND_TYPE", "BFLOAT16 or HALF a and dy",
        lambda p, a: f"a is {p['a'].data_type!r}, dy is {p['dy'].data_type!r}",
        lambda p, a: p["a"].data_type is p["dy"].data_type and p["a"].data_type in HALVES,
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    Condition(
        "COLUMN_MULTIPLE", f"K and N positive and known to be multiples of {COLUMN_MULTIPLE} (16 bytes a row)",
        lambda p, a: "K = {1}, N = {2}".format(*extents(p)), lambda p, a: all(map(_fits, extents(p)[1:3])),
        "pad the columns of a and dy with zeros",
    ),
    Condition(
        "EXPERTS", f"1 to {MAX_EXPERTS} experts, as an integer", lambda p, a: f"L = {extents(p)[3]}",
        lambda p, a: isinstance(extents(p)[3], int) and 1 <= known_divisor(extents(p)[3]) <= MAX_EXPERTS,
        "split the experts over several graphs",
    ),
    Condition(
        "MATRIX_LAYOUT", f"row-major a, dy and dw, rows and experts at multiples of {ROW_PITCH} elements",
        lambda p, a: ", ".join(_loose(p)), lambda p, a: not _loose(p),
        "pass contiguous copies; exchange a and dy where dw lies transposed",
    ),
    Condition(
        "VECTOR_LAYOUT", "INT32 offsets without gaps", lambda p, a: ", ".join(bad_vectors(p)),
        lambda p, a: not bad_vectors(p), CONTIGUOUS,
    ),
    POINTERS,
    Condition(
        "DW_TYPE", "BFLOAT16, HALF or FLOAT dw", lambda p, a: f"dw is {p['dw'].data_type!r}",
        lambda p, a: DTYPE_NAMES.get(p["dw"].data_type) in SAID_BEFORE["dw_dtype"], "set its data_type",
    ),
    Condition(
        "LEGAL", "a configuration that the kernel's legality function accepts", lambda p, a: "; ".join(unbuilt(p)),
        lambda p, a: not unbuilt(p), "sm90.wgrad_config.illegal states every limit",
    ),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
