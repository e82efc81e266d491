"""How long planning takes: benchmarks, not timed tests. With --benchmark-disable each runs once and is checked."""

from __future__ import annotations

from dataclasses import replace

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import Parts, plan  # type: ignore[import-not-found]
from opfuse.graph_ops.ir import OpGraph


def blocks(count: int) -> OpGraph:
    """`count` times a dGLU with rows, columns and dbias (5 nodes), each with its own operands."""
    p = Parts()
    for i in range(count):
        fg.dglu(parts=p, suffix=f".{i}", which=("q_row", "q_col", "dbias"), act="swiglu")
    return p.freeze()


def stack(count: int) -> OpGraph:
    """A residual stack of `count` layers of 10 nodes, in which two of three products fuse."""
    p = Parts()
    fg.operands(p)
    g, x = p.g, p["a"]
    wide = g.tensor("wide", dim=(fg.EXPERTS, fg.DEPTH, 2 * fg.COLUMNS), glu_layout=fg.GluLayout.interleaved(32))
    back = g.tensor("back", dim=(fg.EXPERTS, fg.COLUMNS, fg.DEPTH))
    for _ in range(count):
        scaled = g.mul(g.swish(x), g.sigmoid(x)).set_data_type(fg.BF16)
        h = g.glu(g.grouped_matmul(scaled, wide, p["offsets"]), act="swiglu", prob=p["prob"]).set_data_type(fg.BF16)
        y = g.grouped_matmul(h, back, p["offsets"])
        fg.quantize(p, h, 1)
        x = g.add(g.neg(x), g.relu(g.mul(y, 0.5))).set_data_type(fg.BF16)
    p.outputs.append(x)
    return p.freeze()


def only_for_the_clock(benchmark) -> None:
    """Ten thousand nodes say no more than two thousand where nothing is timed."""
    if benchmark.disabled:
        pytest.skip("benchmarks are off")


@pytest.mark.benchmark(group="fuse: dGLU blocks")
@pytest.mark.parametrize("count", [1, 400, 2000], ids=["5 nodes", "2,000 nodes", "10,000 nodes"])
def test_fuse_blocks(benchmark, count):
    if count == 2000:
        only_for_the_clock(benchmark)
    graph = blocks(count)
    report = benchmark(plan, graph)
    assert len(graph.nodes) == 5 * count and len(report.matches) == count


@pytest.mark.benchmark(group="fuse: dGLU blocks, first plan of a graph")
@pytest.mark.parametrize("count", [1, 400], ids=["5 nodes", "2,000 nodes"])
def test_fuse_blocks_for_the_first_time(benchmark, count):
    """A graph keeps what no arch, kernel or choice changes; here every round starts from a copy that keeps nothing."""
    graph = blocks(count)
    report = benchmark.pedantic(plan, setup=lambda: ((replace(graph),), {}), rounds=10)
    assert len(report.matches) == count


@pytest.mark.benchmark(group="fuse: residual stack")
@pytest.mark.parametrize("count", [181, 909], ids=["2,000 nodes", "10,000 nodes"])
def test_fuse_stack(benchmark, count):
    if count == 909:
        only_for_the_clock(benchmark)
    graph = stack(count)
    report = benchmark(plan, graph)
    assert len(graph.nodes) == 11 * count and len(report.matches) >= count


@pytest.mark.benchmark(group="fuse: nothing supported")
def test_fuse_blocks_that_no_kernel_supports(benchmark):
    graph = blocks(400)
    report = benchmark(plan, graph, kernels=fg.EXACT_KERNELS)
    assert not report.matches


@pytest.mark.benchmark(group="fuse: verdicts")
@pytest.mark.parametrize("count", [1, 400], ids=["5 nodes", "2,000 nodes"])
def test_verdicts_of_blocks(benchmark, count):
    """What `fuse` leaves for later: every reason, the first time that they are read."""
    graph = blocks(count)
    verdicts = benchmark.pedantic(lambda g: plan(g).verdicts, setup=lambda: ((replace(graph),), {}), rounds=5)
    assert len(verdicts) >= count
