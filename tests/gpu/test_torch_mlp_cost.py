"""What the expert MLP takes on a GPU, memory and launches; and frameworks that run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp_problems import (  # type: ignore[import-not-found]
    BOUNDS,
    DEVICE,
    IS_HOPPER,
    LARGE,
    SEED,
    WIDE,
    Problem,
    arguments_of,
    fresh_data,
    mlp_kernels,
    relative,
    without_grad,
)
from opfuse.graph_ops import DataType, Graph
from opfuse.graph_ops.torch.compile import backend
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.kernels.torch_ops import uncovered

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
__all__ = ["fresh_data", "mlp_kernels"]


# ---------------------------------------------------------------------- memory and launches


MIB = 2**20
SLACK = 4 * MIB  # offsets, torch's descriptors of groups, rounding of the allocator


@pytest.mark.parametrize("problem", [LARGE, WIDE], ids=["large I", "large H"])
@pytest.mark.parametrize("save", ["activation", "preactivation", "inputs"])
def test_memory_held_and_at_the_peak(save: str, problem: Problem) -> None:
    problem = replace(problem, save=save)
    case = problem.case()
    dy = torch.randn_like(case.x)
    problem.step(case, dy)
    rows, size = case.x.shape[0], 2
    y, h, act = (size * rows * columns for columns in (problem.H, 2 * problem.I, problem.I))
    dx, dh, dw1, dw2 = y, h, size * case.w1.numel(), size * case.w2.numel()
    saved = {"activation": h + act, "preactivation": h, "inputs": 0}[save]
    held, peak, out = measured(lambda: problem.forward(case))
    assert held <= y + saved + SLACK, f"{held / MIB:.0f} MiB held, {(y + saved) / MIB:.0f} MiB are y and saved"
    assert peak <= y + h + act + SLACK, f"{peak / MIB:.0f} MiB at the peak of the forward"
    plans = [built.graph.plan for built in GRAPHS.graphs()]
    if not any(step.kernel == "sm90.grouped_gemm_dglu" for plan in plans for step in plan.fused_steps):
        return
    again = {"activation": 0, "preactivation": act, "inputs": h + act}[save]  # computed again on the way
    fc2, fc1 = dh + dw2 + again, dh + dw2 + dx + dw1 - saved  # h and the activation go between the two
    _, peak, _ = measured(lambda: torch.autograd.grad(out, list(case.leaves.values()), dy))
    limit = max(fc2, fc1) + SLACK
    assert peak <= limit, f"{peak / MIB:.0f} MiB at the peak of the backward, at most {limit / MIB:.0f} expected"


def measured(function: Any) -> tuple[int, int, Any]:
    """Bytes held afterwards, bytes at the peak, and the result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result


COPIES = {"aten::copy_", "aten::zero_", "aten::fill_", "aten::where", "aten::masked_fill_", "aten::clone", "aten::bmm",
          "aten::_to_copy", "aten::index_select"}  # fmt: skip
MATMULS = {"aten::_grouped_mm", "aten::mm", "aten::addmm", "aten::baddbmm"}


@pytest.mark.parametrize("problem", [LARGE, replace(LARGE, transposed=True), replace(LARGE, tail=64)],
                         ids=["outputs first", "inputs first", "rows of no expert"])  # fmt: skip
def test_a_backward_is_launches_of_ours_and_no_copy(problem: Problem) -> None:
    if not IS_HOPPER:
        pytest.skip("needs an sm90 GPU")
    tensors, choices = arguments_of(problem)
    x, offsets, w1, w2, prob = without_grad(tensors)
    ours, dy = torch.ops.opfuse, torch.randn_like(x)
    h, act = ours.grouped_mlp_fc1(x, offsets, w1, prob, *choices)

    def backward() -> Any:
        dh, *rest = ours.grouped_mlp_fc2_backward(dy, offsets, w2, prob, h, act, *choices, True, True, True)
        return *rest, *ours.grouped_mlp_fc1_backward(dh, offsets, w1, x, *choices[3:], True, True)

    backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward()
    names = [event.name for event in profile.events()]
    assert not (COPIES | MATMULS) & set(names), sorted((COPIES | MATMULS) & set(names))


# ---------------------------------------------------------------------- what grouped_mm leaves unwritten


