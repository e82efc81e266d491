"""Pointwise ops and reductions, as their names say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .matmul import Specs, Values


def _phi(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu(x: torch.Tensor, attributes: Mapping[str, Any]) -> torch.Tensor:
    if attributes["approximate"] == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * _phi(x)


def _swish_backward(dy: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    s = torch.sigmoid(beta * x)
    return dy * s * (1 + beta * x * (1 - s))


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x, torch.zeros_like(x))


FORMULA: dict[str, Callable[[Values, Mapping[str, Any]], torch.Tensor]] = {
    "add": lambda t, at: t["a"] + t["b"],
    "sub": lambda t, at: t["a"] - t["b"],
    "mul": lambda t, at: t["a"] * t["b"],
    "div": lambda t, at: t["a"] / t["b"],
    "min": lambda t, at: torch.minimum(t["a"], t["b"]),
    "max": lambda t, at: torch.maximum(t["a"], t["b"]),
    "neg": lambda t, at: -t["x"],
    "exp": lambda t, at: torch.exp(t["x"]),
    "tanh": lambda t, at: torch.tanh(t["x"]),
    "identity": lambda t, at: t["x"].clone(),
    "sigmoid": lambda t, at: torch.sigmoid(t["x"]),
    "swish": lambda t, at: t["x"] * torch.sigmoid(at["swish_beta"] * t["x"]),
    "swish_backward": lambda t, at: _swish_backward(t["dy"], t["x"], at["swish_beta"]),
    "gelu": lambda t, at: _gelu(t["x"], at),
    "relu": lambda t, at: _relu(t["x"]),
    "srelu": lambda t, at: _relu(t["x"]) ** 2,
    "cmp_eq": lambda t, at: t["a"] == t["b"],
    "cmp_neq": lambda t, at: t["a"] != t["b"],
    "cmp_gt": lambda t, at: t["a"] > t["b"],
    "cmp_ge": lambda t, at: t["a"] >= t["b"],
    "cmp_lt": lambda t, at: t["a"] < t["b"],
    "cmp_le": lambda t, at: t["a"] <= t["b"],
    "select": lambda t, at: torch.where(t["mask"], t["a"], t["b"]),
}


def _over(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """x with the reduced axes moved to the end and flattened into one."""
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    return x.permute(*kept, *axes).reshape([x.shape[a] for a in kept] + [math.prod(x.shape[a] for a in axes)])


def _extreme(x: torch.Tensor, largest: bool, empty: float) -> torch.Tensor:
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], empty)
    return x.amax(dim=-1) if largest else x.amin(dim=-1)


REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ADD": lambda x: x.sum(dim=-1),
    "MUL": lambda x: x.prod(dim=-1),
    "MIN": lambda x: _extreme(x, False, math.inf),
    "MAX": lambda x: _extreme(x, True, -math.inf),
    "AMAX": lambda x: _extreme(x.abs(), True, 0.0),
    "AVG": lambda x: x.mean(dim=-1),
    "NORM1": lambda x: x.abs().sum(dim=-1),
    "NORM2": lambda x: (x * x).sum(dim=-1).sqrt(),
}
"""Over nothing at all: MIN gives infinity, MAX minus infinity, AMAX 0, AVG NaN."""


def reduction(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """Reduces `axis` by `mode`; the axes vanish, or stay as 1 with keep_dim."""
    x, axes = inputs["x"], attributes["axis"]
    y = REDUCE[attributes["mode"]](_over(x, axes))
    return {"y": y.reshape([1 if a in axes else n for a, n in enumerate(x.shape)]) if attributes["keep_dim"] else y}


def _formula(name: str) -> Callable[[Values, Mapping[str, Any], Specs], dict[str, torch.Tensor]]:
    return lambda inputs, attributes, specs: {"y": FORMULA[name](inputs, attributes)}


EVALUATE = {**{name: _formula(name) for name in FORMULA}, "reduction": reduction}
