"""Raising: every spelling of a GLU and its derivative becomes one node with the same values, and nothing else does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
import torch
from fusion_graphs import BF16, FLOAT, VerdictKind, plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import raise_graph, why_not
from opfuse.graph_ops.builder import GraphBuilder, Tensor
from opfuse.graph_ops.ir import DataType, GluLayout, OpGraph, verify
from opfuse.kernels.reference.evaluate import evaluate_graph

ROWS, HALF = 24, 64
LAYOUT = GluLayout.interleaved(32)


@dataclass
class Spelled:
    """A graph under construction whose gate and up come from one split."""

    g: GraphBuilder
    x: Tensor
    gate: Tensor
    up: Tensor
    prob: Tensor
    dy: Tensor


def start(layout: GluLayout = LAYOUT, x_type: DataType = BF16) -> Spelled:
    g = GraphBuilder()
    x = g.tensor("x", dim=(ROWS, 2 * HALF), data_type=x_type, glu_layout=layout)
    gate, up = g.split_glu(x)
    return Spelled(g, x, gate, up, g.tensor("prob", dim=(ROWS, 1), data_type=FLOAT), g.tensor("dy", dim=(ROWS, HALF)))


def values(graph: OpGraph, seed: int) -> dict[int, torch.Tensor]:
    """Unit-scale data; prob from {-1.5, 0.5, 2, 0}; gates and ups that cross every clamp, some exactly on it."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for t in graph.graph_inputs:
        shape = t.shape({})
        data = 4 * torch.randn(shape, generator=generator)
        if t.name == "x":
            data[0, :8] = torch.tensor([7.0, -7.0, 6.9, 7.1, -6.9, -7.1, 0.0, 10.0])
        if t.name == "prob":
            data = torch.tensor([-1.5, 0.5, 2.0, 0.0])[torch.randint(4, shape, generator=generator)]
        made[t.uid] = data.to(getattr(torch, t.data_type.info.torch_name))
    return made


def raised(graph: OpGraph, *wanted: str) -> OpGraph:
    """The raised graph, verified, with the same outputs to within float32's rounding."""
    new, raisings = raise_graph(graph)
    assert sorted(r.rule for r in raisings) == sorted(wanted)
    verify(new)
    assert {t.uid: t for t in new.graph_outputs} == {t.uid: t for t in graph.graph_outputs}
    seed = random.randrange(2**31)
    data = values(graph, seed)
    before, after = evaluate_graph(graph, data), evaluate_graph(new, data)
    for t in graph.graph_outputs:
        one, other = before[t.uid].double(), after[t.uid].double()
        bound = 2e-6 if t.data_type is FLOAT else 2**-7
        error = (one - other).norm() / one.norm().clamp_min(1e-30)
        assert error < bound, f"seed {seed}: {t.name} differs by {error:.2e}"
    return new


def silu(p: Spelled, how: str) -> Tensor:
    match how:
        case "swish":
            return p.g.swish(p.gate)
        case "sigmoid":
            return p.g.mul(p.gate, p.g.sigmoid(p.gate))
        case _:
            return p.g.mul(p.g.sigmoid(p.gate), p.gate)


