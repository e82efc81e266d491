"""Adapters onto cudnn-frontend's block-scaled grouped GEMM + GLU: the unified class, and the older discrete one.

Importing this module imports no cuDNN. The kernels always write C; where the graph does not ask for it, C is scratch.
`vector_f32`, `discrete_col_sfd` and `use_single_group_runtime_offsets` stay off for the reasons in block_scaled_dglu.
"""

from __future__ import annotations

from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ..problem import Problem
from . import knobs
from .block_scaled_dglu import quantized, weight_options, weights
from .grouped_glu import bias
from .launch import Family, Launcher, launcher
from .operands import ONES, SCRATCH, Argument, Configuration, offsets, per_row, rows, scales, vector


def arguments(c: Configuration, m: int) -> tuple[Argument, ...]:
    """The operands for `m` rows; N is the product's width, twice the activation's."""
    n = c.n // 2
    table = [
        rows("a", "a", (m, c.k), c.type("a")),
        rows("c", "c", (m, c.n), c.type("c", DataType.BFLOAT16), SCRATCH),
        scales("sf_a", "sfa", (m, c.k), c.block, c.type("sf_a")),
        offsets(c.experts),
        vector("alpha", "alpha", c.experts, ONES),
        per_row("prob", m, ONES),
        *bias(c),
        *weights(c),
        *quantized(c, m, n, ("d", "d_col")),
    ]
    if "d" in c:  # without scales the class wants a D_col and leaves it alone
        table += [rows("d", "d", (m, n), c.type("d")), rows("d", "d_col", (m, n), c.type("d"))]
    if "amax" in c:
        table.append(Argument("amax", "sample_amax", "amax_tensor", (c.experts, 1), (1, 1), DataType.FLOAT))
    return tuple(table)


def constructor(c: Configuration) -> dict[str, Any]:
    """Everything that the unified class's constructor takes besides operands."""
    return {
        **weight_options(c),
        "sf_vec_size": c.block,
        "act_func": c.act,
        "situ_beta1": dict(c.parameters).get("situ_beta1", 4.0),
    }


def discrete_constructor(c: Configuration) -> dict[str, Any]:
    """The same of the older class, which has no situglu."""
    return {**weight_options(c), "sf_vec_size": c.block, "act_func": c.act}


def discrete_execution(c: Configuration) -> dict[str, Any]:
    """The activation's parameters, which each launch takes."""
    given = dict(c.parameters)
    return {
        "linear_offset": given.get("linear_offset", 0.0),
        "geglu_alpha": given.get("geglu_alpha", 1.702),
        "glu_clamp_max": given.get("clamp_max", 7.0),
        "glu_clamp_min": given.get("clamp_min", -7.0),
    }


def execution(c: Configuration) -> dict[str, Any]:
    """The same of the unified class, which has situglu too."""
    given = dict(c.parameters)
    situ = {"situ_beta1": given.get("situ_beta1", 4.0), "situ_beta2": given.get("situ_beta2", 25.0)}
    return {**discrete_execution(c), **situ}


STANDING_IN = ("alpha", "prob", "norm_const_row", "norm_const_col")
ADDRESSES = {"b": "b_ptrs", "sf_b": "sfb_ptrs"}

FAMILY = Family(
    class_name="GroupedGemmGluSm100",
    arguments=arguments,
    constructor=constructor,
    standing_in=STANDING_IN,
    knobs=knobs.BLOCK_SCALED,
    zeroed=("amax",),
    execution=execution,
    addresses=ADDRESSES,
    owns_scratch=True,
)
DISCRETE = Family(
    class_name="DiscreteGroupedGemmSwigluSm100",
    arguments=arguments,
    constructor=discrete_constructor,
    standing_in=STANDING_IN,
    knobs=knobs.BLOCK_SCALED,
    zeroed=("amax",),
    execution=discrete_execution,
    addresses=ADDRESSES,
    owns_scratch=True,
)


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the unified kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(FAMILY, problem, device, variant)
