"""Kinds of tensors and nodes: what is alike, and that violations are told of every node all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import DataType, OpGraph
from opfuse.graph_ops.ir.verify import violations


def _quantized(count: int) -> OpGraph:
    g = GraphBuilder(name="quantized")
    for _ in range(count):
        x = g.tensor("", (g.symbol("M"), 64))
        for t in g.block_scale_quantize(x, block_size=32, axis=1, data_type=DataType.FP8_E4M3):
            t.set_output(True)
    return g.operation_graph()


def test_names_uids_and_lines_do_not_matter() -> None:
    structure = _quantized(3).structure
    assert structure.node_kind == (0, 0, 0) and len(structure.nodes) == 1 and len(structure.tensors) == 3


@pytest.mark.parametrize("change", [
    {"dim": (8, 64)}, {"stride": (64, 2)}, {"data_type": DataType.FLOAT}, {"is_virtual": True}, {"is_output": True},
    {"alignment": 32}, {"discrete": True}, {"multiple_of": 2}, {"value": 1.0},
])  # fmt: skip
def test_all_else_does(change: dict[str, Any]) -> None:
    graph = _quantized(2)
    uid = graph.nodes[1].inputs[0][1]
    changed = replace(graph, tensors={**graph.tensors, uid: replace(graph.tensors[uid], **change)})
    assert changed.structure.node_kind == (0, 1)


def test_equal_values_of_other_types_are_not_alike() -> None:
    graph = _quantized(2)
    node = graph.nodes[1]
    loose = tuple((k, 1 if v is True else v) for k, v in node.attributes)
    assert loose == node.attributes and any(v is True for _, v in node.attributes)
    changed = replace(graph, nodes=(graph.nodes[0], replace(node, attributes=loose)))
    assert changed.structure.node_kind == (0, 1)
    assert [str(v.where).startswith(node.name) for v in violations(changed)] == [True]


def test_one_tensor_at_two_ports_is_not_two_alike_tensors() -> None:
    g = GraphBuilder(name="square")
    x, y = g.tensor("x", (4, 4)), g.tensor("y", (4, 4))
    for t in (g.mul(x, x), g.mul(x, y), g.mul(y, y)):
        t.set_output(True)
    assert g.operation_graph().structure.node_kind == (0, 1, 0)


def test_values_that_cannot_be_hashed_are_like_no_other() -> None:
    graph = _quantized(2)
    nodes = tuple(replace(n, attributes=(*n.attributes, ("odd", []))) for n in graph.nodes)
    changed = replace(graph, nodes=nodes)
    assert changed.structure.node_kind == (0, 1)
    assert [v.code for v in violations(changed)].count("ATTRIBUTE_UNKNOWN") == 2


def test_every_node_and_tensor_of_a_faulty_kind_is_named() -> None:
    graph = _quantized(3)
    tensors = {uid: replace(t, data_type=DataType.INT32, alignment=3) if not t.is_output else t
               for uid, t in graph.tensors.items()}  # fmt: skip
    codes = [v.code for v in violations(replace(graph, tensors=tensors))]
    assert codes.count("DATA_TYPE") == 3 and codes.count("ALIGNMENT") == 3
