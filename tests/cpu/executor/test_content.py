"""Keys, serialization, rebuilding, explain and why_not through the Graph."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, Graph, GraphError, GraphNotSupportedError, StateError
from opfuse.graph_ops.content import MAGIC
from opfuse.graph_ops.tuning import TuningRecord


def _same(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def test_key_ignores_labels_uids_and_lines(tools: Any) -> None:
    def keyed(name: str, first_uid: int) -> str:
        graph = Graph(name=name, device="cpu")
        tensors = tools.declare_dglu(graph)
        tensors["dy"].set_uid(first_uid).set_name(name)
        before = graph.key()
        graph.build()
        assert graph.key() == before, "planning changes nothing"
        return before

    assert keyed("one", 1) == keyed("two", 777)


def test_key_is_that_of_the_graph_read_back(tools: Any) -> None:
    graph = Graph(device="cpu")
    tools.declare_dglu(graph)
    again = Graph.from_operation_graph(graph.operation_graph(), device="cpu")
    assert again.operation_graph() == graph.operation_graph() and again.key() == graph.key()
    with pytest.raises(GraphError) as caught:
        again.symbol("M", multiple_of=7)
    assert caught.value.code == "SYMBOL_CLASH", "its symbols are known"
    again.tensor("more", (again.symbol("M"),))
    assert again.key() != graph.key(), "it can be built on"
    pack = tools.random_pack(graph.operation_graph(), 64, seed=0)
    rebuilt = Graph.from_operation_graph(graph.operation_graph(), device="cpu")
    assert _same(graph(pack), rebuilt(pack))


def test_serialized_graph_runs_the_same_plan(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    with pytest.raises(StateError) as caught:
        graph.serialize()
    assert caught.value.code == "VERB_ORDER"
    graph.build().select_plan(1)
    data = graph.serialize()
    again = tools.EmulatedGraph.deserialize(data, kernels=tools.STAND_INS)
    assert again.plan.name == graph.plan.name == "test.quantize_row_col" and again.key() == graph.key()
    pack = tools.random_pack(graph.operation_graph(), 64, seed=0)
    assert _same(graph(pack), again(pack))
    assert again.serialize() == data


def test_serialized_winners_are_remembered(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.build(policy="ALL", bindings={"M": 64})
    record = graph.tuning
    assert isinstance(record, TuningRecord)
    record.winners["cpu", (("M", 64),)] = "unfused"
    again = tools.EmulatedGraph.deserialize(graph.serialize(), kernels=tools.STAND_INS)
    assert again.tuning is not None and again.tuning.winners == record.winners
    pack = tools.random_pack(graph.operation_graph(), 60, seed=0)
    assert _same(graph(pack), again(pack))
    assert [again.plans[i].name for i in again._plan_set._executables] == ["test.grouped_gemm_dglu", "unfused"]  # type: ignore[union-attr]


def test_serialized_options_come_back(tools: Any) -> None:
    graph = Graph(device="cpu", fused=False)
    tools.declare_dglu(graph)
    graph.build()
    again = Graph.deserialize(graph.serialize())
    assert not again.plan.fused and again.plan.arch == "cpu"
    disabled = tools.EmulatedGraph(disable=["grouped_gemm_dglu"])
    tools.declare_dglu(disabled)
    disabled.build()
    names = [p.name for p in tools.EmulatedGraph.deserialize(disabled.serialize(), kernels=tools.STAND_INS).plans]
    assert names == ["test.quantize_row_col", "unfused"]


def test_other_bytes_are_refused(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    data = graph.build().serialize()
    payload = json.loads(data[len(MAGIC) :])
    for bad, code in (
        (b"", "PLAN_FORMAT"),
        (b"OPFUSE", "PLAN_FORMAT"),
        ("text", "PLAN_FORMAT"),
        (data[:-9], "PLAN_FORMAT"),
        (MAGIC + json.dumps({**payload, "version": 2}).encode(), "PLAN_VERSION"),
        (MAGIC + b"[]", "PLAN_FORMAT"),
        (MAGIC + json.dumps({"version": 1}).encode(), "PLAN_FORMAT"),
    ):
        with pytest.raises(GraphError) as caught:
            Graph.deserialize(bad)  # type: ignore[arg-type]
        assert caught.value.code == code
    with pytest.raises(GraphNotSupportedError) as gone:
        tools.EmulatedGraph.deserialize(data, kernels=())
    assert gone.value.code == "PLAN_GONE"


def test_explain_changes_nothing_and_needs_no_device(tools: Any) -> None:
    graph = Graph(device="cpu")
    tensors = tools.declare_dglu(graph)
    text = str(graph.explain(arch="sm100"))
    assert "sm100" in text and "fc2" in text
    assert "sm90" in str(graph.explain("sm_90"))
    graph.neg(tensors["dprob"]).set_output(True)
    graph.build()
    assert "cpu" in str(graph.explain()) and "sm100" in str(graph.explain(arch="sm100"))
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.explain(arch="sm42")
    assert caught.value.code == "ARCH_UNKNOWN"


def test_why_not_at_a_node_a_name_and_a_tensor(tools: Any) -> None:
    graph = Graph(device="cpu")
    tensors = tools.declare_dglu(graph)
    everywhere = graph.why_not("grouped_gemm_dglu", arch="sm90")
    assert everywhere and all(v.rule == "grouped_gemm_dglu" for v in everywhere)
    codes = {r.code for v in everywhere for r in v.reasons}
    assert "ARCH" in codes and len(codes) > 1, "every failed condition, not only the first"
    by_name = graph.why_not("grouped_gemm_dglu", "dglu", arch="sm90")
    assert by_name and by_name == graph.why_not("grouped_gemm_dglu", tensors["dh"], arch="sm90")
    graph.build()
    assert {r.observed for v in graph.why_not("grouped_gemm_dglu") for r in v.reasons if r.code == "ARCH"} == {"cpu"}
    with pytest.raises(GraphError) as caught:
        graph.why_not("no_such_rule")
    assert caught.value.code == "RULE_UNKNOWN"
    with pytest.raises(GraphError) as caught:
        graph.why_not("grouped_gemm_dglu", tensors["dy"])
    assert caught.value.code == "NODE_UNKNOWN"


def test_disable_and_fused_options_reach_the_plan(tools: Any) -> None:
    for options, rules in (
        ({}, {"grouped_gemm_dglu"}),
        ({"disable": ["grouped_gemm_dglu"]}, {"quantize_row_col"}),
        ({"disable": ["test.grouped_gemm_dglu", "quantize_row_col"]}, set()),
        ({"fused": False}, set()),
    ):
        at_build, at_construction = tools.EmulatedGraph(), tools.EmulatedGraph(**options)
        for graph, given in ((at_build, options), (at_construction, {})):
            tools.declare_dglu(graph)
            graph.build(**given)
            assert {s.rule for s in graph.plan.fused_steps} == rules
            assert str(graph.explain())


def test_data_type_of_rounding_reaches_the_kernel(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.find_tensor("fc2::y").set_data_type(DataType.BFLOAT16)
    (step,) = graph.build().plan.fused_steps
    assert step.match is not None and step.match.problem.rounding["r"] is DataType.BFLOAT16
