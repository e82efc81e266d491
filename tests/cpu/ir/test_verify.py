"""The verifier: a broken graph for every code that it can emit, and no violation for a sound one."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
from opfuse.graph_ops import DataType, GluLayout, ScaleLayout
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import VerificationError, symbol, verify, violations
from opfuse.graph_ops.ir import verify as verify_function
from opfuse.graph_ops.ir.graph import Node, OpGraph

verify_module = inspect.getmodule(verify_function)
CASES: dict[str, list] = {}


def case(code):
    """Registers a function that breaks a sound graph so that `code` is reported."""

    def register(function):
        CASES.setdefault(code, []).append(function)
        return function

    return register


def uid_of(graph: OpGraph, name: str) -> int:
    return next(uid for uid, t in graph.tensors.items() if t.name == name)


def with_tensor(graph: OpGraph, name: str, **changes) -> OpGraph:
    uid = uid_of(graph, name)
    return replace(graph, tensors={**graph.tensors, uid: replace(graph.tensors[uid], **changes)})


def with_node(graph: OpGraph, which: str, **changes) -> OpGraph:
    first = next(n for n in graph.nodes if n.op == which)
    return replace(graph, nodes=tuple(replace(n, **changes) if n is first else n for n in graph.nodes))


def node(graph: OpGraph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op == op)


@case("GRAPH_EMPTY")
def _(graph):
    return replace(graph, nodes=())


@case("NO_OUTPUT")
def _(graph):
    return replace(graph, tensors={u: replace(t, is_output=False) for u, t in graph.tensors.items()})


@case("OP_UNKNOWN")
def _(graph):
    return with_node(graph, "group_sum", op="group_product")


@case("PORT_MISSING")
def _(graph):
    return with_node(graph, "group_sum", inputs=node(graph, "group_sum").inputs[:1])


@case("PORT_MISSING")
def _(graph):  # an optional port, but twice
    gmm = node(graph, "grouped_matmul")
    return with_node(graph, "grouped_matmul", inputs=(*gmm.inputs, ("alpha", uid_of(graph, "alpha"))))


@case("PORT_MISSING")
def _(graph):  # an optional output that the attributes ask for
    glu = node(graph, "glu_backward")
    return with_node(graph, "glu_backward", outputs=glu.outputs[:2])


@case("PORT_UNKNOWN")
def _(graph):
    return with_node(graph, "group_sum", inputs=(*node(graph, "group_sum").inputs, ("weights", uid_of(graph, "alpha"))))


@case("TENSOR_UNKNOWN")
def _(graph):
    return with_node(graph, "group_sum", inputs=(("x", 999), node(graph, "group_sum").inputs[1]))


@case("TENSOR_UNKNOWN")
def _(graph):
    return with_node(graph, "group_sum", outputs=(("y", 999),))


@case("WRITERS")
def _(graph):
    return with_node(graph, "group_amax", outputs=node(graph, "group_sum").outputs)


@case("CONSTANT_WRITTEN")
def _(graph):
    return with_tensor(graph, "group_sum.0::y", value=1.0)


@case("CYCLE")
def _(graph):
    # glu_backward reads what it wrote
    dx = node(graph, "glu_backward").output_uids["dx"]
    inputs = tuple((p, dx if p == "x" else u) for p, u in node(graph, "glu_backward").inputs)
    return with_node(graph, "glu_backward", inputs=inputs)


@case("VIRTUAL_INPUT")
def _(graph):
    return with_tensor(graph, "dy", is_virtual=True)


@case("OUTPUT_UNPRODUCED")
def _(graph):
    return with_tensor(graph, "dy", is_output=True)


@case("OUTPUT_VIRTUAL")
def _(graph):
    return with_tensor(graph, "group_sum.0::y", is_virtual=True)


@case("DIM")
def _(graph):
    return with_tensor(graph, "dy", dim=(-1, 64))


@case("STRIDE")
def _(graph):
    return with_tensor(graph, "dy", stride=(64,))


@case("STRIDE")
def _(graph):
    return with_tensor(graph, "dy", stride=(-64, 1))


@case("STRIDE_OVERLAP")
def _(graph):
    return with_tensor(graph, "group_sum.0::y", stride=(0, 1))


@case("ALIGNMENT")
def _(graph):
    return with_tensor(graph, "dy", alignment=24)


@case("ALIGNMENT")
def _(graph):
    return with_tensor(graph, "dy", alignment=0)


@case("DISCRETE")
def _(graph):
    return with_tensor(graph, "dy", discrete=True)


@case("DISCRETE")
def _(graph):  # three axes, but not as b of grouped_matmul
    g = GraphBuilder()
    w = g.tensor("w", dim=(4, 8, 8), discrete=True)
    g.relu(w).set_output(True)
    return g.operation_graph()


@case("PACKING")
def _(graph):  # FP4 weights of which a column ends in the middle of a byte
    g = GraphBuilder()
    layout = ScaleLayout(16, axis=0)
    w = g.tensor("w", dim=(2, 33, 32), stride=(1056, 1, 33), data_type=DataType.FP4_E2M1)
    sf = g.tensor("sf", dim=(2, *layout.storage((33, 32))), data_type=DataType.FP8_E4M3, scale_layout=layout)
    g.block_scale_dequantize(w, sf).set_output(True)
    return g.operation_graph()


@case("GLU_COLUMNS")
def _(graph):
    return with_tensor(graph, "dy", glu_layout=GluLayout.interleaved(48))


@case("GLU_COLUMNS")
def _(graph):
    return with_tensor(graph, "dy", glu_layout=GluLayout.concatenated(), dim=(), stride=())


@case("PACKING")
def _(graph):  # weights of three axes pack along the contiguous one
    return with_tensor(graph, "w2", data_type=DataType.FP4_E2M1, dim=(4, 63, 96), stride=(63 * 96, 1, 63))


@case("PORT_ABSENT")
def _(graph):
    attributes = {**node(graph, "glu_backward").attribute, "recompute": False}
    return with_node(graph, "glu_backward", attributes=tuple(attributes.items()))


@case("OUTPUT_SHAPE")
def _(graph):
    return with_tensor(graph, "group_sum.0::y", dim=(4, 191), stride=(191, 1))


@case("OUTPUT_GLU_LAYOUT")
def _(graph):
    return with_tensor(graph, "group_sum.0::y", glu_layout=GluLayout.concatenated())


@case("OUTPUT_SCALE_LAYOUT")
def _(graph):
    return with_tensor(graph, "block_scale_quantize.0::y", scale_layout=ScaleLayout(32, 0))


@case("OUTPUT_DATA_TYPE")
def _(graph):
    return with_tensor(graph, "block_scale_quantize.0::y", data_type=DataType.FP8_E5M2)


@case("DATA_TYPE")
def _(graph):
    return with_tensor(graph, "offs", data_type=DataType.FLOAT)


@case("OPERAND_TYPES")
def _(graph):
    return with_tensor(graph, "dy", data_type=DataType.HALF)


@case("DATA_TYPE_DOUBLE")
def _(graph):
    return with_tensor(graph, "h", data_type=DataType.DOUBLE)


@case("SYMBOL_CLASH")
def _(graph):
    return with_tensor(graph, "prob", dim=(symbol("M", maximum=7),))


@case("MULTIPLE_OF")
def _(graph):
    return with_tensor(graph, "dy", multiple_of=8)


@case("MULTIPLE_OF")
def _(graph):
    return with_tensor(graph, "offs", multiple_of=0)


@case("ACCUMULATE_VIRTUAL")
def _(graph):
    g = GraphBuilder()
    x, offs = g.tensor("x", dim=(8, 4)), g.tensor("offs", dim=(2,), data_type=DataType.INT32)
    g.relu(g.grouped_matmul_wgrad(x, x, offs, accumulate=True)).set_output(True)
    return g.operation_graph()


@pytest.mark.parametrize(
    ("code", "breaks"),
    [(code, f) for code, fs in CASES.items() for f in fs],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_broken_graph_is_reported_by_code(dglu_builder, code, breaks):
    broken = breaks(dglu_builder().operation_graph())
    found = violations(broken)
    mine = [v for v in found if v.code == code]
    assert mine, f"only {[v.code for v in found]}"
    for violation in mine:
        assert violation.asked is not None and violation.seen is not None and violation.required is not None
    with pytest.raises(VerificationError) as caught:
        verify(broken)
    assert [str(v) for v in caught.value.violations] == [str(v) for v in found]
    assert str(caught.value).count("\n") == len(found) - 1


def test_every_code_of_the_verifier_has_a_broken_graph():
    source = inspect.getsource(verify_module)
    emitted = set(re.findall(r'(?:_error|GraphError)\(\s*"([A-Z_]+)"', source))
    assert emitted == set(CASES)


def test_every_rule_is_named_by_a_code_it_emits():
    for rule in verify_module.RULES:
        assert rule.code in CASES and rule.requirement


def test_all_violations_are_collected_in_table_order(dglu_builder):
    graph = dglu_builder().operation_graph()
    broken = with_tensor(with_tensor(graph, "dy", alignment=3), "offs", data_type=DataType.FLOAT)
    broken = with_node(broken, "group_sum", op="nothing")
    codes = [v.code for v in violations(broken)]
    assert {"OP_UNKNOWN", "ALIGNMENT", "DATA_TYPE"} <= set(codes)
    assert codes.index("OP_UNKNOWN") < codes.index("ALIGNMENT") < codes.index("DATA_TYPE")


def test_violations_point_at_the_users_line(dglu_builder):
    graph = dglu_builder().operation_graph()
    (shape,) = violations(with_tensor(graph, "group_sum.0::y", dim=(5, 192), stride=(192, 1)))
    assert re.search(r"group_sum\.0 \[group_sum\] at .*conftest\.py:\d+", str(shape))
    (alignment,) = violations(with_tensor(graph, "dy", alignment=3))
    assert re.search(r"tensor dy at .*conftest\.py:\d+", str(alignment))


def test_a_symbol_that_promises_a_multiple_serves_a_layout():
    """The builder's and the verifier's idea of a fitting GLU layout are one."""
    g = GraphBuilder()
    intermediate = g.symbol("I", multiple_of=32)
    x = g.tensor("x", dim=(8, 2 * intermediate), glu_layout=GluLayout.interleaved(32))
    y = g.glu(x, act="swiglu").set_output(True)
    assert y.dim == (8, intermediate)
    verify(g.operation_graph())
