"""Problems of our Hopper kernels, made without a graph so that each condition can be broken alone, graphs of them,
and the kernel emulated behind its real host code."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KERNELS, KernelEntry

torch.set_num_threads(1)
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for warp_lanes
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
    n: Any = 64,
    experts: Any = 2,
    act: str = "swiglu",
    b_major: str = "k",
    roles: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    rounding: Mapping[str, DataType] | None = None,
    layout: GluLayout | None = None,
    swizzled: bool = True,
    operands: DataType = DataType.BFLOAT16,
    deterministic: bool = False,
) -> Problem:
    """A problem that every condition lets through, but for what the arguments change: in the rule's second form, where
    d is a rounded copy of a FLOAT gradient.

    `roles` are added to a, b, offsets, c, d and dprob, `without` are left out; `changes` replaces fields of specs.
    """
    m = symbol("M", 128) if rows is None else rows
    bf16, f32 = DataType.BFLOAT16, DataType.FLOAT
    layout = layout or GluLayout.interleaved(32)
    scales = {side: ScaleLayout(32, axis, swizzled) for side, axis in (("row", 1), ("col", 0))}
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=operands),
        "b": dict(dim=(experts, k, n), data_type=operands,
                  stride=(k * n, 1, k) if b_major == "k" else (k * n, n, 1)),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32, multiple_of=128),
        "alpha": dict(dim=(experts,), data_type=f32),
        "c": dict(dim=(m, 2 * n), glu_layout=layout),
        "prob": dict(dim=(m,), data_type=f32),
        "beta": dict(dim=(experts,), data_type=f32),
        "d": dict(dim=(m, 2 * n), glu_layout=layout),
        "dprob": dict(dim=(m,), data_type=f32),
        "activation": dict(dim=(m, n)),
        "dbias": dict(dim=(experts, 2 * n), glu_layout=layout),
        "amax": dict(dim=(experts, 2), data_type=f32),
        "norm_const_row": dict(dim=(1,), data_type=f32),
        "norm_const_col": dict(dim=(1,), data_type=f32),
    }  # fmt: skip
    given = {"act": act, "alpha_exponent": 2, "recompute": "activation" in roles, **ACTIVATIONS[act]}
    for side in ("row", "col"):
        known[f"q_{side}"] = dict(dim=(m, 2 * n), data_type=DataType.FP8_E4M3, scale_layout=scales[side])
        known[f"sf_{side}"] = dict(
            dim=scales[side].storage((m, 2 * n)), data_type=DataType.FP8_E8M0, scale_layout=scales[side]
        )
        if f"q_{side}" in roles:
            given |= {f"q_{side}.block_size": 32, f"q_{side}.scale_type": "FP8_E8M0", f"q_{side}.swizzled": swizzled,
                      f"q_{side}.data_type": "FP8_E4M3"}  # fmt: skip
    if "amax" in roles:
        given["amax.split_glu"] = True
    asked = {"a", "b", "offsets", "c", "d", "dprob", *roles} | {f"sf_{r[2:]}" for r in roles if r.startswith("q_")}
    specs = {}
    for uid, role in enumerate(r for r in known if r in asked and r not in without):
        fields: dict[str, Any] = {"data_type": bf16, "is_output": role in OUTPUTS, **known[role]}
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    return Problem(
        "grouped_gemm_dglu",
        specs,
        {**given, **(attributes or {})},
        rounding or {"r": f32, "d_wide": f32},
        deterministic,
    )


def _make_glu(
    *,
    rows: Any = None,
    k: Any = 64,
    n: Any = 64,
    experts: Any = 2,
    act: str = "swiglu",
    b_major: str = "k",
    roles: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    rounding: Mapping[str, DataType] | None = None,
    layout: GluLayout | None = None,
    swizzled: bool = True,
    operands: DataType = DataType.BFLOAT16,
    apart: bool = False,
) -> Problem:
    """A forward problem that every condition lets through, but for what the arguments change; `n` is a column count of
    the activation. `apart`: gate and up have weights of their own. `roles` are added to a, b, offsets, c and d; without
    `rounding`, c is its own."""
    m = symbol("M", 128) if rows is None else rows
    bf16, f32 = DataType.BFLOAT16, DataType.FLOAT
    layout = GluLayout.concatenated() if apart else layout or GluLayout.interleaved(32)
    wide, width = 2 * n, n if apart else 2 * n
    weights = dict(dim=(experts, k, width), data_type=operands,
                   stride=(k * width, 1, k) if b_major == "k" else (k * width, width, 1))  # fmt: skip
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=operands),
        "b": weights if apart else dict(weights, glu_layout=layout),
        "b_up": weights,
        "offsets": dict(dim=(experts,), data_type=DataType.INT32, multiple_of=128),
        "alpha": dict(dim=(experts,), data_type=f32),
        "bias": dict(dim=(experts, wide), glu_layout=layout),
        "prob": dict(dim=(m,), data_type=f32),
        "c": dict(dim=(m, wide), glu_layout=layout, is_output=True),
        "d": dict(dim=(m, n), is_output=True),
        "dbias": dict(dim=(experts, n), data_type=f32, is_output=True),
        "amax": dict(dim=(experts,), data_type=f32, is_output=True),
        "norm_const_row": dict(dim=(1,), data_type=f32),
    }  # fmt: skip
    known, quantized = known | _codes((m, n), swizzled), _quantized(roles, swizzled)
    scales = {f"sf_{r[2:]}" for r in roles if r.startswith("q_")}
    asked = {"a", "b", "offsets", "c", "d", *(("b_up",) if apart else ()), *roles, *scales} - set(without)
    specs = {}
    for uid, role in enumerate(r for r in known if r in asked):
        fields: dict[str, Any] = {"data_type": bf16, **known[role]}
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    joined = {"join.layout": "concatenated"} if apart else {}
    given = {"act": act, "alpha_exponent": 1, **joined, **quantized, **ACTIVATIONS[act], **(attributes or {})}
    return Problem("grouped_gemm_glu", specs, given, rounding or {})


def _codes(dim: tuple[Any, Any], swizzled: bool) -> dict[str, dict[str, Any]]:
    """Codes and scales of both sides of a matrix, by role."""
    found: dict[str, dict[str, Any]] = {}
    for side, axis in (("row", 1), ("col", 0)):
        layout = ScaleLayout(32, axis, swizzled)
        common = dict(scale_layout=layout, is_output=True)
        found[f"q_{side}"] = dict(dim=dim, data_type=DataType.FP8_E4M3, **common)
        found[f"sf_{side}"] = dict(dim=layout.storage(dim), data_type=DataType.FP8_E8M0, **common)
    return found


def _quantized(roles: tuple[str, ...], swizzled: bool) -> dict[str, Any]:
    """The attributes of the quantize nodes whose codes are among `roles`."""
    values = {"block_size": 32, "scale_type": "FP8_E8M0", "swizzled": swizzled, "data_type": "FP8_E4M3"}
    return {f"{role}.{name}": value for role in roles if role.startswith("q_") for name, value in values.items()}


def _make_quantize(
    *,
    rows: Any = None,
    n: Any = 64,
    roles: tuple[str, ...] = ("q_row", "q_col"),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    x: DataType = DataType.BFLOAT16,
    swizzled: bool = True,
) -> Problem:
    """A problem of one of the two rules that every condition lets through, but for what the arguments change."""
    m = symbol("M") if rows is None else rows
    norm = dict(dim=(1,), data_type=DataType.FLOAT)
    known: dict[str, dict[str, Any]] = {
        "x": dict(dim=(m, n), data_type=x), "norm_const_row": norm, "norm_const_col": norm,
    } | _codes((m, n), swizzled)  # fmt: skip
    asked = {"x", *roles} | {f"sf_{r[2:]}" for r in roles if r.startswith("q_")}
    specs = {}
    for uid, role in enumerate(r for r in known if r in asked):
        fields = known[role]
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    rule = "quantize_row_col" if {"q_row", "q_col"} <= asked else "quantize"
    return Problem(rule, specs, {**_quantized(roles, swizzled), **(attributes or {})})


def _make_wgrad(
    *,
    rows: Any = None,
    k: Any = 64,
    n: Any = 48,
    experts: Any = 2,
    operands: DataType = DataType.BFLOAT16,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    accumulate: bool = False,
) -> Problem:
    """A weight gradient that every condition lets through, but for what the arguments change."""
    m = symbol("M") if rows is None else rows
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=operands),
        "dy": dict(dim=(m, n), data_type=operands),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32),
        "dw": dict(dim=(experts, k, n), data_type=DataType.FLOAT if accumulate else operands, is_output=True),
    }
    specs = {}
    for uid, (role, fields) in enumerate(known.items()):
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    return Problem("grouped_gemm_wgrad", specs, {"accumulate": accumulate}, {})


def _make_gemm(
    *,
    rows: Any = None,
    k: Any = 64,
    n: Any = 64,
    experts: Any = 2,
    b_major: str = "k",
    roles: tuple[str, ...] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    operands: DataType = DataType.BFLOAT16,
) -> Problem:
    """A lone product that every condition lets through, but for what the arguments change; `roles` are added to a, b,
    offsets and y."""
    m = symbol("M") if rows is None else rows
    known: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=operands),
        "b": dict(dim=(experts, k, n), data_type=operands,
                  stride=(k * n, 1, k) if b_major == "k" else (k * n, n, 1)),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32),
        "alpha": dict(dim=(experts,), data_type=DataType.FLOAT),
        "bias": dict(dim=(experts, n), data_type=operands),
        "y": dict(dim=(m, n), data_type=operands, is_output=True),
    }  # fmt: skip
    specs = {}
    for uid, role in enumerate(r for r in known if r in {"a", "b", "offsets", "y", *roles}):
        fields = known[role]
        fields.setdefault("stride", contiguous_stride(fields["dim"]))
        specs[role] = replace(TensorSpec(uid=uid, name=role, **fields), **(changes or {}).get(role, {}))
    return Problem("grouped_gemm", specs, {"alpha_exponent": 1, **(attributes or {})}, {})


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return _make


@pytest.fixture(scope="session")
def make_gemm_problem() -> Callable[..., Problem]:
    return _make_gemm


@pytest.fixture(scope="session")
def make_wgrad_problem() -> Callable[..., Problem]:
    return _make_wgrad


@pytest.fixture(scope="session")
def make_glu_problem() -> Callable[..., Problem]:
    return _make_glu


@pytest.fixture(scope="session")
def make_quantize_problem() -> Callable[..., Problem]:
    return _make_quantize


@pytest.fixture(scope="session")
def entry() -> KernelEntry:
    """The backward kernel's line of the registry."""
    return next(k for k in KERNELS if k.id == "sm90.grouped_gemm_dglu")


