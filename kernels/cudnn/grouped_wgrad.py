"""Adapters onto cudnn-frontend's grouped weight gradient: BF16 operands, and MXFP8 ones with scales along the rows.

Importing this module imports no cuDNN. The class's A is the transposed view (K, M) of the graph's a, its B is dy.
"""

from __future__ import annotations

from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import SCALE_ATOM_COLUMNS, SCALE_ATOM_ROWS
from ..problem import Problem
from . import knobs
from .launch import Family, Launcher, launcher
from .operands import Argument, Configuration


def _scales(role: str, name: str, extent: int, tokens: int, c: Configuration) -> Argument:
    """Swizzled scales as the flat matrix of their bytes: (extent, tokens / block), both padded to whole atoms."""
    blocks = -(-tokens // c.block)
    shape = (-(-extent // SCALE_ATOM_ROWS) * SCALE_ATOM_ROWS, -(-blocks // SCALE_ATOM_COLUMNS) * SCALE_ATOM_COLUMNS)
    return Argument(role, f"sample_{name}", f"{name}_tensor", shape, (shape[1], 1), c.type(role))


def arguments(c: Configuration, m: int) -> tuple[Argument, ...]:
    """The operands for `m` rows."""
    table = [
        Argument("a", "sample_a", "a_tensor", (c.k, m), (1, c.k), c.type("a")),
        Argument("dy", "sample_b", "b_tensor", (m, c.n), (c.n, 1), c.type("dy")),
        Argument("offsets", "sample_offsets", "offsets_tensor", (c.experts,), (1,), DataType.INT32),
        Argument("dw", "sample_wgrad", "wgrad_tensor", (c.experts, c.k, c.n), (c.k * c.n, c.n, 1), c.type("dw")),
    ]
    if "sf_a" in c:
        table += [_scales("sf_a", "sfa", c.k, m, c), _scales("sf_dy", "sfb", c.n, m, c)]
    return tuple(table)


def constructor(c: Configuration) -> dict[str, Any]:
    """Everything that the constructor takes besides operands."""
    return {"sf_vec_size": c.block} if "sf_a" in c else {"sample_sfa": None, "sample_sfb": None}


def execution(c: Configuration) -> dict[str, Any]:
    """What each launch takes besides operands."""
    return {} if "sf_a" in c else {"sfa_tensor": None, "sfb_tensor": None}


FAMILY = Family(
    class_name="GroupedGemmWgradSm100",
    arguments=arguments,
    constructor=constructor,
    standing_in=(),
    knobs=knobs.WGRAD,
    execution=execution,
    addresses={},
    owns_scratch=True,
    real_samples=("sample_a", "sample_offsets"),
    empty=("dw",),
)


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(FAMILY, problem, device, variant)
