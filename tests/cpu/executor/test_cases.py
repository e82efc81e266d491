"""Public fault reports that the planner and the executor must not repeat, named after their ids."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
import sys
import textwrap
import time
import types
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout, Graph, GraphNotSupportedError, ScaleLayout, StateError
from opfuse.graph_ops.buffers import Binder, Bound
from opfuse.graph_ops.content import IRRELEVANT, content_key
from opfuse.graph_ops.executor import compile_plan
from opfuse.graph_ops.ir import Node, OpGraph, TensorSpec, symbol
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES

CPU = torch.device("cpu")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_one_build_serves_twenty_token_counts(tools: Any) -> None:
    graph, unfused = tools.EmulatedGraph(), tools.EmulatedGraph(fused=False)
    for g in (graph, unfused):
        tools.declare_dglu(g)
        g.build()
    executables = set(map(id, graph._plan_set._executables.values()))  # type: ignore[union-attr]
    for rows in (0, 1, 2, 3, 5, 8, 31, 32, 33, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384):
        pack = tools.random_pack(graph.operation_graph(), rows, seed=rows)
        got, want = graph(pack), unfused(pack)
        for name in want:
            assert got[name].shape == want[name].shape and _equal(got[name], want[name]), (rows, name)
    assert set(map(id, graph._plan_set._executables.values())) == executables, "nothing was built again"  # type: ignore[union-attr]


def test_c01_rows_past_the_last_group_are_zero(tools: Any) -> None:
    rows, ends = 80, [16, 16, 48]
    for kind in (tools.EmulatedGraph, Graph):
        graph = kind(device="cpu")
        tools.declare_dglu(graph, keep_d=True)
        pack = tools.random_pack(graph.operation_graph(), rows, seed=11, ends=ends)
        for _ in range(3):
            torch.full((rows, 512), float("nan"))  # what the allocator hands out next is poisoned
            out = graph(pack)
            for name in ("dh", "dprob", "q_row"):
                assert not out[name][48:].float().any(), (kind.__name__, name)
            assert not out["dbias"].isnan().any() and not out["dbias"][1].any(), "expert 1 is empty"


def test_virtual_rows_past_the_last_group_do_not_leak(tools: Any) -> None:
    """A fused product that an op reads without offsets: its rows outside the groups must be zero there."""
    rows, ends = 64, [16, 16, 32]
    results = []
    for fused in (True, False):
        graph = tools.EmulatedGraph(fused=fused)
        m = graph.symbol("M")
        a, w = graph.tensor("a", (m, 64)), graph.tensor("w", (3, 64, 64), glu_layout=GluLayout.interleaved(32))
        offsets = graph.tensor("offs", (3,), data_type=DataType.INT32)
        y = graph.glu(graph.grouped_matmul(a, w, offsets), act="swiglu").set_data_type(DataType.BFLOAT16)
        graph.reduction(y, "ADD", 0).set_output(True).set_name("total")
        graph.build()
        assert bool(graph.plan.fused_steps) is fused
        pack = tools.random_pack(graph.operation_graph(), rows, seed=2, ends=ends)
        poisoned = tools.poison(torch.empty(graph.get_workspace_size({"M": rows}), dtype=torch.uint8))
        total = torch.empty(32, dtype=torch.bfloat16)
        graph.execute({**pack, "total": total}, poisoned)
        results.append(total)
    assert torch.equal(results[0], results[1]) and not results[0].isnan().any()


@pytest.mark.parametrize("rules", [(), ("grouped_gemm_dglu",)])
def test_c55_padding_of_scales_is_zero_in_the_callers_buffers(tools: Any, rules: tuple[str, ...]) -> None:
    """A product over padded scale atoms multiplies the padding by zeros: a NaN that is left there would spread."""
    rows = 96
    graph, oracle = tools.EmulatedGraph(disable=rules), tools.EmulatedGraph(fused=False)
    results = []
    for g in (graph, oracle):
        tools.declare_dglu(g)
        op_graph = g.operation_graph()
        outputs = tools.poisoned_outputs(op_graph, rows)
        pack = tools.random_pack(op_graph, rows, seed=8)
        g.execute({**pack, **outputs}, torch.empty(g.get_workspace_size({"M": rows}), dtype=torch.uint8))
        results.append({op_graph.tensors[uid].name: t for uid, t in outputs.items()})
    assert [s.rule for s in graph.plan.fused_steps] == (["quantize_row_col"] if rules else ["grouped_gemm_dglu"])
    got, want = results
    assert want["sf_row"].shape == (128, 4) and not want["sf_row"].view(torch.uint8).view(-1)[-4:].any()
    assert all(_equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("fused", [True, False])
def test_c26_no_rows_at_all_is_a_run_like_any_other(tools: Any, fused: bool) -> None:
    graph = tools.EmulatedGraph(fused=fused)
    tools.declare_dglu(graph)
    out = graph(tools.random_pack(graph.operation_graph(), 0, seed=0, ends=[0, 0, 0]))
    assert out["q_row"].shape == (0, 128) and out["dprob"].shape == (0,)
    assert out["dbias"].shape == (3, 128) and not out["dbias"].any()
    forward = tools.EmulatedGraph(fused=fused)
    m = forward.symbol("M")
    a, dy = forward.tensor("a", (m, 32)), forward.tensor("dy", (m, 64))
    offsets = forward.tensor("offs", (3,), data_type=DataType.INT32)
    forward.grouped_matmul_wgrad(a, dy, offsets).set_output(True).set_name("dw")
    pack = tools.random_pack(forward.operation_graph(), 0, seed=0, ends=[0, 0, 0])
    dw = tools.poison(torch.empty(3, 32, 64, dtype=torch.bfloat16))
    forward.execute({**pack, "dw": dw}, torch.empty(forward.get_workspace_size({"M": 0}), dtype=torch.uint8))
    assert not dw.any(), "a gradient over no rows is zero in full shape, not left as it was"


def test_c26_a_fused_kernel_is_not_launched_without_rows(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.StandIn, "run", lambda *a: pytest.fail("launched"))
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph(tools.random_pack(graph.operation_graph(), 0, seed=0, ends=[0, 0, 0]))


def test_c35_graphs_that_differ_in_a_clamp_share_neither_key_nor_result() -> None:
    def run(limit: float) -> tuple[str, torch.Tensor]:
        graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
        x = graph.tensor("x", (8, 64), glu_layout=GluLayout.interleaved(32))
        graph.glu(x, act="geglu", clamp_max=limit, clamp_min=-limit).set_output(True).set_name("y")
        return graph.key(), graph({"x": torch.linspace(-20, 20, 512).view(8, 64)})["y"]

    (key_7, y_7), (key_10, y_10), (again, same) = run(7.0), run(10.0), run(7.0)
    assert key_7 == again and torch.equal(y_7, same)
    assert key_7 != key_10 and not torch.allclose(y_7, y_10)


def test_c61_sizes_past_two_to_the_31_are_planned_exactly() -> None:
    graph = Graph(arch="sm90", device=None)
    rows = graph.symbol("M", max=2**22)
    experts, hidden, inter = 64, 14336, 4096
    a = graph.tensor("a", (rows, hidden))
    w = graph.tensor("w", (experts, hidden, 2 * inter), glu_layout=GluLayout.interleaved(32))
    offsets = graph.tensor("offs", (experts,), data_type=DataType.INT32)
    graph.glu(graph.grouped_matmul(a, w, offsets), act="swiglu").set_output(True)
    plan = make_plan(graph.operation_graph(), ARCHES["sm90"], fused=False)
    m = 2**22
    product = m * 2 * inter * 4
    assert product > 2**36 and plan.workspace.nbytes({"M": m}) == product
    w_spec = plan.graph.tensors[w.uid]
    assert w_spec.nbytes({}) == 64 * 14336 * 8192 * 2 > 2**33
    executable = compile_plan(plan, CPU, kernels=())
    placement = executable.placement({"M": m})
    ((_, start, end, *_),) = placement.views
    assert (start, end) == (0, product) and placement.nbytes == product
    binder = Binder(plan.graph, torch.device("meta"))
    buffers: dict[int, Any] = {
        a.uid: torch.empty(m, hidden, dtype=torch.bfloat16, device="meta"),
        w.uid: torch.empty(experts, hidden, 2 * inter, dtype=torch.bfloat16, device="meta"),
        offsets.uid: torch.empty(experts, dtype=torch.int32, device="meta"),
    }
    resolved = binder._resolve(buffers)
    assert resolved.bindings == {"M": m} and resolved.spans[:2] == (m * hidden * 2, w_spec.nbytes({}))


def test_c65_a_step_that_needs_the_host_refuses_capture_before_launch(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose stream is captured, with the driver stood in for."""
    graph = tools.EmulatedGraph(fused=False)
    m = graph.symbol("M")
    a, b = graph.tensor("a", (m, 32)), graph.tensor("b", (3, 32, 32), discrete=True)
    graph.grouped_matmul(a, b, graph.tensor("offs", (3,), data_type=DataType.INT32)).set_output(True).set_name("y")
    plan = graph.build().plan
    assert [s.capturable for s in plan.steps] == [False] and plan.steps[0].capture_reason
    executable = dataclasses.replace(compile_plan(plan, CPU), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    y = tools.poison(torch.empty(6, 32, dtype=torch.bfloat16))
    uids = {t.name: t.uid for t in plan.graph.tensors.values()}
    buffers: dict[int, Any] = {
        uids["a"]: torch.randn(6, 32).bfloat16(), uids["b"]: [torch.randn(32, 32).bfloat16() for _ in range(3)],
        uids["offs"]: torch.tensor([2, 4, 6], dtype=torch.int32), uids["y"]: y,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match="addresses") as caught:
        executable.run(Bound(buffers, {"M": 6}, ()), None)
    assert caught.value.code == "NOT_CAPTURABLE" and tools.is_poison(y)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    executable.run(Bound(buffers, {"M": 6}, ()), None)
    assert not tools.is_poison(y)


def test_c68_the_stream_is_torchs_current_one_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: int = 0) -> None:
            self.device = torch.device("cuda", device)

    entered: list[Any] = []

    def enter(stream: Any) -> contextlib.AbstractContextManager[None]:
        entered.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    graph.relu(graph.tensor("x", (2,))).set_output(True)
    on_gpu: Any = types.SimpleNamespace(device=torch.device("cuda", 0))
    with graph._stream(None, on_gpu):
        assert not entered, "no stream is made or chosen: work goes where torch's goes"
    mine = Stream()
    with graph._stream(mine, on_gpu):
        assert entered == [mine]
    for other in (0, Stream(1)):
        with pytest.raises(StateError) as caught:
            graph._stream(other, on_gpu)
        assert caught.value.code == "HANDLE", "a raw number could mean the legacy stream; another GPU has other memory"


