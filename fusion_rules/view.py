"""GraphView: the positions and edges of one operation graph, computed once for a whole pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from ..graph_ops.ir.graph import Node, OpGraph, Use

if TYPE_CHECKING:
    import networkx


class GraphView:
    """What the matcher and the legality module read of a graph.

    `order` has node indices, producers first; `position[index]` is the place of a node in it. Raises ValueError for a
    graph with a cycle, which the verifier reports in full.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.nodes: tuple[Node, ...] = graph.nodes
        self.uses: Mapping[int, tuple[Use, ...]] = graph.uses
        self.producers: Mapping[int, Use] = graph.producers
        self.order: Iterable[int] = self._order()

    def _order(self) -> list[int]:
        producers = self.producers
        if all(
            (made := producers.get(uid)) is None or made.node.index < node.index
            for node in self.nodes
            for _, uid in node.inputs
        ):
            return list(range(len(self.nodes)))
        order = [node.index for node in self.graph.topological_order]
        if len(order) < len(self.nodes):
            raise ValueError(f"graph {self.graph.name} has a cycle; verify it first")
        return order

    @cached_property
    def position(self) -> list[int]:
        position = [0] * len(self.nodes)
        for place, index in enumerate(self.order):
            position[index] = place
        return position

    def successors(self, index: int) -> Iterable[int]:
        """Indices of the nodes that read an output of node `index`, one per use."""
        uses = self.uses
        return [use.node.index for _, uid in self.nodes[index].outputs for use in uses[uid]]

    def multigraph(self) -> networkx.MultiDiGraph:
        """The nodes as a networkx graph, one edge per use: `mul(x, x)` keeps two. Edges carry `uid` and both ports."""
        import networkx

        made = networkx.MultiDiGraph()
        made.add_nodes_from((node.index, {"op": node.op, "name": node.name}) for node in self.nodes)
        for node in self.nodes:
            for port, uid in node.inputs:
                if (use := self.producers.get(uid)) is not None:
                    made.add_edge(use.node.index, node.index, uid=uid, output=use.port, input=port)
        return made


def tensor_text(graph: OpGraph, uid: int) -> str:
    """A tensor as reasons name it."""
    return f"{graph.tensors[uid].name} (uid {uid})"
