"""Tokens to rows and back on a GPU: our kernels against plain indexing in float64, beside streams and in captures."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from opfuse.graph_ops import OpfuseError
from opfuse.graph_ops.torch.routing import Routing, combine, dispatch, route, row_probs
from opfuse.kernels.torch_ops import token_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda"
SEED = int(os.environ.get("OPFUSE_SEED", int.from_bytes(os.urandom(3), "little")))
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EXPERTS = 16
POISON = 777.0
hopper = pytest.mark.skipif(not IS_HOPPER, reason="our kernels are for Hopper")


@pytest.fixture(autouse=True)
def fresh_data() -> Iterator[None]:
    """Random data from this run's seed, over poisoned memory; waiting for the GPU is allowed again afterwards."""
    torch.manual_seed(SEED)
    held = [torch.full((2**n,), float("nan"), device=DEVICE) for n in range(7, 24) for _ in range(4)]
    del held
    yield
    torch.cuda.set_sync_debug_mode("default")


def choices(tokens: int, top_k: int, beyond: int = 3) -> torch.Tensor:
    """(T, k) ids; those of EXPERTS and more are experts of other ranks."""
    return torch.randint(EXPERTS + beyond, (tokens, top_k), device=DEVICE)


def served(x: torch.Tensor, routing: Routing) -> bool:
    return not token_rows.obstacle(x, routing.slot, routing.top_k, routing.token.shape[0])


def rows_of(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """What `dispatch` gives."""
    out = torch.zeros(routing.token.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    out[routing.slot] = x.repeat_interleave(routing.top_k, 0)
    return out


def check_sum(got: torch.Tensor, y: torch.Tensor, routing: Routing) -> None:
    """Against the sum in float64: each addition of float32 and the last rounding are off by half a step at most."""
    terms = y.double()[routing.slot].view(-1, routing.top_k, y.shape[1])
    wanted, size = terms.sum(1), terms.abs().sum(1)
    bound = wanted.abs() * HALF_STEP[y.dtype] * 1.01 + size * 2.0**-24 * (routing.top_k - 1) + 2.0**-25
    assert got.dtype is y.dtype
    worst = ((got.double() - wanted).abs() - bound).max() if got.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"{float(worst):.1e} beyond the bound (seed {SEED})"
    if routing.top_k <= 2:
        assert torch.equal(got, terms.float().sum(1).to(y.dtype)), f"one or two terms round once (seed {SEED})"


def check_both_ways(x: torch.Tensor, routing: Routing) -> None:
    """dispatch, combine and their derivatives."""
    x = x.detach().requires_grad_()
    rows = dispatch(x, routing)
    assert torch.equal(rows, rows_of(x.detach(), routing)), f"seed {SEED}"
    upstream = torch.randn_like(rows)
    (dx,) = torch.autograd.grad(rows, x, upstream)
    check_sum(dx, upstream, routing)
    y = torch.randn_like(rows).requires_grad_()
    total = combine(y, routing)
    check_sum(total.detach(), y.detach(), routing)
    upstream = torch.randn_like(total)
    (dy,) = torch.autograd.grad(total, y, upstream)
    assert torch.equal(dy, rows_of(upstream, routing)), f"seed {SEED}"


@hopper
@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "top_k"),
    [*((torch.bfloat16, k) for k in (3, 4, 5, 6, 7)), *((d, k) for d in HALF_STEP for k in (1, 2, 8))],
    ids=str,
)
def test_every_type_and_number_of_choices(dtype: torch.dtype, top_k: int, multiple_of: int) -> None:
    routing = route(choices(301, top_k), EXPERTS, multiple_of=multiple_of)
    x = torch.randn(301, 1032, device=DEVICE).to(dtype)
    assert served(x, routing)
    check_both_ways(x, routing)


@hopper
@pytest.mark.parametrize("tokens", [1, 2, 127, 4096])
@pytest.mark.parametrize("hidden", [8, 16, 72, 248, 1024, 2880, 7168, 16384])
def test_rows_of_every_length(tokens: int, hidden: int) -> None:
    routing = route(choices(tokens, 3), EXPERTS, multiple_of=4)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    assert served(x, routing)
    check_both_ways(x, routing)


@hopper
@pytest.mark.parametrize("top_k", [11, 32])
def test_many_choices(top_k: int) -> None:
    routing = route(choices(77, top_k), EXPERTS)
    x = torch.randn(77, 520, device=DEVICE, dtype=torch.float16)
    assert served(x, routing)
    check_both_ways(x, routing)


@pytest.mark.parametrize(
    "case", ["no tokens", "one expert takes all", "nothing here", "float64", "7 columns", "33 choices"]
)
def test_edges(case: str) -> None:
    tokens = 0 if case == "no tokens" else 65
    top_k = 33 if case == "33 choices" else 2
    expert = choices(tokens, top_k)
    if case == "one expert takes all":
        expert.fill_(3)
    if case == "nothing here":
        expert.fill_(EXPERTS)
    x = torch.randn(tokens, 7 if case == "7 columns" else 64, device=DEVICE)
    x = x.double() if case == "float64" else x.bfloat16()
    for multiple_of in (1, 16):
        routing = route(expert, EXPERTS, multiple_of=multiple_of)
        if case == "float64":
            assert not served(x, routing)
            assert torch.equal(dispatch(x, routing), rows_of(x, routing))
        else:
            assert served(x, routing) == (IS_HOPPER and case not in ("7 columns", "33 choices"))
            check_both_ways(x, routing)


