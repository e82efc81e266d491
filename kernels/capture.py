"""Which unfused nodes cannot be part of a CUDA graph, and why. Apart from the ops, so that planning needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..graph_ops.ir.tensor import TensorSpec
from .arch import Arch


def not_capturable(op: str, attributes: Mapping[str, Any], specs: Mapping[str, TensorSpec], arch: Arch) -> str:
    """Why the node cannot run inside CUDA graph capture on `arch`; "" where it can (or where there is no CUDA)."""
    if arch.is_cuda and any(spec.discrete for spec in specs.values()):
        return "discrete weights may come as an array of addresses, which is read on the host"
    return ""
