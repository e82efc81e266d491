"""GraphView: the positions and edges of one operation graph, computed once for a whole pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..graph_ops.ir.graph import Node, OpGraph, Use
from ..kernels.arch import Arch
from ..kernels.cost import Costs, nominal_bindings

if TYPE_CHECKING:
    import networkx


_KEPT = "_fusion_view"


def _no_view() -> None:
    return None


class GraphView:
    """What the matcher and the legality module read of a graph.

    `order` has node indices, producers first; `position[index]` is the place of a node in it. Raises ValueError for a
    graph with a cycle, which the verifier reports in full.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.nodes: tuple[Node, ...] = graph.nodes
        self.read_by: Mapping[int, Sequence[int]] = graph.read_by
        self.written_by: Mapping[int, int] = graph.written_by
        self.order: Iterable[int] = self._order()
        self.fits: dict[str, Any] = {}  # filled by fusion: what each rule matches
        self.found: dict[tuple[str, int], Any] = {}  # filled by fusion: the same at each anchor, with what missed
        self.forms: dict[tuple[Any, ...], Any] = {}  # filled by candidates: what covers of alike matches share
        self.prefixed: dict[tuple[str, int], dict[str, Any]] = {}  # likewise: attributes of nodes under a prefix
        self.answers: dict[tuple[Any, ...], Any] = {}  # filled by candidates: what kernels say of each kind of match
        self.judged: dict[tuple[int, int], Any] = {}  # filled by candidates: what one kernel serves on one arch
        self._costs: dict[Arch, Costs] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled graph starts without a view: the next plan makes one."""
        return _no_view, ()

    @staticmethod
    def of(graph: OpGraph) -> GraphView:
        """The view that the graph keeps, as it keeps its uses: planning for another arch then matches nothing twice."""
        view: GraphView | None = graph.__dict__.get(_KEPT)
        if view is None:
            view = graph.__dict__[_KEPT] = GraphView(graph)
        return view

    def _order(self) -> list[int]:
        order = [node.index for node in self.graph.topological_order]
        if len(order) < len(self.nodes):
            raise ValueError(f"graph {self.graph.name} has a cycle; verify it first")
        return order

    @property
    def uses(self) -> Mapping[int, tuple[Use, ...]]:
        return self.graph.uses

    @property
    def producers(self) -> Mapping[int, Use]:
        return self.graph.producers

    @cached_property
    def position(self) -> list[int]:
        position = [0] * len(self.nodes)
        for place, index in enumerate(self.order):
            position[index] = place
        return position

    @cached_property
    def of_op(self) -> Mapping[str, list[Node]]:
        """The nodes of each op that the graph has, in node order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.op, []).append(node)
        return found

    def costs(self, arch: Arch) -> Costs:
        """The estimates on `arch` at the nominal values of the graph's symbols, which the view keeps."""
        found = self._costs.get(arch)
        if found is None:
            found = self._costs[arch] = Costs(self.graph, arch, nominal_bindings(self.graph))
        return found

    def successors(self, index: int) -> Iterable[int]:
        """Indices of the nodes that read an output of node `index`, one per use."""
        read_by = self.read_by
        return [reader for _, uid in self.nodes[index].outputs for reader in read_by[uid]]

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
