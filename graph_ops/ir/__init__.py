"""The intermediate representation: values without torch, kernels or rules."""

from .dims import Dim, Expression, Symbol, ceil_div, evaluate, round_up, symbol
from .dtypes import DATA_TYPES, DataType
from .errors import (
    GraphError,
    GraphNotSupportedError,
    OpfuseError,
    SourceLocation,
    StateError,
    VariantPackError,
    VerificationError,
    WorkspaceError,
)
from .graph import Node, OpGraph, Use
from .layouts import GluLayout, ScaleLayout
from .ops import OPS
from .serialize import from_json, to_json
from .tensor import TensorSpec, contiguous_stride
from .verify import RULES, verify, violations

__all__ = [
    "DATA_TYPES", "OPS", "RULES", "DataType", "Dim", "Expression", "GluLayout", "GraphError", "GraphNotSupportedError",
    "Node", "OpGraph", "OpfuseError", "ScaleLayout", "SourceLocation", "StateError", "Symbol", "TensorSpec", "Use",
    "VariantPackError", "VerificationError", "WorkspaceError", "ceil_div", "contiguous_stride", "evaluate", "from_json",
    "round_up", "symbol", "to_json", "verify", "violations",
]  # fmt: skip
