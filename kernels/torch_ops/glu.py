"""Gated linear units and their derivatives, vectorised over rows, in float32 with one rounding at the end.

Gate and up are views of (M, blocks, 2, width): no layout needs a gather, and results are written through the same
view of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...graph_ops.ir.layouts import GluLayout
from .matmul import Inputs, Outputs, Specs
from .rows import outside, owner

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""G(gate), U(up), dG/dgate, dU/dup: the unit is prob * G * U."""


def halves(x: torch.Tensor, layout: GluLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., 2I) -> gate, up as views (..., blocks, width) of x."""
    half = x.shape[-1] // 2
    width = layout.width or half or 1
    blocks = x.view(*x.shape[:-1], half // width, 2, width)  # splitting an axis never copies
    return blocks.select(-2, 0), blocks.select(-2, 1)


def layout_at(specs: Specs, port: str) -> GluLayout:
    """The GLU layout of the tensor at `port`, which graph verification has made sure of."""
    layout = specs[port].glu_layout
    assert layout is not None, f"{specs[port]} has no GLU layout"
    return layout


def _swiglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    s = torch.sigmoid(gate)
    return gate * s, up, s * (1 + gate * (1 - s)), torch.ones((), dtype=up.dtype, device=up.device)


def _geglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    low, high, alpha = attributes["clamp_min"], attributes["clamp_max"], attributes["geglu_alpha"]
    y1, y2 = gate.clamp(max=high), up.clamp(min=low, max=high)
    s = torch.sigmoid(alpha * y1)
    slope = s * (1 + alpha * y1 * (1 - s)) * (gate <= high)
    return y1 * s, y2 + attributes["linear_offset"], slope, ((up >= low) & (up <= high)).to(up.dtype)


def _situglu(gate: torch.Tensor, up: torch.Tensor, attributes: Mapping[str, Any]) -> Factors:
    b1, b2 = attributes["situ_beta1"], attributes["situ_beta2"]
    s, t1, t2 = torch.sigmoid(gate), torch.tanh(gate / b1), torch.tanh(up / b2)
    return b1 * t1 * s, b2 * t2, (1 - t1 * t1) * s + b1 * t1 * s * (1 - s), 1 - t2 * t2


ACTIVATION: dict[str, Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Factors]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "situglu": _situglu,
}


def _gate_up(x: torch.Tensor, layout: GluLayout) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = halves(x, layout)
    return gate.flatten(-2).to(torch.float32), up.flatten(-2).to(torch.float32)


def _store_halves(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, layout: GluLayout) -> None:
    for value, target in zip((gate, up), halves(out, layout), strict=True):
        target.copy_(value.reshape(target.shape))


def glu(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(M, 2I) -> (M, I): prob * G(gate) * U(up). With offsets rows outside every group are zero."""
    gate, up = _gate_up(inputs["x"], layout_at(specs, "x"))
    g, u, _, _ = ACTIVATION[attributes["act"]](gate, up, attributes)
    y = g * u
    outputs["y"].copy_(y * inputs["prob"].reshape(-1, 1) if "prob" in inputs else y)
    _clear_unowned(inputs, outputs)


def _clear_unowned(inputs: Inputs, outputs: Outputs) -> None:
    """Zero in the rows of no expert, where offsets say which those are, whatever was read there."""
    if "offsets" in inputs:
        for out in outputs.values():
            unowned = outside(inputs["offsets"], out.shape[0])
            out.masked_fill_(unowned.view(-1, *[1] * (out.dim() - 1)), 0)


def glu_backward(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """dy (M, I), x (M, 2I) -> dx (M, 2I), dprob (M,), and with recompute the activation (M, I).

    With offsets rows outside every group are zero, whatever x and dy hold there.
    """
    layout = layout_at(specs, "x")
    dy = inputs["dy"].to(torch.float32)
    gate, up = _gate_up(inputs["x"], layout)
    if "beta" in inputs:
        offsets, rows = inputs["offsets"], dy.shape[0]
        expert = owner(offsets, rows).clamp_(max=max(0, offsets.shape[0] - 1))
        beta = inputs["beta"].to(torch.float32)[expert][:, None]
        gate, up = gate * beta, up * beta
    g, u, gate_slope, up_slope = ACTIVATION[attributes["act"]](gate, up, attributes)
    unit = g * u
    scaled = dy * inputs["prob"].reshape(-1, 1) if "prob" in inputs else dy
    dgate, dup, dprob = scaled * u * gate_slope, scaled * g * up_slope, (dy * unit).sum(dim=1)
    activation = unit * inputs["prob"].reshape(-1, 1) if "prob" in inputs else unit
    _store_halves(dgate, dup, outputs["dx"], layout)
    outputs["dprob"].copy_(dprob)
    if attributes["recompute"]:
        outputs["activation"].copy_(activation)
    _clear_unowned(inputs, outputs)


def convert_glu_layout(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(..., 2I) from the layout of x to `to`."""
    gate, up = halves(inputs["x"], layout_at(specs, "x"))
    _store_halves(gate.flatten(-2), up.flatten(-2), outputs["y"], GluLayout.parse(attributes["to"]))


def split_glu(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(M, 2I) -> gate (M, I), up (M, I)."""
    for port, half in zip(("gate", "up"), halves(inputs["x"], layout_at(specs, "x")), strict=True):
        outputs[port].copy_(half.flatten(-2))


def join_glu(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """gate (M, I), up (M, I) -> (M, 2I) in `layout`."""
    _store_halves(inputs["gate"], inputs["up"], outputs["x"], GluLayout.parse(attributes["layout"]))


RUN = {
    "glu": glu,
    "glu_backward": glu_backward,
    "convert_glu_layout": convert_glu_layout,
    "split_glu": split_glu,
    "join_glu": join_glu,
}
