"""A step that torch.compile's backend compiled for Hopper: which ops it is made of, and that they compute what eager
does. Adapters and launches are the real ones, over emulated functions on a CPU that is taken for the GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opfuse.graph_ops import graph as graph_module
from opfuse.graph_ops.torch.compile import rewrite
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.kernels.arch import ARCHES
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))

from plain_moe import (  # type: ignore[import-not-found]
    BF16,
    Experts,
    Float32Activation,
    Fused,
    H,
    I,
    L,
    Separate,
    compiled,
    mm,
    oracle,
    step,
)

GLU, DGLU, GEMM, WGRAD = "grouped_gemm_glu", "grouped_gemm_dglu", "grouped_gemm", "grouped_gemm_wgrad"
COUNTS = [(24, [8, 0, 16]), (40, [40, 0, 0]), (33, [1, 30, 2])]


@pytest.fixture(autouse=True)
def on_hopper(emulated: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rewrite, "arch_of_device", lambda device: ARCHES["sm90"])
    monkeypatch.setattr(
        graph_module.Graph, "_resolve", lambda self, arch, device: (ARCHES["sm90"], torch.device("cpu"))
    )
    GRAPHS.clear()
    torch._dynamo.reset()
    yield
    GRAPHS.clear()
    torch._dynamo.reset()


def ops_of(rewriter: Any, part: str) -> list[tuple[str, ...]]:
    """The rules of each op that a part of the first compilation runs, by op; those of the first are listed first."""
    return [tuple(s.rule for s in r.plan.steps) for r in rewriter.regions if r.part == part and r.replaced]


def close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((got.double() - wanted.double()).norm()) / (float(wanted.double().norm()) or 1.0)
    assert got.shape == wanted.shape and error < 2e-2, f"{what}: {error:.2e}"


@pytest.mark.parametrize(
    "model_type, forward, backward",
    [
        (Fused, [{GLU, GEMM}], [{DGLU}, {WGRAD}, {WGRAD, GEMM}]),
        (Float32Activation, [{GLU, GEMM}], [{DGLU}, {WGRAD}, {WGRAD, GEMM}]),
        # The two parts of dx are added up before the gradients of gate and up are made.
        (Separate, [{GLU, GEMM}], [{DGLU}, {WGRAD}, {WGRAD}, {GEMM}]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_is_few_ops_and_computes_what_eager_does(
    model_type: Any, forward: list[set[str]], backward: list[set[str]], seed: int
) -> None:
    torch.manual_seed(seed)
    model = model_type()
    fast, rewriter, _ = compiled(model)
    for rows, counts in COUNTS:
        for number, (got, wanted) in enumerate(zip(step(fast, rows, counts), oracle(model, rows, counts), strict=True)):
            close(got, wanted, f"output {number} of {rows} rows, seed {seed}")
    assert [set(rules) for rules in ops_of(rewriter, "forward")[: len(forward)]] == forward
    ran = [set(rules) for rules in ops_of(rewriter, "backward")[: len(backward)]]
    assert ran == backward, ops_of(rewriter, "backward")


def test_no_op_waits_for_another_of_its_own(seed: int) -> None:
    """A chain of products without a GLU: each backward gradient is read by the next, and by one weight's."""
    torch.manual_seed(seed)

    class Chain(Experts):
        def __init__(self) -> None:
            super().__init__()
            del self.w3

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            offsets = self.offsets(counts)
            return mm(mm(x, self.w1, offsets), self.w2, offsets)

    model = Chain()
    fast, rewriter, _ = compiled(model)
    for rows, counts in COUNTS[:2]:
        for one, two in zip(step(fast, rows, counts), step(model, rows, counts), strict=True):
            close(one, two, f"{rows} rows, seed {seed}")
    assert ops_of(rewriter, "forward")[:2] == [(GEMM,), (GEMM,)]
    found = ops_of(rewriter, "backward")[:3]
    assert sorted(len(rules) for rules in found) == [1, 1, 2], found


class Cast(Fused):
    """Its rows are made in the graph."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5, counts)


def test_rows_that_may_go_before_the_second_product_are_not_held_for_it(seed: int) -> None:
    """Kept for the backward, they are there anyway; without one, they would be a tensor more at the peak."""
    torch.manual_seed(seed)
    model, counts = Cast(), torch.tensor([8, 0, 16])
    fast, rewriter, _ = compiled(model)
    step(fast, *COUNTS[0])
    assert [set(rules) for rules in ops_of(rewriter, "forward")] == [{GLU, GEMM}]
    torch._dynamo.reset()
    fast, rewriter, _ = compiled(model)
    x = torch.randn(24, H).to(BF16)
    with torch.no_grad():
        close(fast(x, counts), model(x, counts), f"y, seed {seed}")
    assert ops_of(rewriter, "inference" if ops_of(rewriter, "inference") else "forward") == [(GLU,), (GEMM,)]


def lone_product() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(24, H, dtype=BF16), torch.empty(L, H, I, dtype=BF16), torch.empty(L, dtype=torch.int32)]
        args = [graph.placeholder(name) for name in ("x", "w", "offsets")]
        for node, value in zip(args, values, strict=True):
            node.meta["val"] = value
        product = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(args))
        product.meta["val"] = torch.empty(24, I, dtype=BF16)
    graph.output((product,))
    return graph


@pytest.mark.parametrize(
    "disable, tuned, expected",
    [((), False, 1), ((GEMM,), False, 0), (("sm90.grouped_gemm",), False, 0), ((WGRAD,), False, 1), ((), True, 0)],
)
def test_what_is_disabled_or_measured_by_inductor_stays_atens(
    disable: tuple[str, ...], tuned: bool, expected: int
) -> None:
    rewriter = rewrite.Rewriter(rewrite.Options.of({"disable": disable}))
    with torch._inductor.config.patch(max_autotune_gemm=tuned):
        rewriter(lone_product(), "forward")
    assert len(rewriter.regions) == expected


def test_other_forms_stay_atens(seed: int) -> None:
    """A batch without offsets is nobody's; half the columns of a matrix serve, as its rows lie apart."""
    torch.manual_seed(seed)

    class Forms(Experts):
        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            offsets = self.offsets(counts)
            narrow = mm(x[:, : H // 2], self.w1[:, :, : H // 2], offsets)
            pairs = torch._grouped_mm(self.w1, self.w2)  # (L, I, H) x (L, H, I)
            return mm(narrow, self.w2, offsets) + pairs.sum()

    model, counts = Forms(), torch.tensor([8, 0, 16])
    fast, rewriter, _ = compiled(model)
    x = torch.randn(24, H).to(BF16)
    with torch.no_grad():
        close(fast(x, counts), model(x, counts), f"seed {seed}")
    rules = [tuple(s.rule for s in r.plan.steps) for r in rewriter.regions if r.replaced]
    assert rules and set(rules) == {(GEMM,)} and len(rules) <= 2
