"""Random graphs of grouped matmuls, GLUs, quantizations and pointwise ops, in which fusions may or may not exist."""

from __future__ import annotations

import random
from typing import Any

from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.builder import Tensor

LAYOUT = GluLayout.interleaved(32)
WIDTHS = (32, 64)
EXPERTS = 2


class Maker:
    """Grows one graph: `pool` has the matrices (M, 32 or 64) that a next op may read."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph, self.random = graph, random.Random(seed)
        self.rows = graph.symbol("M")
        self.offsets = graph.tensor("offs", (EXPERTS,), data_type=DataType.INT32)
        self.prob = graph.tensor("prob", (self.rows,), data_type=DataType.FLOAT)
        self.factor = graph.tensor("factor", (self.rows, 1), data_type=DataType.FLOAT)
        x = graph.tensor("x", (self.rows, 32))
        h = graph.tensor("h", (self.rows, 64), glu_layout=LAYOUT)
        self.pool: list[Tensor] = [x, h]
        self.made: list[Tensor] = []

    def pick(self, width: int | None = None, data_type: DataType | None = None, layout: bool = False) -> Tensor | None:
        fitting = [
            t for t in self.pool
            if (width is None or t.dim[1] == width)
            and (data_type is None or t.data_type is data_type)
            and (not layout or t.glu_layout is not None)
        ]  # fmt: skip
        # Recent values more often, so that chains form.
        return fitting[-1 - min(int(self.random.expovariate(0.7)), len(fitting) - 1)] if fitting else None

    def add(self, *tensors: Tensor, pool: bool = True) -> None:
        for t in tensors:
            self.made.append(t)
            if pool:
                self.pool.append(t)

    def rounded(self, t: Tensor) -> Tensor:
        return t.set_data_type(self.random.choice((DataType.FLOAT, DataType.BFLOAT16)))

    def matmul(self) -> None:
        a = self.pick()
        if a is None:
            return
        wide = self.random.random() < 0.5
        shape = (EXPERTS, a.dim[1], 64 if wide else 32)
        b = self.graph.tensor("", shape, data_type=a.data_type, glu_layout=LAYOUT if wide else None)
        self.add(self.rounded(self.graph.grouped_matmul(a, b, self.offsets)))

    def glu(self) -> None:
        x = self.pick(64, layout=True)
        if x is not None:
            prob = self.prob if self.random.random() < 0.5 else None
            self.add(self.rounded(self.graph.glu(x, act=self.random.choice(("swiglu", "geglu")), prob=prob)))

    def glu_backward(self) -> None:
        x, dy = self.pick(64, layout=True), self.pick(32)
        if x is not None and dy is not None:
            dx, dprob = self.graph.glu_backward(dy, x, act="swiglu", prob=self.prob)
            self.add(self.rounded(dx))
            self.add(dprob, pool=False)

    def spelled_glu(self) -> None:
        x = self.pick(64, layout=True)
        if x is not None:
            gate, up = self.graph.split_glu(x)
            self.add(self.rounded(self.graph.mul(self.graph.swish(gate), up)))

    def quantize(self) -> None:
        x = self.pick()
        if x is not None:
            for axis in self.random.choice(((0,), (1,), (0, 1))):
                codes = self.graph.block_scale_quantize(x, block_size=32, axis=axis, data_type=DataType.FP8_E4M3)
                self.add(*codes, pool=False)

    def reduce(self) -> None:
        x = self.pick()
        if x is not None:
            op = self.random.choice((self.graph.group_sum, self.graph.group_amax))
            self.add(op(x, self.offsets).set_data_type(DataType.FLOAT), pool=False)

    def pointwise(self) -> None:
        x = self.pick()
        if x is None:
            return
        other = self.pick(x.dim[1])
        if other is not None and self.random.random() < 0.5 and len({x.glu_layout, other.glu_layout}) == 1:
            self.add(self.rounded(self.graph.add(x, other)))
        elif self.random.random() < 0.5:
            self.add(self.rounded(self.graph.mul(x, self.factor)))
        else:
            self.add(self.rounded(self.graph.swish(x)))

    def wgrad(self) -> None:
        a = self.pick()
        dy = None if a is None else self.pick(data_type=a.data_type)
        if a is not None and dy is not None:
            dw = self.graph.grouped_matmul_wgrad(a, dy, self.offsets)
            self.add(dw.set_data_type(DataType.FLOAT), pool=False)


def make(graph: Graph, seed: int, nodes: int = 9) -> Graph:
    """Fills `graph` with about `nodes` random ops; values that nobody reads are outputs, and a few others too."""
    maker = Maker(graph, seed)
    ops: list[Any] = [maker.matmul, maker.matmul, maker.glu, maker.glu_backward, maker.spelled_glu, maker.quantize,
                      maker.quantize, maker.reduce, maker.pointwise, maker.wgrad]  # fmt: skip
    while len(maker.made) < nodes:
        maker.random.choice(ops)()
    snapshot = graph.operation_graph()
    for t in maker.made:
        if not snapshot.uses[t.uid] or maker.random.random() < 0.1:
            t.set_output(True)
    return graph
