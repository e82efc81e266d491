"""OpGraph: a frozen operation graph, the value that rules, plans, explain and JSON read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .dims import Symbol, symbols
from .dtypes import DataType
from .errors import SourceLocation
from .op import OpSpec
from .ops import OPS
from .structure import Structure
from .tensor import TensorSpec


@dataclass(frozen=True)
class Node:
    """One application of an op. `index` is its position in the graph; ports map to tensor uids."""

    index: int
    op: str
    name: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    location: SourceLocation | None = None

    @property
    def spec(self) -> OpSpec:
        return OPS[self.op]

    @cached_property
    def input_uids(self) -> Mapping[str, int]:
        return dict(self.inputs)

    @cached_property
    def output_uids(self) -> Mapping[str, int]:
        return dict(self.outputs)

    @cached_property
    def attribute(self) -> Mapping[str, Any]:
        return dict(self.attributes)

    @property
    def reads_output(self) -> tuple[str, ...]:
        """Output ports whose old contents this node reads."""
        return self.spec.reads_output(self.attribute)

    @property
    def path(self) -> str:
        return f"{self.name} [{self.op}]" + (f" at {self.location}" if self.location else "")


@dataclass(frozen=True)
class Use:
    """One reading of a tensor: the port of the node that reads it."""

    node: Node
    port: str


ROWS_FROM = {"glu": "x", "glu_backward": "dy"}
"""The input whose rows of no expert make a GLU's, or its derivative's, zero."""
COLUMNS_ONLY = {"join_glu": "gate", "convert_glu_layout": "x"}
"""Ops that move columns, and the input whose zero rows stay zero."""


@dataclass(frozen=True)
class OpGraph:
    """Tensors by uid and nodes in the order they were declared.

    Edges are kept per port, so `mul(x, x)` has two uses of x. `deterministic` asks for bitwise repeatable results.
    """

    name: str
    tensors: Mapping[int, TensorSpec]
    nodes: tuple[Node, ...]
    io_data_type: DataType = DataType.BFLOAT16
    intermediate_data_type: DataType = DataType.FLOAT
    deterministic: bool = False

    def tensor(self, uid: int) -> TensorSpec:
        return self.tensors[uid]

    @cached_property
    def producers(self) -> Mapping[int, Use]:
        """The node and output port that writes each produced tensor (the last one, should a graph break the rules)."""
        return {uid: Use(node, port) for node in self.nodes for port, uid in node.outputs}

    @cached_property
    def uses(self) -> Mapping[int, tuple[Use, ...]]:
        """Every reading of each tensor, in node and port order."""
        found: dict[int, list[Use]] = {uid: [] for uid in self.tensors}
        for node in self.nodes:
            for port, uid in node.inputs:
                found.setdefault(uid, []).append(Use(node, port))
        return {uid: tuple(uses) for uid, uses in found.items()}

    @cached_property
    def written_by(self) -> Mapping[int, int]:
        """`producers` as node indices, which cost less than a Use where ports do not matter."""
        return {uid: node.index for node in self.nodes for _, uid in node.outputs}

    @cached_property
    def read_by(self) -> Mapping[int, Sequence[int]]:
        """`uses` as node indices, likewise: one per use, in node and port order."""
        found: dict[int, list[int]] = {}
        for node in self.nodes:
            index = node.index
            for _, uid in node.inputs:
                if uid in found:
                    found[uid].append(index)
                else:
                    found[uid] = [index]
        # numbers in tuples are nothing that the garbage collector has to follow
        read: dict[int, Sequence[int]] = dict.fromkeys(self.tensors, ())
        read.update([(uid, tuple(indices)) for uid, indices in found.items()])
        return read

    def inputs_of(self, node: Node) -> dict[str, TensorSpec]:
        return {port: self.tensors[uid] for port, uid in node.inputs}

    def outputs_of(self, node: Node) -> dict[str, TensorSpec]:
        return {port: self.tensors[uid] for port, uid in node.outputs}

    @cached_property
    def graph_inputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that the caller's buffers provide: used, produced by no node, and not compile-time scalars."""
        return tuple(
            t
            for uid, t in self.tensors.items()
            if uid not in self.written_by and not t.is_constant and self.read_by[uid]
        )

    @cached_property
    def graph_outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.tensors.values() if t.is_output)

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        return symbols(d for t in self.structure.tensors for d in (*t.dim, *t.stride))

    @cached_property
    def structure(self) -> Structure:
        """Which of the tensors and nodes are alike."""
        return Structure.of(self)

    def successors(self, node: Node) -> Iterator[Node]:
        """Nodes that read an output of `node`, one per use."""
        for _, uid in node.outputs:
            for use in self.uses.get(uid, ()):
                yield use.node

    def row_groups(self, node: Node) -> int | None:
        """The uid of the end offsets that say which rows of a GLU or its derivative belong to an expert: those of the
        grouped matmul that it follows. None for other nodes, and where none precedes.

        Rows of no expert are zero then, like the product's, whatever the node's other inputs hold there: a fused kernel
        does not read them.
        """
        port = ROWS_FROM.get(node.op)
        while port is not None:
            use = self.producers.get(dict(node.inputs)[port])
            if use is None:
                return None
            node = use.node
            if node.op == "grouped_matmul":
                return dict(node.inputs)["offsets"]
            port = COLUMNS_ONLY.get(node.op)
        return None

    @property
    def _declared_in_order(self) -> bool:
        """Whether each node stands after all that it reads, as builders declare them."""
        place_of = self.written_by.get
        for place, node in enumerate(self.nodes):
            if node.index != place:
                return False
            for _, uid in node.inputs:
                if place_of(uid, -1) >= place:
                    return False
        return True

    @cached_property
    def topological_order(self) -> tuple[Node, ...]:
        """Nodes, producers first; among ready nodes the one declared first. Nodes on a cycle are left out."""
        if self._declared_in_order:
            return self.nodes
        waiting = {n.index: sum(uid in self.written_by for _, uid in n.inputs) for n in self.nodes}
        ready = [index for index, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order: list[Node] = []
        by_index = {n.index: n for n in self.nodes}
        while ready:
            node = by_index[heapq.heappop(ready)]
            order.append(node)
            for successor in self.successors(node):
                waiting[successor.index] -= 1
                if waiting[successor.index] == 0:
                    heapq.heappush(ready, successor.index)
        return tuple(order)
