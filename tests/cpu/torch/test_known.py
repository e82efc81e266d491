"""Calls that are recognised are checked no less: what changed is refused, and finds a graph of its own where it may."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops.ir.errors import StateError, VariantPackError
from opfuse.graph_ops.torch import grouped_mlp, ops
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.graph_ops.torch.known import CHOICES, KNOWN, LAYOUTS, KnownCalls

CHOICES_OF: tuple[object, ...] = ("swiglu", [], "concatenated", 1, False)


@pytest.fixture
def checks(monkeypatch):
    """Grows by one with each call of an op whose tensors are looked at one by one."""
    GRAPHS.clear()
    seen = []
    check = ops.check_half

    def counted(*given):
        seen.append(1)
        return check(*given)

    monkeypatch.setattr(ops, "check_half", counted)
    return seen


def tensors(rows=8, hidden=32, half=48, experts=2, dtype=torch.float32):
    x = torch.randn(rows, hidden, dtype=dtype)
    offsets = torch.tensor([rows // 2] * (experts - 1) + [rows], dtype=torch.int32)
    return x, offsets, torch.randn(experts, 2 * half, hidden, dtype=dtype), torch.rand(rows)


def fc1(*given):
    return torch.ops.opfuse.grouped_mlp_fc1(*given, *CHOICES_OF)


def test_tensors_alike_are_recognised_at_any_number_of_rows(checks, seed):
    for rows in (8, 8, 6, 30, 8):
        x, offsets, w1, prob = tensors(rows)
        h, act = fc1(x, offsets, w1, prob)
        assert h.shape == (rows, 96) and act.shape == (rows, 48)
        torch.testing.assert_close(h[-1], w1[1] @ x[-1], msg=f"seed {seed}")
    assert len(checks) == 1
    fc1(*tensors(hidden=64))
    fc1(*tensors(dtype=torch.bfloat16))
    x, offsets, w1, prob = tensors()
    fc1(x, offsets, w1.transpose(1, 2).contiguous().transpose(1, 2), prob)
    fc1(x, offsets, w1, None)
    assert len(checks) == 5
    GRAPHS.clear()
    fc1(*tensors())
    assert len(checks) == 6, "no graph outlives the cache of graphs"


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda x, offsets, w1, prob: (x[:-1], offsets, w1, prob), "SHAPE"),
        (lambda x, offsets, w1, prob: (x, offsets, w1, prob[:-1]), "SHAPE"),
        (lambda x, offsets, w1, prob: (x.double(), offsets, w1, prob), "DATA_TYPE"),
        (lambda x, offsets, w1, prob: (x, offsets, w1, prob.double()), "DATA_TYPE"),
        (lambda x, offsets, w1, prob: (x, offsets[:1], w1, prob), "EXPERTS"),
        (lambda x, offsets, w1, prob: (x, offsets - 1, w1, prob), "TOKENS_PER_EXPERT"),
    ],
)
def test_what_changed_is_refused_after_what_passed(change, code, seed):
    given = tensors()
    fc1(*given)
    for _ in range(2):
        with pytest.raises(VariantPackError) as refused:
            fc1(*change(*given))
        assert refused.value.code == code
    fc1(*given)


def test_rows_off_their_alignment_have_a_graph_of_their_own(checks, seed):
    x, offsets, w1, prob = tensors()
    wanted, _ = fc1(x, offsets, w1, prob)
    moved = torch.zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for _ in range(2):
        got, _ = fc1(moved, offsets, w1, prob)
        torch.testing.assert_close(got, wanted, msg=f"seed {seed}")
    assert len(checks) == 2 and len(GRAPHS) == 2


def test_what_is_known_is_bounded(seed):
    known, graph = KnownCalls(), None
    fc1(*tensors())
    graph = GRAPHS.graphs()[-1]
    for number in range(CHOICES + 3):
        assert known.find((number,), [torch.randn(3, 4)], [None], lambda: graph) is graph
    for columns in range(1, LAYOUTS + 4):
        assert known.find((0,), [torch.randn(3, columns)], [], lambda: graph) is graph
    assert len(known._known) <= CHOICES
    assert all(len(held) <= LAYOUTS for held in known._known.values())
    assert KNOWN is not known


@pytest.mark.parametrize("save", ["activation", "inputs"])
def test_to_differentiate_twice_is_an_error(save, make_case):
    case = make_case([4, 4])
    y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, save=save)
    (dx,) = torch.autograd.grad(y.square().sum(), [case.x], create_graph=True)
    for leaf in (case.w1, case.x):
        with pytest.raises(StateError) as refused:
            torch.autograd.grad(dx.sum(), [leaf], allow_unused=True, retain_graph=True)
        assert refused.value.code == "SECOND_DERIVATIVE"
