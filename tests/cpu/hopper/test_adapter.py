"""Graphs of every option on sm90, planned and run on a machine without a GPU: the planner, the adapter and the host
code are the real ones, and only the compiled function is emulated. The cases are those of tests/gpu, where the kernel
runs."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.graph_ops import VariantPackError
from opfuse.kernels.hopper import dglu_support, grouped_dglu, launched
from opfuse.kernels.sm90 import dglu_host
from opfuse.kernels.sm90.dglu_config import DgluConfig

GPU = Path(__file__).parents[2] / "gpu"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CASES = tuple(_load("graph_dglu").CASES)
TESTS = _load("test_graph_dglu")


@pytest.fixture
def gpu(emulation: ModuleType, emulated: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The helpers of the GPU tests, on the CPU with the emulated kernel."""
    module = sys.modules["graph_dglu"]
    for held in (module, TESTS):
        monkeypatch.setattr(held, "DEVICE", "cpu")
        monkeypatch.setattr(held, "new_graph", emulation.EmulatedGraph)
    kept = module.separate  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "separate", lambda b: emulation.keep(kept(b)))
    yield module


@pytest.mark.parametrize("name", CASES)
def test_planned_on_sm90_equals_unfused_and_float64(gpu: Any, emulated: list[Any], name: str, seed: int) -> None:
    gpu.check(gpu.CASES[name], seed)
    assert len(emulated) == 1 and emulated[0].calls == 2, "one configuration; an execute and a call"


@pytest.mark.parametrize(
    "test",
    ["test_c26_no_rows", "test_c02_nothing_of_recycled_memory_shows", "test_c36_clamped_gradients_keep_equality",
     "test_deterministic_graph_repeats_bit_by_bit", "test_columns_of_wider_matrices_on_both_sides",
     "test_c17_what_the_tma_cannot_take_is_declined_before_any_launch", "test_c24_versioned_dlpack_capsules",
     "test_c57_nothing_is_written_beside_the_outputs"],
)  # fmt: skip
def test_of_the_gpu_holds_here(gpu: Any, test: str) -> None:
    getattr(TESTS, test)()


@pytest.mark.parametrize("shift", [256, 8])
def test_c23_views_that_begin_inside_an_allocation(gpu: Any, shift: int) -> None:
    TESTS.test_c23_views_that_begin_inside_an_allocation(shift)


def test_every_configuration_of_the_gpu_tests_is_legal(gpu: Any) -> None:
    from opfuse.kernels.sm90.dglu_config import illegal

    found = gpu.configurations([*gpu.CASES.values(), gpu.BIG, gpu.TUNED, gpu.MANY, gpu.LONG, gpu.HEAVY, gpu.GRID])
    assert len(found) > 25 and [c for c in found if illegal(c)] == []


def test_one_configuration_serves_every_row_count(gpu: Any, emulated: list[Any], seed: int) -> None:
    case = gpu.CASES["prob"]
    graph, _ = gpu.build(case)
    for rows in (1, 31, 128, 500):
        gpu.run(
            graph, inputs := gpu.operands(replace(case, sizes=(rows, 0, 0, 0, 0, 0)), seed), gpu.poisoned(case, rows)
        )
        assert inputs["a"].shape[0] == rows
    assert len(emulated) == 1 and emulated[0].calls == 4


@pytest.mark.parametrize("columns, names", [(128, ()), (96, ("sf_row", "sf_col"))])
def test_nothing_is_zeroed_for_the_kernel_but_scales_with_padding_inside(
    gpu: Any, columns: int, names: tuple[str, ...]
) -> None:
    """The kernel zeroes what lies outside every group itself: a call does not fill its outputs first."""
    graph, tensors = gpu.build(replace(gpu.CASES["everything"], N=columns))
    executable = graph._plan_set.executable(0)
    assert executable.partly_written | set(executable.steps[0].zeroed) == {tensors[name].uid for name in names}


# ------------------------------------------------------------------ repeated calls


@pytest.fixture
def ready(gpu: Any, seed: int) -> tuple[Any, dict[Any, torch.Tensor], torch.Tensor]:
    """A built graph, a pack that was executed once, and its workspace."""
    case = gpu.CASES["prob"]
    graph, _ = gpu.build(case)
    inputs = gpu.operands(case, seed)
    rows = inputs["a"].shape[0]
    pack = {**inputs, **gpu.poisoned(case, rows)}
    memory = torch.empty(graph.get_workspace_size({"M": rows}) + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :]
    graph.execute(pack, memory)
    return graph, pack, memory


