"""Problems of the BF16 dGLU contract, made without a graph so that each rule of the contract can be broken alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KERNELS, KernelEntry

ACTIVATIONS: dict[str, dict[str, float]] = {
    "swiglu": {},
    "geglu": {"geglu_alpha": 1.702, "clamp_min": -7.0, "clamp_max": 7.0, "linear_offset": 1.0},
    "situglu": {"situ_beta1": 4.0, "situ_beta2": 25.0},
}
OUTPUTS = ("d", "dprob", "activation", "dbias", "amax", "q_row", "sf_row", "q_col", "sf_col")


def _make(
    *,
    rows: Any = None,
    k: Any = 64,
    n: Any = 32,
    experts: Any = 2,
    act: str = "swiglu",
    b_major: str = "k",
    roles: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    product: DataType = DataType.FLOAT,
    deterministic: bool = False,
) -> Problem:
    """A problem that every condition lets through, but for what the arguments change.

    `roles` are added to a, b, offsets, c, d and dprob, `without` are left out; `changes` replaces fields of specs.
    """
    m = symbol("M", 256) if rows is None else rows
    bf16, f32 = DataType.BFLOAT16, DataType.FLOAT
    layout = GluLayout.interleaved(32)
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k)),
        "b": dict(dim=(experts, k, n), stride=(k * n, 1, k) if b_major == "k" else (k * n, n, 1)),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32, multiple_of=256),
        "alpha": dict(dim=(experts,), data_type=f32),
        "c": dict(dim=(m, 2 * n), glu_layout=layout),
        "prob": dict(dim=(m,), data_type=f32),
        "beta": dict(dim=(experts,), data_type=f32),
        "d": dict(dim=(m, 2 * n), glu_layout=layout),
        "dprob": dict(dim=(m,), data_type=f32),
        "activation": dict(dim=(m, n), alignment=32),
        "dbias": dict(dim=(experts, 2 * n), glu_layout=layout),
        "amax": dict(dim=(experts, 2), data_type=f32),
        "norm_const_row": dict(dim=(1,), data_type=f32),
        "q_row": dict(dim=(m, 2 * n), data_type=DataType.FP8_E4M3),
        "sf_row": dict(dim=(m, 4), data_type=DataType.FP8_E8M0),
    }
    wanted = [r for r in known if (r in ("a", "b", "offsets", "c", "d", "dprob", *roles)) and r not in without]
    specs = {}
    for uid, role in enumerate(wanted):
        fields: dict[str, Any] = {"data_type": bf16, "is_output": role in OUTPUTS, **known[role]}
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    given = {
        "act": act,
        "alpha_exponent": 2,
        **ACTIVATIONS[act],
        "recompute": "activation" in roles,
        **(attributes or {}),
    }
    return Problem("grouped_gemm_dglu", specs, given, {"r": product}, deterministic)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return _make


@pytest.fixture(scope="session")
def entry() -> KernelEntry:
    """The BF16 kernel's line of the registry."""
    return next(k for k in KERNELS if k.id == "cudnn.grouped_gemm_dglu.bf16")
