"""A graph under construction from a frozen one: the way back from JSON to the builder."""

from __future__ import annotations

from .builder import GraphBuilder, Tensor, _PendingNode
from .ir.dims import Expression
from .ir.graph import OpGraph


def rebuild(builder: GraphBuilder, graph: OpGraph) -> None:
    """Gives an empty builder the tensors, uids and nodes of `graph`, so that freezing it gives `graph` again."""
    for atom in graph.symbols:
        builder._symbols[atom.name] = Expression((((atom,), 1),))
    for uid, spec in graph.tensors.items():
        made = Tensor(builder, uid, spec.name, spec.dim, produced=uid in graph.producers)
        made._user_dim = True
        made._output = spec.is_output
        made._stride, made._data_type = spec.stride, spec.data_type
        made._glu_layout, made._scale_layout = spec.glu_layout, spec.scale_layout
        made._alignment, made._discrete, made._multiple_of = spec.alignment, spec.discrete, spec.multiple_of
        made._value = spec.value
        if spec.location is not None:
            made._location = spec.location
        builder._tensors[uid] = made
        builder._user_uids.add(uid)
    for node in graph.nodes:
        pending = _PendingNode(
            node.op, node.name, {port: builder._tensors[uid] for port, uid in node.inputs}, dict(node.attributes)
        )
        pending.outputs = {port: builder._tensors[uid] for port, uid in node.outputs}
        if node.location is not None:
            pending.location = node.location
        builder._pending.append(pending)
