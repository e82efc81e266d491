"""Problems of the BF16 dGLU contract, made without a graph so that each rule of the contract can be broken alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
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


FORMATS: dict[str, tuple[DataType, int, DataType]] = {
    "bf16": (DataType.BFLOAT16, 0, DataType.BFLOAT16),
    "mxfp8": (DataType.FP8_E4M3, 32, DataType.FP8_E8M0),
    "mxfp8_e5m2": (DataType.FP8_E5M2, 32, DataType.FP8_E8M0),
    "nvfp4": (DataType.FP4_E2M1, 16, DataType.FP8_E4M3),
    "fp4_e8m0": (DataType.FP4_E2M1, 16, DataType.FP8_E8M0),
    "mxfp4": (DataType.FP4_E2M1, 32, DataType.FP8_E8M0),
}


def _scaled(
    rule: str,
    *,
    format: str = "mxfp8",
    roles: tuple[str, ...] = (),
    rows: Any = None,
    k: Any = 64,
    n: Any = 64,
    experts: Any = 2,
    act: str = "swiglu",
    b_major: str = "k",
    discrete: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    rounding: Mapping[str, DataType] | None = None,
    deterministic: bool = False,
) -> Problem:
    """A problem of any rule with operands in `format`, which its kernel serves, but for what the arguments change.

    `roles` are added to the operands of the rule, outputs among them. N is the width of b in each of them.
    """
    m = symbol("M", 256) if rows is None else rows
    codes, block, scale = FORMATS[format]
    f32, interleaved = DataType.FLOAT, GluLayout.interleaved(32)
    width = {"grouped_gemm_dglu": 2 * n, "grouped_gemm_glu": n // 2}.get(rule, n)
    wgrad = rule == "grouped_gemm_wgrad"
    along_a, along_b = ScaleLayout(block or 32, 0 if wgrad else 1), ScaleLayout(block or 32, 0)
    row, col = ScaleLayout(block or 32, 1), ScaleLayout(block or 32, 0)
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=codes),
        "dy": dict(dim=(m, n), data_type=codes),
        "b": dict(dim=(experts, k, n), data_type=codes, discrete=discrete,
                  stride=(k * n, 1, k) if b_major == "k" else (k * n, n, 1),
                  glu_layout=interleaved if rule == "grouped_gemm_glu" else None),
        "sf_a": dict(dim=along_a.storage((m, k)), data_type=scale, scale_layout=along_a),
        "sf_b": dict(dim=(experts, *along_b.storage((k, n))), data_type=scale, scale_layout=along_b, discrete=discrete),
        "sf_dy": dict(dim=along_b.storage((m, n)), data_type=scale, scale_layout=along_b),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32, multiple_of=256),
        "alpha": dict(dim=(experts,), data_type=f32),
        "beta": dict(dim=(experts,), data_type=f32),
        "bias": dict(dim=(experts, n)),
        "b_up": dict(dim=(experts, k, n)),
        "prob": dict(dim=(m,), data_type=f32),
        "c": dict(dim=(m, 2 * n if rule == "grouped_gemm_dglu" else n), glu_layout=interleaved),
        "d": dict(dim=(m, width)),
        "dprob": dict(dim=(m,), data_type=f32),
        "activation": dict(dim=(m, n), alignment=32),
        "dbias": dict(dim=(experts, width)),
        "amax": dict(dim=(experts, 2) if rule == "grouped_gemm_dglu" else (experts,), data_type=f32),
        "norm_const_row": dict(dim=(1,), data_type=f32, uid=99),
        "norm_const_col": dict(dim=(1,), data_type=f32, uid=99),
        "q_row": dict(dim=(m, width), data_type=DataType.FP8_E4M3, scale_layout=row),
        "sf_row": dict(dim=row.storage((m, width)), data_type=scale, scale_layout=row),
        "q_col": dict(dim=(m, width), data_type=DataType.FP8_E4M3, scale_layout=col),
        "sf_col": dict(dim=col.storage((m, width)), data_type=scale, scale_layout=col),
        "dw": dict(dim=(experts, k, n)),
    }  # fmt: skip
    operands: tuple[str, ...] = ("a", "dy", "offsets", "dw") if wgrad else ("a", "b", "offsets")
    operands += () if not block else ("sf_a", "sf_dy") if wgrad else ("sf_a", "sf_b")
    operands += ("c",) if rule == "grouped_gemm_dglu" else ()
    specs = {}
    for uid, role in enumerate(r for r in known if r in (*operands, *roles)):
        fields: dict[str, Any] = {"uid": uid, "data_type": DataType.BFLOAT16, **known[role]}
        fields["is_output"] = role in (*OUTPUTS, "dw") or (role == "c" and rule != "grouped_gemm_dglu")
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(name=role, **fields), **(changes or {}).get(role, {}))
    given: dict[str, Any] = {"alpha_exponent": 2 if rule == "grouped_gemm_dglu" else 1}
    if "glu" in rule:
        given |= {"act": act, **ACTIVATIONS[act]}
    if "amax" in roles:
        given["amax.split_glu"] = rule == "grouped_gemm_dglu"
    if wgrad:
        given = {"accumulate": False}
    derived = any(r in roles for r in ("q_row", "q_col", "amax", "dbias"))
    rounds = {"r": f32} if rule == "grouped_gemm_dglu" else {"c_wide" if "c" in roles else "c": f32}
    if not wgrad:
        rounds |= {"d_wide": f32} if "d" in roles and derived else {} if "d" in roles else {"d": f32}
    return Problem(rule, specs, given | dict(attributes or {}), {**rounds, **(rounding or {})}, deterministic)


@pytest.fixture(scope="session")
def program() -> Any:
    """The cross-compiling program, for its table of cases and the graph of each."""
    return _module(Path(__file__).parents[2] / "compile" / "cross_compile_cudnn.py")


@pytest.fixture(scope="session")
def broken() -> Any:
    """The module with the table of what breaks each condition alone."""
    return _module(Path(__file__).with_name("test_scaled_conditions.py"))


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_scaled() -> Callable[..., Problem]:
    return _scaled


@pytest.fixture(scope="session")
def entries() -> dict[str, KernelEntry]:
    """Every kernel of cudnn-frontend by its id without the prefix."""
    return {k.id.removeprefix("cudnn."): k for k in KERNELS if k.id.startswith("cudnn.")}
