"""Which path serves a routing, and what the kernels are launched with: on the CPU, with kernels in plain Python that
read and write the addresses they are given."""

from __future__ import annotations

import ctypes

import pytest
import torch
from opfuse.graph_ops.torch.routing import combine, dispatch, route
from opfuse.kernels.sm90.routing_config import BINS, CHUNK, MOST_CHOICES, MOST_PLACED
from opfuse.kernels.torch_ops import route_choices, small_kernels, token_rows
from torch._subclasses.fake_tensor import FakeTensorMode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARP_CHOICES = CHUNK // 8


def memory(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """`count` elements that lie at an address."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def adder(top_k, dtype):
    def add(source, pitch, slot, out, tokens, words, stream):
        width = words * 16 // dtype.itemsize
        rows = memory(slot, torch.int64, tokens * top_k).tolist()
        for t in range(tokens):
            terms = [memory(source + row * pitch, dtype, width).float() for row in rows[t * top_k : (t + 1) * top_k]]
            memory(out + t * words * 16, dtype, width).copy_(sum(terms[1:], terms[0]))

    return add


def copier(top_k):
    def copy(source, pitch, slot, filled, out, tokens, rows, words, stream):
        for row in range(rows):
            if not memory(filled, torch.bool, rows)[row]:
                memory(out + row * words * 16, torch.uint8, words * 16).zero_()
        for i, row in enumerate(memory(slot, torch.int64, tokens * top_k).tolist()):
            here = memory(source + i // top_k * pitch, torch.uint8, words * 16)
            memory(out + row * words * 16, torch.uint8, words * 16).copy_(here)

    return copy


def placer(id_bits, bins):
    """Both kernels of route_choices.py, a warp after the other and from the last chunk on."""

    def place(ids, counts, slot, token, filled, tokens_per_expert, choices, top_k, experts, multiple_of, rows, stream):
        chunks = -(-choices // CHUNK)
        expert = memory(ids, torch.int64 if id_bits == 64 else torch.int32, choices).long()
        bin_of = torch.where((expert < 0) | (expert >= experts), experts, expert)
        table = memory(counts, torch.int32, chunks * bins).view(chunks, bins)
        for chunk in range(chunks):
            table[chunk, : experts + 1] = bin_of[chunk * CHUNK :][:CHUNK].bincount(minlength=experts + 1)
        token, slot = memory(token, torch.int64, rows), memory(slot, torch.int64, choices)
        if multiple_of > 1:
            token.zero_()
            memory(filled, torch.bool, rows).zero_()
        total = table[:, : experts + 1].sum(0)
        padded = (total + (multiple_of - 1)) // multiple_of * multiple_of
        first = padded.cumsum(0) - padded
        memory(tokens_per_expert, torch.int64, experts).copy_(padded[:experts])
        for chunk in reversed(range(chunks)):
            at = first + table[:chunk, : experts + 1].sum(0)
            for begin in range(chunk * CHUNK, min(choices, (chunk + 1) * CHUNK), WARP_CHOICES):
                for i in range(begin, min(choices, begin + WARP_CHOICES)):
                    row = int(at[bin_of[i]])
                    at[bin_of[i]] += 1
                    slot[i], token[row] = row, i // top_k
                    if multiple_of > 1:
                        memory(filled, torch.bool, rows)[row] = True

    return place


@pytest.fixture
def launches(monkeypatch):
    """Lets the kernels serve tensors of the CPU, and keeps the names of those launched."""
    seen = []

    def named(name, kernel):
        def launched(*words):
            seen.append(name)
            kernel(*words)

        return launched

    for module in (token_rows, route_choices):
        monkeypatch.setattr(module, "place_obstacle", lambda x: "")
        monkeypatch.setattr(module, "launch", lambda kernel, device, *words: kernel(*words, 0))
    monkeypatch.setattr(
        token_rows, "_kernels", lambda k, dtype: (named("sum", adder(k, DTYPES[dtype])), named("copy", copier(k)))
    )
    monkeypatch.setattr(route_choices, "_loaded", lambda bits, bins: named("route", placer(bits, bins)))
    return seen


@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_kernels_and_expressions_agree_both_ways(launches, top_k, dtype, multiple_of, seed):
    expert = torch.randint(6, (19, top_k))
    x = torch.randn(19, 24).to(dtype).requires_grad_()
    routing = route(expert, 4, multiple_of=multiple_of)
    rows = dispatch(x, routing)
    up = torch.randn_like(rows)
    (dx,) = torch.autograd.grad(rows, x, up)
    y = torch.randn_like(rows).requires_grad_()
    total = combine(y, routing)
    (dy,) = torch.autograd.grad(total, y, x.detach())
    assert launches == ["route", "copy", "sum", "sum", "copy"]
    wanted = torch.zeros_like(rows)
    wanted[routing.slot] = x.detach().repeat_interleave(top_k, 0)
    assert torch.equal(rows, wanted) and torch.equal(dy, wanted), f"seed {seed}"
    for got, terms in ((dx, up), (total.detach(), y.detach())):
        terms = terms.double()[routing.slot].view(19, top_k, 24)
        if top_k <= 2:
            assert torch.equal(got, terms.float().sum(1).to(dtype)), f"seed {seed}"
        bound = terms.abs().sum(1) * 2.0**-24 * (top_k - 1) + terms.sum(1).abs() * torch.finfo(dtype).eps * 0.51
        assert bool(((got.double() - terms.sum(1)).abs() <= bound).all()), f"seed {seed}"


@pytest.mark.parametrize("multiple_of", [1, 16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("experts", [3, 62, 63, 1022])
def test_the_kernel_routes_as_the_sort(launches, experts, dtype, multiple_of, seed):
    for tokens in (1, 700):  # 2100 choices are three chunks, the last one with an odd end
        expert = torch.randint(experts + 2, (tokens, 3), dtype=dtype)
        got = route_choices.place_choices(expert, experts, multiple_of)
        wanted = route_choices._sorted(expert, experts, multiple_of)
        for one, two in zip(got, wanted):
            assert (one is two is None) or (one.dtype is two.dtype and torch.equal(one, two)), f"seed {seed}"
    assert launches == ["route"] * 2


def test_rows_apart_are_taken_as_they_lie(launches, seed):
    routing = route(torch.randint(4, (9, 2)), 4)
    wide = torch.randn(18, 32)
    x, y = wide[:9, 8:24], wide[:, 4:12]
    assert torch.equal(dispatch(x, routing)[routing.slot], x.repeat_interleave(2, 0))
    assert torch.equal(combine(y, routing), y[routing.slot].view(9, 2, 8).sum(1))
    assert launches == ["route", "copy", "sum"]


def test_nothing_is_launched_for_nothing(launches):
    routing = route(torch.empty(0, 2, dtype=torch.int64), 4, multiple_of=8)
    x = torch.empty(0, 16)
    assert dispatch(x, routing).shape == (0, 16) and combine(dispatch(x, routing), routing).shape == (0, 16)
    assert not launches


def test_what_the_kernels_do_not_take(launches):
    x, slot = torch.zeros(4, 64), torch.arange(8)
    assert not token_rows.obstacle(x, slot, 2, 8)
    cases = {
        "data type": (x.double(), slot, 2, 8),
        "contiguous": (x[:, ::2], slot, 2, 8),
        "multiples of 16 bytes": (x[:, :6], slot, 2, 8),
        "rows are not": (x[:, 1:5], slot, 2, 8),
        "choices a token": (x, slot, MOST_CHOICES + 1, 8),
        "counts to": (x, slot, 2, 2**31),
        "slots": (x, slot.int(), 2, 8),
        "strides": (x, torch.arange(16)[::2], 2, 8),
        "gradient of the gradient": (x.clone().requires_grad_(), slot, 2, 8),
    }
    for words, arguments in cases.items():
        assert words in token_rows.obstacle(*arguments)
    expert = torch.zeros(6, 2, dtype=torch.int64)
    assert not route_choices.obstacle(expert, BINS[-1] - 2, 8)
    others = {
        "ids of": (expert.short(), 4, 1),
        "strides": (expert.t(), 4, 1),
        f"1 to {MOST_PLACED}": (expert[:0], 4, 1),
        "kernel counts 1022": (expert, BINS[-1] - 1, 1),
        "padded to multiples": (expert, 8, 2**29),
    }
    for words, arguments in others.items():
        assert words in route_choices.obstacle(*arguments)


def test_where_no_kernel_runs(monkeypatch):
    x = torch.zeros(2, 8)
    assert "on cpu" in small_kernels.place_obstacle(x)
    with FakeTensorMode():
        assert "subclass" in small_kernels.place_obstacle(torch.empty(2, 8, device="cuda"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile" in small_kernels.place_obstacle(x)


def test_the_gradient_of_the_gradient_goes_through_the_expressions(launches, seed):
    routing = route(torch.randint(4, (9, 3)), 4, multiple_of=4)
    x = torch.randn(9, 8, requires_grad=True)
    (dx,) = torch.autograd.grad((combine(dispatch(x, routing) ** 2, routing) ** 2).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(got, 108 * x.detach() ** 2)  # each token's sum is 3 x^2, its square 9 x^4
