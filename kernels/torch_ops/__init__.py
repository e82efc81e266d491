"""The unfused implementation of every node, on the CPU and on CUDA, with torch and cuBLAS.

Arithmetic is float32 with one rounding into the output's data type; results repeat bit for bit on the same device.
Nothing reads a device tensor on the host, except what `not_capturable` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...graph_ops.ir.tensor import TensorSpec
from ..capture import not_capturable
from . import glu, groups, matmul, pointwise, quantize
from .matmul import MAKE, grouped_mm_obstacles, serves_grouped_mm
from .uncovered import prepare

Run = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor], Mapping[str, Any], Mapping[str, TensorSpec]], None]

RUN: dict[str, Run] = {
    name: function for family in (matmul, glu, groups, quantize, pointwise) for name, function in family.RUN.items()
}
"""The implementation of every op by name."""


def run(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
) -> None:
    """Runs `op` on torch's current stream, into `outputs`: every element of them is written.

    `inputs`: port -> tensor; a number for a compile-time scalar; for discrete weights a sequence of L (K, N) tensors
    or an int64 tensor of their addresses. `outputs`: port -> preallocated tensor of any strides. FP4 codes are uint8
    (M, N/2), scales float8_e8m0fnu or float8_e4m3fn. Rows outside every group and padding become zero. Raises
    VariantPackError for offsets in host memory that decrease or pass M; offsets on a GPU are not checked.
    """
    with torch.no_grad():
        RUN[op](inputs, outputs, attributes, specs)


def make(
    op: str,
    inputs: Mapping[str, Any],
    out_type: torch.dtype,
    attributes: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
) -> torch.Tensor | None:
    """The output of an op of `MAKE`, in a tensor that torch allocates; None where `run` has to write into one.

    Arguments as of `run`. Shape and values as there; strides are torch's choice.
    """
    with torch.no_grad():
        return MAKE[op](inputs, out_type, attributes, specs)


__all__ = ["MAKE", "RUN", "grouped_mm_obstacles", "make", "not_capturable", "prepare", "run", "serves_grouped_mm"]
