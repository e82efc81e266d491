"""Random graphs: the partition covers every node once, has an order, and computes what the graph computes.

A fused kernel is simulated by its contract: it gets its input roles and nothing else, runs the reference of the nodes
that it replaces, and gives its output roles and nothing else.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import fusion_graphs as fg  # type: ignore[import-not-found]
import networkx as nx
import pytest
import torch
from fusion_graphs import BF16, E4M3, FLOAT, plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import FusionReport
from opfuse.fusion_rules.view import GraphView
from opfuse.graph_ops.builder import GraphBuilder, Tensor
from opfuse.graph_ops.ir import DataType, GluLayout, OpGraph
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.problem import ROLES
from opfuse.kernels.reference.evaluate import evaluate_graph

ROWS, HALF, EXPERTS = 64, 64, 2
LAYOUT = GluLayout.interleaved(32)


class Writer:
    """Writes a random graph: the ops of the rules in and out of place, their spellings, and pointwise ops between."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.g = g = GraphBuilder(name=f"random.{seed}")
        self.offsets = g.tensor("offsets", dim=(EXPERTS,), data_type=DataType.INT32)
        self.alpha = g.tensor("alpha", dim=(EXPERTS,), data_type=FLOAT)
        self.prob = g.tensor("prob", dim=(ROWS,), data_type=FLOAT)
        self.factor = g.tensor("factor", dim=(ROWS, 1), data_type=FLOAT)
        self.square = g.tensor("square", dim=(EXPERTS, HALF, HALF))
        self.wide_weights = g.tensor("wide", dim=(EXPERTS, HALF, 2 * HALF), glu_layout=LAYOUT)
        self.half = [g.tensor(f"half{i}", dim=(ROWS, HALF)) for i in range(2)]
        self.wide = [g.tensor(f"x{i}", dim=(ROWS, 2 * HALF), glu_layout=LAYOUT) for i in range(2)]
        self.made: list[Tensor] = []

    def pick(self, pool: list[Tensor]) -> Tensor:
        return self.rng.choice(pool[-4:])

    def operand(self) -> Tensor:
        """A half in bf16, as matmuls read it."""
        t = self.pick(self.half)
        return t if t.data_type is BF16 else self.keep(self.g.identity(t).set_data_type(BF16), self.half)

    def keep(self, t: Tensor, pool: list[Tensor] | None = None) -> Tensor:
        if self.rng.random() < 0.1 and t._fixed_type is None:
            t.set_data_type(BF16)
        self.made.append(t)
        if pool is not None:
            pool.append(t)
        return t

    def product(self) -> None:
        alpha = self.alpha if self.rng.random() < 0.3 else None
        if self.rng.random() < 0.5:
            self.keep(self.g.grouped_matmul(self.operand(), self.square, self.offsets, alpha=alpha), self.half)
        else:
            self.keep(self.g.grouped_matmul(self.operand(), self.wide_weights, self.offsets, alpha=alpha), self.wide)

    def unit(self) -> None:
        act = self.rng.choice(("swiglu", "geglu"))
        self.keep(self.g.glu(self.pick(self.wide), act=act, prob=self.rng.choice((None, self.prob))), self.half)

    def derivative(self) -> None:
        recompute = self.rng.random() < 0.3
        out = self.g.glu_backward(self.pick(self.half), self.pick(self.wide), act=self.rng.choice(("swiglu", "geglu")),
                                  prob=self.rng.choice((None, self.prob)), recompute=recompute)  # fmt: skip
        self.keep(out[0], self.wide)
        self.made.append(out[1])
        if recompute:
            self.keep(out[2], self.half)

    def spelled_unit(self) -> None:
        gate, up = self.g.split_glu(self.pick(self.wide))
        silu = self.g.swish(gate) if self.rng.random() < 0.5 else self.g.mul(self.g.sigmoid(gate), gate)
        y = self.g.mul(silu, up)
        if self.rng.random() < 0.5:
            y = self.g.mul(self.factor, y)
        self.made += [silu, y]
        self.half.append(y)

    def spelled_derivative(self) -> None:
        g, dy = self.g, self.pick(self.half)
        gate, up = g.split_glu(self.pick(self.wide))
        t = g.mul(dy, self.factor) if self.rng.random() < 0.5 else dy
        silu = g.swish(gate)
        dx = g.join_glu(g.swish_backward(g.mul(t, up), gate), g.mul(t, silu), LAYOUT)
        self.keep(dx, self.wide)
        self.made.append(silu)
        if self.rng.random() < 0.5:
            self.made.append(g.reduction(g.mul(dy, g.mul(silu, up)), "ADD", 1))

    def quantize(self) -> None:
        pool = self.rng.choice((self.half, self.wide))
        x = self.pick(pool)
        for axis in self.rng.choice(((1,), (0,), (1, 0))):
            q, sf = self.g.block_scale_quantize(x, block_size=32, axis=axis, data_type=E4M3)
            self.made += [q, sf]
            if self.rng.random() < 0.2:
                self.keep(self.g.block_scale_dequantize(q, sf), pool)

    def reduce(self) -> None:
        x = self.pick(self.rng.choice((self.half, self.wide)))
        self.made.append(self.rng.choice((self.g.group_sum, self.g.group_amax))(x, self.offsets))

    def wgrad(self) -> None:
        x, dy = self.operand(), self.operand()
        if self.rng.random() < 0.5:
            coded = [self.g.block_scale_quantize(t, block_size=32, axis=0, data_type=E4M3) for t in (x, dy)]
            self.made += [t for pair in coded for t in pair]
            x, dy = (self.g.block_scale_dequantize(q, sf) for q, sf in coded)
        self.made.append(self.g.grouped_matmul_wgrad(x, dy, self.offsets))

    def pointwise(self) -> None:
        pool = self.rng.choice((self.half, self.wide))
        one = self.rng.choice((self.g.relu, self.g.swish, self.g.neg))
        two = self.rng.choice((self.g.add, self.g.mul, self.g.sub))
        if self.rng.random() < 0.4:
            self.keep(one(self.pick(pool)), pool)
        elif self.rng.random() < 0.4:
            self.keep(self.g.mul(self.pick(pool), self.factor), pool)
        else:
            self.keep(two(self.pick(pool), self.pick(pool)), pool)

    def write(self) -> OpGraph:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.product, 4), (self.unit, 2), (self.derivative, 3), (self.spelled_unit, 1),
            (self.spelled_derivative, 1), (self.quantize, 3), (self.reduce, 2), (self.wgrad, 1), (self.pointwise, 2),
        ]  # fmt: skip
        for step in self.rng.choices([s for s, _ in steps], [w for _, w in steps], k=self.rng.randint(3, 9)):
            step()
        read = {t.uid for node in self.g._pending for t in node.inputs.values()}
        outputs = [t for t in self.made if t.uid not in read or self.rng.random() < 0.05]
        return fg.frozen(self.g, *outputs)