def test_c70_every_field_of_a_tensor_changes_the_key_or_is_declared_irrelevant(tools: Any) -> None:
    graph = Graph(device="cpu")
    tools.declare_dglu(graph)
    op_graph = graph.operation_graph()
    spec = op_graph.tensors[graph.find_tensor("h").uid]
    m = symbol("M")
    changes: dict[str, Any] = {
        "name": "other", "dim": (m, 256), "stride": (192, 1), "data_type": DataType.HALF, "is_virtual": True,
        "is_output": True, "glu_layout": GluLayout.interleaved(16), "scale_layout": ScaleLayout(32, 1), "alignment": 32,
        "discrete": True, "multiple_of": 2, "value": 2.0, "location": None,
    }  # fmt: skip
    fields = {f.name for f in dataclasses.fields(TensorSpec)}
    assert fields == {*changes, "uid"}, "a new field needs a line here: does it change the key?"
    key = content_key(op_graph)
    for name, value in changes.items():
        changed = dataclasses.replace(spec, **{name: value})
        assert changed != spec
        tensors = {**op_graph.tensors, spec.uid: changed}
        same = content_key(dataclasses.replace(op_graph, tensors=tensors)) == key
        assert same is (name in IRRELEVANT["tensor"]), name
    for promise in ({"multiple_of": 8}, {"maximum": 4096}):
        other = symbol("M", **promise)
        tensors = {
            u: dataclasses.replace(t, dim=tuple(other if d == m else d for d in t.dim))
            for u, t in op_graph.tensors.items()
        }
        assert content_key(dataclasses.replace(op_graph, tensors=tensors)) != key, promise