ORDERS: dict[str, Callable[[Spelled, Tensor], Tensor]] = {
    "silu*up": lambda p, s: p.g.mul(s, p.up),
    "up*silu": lambda p, s: p.g.mul(p.up, s),
    "(silu*up)*prob": lambda p, s: p.g.mul(p.g.mul(s, p.up), p.prob),
    "prob*(up*silu)": lambda p, s: p.g.mul(p.prob, p.g.mul(p.up, s)),
    "(prob*up)*silu": lambda p, s: p.g.mul(p.g.mul(p.prob, p.up), s),
    "up*(silu*prob)": lambda p, s: p.g.mul(p.up, p.g.mul(s, p.prob)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["swish", "sigmoid", "sigmoid, commuted"])
def test_swiglu_in_any_spelling_and_order(order, how):
    p = start()
    new = raised(fg.frozen(p.g, ORDERS[order](p, silu(p, how)).set_data_type(FLOAT)), "raise_glu")
    (node,) = new.nodes
    assert node.op == "glu" and node.attribute["act"] == "swiglu"
    assert ("prob" in node.input_uids) is ("prob" in order)


@pytest.mark.parametrize("layout", [GluLayout.concatenated(), GluLayout.interleaved(1), LAYOUT])
@pytest.mark.parametrize("output", [FLOAT, BF16])
def test_the_layout_of_the_split_is_kept(layout, output):
    p = start(layout)
    (node,) = raised(fg.frozen(p.g, p.g.mul(p.up, p.g.swish(p.gate)).set_data_type(output)), "raise_glu").nodes
    assert node.input_uids == {"x": p.x.uid}


def d_silu(p: Spelled, t: Tensor, how: str) -> Tensor:
    """t * silu'(gate)."""
    g = p.g
    if how == "swish_backward":
        return g.swish_backward(t, p.gate)
    s = g.sigmoid(p.gate)
    if how == "factored":
        return g.mul(t, g.mul(s, g.add(1.0, g.mul(p.gate, g.sub(1.0, s)))))
    if how == "expanded":
        return g.mul(g.add(s, g.mul(g.mul(p.gate, s), g.sub(1.0, s))), t)
    swish = g.mul(p.gate, s)  # s + swish*(1 - s), as Liger and Megatron write it
    return g.mul(g.add(g.mul(swish, g.sub(1.0, s)), s), t)


HOW = ("swish_backward", "factored", "expanded", "by swish")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("prob", ["none", "first", "last", "apart"])
@pytest.mark.parametrize("extra", ["", "dprob", "activation", "dprob activation"])
def test_swiglu_backward_in_any_spelling(how, prob, extra):
    p = start()
    g = p.g
    t = g.mul(p.prob, p.dy) if prob == "first" else p.dy
    dgate = d_silu(p, g.mul(t, p.up), how)
    dup = g.mul(g.mul(p.prob, p.dy) if prob == "apart" else t, silu(p, "swish"))
    if prob == "last":
        dgate, dup = g.mul(dgate, p.prob), g.mul(p.prob, dup)
    if prob == "apart":
        dgate = g.mul(dgate, p.prob)
    outputs = [g.join_glu(dgate, dup, LAYOUT).set_data_type(FLOAT)]
    if "dprob" in extra:
        outputs.append(g.reduction(g.mul(g.mul(p.up, silu(p, "sigmoid")), p.dy), "ADD", 1).set_data_type(FLOAT))
    if "activation" in extra:
        unit = g.mul(silu(p, "swish"), p.up)
        outputs.append((unit if prob == "none" else g.mul(p.prob, unit)).set_data_type(FLOAT))
    (node,) = raised(fg.frozen(g, *outputs), "raise_glu_backward").nodes
    assert node.op == "glu_backward" and node.attribute["act"] == "swiglu"
    assert node.attribute["recompute"] is ("activation" in extra)
    assert node.input_uids["dy"] == p.dy.uid and node.input_uids["x"] == p.x.uid
    assert node.input_uids.get("prob") == (None if prob == "none" else p.prob.uid)
    assert [node.output_uids[k] for k in ("dx", "dprob", "activation") if k in extra or k == "dx"] == [
        t.uid for t in outputs
    ]


def geglu(p: Spelled, alpha: float, low: float, high: float, offset: float, *, backward: bool, mask: str = "cmp_le",
          commuted: bool = False) -> list[Tensor]:  # fmt: skip
    """The clamped GeGLU of numerics, spelled with min, max, sigmoid and select; with its derivative."""
    g = p.g

    def mul(a: Any, b: Any) -> Tensor:
        return g.mul(b, a) if commuted else g.mul(a, b)

    y1 = g.min(p.gate, high) if high < math.inf else p.gate
    y2 = g.min(p.up, high) if high < math.inf else p.up
    y2 = g.max(y2, low) if low > -math.inf else y2
    s = g.sigmoid(mul(y1, alpha))
    up = g.add(y2, offset) if offset else y2
    unit = mul(up, mul(y1, s))
    if not backward:
        return [mul(p.prob, unit).set_data_type(FLOAT)]
    t = mul(p.dy, p.prob)
    dgate = mul(mul(t, up), mul(s, g.add(mul(mul(y1, alpha), g.sub(1.0, s)), 1.0)))
    dup = mul(mul(t, y1), s)
    if high < math.inf:
        dgate = g.select(getattr(g, mask)(p.gate, high), dgate, 0.0)
        dup = g.select(g.cmp_ge(high, p.up) if commuted else g.cmp_le(p.up, high), dup, 0.0)
    if low > -math.inf:
        dup = mul(dup, g.select(g.cmp_ge(p.up, low), 1.0, 0.0)) if commuted else g.select(g.cmp_ge(p.up, low), dup, 0.0)
    dprob = g.reduction(mul(p.dy, unit), "ADD", 1).set_data_type(FLOAT)
    return [g.join_glu(dgate, dup, LAYOUT).set_data_type(FLOAT), dprob]


PARAMETERS = [(1.702, -7.0, 7.0, 1.0), (1.0, -10.0, 10.0, 0.0), (1.702, -math.inf, 7.0, 1.0),
              (1.702, -math.inf, math.inf, 0.0), (1.0, -math.inf, math.inf, 1.0),
              (0.5, -3.0, math.inf, -1.5)]  # fmt: skip


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("commuted", [False, True])
def test_geglu_with_its_parameters(parameters, backward, commuted):
    p = start()
    outputs = geglu(p, *parameters, backward=backward, commuted=commuted)
    (node,) = raised(fg.frozen(p.g, *outputs), "raise_glu_backward" if backward else "raise_glu").nodes
    got = tuple(node.attribute[k] for k in ("geglu_alpha", "clamp_min", "clamp_max", "linear_offset"))
    assert node.attribute["act"] == "geglu" and got == parameters


def test_forward_and_backward_of_one_split_are_both_raised():
    p = start()
    g = p.g
    s = g.sigmoid(p.gate)  # shared by both
    swish = g.mul(p.gate, s)
    y = g.mul(g.mul(swish, p.up), p.prob).set_data_type(FLOAT)
    dy = g.sub(g.relu(y), 0.5)  # the gradient waits for the activation: it cannot come from the same node
    t = g.mul(dy, p.prob)
    dgate = g.mul(g.mul(t, p.up), g.mul(s, g.add(1.0, g.mul(p.gate, g.sub(1.0, s)))))
    dx = g.join_glu(dgate, g.mul(t, swish), LAYOUT).set_data_type(FLOAT)
    new = raised(fg.frozen(g, y, dx), "raise_glu", "raise_glu_backward")
    assert sorted(n.op for n in new.nodes) == ["glu", "glu_backward", "relu", "sub"]


def test_a_raised_derivative_fuses_with_its_product():
    p = fg.Parts()
    fg.operands(p)
    g, rows = p.g, p["a"].dim[0]
    c = g.tensor("c", dim=(rows, 2 * fg.COLUMNS), glu_layout=LAYOUT)
    prob = g.tensor("prob1", dim=(rows, 1), data_type=FLOAT)
    gate, up = g.split_glu(c)
    r = g.grouped_matmul(p["a"], p["b"], p["offsets"])
    t = g.mul(r, prob)
    dx = g.join_glu(g.swish_backward(g.mul(t, up), gate), g.mul(t, g.swish(gate)), LAYOUT)
    p.outputs.append(g.reduction(g.mul(g.mul(r, up), g.swish(gate)), "ADD", 1))
    fg.attach(p, dx, split=True)
    report = plan(p.freeze())
    assert [r.rule for r in report.raisings] == ["raise_glu_backward"]
    assert [m.rule for m in report.matches] == ["grouped_gemm_dglu"]
    assert len(report.matches[0].nodes) == len(report.graph.nodes) == 6
    apart = plan(p.freeze(), disable=["raise_glu_backward"])
    assert not apart.raisings and "grouped_gemm_dglu" not in {m.rule for m in apart.matches}
    assert "DISABLED" in fg.codes(apart, "raise_glu_backward", VerdictKind.NOT_CHOSEN)


def test_a_raised_forward_fuses_with_its_product():
    p = fg.Parts()
    fg.operands(p, columns=2 * fg.COLUMNS)
    p["b"]._glu_layout = LAYOUT
    gate, up = p.g.split_glu(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]))
    p.outputs.append(p.g.mul(p.g.swish(gate), up))
    report = plan(p.freeze())
    assert [m.rule for m in report.matches] == ["grouped_gemm_glu"]


