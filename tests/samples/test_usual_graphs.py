"""The graphs in samples/graphs: their JSON is that of today's code, and each is planned and explained without a GPU."""

from __future__ import annotations

import json

import pytest
from opfuse.graph_ops.cli import main as cli
from opfuse.graph_ops.ir.serialize import from_json
from opfuse.graph_ops.ir.verify import verify
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import parse_arch

NAMES = ("dglu_bf16", "dglu_mxfp8", "expert_mlp_backward", "expert_mlp_forward", "glu_forward", "three_matmul_swiglu")
ARCHES = ("sm90", "sm100")


def test_the_folder_has_every_graph_and_no_other(samples_folder, load_sample):
    assert sorted(p.stem for p in (samples_folder / "graphs").glob("*.json")) == sorted(NAMES)
    assert sorted(load_sample("usual_graphs").GRAPHS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_json_is_current(name, samples_folder, load_sample):
    text = (samples_folder / "graphs" / f"{name}.json").read_text()
    assert text == load_sample("usual_graphs").graph_json(name), "run: python samples/usual_graphs.py"
    graph = from_json(text)
    verify(graph)
    assert [s.name for s in graph.symbols] == ["M"]
    assert str(samples_folder.parent) not in text


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_cli_explains_each_file(name, arch, samples_folder, capsys):
    path = str(samples_folder / "graphs" / f"{name}.json")
    assert cli(["explain", path, "--arch", arch]) == 0
    text = capsys.readouterr().out
    assert arch in text
    for node in from_json((samples_folder / "graphs" / f"{name}.json").read_text()).nodes:
        assert node.name in text, f"{node.name} is not explained"
    assert cli(["explain", path, "--arch", arch, "--format", "json"]) == 0
    json.loads(capsys.readouterr().out)


def plan_of(graph, arch):
    return make_plan(graph.operation_graph(), parse_arch(arch))


def test_sm100_runs_dglu_bf16_as_one_cudnn_kernel(load_sample):
    plan = plan_of(load_sample("usual_graphs").dglu_bf16(), "sm100")
    assert [step.kernel for step in plan.steps] == ["cudnn.grouped_gemm_dglu.bf16"]
    assert set(plan.steps[0].buffers) == {"a", "b", "offsets", "c", "prob", "d", "dprob"}


def test_sm100_fuses_the_dglu_inside_the_whole_backward(load_sample):
    plan = plan_of(load_sample("usual_graphs").expert_mlp_backward(), "sm100")
    fused = {step.kernel: {plan.graph.nodes[n].name for n in step.nodes} for step in plan.fused_steps}
    assert fused["cudnn.grouped_gemm_dglu.bf16"] == BACKWARD


BACKWARD = {"fc2_dgrad", "activation_backward", "bias_grad", "round_dh"}
"""What one dGLU kernel takes of the backward: dh leaves it rounded, and the bias gradient summed before it rounds."""


def test_sm90_fuses_the_dglu_and_the_bias_gradient_inside_the_whole_backward(load_sample):
    plan = plan_of(load_sample("usual_graphs").expert_mlp_backward(), "sm90")
    (step,) = plan.fusions
    assert step.kernel == "sm90.grouped_gemm_dglu" and {plan.graph.nodes[n].name for n in step.nodes} == BACKWARD
    assert set(step.buffers) == {"a", "b", "offsets", "c", "prob", "d", "dprob", "dbias"}
    assert plan.estimate.seconds < plan.unfused_estimate.seconds


@pytest.mark.parametrize("name", ["dglu_bf16", "dglu_mxfp8"])
def test_sm90_runs_the_dglu_graphs_as_one_kernel(name, load_sample):
    plan = plan_of(load_sample("usual_graphs").GRAPHS[name](), "sm90")
    assert [step.kernel for step in plan.steps] == ["sm90.grouped_gemm_dglu"]


@pytest.mark.parametrize(("change", "code"), [({"rows": 128}, "ROW_MULTIPLE"), ({"act": "situglu"}, "ACT")])
def test_a_graph_that_breaks_the_contract_stays_unfused_and_says_why(change, code, load_sample):
    graphs = load_sample("usual_graphs")
    graph = graphs.dglu_bf16(graphs.Sizes(**change))
    plan = plan_of(graph, "sm100")
    assert not plan.fused_steps
    assert code in {reason.code for reason in plan.reasons}
    assert code in str(graph.explain(arch="sm100"))


@pytest.mark.parametrize("arch", ARCHES)
def test_c41_three_matmul_swiglu_is_explained(arch, load_sample):
    """Gate and up come from two products, so no kernel of [gate, up] columns serves it: that is said, node by node."""
    graph = load_sample("usual_graphs").three_matmul_swiglu()
    plan, text = plan_of(graph, arch), str(graph.explain(arch=arch))
    assert not plan.fusions
    assert {plan.graph.nodes[n].name for step in plan.steps for n in step.nodes} >= {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    near = {verdict.rule for verdict in plan.report.verdicts}
    assert "grouped_gemm_glu" in near
    for node in ("gate_proj", "up_proj", "down_proj"):
        assert node in text.split("Left unfused")[1]
