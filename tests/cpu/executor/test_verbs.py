"""cuDNN's verbs: their order, plan listing and selection, policies, and what a call allocates."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from opfuse.graph_ops import (
    DataType,
    Graph,
    GraphError,
    GraphNotSupportedError,
    StateError,
    VerificationError,
    WorkspaceError,
)
from opfuse.graph_ops.tuning import TuningRecord, bucket_of

ROWS = 96
VERBS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")


def _simple(**options: Any) -> Graph:
    graph = Graph(**{"device": "cpu", "io_data_type": DataType.FLOAT, **options})
    graph.relu(graph.tensor("x", (graph.symbol("M"), 4)), name="act").set_output(True).set_name("y")
    return graph


def test_verbs_in_order_run_the_graph() -> None:
    graph = _simple()
    for verb in VERBS:
        assert getattr(graph, verb)() is None
    out = torch.empty(3, 4)
    x = torch.randn(3, 4)
    graph.execute({"x": x, "y": out})
    assert torch.equal(out, x.relu())


@pytest.mark.parametrize("done", range(len(VERBS)))
def test_wrong_order_names_the_verb_to_call(done: int) -> None:
    graph = _simple()
    for verb in VERBS[:done]:
        getattr(graph, verb)()
    for verb in VERBS[done + 1 :]:
        with pytest.raises(StateError) as caught:
            getattr(graph, verb)()
        assert caught.value.code == "VERB_ORDER"
        assert f"{VERBS[done]}()" in str(caught.value)
    for verb in VERBS[:done]:
        with pytest.raises(StateError):
            getattr(graph, verb)()


def test_planning_is_one_shot_and_freezes() -> None:
    graph = _simple().build()
    with pytest.raises(StateError) as caught:
        graph.create_execution_plans()
    assert caught.value.code == "PLANNED_ONCE" and "select_plan" in str(caught.value)
    with pytest.raises(StateError) as caught:
        graph.build()
    assert caught.value.code == "PLANNED_ONCE"
    for change in (lambda: graph.tensor("z", (1,)), lambda: graph.find_tensor("y").set_name("w")):
        with pytest.raises(StateError) as caught:
            change()
        assert caught.value.code == "GRAPH_FROZEN"


def test_execute_builds_from_wherever_the_graph_stands() -> None:
    for done in range(len(VERBS)):
        graph = _simple()
        for verb in VERBS[:done]:
            getattr(graph, verb)()
        out = torch.empty(2, 4)
        graph.execute({"x": -torch.ones(2, 4), "y": out})
        assert torch.equal(out, torch.zeros(2, 4))


def test_a_change_after_validate_is_validated_again() -> None:
    graph = _simple()
    graph.validate()
    graph.neg(graph.find_tensor("y")).set_output(True).set_data_type(DataType.DOUBLE)
    with pytest.raises(VerificationError) as caught:
        graph.build_operation_graph()
    assert caught.value.code == "DATA_TYPE_DOUBLE"


def test_invalid_graph_can_be_mended_and_validated_again() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    y = graph.relu(graph.tensor("x", (4,)))
    with pytest.raises(VerificationError) as caught:
        graph.build()
    assert caught.value.code == "NO_OUTPUT"
    y.set_output(True)
    assert torch.equal(graph({"x": -torch.ones(4)})[y], torch.zeros(4))


def test_unknown_modes_policies_and_targets() -> None:
    for build, code in (
        (lambda: _simple().build(heuristics=["B"]), "HEURISTICS"),
        (lambda: _simple().build(heuristics=[]), "HEURISTICS"),
        (lambda: _simple().build(policy="FASTEST"), "POLICY"),
        (lambda: _simple().build(arch="sm42"), "ARCH_UNKNOWN"),
        (lambda: _simple(device=None).build(device="cpu", arch="sm90"), "DEVICE_ARCH"),
        (lambda: _simple(device=None).build(device="meta"), "DEVICE_TYPE"),
    ):
        with pytest.raises(GraphNotSupportedError) as caught:
            build()
        assert caught.value.code == code
    with pytest.raises(StateError) as state:
        _simple().build(bindings={"M": 4})
    assert state.value.code == "BINDINGS_UNUSED"
    with pytest.raises(GraphError) as unknown:
        _simple().build(disable=["no_such_rule"])
    assert unknown.value.code == "DISABLE_UNKNOWN"


def test_modes_and_policies_may_be_cudnn_enums() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    graph = _simple().build([Named("A"), Named("FALLBACK")], Named("HEURISTICS_CHOICE"))
    assert graph.get_execution_plan_count() == 1 and graph.get_plan_name_at_index(0) == "unfused"


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_planning_for_an_arch_that_is_not_here() -> None:
    graph = Graph(arch="sm90", io_data_type=DataType.FLOAT)
    graph.relu(graph.tensor("x", (4,))).set_output(True)
    for verb in VERBS[:4]:
        getattr(graph, verb)()
    assert graph.plan.arch == "sm90"
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.build_plans()
    assert caught.value.code == "DEVICE_ARCH"


def test_plans_of_each_mode(tools: Any) -> None:
    kernels = ("test.grouped_gemm_dglu", "test.quantize_row_col", "unfused")
    for modes, want in ((["A"], kernels), (["FALLBACK"], ("unfused",)), (["FALLBACK", "A"], ("unfused", *kernels[:2]))):
        graph = tools.EmulatedGraph()
        tools.declare_dglu(graph)
        graph.build(modes)
        names = tuple(graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count()))
        assert names == want and graph.plan.name == want[0]
    unfused = tools.EmulatedGraph(fused=False)
    tools.declare_dglu(unfused)
    assert [p.name for p in unfused.build().plans] == ["unfused"] and not unfused.plan.fused


def test_selected_plan_runs_and_every_plan_agrees(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.build()
    pack = tools.random_pack(graph.operation_graph(), ROWS, seed=3)
    results = []
    for index in range(graph.get_execution_plan_count()):
        assert graph.select_plan(index) is graph
        assert graph.plan.name == graph.get_plan_name_at_index(index)
        results.append(graph(pack))
        assert graph.get_workspace_size({"M": ROWS}) == graph.get_workspace_size_plan_at_index(index, {"M": ROWS})
    for other in results[1:]:
        for name in other:
            assert torch.equal(results[0][name].view(torch.uint8), other[name].view(torch.uint8)), name
    for index in (-1, 99):
        with pytest.raises(StateError) as caught:
            graph.select_plan(index)
        assert caught.value.code == "PLAN_INDEX"


def test_deselected_engines_are_not_taken(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    for verb in VERBS[:4]:
        getattr(graph, verb)()
    with pytest.raises(StateError) as caught:
        graph.deselect_engines(["nobody"])
    assert caught.value.code == "ENGINE_UNKNOWN"
    graph.deselect_engines(["dglu"])
    with pytest.raises(StateError) as caught:
        graph.build_plans()
    assert caught.value.code == "VERB_ORDER", "what check_support said may no longer hold"
    graph.check_support()
    graph.build_plans()
    assert graph.plan.name == "test.quantize_row_col"
    with pytest.raises(StateError) as caught:
        graph.select_plan(0)
    assert caught.value.code == "PLAN_DESELECTED"
    with pytest.raises(StateError) as caught:
        graph.deselect_engines(["unfused"])
    assert caught.value.code == "VERB_ORDER"


def test_no_plan_left(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    for verb in VERBS[:3]:
        getattr(graph, verb)()
    graph.deselect_engines(["test", "unfused"])
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.check_support()
    assert caught.value.code == "NO_PLAN" and "unfused" in str(caught.value)


def test_kernel_that_does_not_build_gives_up_its_plan(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    absent = tools.stand_in("grouped_gemm_dglu", module="no_such_package_of_kernels")
    kernels = (absent, tools.stand_in("quantize_row_col"))
    graph = tools.EmulatedGraph(kernels=kernels)
    tools.declare_dglu(graph)
    with caplog.at_level("WARNING", logger="opfuse"):
        graph.build()
    assert graph.plan.name == "test.quantize_row_col"
    record = next(r for r in caplog.records if getattr(r, "code", "") == "BUILD_DECLINED")
    assert "no_such_package_of_kernels" in str(record.observed)  # type: ignore[attr-defined]
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.select_plan(0)
    assert caught.value.code == "BUILD_DECLINED" and isinstance(caught.value.__cause__, ImportError)
    strict = tools.EmulatedGraph(kernels=kernels, strict=True)
    tools.declare_dglu(strict)
    with pytest.raises(GraphNotSupportedError) as caught:
        strict.build()
    assert caught.value.code == "BUILD_DECLINED"


def test_fault_in_a_kernel_is_no_decline(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Any, device: Any) -> Any:
        raise ZeroDivisionError("a fault")

    import sys

    monkeypatch.setattr(sys.modules[tools.MODULE], "build", broken)
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    with pytest.raises(ZeroDivisionError):
        graph.build()


def test_strict_lists_every_reason_and_node(tools: Any) -> None:
    graph = Graph(strict=True, device="cpu")
    tools.declare_dglu(graph)
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.build()
    assert caught.value.code == "UNFUSED" and "fc2" in str(caught.value)
    fused = tools.EmulatedGraph(strict=True)
    tools.declare_dglu(fused)
    assert fused.build().plan.fused_steps
    for options in ({"fused": False}, {"heuristics": ["FALLBACK"]}):
        refused = tools.EmulatedGraph(strict=True)
        tools.declare_dglu(refused)
        with pytest.raises(GraphNotSupportedError) as caught:
            refused.build(**options)
        assert caught.value.code == "STRICT"


def test_policy_all_measures_every_plan_and_takes_the_winner(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.build(policy="ALL", bindings=[{"M": 64}, {"M": 256}])
    record = graph.tuning
    assert record is not None
    names = {p.name for p in graph.plans}
    for bucket in ((("M", 64),), (("M", 256),)):
        taken = {m.plan: m.seconds for m in record.measurements if m.bucket == bucket}
        assert set(taken) == names and all(s > 0 for s in taken.values())
        assert record.winners["cpu", bucket] == min(taken, key=lambda n: taken[n])
    record.winners["cpu", (("M", 64),)] = "unfused"
    record.winners["cpu", (("M", 256),)] = "test.grouped_gemm_dglu"
    chosen = graph._plan_set.choice  # type: ignore[union-attr]
    assert graph.plans[chosen({"M": 50})].name == graph.plans[chosen({"M": 3})].name == "unfused"
    assert graph.plans[chosen({"M": 200})].name == graph.plans[chosen({"M": 4096})].name == "test.grouped_gemm_dglu"
    pack = tools.random_pack(graph.operation_graph(), 60, seed=4)
    assert set(graph(pack)) == {"dprob", "dbias", "q_row", "sf_row", "q_col", "sf_col"}


def test_policy_all_with_nothing_to_choose_measures_nothing() -> None:
    graph = _simple().build(policy="ALL")
    assert graph.tuning is not None and not graph.tuning.measurements
    assert torch.equal(graph({"x": torch.ones(1, 4)})["y"], torch.ones(1, 4))


def test_nearest_bucket_serves_sizes_that_were_not_measured() -> None:
    cpu = torch.device("cpu")
    record = TuningRecord(
        {("cpu", (("M", 64),)): "small", ("cpu", (("M", 4096),)): "large", ("other", (("M", 512),)): "x"}
    )
    assert [record.winner(cpu, {"M": m}) for m in (1, 64, 65, 300, 600, 4096, 10**9)] == [
        "small", "small", "small", "small", "large", "large", "large",
    ]  # fmt: skip
    assert bucket_of({"b": 0, "a": 65}) == (("a", 128), ("b", 1))
    assert TuningRecord({("other", (("M", 1),)): "x"}).winner(cpu, {"M": 1}) is None


def test_progress_shows_on_a_terminal_only(tools: Any) -> None:
    from opfuse.graph_ops.buffers import Binder
    from opfuse.graph_ops.executor import compile_plan
    from opfuse.graph_ops.tuning import tune

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.build()
    cpu = torch.device("cpu")
    built = [compile_plan(p, cpu, kernels=tools.STAND_INS) for p in graph.plans]
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        tune(built, Binder(graph.operation_graph(), cpu), [{"M": 32}], TuningRecord(), stream=stream)
        assert ("measuring unfused" in stream.getvalue()) is shown


def test_workspace_size_over_symbols(tools: Any) -> None:
    graph = Graph(device="cpu")
    rows = graph.symbol("M", max=512)
    tools.declare_dglu(graph, rows=rows)
    sizes = [graph.get_workspace_size({"M": m}) for m in (0, 1, 64, 500, 512)]
    assert sizes == sorted(sizes) and sizes[-1] == graph.get_workspace_size()
    assert all(s % 256 == 0 for s in sizes)
    open_ended = Graph(device="cpu")
    tools.declare_dglu(open_ended)
    for bindings in (None, {"N": 3}):
        with pytest.raises(WorkspaceError) as caught:
            open_ended.get_workspace_size(bindings)
        assert caught.value.code == "WORKSPACE_SYMBOLS"


def test_handle_is_a_stream_or_nothing() -> None:
    graph = _simple()
    with pytest.raises(StateError) as caught:
        graph.execute({"x": torch.ones(1, 4), "y": torch.empty(1, 4)}, handle=12345)
    assert caught.value.code == "HANDLE"


def test_called_graph_returns_what_was_given_and_allocates_the_rest(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tensors = tools.declare_dglu(graph, keep_d=True)
    pack = tools.random_pack(graph.operation_graph(), ROWS, seed=5)
    mine = torch.full((ROWS,), float("nan"))
    out = graph({**pack, "dprob": mine})
    assert out["dprob"] is mine and not mine.isnan().any()
    assert set(out) == {"dh", "dprob", "dbias", "q_row", "sf_row", "q_col", "sf_col"} and len(out) == 7
    assert out[tensors["dh"]] is out["dh"] is out[tensors["dh"].uid]
    assert not any(out[n].requires_grad for n in out)


def test_allocated_outputs_have_the_declared_strides_and_alignment_and_are_no_views() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x = graph.tensor("x", (graph.symbol("M"), 6))
    graph.relu(x).set_output(True).set_name("strided").set_stride((1, 40))
    graph.neg(x).set_output(True).set_name("aligned").set_alignment_value(4096)
    graph.swish(x).set_output(True).set_name("plain")
    for rows in (0, 1, 40):
        value = torch.randn(rows, 6)
        out = graph({"x": value})
        assert torch.equal(out["strided"], value.relu()) and torch.equal(out["aligned"], -value)
        assert rows < 2 or out["strided"].stride() == (1, 40)
        assert out["aligned"].data_ptr() % 4096 == 0
        assert out["plain"]._base is None and out["strided"]._base is None


def test_outputs_of_one_name_stand_under_their_uids() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x = graph.tensor("x", (2,))
    one = graph.relu(x).set_output(True).set_name("y")
    two = graph.neg(x).set_output(True).set_name("y")
    out = graph({"x": torch.tensor([1.0, -1.0])})
    assert set(out) == {str(one.uid), str(two.uid)} and out[two].tolist() == [-1.0, 1.0]


def test_parameters_that_require_grad_are_inputs_like_any_other() -> None:
    graph = _simple()
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(graph({"x": x})["y"], x.detach().relu())


def test_threads_share_one_graph(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    op_graph = graph.operation_graph()
    packs = [tools.random_pack(op_graph, 16 * (i + 1), seed=i) for i in range(6)]
    want = []
    for pack in packs:
        alone = tools.EmulatedGraph()
        tools.declare_dglu(alone)
        want.append(alone(pack))
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(8):
            got = graph(packs[number])
            wrong.extend(n for n in got if not torch.equal(got[n].view(torch.uint8), want[number][n].view(torch.uint8)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(packs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
