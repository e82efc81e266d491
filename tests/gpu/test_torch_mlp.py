"""The expert MLP in PyTorch on a GPU: numbers against float64, repeats, modes, torch's checks of the ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp_problems import (  # type: ignore[import-not-found]
    BOUNDS,
    DEVICE,
    IS_HOPPER,
    MXFP8_BOUND,
    PROBLEMS,
    SEED,
    TAIL,
    USUAL,
    arguments_of,
    check,
    fresh_data,
    mlp_kernels,
    relative,
    without_grad,
)
from opfuse.graph_ops import OpfuseError
from opfuse.graph_ops.torch import GroupedMLP, grouped_mlp
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.graph_ops.torch.routing import combine, dispatch, route

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
__all__ = ["fresh_data", "mlp_kernels"]


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", PROBLEMS)
def test_c30_every_output_against_float64(name: str) -> None:
    problem = PROBLEMS[name]
    case = problem.case()
    dy = torch.randn_like(case.x)
    got = problem.step(case, dy)
    if problem.recipe is None:
        check(got, case.oracle(dy), BOUNDS[problem.dtype], case)
        return
    moved = {name: t.detach().cpu().requires_grad_() for name, t in case.leaves.items()}
    on_cpu = replace(case, counts=case.counts.cpu(), prob=None, **{n: t for n, t in moved.items() if n != "prob"})
    on_cpu.prob = moved.get("prob")
    wanted = problem.step(on_cpu, dy.cpu())
    check({n: t.cpu() for n, t in got.items()}, wanted, MXFP8_BOUND, on_cpu)


@pytest.mark.parametrize("name", ["swiglu, concatenated", "geglu, interleaved(32)", "weights inputs first"])
def test_hopper_runs_the_fused_kernels(name: str) -> None:
    if not IS_HOPPER:
        pytest.skip("needs an sm90 GPU")
    GRAPHS.clear()
    problem = PROBLEMS[name]
    case = problem.case()
    problem.step(case, torch.randn_like(case.x))
    plans = [built.graph.plan for built in GRAPHS.graphs()]
    assert "sm90.grouped_gemm_dglu" in [step.kernel for plan in plans for step in plan.fused_steps]


def test_c11_rows_of_no_expert_may_hold_anything() -> None:
    case = TAIL.case()
    total, dy = int(case.counts.sum()), torch.randn_like(case.x)
    with torch.no_grad():
        for tensor in (case.x, case.prob, dy):
            assert tensor is not None
            tensor[total:] = float("nan")
    got = TAIL.step(case, dy)
    with torch.no_grad():
        for tensor in (case.x, case.prob, dy):
            assert tensor is not None
            tensor[total:] = 0.0
    check(got, case.oracle(dy), BOUNDS[TAIL.dtype], case)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_c13_no_tokens_keep_the_autograd_graph(recipe: str | None) -> None:
    experts = GroupedMLP(4, 64, 64, device=DEVICE, dtype=torch.bfloat16, recipe=recipe, multiple_of=32)
    x = torch.randn(0, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y, bias = experts(x, torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.rand(0, device=DEVICE))
    assert y.shape == (0, 64) and y.grad_fn is not None and bias is None
    y.sum().backward()
    for name, weight in experts.named_parameters():
        assert weight.grad is not None and not weight.grad.count_nonzero(), name


def test_c36_c37_gradients_at_the_clamp_bounds() -> None:
    """Gates and ups at, just below and just above +-7: w1 is the identity, so that h is x, and dx is dh."""
    half = 32
    grid = torch.tensor([6.875, 7.0, 7.125, -6.875, -7.0, -7.125])  # exact in bf16
    gates, ups = (t.flatten()[:, None].expand(36, half) for t in torch.meshgrid(grid, grid, indexing="ij"))
    x = torch.cat([gates, ups], 1).to(DEVICE).bfloat16().requires_grad_()  # (36, 2I)
    w1, w2 = torch.eye(2 * half).to(DEVICE).bfloat16()[None], torch.eye(2 * half, half).to(DEVICE).bfloat16()[None]
    y = grouped_mlp(x, torch.tensor([36], device=DEVICE), w1, w2, act="geglu")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    gate, up = gates.double(), ups.double()
    y1, y2, s = gate.clamp(max=7), up.clamp(-7, 7), (1.702 * gate.clamp(max=7)).sigmoid()
    dgate = (y2 + 1) * s * (1 + 1.702 * y1 * (1 - s)) * (gate <= 7.0)
    dup = y1 * s * ((up >= -7.0) & (up <= 7.0))
    for name, got, wanted in (("dgate", dx[:, :half], dgate), ("dup", dx[:, half:], dup)):
        difference = (got.cpu().double() - wanted).abs()
        assert (difference <= 2**-8 * wanted.abs()).all(), f"{name}: {float(difference.max()):.2e}"
    assert (dx[:, :half].cpu()[gates == 7.0] != 0).all(), "a gate of exactly 7 has a gradient"


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_c116_losses_whose_gradient_is_expanded(reduce: Any) -> None:
    case = USUAL.case()
    y = USUAL.forward(case)
    gradients = torch.autograd.grad(reduce(y.float()), list(case.leaves.values()))
    dy = torch.ones_like(y) / (1 if reduce is torch.sum else y.numel())
    check({"y": y, **dict(zip(case.leaves, gradients))}, case.oracle(dy), 2 * BOUNDS[torch.bfloat16], case)


@pytest.mark.parametrize("name", ["swiglu, concatenated", "rows of no expert", "preactivation saved", "mxfp8"])
def test_c87_c88_repeats_are_bitwise_equal(name: str) -> None:
    problem = PROBLEMS[name]
    case = problem.case()
    dy = torch.randn_like(case.x)
    first = problem.step(case, dy)
    for _ in range(19):
        again = problem.step(case, dy)
        assert all(torch.equal(again[n], t) for n, t in first.items()), f"seed {SEED}"


def test_c87_c88_dispatch_and_combine_repeat_bitwise() -> None:
    tokens, top_k, experts = 512, 4, 16
    x = torch.randn(tokens, 64, device=DEVICE, requires_grad=True)
    expert = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices
    seen = set()
    for _ in range(40):
        routing = route(expert, experts, multiple_of=8)
        y = combine(dispatch(x, routing) ** 2, routing)
        (dx,) = torch.autograd.grad(y.sin().sum(), x)
        seen.add(y.detach().cpu().numpy().tobytes() + dx.cpu().numpy().tobytes())
    assert len(seen) == 1


def test_operands_of_other_strides_and_addresses_give_the_same() -> None:
    case = USUAL.case()
    wanted = USUAL.forward(case).detach()
    wide = torch.zeros(case.x.shape[0], 2 * USUAL.H, device=DEVICE, dtype=USUAL.dtype)
    wide[:, ::2] = case.x.detach()
    memory = torch.zeros(case.x.numel() + 1, device=DEVICE, dtype=USUAL.dtype)
    for x in (wide[:, ::2], memory[1:].view(case.x.shape).copy_(case.x.detach())):
        assert relative(USUAL.forward(case, x=x).detach(), wanted) <= 4e-3
    padded = torch.zeros(*case.w1.shape[:2], USUAL.H + 8, device=DEVICE, dtype=USUAL.dtype)
    padded[:, :, 3 : 3 + USUAL.H] = case.w1.detach()
    got = replace(case, w1=padded[:, :, 3 : 3 + USUAL.H])
    assert relative(USUAL.forward(got).detach(), wanted) <= 4e-3


@pytest.mark.parametrize("enabled_type", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["swiglu, concatenated", "float32", "mxfp8"])
def test_autocast_changes_no_number(name: str, enabled_type: torch.dtype) -> None:
    problem = PROBLEMS[name]
    case = problem.case()
    dy = torch.randn_like(case.x)
    plain = problem.step(case, dy)
    with torch.autocast("cuda", enabled_type):
        cast = problem.step(case, dy)
    assert all(torch.equal(cast[n], t) and cast[n].dtype is t.dtype for n, t in plain.items())


def test_grad_modes() -> None:
    case = USUAL.case()
    wanted = USUAL.forward(case).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = USUAL.forward(case)
            assert y.grad_fn is None and relative(y, wanted) <= 4e-3


@pytest.mark.parametrize("learns", [("x",), ("w1",), ("w2",), ("prob",), ("x", "w2")], ids="+".join)
def test_only_what_learns_gets_a_gradient(learns: tuple[str, ...]) -> None:
    case = USUAL.case()
    dy = torch.randn_like(case.x)
    wanted = case.oracle(dy)
    for name, leaf in case.leaves.items():
        leaf.requires_grad_(name in learns)
    USUAL.forward(case).backward(dy)
    for name, leaf in case.leaves.items():
        assert (leaf.grad is not None) == (name in learns)
        assert leaf.grad is None or relative(leaf.grad, wanted[name]) <= BOUNDS[USUAL.dtype], name


def test_a_mistake_is_named_and_the_context_lives_on() -> None:
    case = USUAL.case()
    mistakes = (
        (dict(counts=case.counts.cpu()), "DEVICE"), (dict(x=case.x.detach().cpu()), "DEVICE"),
        (dict(counts=case.counts[:2]), "EXPERTS"), (dict(x=case.x[:, :64]), "SHAPE"),
    )  # fmt: skip
    for change, code in mistakes:
        with pytest.raises(OpfuseError) as raised:
            USUAL.forward(case, **change)
        assert raised.value.code == code
    USUAL.forward(case)
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- torch's own checks of the ops


OPCHECKED = ("swiglu, concatenated", "geglu, interleaved(32)", "no probs", "no rows", "rows of no expert",
             "weights inputs first", "float32")  # fmt: skip
OPCHECKED_MXFP8 = ("mxfp8", "mxfp8, swizzled scales")


@pytest.mark.parametrize("name", OPCHECKED)
def test_c107_ops_pass_opcheck(name: str) -> None:
    tensors, choices = arguments_of(PROBLEMS[name])
    opcheck = torch.library.opcheck
    opcheck(torch.ops.opfuse.grouped_mlp.default, (*tensors, *choices, ""))
    ours, (x, offsets, w1, w2, prob) = torch.ops.opfuse, tensors
    opcheck(ours.grouped_mlp_fc1.default, (x, offsets, w1, prob, *choices))
    x, offsets, w1, fixed, fixed_prob = without_grad(tensors)
    h, act = ours.grouped_mlp_fc1(x, offsets, w1, fixed_prob, *choices)
    opcheck(ours.grouped_mlp_fc2.default, (h.clone().requires_grad_(), act, offsets, w2, prob, *choices, True))
    for saved in (act, None):
        opcheck(ours.grouped_mlp_fc2_backward.default,
                (torch.randn_like(x), offsets, fixed, fixed_prob, h, saved, *choices, True, True, prob is not None)
                )  # fmt: skip
    opcheck(ours.grouped_mlp_fc1_backward.default, (torch.randn_like(h), offsets, w1, x, *choices[3:], True, True))


@pytest.mark.parametrize("name", OPCHECKED_MXFP8)
def test_c107_mxfp8_ops_pass_opcheck(name: str) -> None:
    tensors, choices = arguments_of(PROBLEMS[name])
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_mxfp8_forward.default, (*tensors, *choices, True))
    x, offsets, w1, w2, prob = without_grad(tensors)
    _, h, *codes = torch.ops.opfuse.grouped_mlp_mxfp8_forward(x, offsets, w1, w2, prob, *choices, True)
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_mxfp8_backward.default,
                          (torch.randn_like(x), offsets, w1, w2, prob, *codes[:2], h, *codes[2:], *choices,
                           True, True, True, True))  # fmt: skip
