"""Plans made by hand, with one verdict of every kind, and goldens to hold their explanations against.

`OPFUSE_UPDATE_GOLDENS=1 pytest tests/cpu/explain` writes the goldens anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from opfuse.fusion_rules.verdict import FusedMatch, FusionReport, Raising, Told, Verdict, VerdictKind
from opfuse.graph_ops import DataType, GluLayout
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import OpGraph
from opfuse.graph_ops.ir.errors import SourceLocation
from opfuse.graph_ops.plan import Estimate, Plan, Step
from opfuse.kernels.condition import Reason
from opfuse.kernels.problem import Problem

GOLDENS = Path(__file__).parent / "goldens"
L, H, I = 4, 64, 96


def backward_graph() -> OpGraph:
    """The MoE backward with a second product; every location is made up, so that goldens hold no path."""
    g = GraphBuilder(name="fc2_dgrad")
    m = g.symbol("M")
    dy, offs = g.tensor("dy", dim=(m, H)), g.tensor("offs", dim=(L,), data_type=DataType.INT32)
    w2, w3 = (g.tensor(n, dim=(L, H, I), stride=(I * H, 1, H)) for n in ("w2", "w3"))
    h = g.tensor("h", dim=(m, 2 * I), glu_layout=GluLayout.interleaved(32))
    r = g.grouped_matmul(dy, w2, offs, name="fc2")
    dh, dprob = g.glu_backward(r, h, act="swiglu", name="dglu")
    dbias = g.group_sum(dh, offs, name="dbias").set_name("db")
    q, sf = g.block_scale_quantize(dh, block_size=32, axis=1, data_type=DataType.FP8_E4M3, name="rows")
    other = g.mul(g.grouped_matmul(dy, w3, offs, name="skip"), 0.5, name="half")
    for t, name in ((dh, "dh"), (dprob, "dprob"), (dbias, "db"), (q, "q"), (sf, "sf"), (other, "out")):
        t.set_name(name)
        if name != "dh":
            t.set_output(True)
    graph = g.operation_graph()
    nodes = tuple(replace(n, location=SourceLocation("model.py", 10 + n.index)) for n in graph.nodes)
    tensors = {u: replace(t, location=SourceLocation("model.py", 1)) for u, t in graph.tensors.items()}
    return replace(graph, nodes=nodes, tensors=tensors)


def unfused_step(graph: OpGraph, index: int, *, capture_reason: str = "") -> Step:
    node = graph.nodes[index]
    buffers = {f"in.{p}": u for p, u in node.inputs if not graph.tensors[u].is_constant}
    buffers |= {f"out.{p}": u for p, u in node.outputs}
    estimate = Estimate(2e9 + index, 1.5e6, 12.5e-6, 3)
    return Step(f"torch.{node.op}", None, (index,), buffers, estimate, not capture_reason, capture_reason)


def fused_step(graph: OpGraph) -> Step:
    """fc2, dglu and dbias as one kernel."""
    uid = {t.name: t.uid for t in graph.tensors.values()}
    roles = {"a": uid["dy"], "b": uid["w2"], "offsets": uid["offs"], "c": uid["h"], "d": uid["dh"],
             "dprob": uid["dprob"], "dbias": uid["db"]}  # fmt: skip
    problem = Problem("grouped_gemm_dglu", {r: graph.tensors[u] for r, u in roles.items()})
    match = FusedMatch("grouped_gemm_dglu", "sm90.grouped_gemm_dglu.bf16", (0, 1, 2), roles, problem)
    return Step(match.kernel, match.rule, match.nodes, roles, Estimate(3.25e9, 5 * 2**20, 11e-6, 1), match=match)


REASONS = {
    "layout": Reason("GLU_LAYOUT", "concatenated", "gate and up interleaved by 32", "convert_glu_layout gives it",
                     "dglu [glu_backward] at model.py:11"),
    "arch": Reason("ARCH", "sm90", "sm100, sm103", "another arch keeps this part unfused"),
    "op": Reason("OP", "half is mul", "a glu_backward that reads it at port dy", where="half [mul] at model.py:15"),
    "cost": Reason("COST", "est. 12.5 us", "below est. 11.0 us unfused", "an estimate: measure to be sure"),
}  # fmt: skip


def verdict(kind: VerdictKind) -> Verdict:
    """A verdict of each kind on the second product (node 4), with what such a verdict carries."""
    rule = "grouped_gemm_dglu"
    return {
        VerdictKind.NO_MATCH: Verdict(kind, rule, 4, (4,), (REASONS["op"],)),
        VerdictKind.UNSUPPORTED: Verdict(
            kind, rule, 4, (4, 5), (REASONS["layout"], REASONS["arch"]), "sm90.grouped_gemm_dglu.bf16"
        ),
        VerdictKind.NOT_CHOSEN: Verdict(kind, rule, 4, (4, 5), (REASONS["cost"],), "sm90.grouped_gemm_dglu.bf16"),
        VerdictKind.CHOSEN: Verdict(kind, rule, 0, (0, 1, 2), (), "sm90.grouped_gemm_dglu.bf16"),
    }[kind]


def make_plan(*verdicts: Verdict, fused: bool = True, raisings: tuple[Raising, ...] = ()) -> Plan:
    graph = backward_graph()
    step = fused_step(graph)
    rest = [3, 4, 5] if fused else range(6)
    steps = [unfused_step(graph, i, capture_reason="reads offsets on the host" if i == 4 else "") for i in rest]
    if fused:
        steps.insert(0, step)
    matches = (step.match,) if fused and step.match else ()
    return Plan(
        graph=graph,
        arch="sm90",
        fused=fused,
        steps=tuple(steps),
        report=FusionReport(graph, "sm90", raisings, matches, Told(tuple(verdicts))),
        bindings={"M": 8192},
        estimate=Estimate.total(s.estimate for s in steps),
        workspace_bytes=1536 if fused else 3 * 2**20,
        unfused_estimate=Estimate.total(unfused_step(graph, i).estimate for i in range(6)),
        unfused_workspace_bytes=3 * 2**20,
    )


@pytest.fixture
def plan_of():
    return make_plan


@pytest.fixture
def verdict_of():
    return verdict


@pytest.fixture
def golden():
    """Holds text against the golden of that name."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if os.environ.get("OPFUSE_UPDATE_GOLDENS"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check
