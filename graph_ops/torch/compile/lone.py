"""Grouped matmuls of an FX graph that stand beside no GLU, forward or weight gradient, each as an op of its own where a
kernel of ours is estimated to beat torch's grouped_mm.

Why not in the region whose activation or gradient they read: an op holds its inputs until it returns, so that dx and
the weight gradients in one op with dh would keep h and the activation, 3 M I elements, alive beside themselves. As ops
of their own they move no peak, and an op costs the host half of what aten's does (13 us and 20 to 30).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch._inductor.config
from torch import fx

from ...ir.errors import OpfuseError
from ...ir.graph import OpGraph
from ...plan import Plan
from .importer import Imported, Importer
from .spellings import GROUPED_MM

RULES = ("grouped_gemm", "grouped_gemm_wgrad")


def lone_products(graph: fx.Graph, part: str, plan_of: Callable[[OpGraph], Plan]
                  ) -> Iterator[tuple[fx.Node, Imported, Plan]]:  # fmt: skip
    """Each grouped matmul of `graph` that its plan gives to one fused kernel, as an operation graph with that plan.

    The graph may be changed while this runs.
    """
    for node in list(graph.nodes):
        if node.target is not GROUPED_MM:
            continue
        try:
            found = Importer((node,), (node,), fuse_rounding=False, name=f"{part}.{node.name}").build()
        except OpfuseError:  # a form that no kernel serves
            continue
        plan = plan_of(found.graph)
        if [step.rule in RULES for step in plan.fused_steps] == [len(plan.steps) == 1]:
            yield node, found, plan


def measured_by_inductor() -> bool:
    """Whether Inductor itself measures which kernel is best for a matmul, so that they are left to it."""
    config = torch._inductor.config
    return bool(config.max_autotune or config.max_autotune_gemm)


__all__ = ["RULES", "lone_products", "measured_by_inductor"]
