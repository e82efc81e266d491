"""Which tensors and which nodes of a graph are alike: equal in all but names, uids and source lines.

A model repeats its layers, so a graph of thousands of nodes has a handful of kinds. What depends on a kind alone
(inference, estimates, support) is then worked out once a kind and not once a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .tensor import TensorSpec

if TYPE_CHECKING:
    from .graph import Node, OpGraph

_CONTENT = attrgetter("dim", "stride", "data_type", "is_virtual", "is_output", "glu_layout", "scale_layout",
                      "alignment", "discrete", "multiple_of", "value")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Structure:
    """The kinds of a graph's tensors and nodes.

    `tensor_kind` maps a uid, `node_kind` a place in the graph's nodes, to the number of its kind; `tensors` and `nodes`
    hold the first of each kind, in order of appearance. Nodes of one kind have the same op and attributes, and at each
    port a tensor of the same kind; ports share a tensor in all of them or in none.
    """

    tensor_kind: Mapping[int, int]
    node_kind: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]

    @staticmethod
    def of(graph: OpGraph) -> Structure:
        tensor_kind: dict[int, int] = {}
        tensors: list[TensorSpec] = []
        numbers: dict[Any, int] = {}
        for uid, tensor in graph.tensors.items():
            content = _CONTENT(tensor)
            try:
                kind = numbers.setdefault(content, len(tensors))
            except TypeError:  # what cannot be hashed, as in a hand-made graph, is like no other
                kind = numbers.setdefault(_Unlike(), len(tensors))
            tensor_kind[uid] = kind
            if kind == len(tensors):
                tensors.append(tensor)
        node_kind: list[int] = []
        nodes: list[Node] = []
        numbers = {}
        kind_of = tensor_kind.get
        for node in graph.nodes:
            inputs, attributes = node.inputs, node.attributes
            ports, uids = zip(*inputs, *node.outputs, strict=True) if inputs or node.outputs else ((), ())
            kinds = tuple(map(kind_of, uids))
            # 1, 1.0 and True are equal, and only one of them may be what an attribute allows
            types = tuple([value.__class__ for _, value in attributes])
            shared = tuple([uids.index(uid) for uid in uids]) if len(set(uids)) < len(uids) else ()
            try:
                kind = numbers.setdefault((node.op, len(inputs), ports, kinds, shared, types, attributes), len(nodes))
            except TypeError:
                kind = numbers.setdefault(_Unlike(), len(nodes))
            node_kind.append(kind)
            if kind == len(nodes):
                nodes.append(node)
        return Structure(tensor_kind, tuple(node_kind), tuple(tensors), tuple(nodes))


class _Unlike:
    """Equal to itself only."""


__all__ = ["Structure"]