def data(graph: OpGraph, seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}
    for t in graph.graph_inputs:
        shape = t.shape({})
        if t.data_type is DataType.INT32:
            made[t.uid] = torch.tensor([32, 64], dtype=torch.int32)
        elif t.name in ("alpha", "prob", "factor"):
            made[t.uid] = torch.tensor([-1.5, 0.5, 2.0, 0.0])[torch.randint(4, shape, generator=generator)]
        else:
            scale = HALF**-0.5 if t.rank == 3 else 1.0
            made[t.uid] = (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    return made


def run_partition(report: FusionReport, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the plan computes when fused kernels see only their roles."""
    graph = report.graph
    unit = {i: m for m in report.matches for i in m.nodes}
    have: dict[int, Any] = {**values, **{t.uid: t.value for t in graph.tensors.values() if t.is_constant}}
    contracted = nx.DiGraph()
    owner = {n.index: unit[n.index].nodes if n.index in unit else (n.index,) for n in graph.nodes}
    contracted.add_nodes_from(owner.values())
    for source, target in nx.DiGraph(GraphView(graph).multigraph()).edges:
        if owner[source] != owner[target]:
            contracted.add_edge(owner[source], owner[target])
    assert nx.is_directed_acyclic_graph(contracted)
    for group in nx.lexicographical_topological_sort(contracted):
        match = unit.get(group[0])
        nodes = tuple(graph.nodes[i] for i in group)
        if match is None:
            given = {uid: have[uid] for _, uid in nodes[0].inputs}
            wanted = {uid for _, uid in nodes[0].outputs}
        else:
            writes = {r.name for r in ROLES[match.rule] if r.is_output}
            given = {uid: have[uid] for role, uid in match.roles.items() if role not in writes}
            wanted = {uid for role, uid in match.roles.items() if role in writes}
        tensors = {uid: t for uid, t in graph.tensors.items() if not t.is_constant or uid in given}
        made = evaluate_graph(replace(graph, nodes=nodes, tensors=tensors), given)
        have.update({uid: made[uid] for uid in wanted})
    return {t.uid: have[t.uid] for t in graph.graph_outputs}


def check_cover(report: FusionReport) -> None:
    graph = report.graph
    counts = Counter(i for m in report.matches for i in m.nodes)
    assert all(count == 1 for count in counts.values()) and set(counts) <= set(range(len(graph.nodes)))
    for match in report.matches:
        inside = set(match.nodes)
        roles = {r.name: r for r in ROLES[match.rule]}
        assert all(r.optional or r.name in match.roles for r in roles.values())
        written = {uid for role, uid in match.roles.items() if roles[role].is_output}
        for i in match.nodes:
            for _, uid in graph.nodes[i].outputs:
                outside = any(u.node.index not in inside for u in graph.uses[uid])
                assert uid in written or not (outside or graph.tensors[uid].is_output)
        for role, spec in match.problem.tensors.items():
            assert spec is graph.tensors[match.roles[role]]


@pytest.mark.parametrize("block", range(10))
def test_planned_equals_unfused_on_random_graphs(block):
    """50 graphs a block, 500 in all, with fresh data each time: bitwise where nothing was raised, and within the
    rounding of float32 sums where something was."""
    for seed in range(block * 50, block * 50 + 50):
        graph = Writer(seed).write()
        report = plan(graph)
        check_cover(report)
        fresh = random.randrange(2**31)
        values = data(graph, fresh)
        expected, got = evaluate_graph(graph, values), run_partition(report, values)
        for t in graph.graph_outputs:
            one, other = expected[t.uid], got[t.uid]
            where = f"graph seed {seed}, data seed {fresh}, {t.name}: {[m.rule for m in report.matches]}"
            if not report.raisings:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), where
            elif t.data_type not in (E4M3, DataType.FP8_E8M0):
                close(one.double(), other.double(), where)


def close(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    scale = one.norm()
    if scale > 0:
        error = float((one - other).norm() / scale)
        assert error < 1e-2, f"{where}: {error:.2e}"  # a code that rounds the other way feeds later values
    else:
        assert float(other.norm()) < 1e-6, where


def test_the_random_graphs_reach_every_rule_and_raise():
    found: Counter[str] = Counter()
    for seed in range(150):
        report = plan(Writer(seed).write())
        found.update(m.rule for m in report.matches)
        found.update(r.rule for r in report.raisings)
    assert set(found) == {*fg.FUSIONS, "raise_glu", "raise_glu_backward"}, found


def test_what_a_graph_keeps_never_changes_a_plan():
    """Plans of one graph for several arches, kernel tables and disabled ids, in any order, are those of copies."""
    tables = (fg.ANY_KERNELS, fg.EXACT_KERNELS, [fg.kernel("grouped_gemm_dglu", fg.without("q_row", "dbias"))], ())
    settings = [
        (arch, kernels, disable)
        for arch in (ARCHES["sm90"], ARCHES["sm100"], replace(ARCHES["sm90"], launch_seconds=1.0))
        for kernels in tables
        for disable in ((), ("grouped_gemm_dglu",), ("raise_glu",))
    ]
    for seed in range(12):
        graph = Writer(seed).write()
        order = list(settings)
        random.Random(seed).shuffle(order)
        for arch, kernels, disable in order:
            kept = plan(graph, arch, kernels=kernels, disable=disable)
            fresh = plan(replace(graph), arch, kernels=kernels, disable=disable)
            assert kept.matches == fresh.matches and kept.verdicts == fresh.verdicts, f"seed {seed}, {arch}, {disable}"


def test_a_planned_graph_can_be_pickled_and_copied():
    graph = fg.dglu().freeze()
    report = plan(graph)
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert other == graph and plan(other).verdicts == report.verdicts


def test_every_node_left_alone_at_an_anchor_has_a_reason():
    anchors = {"grouped_matmul", "grouped_matmul_wgrad", "block_scale_quantize"}
    for seed in range(100):
        report = plan(Writer(seed).write())
        fused = {i for m in report.matches for i in m.nodes}
        for node in report.graph.nodes:
            if node.op in anchors and node.index not in fused:
                said = [v for v in report.verdicts if node.index == v.anchor or node.index in v.nodes]
                assert said and all(v.reasons for v in said), f"seed {seed}: {node.path}"
                assert all(r.required and str(r.observed) for v in said for r in v.reasons)
