"""Grouped matmuls, one expert after another.

`y[m,n] = alpha[g]**e * sum_k a[m,k] b[g,k,n] + bias[g,n]`, g the expert that owns row m.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...graph_ops.ir.tensor import TensorSpec

Values = Mapping[str, torch.Tensor]
Specs = Mapping[str, TensorSpec]


def expert_rows(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows `[offsets[g-1], offsets[g])`."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, slice(start, end)
        start = end


def grouped_matmul(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, K) x (L, K, N) -> (M, N). `b` is one tensor or a sequence of L matrices. Rows outside every group: zero."""
    a, b = inputs["a"], inputs["b"]
    y = a.new_zeros(a.shape[0], b[0].shape[1] if len(b) else 0)
    for expert, rows in expert_rows(inputs["offsets"]):
        product = a[rows] @ b[expert]
        if "alpha" in inputs:
            product = product * inputs["alpha"][expert] ** attributes["alpha_exponent"]
        if "bias" in inputs:
            product = product + inputs["bias"][expert]
        y[rows] = product
    return {"y": y}


def grouped_matmul_wgrad(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, K), (M, N) -> (L, K, N): `dw[g] = a[rows of g]^T dy[rows of g]`; with accumulate added to input `dw`."""
    a, dy, offsets = inputs["a"], inputs["dy"], inputs["offsets"]
    dw = a.new_zeros(offsets.shape[0], a.shape[1], dy.shape[1])
    for expert, rows in expert_rows(offsets):
        dw[expert] = a[rows].T @ dy[rows]
    return {"dw": dw + inputs["dw"] if attributes["accumulate"] else dw}


EVALUATE = {"grouped_matmul": grouped_matmul, "grouped_matmul_wgrad": grouped_matmul_wgrad}
