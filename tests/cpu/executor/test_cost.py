"""Estimates against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from opfuse.graph_ops import DataType, Graph
from opfuse.graph_ops.ir import TensorSpec, symbol
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cost import NOMINAL_EXTENT, Sizes, match_estimate, node_estimate, nominal_bindings

SM90 = ARCHES["sm90"]


@pytest.mark.parametrize(
    ("multiple", "maximum", "want"),
    [
        (1, None, NOMINAL_EXTENT),
        (256, None, NOMINAL_EXTENT),
        (3000, None, 6000),
        (10_000, None, 10_000),
        (256, 1000, 768),
        (256, 100, 0),
        (1, 7, 7),
    ],
)
def test_nominal_value_keeps_the_symbols_promises(multiple: int, maximum: int | None, want: int) -> None:
    graph = Graph(arch="sm90")
    graph.relu(graph.tensor("x", (graph.symbol("M", multiple_of=multiple, max=maximum), 4))).set_output(True)
    value = nominal_bindings(graph.operation_graph())["M"]
    assert value == want and value % multiple == 0


def test_matmul_by_hand() -> None:
    graph = Graph(arch="sm90")
    m = graph.symbol("M")
    a, b = graph.tensor("a", (m, 32)), graph.tensor("b", (4, 32, 48))
    offsets = graph.tensor("o", (4,), data_type=DataType.INT32)
    graph.grouped_matmul(a, b, offsets).set_output(True)
    graph.grouped_matmul_wgrad(a, graph.tensor("dy", (m, 48)), offsets, accumulate=True).set_output(True)
    op_graph = graph.operation_graph()
    forward, wgrad = (node_estimate(op_graph, n, SM90, {"M": 100}) for n in op_graph.nodes)
    assert forward.flops == 2 * 100 * 32 * 48
    assert forward.bytes == 2 * (100 * 32 + 4 * 32 * 48 + 100 * 48) + 4 * 4
    assert wgrad.flops == 2 * 100 * 32 * 48
    moved = 2 * (100 * 32 + 100 * 48 + 2 * 4 * 32 * 48) + 4 * 4  # dw is read and written
    # What accumulates runs over tiles: their rows gathered, a float32 product of each, and the sum of these.
    assert wgrad.bytes == moved + 3 * 2 * (100 * 32 + 100 * 48) + 6 * 4 * 4 * 32 * 48
    traffic = max(forward.flops / SM90.bf16_flops, forward.bytes / SM90.memory_bytes_per_second)
    assert forward.seconds == pytest.approx(traffic + forward.launches * SM90.launch_seconds)


def product_of(arch: str, depth: int, columns: int, kind: DataType = DataType.BFLOAT16, **options: Any) -> Any:
    graph = Graph(arch=arch)
    m = graph.symbol("M")
    a, b = graph.tensor("a", (m, depth)), graph.tensor("b", (4, depth, columns))
    made: dict[str, Any] = {
        name: graph.tensor(name, shape, data_type=DataType.FLOAT) for name, shape in options.items()
    }
    y = graph.grouped_matmul(a, b, graph.tensor("o", (4,), data_type=DataType.INT32), **made)
    y.set_output(True).set_data_type(kind)
    op_graph = graph.operation_graph()
    return node_estimate(op_graph, op_graph.nodes[0], ARCHES[arch], {"M": 8192})


@pytest.mark.parametrize(("depth", "slower"), [(256, 2.05), (512, 1.52), (1024, 1.28), (2048, 1.12), (4096, 1.0)])
def test_a_shallow_matmul_by_torch_costs_what_was_measured(depth: int, slower: float) -> None:
    found = product_of("sm90", depth, 8192)
    assert found.seconds == pytest.approx(slower * found.flops / SM90.bf16_flops + 2 * SM90.launch_seconds)
    elsewhere, arch = product_of("sm100", depth, 8192), ARCHES["sm100"]  # where nobody measured
    roofline = max(elsewhere.flops / arch.bf16_flops, elsewhere.bytes / arch.memory_bytes_per_second)
    assert elsewhere.seconds == pytest.approx(roofline + 2 * arch.launch_seconds)


@pytest.mark.parametrize("options", [dict(kind=DataType.FLOAT), dict(alpha=(4,)), dict(bias=(4, 512))], ids=str)
def test_what_torch_runs_over_tiles_costs_more_on_a_gpu_alone(options: dict[str, Any]) -> None:
    plain, tiled = product_of("sm90", 512, 512), product_of("sm90", 512, 512, **options)
    assert tiled.launches > 5 * plain.launches and tiled.bytes > 3 * plain.bytes and tiled.flops == plain.flops
    on_cpu = product_of("cpu", 512, 512, **options)
    assert on_cpu.launches == plain.launches and on_cpu.bytes < 2.5 * plain.bytes


def test_operand_on_both_ports_moves_once_and_scalars_not_at_all() -> None:
    graph = Graph(arch="sm90", io_data_type=DataType.FLOAT)
    x = graph.tensor("x", (10, 10))
    graph.mul(x, x).set_output(True)
    graph.mul(x, 2.0).set_output(True)
    op_graph = graph.operation_graph()
    assert [node_estimate(op_graph, n, SM90, {}).bytes for n in op_graph.nodes] == [800, 800]


def test_fused_kernel_moves_each_role_once(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    (step,) = graph.build().plan.fused_steps
    assert step.match is not None
    bindings = {"M": 1000}
    estimate = match_estimate(step.match.problem, SM90, bindings, launches=3)
    tensors = graph.plan.graph.tensors
    assert estimate.bytes == sum(tensors[uid].nbytes(bindings) for uid in step.buffers.values())
    assert estimate.flops > 2 * 1000 * tools.HIDDEN * tools.INTERMEDIATE and estimate.launches == 3
    again = match_estimate(step.match.problem, SM90, bindings)
    assert estimate.seconds - again.seconds == pytest.approx(2 * SM90.launch_seconds)


def test_sizes_are_those_of_the_tensors() -> None:
    m = symbol("M")
    for dim, stride, data_type, span in (
        ((m, 64), (64, 1), DataType.BFLOAT16, 10 * 64 * 2),
        ((m, 64), (100, 1), DataType.FLOAT, (9 * 100 + 64) * 4),
        ((3, m), (1, 3), DataType.FP4_E2M1, 15),
        ((m, 0), (1, 1), DataType.FLOAT, 0),
        ((), (), DataType.FLOAT, 4),
    ):
        spec = TensorSpec(1, "t", dim, stride, data_type)
        sizes = Sizes({"M": 10})
        for _ in range(2):
            assert sizes.elements(spec) == spec.elements({"M": 10})
            assert sizes.nbytes(spec) == spec.nbytes({"M": 10})
            assert sizes.span(spec) == span


def test_plan_states_sums_at_its_bindings(tools: Any) -> None:
    graph = Graph(arch="sm90")
    tools.declare_dglu(graph)
    plan = make_plan(graph.operation_graph(), SM90, fused=False)
    assert plan.bindings == {"M": NOMINAL_EXTENT}
    for field in ("flops", "bytes", "seconds", "launches"):
        assert getattr(plan.estimate, field) == pytest.approx(sum(getattr(s.estimate, field) for s in plan.steps))
    assert plan.estimate == plan.unfused_estimate and plan.workspace_bytes == plan.unfused_workspace_bytes
