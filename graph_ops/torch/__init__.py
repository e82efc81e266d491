"""opfuse in PyTorch: the expert MLP as custom ops, as a function and as a module.

    from opfuse.graph_ops.torch import GroupedMLP, grouped_mlp      # rows already grouped by expert
"""

from __future__ import annotations

from .layouts import convert_glu_layout
from .mlp import GroupedMLP, grouped_mlp

__all__ = ["GroupedMLP", "convert_glu_layout", "grouped_mlp"]
