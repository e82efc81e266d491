"""Forward graphs of every option on sm90, planned and run on a machine without a GPU: the planner, the adapter and the
host code are the real ones, and only the compiled function is emulated. The cases are those of tests/gpu."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.kernels.hopper import grouped_glu
from opfuse.kernels.sm90 import glu_host
from opfuse.kernels.sm90.glu_config import GluConfig, illegal

GPU = Path(__file__).parents[2] / "gpu"


def _load(name: str) -> ModuleType:
    if name in sys.modules:  # another file's tests patch the same module
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_load("graph_dglu")
GLU = _load("graph_glu")
TESTS = _load("test_graph_glu")


@pytest.fixture
def gpu(emulation: ModuleType, emulated: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The helpers of the GPU tests, on the CPU with the emulated kernel."""
    shared = GLU.shared
    monkeypatch.setattr(shared, "DEVICE", "cpu")
    monkeypatch.setattr(shared, "new_graph", emulation.EmulatedGraph)
    kept = shared.separate
    monkeypatch.setattr(shared, "separate", lambda b: emulation.keep(kept(b)))
    yield GLU


@pytest.mark.parametrize("name", GLU.CASES)
def test_planned_on_sm90_equals_unfused_and_float64(gpu: Any, emulated: list[Any], name: str, seed: int) -> None:
    gpu.check(gpu.CASES[name], seed)
    assert len(emulated) == 1 and emulated[0].calls == 2, "one configuration; an execute and a call"


def test_rows_that_are_wanted_as_zero_agree_where_they_are(gpu: Any) -> None:
    """Three rows that all draw a prob of zero, which one seed in eighty gives."""
    gpu.check(gpu.CASES["one row each"], 84)
    zero, other = torch.zeros(4), torch.ones(4)
    assert gpu.shared.cosine(other, zero) == gpu.shared.cosine(zero, other) == 0.0


@pytest.mark.parametrize("name", GLU.CODES)
def test_codes_planned_on_sm90_equal_unfused(gpu: Any, emulated: list[Any], name: str, seed: int) -> None:
    gpu.check_codes(gpu.CODES[name], seed)
    assert len(emulated) == 1 and emulated[0].calls == 1


@pytest.mark.parametrize(
    "test", ["test_one_build_serves_every_row_count_and_split", "test_columns_of_wider_matrices_on_both_sides"]
)
def test_of_the_gpu_holds_here(gpu: Any, emulated: list[Any], test: str) -> None:
    getattr(TESTS, test)()
    assert len(emulated) == 1


def test_every_configuration_of_the_gpu_tests_is_legal(gpu: Any) -> None:
    found = gpu.configurations(list(gpu.CASES.values()))
    assert len(found) > 15 and [c for c in found if illegal(c)] == []


# ------------------------------------------------------------------ the adapter alone


def built(make_glu_problem: Any, **options: Any) -> tuple[Any, Any]:
    problem = make_glu_problem(**options)
    return problem, grouped_glu.build(problem, "cpu")


def buffers_of(problem: Any, rows: int) -> dict[str, Any]:
    return {
        role: torch.zeros(t.shape({"M": rows}), dtype=getattr(torch, t.data_type.info.torch_name))
        for role, t in problem.tensors.items()
    }


def test_roles_reach_their_arguments(emulated: list[Any], seen: list[Any], make_glu_problem: Any) -> None:
    problem, kernel = built(make_glu_problem, roles=("alpha", "bias", "prob"))
    buffers = buffers_of(problem, 256)
    assert kernel.workspace_bytes({"M": 256}) == 0
    kernel.run(buffers, None, {"M": 256})
    (call,) = seen
    names = {"a": "x", "c": "h"}
    assert {names.get(role, role) for role in problem.tensors} == set(call)
    for role, buffer in buffers.items():
        given = call[names.get(role, role)]
        assert given.data_ptr() == buffer.data_ptr() and given.shape == buffer.shape, role
        assert given.dtype is buffer.dtype and (role == "b" or given.is_contiguous()), role