@pytest.fixture(scope="session")
def glu_entry() -> KernelEntry:
    """The forward kernel's line of the registry."""
    return next(k for k in KERNELS if k.id == "sm90.grouped_gemm_glu")


@pytest.fixture(scope="session")
def gemm_entry() -> KernelEntry:
    """The plain grouped GEMM's line of the registry."""
    return next(k for k in KERNELS if k.id == "sm90.grouped_gemm")


@pytest.fixture(scope="session")
def wgrad_entry() -> KernelEntry:
    """The weight gradient's line of the registry."""
    return next(k for k in KERNELS if k.id == "sm90.grouped_gemm_wgrad")


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    """The module beside this file."""
    spec = importlib.util.spec_from_file_location("opfuse_emulated_hopper", HERE / "emulated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def emulated(emulation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Runs the adapter and dglu_host.launch as they are over emulated functions; gives those that were "compiled"."""
    from opfuse.kernels.hopper import grouped_dglu, grouped_gemm, grouped_glu, grouped_wgrad, quantize_row_col
    from opfuse.kernels.sm90 import compiling, dglu_host, gemm_host, glu_host, launching, quantize_host, wgrad_host

    made: list[Any] = []

    def compiled(config: Any, cache: Any) -> Any:
        known = next((f for f in made if f.config == config), None)
        if known is None:
            made.append(known := emulation.emulated(config))
        return known

    for adapter in (grouped_dglu, grouped_gemm, grouped_glu, grouped_wgrad, quantize_row_col):
        monkeypatch.setattr(adapter, "compiled", compiled)
    for of_kernel in (dglu_host, gemm_host, glu_host, quantize_host, wgrad_host):
        functions = compiling.Functions("none", lambda config: pytest.fail(f"compiled {config}"))
        monkeypatch.setattr(of_kernel, "FUNCTIONS", functions)
    monkeypatch.setattr(launching, "multiprocessors", lambda device: 132)
    emulation.EXPERTS.clear()
    yield made


@pytest.fixture
def seen(emulation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What emulated functions were launched with, by name, in place of running them."""
    calls: list[dict[str, Any]] = []
    for function in (emulation.Emulated, *emulation.FUNCTIONS.values()):
        monkeypatch.setattr(function, "__call__", lambda self, *words: calls.append(self.tensors(words)))
    return calls


@pytest.fixture
def seed() -> int:
    """A fresh one; tests that draw from it name it when they fail."""
    return random.randrange(2**31)
