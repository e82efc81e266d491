"""Graphs that several IR tests start from."""

from __future__ import annotations

import pytest
from opfuse.graph_ops import DataType, GluLayout
from opfuse.graph_ops.builder import GraphBuilder

L, H, I = 4, 64, 96


def dglu(layout: GluLayout | None = None) -> GraphBuilder:
    """The MoE backward of the documentation: every kind of port, symbols, several outputs."""
    g = GraphBuilder(name="fc2_dgrad")
    m = g.symbol("M", multiple_of=2)
    dy = g.tensor("dy", dim=(m, H))
    w2 = g.tensor("w2", dim=(L, H, I), stride=(I * H, 1, H))
    h = g.tensor("h", dim=(m, 2 * I), glu_layout=layout or GluLayout.interleaved(32))
    offs = g.tensor("offs", dim=(L,), data_type=DataType.INT32)
    prob = g.tensor("prob", dim=(m,), data_type=DataType.FLOAT)
    alpha = g.tensor("alpha", dim=(L,), data_type=DataType.FLOAT)
    beta = g.tensor("beta", dim=(L,), data_type=DataType.FLOAT)
    r = g.grouped_matmul(dy, w2, offs, alpha=alpha, alpha_exponent=2)
    dh, dprob, activation = g.glu_backward(r, h, prob=prob, beta=beta, offsets=offs, act="swiglu", recompute=True)
    q, sf = g.block_scale_quantize(dh, block_size=32, axis=1, data_type=DataType.FP8_E4M3)
    qt, sft = g.block_scale_quantize(dh, block_size=32, axis=0, data_type=DataType.FP8_E4M3, swizzled=False)
    outputs = (q, sf, qt, sft, dprob, activation, g.group_sum(dh, offs), g.group_amax(dh, offs, split_glu=True))
    for t in outputs:
        t.set_output(True)
    return g


def expert_mlp() -> GraphBuilder:
    """Forward, wgrad and pointwise ops: scalars, parallel edges, discrete weights, attributes of every type."""
    g = GraphBuilder(name="expert_mlp", io_data_type=DataType.HALF, deterministic=True)
    m = g.symbol("M", max=4096)
    x = g.tensor("x", dim=(m, H))
    w1 = g.tensor("w1", dim=(L, H, 2 * I), discrete=True)
    offs = g.tensor("offs", dim=(L,), data_type=DataType.INT64)
    bias = g.tensor("bias", dim=(L, 2 * I))
    pre = g.grouped_matmul(x, w1, offs, bias=bias)
    gate, up = g.split_glu(g.tensor("tagged", dim=(m, 2 * I), glu_layout=GluLayout.concatenated()))
    both = g.join_glu(g.mul(gate, gate), g.select(g.cmp_gt(up, 0.5), up, gate), GluLayout.interleaved(1))
    y = g.glu(g.convert_glu_layout(both, GluLayout.interleaved(32)), act="geglu", clamp_min=float("-inf"))
    dw = g.grouped_matmul_wgrad(x, g.identity(pre).set_data_type(DataType.HALF), offs, accumulate=True)
    norm = g.reduction(y, "NORM2", (0, -1), keep_dim=True)
    for t in (pre, y, dw, norm):
        t.set_output(True)
    return g


@pytest.fixture
def dglu_builder():
    return dglu


@pytest.fixture
def mlp_builder():
    return expert_mlp