def test_the_same_call_again_is_the_launch_alone(
    ready: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opfuse.graph_ops.buffers import Binder
    from opfuse.graph_ops.executor import Executable

    graph, pack, memory = ready
    wanted = {name: t.clone() for name, t in pack.items()}
    for held, name in ((Binder, "bind"), (Executable, "launch")):
        monkeypatch.setattr(held, name, lambda *a, name=name, **k: pytest.fail(f"{name} again"))
    for name in ("d", "dprob"):
        pack[name].fill_(torch.nan)
    with torch.autocast("cpu", enabled=False):
        graph.execute(pack, memory)
    assert emulated[0].calls == 2
    for name, t in wanted.items():
        torch.testing.assert_close(pack[name], t, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda pack: pack["d"].set_(pack["c"]), "ALIASED"),
        (lambda pack: pack["d"].resize_(pack["d"].shape[0] - 1, pack["d"].shape[1]), "SHAPE"),
        (lambda pack: pack["d"].as_strided_(pack["d"].shape, (1, pack["d"].shape[0])), "STRIDE"),
        (lambda pack: setattr(pack["c"], "data", pack["c"].float()), "DATA_TYPE"),
        (lambda pack: pack["dprob"].requires_grad_(), "REQUIRES_GRAD"),
        (lambda pack: pack["d"].set_(torch.zeros(pack["d"].numel() + 8).bfloat16()[1:-7].view(pack["d"].shape)),
         "ALIGNMENT"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_changed_in_place_is_refused_before_the_launch(
    ready: Any, emulated: list[Any], change: Any, code: str
) -> None:
    graph, pack, memory = ready
    graph.execute(pack, memory)
    change(pack)
    with pytest.raises(VariantPackError) as caught:
        graph.execute(pack, memory)
    assert caught.value.code == code or (code == "SHAPE" and "M" in str(caught.value))
    assert emulated[0].calls == 2


def test_a_plan_that_no_capture_takes_is_asked_at_every_call(ready: Any) -> None:
    graph, pack, memory = ready
    executable = graph._plan_set.executable(0)
    found = graph._plan_set.repeated(graph._binder, pack, memory)
    given = (found.buffers, found.call.bindings, memory)
    assert executable.prepare(*given) is not None
    assert replace(executable, not_capturable=("a step",)).prepare(*given) is None


def test_threads_repeat_their_own_calls(gpu: Any, emulated: list[Any], seed: int) -> None:
    graph, _ = gpu.build(gpu.CASES["prob"])
    wrong: list[Any] = []

    def work(turn: int) -> None:
        case = replace(gpu.CASES["prob"], sizes=(10 + turn, 0, 3, 0, 0, 0), tail=0)
        inputs = gpu.operands(case, seed + turn)
        pack = {**inputs, **gpu.poisoned(case, inputs["a"].shape[0])}
        memory = torch.empty(graph.get_workspace_size({"M": inputs["a"].shape[0]}) + 256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :]
        graph.execute(pack, memory)
        first = pack["d"].clone()
        for _ in range(5):
            pack["d"].fill_(torch.nan)
            graph.execute(pack, memory)
            if not torch.equal(pack["d"], first):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and emulated[0].calls == 8 * 6


# ------------------------------------------------------------------ the adapter alone


def built(make_problem: Any, **options: Any) -> tuple[Any, Any]:
    problem = make_problem(**options)
    return problem, grouped_dglu.build(problem, "cpu")


def buffers_of(problem: Any, rows: int) -> dict[str, Any]:
    return {
        role: torch.zeros(t.shape({"M": rows}), dtype=getattr(torch, t.data_type.info.torch_name))
        for role, t in problem.tensors.items()
    }


def test_roles_reach_their_arguments(emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any) -> None:
    roles = ("alpha", "beta", "prob", "activation", "dbias", "amax", "q_row", "q_col")
    problem, kernel = built(make_problem, roles=roles)
    buffers, memory = buffers_of(problem, 256), torch.zeros(kernel.workspace_bytes({"M": 256}), dtype=torch.uint8)
    kernel.run(buffers, memory, {"M": 256})
    (call,) = seen
    names = {"a": "dy"}
    assert {names.get(role, role) for role in problem.tensors} | {"workspace"} == set(call)
    for role, buffer in buffers.items():
        given = call[names.get(role, role)]
        shape = (buffer.numel(),) if role.startswith("sf_") else buffer.shape
        assert given.data_ptr() == buffer.data_ptr() and given.shape == shape, role
        assert given.itemsize == buffer.itemsize and (role == "b" or given.is_contiguous()), role
    assert call["workspace"].data_ptr() == memory.data_ptr() and len(call["workspace"]) <= len(memory)


def test_prob_of_rank_two_is_a_vector_of_the_same_memory(
    emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any
) -> None:
    problem, kernel = built(make_problem, roles=("prob",))
    buffers = buffers_of(problem, 128)
    buffers["prob"] = torch.zeros(128, 1)
    kernel.run(buffers, torch.zeros(kernel.workspace_bytes({"M": 128}), dtype=torch.uint8), {"M": 128})
    assert seen[0]["prob"].shape == (128,) and seen[0]["prob"].data_ptr() == buffers["prob"].data_ptr()


@pytest.mark.parametrize("options", [dict(), dict(roles=("dbias", "amax")), dict(without=("dprob",))])
@pytest.mark.parametrize("discrete", [False, True])
def test_workspace_is_the_kernels_bytes_and_then_the_addresses(
    emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any, options: Any, discrete: bool
) -> None:
    problem, kernel = built(make_problem, experts=3, changes={"b": dict(discrete=discrete)}, **options)
    config, n = dglu_support.scheduled(problem), 64
    for rows in (0, 1, 127, 1000):
        own = dglu_host.workspace_bytes(config, 3, rows, n)
        rounded = -(-own // 256) * 256
        assert kernel.workspace_bytes({"M": rows}) == rounded + 24 * discrete
    if discrete:
        buffers = buffers_of(problem, 1000)
        buffers["b"] = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
        memory = torch.zeros(kernel.workspace_bytes({"M": 1000}), dtype=torch.uint8)
        kernel.run(buffers, memory, {"M": 1000})
        addresses = seen[-1]["b"]
        assert addresses.tolist() == [e.data_ptr() for e in buffers["b"]] and addresses.dtype is torch.int64
        assert addresses.data_ptr() == memory.data_ptr() + rounded


def test_addresses_of_the_caller_are_passed_on(
    emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any
) -> None:
    problem, kernel = built(make_problem, changes={"b": dict(discrete=True)})
    buffers = buffers_of(problem, 128)
    buffers["b"] = torch.tensor([64, 128])
    kernel.run(buffers, torch.zeros(kernel.workspace_bytes({"M": 128}), dtype=torch.uint8), {"M": 128})
    assert seen[0]["b"].data_ptr() == buffers["b"].data_ptr() and seen[0]["b"].tolist() == [64, 128]


@pytest.mark.parametrize("rows", [1, 300])
def test_a_prepared_launch_is_the_run_of_the_same_buffers(
    emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any, rows: int
) -> None:
    problem, kernel = built(make_problem, roles=("prob", "dbias"))
    buffers, bindings = buffers_of(problem, rows), {"M": rows}
    memory = torch.zeros(kernel.workspace_bytes(bindings), dtype=torch.uint8)
    kernel.run(buffers, memory, bindings)
    prepared = kernel.prepare(buffers, memory, bindings)
    held = {role: weakref.ref(buffer) for role, buffer in buffers.items()}
    prepared(0)
    first, second = ({n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in call.items()} for call in seen)
    assert first == second
    seen.clear()
    del buffers
    gc.collect()
    assert [role for role, tensor in held.items() if tensor() is not None] == []


def test_what_is_more_than_a_launch_is_not_prepared(emulated: list[Any], make_problem: Any) -> None:
    """Rows that no expert can own, and addresses that are copied to the device at each run."""
    problem, kernel = built(make_problem, roles=("q_col",))
    assert kernel.prepare(buffers_of(problem, 31), None, {"M": 31}) is None
    problem, kernel = built(make_problem, changes={"b": dict(discrete=True)})
    experts = [torch.zeros(64, 64, dtype=torch.bfloat16)] * 2
    assert kernel.prepare({**buffers_of(problem, 31), "b": experts}, None, {"M": 31}) is None


def tensors_of(config: Any, rows: int = 256, k: int = 64, n: int = 64, experts: int = 2) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    return {
        "dy": torch.zeros(rows, k, dtype=bf16), "b": torch.zeros(experts, n, k, dtype=bf16).transpose(1, 2),
        "offsets": torch.zeros(experts, dtype=torch.int32), "c": torch.zeros(rows, 2 * n, dtype=bf16),
        "d": torch.zeros(rows, 2 * n, dtype=bf16), "dprob": torch.zeros(rows),
        "workspace": torch.zeros(dglu_host.workspace_bytes(config, experts, rows, n) + 128, dtype=torch.uint8),
    }  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t | {"d": t["d"].float()}, r"d is torch.float32 \(256, 128\).*required is bfloat16 \(256, 128\)"),
        (lambda t: t | {"d": t["d"][:255]}, r"d is torch.bfloat16 \(255, 128\)"),
        (lambda t: t | {"d": t["d"].view(-1)[8:].as_strided((256, 128), (124, 1))}, r"strides \(124, 1\)"),
        (lambda t: t | {"c": t["c"].t().contiguous().t()}, r"c is .*strides \(1, 256\)"),
        (lambda t: t | {"dy": torch.zeros(256 * 64 + 1, dtype=torch.bfloat16)[1:].view(256, 64)}, "multiple of 16"),
        (lambda t: t | {"b": t["b"].contiguous()}, r"b is .*strides \(4096, 64, 1\)"),
        (lambda t: t | {"offsets": t["offsets"].long()}, "offsets is torch.int64"),
        (lambda t: t | {"dprob": torch.zeros(512)[::2]}, r"dprob is .*strides \(2,\)"),
        (lambda t: t | {"dprob": t["dprob"].to("meta")}, "on meta"),
        (lambda t: t | {"prob": torch.zeros(256)}, "prob is given, and not configured"),
        (lambda t: {n: x for n, x in t.items() if n != "dprob"}, "dprob is missing"),
        (lambda t: t | {"workspace": t["workspace"][:128]}, "workspace has 128 bytes; required are 1024"),
        (lambda t: t | {"c": t["c"].view(-1)}, r"c has shape \(32768,\); required is rank 2"),
    ],
)  # fmt: skip
def test_launch_refuses_tensors_that_the_function_cannot_take(
    emulation: ModuleType, emulated: list[Any], change: Any, said: str
) -> None:
    config = DgluConfig(has_dprob=True)
    dglu_host.FUNCTIONS.install(config, function := emulation.Emulated(config))
    memory = torch.zeros(2**16, dtype=torch.uint8)
    tensors = tensors_of(config) | {"workspace": memory[-memory.data_ptr() % 128 :]}
    dglu_host.launch(config, **tensors)
    assert function.calls == 1
    with pytest.raises(ValueError, match=said):
        dglu_host.launch(config, **change(tensors))
    assert function.calls == 1


