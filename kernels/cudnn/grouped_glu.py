"""Adapter onto cudnn-frontend's BF16 grouped GEMM + GLU: dense K-major or discrete weights, bias, pre-activation.

Importing this module imports no cuDNN. The class always wants memory for C; where the graph does not ask for it, C is
scratch that the kernel leaves alone.
"""

from __future__ import annotations

from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ..problem import Problem
from . import knobs
from .launch import Family, Launcher, launcher
from .operands import ONES, SCRATCH, Argument, Configuration, offsets, per_row, rows, torch_type, vector


def bias(c: Configuration) -> tuple[Argument, ...]:
    """(L, N) of the graph as the (N, L) column-major matrix that the classes take."""
    if "bias" not in c:
        return ()
    return (Argument("bias", "sample_bias", "bias_tensor", (c.n, c.experts), (1, c.n), c.type("bias")),)


def arguments(c: Configuration, m: int) -> tuple[Argument, ...]:
    """The operands for `m` rows; N is the product's width, twice the activation's."""
    table = [
        rows("a", "a", (m, c.k), c.type("a")),
        rows("c", "c", (m, c.n), c.type("c", DataType.BFLOAT16), SCRATCH),
        rows("d", "d", (m, c.n // 2), c.type("d")),
        offsets(c.experts),
        vector("alpha", "alpha", c.experts, ONES),
        per_row("prob", m, ONES),
        *bias(c),
    ]
    if not c.discrete:
        shape, stride = (c.n, c.k, c.experts), (c.k, 1, c.n * c.k)
        table.append(Argument("b", "sample_b", "b_tensor", shape, stride, c.type("b")))
    return tuple(table)


def constructor(c: Configuration) -> dict[str, Any]:
    """Everything that the constructor takes besides operands."""
    given: dict[str, Any] = {"sample_sfa": None, "sample_d_col": None, "act_func": c.act, "b_major": c.b_major}
    if c.discrete:
        given |= {"num_experts": c.experts, "b_shape": (c.n, c.k), "b_dtype": torch_type(c.type("b"))}
    return given | {"generate_c": "c" in c}


def execution(c: Configuration) -> dict[str, Any]:
    """What each launch takes besides operands: the offset is no part of what is compiled."""
    return {"sfa_tensor": None, "linear_offset": dict(c.parameters).get("linear_offset", 0.0)}


FAMILY = Family(
    class_name="GroupedGemmGluSm100",
    arguments=arguments,
    constructor=constructor,
    standing_in=("alpha", "prob"),
    knobs=knobs.BF16,
    execution=execution,
    owns_scratch=True,
)


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(FAMILY, problem, device, variant)
