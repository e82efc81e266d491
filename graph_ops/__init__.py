"""opfuse's user interface: declare a graph, see what fuses, run it.

`Graph` is loaded on first use, so that kernels and rules can import the IR below it, and importing this package
loads neither torch, the DSL nor cuDNN.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .ir import (
    DataType,
    GluLayout,
    GraphError,
    GraphNotSupportedError,
    OpfuseError,
    ScaleLayout,
    StateError,
    VariantPackError,
    VerificationError,
    WorkspaceError,
)

if TYPE_CHECKING:
    from .builder import Tensor
    from .graph import Graph
    from .plan import Plan, Step

__version__ = "0.1.0"

_LATE = {"Graph": ".graph", "Tensor": ".builder", "Plan": ".plan", "Step": ".plan"}

__all__ = [
    "DataType", "GluLayout", "Graph", "GraphError", "GraphNotSupportedError", "OpfuseError", "Plan", "ScaleLayout",
    "StateError", "Step", "Tensor", "VariantPackError", "VerificationError", "WorkspaceError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
