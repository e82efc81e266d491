"""Plans for graphs of the BF16 dGLU: where the kernel is chosen, where not and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opfuse.fusion_rules import VerdictKind, fuse
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.graph import OpGraph
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.ir.verify import verify
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES

KERNEL = "cudnn.grouped_gemm_dglu.bf16"
BF16, F32 = DataType.BFLOAT16, DataType.FLOAT


def dglu_graph(
    *,
    experts: int = 8,
    hidden: int = 512,
    intermediate: int = 256,
    discrete: bool = False,
    act: str = "swiglu",
    gradient: DataType = BF16,
    outputs: Sequence[str] = ("d", "dprob"),
    multiple_of: int = 256,
    layout: GluLayout | None = None,
    deterministic: bool = False,
    round_later: bool = False,
) -> OpGraph:
    """FC2 dgrad -> GLU backward (-> bias gradient), with M free. `round_later`: a bf16 copy of a FLOAT gradient."""
    g = GraphBuilder(io_data_type=BF16, deterministic=deterministic)
    m = g.symbol("M", multiple_of=256)
    layout = layout or GluLayout.interleaved(32)
    dy = g.tensor("dy", (m, hidden))
    strides = (hidden * intermediate, 1, hidden)
    w2 = g.tensor("w2", (experts, hidden, intermediate), strides, discrete=discrete)
    h = g.tensor("h", (m, 2 * intermediate), glu_layout=layout)
    offsets = g.tensor("offsets", (experts,), data_type=DataType.INT32, multiple_of=multiple_of)
    prob = g.tensor("prob", (m,), data_type=F32)
    made: dict[str, Any] = {}
    made["d"], made["dprob"] = g.glu_backward(g.grouped_matmul(dy, w2, offsets), h, prob=prob, act=act)
    made["d"].set_data_type(gradient)
    if "dbias" in outputs:
        made["dbias"] = g.group_sum(made["d"], offsets)
    if round_later:
        g.identity(made["d"]).set_data_type(BF16).set_output(True)
    for name in outputs:
        made[name].set_output(True)
    graph = g.operation_graph()
    verify(graph)
    return graph


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
@pytest.mark.parametrize("act", ["swiglu", "geglu"])
@pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])
def test_plan_selects_the_kernel(arch: str, act: str, discrete: bool) -> None:
    plan = make_plan(dglu_graph(act=act, discrete=discrete), ARCHES[arch])
    assert [s.kernel for s in plan.steps] == [KERNEL]
    assert plan.steps[0].capturable


@pytest.mark.parametrize("arch", ["cpu", "sm80", "sm89", "sm90", "sm107", "sm110", "sm120", "sm121"])
def test_plan_for_another_arch_says_why(entry, arch: str) -> None:
    """The kernel is judged on its own: an arch may have another kernel for the rule."""
    report = fuse(dglu_graph(), ARCHES[arch], kernels=(entry,))
    assert report.matches == ()
    refused = [v for v in report.verdicts if v.kernel == KERNEL]
    assert refused and all(v.kind is VerdictKind.UNSUPPORTED for v in refused)
    assert {r.code for v in refused for r in v.reasons} == {"ARCH"}


@pytest.mark.parametrize(
    ("graph", "code"),
    [
        (dict(multiple_of=1), "OFFSETS_ALIGNMENT"),
        (dict(layout=GluLayout.concatenated()), "GLU_LAYOUT"),
        (dict(act="situglu"), "ACT"),
        (dict(deterministic=True), "DETERMINISTIC_DPROB"),
        (dict(hidden=500), "DEPTH_MULTIPLE"),
    ],
)
def test_plan_says_what_is_missing(entry, graph: dict[str, Any], code: str) -> None:
    report = fuse(dglu_graph(**graph), ARCHES["sm100"], kernels=(entry,))
    assert report.matches == ()
    assert code in {r.code for v in report.verdicts if v.kernel == KERNEL for r in v.reasons}


def test_dbias_of_an_unrounded_gradient_is_absorbed(entry) -> None:
    graph = dglu_graph(gradient=F32, outputs=("dprob", "dbias"), round_later=True)
    (match,) = fuse(graph, ARCHES["sm100"], kernels=(entry,)).matches
    assert set(match.roles) >= {"d", "dprob", "dbias"}
    assert {graph.nodes[i].op for i in match.nodes} == {"grouped_matmul", "glu_backward", "group_sum", "identity"}


def test_dbias_of_a_rounded_gradient_stays_apart(entry) -> None:
    """The kernel would sum what was never rounded: the rest fuses, and the reason is there."""
    report = fuse(dglu_graph(outputs=("d", "dprob", "dbias")), ARCHES["sm100"], kernels=(entry,))
    (match,) = report.matches
    assert "dbias" not in match.roles and len(match.nodes) == 2
    assert "DBIAS_SOURCE" in {r.code for v in report.verdicts for r in v.reasons}