def test_c70_every_field_of_graph_and_node_changes_the_key_or_is_declared_irrelevant(tools: Any) -> None:
    graph = Graph(device="cpu")
    tools.declare_dglu(graph)
    op_graph = graph.operation_graph()
    key = content_key(op_graph)
    top: dict[str, Any] = {
        "name": "x",
        "io_data_type": DataType.HALF,
        "intermediate_data_type": DataType.HALF,
        "deterministic": True,
    }
    assert {f.name for f in dataclasses.fields(OpGraph)} == {*top, "tensors", "nodes"}
    for name, value in top.items():
        same = content_key(dataclasses.replace(op_graph, **{name: value})) == key
        assert same is (name in IRRELEVANT["graph"]), name
    assert {f.name for f in dataclasses.fields(Node)} == {
        "index",
        "op",
        "name",
        "inputs",
        "outputs",
        "attributes",
        "location",
    }
    node = op_graph.nodes[1]
    changes: dict[str, Any] = {
        "name": "x", "location": None, "op": "glu", "inputs": node.inputs[:-1], "outputs": node.outputs[:1],
        "attributes": node.attributes[1:],
    }  # fmt: skip
    for name, value in changes.items():
        nodes = tuple(dataclasses.replace(n, **{name: value}) if n is node else n for n in op_graph.nodes)
        same = content_key(dataclasses.replace(op_graph, nodes=nodes)) == key
        assert same is (name in IRRELEVANT["node"]), name
    for place, (name, value) in enumerate(node.attributes):
        for other in ("tampered", 0.125) if not isinstance(value, bool) else (not value,):
            attributes = (*node.attributes[:place], (name, other), *node.attributes[place + 1 :])
            nodes = tuple(dataclasses.replace(n, attributes=attributes) if n is node else n for n in op_graph.nodes)
            assert content_key(dataclasses.replace(op_graph, nodes=nodes)) != key, name


