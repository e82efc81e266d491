"""Grouped matmuls beside no GLU, put in place by torch.compile's backend where a kernel of the device wins: here a
stand-in for it, which computes on the CPU what the adapters' kernels do, and leaves alone what nobody gave it."""

from __future__ import annotations

import importlib

import pytest
import torch
from opfuse.graph_ops import graph as graph_module
from opfuse.graph_ops.torch.compile import rewrite
from opfuse.kernels.arch import ARCHES
from plain_moe import BF16, Experts, Fused, H, I, L, Separate, compiled, mm, oracle, step  # type: ignore[import-not-found]

ADAPTERS = {"sm90.grouped_gemm": "grouped_gemm", "sm90.grouped_gemm_wgrad": "grouped_wgrad"}
GLUS = ("grouped_gemm_glu", "grouped_gemm_dglu")


class StandIn:
    """A FusedKernel of either rule."""

    runs: list[str] = []

    def __init__(self, problem):
        self.rule = problem.rule

    def workspace_bytes(self, bindings):
        return 0

    def run(self, buffers, workspace, bindings):
        self.runs.append(self.rule)
        start = 0
        if self.rule == "grouped_gemm":
            (out,) = (t for role, t in buffers.items() if role not in ("a", "b", "offsets"))
            out.zero_()
            for weight, end in zip(buffers["b"], buffers["offsets"].tolist(), strict=True):
                out[start:end] = (buffers["a"][start:end].float() @ weight.float()).to(out.dtype)
                start = end
        else:
            for place, end in enumerate(buffers["offsets"].tolist()):
                product = buffers["a"][start:end].float().T @ buffers["dy"][start:end].float()
                buffers["dw"][place] = product.to(buffers["dw"].dtype)
                start = end


@pytest.fixture
def on_hopper(monkeypatch):
    """The CPU taken for an sm90, with kernels for lone matmuls; gives the rules that they ran."""
    for adapter in ADAPTERS.values():
        module = importlib.import_module(f"opfuse.kernels.hopper.{adapter}")
        monkeypatch.setattr(module, "build", lambda problem, device, variant=None: StandIn(problem))
    monkeypatch.setattr(rewrite, "arch_of_device", lambda device: ARCHES["sm90"])
    monkeypatch.setattr(
        graph_module.Graph, "_resolve", lambda self, arch, device: (ARCHES["sm90"], torch.device("cpu"))
    )
    monkeypatch.setattr(StandIn, "runs", [])
    return StandIn.runs


def replaced(rewriter):
    return [(r.part, r.plan.steps[0].kernel) for r in rewriter.regions if r.replaced]


PRODUCTS = {Fused: (2, 2, 2), Separate: (3, 3, 3)}
"""Products of the forward, and products and weight gradients of the backward."""


@pytest.mark.parametrize("model_type", PRODUCTS)
def test_every_product_is_an_op_of_its_own_and_gives_what_eager_gives(model_type, on_hopper, seed, assert_close):
    model = model_type()
    fast, rewriter, _ = compiled(model, disable=GLUS)
    forward, products, gradients = PRODUCTS[model_type]
    for rows, counts in ((24, [8, 0, 16]), (40, [40, 0, 0]), (33, [1, 30, 2])):
        on_hopper.clear()
        for got, wanted in zip(step(fast, rows, counts), oracle(model, rows, counts), strict=True):
            assert_close(f"{rows} rows", got, wanted, 2e-2)
        assert on_hopper.count("grouped_gemm") == forward + products
        assert on_hopper.count("grouped_gemm_wgrad") == gradients
    first = replaced(rewriter)[: forward + products + gradients]
    assert first.count(("forward", "sm90.grouped_gemm")) == forward
    assert first.count(("backward", "sm90.grouped_gemm")) == products
    assert first.count(("backward", "sm90.grouped_gemm_wgrad")) == gradients


def test_a_disabled_kernel_and_a_matmul_that_inductor_measures_stay_atens(on_hopper, seed, monkeypatch):
    model = Fused()
    fast, rewriter, _ = compiled(model, disable=(*GLUS, "sm90.grouped_gemm", "grouped_gemm_wgrad"))
    step(fast, 24, [8, 0, 16])
    assert not replaced(rewriter) and not on_hopper
    torch._dynamo.reset()
    graph = torch.fx.Graph()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        values = [torch.empty(24, H, dtype=BF16), torch.empty(L, H, I, dtype=BF16), torch.empty(L, dtype=torch.int32)]
        args = [graph.placeholder(name) for name in ("x", "w", "offsets")]
        for node, value in zip(args, values, strict=True):
            node.meta["val"] = value
        product = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(args))
        product.meta["val"] = torch.empty(24, I, dtype=BF16)
    graph.output((product,))
    for tuned, expected in ((True, 0), (False, 1)):
        rewriter = rewrite.Rewriter(rewrite.Options.of({}))
        with torch._inductor.config.patch(max_autotune_gemm=tuned):
            rewriter(graph, "forward")
        assert len(replaced(rewriter)) == expected


class Forms(Experts):
    """A product of a slice of x, one whose second operand is a batch, and one of float32."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        narrow = torch._grouped_mm(x[:, : H // 2], self.w1.transpose(-2, -1)[:, : H // 2], offs=offsets)
        pairs = torch._grouped_mm(self.w1, self.w2)  # (L, I, H) x (L, H, I), without offsets
        return mm(narrow, self.w2, offsets) + pairs.sum()


def test_other_forms_stay_atens(on_hopper, seed, assert_close):
    """A view of half the columns serves, as its rows do not touch; a batch has no offsets, and is nobody's."""
    model = Forms()
    fast, rewriter, _ = compiled(model)
    x, counts = torch.randn(24, H).to(BF16), torch.tensor([8, 0, 16])
    with torch.no_grad():
        assert_close("y", fast(x, counts), model(x, counts), 2e-2)
    kernels = [kernel for _, kernel in replaced(rewriter)]
    assert kernels == ["sm90.grouped_gemm"] * len(kernels) and 1 <= len(kernels) <= 2
