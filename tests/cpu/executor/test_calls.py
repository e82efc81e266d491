"""A built graph as a function of its inputs by place: tensors alike are checked once, and nothing else passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, Graph
from opfuse.graph_ops.calls import LAYOUTS, SIZES, Calls
from opfuse.graph_ops.ir.errors import VariantPackError


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each call whose buffers are checked in full."""
    from opfuse.graph_ops.buffers import Binder

    seen: list[int] = []
    bind = Binder.bind

    def counted(self: Binder, buffers: Any) -> Any:
        seen.append(1)
        return bind(self, buffers)

    monkeypatch.setattr(Binder, "bind", counted)
    return seen


@pytest.fixture
def calls() -> Calls:
    """(a, b, offs) -> (y, z), z being y rounded."""
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    m = graph.symbol("M")
    a, b = graph.tensor("a", (m, 8)), graph.tensor("b", (2, 8, 4))
    offsets = graph.tensor("offs", (2,), data_type=DataType.INT32)
    y = graph.grouped_matmul(a, b, offsets).set_data_type(DataType.FLOAT).set_output(True).set_name("y")
    graph.identity(y).set_data_type(DataType.BFLOAT16).set_output(True).set_name("z")
    return Calls(graph.build(), ("a", "b", "offs"), ("z", "y"))


def tensors(rows: int = 6) -> list[torch.Tensor]:
    return [torch.randn(rows, 8), torch.randn(2, 8, 4), torch.tensor([2, rows], dtype=torch.int32)]


def agree(calls: Calls, given: list[torch.Tensor]) -> None:
    z, y = calls(*given)
    a, b, offsets = given
    end, last = offsets.tolist()
    wanted = torch.zeros(len(a), 4, dtype=torch.float64)
    wanted[:end], wanted[end:last] = a[:end].double() @ b[0].double(), a[end:last].double() @ b[1].double()
    torch.testing.assert_close(y, wanted.float())
    assert z.dtype is torch.bfloat16 and torch.equal(z, y.bfloat16())


def test_tensors_alike_are_checked_once_wherever_they_lie(calls: Calls, checks: list[int]) -> None:
    kept = [tensors() for _ in range(4)]  # all alive, so that no address comes back
    for given in kept:
        agree(calls, given)
    assert len(checks) == 1


def test_each_extent_of_a_symbol_is_checked_once(calls: Calls, checks: list[int]) -> None:
    for rows in (6, 3, 6, 0, 3, 9, 0):
        given = tensors(rows)
        given[2][0] = min(2, rows)
        agree(calls, given)
    assert len(checks) == 4


@pytest.mark.parametrize(
    "place, change, code",
    [
        (0, lambda t: t.double(), "DATA_TYPE"),
        (0, lambda t: t[:, :7], "SYMBOL|DIM|SHAPE|EXTENT"),
        (1, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "STRIDE"),
        (0, lambda t: torch.zeros(t.numel() + 1)[1:].view(t.shape), "ALIGNMENT"),
        (2, lambda t: t.flip(0), "OFFSETS"),
        (2, lambda t: t + 1, "OFFSETS"),
    ],
)
def test_what_differs_is_refused_after_what_passed(calls: Calls, place: int, change: Any, code: str) -> None:
    given = tensors()
    agree(calls, given)
    wrong = [change(t) if at == place else t for at, t in enumerate(given)]
    for _ in range(2):
        with pytest.raises(VariantPackError) as refused:
            calls(*wrong)
        assert any(name in refused.value.code for name in code.split("|")), refused.value
    agree(calls, given)


def test_rows_that_disagree_are_refused_after_either_count_passed() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    m = graph.symbol("M")
    graph.add(graph.tensor("a", (m, 8)), graph.tensor("b", (m, 8))).set_output(True).set_name("y")
    calls = Calls(graph.build(), ("a", "b"), ("y",))
    for rows in (5, 6):
        calls(torch.ones(rows, 8), torch.ones(rows, 8))
    with pytest.raises(VariantPackError):
        calls(torch.ones(5, 8), torch.ones(6, 8))


def test_one_tensor_twice_and_parameters_and_subclasses(checks: list[int]) -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    graph.add(graph.tensor("a", (4, 8)), graph.tensor("b", (4, 8))).set_output(True).set_name("y")
    calls = Calls(graph.build(), ("a", "b"), ("y",))
    plain = torch.randn(4, 8)

    class Own(torch.Tensor):
        pass

    for given, seen in (((plain, plain), 1), ((torch.nn.Parameter(plain), plain.clone()), 1),
                        ((plain.as_subclass(Own), plain.clone()), 2)):  # fmt: skip
        checks.clear()
        for _ in range(2):
            (y,) = calls(*given)
            assert not y.requires_grad and torch.equal(torch.as_tensor(y), 2 * plain)
        assert len(checks) == seen, given[0].__class__


def test_a_plan_that_is_selected_later_is_taken(calls: Calls, checks: list[int]) -> None:
    given = tensors()
    agree(calls, given)
    calls._plans.pin(0)
    agree(calls, given)
    agree(calls, given)
    assert len(checks) == 2


def test_what_is_known_is_bounded(calls: Calls) -> None:
    base = torch.randn(40, 8 * LAYOUTS)
    for pitch in range(LAYOUTS + 3):  # more kinds than are kept, by the one stride that a lone row leaves open
        row = base.as_strided((1, 8), (8 + pitch, 1))
        calls(row, torch.randn(2, 8, 4), torch.tensor([0, 1], dtype=torch.int32))
    for rows in range(SIZES + 5):
        calls(torch.randn(rows, 8), torch.randn(2, 8, 4), torch.tensor([0, rows], dtype=torch.int32))
    assert len(calls._layouts) <= LAYOUTS
    assert all(len(known) <= SIZES for _, known in calls._layouts)
