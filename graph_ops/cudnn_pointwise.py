"""cuDNN's pointwise modes in this project's ops, some of them composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .builder import GraphBuilder, Tensor

COMPARISONS = ("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le")
Composer = Callable[[GraphBuilder, list[Tensor], Mapping[str, Any]], Tensor]


def _relu(g: GraphBuilder, x: list[Tensor], p: Mapping[str, Any]) -> Tensor:
    lower, upper = p.get("lower_clip") or 0.0, p.get("upper_clip")
    y = g.max(x[0], float(lower)) if lower else g.relu(x[0])
    return y if upper is None else g.min(y, float(upper))


def _named(op: str, operands: int) -> Composer:
    """The op of the same name, on the first `operands` inputs."""

    def compose(g: GraphBuilder, x: list[Tensor], p: Mapping[str, Any]) -> Tensor:
        made: Tensor = getattr(g, op)(*x[:operands])
        return made

    return compose


def _beta(p: Mapping[str, Any]) -> float:
    return 1.0 if p.get("swish_beta") is None else float(p["swish_beta"])


POINTWISE: Mapping[str, Composer] = {
    **{op: _named(op, 1) for op in ("neg", "exp", "tanh", "identity", "sigmoid")},
    **{op: _named(op, 2) for op in ("add", "sub", "mul", "div", "min", "max", *COMPARISONS)},
    "bias": lambda g, x, p: g.add(x[0], x[1]),
    "scale": lambda g, x, p: g.mul(x[0], x[1]),
    "add_square": lambda g, x, p: g.add(x[0], g.mul(x[1], x[1])),
    "reciprocal": lambda g, x, p: g.div(1.0, x[0]),
    "abs": lambda g, x, p: g.max(x[0], g.neg(x[0])),
    "relu": _relu,
    "gelu": lambda g, x, p: g.gelu(x[0]),
    "gelu_approx_tanh": lambda g, x, p: g.gelu(x[0], approximate="tanh"),
    "swish": lambda g, x, p: g.swish(x[0], swish_beta=_beta(p)),
    "swish_backward": lambda g, x, p: g.swish_backward(x[0], x[1], swish_beta=_beta(p)),
    "sigmoid_backward": lambda g, x, p: g.mul(x[0], g.mul(s := g.sigmoid(x[1]), g.sub(1.0, s))),
    "tanh_backward": lambda g, x, p: g.mul(x[0], g.sub(1.0, g.mul(t := g.tanh(x[1]), t))),
    "relu_backward": lambda g, x, p: g.select(g.cmp_gt(x[1], 0.0), x[0], 0.0),
    "binary_select": lambda g, x, p: g.select(x[2], x[0], x[1]),
}
"""How each of cuDNN's pointwise modes is said here; x are its inputs in order, p its attributes."""

__all__ = ["COMPARISONS", "POINTWISE"]
