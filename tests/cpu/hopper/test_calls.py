"""A plan of launches alone as a function of its inputs: the same outputs, and nothing of torch but their memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout
from opfuse.graph_ops.calls import Calls
from torch.utils._python_dispatch import TorchDispatchMode

L, K, N = 3, 64, 128
BF16 = DataType.BFLOAT16
INPUTS = ("dy", "w2", "h", "offsets", "prob")


def backward(emulation: ModuleType, *, codes: bool) -> Any:
    """FC2 dgrad -> GLU backward, with dprob, which has a workspace, and with codes, which have padding."""
    g = emulation.EmulatedGraph(name="backward", io_data_type=BF16, intermediate_data_type=DataType.FLOAT)
    m = g.symbol("M", multiple_of=128)
    dy = g.tensor("dy", dim=(m, K))
    w2 = g.tensor("w2", dim=(L, K, N), stride=(K * N, 1, K))
    h = g.tensor("h", dim=(m, 2 * N), glu_layout=GluLayout.interleaved(32))
    offsets = g.tensor("offsets", dim=(L,), data_type=DataType.INT32, multiple_of=128)
    prob = g.tensor("prob", dim=(m,), data_type=DataType.FLOAT)
    dact = g.grouped_matmul(dy, w2, offsets)
    wide, dprob = g.glu_backward(dact, h, prob=prob, act="swiglu")
    dprob.set_output(True).set_name("dprob")
    if codes:
        for side, axis in (("row", 1), ("col", 0)):
            made = g.block_scale_quantize(wide, block_size=32, axis=axis, data_type=DataType.FP8_E4M3)
            for tensor, kind in zip(made, ("q", "sf"), strict=True):
                tensor.set_output(True).set_name(f"{kind}_{side}")
    else:
        wide.set_data_type(BF16).set_output(True).set_name("dh")
    return g.build()


def inputs(rows: int, last: int | None = None) -> list[torch.Tensor]:
    bf16 = torch.bfloat16
    return [
        torch.randn(rows, K).to(bf16), torch.randn(L, N, K).to(bf16).transpose(1, 2), torch.randn(rows, 2 * N).to(bf16),
        torch.tensor([128, 128, rows if last is None else last], dtype=torch.int32), torch.rand(rows),
    ]  # fmt: skip


class Ops(TorchDispatchMode):
    """The ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("codes", [False, True])
def test_the_same_outputs_as_the_graphs_own_call(
    emulated: list[Any], emulation: ModuleType, seed: int, codes: bool
) -> None:
    torch.manual_seed(seed)
    graph = backward(emulation, codes=codes)
    outputs = [spec.name for spec in graph.operation_graph().graph_outputs]
    calls = Calls(graph, INPUTS, outputs)
    for rows, last in ((256, None), (384, None), (256, 128), (384, 256), (512, None)):
        given = inputs(rows, last)
        wanted = graph(dict(zip(INPUTS, given, strict=True)))
        for _ in range(2):  # checked, then known
            for name, got in zip(outputs, calls(*given), strict=True):
                assert got.stride() == wanted[name].stride()
                assert torch.equal(bits(got), bits(wanted[name])), f"{name} of {rows} rows (seed {seed})"
    (layout,) = calls._layouts
    assert all((known.program is not None) for known in layout[1].values())


def test_a_known_call_dispatches_its_allocations_alone(
    emulated: list[Any], emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(backward(emulation, codes=False), INPUTS, ("dh", "dprob"))
    calls._binder.checks_values = False  # which looks at offsets, on the CPU alone
    given = inputs(256)
    calls(*given)
    seen: list[Any] = []
    monkeypatch.setattr(type(emulated[0]), "__call__", lambda self, *words: seen.append(words))
    with Ops() as ops:
        calls(*given)
    assert len(seen) == 1
    assert ops.seen == ["aten.empty_strided.default"] * 2 + ["aten.empty.memory_format"], ops.seen


def test_no_rows_and_wrong_tensors_take_the_long_way(emulated: list[Any], emulation: ModuleType) -> None:
    graph = backward(emulation, codes=False)
    calls = Calls(graph, INPUTS, ("dh", "dprob"))
    given = inputs(256)
    calls(*given)
    dh, dprob = calls(given[0][:0], given[1], given[2][:0], torch.zeros(L, dtype=torch.int32), given[4][:0])
    assert dh.shape == (0, 2 * N) and dprob.shape == (0,)
    launched = emulated[0].calls
    with pytest.raises(Exception, match="multiple"):
        calls(given[0][:200], given[1], given[2][:200], given[3], given[4][:200])
    with pytest.raises(Exception, match="offset"):
        calls(*given[:3], given[3].flip(0), given[4])
    assert emulated[0].calls == launched, "nothing is launched before a refusal"