OTHER_FUNCTIONS: dict[str, Callable[[Spelled], Tensor]] = {
    "gate twice": lambda p: p.g.mul(p.g.swish(p.gate), p.gate),
    "sigmoid of up": lambda p: p.g.mul(p.g.mul(p.gate, p.g.sigmoid(p.up)), p.up),
    "factor per column": lambda p: p.g.mul(
        p.g.swish(p.gate), p.g.mul(p.up, p.g.tensor("columns", dim=(HALF,), data_type=FLOAT))
    ),
    "a sum": lambda p: p.g.add(p.g.swish(p.gate), p.up),
    "a difference": lambda p: p.g.sub(p.g.mul(p.g.swish(p.gate), p.up), p.up),
    "tanh gelu": lambda p: p.g.mul(p.g.gelu(p.gate, approximate="tanh"), p.up),
    "negative scale": lambda p: p.g.mul(p.g.mul(p.gate, p.g.sigmoid(p.g.mul(p.gate, -1.0))), p.up),
    "up clamped below gate": lambda p: p.g.mul(p.g.swish(p.g.min(p.gate, 7.0)), p.g.min(p.up, 6.0)),
    "gate clamped below": lambda p: p.g.mul(p.g.swish(p.g.max(p.gate, -7.0)), p.up),
}


