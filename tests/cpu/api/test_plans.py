"""The graphs behind the calls are what the fused kernels take: on Blackwell the BF16 call is one kernel of cudnn's."""

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


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
@pytest.mark.parametrize("changes", [
    {}, {"discrete": True}, {"act_func": "dgeglu"}, {"d_dtype": torch.float32, "generate_dbias": True},
    {"round_dgrad_to_input_dtype": True},
], ids=str)  # fmt: skip
def test_the_bf16_call_is_one_kernel_on_blackwell(api, arch, changes):
    report = str(graph_of(api, **changes).explain(arch=arch))
    assert "FUSED cudnn.grouped_gemm_dglu.bf16" in report and "0 left unfused" in report, report


def test_dbias_beside_a_rounded_d_fuses_as_well(api):
    """NVIDIA's kernel sums the unrounded gradient, and so does the graph: D is a rounded copy of what is summed."""
    report = str(graph_of(api, generate_dbias=True).explain(arch="sm100"))
    assert "FUSED cudnn.grouped_gemm_dglu.bf16" in report
    assert "torch.grouped_matmul" not in report and "torch.group_sum" not in report


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
