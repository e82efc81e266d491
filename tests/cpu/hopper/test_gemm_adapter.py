"""Lone grouped matmuls on sm90, planned and run on a machine without a GPU: the planner, the adapter and the host code
are the real ones, and only the compiled function is emulated."""

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
from opfuse.graph_ops.torch.graphs import Fc1Backward, Fc2, Key
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper import grouped_gemm
from opfuse.kernels.sm90 import gemm_host
from opfuse.kernels.sm90.gemm_config import GemmConfig

KERNEL = "sm90.grouped_gemm"
BF16, F16, F32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT
K, N, SIZES = 72, 40, (5, 0, 130, 1)


def torch_type(kind: DataType) -> torch.dtype:
    found: torch.dtype = getattr(torch, kind.info.torch_name)
    return found


def graph_of(emulation: ModuleType, *, kind: DataType = BF16, y: DataType = BF16, alpha: int = 0, bias: bool = False,
             discrete: bool = False, **options: Any) -> Any:  # fmt: skip
    """One grouped matmul of four experts with K-major weights; M is a symbol, `alpha` its exponent."""
    g = emulation.EmulatedGraph(io_data_type=kind, **options)
    a = g.tensor("a", dim=(g.symbol("M"), K))
    b = g.tensor("b", dim=(len(SIZES), K, N), stride=(K * N, 1, K), discrete=discrete)
    offsets = g.tensor("offsets", dim=(len(SIZES),), data_type=DataType.INT32)
    more: dict[str, Any] = {}
    if alpha:
        more = {"alpha": g.tensor("alpha", dim=(len(SIZES),), data_type=F32), "alpha_exponent": alpha}
    if bias:
        more["bias"] = g.tensor("bias", dim=(len(SIZES), N))
    g.grouped_matmul(a, b, offsets, **more).set_name("y").set_output(True).set_data_type(y)
    return g