def test_rows_apart_and_not_contiguous() -> None:
    routing = route(choices(200, 2), EXPERTS, multiple_of=8)
    wide = torch.randn(200, 256, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.randn(routing.token.shape[0], 256, device=DEVICE, dtype=torch.bfloat16)
    cases = [(slice(64, 192), IS_HOPPER), (slice(3, 67), False), (slice(None, None, 2), False)]
    for columns, kernel in cases:
        x, y = wide[:, columns], rows[:, columns]
        assert served(x, routing) == kernel
        assert torch.equal(dispatch(x, routing), rows_of(x, routing))
        check_sum(combine(y, routing), y, routing)
    same = wide[:1].expand(200, 256)  # one row for all tokens
    assert torch.equal(dispatch(same, routing), rows_of(same, routing))
    ones = torch.ones(200, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dispatch(ones, routing).sum().backward()  # a gradient of which every element is the same one
    assert ones.grad is not None and bool((ones.grad == 2).all())


def test_the_gradient_of_the_gradient() -> None:
    routing = route(choices(20, 3), EXPERTS, multiple_of=4)
    x = torch.randn(20, 8, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad((combine(dispatch(x, routing) ** 2, routing) ** 2).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad(dx.sum(), x)
    wanted = 3 * 12 * x.detach() ** 2 * 3  # y = 3 x^2; the sum of y^2 is 9 x^4
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("experts", [4, 200, 300, 40000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_route_is_the_one_of_the_cpu(dtype: torch.dtype, experts: int, multiple_of: int) -> None:
    for tokens in (0, 1, 33, 2500):
        expert = torch.randint(experts + 2, (tokens, 3), dtype=dtype)
        wanted, got = (route(e, experts, multiple_of=multiple_of) for e in (expert, expert.to(DEVICE)))
        for name in ("slot", "token", "filled", "tokens_per_expert"):
            one, other = getattr(wanted, name), getattr(got, name)
            assert (one is None) == (other is None)
            if one is not None:
                assert one.dtype is other.dtype and torch.equal(one, other.cpu()), f"{name} (seed {SEED})"


def layer(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    routing = route(expert, EXPERTS, multiple_of=8)
    rows = dispatch(x, routing)
    return combine(rows * row_probs(weight, routing)[:, None].to(rows.dtype), routing)


def step(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = layer(x, weight, expert)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def inputs(tokens: int = 500, hidden: int = 256) -> tuple[torch.Tensor, ...]:
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(tokens, 2, device=DEVICE, requires_grad=True)
    return x, weight, choices(tokens, 2), torch.randn_like(x)


def test_nothing_waits_for_the_gpu() -> None:
    given = inputs()
    step(*given)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    assert len(step(*given)) == 3


def test_one_capture_serves_every_routing() -> None:
    given = inputs()
    x, weight, expert, dy = given
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x, weight, expert)  # the forward alone loads what the backward needs
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step(*given)
    others = [torch.full((2**n,), POISON, device=DEVICE) for n in range(8, 24) for _ in range(3)]
    for turn in range(4):
        with torch.no_grad():
            for tensor in (x, weight, dy):
                tensor.copy_(torch.randn_like(tensor))
        expert.copy_(choices(*expert.shape) if turn else torch.full_like(expert, 5))
        graph.replay()
        for got, wanted in zip([t.clone() for t in static], step(*given)):
            assert torch.equal(got, wanted), f"seed {SEED}"
    assert all(bool((t == POISON).all()) for t in others)


@hopper
def test_a_capture_before_any_call_is_refused_by_name() -> None:
    token_rows._kernels.cache_clear()
    token_rows._loaded.cache_clear()
    routing = route(choices(64, 2), EXPERTS)
    x = torch.randn(64, 64, device=DEVICE)
    torch.cuda.synchronize()
    with pytest.raises(OpfuseError, match="before the capture") as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        dispatch(x, routing)
    assert raised.value.code == "BUILD_IN_CAPTURE"
    torch.cuda.synchronize()
    assert torch.equal(dispatch(x, routing), rows_of(x, routing))


def test_threads_on_streams_of_their_own() -> None:
    given = [inputs(2000, 512) for _ in range(4)]
    wanted = [step(*one) for one in given]
    torch.cuda.synchronize()
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000 * number)
            for _ in range(10):
                found[number] = step(*given[number])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(wanted):
        assert all(torch.equal(a, b) for a, b in zip(found[number], expected)), f"stream {number}, seed {SEED}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    given = inputs()
    wanted = step(*given)
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in given]
    for got, expected in zip(step(*there), wanted):
        assert got.device.index == 1 and torch.equal(got.cpu(), expected.cpu())


def test_repeats_are_bitwise_equal() -> None:
    given = inputs()
    first = step(*given)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(step(*given), first)), f"seed {SEED}"


def test_only_the_result_is_allocated() -> None:
    routing = route(choices(4096, 2), EXPERTS)
    x = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16)
    dispatch(x, routing)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rows = dispatch(x, routing)
    assert torch.cuda.max_memory_allocated() - before <= rows.nbytes + 2048
    if IS_HOPPER:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total = combine(rows, routing)
        assert torch.cuda.max_memory_allocated() - before <= total.nbytes + 2048
