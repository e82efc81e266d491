"""Weight gradients on sm90, planned and run on a machine without a GPU: the planner, the adapter and the host code are
the real ones, and only the compiled function is emulated."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.planner import make_plan
from opfuse.graph_ops.torch.configuration import MlpConfig
from opfuse.graph_ops.torch.graphs import Backward, Fc1Backward, Key
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper import grouped_wgrad
from opfuse.kernels.sm90 import wgrad_host
from opfuse.kernels.sm90.wgrad_config import WgradConfig

KERNEL = "sm90.grouped_gemm_wgrad"
K, N, SIZES = 72, 40, (5, 0, 130, 1)


def graph_of(emulation: ModuleType, kind: DataType, accumulate: bool = False) -> Any:
    """a^T dy of four experts; M is a symbol."""
    g = emulation.EmulatedGraph(io_data_type=kind)
    m = g.symbol("M")
    a, dy = g.tensor("a", dim=(m, K)), g.tensor("dy", dim=(m, N))
    offsets = g.tensor("offsets", dim=(len(SIZES),), data_type=DataType.INT32)
    dw = g.grouped_matmul_wgrad(a, dy, offsets, accumulate=accumulate).set_name("dw").set_output(True)
    return dw.set_data_type(DataType.FLOAT) and g if accumulate else g


def inputs(kind: torch.dtype, seed: int, past: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(SIZES) + past
    given = {name: torch.randn(rows, width, generator=generator).to(kind) for name, width in (("a", K), ("dy", N))}
    return given | {"offsets": torch.tensor(SIZES).cumsum(0).to(torch.int32)}


def expected(given: dict[str, torch.Tensor]) -> torch.Tensor:
    ends = given["offsets"].tolist()
    pairs = zip([0, *ends[:-1]], ends)
    return torch.stack([given["a"][s:e].double().T @ given["dy"][s:e].double() for s, e in pairs])


@pytest.mark.parametrize("kind", [DataType.BFLOAT16, DataType.HALF])
def test_a_graph_runs_the_kernel_and_equals_float64(
    emulation: ModuleType, emulated: list[Any], kind: DataType, seed: int
) -> None:
    g = graph_of(emulation, kind)
    g.build()
    given = inputs(getattr(torch, kind.info.torch_name), seed)
    dw = g(given)["dw"]
    assert [function.calls for function in emulated] == [1]
    assert torch.equal(dw, expected(given).to(dw.dtype)), f"seed {seed}"


def test_a_float32_accumulator_is_added_to(emulation: ModuleType, emulated: list[Any], seed: int) -> None:
    g = graph_of(emulation, DataType.BFLOAT16, accumulate=True)
    g.build()
    given = inputs(torch.bfloat16, seed)
    old = torch.randn(len(SIZES), K, N)
    dw = old.clone()
    g.execute({**given, "dw": dw})
    assert [f.config for f in emulated] == [replace(emulated[0].config, accumulate=True, dw_dtype="fp32")]
    assert torch.equal(dw, (old + expected(given)).float()), f"seed {seed}"


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows_are_zeros_or_nothing_added(emulation: ModuleType, emulated: list[Any], accumulate: bool) -> None:
    g = graph_of(emulation, DataType.BFLOAT16, accumulate)
    g.build()
    dw = torch.ones(len(SIZES), K, N, dtype=torch.float32 if accumulate else torch.bfloat16)
    given = {"a": torch.empty(0, K, dtype=torch.bfloat16), "dy": torch.empty(0, N, dtype=torch.bfloat16)}
    g.execute({**given, "offsets": torch.zeros(len(SIZES), dtype=torch.int32), "dw": dw})
    assert bool((dw == float(accumulate)).all()) and all(f.calls == 0 for f in emulated)


def configuration(kind: DataType, inputs_first: bool) -> MlpConfig:
    experts, hidden, width = 4, 64, 96
    w1 = (2 * width * hidden, 1, 2 * width) if inputs_first else (2 * width * hidden, hidden, 1)
    w2 = (width * hidden, 1, hidden) if inputs_first else (width * hidden, width, 1)
    return MlpConfig(torch.device("cuda", 0), kind, DataType.INT32, experts, hidden, width, w1, w2, True, "swiglu", (),
                     GluLayout.interleaved(32), "bf16", 1)  # fmt: skip


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("kind", [DataType.BFLOAT16, DataType.HALF])
def test_the_mlp_s_backward_takes_it_for_both_gradients(kind: DataType, inputs_first: bool) -> None:
    """However the weights lie: the graphs order the operands so that each gradient is row-major."""
    c = configuration(kind, inputs_first)
    wanted: dict[Key, int] = {
        Backward(c, dx=True, dw1=True, dw2=True, dprob=True, has_act=True): 2,
        Backward(c, dx=False, dw1=False, dw2=True, dprob=True, has_act=False, dh=True): 1,
        Fc1Backward(c, dx=True, dw1=True): 1,
    }
    for key, count in wanted.items():
        plan = make_plan(key.declare().operation_graph(), ARCHES["sm90"])
        assert [s.kernel for s in plan.steps].count(KERNEL) == count, key
        assert not any(s.kernel == "torch.grouped_matmul_wgrad" for s in plan.steps)


# ------------------------------------------------------------------ the adapter alone


def buffers_of(problem: Any, rows: int) -> dict[str, torch.Tensor]:
    return {
        role: torch.zeros(t.shape({"M": rows}), dtype=getattr(torch, t.data_type.info.torch_name))
        for role, t in problem.tensors.items()
    }


def test_a_prepared_launch_is_the_run_of_the_same_buffers(
    emulated: list[Any], seen: list[Any], make_wgrad_problem: Any
) -> None:
    """`execute` launches by integers: what `prepare` gives needs neither workspace nor tensors."""
    problem = make_wgrad_problem()
    kernel = grouped_wgrad.build(problem, "cpu")
    buffers, bindings = buffers_of(problem, 300), {"M": 300}
    assert kernel.workspace_bytes(bindings) == 0
    kernel.run(buffers, None, bindings)
    launch = kernel.prepare(buffers, None, bindings)
    assert launch is not None
    launch(0)
    first, second = ({n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in call.items()} for call in seen)
    assert first == second and set(first) == set(problem.tensors)
    assert all(seen[0][role].data_ptr() == buffer.data_ptr() for role, buffer in buffers.items())


def test_a_variant_is_the_same_kernel_with_another_schedule(
    emulated: list[Any], make_wgrad_problem: Any, wgrad_entry: Any
) -> None:
    problem = make_wgrad_problem(k=2048, n=768)
    kernels = [wgrad_entry.build(problem, "cpu", name) for name in (None, *wgrad_entry.variants(problem))]
    assert len({k.config.schedule for k in kernels}) == len(kernels) == len(emulated) >= 3
    assert {replace(k.config, schedule=kernels[0].config.schedule) for k in kernels} == {kernels[0].config}


# ------------------------------------------------------------------ the launch alone

CONFIG = WgradConfig()


def tensors_of(rows: int = 256) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    offsets = torch.tensor([rows // 2, rows], dtype=torch.int32)
    return {"a": torch.ones(rows, K, dtype=bf16), "dy": torch.ones(rows, N, dtype=bf16), "offsets": offsets,
            "dw": torch.zeros(2, K, N, dtype=bf16)}  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t | {"dw": t["dw"].float()}, r"dw is torch.float32 \(2, 72, 40\).*required is bfloat16"),
        (lambda t: t | {"dw": t["dw"].transpose(1, 2).contiguous().transpose(1, 2)}, r"strides \(2880, 1, 72\)"),
        (lambda t: t | {"dw": t["dw"][:1]}, r"dw is torch.bfloat16 \(1, 72, 40\)"),
        (lambda t: t | {"dy": t["dy"][:255]}, r"dy is torch.bfloat16 \(255, 40\)"),
        (lambda t: t | {"a": torch.zeros(256 * K + 1, dtype=torch.bfloat16)[1:].view(256, K)}, "multiple of 16"),
        (lambda t: t | {"offsets": t["offsets"].long()}, "offsets is torch.int64"),
        (lambda t: t | {"dw": t["dw"].to("meta")}, "on meta"),
        (lambda t: t | {"a": t["a"].view(-1)}, r"a has shape \(18432,\); required is rank 2"),
        (lambda t: t | {"a": t["a"][:, :68], "dw": t["dw"][:, :68]}, "K is 68"),
    ],
)
def test_launch_refuses_tensors_that_the_function_cannot_take(
    emulation: ModuleType, emulated: list[Any], change: Any, said: str
) -> None:
    wgrad_host.FUNCTIONS.install(CONFIG, function := emulation.EmulatedWgrad(CONFIG))
    tensors = tensors_of()
    wgrad_host.launch(CONFIG, **tensors)
    assert function.calls == 1 and bool((tensors["dw"] == 128).all())
    with pytest.raises(ValueError, match=said):
        wgrad_host.launch(CONFIG, **change(tensors))
    assert function.calls == 1


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_launch_without_rows_does_not_reach_the_kernel(
    emulation: ModuleType, emulated: list[Any], accumulate: bool
) -> None:
    """No descriptor has an extent of zero."""
    config = WgradConfig(dw_dtype="fp32", accumulate=accumulate)
    wgrad_host.FUNCTIONS.install(config, function := emulation.EmulatedWgrad(config))
    tensors = tensors_of(0) | {"dw": torch.ones(2, K, N)}
    wgrad_host.launch(config, **tensors)
    assert function.calls == 0 and bool((tensors["dw"] == float(accumulate)).all())
