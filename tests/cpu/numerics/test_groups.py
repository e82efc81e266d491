"""Per-expert reductions: sums that round once, amax that keeps NaN, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType

N, SLACK = 96, 5
TYPES = {torch.bfloat16: DataType.BFLOAT16, torch.float16: DataType.HALF, torch.float32: DataType.FLOAT}


def parts(x, split):
    ends = torch.tensor(split).cumsum(0).tolist()
    return [x[e - s : e] for s, e in zip(split, ends, strict=True)]


def test_group_sum(num, draw, split, dtype):
    split = tuple(7 * s for s in split)  # more than one partial sum an expert
    x = draw.normal(sum(split) + SLACK, N, dtype=dtype)
    x[sum(split) :] = torch.nan
    inputs = {"x": x, "offsets": num.offsets_of(split)}
    case = num.make_case("group_sum", inputs, output_types={"y": TYPES[dtype]})
    plain = torch.stack([p.sum(0) for p in parts(x, split)])
    y, want = case.run(strided=True)["y"], case.oracle()["y"]
    num.assert_close(y, want, plain, f"{split}, seed {draw.seed}")
    assert ((y.double() - want).abs() <= 0.5001 * torch.finfo(dtype).eps * want.abs() + 1e-4).all(), "rounded twice"


def test_group_sum_keeps_nan_with_its_expert(num, draw):
    x = draw.normal(60, N)
    x[25, 7] = torch.nan
    y = num.make_case("group_sum", {"x": x, "offsets": num.offsets_of((20, 0, 20, 20))}).run()["y"]
    assert y.isnan().nonzero().tolist() == [[2, 7]]


def test_group_sum_repeats_to_the_bit(num, draw):
    x = draw.normal(4000, N)
    case = num.make_case("group_sum", {"x": x, "offsets": num.offsets_of((1500, 0, 2400, 100))})
    first = case.run()["y"]
    assert all(torch.equal(case.run()["y"], first) for _ in range(5))


def test_group_amax(num, draw, split, dtype):
    x = draw.normal(sum(split) + SLACK, N, dtype=dtype)
    x[sum(split) :] = torch.inf
    y = num.make_case("group_amax", {"x": x, "offsets": num.offsets_of(split)}).run()["y"]
    want = torch.stack([p.abs().amax() if p.numel() else p.new_zeros(()) for p in parts(x, split)])
    assert torch.equal(y, want.float()), f"seed {draw.seed}"


def test_group_amax_of_gate_and_up(num, draw, layout):
    split = (3, 0, 9)
    gate, up = draw.normal(12, 64), 10 * draw.normal(12, 64)
    join = num.make_case("join_glu", {"gate": gate, "up": up}, {"layout": str(layout)})
    case = num.make_case("group_amax", {"x": join.run()["x"], "offsets": num.offsets_of(split)}, {"split_glu": True},
                         layouts={"x": layout})  # fmt: skip
    want = torch.tensor([[float(half.abs().max()) if len(half) else 0.0 for half in pair]
                         for pair in zip(parts(gate, split), parts(up, split), strict=True)])  # fmt: skip
    assert torch.equal(case.run()["y"], want) and torch.equal(case.oracle()["y"].float(), want)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_group_amax_keeps_nan_and_infinity_with_their_expert(num, draw, dtype, value):
    x = draw.normal(12, N, dtype=dtype)
    x[5, 1], x[6, 2] = value, 3.0e4
    case = num.make_case("group_amax", {"x": x, "offsets": num.offsets_of((4, 4, 0, 4))})
    y, want = case.run()["y"], case.oracle()["y"]
    assert torch.equal(y.isnan(), want.isnan()) and bool(y[1].isnan() if value != value else y[1] == torch.inf)
    assert torch.equal(y[[0, 2, 3]].double(), want[[0, 2, 3]]) and y[[0, 2, 3]].isfinite().all()
