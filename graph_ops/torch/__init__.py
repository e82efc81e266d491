"""opfuse in PyTorch: the expert MLP as custom ops, functions and modules; a torch.compile backend; Hugging Face.

from opfuse.graph_ops.torch import GroupedMLP, grouped_mlp      # rows already grouped by expert
from opfuse.graph_ops.torch.routing import route, dispatch, combine, row_probs  # tokens to such rows, and back
torch.compile(model, backend="opfuse")                          # plain PyTorch code, fused
opfuse.graph_ops.torch.explain(model)(*args)                    # what fuses, and why the rest does not
opfuse.graph_ops.torch.hf.register()                            # config._experts_implementation = "opfuse"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import hf
    from .compile import OpfuseJointPass, OpfusePass, backend, explain
    from .layouts import convert_glu_layout
    from .mlp import GroupedMLP, grouped_mlp

_LATE = {
    "GroupedMLP": ".mlp",
    "grouped_mlp": ".mlp",
    "convert_glu_layout": ".layouts",
    "backend": ".compile",
    "explain": ".compile",
    "OpfuseJointPass": ".compile",
    "OpfusePass": ".compile",
}

__all__ = [
    "GroupedMLP",
    "OpfuseJointPass",
    "OpfusePass",
    "backend",
    "convert_glu_layout",
    "explain",
    "grouped_mlp",
    "hf",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    if name == "hf":
        return importlib.import_module(".hf", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
