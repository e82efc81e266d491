"""Adapter onto cudnn-frontend's grouped GEMM + quantize: block-scaled operands, codes along rows and columns.

Importing this module imports no cuDNN. Knobs are chosen as in block_scaled_dglu.
"""

from __future__ import annotations

from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ..problem import Problem
from . import knobs
from .block_scaled_dglu import quantized, weight_options, weights
from .block_scaled_glu import ADDRESSES, STANDING_IN
from .grouped_glu import bias
from .launch import Family, Launcher, launcher
from .operands import ONES, Argument, Configuration, offsets, per_row, rows, scales, vector


def arguments(c: Configuration, m: int) -> tuple[Argument, ...]:
    """The operands for `m` rows."""
    table = [
        rows("a", "a", (m, c.k), c.type("a")),
        scales("sf_a", "sfa", (m, c.k), c.block, c.type("sf_a")),
        offsets(c.experts),
        vector("alpha", "alpha", c.experts, ONES),
        per_row("prob", m, ONES),
        *bias(c),
        *weights(c),
        *quantized(c, m, c.n, ("d", "d_col")),
    ]
    if "amax" in c:
        table.append(Argument("amax", "sample_amax", "amax_tensor", (c.experts, 1), (1, 1), DataType.FLOAT))
    return tuple(table)


def constructor(c: Configuration) -> dict[str, Any]:
    """Everything that the constructor takes besides operands."""
    return {**weight_options(c), "sf_vec_size": c.block}


FAMILY = Family(
    class_name="GroupedGemmQuantSm100",
    arguments=arguments,
    constructor=constructor,
    standing_in=STANDING_IN,
    knobs=knobs.BLOCK_SCALED,
    zeroed=("amax",),
    addresses=ADDRESSES,
    owns_scratch=True,
)


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(FAMILY, problem, device, variant)