def test_c70_one_graph_object_never_runs_with_another_size(tools: Any) -> None:
    """The second of two sizes must not reuse what was resolved for the first."""
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows, columns = graph.symbol("M"), graph.symbol("N")
    x = graph.tensor("x", (rows, columns))
    graph.group_sum(x, graph.tensor("offs", (1,), data_type=DataType.INT32)).set_output(True).set_name("y")
    for m, n in ((4, 384), (4, 512), (8, 384), (4, 384)):
        value = torch.randn(m, n)
        got = graph({"x": value, "offs": torch.tensor([m], dtype=torch.int32)})["y"]
        torch.testing.assert_close(got, value.sum(0, keepdim=True), rtol=1e-5, atol=1e-5)


def test_c75_new_weights_in_every_run(tools: Any) -> None:
    graph, oracle = tools.EmulatedGraph(), tools.EmulatedGraph(fused=False)
    for g in (graph, oracle):
        tools.declare_dglu(g)
    first = tools.random_pack(graph.operation_graph(), 64, seed=0)
    results = []
    for seed in range(4):
        fresh = tools.random_pack(graph.operation_graph(), 64, seed=seed)
        got, want = graph(fresh), oracle(fresh)
        assert all(_equal(got[n], want[n]) for n in want), f"seed {seed}"
        results.append(got["q_row"])
        for uid, buffer in first.items():  # the same addresses with other contents, as an optimizer step leaves them
            buffer.copy_(fresh[uid])
        again = graph(first)
        assert all(_equal(again[n], want[n]) for n in want), f"seed {seed}, in place"
    assert not _equal(results[0], results[1]), "the weights matter"