def test_separate_experts_travel_as_addresses_behind_the_descriptors(
    emulated: list[Any], seen: list[Any], make_glu_problem: Any
) -> None:
    problem, kernel = built(make_glu_problem, experts=3, changes={"b": dict(discrete=True)})
    own = glu_host.workspace_bytes(kernel.config, 3)
    rounded = -(-own // 256) * 256
    assert own >= 3 * 128 and kernel.workspace_bytes({"M": 64}) == rounded + 24
    buffers = buffers_of(problem, 64)
    buffers["b"] = [torch.zeros(128, 64, dtype=torch.bfloat16).t() for _ in range(3)]
    memory = torch.zeros(rounded + 24 + 128, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 128 :][: rounded + 24]
    kernel.run(buffers, memory, {"M": 64})
    assert seen[0]["b"].tolist() == [e.data_ptr() for e in buffers["b"]]
    assert seen[0]["b"].data_ptr() == memory.data_ptr() + rounded
    assert kernel.prepare(buffers, memory, {"M": 64}) is None, "addresses are copied at each run"


def test_a_prepared_launch_is_the_run_of_the_same_buffers(
    emulated: list[Any], seen: list[Any], make_glu_problem: Any
) -> None:
    problem, kernel = built(make_glu_problem, roles=("prob",))
    buffers, bindings = buffers_of(problem, 300), {"M": 300}
    kernel.run(buffers, None, bindings)
    kernel.prepare(buffers, None, bindings)(0)
    first, second = ({n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in call.items()} for call in seen)
    assert first == second


def test_no_rows_are_no_launch(emulated: list[Any], make_glu_problem: Any) -> None:
    problem, kernel = built(make_glu_problem)
    kernel.run(buffers_of(problem, 0), None, {"M": 0})
    assert emulated[0].calls == 0


def test_a_variant_is_the_same_kernel_with_another_schedule(
    emulated: list[Any], make_glu_problem: Any, glu_entry: Any
) -> None:
    problem = make_glu_problem(k=2048, n=768)
    kernels = [glu_entry.build(problem, "cpu", name) for name in (None, *glu_entry.variants(problem))]
    assert len({k.config.schedule for k in kernels}) == len(kernels) == len(emulated) >= 3
    assert {replace(k.config, schedule=kernels[0].config.schedule) for k in kernels} == {kernels[0].config}


# ------------------------------------------------------------------ the launch alone

CONFIG = GluConfig(product_dtype="bf16", h_dtype="bf16")


def tensors_of(rows: int = 256, k: int = 64, n: int = 64, experts: int = 2) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    return {
        "x": torch.ones(rows, k, dtype=bf16), "b": torch.ones(experts, 2 * n, k, dtype=bf16).transpose(1, 2),
        "offsets": torch.tensor([rows // 2, rows], dtype=torch.int32), "h": torch.zeros(rows, 2 * n, dtype=bf16),
        "d": torch.zeros(rows, n, dtype=bf16),
    }  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t | {"d": t["d"].float()}, r"d is torch.float32 \(256, 64\).*required is bfloat16 \(256, 64\)"),
        (lambda t: t | {"h": t["h"][:255]}, r"h is torch.bfloat16 \(255, 128\)"),
        (lambda t: t | {"h": t["h"][:, :64]}, r"h is torch.bfloat16 \(256, 64\).*required is bfloat16 \(256, 128\)"),
        (lambda t: t | {"d": t["d"].view(-1)[4:].as_strided((256, 64), (60, 1))}, r"strides \(60, 1\)"),
        (lambda t: t | {"x": torch.zeros(256 * 64 + 1, dtype=torch.bfloat16)[1:].view(256, 64)}, "multiple of 16"),
        (lambda t: t | {"b": t["b"].contiguous()}, r"b is .*strides \(8192, 128, 1\)"),
        (lambda t: t | {"b": t["b"][:, :, :64]}, r"required is bfloat16 \(2, 64, 128\)"),
        (lambda t: t | {"offsets": t["offsets"].long()}, "offsets is torch.int64"),
        (lambda t: t | {"d": t["d"].to("meta")}, "on meta"),
        (lambda t: t | {"prob": torch.zeros(256)}, "prob is given, and not configured"),
        (lambda t: {n: x for n, x in t.items() if n != "h"}, "h is missing"),
        (lambda t: t | {"x": t["x"].view(-1)}, r"x has shape \(16384,\); required is rank 2"),
        (lambda t: t | {"d": t["d"][:, :48], "h": t["h"][:, :96], "b": t["b"][:, :, :96]}, "N is 48"),
    ],
)  # fmt: skip
def test_launch_refuses_tensors_that_the_function_cannot_take(
    emulation: ModuleType, emulated: list[Any], change: Any, said: str
) -> None:
    glu_host.FUNCTIONS.install(CONFIG, function := emulation.EmulatedGlu(CONFIG))
    tensors = tensors_of()
    glu_host.launch(CONFIG, **tensors)
    assert function.calls == 1 and bool((tensors["h"] == 64).all()) and bool((tensors["d"] == 64 * 64).all())
    with pytest.raises(ValueError, match=said):
        glu_host.launch(CONFIG, **change(tensors))
    assert function.calls == 1


def test_a_small_workspace_is_refused(emulation: ModuleType, emulated: list[Any]) -> None:
    config = replace(CONFIG, discrete_b=True)
    glu_host.FUNCTIONS.install(config, emulation.EmulatedGlu(config))
    memory = torch.zeros(1024, dtype=torch.uint8)
    tensors = tensors_of() | {"b": torch.tensor([128, 256]), "workspace": memory[-memory.data_ptr() % 128 :][:255]}
    with pytest.raises(ValueError, match="workspace has 255 bytes; required are 256"):
        glu_host.launch(config, **tensors)
