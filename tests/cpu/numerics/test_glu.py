"""GLU and its derivative against the oracle: activations, layouts, clamps at their bounds, and known bugs of others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.errors import GraphError
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.reference import deinterleave, glu_columns, interleave

ROWS, HALF = 37, 64
TYPES = {torch.bfloat16: DataType.BFLOAT16, torch.float16: DataType.HALF, torch.float32: DataType.FLOAT}
ACTIVATIONS = {
    "swiglu": {},
    "geglu": {"geglu_alpha": 1.3, "clamp_min": -0.8, "clamp_max": 1.1, "linear_offset": 0.25},
    "situglu": {"situ_beta1": 1.5, "situ_beta2": 2.5},
}


def arrange(gate: torch.Tensor, up: torch.Tensor, layout: GluLayout) -> torch.Tensor:
    """gate, up (M, I) -> (M, 2I), block by block."""
    width = layout.width or gate.shape[1]
    blocks = [b for pair in zip(gate.split(width, 1), up.split(width, 1), strict=True) for b in pair]
    return torch.cat(blocks, dim=1)


def take(x: torch.Tensor, layout: GluLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `arrange`."""
    blocks = x.split(layout.width or x.shape[1] // 2, dim=1)
    return torch.cat(blocks[0::2], dim=1), torch.cat(blocks[1::2], dim=1)


def plain_factors(act, gate, up, at):
    """G, U, dG, dU in the operands' dtype, each step rounded to it."""
    if act == "swiglu":
        s = torch.sigmoid(gate)
        return gate * s, up, s * (1 + gate * (1 - s)), torch.ones_like(up)
    if act == "geglu":
        y1, y2 = gate.clamp(max=at["clamp_max"]), up.clamp(at["clamp_min"], at["clamp_max"])
        s = torch.sigmoid(at["geglu_alpha"] * y1)
        inside = (up >= at["clamp_min"]) & (up <= at["clamp_max"])
        slope = s * (1 + at["geglu_alpha"] * y1 * (1 - s)) * (gate <= at["clamp_max"])
        return y1 * s, y2 + at["linear_offset"], slope, inside.to(up.dtype)
    b1, b2 = at["situ_beta1"], at["situ_beta2"]
    s, t1, t2 = torch.sigmoid(gate), torch.tanh(gate / b1), torch.tanh(up / b2)
    return b1 * t1 * s, b2 * t2, (1 - t1 * t1) * s + b1 * t1 * s * (1 - s), 1 - t2 * t2


@pytest.mark.parametrize("with_prob", [False, True], ids=["", "prob"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_glu(num, draw, dtype, layout, act, with_prob):
    x = draw.normal(ROWS, 2 * HALF, dtype=dtype)
    inputs = {"x": x} | ({"prob": draw.scalars(ROWS)} if with_prob else {})
    case = num.make_case("glu", inputs, {"act": act, **ACTIVATIONS[act]}, layouts={"x": layout},
                         output_types={"y": TYPES[dtype]})  # fmt: skip
    gate, up, *_ = plain_factors(act, *take(x, layout), case.attributes)
    plain = gate * up * (inputs["prob"][:, None].to(dtype) if with_prob else 1)
    y, want = case.run(strided=True)["y"], case.oracle()["y"]
    num.assert_close(y, want, plain, f"seed {draw.seed}")
    assert ((y.double() - want).abs() <= 0.5001 * torch.finfo(dtype).eps * want.abs() + 2e-5).all(), "rounded twice"


@pytest.mark.parametrize("with_prob", [False, True], ids=["", "prob"])
@pytest.mark.parametrize("with_beta", [False, True], ids=["", "beta"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_glu_backward(num, draw, dtype, layout, act, recompute, with_beta, with_prob):
    split = (5, 0, 20, 9)
    inputs = {"dy": draw.normal(ROWS, HALF, dtype=dtype), "x": draw.normal(ROWS, 2 * HALF, dtype=dtype)}
    if with_prob:
        inputs["prob"] = draw.scalars(ROWS)
    if with_beta:
        inputs |= {"beta": draw.scalars(len(split)), "offsets": num.offsets_of(split)}
        inputs["x"][sum(split) :] = torch.nan
    case = num.make_case(
        "glu_backward", inputs, {"act": act, "recompute": recompute, **ACTIVATIONS[act]}, layouts={"x": layout},
        output_types={"dx": TYPES[dtype], "activation": TYPES[dtype]},
    )  # fmt: skip
    got, want = case.run(strided=True), case.oracle()
    plain = plain_backward(inputs, act, case.attributes, layout, split, dtype)
    for port, out in got.items():
        num.assert_close(out, want[port], plain[port], f"{port}, seed {draw.seed}")
        if with_beta:
            assert (out[sum(split) :] == 0).all(), f"{port} past the last offset"
    assert set(got) == {"dx", "dprob"} | ({"activation"} if recompute else set())


def plain_backward(inputs, act, at, layout, split, dtype):
    """In the operands' dtype, each step rounded to it."""
    x, dy = inputs["x"], inputs["dy"]
    rows = ROWS
    if "beta" in inputs:
        rows = sum(split)
        x = x[:rows] * inputs["beta"].repeat_interleave(torch.tensor(split))[:, None].to(dtype)
        dy = dy[:rows]
    prob = inputs["prob"][:rows, None].to(dtype) if "prob" in inputs else torch.ones(rows, 1, dtype=dtype)
    g, u, dg, du = plain_factors(act, *take(x, layout), at)
    parts = {"dx": arrange(dy * prob * u * dg, dy * prob * g * du, layout), "dprob": (dy * g * u).sum(1),
             "activation": prob * g * u}  # fmt: skip
    return {port: torch.cat([t, t.new_zeros(ROWS - rows, *t.shape[1:])]) for port, t in parts.items()}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_layout_is_only_an_order(num, draw, layout, act):
    gate, up, dy = (draw.normal(ROWS, HALF) for _ in range(3))
    attributes = {"act": act, **ACTIVATIONS[act]}
    here, plain = layout, GluLayout.concatenated()
    found = []
    for order in (here, plain):
        case = num.make_case(
            "glu_backward", {"dy": dy, "x": arrange(gate, up, order)}, attributes, layouts={"x": order}
        )
        outputs = case.run()
        found.append((take(outputs["dx"], order), outputs["dprob"]))
    for (a, b), label in (((found[0][0][0], found[1][0][0]), "dgate"), ((found[0][0][1], found[1][0][1]), "dup")):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6), f"{label}, seed {draw.seed}"
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", [GluLayout.interleaved(32), GluLayout.interleaved(1), GluLayout.concatenated()], ids=str)
def test_convert_split_and_join_move_columns_only(num, draw, dtype, layout, to):
    gate, up = draw.normal(ROWS, HALF, dtype=dtype), draw.normal(ROWS, HALF, dtype=dtype)
    x = arrange(gate, up, layout)
    types = dict.fromkeys(("y", "gate", "up", "x"), TYPES[dtype])
    convert = num.make_case("convert_glu_layout", {"x": x}, {"to": str(to)}, layouts={"x": layout}, output_types=types)
    split = num.make_case("split_glu", {"x": x}, layouts={"x": layout}, output_types=types)
    join = num.make_case("join_glu", {"gate": gate, "up": up}, {"layout": str(layout)}, output_types=types)
    wanted = {"y": arrange(gate, up, to), "gate": gate, "up": up, "x": x}
    for case in (convert, split, join):
        oracle = case.oracle()
        for port, out in case.run(strided=True).items():
            assert torch.equal(out, wanted[port]) and torch.equal(oracle[port].to(dtype), wanted[port]), port


def test_convert_takes_weights_of_any_rank(num, draw):
    w = draw.normal(3, 5, 128)
    case = num.make_case("convert_glu_layout", {"x": w}, {"to": "interleaved(32)"},
                         layouts={"x": GluLayout.concatenated()})  # fmt: skip
    assert torch.equal(case.run()["y"], interleave(w, 32))


def test_c28_contiguous_weights_are_converted_or_refused(num, draw):
    """A checkpoint's [gate | up] weights, interleaved by the helper, give the activation of the contiguous ones."""
    a, w = draw.normal(ROWS, 16), draw.normal(16, 2 * HALF)
    wanted = run_glu(num, a @ w, GluLayout.concatenated())
    converted = run_glu(num, a @ interleave(w, 32), GluLayout.interleaved(32))
    assert torch.allclose(converted, wanted, atol=1e-5)
    assert (run_glu(num, a @ w, GluLayout.interleaved(32)) - wanted).abs().max() > 0.1, "read in the wrong order"
    with pytest.raises(GraphError, match="GLU_LAYOUT_MISSING"):
        num.make_case("glu", {"x": a @ w}, {"act": "swiglu"})


def run_glu(num, x, layout, act="swiglu", **parameters):
    return num.make_case("glu", {"x": x}, {"act": act, **parameters}, layouts={"x": layout}).run()["y"]


@pytest.mark.parametrize("width", [1, 2, 32])
def test_c29_interleaving_twice_is_not_once(num, draw, width):
    x = draw.normal(ROWS, 2 * HALF)
    assert torch.equal(deinterleave(interleave(x, width), width), x)
    assert torch.equal(interleave(deinterleave(x, width), width), x)
    assert not torch.equal(interleave(interleave(x, width), width), interleave(x, width))
    layout = GluLayout.interleaved(width)
    once = num.make_case("convert_glu_layout", {"x": x}, {"to": str(layout)}, layouts={"x": GluLayout.concatenated()})
    y = once.run()["y"]
    assert once.specs["y"].glu_layout == layout, "the result says that it is interleaved"
    again = num.make_case(
        "convert_glu_layout", {"x": y}, {"to": str(layout)}, layouts={"x": once.specs["y"].glu_layout}
    )
    assert torch.equal(again.run()["y"], y), "and so is not interleaved a second time"


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_c30_each_layout_against_the_reference(num, draw, layout, act):
    gate, up = draw.normal(ROWS, HALF), draw.normal(ROWS, HALF)
    case = num.make_case(
        "glu", {"x": arrange(gate, up, layout)}, {"act": act, **ACTIVATIONS[act]}, layouts={"x": layout}
    )
    g, u, *_ = plain_factors(act, gate, up, case.attributes)
    num.assert_close(case.run()["y"], case.oracle()["y"], g * u, f"seed {draw.seed}")
    others = {GluLayout.interleaved(32), GluLayout.interleaved(1), GluLayout.concatenated()} - {layout}
    for other in others:
        assert (run_glu(num, arrange(gate, up, layout), other, act, **ACTIVATIONS[act]) - g * u).abs().max() > 0.1


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_c32_gate_and_up_are_not_swapped(num, draw, layout, act):
    gate, up = draw.normal(ROWS, HALF).abs() + 3, -draw.normal(ROWS, HALF).abs() - 3
    x = arrange(gate, up, layout)
    parameters = ACTIVATIONS[act] | ({"clamp_min": -7.0, "clamp_max": 7.0} if act == "geglu" else {})
    case = num.make_case("glu", {"x": x}, {"act": act, **parameters}, layouts={"x": layout})
    g, u, *_ = plain_factors(act, gate, up, case.attributes)
    num.assert_close(case.run()["y"], case.oracle()["y"], g * u, f"seed {draw.seed}")
    swapped, other, *_ = plain_factors(act, up, gate, case.attributes)
    assert (case.run()["y"] - swapped * other).abs().max() > 0.5


def test_c33_parameters_of_the_activation_reach_it(num, draw):
    x, layout = 8 * draw.normal(ROWS, 2 * HALF), GluLayout.concatenated()
    dy = draw.normal(ROWS, HALF)
    seen = []
    for alpha, offset, bound in itertools.product((1.0, 1.702), (0.0, 1.0), (math.inf, 7.0, 10.0)):
        attributes = {
            "act": "geglu",
            "geglu_alpha": alpha,
            "linear_offset": offset,
            "clamp_min": -bound,
            "clamp_max": bound,
        }
        forward = num.make_case("glu", {"x": x}, attributes, layouts={"x": layout})
        backward = num.make_case("glu_backward", {"dy": dy, "x": x}, attributes, layouts={"x": layout})
        for case in (forward, backward):
            got, want = case.run(), case.oracle()
            for port in got:
                error, size = (got[port] - want[port]).abs().max(), want[port].abs().max()
                assert error < 3e-6 * size, f"{attributes}, {port}, seed {draw.seed}: {error} of {size}"
        seen.append(torch.cat([forward.run()["y"].flatten(), backward.run()["dx"].flatten()]))
    for first, second in itertools.combinations(seen, 2):
        assert (first - second).abs().max() > 0.01, "a parameter made no difference"


def test_c36_clamps_mask_by_zero_or_one_not_by_value(num, layout):
    """gate in {6.9, 7, 7.1} and up in +-{6.9, 7, 7.1}, against masks written out."""
    gates, ups = (6.9, 7.0, 7.1), (-7.1, -7.0, -6.9, 6.9, 7.0, 7.1)
    grid = torch.tensor(list(itertools.product(gates, ups)))
    gate, up = (column[:, None].expand(-1, 64).contiguous() for column in grid.T)
    dy = torch.linspace(0.5, 2, 64).expand(len(grid), -1).contiguous()
    gate_mask = torch.tensor([float(g <= 7.0) for g, _ in itertools.product(gates, ups)])[:, None]
    up_mask = torch.tensor([float(-7.0 <= u <= 7.0) for _, u in itertools.product(gates, ups)])[:, None]
    assert gate_mask.flatten().tolist() == [1.0] * 12 + [0.0] * 6
    assert up_mask.flatten().tolist() == [0, 1, 1, 1, 1, 0] * 3
    y1, y2 = torch.minimum(gate, torch.tensor(7.0)), up.clamp(-7, 7)
    s = torch.sigmoid(1.702 * y1)
    want = {"dgate": dy * (y2 + 1) * s * (1 + 1.702 * y1 * (1 - s)) * gate_mask, "dup": dy * y1 * s * up_mask}
    case = num.make_case("glu_backward", {"dy": dy, "x": arrange(gate, up, layout)}, {"act": "geglu"},
                         layouts={"x": layout})  # fmt: skip
    for dx in (case.run()["dx"], case.oracle()["dx"].float()):
        dgate, dup = take(dx, layout)
        assert torch.allclose(dgate, want["dgate"], atol=1e-4) and torch.allclose(dup, want["dup"], atol=1e-4)
        assert (dgate[12:] == 0).all() and (dgate[:12] != 0).all()


@pytest.mark.parametrize("bound", [7.0, 10.0, 7.1])
def test_c37_the_gradient_at_the_bound_does_not_depend_on_torch(num, bound):
    """At the bound itself the slope counts in full; autograd through clamp says this or that, by release."""
    at_bound = torch.tensor([bound, -bound])
    gate = torch.full((2, 32), bound)
    up = at_bound[:, None].expand(2, 32).contiguous()
    dy, layout = torch.linspace(0.5, 2, 64).view(2, 32), GluLayout.interleaved(32)
    attributes = {"act": "geglu", "clamp_min": -bound, "clamp_max": bound}
    case = num.make_case("glu_backward", {"dy": dy, "x": arrange(gate, up, layout)}, attributes, layouts={"x": layout})
    s = torch.sigmoid(1.702 * gate)
    for dx in (case.run()["dx"], case.oracle()["dx"].float()):
        dgate, dup = take(dx, layout)
        assert torch.allclose(dup, dy * gate * s, rtol=1e-5)
        assert torch.allclose(dgate, dy * (up + 1) * s * (1 + 1.702 * gate * (1 - s)), rtol=1e-5)
    beyond = torch.nextafter(gate, torch.tensor(math.inf))
    case = num.make_case("glu_backward", {"dy": dy, "x": arrange(beyond, 0.5 * up, layout)}, attributes,
                         layouts={"x": layout})  # fmt: skip
    for dx in (case.run()["dx"], case.oracle()["dx"]):
        assert (take(dx, layout)[0] == 0).all(), "one step past it the gate has no gradient"


def test_dprob_has_no_factor_prob(num, draw):
    inputs = {"dy": draw.normal(ROWS, HALF), "x": draw.normal(ROWS, 2 * HALF)}
    layout = {"x": GluLayout.concatenated()}
    without = num.make_case("glu_backward", inputs, {"act": "swiglu"}, layouts=layout).run()["dprob"]
    for scale in num.SCALARS:
        prob = torch.full((ROWS,), scale)
        prob[0] = 0.25
        given = num.make_case("glu_backward", {**inputs, "prob": prob}, {"act": "swiglu"}, layouts=layout).run()[
            "dprob"
        ]
        assert torch.equal(given, without)


def test_index_of_every_column():
    assert glu_columns(8, GluLayout.interleaved(2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert glu_columns(6, GluLayout.interleaved(1)).tolist() == [0, 2, 4, 1, 3, 5]
    assert glu_columns(6, GluLayout.concatenated()).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="whole blocks"):
        glu_columns(8, GluLayout.interleaved(3))


@pytest.mark.parametrize("op", ["glu", "glu_backward"])
def test_no_rows_and_no_columns(num, layout, op):
    for rows, half in ((0, HALF), (3, 0)):
        x, dy = torch.zeros(rows, 2 * half), torch.zeros(rows, half)
        inputs = {"x": x} if op == "glu" else {"dy": dy, "x": x}
        case = num.make_case(op, inputs, {"act": "swiglu"}, layouts={"x": layout})
        want = case.oracle()
        for port, out in case.run().items():
            assert torch.equal(out.double(), want[port])