@pytest.mark.parametrize("columns", [8, 64, 4096])
@pytest.mark.parametrize("counts", [(5, 0, 9), (0, 0), (14,), (0, 3, 0, 0, 1)])
def test_zero_in_rows_and_experts_that_nothing_covers(counts: tuple[int, ...], columns: int) -> None:
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    rows = torch.full((14, columns), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    uncovered.zero_rows(rows, offsets)
    total = sum(counts)
    assert rows[:total].isnan().all() and not rows[total:].count_nonzero()
    experts = torch.full((len(counts), 3, columns), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    uncovered.zero_empty_experts(experts, offsets)
    for expert, count in enumerate(counts):
        assert experts[expert].isnan().all() if count else not experts[expert].count_nonzero()


def test_the_small_kernel_serves_hopper() -> None:
    if not IS_HOPPER:
        pytest.skip("needs an sm90 GPU")
    out = torch.full((2**17, 2**14 + 8), float("nan"), device=DEVICE, dtype=torch.bfloat16)  # more than 2**31 elements
    assert uncovered._kernel_for(out, by_expert=False) is not None
    uncovered.zero_rows(out, torch.tensor([2**17 - 3], dtype=torch.int32, device=DEVICE))
    assert out[-4].isnan().all() and not out[-3:].count_nonzero()


@pytest.mark.parametrize("columns", [64, 40, 36])
def test_what_torch_makes_is_what_run_writes(columns: int) -> None:
    """36 columns: torch pads its result's rows to 16 bytes, which no plan declares."""
    if not IS_HOPPER:
        pytest.skip("needs an sm90 GPU")
    g = Graph(io_data_type=DataType.BFLOAT16, device=DEVICE)
    m = g.symbol("M")
    a, dy = g.tensor("a", dim=(m, 64)), g.tensor("dy", dim=(m, 64))
    offsets = g.tensor("offsets", dim=(3,), data_type=DataType.INT32)
    b = g.tensor("b", dim=(3, 64, columns), stride=(64 * columns, 1, 64))
    g.grouped_matmul(a, b, offsets).set_name("y").set_output(True)
    g.grouped_matmul_wgrad(a, dy, offsets).set_name("dw").set_output(True)
    g.build(fused=False)
    randn = lambda *shape: torch.randn(*shape, device=DEVICE).bfloat16()  # noqa: E731
    pack = {"a": randn(50, 64), "dy": randn(50, 64), "b": randn(3, columns, 64).transpose(1, 2),
            "offsets": torch.tensor([20, 20, 44], dtype=torch.int32, device=DEVICE)}  # fmt: skip
    out = g(pack)
    into = {"y": torch.full((50, columns), float("nan"), device=DEVICE).bfloat16(),
            "dw": torch.full((3, 64, 64), float("nan"), device=DEVICE).bfloat16()}  # fmt: skip
    g.execute({**pack, **into}, torch.empty(g.get_workspace_size({"M": 50}), dtype=torch.uint8, device=DEVICE))
    for name, tensor in into.items():
        assert out[name].is_contiguous() and torch.equal(out[name], tensor), name
    assert not out["y"][44:].count_nonzero() and not out["dw"][1].count_nonzero()


# ---------------------------------------------------------------------- frameworks


class PlainExperts(torch.nn.Module):
    """Experts as their author wrote them, with torch's grouped matmul; the activation in float32."""

    def __init__(self, experts: int, hidden: int, half: int) -> None:
        super().__init__()
        made = dict(device=DEVICE, dtype=torch.bfloat16)
        self.w13 = torch.nn.Parameter(torch.randn(experts, 2 * half, hidden, **made) / hidden**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, half, **made) / half**0.5)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x, self.w13.transpose(-2, -1), offs=offsets).float().chunk(2, dim=-1)
        act = (torch.nn.functional.silu(gate) * up).bfloat16()
        return torch._grouped_mm(act, self.w2.transpose(-2, -1), offs=offsets)


def test_c104_c106_torch_compile_with_our_backend() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = PlainExperts(4, 128, 128)
    fast = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for counts in ((70, 0, 129, 41), (64, 64, 64, 64), (1, 300, 0, 2), (0, 0, 0, 8)):
        x = torch.randn(sum(counts), 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        tokens, dy, found = torch.tensor(counts, device=DEVICE), torch.randn_like(x), []
        for function in (fast, model):
            y = function(x, tokens)
            found.append((y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)))
        for name, one, other in zip(("y", "x", "w13", "w2"), *found):
            if name.startswith("w"):  # eager leaves the gradients of experts without rows as its kernel does
                one, other = one[tokens > 0], other[tokens > 0]
            assert relative(one, other) <= BOUNDS[torch.bfloat16], f"{name} with {counts} (seed {SEED})"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_hugging_face_experts() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from opfuse.graph_ops.torch import hf

    hf.register()
    losses: dict[str, list[float]] = {}
    ids = torch.randint(256, (4, 33), device=DEVICE)
    for implementation in ("eager", "opfuse"):
        torch.manual_seed(SEED)
        config = transformers.Qwen3MoeConfig(
            vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, max_position_embeddings=64, moe_intermediate_size=64, intermediate_size=128, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True,
        )  # fmt: skip
        config._experts_implementation = implementation
        model = transformers.Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[implementation] = []
        for _ in range(8):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
    assert losses["opfuse"][-1] < losses["opfuse"][0] - 0.1
    assert losses["opfuse"] == pytest.approx(losses["eager"], abs=0.05), f"{losses}, seed {SEED}"