def inputs(kind: DataType, seed: int, *, alpha: int = 0, bias: bool = False, past: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {
        "a": randn(sum(SIZES) + past, K).to(torch_type(kind)),
        "b": (randn(len(SIZES), N, K) / K**0.5).to(torch_type(kind)).transpose(1, 2),
        "offsets": torch.tensor(SIZES).cumsum(0).to(torch.int32),
    }
    given |= {"alpha": randn(len(SIZES))} if alpha else {}
    return given | ({"bias": randn(len(SIZES), N).to(torch_type(kind))} if bias else {})


def expected(given: dict[str, Any], alpha: int = 0) -> torch.Tensor:
    """In float64, unrounded; rows of no expert are zero."""
    ends = given["offsets"].tolist()
    y = torch.zeros(given["a"].shape[0], N, dtype=torch.float64)
    for g, (start, end) in enumerate(zip([0, *ends[:-1]], ends)):
        y[start:end] = given["a"][start:end].double() @ given["b"][g].double()
        if alpha:
            y[start:end] *= float(given["alpha"][g]) ** alpha
        if "bias" in given:
            y[start:end] += given["bias"][g].double()
    return y


CASES: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "HALF": dict(kind=F16, y=F16),
    "FLOAT result": dict(y=F32),
    "alpha squared": dict(alpha=2),
    "alpha and bias": dict(alpha=1, bias=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_runs_the_kernel_and_equals_float64_and_unfused(
    emulation: ModuleType, emulated: list[Any], name: str, seed: int
) -> None:
    options = CASES[name]
    g = graph_of(emulation, **options)
    g.build()
    assert [s.kernel for s in g.plan.steps] == [KERNEL]
    given = inputs(options.get("kind", BF16), seed, **{k: v for k, v in options.items() if k in ("alpha", "bias")})
    y = g(given)["y"]
    assert [function.calls for function in emulated] == [1]
    want = expected(given, options.get("alpha", 0))
    assert torch.equal(y, want.to(y.dtype)), f"seed {seed}"
    unfused = graph_of(emulation, fused=False, **options)
    unfused.build()
    assert unfused.plan.name == "unfused" and [f.calls for f in emulated] == [1]
    torch.testing.assert_close(unfused(given)["y"], y, msg=lambda text: f"seed {seed}: {text}")


def test_separate_experts(emulation: ModuleType, emulated: list[Any], seed: int) -> None:
    g = graph_of(emulation, discrete=True)
    g.build()
    assert [s.kernel for s in g.plan.steps] == [KERNEL], "torch would copy the weights side by side"
    given = inputs(BF16, seed)
    experts = emulation.keep([one.t().contiguous().t() for one in given["b"]])
    y = g({**given, "b": experts})["y"]
    assert torch.equal(y, expected(given).bfloat16()), f"seed {seed}"


def test_no_rows_are_no_launch(emulation: ModuleType, emulated: list[Any]) -> None:
    g = graph_of(emulation)
    g.build()
    given = inputs(BF16, 0) | {
        "a": torch.empty(0, K, dtype=torch.bfloat16),
        "offsets": torch.zeros(4, dtype=torch.int32),
    }
    assert g(given)["y"].shape == (0, N) and emulated[0].calls == 0


def mlp(**options: Any) -> MlpConfig:
    experts, hidden, intermediate = 4, 2048, 768
    usual = dict(
        device=torch.device("cpu"), data_type=BF16, offsets_type=DataType.INT32, experts=experts, hidden=hidden,
        intermediate=intermediate, w1_stride=(2 * intermediate * hidden, hidden, 1),
        w2_stride=(intermediate * hidden, intermediate, 1), has_prob=True, act="swiglu", activation_parameters=(),
        glu_layout=GluLayout.interleaved(32), recipe=None, multiple_of=1, alignment=16,
    )  # fmt: skip
    return MlpConfig(**{**usual, **options})


@pytest.mark.parametrize("kind", [BF16, F16])
@pytest.mark.parametrize("key", [Fc2(mlp()), Fc1Backward(mlp(), True, False)], ids=["fc2", "fc1_backward"])
def test_what_no_glu_follows_in_an_expert_mlp_runs_it(key: Key, kind: DataType) -> None:
    graph = replace(key, config=mlp(data_type=kind)).declare().operation_graph()
    assert [s.kernel for s in make_plan(graph, ARCHES["sm90"], strict=True).steps] == [KERNEL]


# ------------------------------------------------------------------ the adapter alone


def buffers_of(problem: Any, rows: int) -> dict[str, Any]:
    made = {}
    for role, t in problem.tensors.items():
        whole = torch.zeros(t.shape({"M": rows}), dtype=torch_type(t.data_type))
        made[role] = whole.transpose(1, 2).contiguous().transpose(1, 2) if role == "b" else whole
    return made


def test_a_prepared_launch_is_the_run_of_the_same_buffers(
    emulated: list[Any], seen: list[Any], make_gemm_problem: Any
) -> None:
    problem = make_gemm_problem(roles=("alpha", "bias"))
    kernel = grouped_gemm.build(problem, "cpu")
    buffers, bindings = buffers_of(problem, 300), {"M": 300}
    assert kernel.workspace_bytes(bindings) == 0
    kernel.run(buffers, None, bindings)
    prepared = kernel.prepare(buffers, None, bindings)
    assert prepared is not None
    prepared(0)
    first, second = ({n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in call.items()} for call in seen)
    assert first == second and set(first) == set(problem.tensors)
    assert all(first[role][:2] == (buffer.data_ptr(), buffer.shape) for role, buffer in buffers.items())


def test_a_variant_is_the_same_kernel_with_another_schedule(
    emulated: list[Any], make_gemm_problem: Any, gemm_entry: Any
) -> None:
    problem = make_gemm_problem(k=768, n=2048)
    kernels = [gemm_entry.build(problem, "cpu", name) for name in (None, *gemm_entry.variants(problem))]
    assert len({k.config.schedule for k in kernels}) == len(kernels) == len(emulated) >= 3
    assert {replace(k.config, schedule=kernels[0].config.schedule) for k in kernels} == {kernels[0].config}


# ------------------------------------------------------------------ the launch alone

CONFIG = GemmConfig()


def tensors_of(rows: int = 256, k: int = 64, n: int = 64, experts: int = 2) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    return {
        "a": torch.ones(rows, k, dtype=bf16), "b": torch.ones(experts, n, k, dtype=bf16).transpose(1, 2),
        "offsets": torch.tensor([rows // 2, rows], dtype=torch.int32), "y": torch.zeros(rows, n, dtype=bf16),
    }  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t | {"y": t["y"].float()}, r"y is torch.float32 \(256, 64\).*required is bfloat16 \(256, 64\)"),
        (lambda t: t | {"y": t["y"][:255]}, r"y is torch.bfloat16 \(255, 64\)"),
        (lambda t: t | {"y": t["y"].view(-1)[4:].as_strided((256, 64), (60, 1))}, r"strides \(60, 1\)"),
        (lambda t: t | {"a": torch.zeros(256 * 64 + 1, dtype=torch.bfloat16)[1:].view(256, 64)}, "multiple of 16"),
        (lambda t: t | {"b": t["b"].contiguous()}, r"b is .*strides \(4096, 64, 1\)"),
        (lambda t: t | {"offsets": t["offsets"].long()}, "offsets is torch.int64"),
        (lambda t: t | {"alpha": torch.zeros(2)}, "alpha is given, and not configured"),
        (lambda t: t | {"b": None}, "b is missing"),
        (lambda t: t | {"y": t["y"][:, :60], "b": t["b"][:, :, :60]}, "N is 60"),
    ],
)
def test_launch_refuses_tensors_that_the_function_cannot_take(
    emulation: ModuleType, emulated: list[Any], change: Any, said: str
) -> None:
    gemm_host.FUNCTIONS.install(CONFIG, function := emulation.EmulatedGemm(CONFIG))
    tensors = tensors_of()
    gemm_host.launch(CONFIG, **tensors)
    assert function.calls == 1 and bool((tensors["y"] == 64).all())
    with pytest.raises(ValueError, match=said):
        gemm_host.launch(CONFIG, **change(tensors))
    assert function.calls == 1


def test_a_small_workspace_is_refused(emulation: ModuleType, emulated: list[Any]) -> None:
    config = replace(CONFIG, discrete_b=True)
    gemm_host.FUNCTIONS.install(config, emulation.EmulatedGemm(config))
    memory = torch.zeros(1024, dtype=torch.uint8)
    tensors = tensors_of() | {"b": torch.tensor([128, 256]), "workspace": memory[-memory.data_ptr() % 128 :][:255]}
    with pytest.raises(ValueError, match="workspace has 255 bytes; required are 256"):
        gemm_host.launch(config, **tensors)
