"""Gated linear units and their derivatives, written out: no autograd, and 0/1 masks at the clamps.

A unit is `y = prob * G(gate) * U(up)`. Each activation gives the four factors G, U, dG/dgate and dU/dup; everything
else follows: `dgate = dy*prob*U*dG`, `dup = dy*prob*G*dU`, `dprob = sum_n dy*G*U` (no factor prob).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...graph_ops.ir.layouts import GluLayout
from .layouts import glu_columns
from .matmul import Specs, Values, expert_rows


@dataclass(frozen=True)
class Factors:
    """G(gate) and U(up) of one activation and their derivatives, each (M, I)."""

    gate: torch.Tensor
    up: torch.Tensor
    gate_slope: torch.Tensor
    up_slope: torch.Tensor


def swiglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    """G = gate*s, U = up, s = sigmoid(gate)."""
    s = torch.sigmoid(gate)
    return Factors(gate * s, up, s * (1 + gate * (1 - s)), torch.ones_like(up))


def geglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    """G = y1*sigmoid(alpha*y1), U = y2 + offset; y1 = min(gate, clamp_max), y2 = clamp(up, clamp_min, clamp_max).

    Slopes are masked on the raw values, equality kept: a gate of exactly clamp_max still has its gradient. Bounds are
    float32 numbers, as all that arithmetic sees, or equality would depend on how a bound is written.
    """
    low, high = (float(torch.tensor(attributes[bound], dtype=torch.float32)) for bound in ("clamp_min", "clamp_max"))
    alpha = attributes["geglu_alpha"]
    y1 = torch.minimum(gate, torch.full_like(gate, high))
    y2 = torch.minimum(torch.maximum(up, torch.full_like(up, low)), torch.full_like(up, high))
    s = torch.sigmoid(alpha * y1)
    gate_mask = (gate <= high).to(gate.dtype)
    up_mask = ((up >= low) & (up <= high)).to(up.dtype)
    slope = s * (1 + alpha * y1 * (1 - s))
    return Factors(y1 * s, y2 + attributes["linear_offset"], slope * gate_mask, up_mask)


def situglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    """G = b1*tanh(gate/b1)*sigmoid(gate), U = b2*tanh(up/b2)."""
    b1, b2 = attributes["situ_beta1"], attributes["situ_beta2"]
    s, t1, t2 = torch.sigmoid(gate), torch.tanh(gate / b1), torch.tanh(up / b2)
    return Factors(b1 * t1 * s, b2 * t2, (1 - t1**2) * s + b1 * t1 * s * (1 - s), 1 - t2**2)


ACTIVATION: dict[str, Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Factors]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "situglu": situglu,
}


def split(x: torch.Tensor, layout: GluLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., 2I) in `layout` -> gate (..., I), up (..., I)."""
    ordered = x[..., glu_columns(x.shape[-1], layout).to(x.device)]
    half = x.shape[-1] // 2
    return ordered[..., :half], ordered[..., half:]


def join(gate: torch.Tensor, up: torch.Tensor, layout: GluLayout) -> torch.Tensor:
    """gate (..., I), up (..., I) -> (..., 2I) in `layout`."""
    both = torch.cat([gate, up], dim=-1)
    out = torch.empty_like(both)
    out[..., glu_columns(both.shape[-1], layout).to(both.device)] = both
    return out


def layout_of(specs: Specs, port: str) -> GluLayout:
    """The GLU layout that the tensor at `port` declares. Raises ValueError for none: it is never guessed."""
    layout = specs[port].glu_layout
    if layout is None:
        raise ValueError(f"{specs[port]} has no GLU layout")
    return layout


def _probability(inputs: Values, like: torch.Tensor) -> torch.Tensor:
    return inputs["prob"].reshape(-1, 1) if "prob" in inputs else torch.ones_like(like[:, :1])


def glu(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, 2I) -> (M, I): `prob * G(gate) * U(up)`."""
    gate, up = split(inputs["x"], layout_of(specs, "x"))
    factors = ACTIVATION[attributes["act"]](gate, up, attributes)
    return {"y": _probability(inputs, gate) * factors.gate * factors.up}


def glu_backward(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """dy (M, I), x (M, 2I) -> dx (M, 2I), dprob (M,), and with recompute the activation (M, I).

    With beta, x is first multiplied by its expert's: dx is the derivative by the scaled x. Rows outside every group
    (known only with offsets) are zero.
    """
    dy, x, layout = inputs["dy"], inputs["x"], layout_of(specs, "x")
    if "beta" not in inputs:
        return _backward_rows(dy, x, _probability(inputs, dy), attributes, layout)
    parts = []
    end = 0
    for expert, rows in expert_rows(inputs["offsets"]):
        prob = _probability(inputs, dy)[rows]
        parts.append(_backward_rows(dy[rows], x[rows] * inputs["beta"][expert], prob, attributes, layout))
        end = rows.stop
    outside = {"dx": torch.zeros_like(x[end:]), "dprob": torch.zeros_like(x[end:, 0])}
    if attributes["recompute"]:
        outside["activation"] = torch.zeros_like(dy[end:])
    return {port: torch.cat([*(p[port] for p in parts), rest]) for port, rest in outside.items()}


def _backward_rows(dy: torch.Tensor, x: torch.Tensor, prob: torch.Tensor, attributes: Mapping[str, Any],
                   layout: GluLayout) -> dict[str, torch.Tensor]:  # fmt: skip
    gate, up = split(x, layout)
    factors = ACTIVATION[attributes["act"]](gate, up, attributes)
    dgate = dy * prob * factors.up * factors.gate_slope
    dup = dy * prob * factors.gate * factors.up_slope
    outputs = {"dx": join(dgate, dup, layout), "dprob": (dy * factors.gate * factors.up).sum(dim=1)}
    if attributes["recompute"]:
        outputs["activation"] = prob * factors.gate * factors.up
    return outputs


def convert_glu_layout(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(..., 2I) from the layout of x to `to`."""
    return {"y": join(*split(inputs["x"], layout_of(specs, "x")), GluLayout.parse(attributes["to"]))}


def split_glu(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, 2I) -> gate (M, I), up (M, I)."""
    gate, up = split(inputs["x"], layout_of(specs, "x"))
    return {"gate": gate, "up": up}


def join_glu(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """gate (M, I), up (M, I) -> (M, 2I) in `layout`."""
    return {"x": join(inputs["gate"], inputs["up"], GluLayout.parse(attributes["layout"]))}


EVALUATE = {
    "glu": glu,
    "glu_backward": glu_backward,
    "convert_glu_layout": convert_glu_layout,
    "split_glu": split_glu,
    "join_glu": join_glu,
}
