"""explain of models whose experts are opfuse's own ops already: each op's plan, forward and backward."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GluLayout, OpfuseError
from opfuse.graph_ops.torch import GroupedMLP, explain
from opfuse.graph_ops.torch.compile.own_calls import KEYS
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.graph_ops.torch.ops import OPS

L, H, I, COUNTS = 2, 64, 64, [256, 256]


class TwoLayers(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        made = {"dtype": torch.bfloat16, "glu_layout": GluLayout.interleaved(32), "multiple_of": 256}
        self.layers = torch.nn.ModuleList(GroupedMLP(L, H, I, **{**made, **options}) for _ in range(2))

    def forward(self, x, counts, probs):
        for layer in self.layers:
            x = x + layer(x, counts, probs)[0]
        return x


def given(model, requires_grad=True):
    dtype = next(model.parameters()).dtype
    rows = sum(COUNTS)
    return torch.randn(rows, H, dtype=dtype, requires_grad=requires_grad), torch.tensor(COUNTS), torch.rand(rows)


def calls(found):
    return [(c.part, c.op, c.count, sorted(s.rule for s in c.explanation.fused_steps)) for c in found.own_calls]


def test_equal_layers_are_told_once_with_what_fuses_in_each(seed):
    model = TwoLayers()
    found = explain(model, arch="sm90")(*given(model))
    assert calls(found) == [
        ("forward", "grouped_mlp_fc1", 2, ["grouped_gemm_glu"]),
        ("forward", "grouped_mlp_fc2", 2, []),
        ("backward", "grouped_mlp_fc2_backward", 2, ["grouped_gemm_dglu"]),
        ("backward", "grouped_mlp_fc1_backward", 2, []),
    ]
    assert found.fused_count == 4 and found.regions == ()
    text = str(found)
    assert "Expert MLPs of opfuse: 8 calls of its ops, 4 fused kernels" in text
    assert "forward: 2 x opfuse::grouped_mlp_fc1\n  Plan of grouped_mlp_forward on sm90" in text
    here = explain(model)(*given(model))
    assert here.fused_count == 0 and "grouped_mlp_forward on cpu" in str(here)


@pytest.mark.parametrize(
    ("options", "learns", "ops"),
    [
        (dict(save="inputs"), True, ["grouped_mlp", "grouped_mlp_fc1", "grouped_mlp_fc2_backward",
                                     "grouped_mlp_fc1_backward"]),
        (dict(recipe="mxfp8"), True, ["grouped_mlp_mxfp8_forward", "grouped_mlp_mxfp8_backward"]),
        (dict(recipe="mxfp8", save="preactivation"), False, ["grouped_mlp"]),
    ],
)  # fmt: skip
def test_the_plans_told_are_of_the_graphs_that_run(options, learns, ops, seed):
    model = TwoLayers(**options)
    GRAPHS.clear()
    with torch.set_grad_enabled(learns):
        found = explain(model)(*given(model, learns))
    assert [c.op for c in found.own_calls] == ops
    ran = {b.graph.operation_graph().name: len(b.graph.operation_graph().nodes) for b in GRAPHS.graphs()}
    told = {c.explanation.graph.name: len(c.explanation.graph.nodes) for c in found.own_calls}
    assert told == ran


def test_every_op_has_its_graph():
    assert {op._schema.name.removeprefix("opfuse::") for op in OPS} == set(KEYS)


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (dict(arch="sm99"), "ARCH_UNKNOWN"),
        (dict(disable="raise_glu"), "OPTION"),
        (dict(strict="no"), "OPTION"),
        (dict(fuse_rounding="no"), "OPTION"),
        (dict(fuse_rounding=0), "OPTION"),
        (dict(save=None), "OPTION"),
        (dict(rest="inductor"), "OPTION"),
    ],
)
def test_an_option_that_is_none_is_refused_without_any_matmul(option, code):
    with pytest.raises(OpfuseError) as raised:
        explain(lambda x: x + 1, **option)
    assert raised.value.code == code and next(iter(option)) in str(raised.value)
