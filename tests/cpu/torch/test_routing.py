"""Tokens to rows and back: every choice has a row of its expert, and sums have a fixed order."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import OpfuseError
from opfuse.graph_ops.torch.routing import combine, dispatch, route, row_probs

T, K, L, H = 23, 3, 5, 8


def choices(case: str) -> torch.Tensor:
    """(T, k) expert ids; L and more are experts of other ranks."""
    if case == "random":
        return torch.stack([torch.randperm(L)[:K] for _ in range(T)])
    if case == "one expert takes all":
        return torch.full((T, K), 2)
    if case == "nothing here":
        return torch.full((T, K), L)
    if case == "no tokens":
        return torch.empty(0, K, dtype=torch.int64)
    if case == "some negative":
        return torch.randint(-2, L, (T, K))
    return torch.randint(0, L + 3, (T, K))


CASES = ("random", "one expert takes all", "nothing here", "no tokens", "some of other ranks", "some negative")


@pytest.mark.parametrize("multiple_of", [1, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_every_choice_lies_among_the_rows_of_its_expert(case, multiple_of, seed):
    expert = choices(case)
    routing = route(expert, L, multiple_of=multiple_of)
    counts = routing.tokens_per_expert
    assert counts.shape == (L,) and not (counts % multiple_of).any()
    ends = counts.cumsum(0).tolist()
    owner = [next((e for e, end in enumerate(ends) if row < end), L) for row in routing.slot.tolist()]
    assert owner == [e if 0 <= e < L else L for e in expert.flatten().tolist()], f"seed {seed}"
    assert routing.slot.unique().numel() == expert.numel()
    assert torch.equal(routing.token[routing.slot], torch.arange(expert.numel()) // K)
    rows = routing.token.shape[0]
    assert not expert.numel() or rows > int(routing.slot.max())
    assert rows >= ends[-1] and (multiple_of == 1 or rows % multiple_of == 0)
    needed = torch.tensor([(expert == e).sum() for e in range(L)])
    assert ((counts >= needed) & (counts < needed + multiple_of)).all()


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_negative_ids_are_no_expert_among_more_experts_than_a_byte_counts(multiple_of, seed):
    expert = torch.randint(-3, 300, (T, K))
    routing = route(expert, 300, multiple_of=multiple_of)
    first = routing.tokens_per_expert.cumsum(0) - routing.tokens_per_expert
    slot = routing.slot[(expert >= 0).flatten()]
    owned = expert[expert >= 0]
    assert (slot >= first[owned]).all() and (slot < first[owned] + routing.tokens_per_expert[owned]).all()
    assert (routing.slot[(expert < 0).flatten()] >= routing.tokens_per_expert.sum()).all(), f"seed {seed}"


MISTAKES = {
    "tokens of another batch": lambda r: dispatch(torch.randn(T + 1, H), r),
    "fewer tokens": lambda r: dispatch(torch.randn(T - 1, H), r),
    "rows without padding": lambda r: combine(torch.randn(T * K, H), r),
    "weights of another k": lambda r: row_probs(torch.rand(T, K + 1), r),
    "tokens of three axes": lambda r: dispatch(torch.randn(1, T, H), r),
    "ids without an axis of choices": lambda r: route(torch.zeros(T, dtype=torch.int64), L),
    "ids that are no integers": lambda r: route(torch.zeros(T, K), L),
    "a multiple of nothing": lambda r: route(torch.zeros(T, K, dtype=torch.int64), L, multiple_of=0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_routing_does_not_fit_is_named(mistake, seed):
    """On a GPU it would read or write past a tensor."""
    routing = route(choices("random"), L, multiple_of=4)
    with pytest.raises(OpfuseError) as raised:
        MISTAKES[mistake](routing)
    assert raised.value.code == "ROUTING" and raised.value.required


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_dispatch_and_combine_are_each_others_derivative(case, multiple_of, seed):
    expert = choices(case)
    routing = route(expert, L, multiple_of=multiple_of)
    tokens = expert.shape[0]
    x = torch.randn(tokens, H, dtype=torch.float64, requires_grad=True)
    rows = dispatch(x, routing)
    wanted = torch.zeros(routing.token.shape[0], H, dtype=torch.float64)
    wanted[routing.slot] = x.detach().repeat_interleave(K, 0)
    assert torch.equal(rows, wanted)
    upstream = torch.randn_like(rows)
    (dx,) = torch.autograd.grad(rows, x, upstream)
    torch.testing.assert_close(dx, upstream[routing.slot].view(tokens, K, H).sum(1))
    y = torch.randn(rows.shape, dtype=torch.float64, requires_grad=True)
    total = combine(y, routing)
    torch.testing.assert_close(total, y[routing.slot].view(tokens, K, H).sum(1))
    dy = torch.randn_like(total)
    (got,) = torch.autograd.grad(total, y, dy)
    wanted = torch.zeros_like(got)
    wanted[routing.slot] = dy.repeat_interleave(K, 0)
    assert torch.equal(got, wanted)


def test_weights_follow_their_rows(seed):
    expert = choices("some of other ranks")
    routing = route(expert, L, multiple_of=4)
    weight = torch.rand(T, K, requires_grad=True)
    probs = row_probs(weight, routing)
    assert probs.dtype is torch.float32
    assert torch.equal(probs[routing.slot].view(T, K), weight)
    assert float(probs.detach().sum()) == pytest.approx(float(weight.detach().sum()))
    upstream = torch.randn_like(probs)
    probs.backward(upstream)
    assert torch.equal(weight.grad, upstream[routing.slot].view(T, K))


def test_c104_the_whole_layer_compiles_without_a_break(seed):
    from opfuse.graph_ops.torch import grouped_mlp

    w1, w2 = torch.randn(L, 32, H, requires_grad=True), torch.randn(L, H, 16, requires_grad=True)

    def layer(x, logits):
        weight, expert = logits.softmax(-1).topk(K)
        routing = route(expert, L, multiple_of=4)
        rows = dispatch(x, routing)
        y = grouped_mlp(rows, routing.tokens_per_expert, w1, w2, row_probs(weight, routing), allow_tail=True,
                        multiple_of=4)  # fmt: skip
        return combine(y, routing)

    fast = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 12, 3):
        x, logits = torch.randn(tokens, H, requires_grad=True), torch.randn(tokens, L, requires_grad=True)
        got = torch.autograd.grad(fast(x, logits).square().sum(), (x, logits, w1, w2))
        wanted = torch.autograd.grad(layer(x, logits).square().sum(), (x, logits, w1, w2))
        for one, two in zip(got, wanted):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