def test_a_misaligned_expert_is_refused_before_the_launch(
    emulated: list[Any], seen: list[dict[str, Any]], make_problem: Any
) -> None:
    problem, kernel = built(make_problem, changes={"b": dict(discrete=True)})
    buffers = buffers_of(problem, 128)
    odd = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    buffers["b"] = [odd, odd]
    with pytest.raises(VariantPackError, match=r"ALIGNMENT.*experts \[0, 1\]"):
        kernel.run(buffers, torch.zeros(kernel.workspace_bytes({"M": 128}), dtype=torch.uint8), {"M": 128})
    assert seen == []


def test_no_rows_give_zero_sums_without_a_launch(emulated: list[Any], make_problem: Any) -> None:
    problem, kernel = built(make_problem, roles=("dbias", "amax"))
    buffers = buffers_of(problem, 0)
    for role in ("dbias", "amax"):
        buffers[role].fill_(float("nan"))
    kernel.run(buffers, torch.zeros(kernel.workspace_bytes({"M": 0}), dtype=torch.uint8), {"M": 0})
    assert emulated[0].calls == 0 and not buffers["dbias"].any() and not buffers["amax"].any()


def test_a_variant_is_the_same_kernel_with_another_schedule(emulated: list[Any], make_problem: Any, entry: Any) -> None:
    problem = make_problem(k=2048, n=768)
    names = entry.variants(problem)
    kernels = [entry.build(problem, "cpu", name) for name in (None, *names)]
    assert len(names) >= 3 and len({k.config.schedule for k in kernels}) == len(kernels) == len(emulated)
    assert {replace(k.config, schedule=kernels[0].config.schedule) for k in kernels} == {kernels[0].config}


def test_a_build_without_the_dsl_is_an_import_error(
    make_problem: Any, entry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The executor takes that as a decline: the graph then runs unfused."""
    from opfuse.kernels.cache import KernelCache

    monkeypatch.setattr(grouped_dglu, "kernel_cache", lambda: KernelCache(tmp_path))
    monkeypatch.setattr(launched, "origin", lambda: ("0" * 64, {}))
    for name in [m for m in sys.modules if m == "cutlass" or m.startswith("cutlass.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.delitem(sys.modules, "opfuse.kernels.sm90.dglu_entry", raising=False)
    with pytest.raises(ImportError):
        entry.build(make_problem(), "cpu")
