"""Outputs that torch allocates itself: handed over as they are, copied only where the plan declares other strides."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import DataType, Graph
from opfuse.kernels import torch_ops
from opfuse.kernels.torch_ops import uncovered

L, K, N = 3, 16, 24


def two_matmuls(stride=None):
    g = Graph(io_data_type=DataType.BFLOAT16)
    m = g.symbol("M")
    a, dy = g.tensor("a", dim=(m, K)), g.tensor("dy", dim=(m, N))
    offsets = g.tensor("offsets", dim=(L,), data_type=DataType.INT32)
    y = g.grouped_matmul(a, g.tensor("b", dim=(L, K, N)), offsets).set_name("y").set_output(True)
    if stride is not None:
        y.set_stride(stride(m))
    g.grouped_matmul_wgrad(a, dy, offsets).set_name("dw").set_output(True)
    return g.build(device="cpu")


@pytest.fixture
def pack():
    torch.manual_seed(7)
    randn = lambda *shape: torch.randn(*shape).bfloat16()  # noqa: E731
    return {"a": randn(9, K), "b": randn(L, K, N), "dy": randn(9, N),
            "offsets": torch.tensor([4, 4, 7], dtype=torch.int32)}  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """Lets torch make both outputs, and keeps what it made."""
    kept = {}

    def maker(op, port):
        def make(inputs, out_type, attributes, specs):
            rows = inputs["a"].shape[0]
            shape = (rows, N) if port == "y" else (L, K, N)
            kept[port] = torch.full(shape, float("nan"), dtype=out_type)
            torch_ops.run(op, inputs, {port: kept[port]}, attributes, specs)
            return kept[port]

        return make

    for op, port in (("grouped_matmul", "y"), ("grouped_matmul_wgrad", "dw")):
        monkeypatch.setitem(torch_ops.MAKE, op, maker(op, port))
    return kept


def test_torchs_own_tensors_are_the_outputs(pack, made):
    wanted = {"y": torch.empty(9, N).bfloat16(), "dw": torch.empty(L, K, N).bfloat16()}
    g = two_matmuls()
    g.execute({**pack, **wanted}, None)
    assert not made, "a caller's buffer is written, not replaced"
    out = g(pack)
    for name, tensor in wanted.items():
        assert out[name] is made[name] and torch.equal(out[name], tensor)


def test_an_output_that_is_given_is_written_and_the_other_is_made(pack, made):
    y = torch.full((9, N), float("nan")).bfloat16()
    out = two_matmuls()({**pack, "y": y})
    assert out["y"] is y and out["dw"] is made["dw"] and not y.isnan().any() and "y" not in made


def test_declared_strides_win(pack, made):
    out = two_matmuls(lambda m: (1, m))(pack)
    assert out["y"].stride() == (1, 9) and torch.equal(out["y"], made["y"])


def test_where_torch_makes_nothing_the_plan_does(pack):
    out = two_matmuls()(pack)
    assert out["y"].stride() == (N, 1) and not out["y"][7:].any() and not out["dw"][1].any()


@pytest.mark.parametrize("counts", [(5, 0, 4), (0, 0), (9,), (0, 3, 0, 0, 1)], ids=str)
def test_zero_where_no_expert_is(counts):
    offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = torch.full((9, 8), float("nan"))
    uncovered.zero_rows(rows, offsets)
    assert rows.isnan().all(1).tolist() == [row < sum(counts) for row in range(9)]
    experts = torch.full((len(counts), 2, 8), float("nan"))
    uncovered.zero_empty_experts(experts, offsets)
    assert experts.isnan().all((1, 2)).tolist() == [count > 0 for count in counts]
    assert not rows[sum(counts) :].any() and not experts[offsets.diff(prepend=offsets.new_zeros(1)) == 0].any()
