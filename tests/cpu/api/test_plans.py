"""The graphs behind the calls are what the fused kernels take: BF16 is one kernel on Hopper and on Blackwell."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import api as calls
from opfuse.graph_ops.api import dglu


def graph_of(api, **changes):
    """The graph that a call used."""
    dglu.CACHE.clear()
    discrete = changes.pop("discrete", False)
    t = api.make(3, discrete=discrete).tensors
    weights = dict(b_ptrs=t["b_ptrs"], n=api.N, b_dtype=torch.bfloat16) if discrete else dict(b_tensor=t["b"])
    calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(t["c"].bfloat16()), None, t["padded_offsets"], t["alpha_tensor"], t["beta_tensor"],
        t["prob_tensor"], t["dprob_tensor"], **{**weights, **changes},
    )  # fmt: skip
    (graph,) = dglu.CACHE._graphs.values()
    return graph


KERNELS = {
    "sm90": "sm90.grouped_gemm_dglu",
    "sm100": "cudnn.grouped_gemm_dglu.bf16",
    "sm103": "cudnn.grouped_gemm_dglu.bf16",
}
CHANGES = [
    {},
    {"discrete": True},
    {"act_func": "dgeglu"},
    {"d_dtype": torch.float32, "generate_dbias": True},
    {"generate_dbias": True},
]


@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_bf16_call_is_one_kernel(api, arch, changes):
    """With dbias too: NVIDIA's kernel and ours sum the unrounded gradient, of which D is a rounded copy."""
    report = str(graph_of(api, **changes).explain(arch=arch))
    assert f"FUSED {KERNELS[arch]}" in report and "0 left unfused" in report, report


def test_fp4_operands_reach_the_hopper_kernel_behind_their_dequantization(api):
    p = api.make(3, "fp4")
    t = p.tensors
    dglu.CACHE.clear()
    calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(t["c"]), t["sfa_tensor"], t["padded_offsets"], t["alpha_tensor"], t["beta_tensor"],
        t["prob_tensor"], t["dprob_tensor"], t["b"], t["sfb"], sf_vec_size=32,
    )  # fmt: skip
    (graph,) = dglu.CACHE._graphs.values()
    report = str(graph.explain(arch="sm90"))
    assert "FUSED sm90.grouped_gemm_dglu" in report and report.count(". torch.block_scale_dequantize") == 2
    assert "torch.group_amax" not in report and "torch.identity" not in report


def test_deterministic_asks_the_graph_for_it(api):
    p = api.make(3, "fp4")
    t = p.tensors
    dglu.CACHE.clear()
    for deterministic in (False, True):
        calls.grouped_gemm_dglu_wrapper(
            t["a_tensor"], api.column(t["c"]), t["sfa_tensor"], t["padded_offsets"], t["alpha_tensor"],
            t["beta_tensor"],
            t["prob_tensor"], t["dprob_tensor"], t["b"], t["sfb"], sf_vec_size=32, deterministic=deterministic,
        )  # fmt: skip
    asked = {
        config.deterministic: graph.operation_graph().deterministic for config, graph in dglu.CACHE._graphs.items()
    }
    assert asked == {False: False, True: True}


def test_one_graph_serves_every_number_of_rows_and_says_so_in_its_plan(api):
    graph = graph_of(api)
    assert [s.name for s in graph.operation_graph().symbols] == ["M"]
    assert graph.operation_graph().symbols[0].multiple_of == 256
    assert graph.find_tensor("offsets").spec().multiple_of == 256