def test_c75_buffers_are_not_kept_alive(tools: Any) -> None:
    import gc
    import weakref

    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    pack = tools.random_pack(graph.operation_graph(), 64, seed=0)
    out = graph(pack)
    watched = [weakref.ref(t.untyped_storage()) for t in (*pack.values(), *out.values())]
    pack.clear()
    del out
    gc.collect()
    assert not [w for w in watched if w() is not None]


def test_c95_an_intermediate_that_is_an_output_is_written(tools: Any) -> None:
    for keep_d in (True, False):
        graph, oracle = tools.EmulatedGraph(), tools.EmulatedGraph(fused=False)
        for g in (graph, oracle):
            tools.declare_dglu(g, keep_d=keep_d)
        pack = tools.random_pack(graph.operation_graph(), 64, seed=6)
        got, want = graph(pack), oracle(pack)
        assert ("dh" in got) is keep_d and graph.plan.fused_steps
        assert set(got) == set(want) and all(_equal(got[n], want[n]) for n in want)
    product, oracle = tools.EmulatedGraph(), tools.EmulatedGraph(fused=False)
    for g in (product, oracle):
        tools.declare_dglu(g)
        g.find_tensor("fc2::y").set_output(True)
    pack = tools.random_pack(product.operation_graph(), 64, seed=6)
    got, want = product(pack), oracle(pack)
    assert "fc2::y" in got and all(_equal(got[n], want[n]) for n in want)
    assert "grouped_gemm_dglu" not in [s.rule for s in product.plan.steps], "the product is wanted, so it cannot vanish"


def test_c109_each_fallback_is_one_structured_record(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    def build(**options: Any) -> Graph:
        graph = Graph(device="cpu", **options)
        tools.declare_dglu(graph)
        with caplog.at_level(logging.INFO, logger="opfuse.rules"):
            caplog.clear()
            return graph.build()

    graph = build()
    records = [r for r in caplog.records if r.name == "opfuse.rules"]
    by_node = {r.node: r for r in records}  # type: ignore[attr-defined]
    assert len(by_node) == len(records), "one record a node"
    record: Any = by_node["fc2"]
    assert (record.graph, record.rule, record.code) == ("graph", "grouped_gemm_dglu", "ARCH")
    assert record.observed == "cpu" and record.required and record.reasons
    assert graph.plan.reasons, "the plan has the reasons as well"
    build(fused=False)
    assert not [r for r in caplog.records if r.name == "opfuse.rules"], "nothing fell back: it was asked for"


def test_c109_opfuse_log_shows_what_it_is_asked_for() -> None:
    script = """
        from opfuse.graph_ops import Graph, DataType
        g = Graph(arch="sm100")
        a, b = g.tensor("a", (g.symbol("M"), 8)), g.tensor("b", (2, 8, 8))
        g.grouped_matmul(a, b, g.tensor("o", (2,), data_type=DataType.INT32)).set_output(True)
        g.validate(); g.build_operation_graph(); g.create_execution_plans()
    """
    shown = {}
    for text in ("", "info", "plan", "+plan,rules", "loud"):
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True,
            env={"PATH": "", "OPFUSE_LOG": text},
        )  # fmt: skip
        assert run.stdout == ""
        shown[text] = run.stderr
    assert shown[""] == ""
    assert "opfuse.plan" in shown["info"] and "opfuse.rules" in shown["info"]
    assert "opfuse.plan" in shown["plan"] and "opfuse.rules" not in shown["plan"]
    assert "opfuse.plan" in shown["+plan,rules"] and "opfuse.rules" in shown["+plan,rules"]
    assert "unknown ['loud']" in shown["loud"], "a word that means nothing is not ignored"


def test_c111_error_names_rule_check_observed_required_and_next_step(tools: Any) -> None:
    graph = Graph(strict=True, device="cpu", name="backward")
    tools.declare_dglu(graph)
    for verb in ("validate", "build_operation_graph", "create_execution_plans"):
        getattr(graph, verb)()
    with pytest.raises(GraphNotSupportedError) as caught:
        graph.check_support()
    text = str(caught.value)
    first, *lines = text.splitlines()
    assert first.startswith("UNFUSED: strict=True for graph backward on cpu; seen ") and "fc2" in first
    wanted = "rule grouped_gemm_dglu, kernel cudnn.grouped_gemm_dglu.bf16 (matched but unsupported): check "
    described = [line.strip() for line in lines if line.strip().startswith(wanted)]
    assert described, text
    for line in described:
        for part in ("check ", "observed ", "required ", "next: "):
            assert part in line, line
    assert "hint: " in text and "conftest.py:" in text


