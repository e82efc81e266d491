"""The expert MLP on a GPU beside the host and other work: no waiting, streams, threads, CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mlp_problems import (  # type: ignore[import-not-found]
    DEVICE,
    PROBLEMS,
    SEED,
    UNDISTURBED,
    USUAL,
    Case,
    Problem,
    fresh_data,
    mlp_kernels,
    relative,
)
from opfuse.graph_ops import OpfuseError
from opfuse.graph_ops.torch import GroupedMLP
from opfuse.graph_ops.torch.routing import combine, dispatch, route, row_probs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
__all__ = ["fresh_data", "mlp_kernels"]


@pytest.mark.parametrize("name", UNDISTURBED)
def test_nothing_waits_for_the_gpu(name: str) -> None:
    problem = PROBLEMS[name]
    case = problem.case()
    dy = torch.randn_like(case.x)
    problem.step(case, dy)  # builds
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    got = problem.step(case, dy)
    torch.cuda.set_sync_debug_mode("default")
    assert all(t.isfinite().all() for t in got.values())


def test_routing_does_not_wait_for_the_gpu() -> None:
    experts = GroupedMLP(8, 64, 64, device=DEVICE, dtype=torch.bfloat16, allow_tail=True)
    x = torch.randn(96, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    expert = torch.randint(10, (96, 2), device=DEVICE)  # two ids belong to other ranks
    weight = torch.rand(96, 2, device=DEVICE)

    def layer() -> torch.Tensor:
        routing = route(expert, 8, multiple_of=8)
        y, _ = experts(dispatch(x, routing), routing.tokens_per_expert, row_probs(weight, routing))
        return combine(y, routing)

    layer().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    layer().sum().backward()


def test_threads_on_streams_of_their_own() -> None:
    cases = [USUAL.case() for _ in range(4)]
    dys = [torch.randn_like(case.x) for case in cases]
    wanted = [USUAL.step(case, dy) for case, dy in zip(cases, dys)]
    torch.cuda.synchronize()
    found: dict[int, dict[str, torch.Tensor]] = {}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    found[number] = USUAL.step(cases[number], dys[number])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number, expected in enumerate(wanted):
        assert all(torch.equal(found[number][n], t) for n, t in expected.items()), f"stream {number}, seed {SEED}"


def refill(case: Case, problem: Problem, counts: Sequence[int]) -> None:
    """New values in the tensors of `case`: another routing and all else."""
    other = problem.case()
    with torch.no_grad():
        for name, leaf in case.leaves.items():
            leaf.copy_(other.leaves[name])
        case.counts.copy_(torch.tensor(counts))


def routings_of(problem: Problem) -> list[tuple[int, ...]]:
    """Ways to split as many rows as `problem` has, empty experts and all in one among them."""
    counts = problem.counts
    everything = [0] * len(counts)
    everything[-1] = sum(counts)
    found = [counts[::-1], tuple(everything), counts]
    if problem.tail:  # fewer and more rows than when it was captured
        found += [(sum(counts) + problem.tail, *[0] * (len(counts) - 1)), (0,) * len(counts)]
    return found


@pytest.mark.parametrize("name", UNDISTURBED)
def test_one_capture_serves_every_routing(name: str) -> None:
    problem = PROBLEMS[name]
    case = problem.case()
    dy = torch.randn_like(case.x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        problem.step(case, dy)  # builds
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = problem.step(case, dy)
    # Were anything allocated outside the graph's pool, these would lie where a replay writes.
    others = [torch.full((2**n,), 3.0, device=DEVICE) for n in range(8, 24) for _ in range(3)]
    for counts in routings_of(problem):
        refill(case, problem, counts)
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        got = {n: t.clone() for n, t in static.items()}
        wanted = problem.step(case, dy)
        for n, t in wanted.items():
            assert torch.equal(got[n], t), f"{n} with {counts}: {relative(got[n], t):.1e} (seed {SEED})"
    assert all(bool((t == 3.0).all()) for t in others)


class Alone(torch.nn.Module):
    """The experts' output without their bias, which is None and no tensor."""

    def __init__(self, experts: GroupedMLP) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return self.experts(x, counts, probs)[0]


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_make_graphed_callables_takes_the_module(recipe: str | None) -> None:
    rows, hidden = 192, 128
    made = dict(device=DEVICE, dtype=torch.bfloat16, recipe=recipe, multiple_of=32)
    plain = GroupedMLP(4, hidden, 128, **made)
    model = Alone(GroupedMLP(4, hidden, 128, **made))
    model.experts.load_state_dict(plain.state_dict())

    def inputs(counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        return x, torch.tensor(counts, device=DEVICE), torch.rand(rows, device=DEVICE, requires_grad=True)

    graphed = torch.cuda.make_graphed_callables(model, inputs([64, 32, 64, 32]))
    for counts in ([64, 32, 64, 32], [0, 96, 0, 96], [192, 0, 0, 0]):
        x, tokens, probs = inputs(counts)
        dy = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
        found = []
        experts: Any
        for experts in (graphed, lambda *args: plain(*args)[0]):
            for tensor in (x, probs, *plain.parameters(), *model.parameters()):
                tensor.grad = None
            y = experts(x, tokens, probs)
            y.backward(dy)
            weights = [p.grad for p in (model if experts is graphed else plain).parameters()]
            found.append([t.clone() for t in (y, x.grad, probs.grad, *weights)])
        for number, (one, other) in enumerate(zip(*found)):
            assert torch.equal(one, other), f"result {number} with {counts} (seed {SEED})"


def test_a_capture_before_any_build_is_refused_by_name() -> None:
    problem = Problem(H=136, I=136, dtype=torch.float32)
    case = problem.case()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(OpfuseError, match="before the capture") as raised, torch.cuda.graph(graph):
        problem.forward(case)
    assert raised.value.code == "BUILD_IN_CAPTURE"
    torch.cuda.synchronize()
    assert problem.forward(case).isfinite().all()