def forward_miss(change: str) -> tuple[OpGraph, str]:
    p = start()
    g = p.g
    if change in OTHER_FUNCTIONS:
        return fg.frozen(g, OTHER_FUNCTIONS[change](p)), "RAISE_FORM"
    s = g.sigmoid(p.gate)
    silu_ = g.mul(p.gate, s)
    y = g.mul(silu_, p.up)
    outputs, code = [y], "RAISE_ROUNDING"
    match change:
        case "sigmoid rounds":
            s.set_data_type(BF16)
        case "silu rounds":
            silu_.set_data_type(BF16)
        case "gate rounds":
            p.x.set_data_type(FLOAT)
            p.gate.set_data_type(BF16)
        case "silu is an output":
            outputs.append(silu_.set_data_type(FLOAT))
            code = "RAISE_ESCAPES"
        case "sigmoid is read elsewhere":
            outputs.append(g.relu(s))
            code = "RAISE_ESCAPES"
        case "two factors":
            outputs = [g.mul(g.mul(y, p.prob), g.tensor("again", dim=(ROWS, 1), data_type=FLOAT))]
            return fg.frozen(g, *outputs), "PARTIAL"
    return fg.frozen(g, *outputs), code


FORWARD_MISSES = ("sigmoid rounds", "silu rounds", "gate rounds", "silu is an output", "sigmoid is read elsewhere",
                  *(name for name in OTHER_FUNCTIONS if name != "a difference"))  # fmt: skip


@pytest.mark.parametrize("change", FORWARD_MISSES)
def test_forward_near_misses_are_left_alone(change):
    graph, code = forward_miss(change)
    new, made = raise_graph(graph)
    assert new is graph and not made
    assert code in {r.code for v in why_not(graph, "raise_glu", fg.SM90) for r in v.reasons}


def test_a_second_factor_stays_outside():
    graph, _ = forward_miss("two factors")
    new = raised(graph, "raise_glu")
    assert [n.op for n in new.nodes] == ["glu", "mul"]


def backward_miss(change: str) -> tuple[OpGraph, str]:
    p = start()
    g = p.g
    t = g.mul(p.dy, p.prob)
    a, swish = g.mul(t, p.up), g.swish(p.gate)
    dgate, dup = g.swish_backward(a, p.gate), g.mul(t, swish)
    layout, outputs, code = LAYOUT, [], "RAISE_FORM"
    match change:
        case "gate and up exchanged":
            dgate, dup = dup, dgate
        case "other layout":
            layout, code = GluLayout.interleaved(16), "RAISE_LAYOUT"
        case "gradient rounds first":
            dgate.set_data_type(DataType.HALF)
            code = "RAISE_ROUNDING"
        case "inside rounds":
            a.set_data_type(BF16)
            code = "RAISE_ROUNDING"
        case "swish is read elsewhere":
            outputs, code = [g.relu(swish)], "RAISE_ESCAPES"
        case "gradient is an output":
            outputs, code = [dgate], "RAISE_ESCAPES"
        case "no factor on dup":
            dup = g.mul(p.dy, swish)
        case "other beta":
            dgate = g.swish_backward(a, p.gate, swish_beta=1.702)
        case "up missing":
            dgate = g.swish_backward(t, p.gate)
        case "joined with another split":
            _, other = g.split_glu(g.tensor("x2", dim=(ROWS, 2 * HALF), glu_layout=LAYOUT))
            dup = g.mul(t, other)
        case "dprob with prob":
            outputs, code = [g.reduction(g.mul(t, g.mul(p.up, swish)), "ADD", 1)], "RAISE_ESCAPES"
    return fg.frozen(g, g.join_glu(dgate, dup, layout).set_data_type(BF16), *outputs), code


BACKWARD_MISSES = ("gate and up exchanged", "other layout", "gradient rounds first", "inside rounds",
                   "swish is read elsewhere", "gradient is an output", "no factor on dup", "other beta", "up missing",
                   "joined with another split", "dprob with prob")  # fmt: skip


@pytest.mark.parametrize("change", BACKWARD_MISSES)
def test_backward_near_misses_are_left_alone(change):
    graph, code = backward_miss(change)
    _, made = raise_graph(graph)
    assert "raise_glu_backward" not in {r.rule for r in made}
    found = [v for v in why_not(graph, "raise_glu_backward", fg.SM90) if v.kind is VerdictKind.NO_MATCH]
    assert code in {r.code for v in found for r in v.reasons}, [str(r) for v in found for r in v.reasons]


