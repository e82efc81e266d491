"""Gate and up with weights of their own: what of it the forward kernel takes, and what stays two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES

BF16 = DataType.BFLOAT16
L, K, N = 3, 64, 64


class Parts:
    """Two products of the same rows, side by side, under a GLU; each step may be another."""

    def __init__(self) -> None:
        self.graph = Graph(name="apart", io_data_type=BF16, intermediate_data_type=DataType.FLOAT)
        rows = self.graph.symbol("M")
        self.x, self.other_x = (self.graph.tensor(n, (rows, K)) for n in ("x", "other_x"))
        self.b, self.b_up = (self.graph.tensor(n, (L, K, N), (K * N, 1, K)) for n in ("b", "b_up"))
        self.offsets, self.other_offsets = (
            self.graph.tensor(n, (L,), data_type=DataType.INT32) for n in ("offsets", "other_offsets")
        )
        self.alpha = self.graph.tensor("alpha", (L,), data_type=DataType.FLOAT)

    def gate(self) -> Any:
        return self.graph.grouped_matmul(self.x, self.b, self.offsets, name="gate")

    def up(self) -> Any:
        return self.graph.grouped_matmul(self.x, self.b_up, self.offsets, name="up")

    def join(self, gate: Any, up: Any) -> Any:
        return self.graph.join_glu(gate, up, GluLayout.concatenated(), name="join").set_data_type(BF16)

    def plan(self) -> Any:
        h = self.join(self.gate(), self.up())
        self.graph.glu(h, act="swiglu", name="glu").set_data_type(BF16).set_output(True)
        return make_plan(self.graph.operation_graph(), ARCHES["sm90"])


class OtherRows(Parts):
    def up(self):
        return self.graph.grouped_matmul(self.other_x, self.b_up, self.offsets, name="up")


class OtherOffsets(Parts):
    def up(self):
        return self.graph.grouped_matmul(self.x, self.b_up, self.other_offsets, name="up")


class Scaled(Parts):
    """alpha would scale one of them."""

    def gate(self):
        return self.graph.grouped_matmul(self.x, self.b, self.offsets, alpha=self.alpha, name="gate")


class Interleaved(Parts):
    def join(self, gate, up):
        return self.graph.join_glu(gate, up, GluLayout.interleaved(32), name="join").set_data_type(BF16)


class Written(Parts):
    """The kernel writes h, and no half of it alone."""

    def gate(self):
        return super().gate().set_data_type(BF16).set_output(True)


class OneProduct(Parts):
    """Gate and up of the same weights."""

    def plan(self) -> Any:
        gate = self.gate()
        self.graph.glu(self.join(gate, gate), act="swiglu").set_data_type(BF16).set_output(True)
        return make_plan(self.graph.operation_graph(), ARCHES["sm90"])


def test_both_weights_reach_the_kernel_in_their_places():
    parts = Parts()
    (step,) = parts.plan().steps
    assert step.kernel == "sm90.grouped_gemm_glu"
    names = {role: spec.name for role, spec in step.match.problem.tensors.items()}
    assert names == {"a": "x", "b": "b", "b_up": "b_up", "offsets": "offsets", "d": names["d"]}


@pytest.mark.parametrize("parts", [OtherRows, OtherOffsets, Scaled, Interleaved, Written, OneProduct])
def test_what_is_one_step_away_stays_apart(parts: Callable[[], Parts]):
    plan = parts().plan()
    assert not plan.fusions, str(plan)


def test_no_other_arch_takes_them():
    parts = Parts()
    parts.plan()
    graph = parts.graph.operation_graph()
    for arch in ("sm80", "sm100", "sm120", "cpu"):
        assert not make_plan(graph, ARCHES[arch]).fusions, arch


def test_the_estimate_counts_both_products():
    apart = Parts().plan().estimate
    whole = Graph(name="whole", io_data_type=BF16, intermediate_data_type=DataType.FLOAT)
    x = whole.tensor("x", (whole.symbol("M"), K))
    b = whole.tensor("b", (L, K, 2 * N), (2 * K * N, 1, K), glu_layout=GluLayout.concatenated())
    h = whole.grouped_matmul(x, b, whole.tensor("offsets", (L,), data_type=DataType.INT32)).set_data_type(BF16)
    whole.glu(h, act="swiglu").set_data_type(BF16).set_output(True)
    one = make_plan(whole.operation_graph(), ARCHES["sm90"])
    assert len(one.fused_steps) == 1 and apart.flops == one.estimate.flops
