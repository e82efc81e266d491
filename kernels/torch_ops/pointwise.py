"""Pointwise ops and reductions with torch, in float32 with one rounding at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...graph_ops.ir.tensor import TensorSpec
from .matmul import Inputs, Outputs, Specs

Operands = Mapping[str, torch.Tensor]


def _swish_backward(dy: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    s = torch.sigmoid(beta * x)
    return dy * s * (1 + beta * x * (1 - s))


FORMULA: dict[str, Callable[[Operands, Mapping[str, Any]], torch.Tensor]] = {
    "add": lambda t, at: t["a"] + t["b"],
    "sub": lambda t, at: t["a"] - t["b"],
    "mul": lambda t, at: t["a"] * t["b"],
    "div": lambda t, at: t["a"] / t["b"],
    "min": lambda t, at: torch.minimum(t["a"], t["b"]),
    "max": lambda t, at: torch.maximum(t["a"], t["b"]),
    "neg": lambda t, at: -t["x"],
    "exp": lambda t, at: t["x"].exp(),
    "tanh": lambda t, at: t["x"].tanh(),
    "identity": lambda t, at: t["x"],
    "sigmoid": lambda t, at: t["x"].sigmoid(),
    "swish": lambda t, at: t["x"] * torch.sigmoid(at["swish_beta"] * t["x"]),
    "swish_backward": lambda t, at: _swish_backward(t["dy"], t["x"], at["swish_beta"]),
    "gelu": lambda t, at: torch.nn.functional.gelu(t["x"], approximate=at["approximate"]),
    "relu": lambda t, at: t["x"].relu(),
    "srelu": lambda t, at: t["x"].relu().square(),
    "cmp_eq": lambda t, at: t["a"] == t["b"],
    "cmp_neq": lambda t, at: t["a"] != t["b"],
    "cmp_gt": lambda t, at: t["a"] > t["b"],
    "cmp_ge": lambda t, at: t["a"] >= t["b"],
    "cmp_lt": lambda t, at: t["a"] < t["b"],
    "cmp_le": lambda t, at: t["a"] <= t["b"],
    "select": lambda t, at: torch.where(t["mask"], t["a"], t["b"]),
}


def _operand(value: Any, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The operand as a tensor on `device`, floating ones in float32. Numbers are filled in there, not copied over."""
    if not isinstance(value, torch.Tensor) or value.device != device:
        value = torch.full((), float(value), dtype=getattr(torch, spec.data_type.info.torch_name), device=device)
    tensor: torch.Tensor = value
    return tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor


def _pointwise(name: str) -> Callable[[Inputs, Outputs, Mapping[str, Any], Specs], None]:
    def run(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
        y = outputs["y"]
        operands = {port: _operand(value, specs[port], y.device) for port, value in inputs.items()}
        kinds = {t.dtype.is_floating_point for t in operands.values() if t.dtype is not torch.bool}
        if len(kinds) > 1:  # an integer compared with a float: float32 does not hold every integer
            operands = {port: t.to(torch.float64) for port, t in operands.items()}
        y.copy_(FORMULA[name](operands, attributes))

    return run


def _product(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(dim=axis)
    return x


def _extreme(x: torch.Tensor, axes: tuple[int, ...], largest: bool, empty: float) -> torch.Tensor:
    if any(x.shape[a] == 0 for a in axes):
        return x.new_full([n for a, n in enumerate(x.shape) if a not in axes], empty)
    return x.amax(dim=axes) if largest else x.amin(dim=axes)


REDUCE: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "ADD": lambda x, axes: x.sum(dim=axes),
    "MUL": _product,
    "MIN": lambda x, axes: _extreme(x, axes, False, math.inf),
    "MAX": lambda x, axes: _extreme(x, axes, True, -math.inf),
    "AMAX": lambda x, axes: _extreme(x.abs(), axes, True, 0.0),
    "AVG": lambda x, axes: x.mean(dim=axes),
    "NORM1": lambda x, axes: x.abs().sum(dim=axes),
    "NORM2": lambda x, axes: x.square().sum(dim=axes).sqrt(),
}


def reduction(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """Reduces `axis` by `mode`; NaN propagates through MIN and MAX."""
    y = outputs["y"]
    x = _operand(inputs["x"], specs["x"], y.device)
    y.copy_(REDUCE[attributes["mode"]](x, attributes["axis"]).view(y.shape))


RUN = {**{name: _pointwise(name) for name in FORMULA}, "reduction": reduction}