@pytest.mark.parametrize(("mode", "axis", "keep_dim"), [("ADD", 0, False), ("ADD", 1, True), ("MAX", 1, False)])
def test_another_reduction_is_not_dprob(mode, axis, keep_dim):
    """The unit inside it is the activation, so that nothing escapes from the derivative."""
    p = start()
    g = p.g
    swish = g.swish(p.gate)
    dx = g.join_glu(g.swish_backward(g.mul(p.dy, p.up), p.gate), g.mul(p.dy, swish), LAYOUT).set_data_type(FLOAT)
    other = g.reduction(g.mul(p.dy, g.mul(p.up, swish)), mode, axis, keep_dim=keep_dim).set_data_type(FLOAT)
    new = raised(fg.frozen(g, dx, other), "raise_glu_backward")
    assert sorted(n.op for n in new.nodes) == ["glu_backward", "mul", "reduction"]
    assert next(n for n in new.nodes if n.op == "reduction").output_uids["y"] == other.uid


def test_a_unit_inside_another_function_is_raised_alone():
    p = start()
    new = raised(fg.frozen(p.g, OTHER_FUNCTIONS["a difference"](p).set_data_type(FLOAT)), "raise_glu")
    assert sorted(n.op for n in new.nodes) == ["glu", "split_glu", "sub"]


@pytest.mark.parametrize("mask", ["cmp_lt", "cmp_gt", "cmp_ge"])
def test_a_mask_that_drops_equality_is_another_function(mask):
    p = start()
    graph = fg.frozen(p.g, *geglu(p, 1.702, -7.0, 7.0, 1.0, backward=True, mask=mask))
    assert "raise_glu_backward" not in {r.rule for r in raise_graph(graph)[1]}


def test_c36_unmasked_clamps_are_another_function():
    p = start()
    g = p.g
    y1 = g.min(p.gate, 7.0)
    s = g.sigmoid(y1)
    up = g.max(g.min(p.up, 7.0), -7.0)
    dgate = g.mul(g.mul(p.dy, up), g.mul(s, g.add(1.0, g.mul(y1, g.sub(1.0, s)))))
    graph = fg.frozen(g, g.join_glu(dgate, g.mul(p.dy, g.mul(y1, s)), LAYOUT))
    assert not raise_graph(graph)[1]


def test_rounding_to_the_type_of_dx_before_the_join_changes_nothing():
    p = start()
    g = p.g
    dgate, dup = g.swish_backward(g.mul(p.dy, p.up), p.gate), g.mul(p.dy, g.swish(p.gate))
    for t in (dgate, dup):
        t.set_data_type(BF16)
    raised(fg.frozen(g, g.join_glu(dgate, dup, LAYOUT).set_data_type(BF16)), "raise_glu_backward")


def test_a_graph_without_compositions_is_returned_itself():
    graph = fg.dglu().freeze()
    assert raise_graph(graph) == (graph, ()) and raise_graph(graph)[0] is graph


def test_raising_reports_the_nodes_as_declared():
    p = start()
    graph = fg.frozen(p.g, p.g.mul(p.up, p.g.swish(p.gate)))
    new, (raising,) = raise_graph(graph)
    assert [graph.nodes[i].op for i in raising.nodes] == ["swish", "mul"]
    assert raising.into == new.nodes[0].name and new.nodes[0].location == graph.nodes[2].location


def test_why_not_at_a_raised_node_speaks_of_what_it_became():
    p = start()
    graph = fg.frozen(p.g, p.g.mul(p.up, p.g.swish(p.gate)))
    (verdict,) = why_not(graph, "grouped_gemm_glu", fg.SM90, "swish.0")
    assert verdict.anchor == 0 and "glu.of.mul.0 is glu" in verdict.reasons[0].observed


def test_a_split_that_others_read_stays():
    p = start()
    graph = fg.frozen(p.g, p.g.mul(p.up, p.g.swish(p.gate)), p.g.relu(p.gate))
    new = raised(graph, "raise_glu")
    assert sorted(n.op for n in new.nodes) == ["glu", "relu", "split_glu"]


def test_a_long_chain_before_the_gradient_is_an_atom():
    p = start()
    g = p.g
    dy = p.dy
    for _ in range(2000):
        dy = g.mul(dy, 1.0)
    dx = g.join_glu(g.swish_backward(g.mul(dy, p.up), p.gate), g.mul(dy, g.swish(p.gate)), LAYOUT)
    new, made = raise_graph(fg.frozen(g, dx))
    assert len(made) == 1 and len(new.nodes) == 2001
