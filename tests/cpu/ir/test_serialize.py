"""JSON: what was written reads back equal, and other text is refused with what was wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opfuse.graph_ops import DataType, GluLayout, GraphError
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import from_json, to_json, verify
from opfuse.graph_ops.ir.serialize import VERSION, from_dict, to_dict


def test_graphs_read_back_equal(dglu_builder, mlp_builder):
    for build in (dglu_builder, mlp_builder):
        graph = build().operation_graph()
        again = from_json(to_json(graph))
        assert again == graph
        assert to_json(again) == to_json(graph) == to_json(from_json(to_json(graph, indent=None)))
        verify(again)


def test_what_a_graph_says_survives(dglu_builder, mlp_builder):
    backward = from_json(to_json(dglu_builder().operation_graph()))
    assert [(s.name, s.multiple_of, s.maximum) for s in backward.symbols] == [("M", 2, None)]
    forward = from_json(to_json(mlp_builder().operation_graph()))
    assert (forward.deterministic, forward.io_data_type) == (True, DataType.HALF)
    assert forward.symbols[0].maximum == 4096
    glu = next(n for n in forward.nodes if n.op == "glu")
    assert glu.attribute["clamp_min"] == float("-inf")
    reduction = next(n for n in forward.nodes if n.op == "reduction")
    assert reduction.attribute["axis"] == (0, 1)
    assert any(t.discrete for t in forward.tensors.values())
    assert all(n.location is not None and n.location.file.endswith("conftest.py") for n in forward.nodes)


@given(st.floats(allow_nan=False))
def test_every_scalar_survives(value):
    g = GraphBuilder()
    g.mul(g.tensor("x", dim=(2,)), value).set_output(True)
    graph = g.operation_graph()
    json.loads(to_json(graph), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert from_json(to_json(graph)) == graph


def test_a_nan_scalar_survives():
    g = GraphBuilder()
    g.mul(g.tensor("x", dim=(2,)), float("nan")).set_output(True)
    scalars = [t.value for t in from_json(to_json(g.operation_graph())).tensors.values() if t.is_constant]
    assert len(scalars) == 1 and scalars[0] != scalars[0]


@pytest.mark.parametrize(
    "layout", [GluLayout.concatenated(), GluLayout.interleaved(1), GluLayout.interleaved(32)], ids=str
)
def test_the_glu_layout_survives(dglu_builder, layout):
    graph = from_json(to_json(dglu_builder(layout).operation_graph()))
    assert next(t for t in graph.tensors.values() if t.name == "h").glu_layout == layout


def test_another_version_is_refused_with_both_numbers(dglu_builder):
    data = to_dict(dglu_builder().operation_graph())
    for version in (VERSION + 1, 0, None, "1"):
        with pytest.raises(GraphError) as caught:
            from_dict({**data, "version": version})
        assert caught.value.code == "JSON_VERSION"
        assert str(version) in str(caught.value.seen) and str(VERSION) in str(caught.value.required)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "JSON"), ("{", "JSON"), ("[]", "JSON_FORMAT"), ("3", "JSON_FORMAT"), ("{}", "JSON_FORMAT"),
     ('{"format": "onnx"}', "JSON_FORMAT"), ('{"format": "opfuse.graph", "version": 1}', "JSON_FIELD")],
)  # fmt: skip
def test_other_text_is_refused(text, code):
    with pytest.raises(GraphError) as caught:
        from_json(text)
    assert caught.value.code == code


def _set(path, value):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        if value is None:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_set(["nodes"], None), "JSON_FIELD"),
        (_set(["tensors", 0, "dim"], None), "JSON_FIELD"),
        (_set(["tensors", 0, "data_type"], "FLOAT17"), "JSON_FIELD"),
        (_set(["io_data_type"], "bf16"), "JSON_FIELD"),
        (_set(["tensors", 0, "dim"], ["Q", 64]), "JSON_DIM"),
        (_set(["tensors", 0, "dim"], ["M +", 64]), "JSON_DIM"),
        (_set(["tensors", 0, "dim"], 64), "JSON_FIELD"),
        (_set(["tensors", 2, "glu_layout"], "interleaved(x)"), "GLU_LAYOUT"),
        (_set(["tensors", 0, "uid"], 2), "JSON_FIELD"),
        (_set(["nodes", 0, "inputs"], [1, 2]), "JSON_FIELD"),
        (_set(["symbols", 0, "multiple_of"], 0), "SYMBOL_MULTIPLE"),
        (_set(["nodes", 0, "location"], ["a.py"]), "JSON_FIELD"),
    ],
)
def test_damaged_fields_are_refused_by_name(dglu_builder, change, code):
    data = json.loads(to_json(dglu_builder().operation_graph()))
    change(data)
    with pytest.raises(GraphError) as caught:
        from_dict(data)
    assert caught.value.code == code and caught.value.required


def test_reading_does_not_verify(dglu_builder):
    graph = dglu_builder().operation_graph()
    broken = replace(graph, nodes=())
    assert from_json(to_json(broken)) == broken