def test_c112_check_support_is_cheap_and_imports_no_kernel() -> None:
    script = """
        import sys, time
        from opfuse.graph_ops import DataType, GluLayout, Graph
        g = Graph(arch="sm100")
        m = g.symbol("M", multiple_of=256)
        offs = g.tensor("o", (2,), data_type=DataType.INT32)
        r = g.grouped_matmul(g.tensor("a", (m, 64)), g.tensor("b", (2, 64, 64)), offs)
        dh, dprob = g.glu_backward(r, g.tensor("h", (m, 128), glu_layout=GluLayout.interleaved(32)), act="swiglu")
        for t in (dh.set_data_type(DataType.BFLOAT16), dprob):
            t.set_output(True)
        g.validate(); g.build_operation_graph(); g.create_execution_plans()
        start = time.perf_counter()
        g.check_support()
        print(time.perf_counter() - start)
        heavy = [m for m in ("cutlass", "cudnn", "cuda", "torch") if m in sys.modules]
        assert not heavy, heavy
    """
    runs = [
        float(
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    ]
    assert min(runs) < 5e-3


def test_c115_what_a_machine_can_run_is_asked_of_the_plan(tools: Any) -> None:
    graph = Graph(device="cpu")
    tools.declare_dglu(graph)
    op_graph = graph.operation_graph()
    entry = tools.stand_in("grouped_gemm_dglu")
    fused = {name for name, arch in ARCHES.items() if make_plan(op_graph, arch, kernels=(entry,)).fused_steps}
    assert fused == {"sm90"}, "the kernel's own range decides, for every arch, without a device"
    for name in set(ARCHES) - fused:
        reasons = make_plan(op_graph, ARCHES[name], kernels=(entry,)).reasons
        assert any(r.code == "ARCH" and r.observed == name for r in reasons)


def test_importing_is_light() -> None:
    script = """
        import sys, time
        start = time.process_time()  # the processor's time, whoever else the machine serves
        from opfuse.graph_ops import Graph
        Graph().symbol("M")
        print(time.process_time() - start)
        heavy = [m for m in ("torch", "cutlass", "cudnn", "cuda", "networkx", "numpy") if m in sys.modules]
        assert not heavy, heavy
    """
    seconds = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        seconds.append(float(run.stdout))
    assert min(seconds) < 0.3


def test_running_on_the_cpu_loads_neither_the_dsl_nor_cuda() -> None:
    script = """
        import sys, torch
        from opfuse.graph_ops import DataType, Graph
        g = Graph(device="cpu", io_data_type=DataType.FLOAT)
        g.relu(g.tensor("x", (4,))).set_output(True).set_name("y")
        assert g({"x": -torch.ones(4)})["y"].sum() == 0
        assert not {"cutlass", "cudnn", "networkx"} & set(sys.modules) and not torch.cuda.is_initialized()
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_many_sizes_do_not_grow_the_caches(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    graph.build()
    binder, executable = graph._binder, next(iter(graph._plan_set._executables.values()))  # type: ignore[union-attr]
    assert binder is not None
    start = time.perf_counter()
    for rows in range(1, 600):
        pack = {uid: torch.empty_like(t) for uid, t in tools.random_pack(graph.operation_graph(), rows, 0).items()}
        pack[graph.find_tensor("offs").uid] = torch.zeros(3, dtype=torch.int32)
        executable.workspace_bytes(binder.bind(binder.collect(pack, outputs_required=False)).bindings)
        assert time.perf_counter() - start < 60
    assert len(binder._seen) <= binder.CACHE_LIMIT and len(executable._placements) <= executable.CACHE_LIMIT
