"""Planned against unfused on random graphs, the order of steps, and the workspace's liveness."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opfuse.graph_ops import DataType, Graph, VerificationError
from opfuse.graph_ops.ir import OpGraph, TensorSpec
from opfuse.graph_ops.plan import Plan
from opfuse.graph_ops.planner import make_plan
from opfuse.graph_ops.workspace import ALIGNMENT, lifetimes, plan_workspace
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cost import Sizes

GRAPHS = 500
BATCHES = 20


@pytest.fixture(scope="module")
def make() -> Any:
    path = pathlib.Path(__file__).with_name("random_graphs.py")
    spec = importlib.util.spec_from_file_location("opfuse_random_graphs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make


def _same(got: torch.Tensor, want: torch.Tensor, exact: bool) -> bool:
    """Bit for bit; after raising, which joins float32 steps, to within their last bits (a few codes may flip)."""
    if torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return True
    if exact or got.shape != want.shape:
        return False
    if got.element_size() == 1:
        return bool((got.view(torch.uint8) != want.view(torch.uint8)).float().mean() <= 0.02)
    a, b = got.double().flatten(), want.double().flatten()
    scale = float(b.abs().max())
    return bool((a - b).abs().max() <= 0.01 * scale + 1e-5) and float(torch.cosine_similarity(a, b, dim=0)) > 0.999


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_graphs_planned_and_unfused_agree(tools: Any, make: Any, batch: int) -> None:
    fused = raised = 0
    for seed in range(batch * GRAPHS // BATCHES, (batch + 1) * GRAPHS // BATCHES):
        planned, unfused = make(tools.EmulatedGraph(), seed).build(), make(Graph(device="cpu", fused=False), seed)
        rows = random.Random(seed).choice((0, 1, 17, 40))
        ends = sorted(random.Random(seed + 1).choices(range(rows + 1), k=1)) + [rows]
        pack = tools.random_pack(planned.operation_graph(), rows, seed, ends)
        got, want = planned(pack), unfused(pack)
        assert set(got) == set(want), f"seed {seed}"
        exact = not planned.plan.report.raisings
        for name in want:
            assert _same(got[name], want[name], exact), (
                f"seed {seed}, {rows} rows, output {name}, plan {planned.plan.name}"
            )
        fused += len(planned.plan.fused_steps)
        raised += not exact
    assert fused >= 10 and raised >= 1, "the random graphs exercise neither fusion nor raising"


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_ordered_and_cover_every_node_once(tools: Any, make: Any, seed: int) -> None:
    graph = make(tools.EmulatedGraph(), seed, nodes=20).operation_graph()
    for fused in (True, False):
        plan = make_plan(graph, ARCHES["sm90"], fused=fused, kernels=tools.STAND_INS)
        covered = sorted(itertools.chain(*(s.nodes for s in plan.steps)))
        assert covered == [n.index for n in plan.graph.nodes]
        ready = {t.uid for t in plan.graph.tensors.values() if t.uid not in plan.graph.producers}
        for step in plan.steps:
            assert set(step.reads) <= ready, f"seed {seed}: step {step.kernel} reads what is not written yet"
            assert not set(step.writes) & ready
            ready |= set(step.writes)
        again = make_plan(graph, ARCHES["sm90"], fused=fused, kernels=tools.STAND_INS)
        assert again.steps == plan.steps and again.name == plan.name
        _check_layout(plan, {"M": 100})


def _check_layout(plan: Plan, bindings: dict[str, int]) -> None:
    lives = lifetimes(plan.graph.tensors, [(s.reads, s.writes) for s in plan.steps])
    offsets, sizes = plan.workspace.offsets(bindings), Sizes(bindings)
    assert set(offsets) == {life.tensor.uid for life in lives}
    total = plan.workspace.nbytes(bindings)
    for life in lives:
        start = offsets[life.tensor.uid]
        assert start % ALIGNMENT == 0 and start + sizes.span(life.tensor) <= total
    for one, other in itertools.combinations(lives, 2):
        if one.first <= other.last and other.first <= one.last:
            a, b = offsets[one.tensor.uid], offsets[other.tensor.uid]
            apart = a + sizes.span(one.tensor) <= b or b + sizes.span(other.tensor) <= a
            assert apart, f"{one.tensor.name} and {other.tensor.name} share bytes while both live"
    assert total <= sum(-(-sizes.span(life.tensor) // ALIGNMENT) * ALIGNMENT for life in lives)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_no_two_live_tensors_share_bytes(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    tensors = {
        uid: TensorSpec(uid, f"t{uid}", (data.draw(st.integers(0, 700)),), (1,), DataType.FLOAT, is_virtual=True)
        for uid in range(count)
    }
    accesses = []
    for uid in range(count):
        reads = data.draw(st.lists(st.integers(0, uid - 1), max_size=3)) if uid else []
        accesses.append((reads, [uid]))
    lives = lifetimes(tensors, accesses)
    layout = plan_workspace(lives, Sizes({}))
    offsets = layout.offsets({})
    for one, other in itertools.combinations(lives, 2):
        if one.first <= other.last and other.first <= one.last:
            a, b = offsets[one.tensor.uid], offsets[other.tensor.uid]
            assert a + Sizes({}).span(one.tensor) <= b or b + Sizes({}).span(other.tensor) <= a
    assert layout.nbytes({}) <= sum(-(-Sizes({}).span(life.tensor) // ALIGNMENT) * ALIGNMENT for life in lives)


def test_chain_needs_two_buffers_however_long() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    value = graph.tensor("x", (graph.symbol("M"), 16))
    for _ in range(40):
        value = graph.swish(value)
    value.set_output(True)
    plan = make_plan(graph.operation_graph(), ARCHES["cpu"])
    assert plan.workspace.nbytes({"M": 256}) == 2 * 256 * 16 * 4
    assert len(plan.workspace.slots) == 2


def test_fusion_shrinks_workspace_bytes_time_and_launches(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    plan = graph.build().plan
    assert len(plan.fused_steps) == 1 and not plan.unfused_steps
    assert plan.workspace_bytes == 0 < plan.unfused_workspace_bytes
    assert plan.estimate.bytes < plan.unfused_estimate.bytes
    assert plan.estimate.seconds < plan.unfused_estimate.seconds
    assert plan.estimate.launches == 1 < plan.unfused_estimate.launches
    step = plan.steps[0]
    assert set(step.writes) == {t.uid for t in plan.graph.graph_outputs}
    assert set(step.reads) == {t.uid for t in plan.graph.graph_inputs}


def test_strided_virtual_tensor_has_room_for_its_gaps() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows = graph.symbol("M")
    x = graph.tensor("x", (rows, 4))
    one = graph.relu(x).set_stride((10, 2))
    other = graph.neg(x)
    graph.add(one, other).set_output(True).set_name("y")
    plan: Plan = graph.build().plan
    offsets = plan.workspace.offsets({"M": 30})
    first, second = sorted(offsets.values())
    assert second - first >= (29 * 10 + 3 * 2 + 1) * 4 or offsets[other.uid] == first
    value = torch.randn(30, 4)
    assert torch.equal(graph({"x": value})["y"], value.relu() - value)


def test_unread_virtual_outputs_have_memory_of_their_own() -> None:
    graph = Graph(device="cpu")
    rows = graph.symbol("M")
    x = graph.tensor("x", (rows, 64))
    codes, scale = graph.block_scale_quantize(x, block_size=32, axis=1, data_type=DataType.FP8_E4M3)
    scale.set_output(True).set_name("scale")
    graph.swish(x).set_output(True)
    value = torch.randn(64, 64).bfloat16()
    got = graph({"x": value})["scale"]
    both = Graph(device="cpu")
    x = both.tensor("x", (64, 64))
    for t, name in zip(
        both.block_scale_quantize(x, block_size=32, axis=1, data_type=DataType.FP8_E4M3),
        ("codes", "scale"),
        strict=True,
    ):
        t.set_output(True).set_name(name)
    assert torch.equal(got.view(torch.uint8), both({"x": value})["scale"].view(torch.uint8))
    assert not codes.is_output


def test_a_broken_graph_is_refused_before_planning() -> None:
    graph = Graph(device="cpu")
    graph.relu(graph.tensor("x", (4,)))
    with pytest.raises(VerificationError) as caught:
        make_plan(graph.operation_graph(), ARCHES["sm90"])
    assert caught.value.code == "NO_OUTPUT"


def _graph_of(tools: Any) -> OpGraph:
    graph = Graph(device="cpu")
    tools.declare_dglu(graph)
    return graph.operation_graph()


def test_cycle_of_matches_is_a_fault_not_a_hang(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from opfuse.fusion_rules import fuse
    from opfuse.graph_ops import planner

    graph = _graph_of(tools)
    report = fuse(graph, ARCHES["sm90"], kernels=tools.STAND_INS)
    match = report.matches[0]
    entangled = dataclasses.replace(match, nodes=(0, 2), roles={}, problem=match.problem)
    monkeypatch.setattr(planner, "fuse", lambda *a, **k: dataclasses.replace(report, matches=(entangled,)))
    with pytest.raises(RuntimeError, match="cycle"):
        make_plan(graph, ARCHES["sm90"], kernels=tools.STAND_INS)
