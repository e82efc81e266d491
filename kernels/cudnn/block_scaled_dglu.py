"""Adapter onto cudnn-frontend's block-scaled grouped GEMM + dGLU: MXFP8 and FP4 operands, dense or discrete weights.

Importing this module imports no cuDNN. Knobs: `use_single_group_runtime_offsets` stays off, since it would compute the
rows past the last end offset; `vector_f32` stays off, since with BF16 C it clamps at bounds rounded to bf16;
`discrete_col_sfd` stays off, since the graph's column scales are one matrix over all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dtypes import DataType
from ..problem import Problem
from . import knobs
from .launch import Family, Launcher, launcher
from .operands import ONES, SCRATCH, Argument, Configuration, offsets, per_row, rows, scales, torch_type, vector

DPROB_COLUMNS = 256
"""Columns of one tile of N: one partial sum of dprob a row."""


def slots(configuration: Configuration) -> int:
    """Partial sums of dprob for each row that the deterministic kernel writes apart: whole clusters along N."""
    width = configuration.knobs.cluster[1] if configuration.knobs is not None else 1
    return -(-configuration.n // (DPROB_COLUMNS * width)) * width


def weights(c: Configuration) -> tuple[Argument, ...]:
    """Dense weights and their scales, as the classes take them; discrete ones travel by address."""
    if c.discrete:
        return ()
    stride = (c.k, 1, c.n * c.k) if c.b_major == "k" else (1, c.n, c.n * c.k)
    b = Argument("b", "sample_b", "b_tensor", (c.n, c.k, c.experts), stride, c.type("b"))
    return b, scales("sf_b", "sfb", (c.n, c.k), c.block, c.type("sf_b"), c.experts)


def weight_options(c: Configuration) -> dict[str, Any]:
    """What the constructors take of weights besides operands."""
    given: dict[str, Any] = {"b_major": c.b_major}
    if c.discrete:
        given |= {"num_experts": c.experts, "b_shape": (c.n, c.k), "b_dtype": torch_type(c.type("b"))}
    return given


def quantized(c: Configuration, m: int, n: int, names: tuple[str, str]) -> tuple[Argument, ...]:
    """Codes along rows and columns with their scales; `names` are those of D and D_col."""
    if "q_row" not in c:
        return ()
    norm = c.type("norm_const_row", DataType.FLOAT)
    return (
        rows("q_row", names[0], (m, n), c.type("q_row")),
        rows("q_col", names[1], (m, n), c.type("q_col")),
        scales("sf_row", "sfd_row", (m, n), c.block, c.type("sf_row")),
        scales("sf_col", "sfd_col", (n, m), c.block, c.type("sf_col")),
        vector("norm_const_row", "norm_const", 1, ONES, norm),
    )


def arguments(c: Configuration, m: int) -> tuple[Argument, ...]:
    """The operands for `m` rows, as NVIDIA's page of the kernel has them under "Block-scaled contract"."""
    n = 2 * c.n
    table = [
        rows("a", "a", (m, c.k), c.type("a")),
        rows("c", "c", (m, n), c.type("c")),
        scales("sf_a", "sfa", (m, c.k), c.block, c.type("sf_a")),
        offsets(c.experts),
        vector("alpha", "alpha", c.experts, ONES),
        vector("beta", "beta", c.experts, ONES),
        per_row("prob", m, ONES),
        *weights(c),
        *quantized(c, m, n, ("d_row", "d_col")),
    ]
    if c.deterministic and slots(c) > 1:
        shape = (m, slots(c), 1)
        table.append(
            Argument("slots", "sample_dprob", "dprob_tensor", shape, (slots(c), 1, 1), DataType.FLOAT, SCRATCH)
        )
    else:
        table.append(per_row("dprob", m, SCRATCH))
    if "d" in c:  # without scales the class wants a D_col and leaves it alone
        table += [rows("d", "d_row", (m, n), c.type("d")), rows("d", "d_col", (m, n), c.type("d"))]
    if "dbias" in c:
        stride = (n, 1, c.experts * n)
        table.append(Argument("dbias", "sample_dbias", "dbias_tensor", (c.experts, n, 1), stride, DataType.BFLOAT16))
    if "amax" in c:
        table.append(Argument("amax", "sample_amax", "amax_tensor", (c.experts, 2, 1), (2, 1, 1), DataType.FLOAT))
    return tuple(table)


def constructor(c: Configuration) -> dict[str, Any]:
    """Everything that the constructor takes besides operands."""
    given = dict(c.parameters)
    return {
        **weight_options(c),
        "sf_vec_size": c.block,
        "act_func": f"d{c.act}",
        "linear_offset": given.get("linear_offset", 0.0),
        "geglu_alpha": given.get("geglu_alpha", 1.702),
        "glu_clamp_max": given.get("clamp_max", 7.0),
        "glu_clamp_min": given.get("clamp_min", -7.0),
        "situ_beta1": given.get("situ_beta1", 4.0),
        "situ_beta2": given.get("situ_beta2", 25.0),
        "_deterministic": c.deterministic,
    }


def finish(c: Configuration, views: Mapping[str, torch.Tensor]) -> None:
    """Adds up the partial sums of a deterministic dprob, always in the same order."""
    if "slots" in views and "dprob" in views:
        torch.sum(views["slots"].squeeze(2), dim=1, out=views["dprob"].view(-1))


FAMILY = Family(
    class_name="GroupedGemmDgluSm100",
    arguments=arguments,
    constructor=constructor,
    standing_in=("alpha", "beta", "prob", "dprob", "norm_const_row", "norm_const_col"),
    knobs=knobs.BLOCK_SCALED,
    zeroed=("dprob", "slots", "dbias", "amax"),
    addresses={"b": "b_ptrs", "sf_b": "sfb_ptrs"},
    finish=finish,
)


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(FAMILY, problem, device, variant)
