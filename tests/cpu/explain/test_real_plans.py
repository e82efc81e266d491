"""Explanations of the usual graphs as the planner plans them, for every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opfuse.fusion_rules import why_not
from opfuse.graph_ops.cli import load
from opfuse.graph_ops.explain import explain
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES

GRAPHS = sorted((Path(__file__).resolve().parents[3] / "samples" / "graphs").glob("*.json"))


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_nothing_that_was_decided_is_left_untold(path, arch):
    plan = make_plan(load(str(path)), arch)
    told = explain(plan)
    text, data = str(told), told.to_dict()
    assert json.loads(told.to_json()) == data
    assert sorted(n["index"] for s in data["steps"] for n in s["nodes"]) == [n.index for n in plan.graph.nodes]
    for node in plan.graph.nodes:
        assert node.path in text
    for reason in plan.reasons:
        assert f"{reason.code}: observed {reason.observed}; required {reason.required}" in text
        assert reason.hint in text
    told_verdicts = sum(len(left.verdicts) for left in told.left_alone) + len(told.alternatives)
    assert told_verdicts == sum(v.kind.name != "CHOSEN" for v in plan.report.verdicts), "each verdict once"
    assert {s.kernel for s in plan.fused_steps} == {s.kernel for s in (*told.fused_steps, *told.lone_kernels)}


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_the_text_is_the_same_every_time(path):
    graph = load(str(path))
    assert len({str(explain(make_plan(graph, ARCHES["sm100"]))) for _ in range(3)}) == 1


def test_c100_why_not_is_data_and_explain_prints_the_same():
    """All failed checks of a rule at a place, as values; the explanation holds each of them."""
    graph = load(str(next(p for p in GRAPHS if p.stem == "dglu_bf16")))
    verdicts = why_not(graph, "grouped_gemm_dglu", ARCHES["sm90"])
    codes = [r.code for v in verdicts for r in v.reasons]
    assert verdicts and codes and len(set(codes)) >= 1
    text = str(explain(make_plan(graph, ARCHES["sm90"])))
    assert all(str(r.observed) in text and r.required in text for v in verdicts for r in v.reasons)


def test_c115_the_support_surface_decides_not_the_machine():
    """A plan for an arch is the same whatever GPU, if any, is here; only the arch's own kernels are chosen."""
    graph = load(str(next(p for p in GRAPHS if p.stem == "dglu_bf16")))
    chosen = {arch.name: {s.kernel for s in make_plan(graph, arch).fused_steps} for arch in ARCHES.values()}
    assert chosen["sm100"] == chosen["sm103"] != set(), "the BF16 kernel of cudnn-frontend"
    assert chosen["cpu"] == chosen["sm80"] == chosen["sm120"] == set()
