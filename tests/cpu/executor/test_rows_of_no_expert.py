"""Rows past the last offset: zero through a GLU and its derivative, as fused kernels write them, whatever is there."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.kernels.reference.evaluate import evaluate_graph

L, K, I, ROWS, OWNED = 3, 8, 16, 11, 7
NAN = float("nan")


def new_graph() -> Graph:
    g = Graph(io_data_type=DataType.FLOAT, intermediate_data_type=DataType.FLOAT)
    g.tensor("offsets", dim=(L,), data_type=DataType.INT32)
    return g


def product(g: Graph, name: str, columns: int, layout: GluLayout | None = None):
    a = g.tensor(f"{name}_a", dim=(ROWS, K))
    b = g.tensor(f"{name}_b", dim=(L, K, columns), glu_layout=layout)
    return g.grouped_matmul(a, b, g.find_tensor("offsets"))


def derivative(g: Graph, act: str):
    x = g.tensor("x", dim=(ROWS, 2 * I), glu_layout=GluLayout.interleaved(4))
    return g.glu_backward(product(g, "dy", I), x, act=act, prob=g.tensor("prob", dim=(ROWS,)), recompute=True)


def forward(g: Graph, act: str):
    return [g.glu(product(g, "x", 2 * I, GluLayout.concatenated()), act=act, prob=g.tensor("prob", dim=(ROWS,)))]


def two_weights(g: Graph, act: str):
    x = g.join_glu(product(g, "gate", I), product(g, "up", I), layout=GluLayout.interleaved(4))
    x = g.convert_glu_layout(x, GluLayout.concatenated())
    return [g.glu(x, act=act, prob=g.tensor("prob", dim=(ROWS,)))]


@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("declare", [derivative, forward, two_weights])
def test_rows_of_no_expert_are_zero_and_all_others_as_without_them(declare, act):
    g = new_graph()
    for number, tensor in enumerate(declare(g, act)):
        tensor.set_output(True).set_name(f"out{number}")
    graph = g.operation_graph()
    given = {t.name: torch.randn(t.dim) for t in graph.graph_inputs if t.name != "offsets"}
    given["offsets"] = torch.tensor([4, 4, OWNED], dtype=torch.int32)
    finite = {name: t.clone() for name, t in given.items()}
    for t in given.values():
        if t.shape[0] == ROWS:
            t[OWNED:] = NAN
    g.build(device="cpu", fused=False)
    out, clean = g(given), g(finite)
    oracle = evaluate_graph(graph, {t.uid: given[t.name] for t in graph.graph_inputs})
    for tensor in graph.graph_outputs:
        found = out[tensor.name]
        assert not found[OWNED:].any() and torch.equal(found, clean[tensor.name]), tensor.name
        torch.testing.assert_close(found, oracle[tensor.uid], rtol=1e-5, atol=1e-5)


def test_without_a_grouped_matmul_before_it_every_row_counts():
    g = new_graph()
    x = g.tensor("x", dim=(ROWS, 2 * I), glu_layout=GluLayout.concatenated())
    g.glu(x, act="swiglu").set_output(True).set_name("y")
    g.build(device="cpu")
    assert g({"x": torch.full((ROWS, 2 * I), NAN)})["y"].isnan().all()
