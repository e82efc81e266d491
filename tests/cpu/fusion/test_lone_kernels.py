"""A kernel for one node: it gets what no fusion takes, if it is estimated to win there, and is told as no fusion."""

from __future__ import annotations

from dataclasses import replace

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import chosen, plan
from opfuse.fusion_rules.choice import CODES
from opfuse.fusion_rules.verdict import VerdictKind
from opfuse.graph_ops.explain import explain
from opfuse.graph_ops.ir import DataType, OpGraph
from opfuse.graph_ops.ir.errors import GraphNotSupportedError
from opfuse.graph_ops.planner import left_unfused, make_plan, require_fused
from opfuse.kernels.arch import ArchRange
from opfuse.kernels.registry import KERNELS, KernelEntry

LONE = fg.kernel("grouped_gemm")
FUSING = fg.kernel("grouped_gemm_glu")


def lone_reason(report):
    (verdict,) = [v for v in report.verdicts if v.rule == "grouped_gemm"]
    (reason,) = verdict.reasons
    return verdict.kind, reason


def test_a_larger_fusion_wins_however_little_it_saves():
    """The fused kernel is so slow that the lone one would save more; it still takes the product."""
    graph = with_glu()
    seconds = plan_of(graph, [LONE]).estimate.seconds, plan_of(graph, []).estimate.seconds
    most = next(n for n in range(1, 200) if plan_of(graph, [launching(n)]).estimate.seconds > seconds[0])
    kernel = launching(most)
    assert seconds[0] < plan_of(graph, [kernel]).estimate.seconds < seconds[1], "it saves less than the lone kernel"
    report = plan(graph, kernels=[LONE, kernel])
    assert chosen(report, "grouped_gemm_glu") == [(0, 1)] and not chosen(report, "grouped_gemm")
    kind, reason = lone_reason(report)
    assert kind is VerdictKind.NOT_CHOSEN and reason.code == "OVERLAP" and reason.code in CODES
    assert str(reason) == (
        "OVERLAP: grouped_matmul.0 fused by grouped_gemm_glu at grouped_matmul.0, requires a node that no fusion "
        "takes; disable grouped_gemm_glu to prefer this one"
    )


def with_glu(act: str = "geglu") -> OpGraph:
    """A product and its GLU."""
    p = fg.glu(which=(), act=act)
    return p.freeze()


def alone() -> OpGraph:
    """A product of BFLOAT16."""
    p = fg.Parts()
    fg.operands(p)
    p.outputs.append(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]).set_data_type(DataType.BFLOAT16))
    return p.freeze()


def launching(count: int) -> KernelEntry:
    return replace(FUSING, launches=lambda problem: count)


def plan_of(graph, kernels, **options):
    return make_plan(graph, fg.SM90, kernels=tuple(kernels), **options)


def test_where_the_larger_fusion_loses_or_is_disabled_the_lone_kernel_runs():
    graph = with_glu()
    assert chosen(plan(graph, kernels=[LONE, launching(100_000)]), "grouped_gemm") == [(0,)]
    assert chosen(plan(graph, kernels=[LONE, FUSING], disable=["grouped_gemm_glu"]), "grouped_gemm") == [(0,)]
    assert not plan(graph, kernels=[LONE], disable=["grouped_gemm"]).matches


def test_a_lone_kernel_that_loses_is_not_chosen_and_no_fallback():
    """Strict asks for fusions: that torch runs a lone product as well as a kernel would is none missed."""
    graph = alone()
    slow = replace(LONE, launches=lambda problem: 1000)
    kind, reason = lone_reason(plan(graph, kernels=[slow]))
    assert (kind, reason.code) == (VerdictKind.NOT_CHOSEN, "COST")
    require_fused(plan_of(graph, [slow]))
    require_fused(plan_of(graph, [LONE]))
    with pytest.raises(GraphNotSupportedError, match="UNFUSED"):
        require_fused(plan_of(graph, [replace(LONE, arches=ArchRange((10, 0), (11, 0)))]))


def test_a_missed_fusion_is_told_though_a_kernel_of_its_own_runs_the_product():
    graph = with_glu("swiglu")
    plan_ = plan_of(graph, [LONE, *(k for k in fg.EXACT_KERNELS if k.rule == "grouped_gemm_glu")])
    assert [s.kernel for s in plan_.steps] == ["test.grouped_gemm", "torch.glu"]
    assert plan_.fusions == () and len(plan_.lone_steps) == 2
    assert [node.op for node, _ in left_unfused(plan_)] == ["grouped_matmul"]
    with pytest.raises(GraphNotSupportedError, match="ACT"):
        require_fused(plan_)
    text = str(explain(plan_))
    assert "nothing fused: 2 nodes, each on its own, 1 by test.grouped_gemm" in text
    assert "runs as test.grouped_gemm" in text and "ACT" in text and "FUSED" not in text
    told = explain(plan_)
    assert told.fused_nodes == 0 and [s.kernel for s in told.lone_kernels] == ["test.grouped_gemm"]


def test_the_shipped_kernel_takes_every_lone_product_of_the_sm90_shapes():
    graph = alone()
    assert [s.kernel for s in make_plan(graph, fg.SM90, kernels=KERNELS).steps] == ["sm90.grouped_gemm"]
    assert make_plan(graph, fg.SM90, kernels=KERNELS, fused=False).name == "unfused"
