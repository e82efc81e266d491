"""The oracle itself: derivatives by autograd, roundings by torch's casts, graphs by hand; and the data of the tests."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.ir.ops import OPS
from opfuse.kernels import torch_ops
from opfuse.kernels.reference import EVALUATE, evaluate, evaluate_graph, round_to

ACTIVATIONS = {
    "swiglu": {},
    "geglu": {"geglu_alpha": 1.3, "clamp_min": -0.5, "clamp_max": 0.75, "linear_offset": 0.25},
    "situglu": {"situ_beta1": 1.5, "situ_beta2": 2.5},
}


def test_both_implementations_have_every_op():
    assert list(EVALUATE) == list(torch_ops.RUN) and set(EVALUATE) == set(OPS)


@pytest.mark.parametrize("with_beta", [False, True], ids=["", "beta"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_backward_formulas_are_the_derivatives_of_the_forward_ones(num, draw, layout, act, with_beta):
    """float64 autograd through the forward reference, away from the clamps; dx is by x times beta, dprob by prob."""
    rows, half, split = 24, 64, (10, 0, 14)
    x, dy = draw.normal(rows, 2 * half).double(), draw.normal(rows, half).double()
    prob, beta = draw.scalars(rows).double(), draw.scalars(3).double()
    scale = beta.repeat_interleave(torch.tensor(split))[:, None] if with_beta else torch.ones(rows, 1)
    for bound in (ACTIVATIONS[act].get("clamp_min", 9.0), ACTIVATIONS[act].get("clamp_max", 9.0)):
        x = torch.where((x * scale - bound).abs() < 1e-3, x + 0.01, x)
    case = num.make_case("glu", {"x": x.float(), "prob": prob.float()}, {"act": act, **ACTIVATIONS[act]},
                         layouts={"x": layout})  # fmt: skip
    scaled, weight = (x * scale).requires_grad_(), prob.clone().requires_grad_()
    y = EVALUATE["glu"]({"x": scaled, "prob": weight}, case.attributes, case.specs)["y"]
    dx, dprob = torch.autograd.grad(y, (scaled, weight), dy)
    inputs = {"dy": dy, "x": x, "prob": prob} | ({"beta": beta, "offsets": num.offsets_of(split)} if with_beta else {})
    got = EVALUATE["glu_backward"](inputs, {**case.attributes, "recompute": True}, case.specs)
    assert torch.allclose(got["dx"], dx, rtol=1e-12, atol=1e-12), f"seed {draw.seed}"
    assert torch.allclose(got["dprob"], dprob, rtol=1e-12, atol=1e-12), f"seed {draw.seed}"
    assert torch.allclose(got["activation"], y, rtol=1e-12, atol=1e-12), f"seed {draw.seed}"
    assert dx.abs().max() > 0.1 and dprob.abs().max() > 0.1


def test_matmul_formulas_are_each_others_derivatives(num, draw):
    split, offsets = (5, 0, 11), num.offsets_of((5, 0, 11))
    a, b = draw.normal(18, 6).double().requires_grad_(), draw.normal(3, 6, 4).double().requires_grad_()
    dy = draw.normal(18, 4).double()
    attributes = OPS["grouped_matmul"].complete({})
    y = EVALUATE["grouped_matmul"]({"a": a, "b": b, "offsets": offsets}, attributes, {})["y"]
    da, db = torch.autograd.grad(y, (a, b), dy)
    dgrad = EVALUATE["grouped_matmul"]({"a": dy, "b": b.detach().transpose(1, 2), "offsets": offsets}, attributes, {})
    wgrad = EVALUATE["grouped_matmul_wgrad"]({"a": a.detach(), "dy": dy, "offsets": offsets}, {"accumulate": False}, {})
    assert torch.allclose(dgrad["y"], da) and torch.allclose(wgrad["dw"], db)
    assert (da[sum(split) :] == 0).all()


@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.HALF, DataType.BFLOAT16])
def test_rounding_equals_the_cast_of_torch(draw, data_type):
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=draw.generator).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 65519.9, 65520.0, 3.4e38, 6e-8, 2.9e-8])])
    stored = {"FLOAT": torch.float32, "HALF": torch.float16, "BFLOAT16": torch.bfloat16}[data_type.value]
    got, want = round_to(values, data_type), values.to(stored).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()]), f"seed {draw.seed}"


def test_rounding_from_float64_is_done_once():
    """Just above halfway between two bfloat16: by way of float32 it would become a tie, and round down."""
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert round_to(value, DataType.BFLOAT16).item() == 1 + 2**-7
    assert value.float().bfloat16().item() == 1.0


@pytest.mark.parametrize("virtual", [DataType.FLOAT, DataType.BFLOAT16])
def test_a_graph_rounds_where_its_tensors_say(num, draw, virtual):
    g = GraphBuilder(io_data_type=DataType.BFLOAT16, intermediate_data_type=virtual)
    a, b, offsets = (g.tensor("a", (40, 16)), g.tensor("b", (2, 16, 32)),
                     g.tensor("offsets", (2,), data_type=DataType.INT32))  # fmt: skip
    h = g.tensor("h", (40, 64), glu_layout=GluLayout.interleaved(32))
    r = g.grouped_matmul(a, b, offsets)
    dh, dprob = g.glu_backward(r, h, act="swiglu")
    q, sf = g.block_scale_quantize(dh, block_size=32, axis=1, data_type=DataType.FP8_E4M3)
    scaled = g.mul(dprob, 0.5)
    for t in (dprob, q, sf, scaled):
        t.set_output(True)
    scaled.set_data_type(DataType.HALF)
    values = {t.uid: draw.normal(*t.dim, dtype=torch.bfloat16) for t in (a, b, h)}
    values[offsets.uid] = torch.tensor([30, 40], dtype=torch.int32)
    got = evaluate_graph(g.operation_graph(), values)
    torch_type = {DataType.FLOAT: torch.float32, DataType.BFLOAT16: torch.bfloat16}[virtual]
    assert set(got) == {t.uid for t in (r, dh, dprob, q, sf, scaled)}
    assert got[r.uid].dtype is got[dh.uid].dtype is torch_type and got[scaled.uid].dtype is torch.float16
    matmul = num.make_case("grouped_matmul", {"a": values[a.uid], "b": values[b.uid], "offsets": values[offsets.uid]})
    assert torch.equal(got[r.uid], round_to(matmul.oracle()["y"], virtual).to(torch_type)), f"seed {draw.seed}"
    back = num.make_case("glu_backward", {"dy": got[r.uid], "x": values[h.uid]}, {"act": "swiglu"},
                         layouts={"x": GluLayout.interleaved(32)})  # fmt: skip
    assert torch.equal(got[dh.uid], round_to(back.oracle()["dx"], virtual).to(torch_type))
    assert torch.equal(got[scaled.uid], (got[dprob.uid].double() * 0.5).half())
    quantized = num.make_case("block_scale_quantize", {"x": got[dh.uid]},
                              {"block_size": 32, "axis": 1, "data_type": "FP8_E4M3"}).oracle()  # fmt: skip
    num.assert_same_bytes(got[q.uid], quantized["y"], "codes")
    num.assert_same_bytes(got[sf.uid], quantized["scale"], "scales")


def test_a_graph_accumulates_into_what_the_output_holds(draw):
    g = GraphBuilder(io_data_type=DataType.FLOAT)
    a, dy = g.tensor("a", (9, 4)), g.tensor("dy", (9, 5))
    offsets = g.tensor("offsets", (2,), data_type=DataType.INT64)
    dw = g.grouped_matmul_wgrad(a, dy, offsets, accumulate=True).set_output(True)
    values = {a.uid: draw.normal(9, 4), dy.uid: draw.normal(9, 5), offsets.uid: torch.tensor([9, 9]),
              dw.uid: draw.normal(2, 4, 5)}  # fmt: skip
    got = evaluate_graph(g.operation_graph(), values)[dw.uid]
    assert torch.equal(got[1], values[dw.uid][1])
    assert torch.allclose(got[0], values[dw.uid][0] + values[a.uid].T @ values[dy.uid], atol=1e-5)


def test_discrete_weights_and_float32_arithmetic(num, draw):
    a, b = draw.normal(12, 16), draw.normal(2, 16, 8)
    inputs = {"a": a, "b": b, "offsets": num.offsets_of((5, 7))}
    dense = num.make_case("grouped_matmul", inputs)
    separate = num.make_case("grouped_matmul", {**inputs, "b": list(b)})
    assert torch.equal(dense.oracle()["y"], separate.oracle()["y"])
    single = evaluate("grouped_matmul", inputs, dense.attributes, dense.specs, dtype=torch.float32)["y"]
    assert single.dtype is torch.float32 and 0 < (single - dense.oracle()["y"]).abs().max() < 1e-5


def test_inputs_are_first_what_their_tensors_hold(num, draw):
    x = draw.normal(8, 64)
    case = num.make_case("block_scale_quantize", {"x": x}, {"block_size": 32, "axis": 1, "data_type": "FP8_E4M3"},
                         input_types={"x": DataType.BFLOAT16})  # fmt: skip
    rounded = num.make_case("block_scale_quantize", {"x": x.bfloat16()},
                            {"block_size": 32, "axis": 1, "data_type": "FP8_E4M3"})  # fmt: skip
    num.assert_same_bytes(case.oracle()["y"], rounded.oracle()["y"], f"seed {draw.seed}")


def test_c118_the_data_of_the_tests_refuses_constants(num, draw):
    for constant in (torch.ones(4), torch.zeros(3), torch.full((2, 2), 2.0), torch.ones(1)):
        with pytest.raises(ValueError, match="must vary"):
            num.require_varied(constant)
    for count in (2, 3, 4, 5, 37):
        values = draw.scalars(count)
        assert set(values.tolist()) <= set(num.SCALARS) and len(set(values.tolist())) == min(count, len(num.SCALARS))
        assert 1.0 not in values.tolist()
    with pytest.raises(ValueError, match="must vary"):
        draw.scalars(1)
    assert len(num.SPLITS) >= 8
    assert not torch.equal(num.Draw(1).normal(5), num.Draw(2).normal(5))
    assert torch.equal(num.Draw(1).normal(5), num.Draw(1).normal(5)), "a printed seed gives the same data again"


@pytest.mark.parametrize("op", ["grouped_matmul", "group_sum"])
def test_poison_would_be_seen(num, op):
    """The poisoned output and its guard notice an implementation that writes too little or too much."""
    x = torch.randn(8, 4)
    inputs = {"x": x, "offsets": torch.tensor([4, 8])} if op == "group_sum" else {
        "a": x, "b": torch.randn(2, 4, 4), "offsets": torch.tensor([4, 8])}  # fmt: skip
    spec = num.make_case(op, inputs).specs["y"]
    out, untouched = num.poisoned(spec, strided=True)
    assert out.isnan().all() and untouched()
    out.as_strided((1,), (1,), out.shape[1]).fill_(0.0)
    assert not untouched()
