"""The builder: setters, uids, names, defaults and source lines as in cuDNN's graph API."""

from __future__ import annotations

import inspect

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout, GraphError, ScaleLayout, StateError
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import verify

HERE = __file__


def code_of(call) -> GraphError:
    with pytest.raises(GraphError) as caught:
        call()
    return caught.value


# ------------------------------------------------------------------ tensors


def test_setters_chain_and_getters_mirror_them():
    g = GraphBuilder()
    x = g.tensor("x", dim=(4, 8))
    y = (
        g.identity(x)
        .set_output(True).set_name("out").set_uid(77).set_dim((4, 8)).set_stride((16, 1))
        .set_data_type(DataType.HALF).set_alignment_value(64)
    )  # fmt: skip
    assert (y.get_name(), y.get_uid(), y.get_dim(), y.get_stride()) == ("out", 77, (4, 8), (16, 1))
    assert (y.get_data_type(), y.get_alignment_value(), y.is_output, y.is_virtual) == (DataType.HALF, 64, True, False)
    spec = g.operation_graph().tensor(77)
    assert (spec.name, spec.stride, spec.data_type, spec.alignment) == ("out", (16, 1), DataType.HALF, 64)


def test_automatic_uids_count_from_one():
    g = GraphBuilder()
    assert [g.tensor().uid for _ in range(3)] == [1, 2, 3]


def test_automatic_uids_step_over_the_users():
    g = GraphBuilder()
    g.tensor("mine", uid=2)
    assert [g.tensor().uid for _ in range(2)] == [3, 4]


def test_a_users_uid_moves_an_automatic_holder_away():
    g = GraphBuilder()
    first, second = g.tensor("first", dim=(2,)), g.tensor("second", dim=(2,))
    total = g.add(first, second).set_output(True)
    second.set_uid(first.uid)
    assert second.uid == 1 and first.uid not in (1, total.uid)
    graph = g.operation_graph()
    assert set(graph.tensors) == {t.uid for t in (first, second, total)}
    assert graph.nodes[0].input_uids == {"a": first.uid, "b": second.uid}, "edges follow the tensors"
    verify(graph)


def test_two_tensors_cannot_be_given_one_uid():
    g = GraphBuilder()
    g.tensor("x", uid=5)
    error = code_of(lambda: g.tensor("y", uid=5))
    assert error.code == "UID_TAKEN" and "x" in str(error) and HERE in str(error.where)


def test_a_uid_given_up_is_free_again():
    g = GraphBuilder()
    x = g.tensor("x", uid=5).set_uid(6)
    y = g.tensor("y", uid=5)
    assert (x.uid, y.uid) == (6, 5) and x.set_uid(6) is x


def test_names_may_repeat_but_then_name_nothing():
    g = GraphBuilder()
    g.tensor("x")
    unique = g.tensor("y")
    g.tensor("x")
    assert g.find_tensor("y") is unique
    assert code_of(lambda: g.find_tensor("x")).seen == "2 of that name"
    assert code_of(lambda: g.find_tensor("z")).seen == "0 of that name"


def test_nameless_tensors_and_nodes_are_numbered_by_kind():
    g = GraphBuilder()
    x = g.tensor(dim=(2,))
    outputs = [g.relu(x), g.relu(x), g.neg(x)]
    assert x.name == "tensor.0"
    assert [t.name for t in outputs] == ["relu.0::y", "relu.1::y", "neg.0::y"]


def test_an_output_of_an_op_is_virtual_until_set_output():
    g = GraphBuilder(io_data_type=DataType.HALF, intermediate_data_type=DataType.BFLOAT16)
    x = g.tensor("x", dim=(2,))
    y = g.relu(x)
    assert (x.is_virtual, y.is_virtual, y.is_output) == (False, True, False)
    assert (x.data_type, y.data_type) == (DataType.HALF, DataType.BFLOAT16)
    y.set_output(True)
    assert (y.is_virtual, y.data_type) == (False, DataType.HALF)
    y.set_output(False)
    assert (y.is_virtual, y.data_type) == (True, DataType.BFLOAT16)


def test_a_data_type_that_was_set_stays_through_set_output():
    g = GraphBuilder()
    y = g.relu(g.tensor("x", dim=(2,))).set_data_type(DataType.HALF)
    assert y.data_type is DataType.HALF and y.set_output(True).data_type is DataType.HALF


def test_ops_fix_the_types_that_attributes_or_ports_decide(dglu_builder):
    types = {t.name: t.data_type for t in dglu_builder().tensors}
    assert types["block_scale_quantize.0::y"] is DataType.FP8_E4M3
    assert types["block_scale_quantize.0::scale"] is DataType.FP8_E8M0
    assert types["glu_backward.0::dprob"] is types["group_amax.0::y"] is DataType.FLOAT


def test_an_input_is_no_output():
    g = GraphBuilder()
    error = code_of(lambda: g.tensor("x").set_output(True))
    assert error.code == "OUTPUT_UNPRODUCED" and HERE in str(error.where)


def test_scalars_are_part_of_the_graph_and_of_no_variant_pack():
    g = GraphBuilder()
    x = g.tensor("x", dim=(3, 4))
    y = g.mul(x, 2.5).set_output(True)
    graph = g.operation_graph()
    scalar = graph.inputs_of(graph.nodes[0])["b"]
    assert (scalar.value, scalar.dim, scalar.data_type, scalar.is_constant) == (2.5, (), DataType.FLOAT, True)
    assert y.dim == (3, 4) and [t.name for t in graph.graph_inputs] == ["x"]


def test_tensor_like_a_torch_tensor():
    g = GraphBuilder()
    made = g.tensor_like(torch.empty(4, 6, dtype=torch.float16).t(), "x", alignment=32)
    assert (made.dim, made.stride, made.data_type, made.name) == ((6, 4), (1, 6), DataType.HALF, "x")
    assert made.get_alignment_value() == 32
    assert code_of(lambda: g.tensor_like(torch.empty(1, dtype=torch.complex64))).code == "DATA_TYPE"


def test_tensor_like_another_tensor_takes_its_layouts():
    g = GraphBuilder()
    like = g.tensor("a", dim=(8, 64), data_type=DataType.HALF, glu_layout=GluLayout.interleaved(32), alignment=4)
    made = g.tensor_like(like, "b")
    assert made.uid != like.uid and made.name == "b"
    assert (made.dim, made.data_type, made.glu_layout, made.get_alignment_value()) == (
        (8, 64), DataType.HALF, GluLayout.interleaved(32), 4)  # fmt: skip
    scales = g.tensor("s", dim=(8, 2), scale_layout=ScaleLayout(32, 1, False))
    assert g.tensor_like(scales).scale_layout == scales.scale_layout


def test_one_name_is_one_symbol():
    g = GraphBuilder()
    m = g.symbol("M", multiple_of=256, max=4096)
    assert g.symbol("M", multiple_of=256, max=4096) is m
    error = code_of(lambda: g.symbol("M"))
    assert error.code == "SYMBOL_CLASH" and HERE in str(error.where)


# ------------------------------------------------------------------ nodes


def test_parallel_edges_are_two_uses():
    g = GraphBuilder()
    x = g.tensor("x", dim=(2,))
    g.mul(x, x).set_output(True)
    graph = g.operation_graph()
    assert graph.nodes[0].inputs == (("a", x.uid), ("b", x.uid))
    assert [(u.node.index, u.port) for u in graph.uses[x.uid]] == [(0, "a"), (0, "b")]
    verify(graph)


def test_ops_with_several_outputs_return_them_in_port_order(dglu_builder):
    g = GraphBuilder()
    m = g.symbol("M")
    x = g.tensor("x", dim=(m, 64), glu_layout=GluLayout.interleaved(32))
    dy = g.tensor("dy", dim=(m, 32))
    assert len(g.glu_backward(dy, x, act="swiglu")) == 2
    dx, dprob, activation = g.glu_backward(dy, x, act="swiglu", recompute=True)
    assert (dx.dim, dprob.dim, activation.dim) == ((m, 64), (m,), (m, 32))
    assert dx.glu_layout == x.glu_layout
    gate, up = g.split_glu(x)
    assert (gate.name, up.name) == ("split_glu.0::gate", "split_glu.0::up")
    q, scale = g.block_scale_quantize(x, block_size=32, axis=1, data_type=DataType.FP8_E4M3)
    assert (q.data_type, scale.data_type) == (DataType.FP8_E4M3, DataType.FP8_E8M0)


def test_dims_that_are_set_late_reach_the_outputs():
    g = GraphBuilder()
    x = g.tensor("x", dim=(1, 8))
    y = g.relu(x).set_output(True)
    x.set_dim((5, 8))
    assert g.operation_graph().tensor(y.uid).dim == (5, 8)


def test_an_inference_that_fails_late_names_the_node():
    g = GraphBuilder()
    a, b = g.tensor("a", dim=(4, 8)), g.tensor("b", dim=(4, 8))
    g.add(a, b, name="sum").set_output(True)
    b.set_dim((3, 8))
    error = code_of(g.operation_graph)
    assert error.code == "BROADCAST" and "sum [add]" in str(error.where) and HERE in str(error.where)


def test_every_node_and_tensor_knows_the_users_line():
    g = GraphBuilder()
    line = inspect.currentframe().f_lineno
    x = g.tensor("x", dim=(2, 2))
    y = g.relu(x).set_output(True)
    z = g.reduction(y, "ADD", 0).set_output(True)
    graph = g.operation_graph()
    assert [(n.location.file, n.location.line - line) for n in graph.nodes] == [(HERE, 2), (HERE, 3)]
    assert [graph.tensor(t.uid).location.line - line for t in (x, y, z)] == [1, 2, 3]


def test_errors_name_the_users_line():
    g = GraphBuilder()
    x = g.tensor("x", dim=(2, 3))
    error = code_of(lambda: g.add(x, g.tensor("y", dim=(4, 3))))
    assert error.code == "BROADCAST" and HERE in str(error.where)


@pytest.mark.parametrize(
    ("value", "code"), [(None, "PORT_MISSING"), (True, "OPERAND"), ("2", "OPERAND"), ([1.0], "OPERAND")]
)
def test_an_operand_is_a_tensor_of_this_graph_or_a_number(value, code):
    g = GraphBuilder()
    x = g.tensor("x", dim=(2,))
    error = code_of(lambda: g.add(x, value))
    assert error.code == code and HERE in str(error.where)


def test_a_tensor_of_another_graph_is_refused():
    g, other = GraphBuilder(), GraphBuilder()
    x, foreign = g.tensor("x", dim=(2,)), other.tensor("x", dim=(2,))
    assert x.uid == foreign.uid
    assert code_of(lambda: g.add(x, foreign)).code == "OPERAND"


def test_an_argument_that_nothing_reads_is_refused():
    g = GraphBuilder()
    x = g.tensor("x", dim=(4, 64), glu_layout=GluLayout.interleaved(32))
    error = code_of(lambda: g.glu(x, act="swiglu", clamp_max=7.0))
    assert error.code == "ARGUMENT_UNUSED" and "clamp_max" in str(error)
    assert code_of(lambda: GraphBuilder(compute_data_type=DataType.HALF)).code == "COMPUTE_DATA_TYPE"


def test_a_planned_graph_is_closed():
    g = GraphBuilder()
    x = g.tensor("x", dim=(2,))
    y = g.relu(x)
    g._frozen = True
    for change in (lambda: g.tensor("z"), lambda: g.relu(x), lambda: y.set_output(True), lambda: x.set_name("w"),
                   lambda: x.set_uid(9), lambda: x.set_dim((3,)), lambda: x.set_stride((1,)),
                   lambda: x.set_data_type(DataType.HALF), lambda: x.set_alignment_value(8)):  # fmt: skip
        with pytest.raises(StateError) as caught:
            change()
        assert caught.value.code == "GRAPH_FROZEN"


def test_the_graph_freezes_a_copy():
    g = GraphBuilder()
    x = g.tensor("x", dim=(2,))
    g.relu(x).set_output(True)
    before = g.operation_graph()
    x.set_name("renamed")
    assert before.tensor(x.uid).name == "x" and g.operation_graph() != before


def test_operands_broadcast_as_in_numpy():
    g = GraphBuilder()
    m = g.symbol("M")
    x, prob, row = g.tensor("x", dim=(m, 8)), g.tensor("p", dim=(m, 1)), g.tensor("r", dim=(8,))
    assert g.mul(x, prob).dim == g.add(row, x).dim == (m, 8)
    assert g.mul(prob, row).dim == (m, 8)
    assert g.cmp_gt(x, 0.0).data_type is DataType.BOOLEAN


@pytest.mark.parametrize(
    ("axis", "keep", "dim"), [(0, False, (5,)), (-1, False, (3,)), ((0, 1), False, ()), (1, True, (3, 1))]
)
def test_reduction_axes(axis, keep, dim):
    g = GraphBuilder()
    assert g.reduction(g.tensor("x", dim=(3, 5)), "MAX", axis, keep_dim=keep).dim == dim


def test_topological_order_is_declaration_order_where_it_may_be(mlp_builder):
    graph = mlp_builder().operation_graph()
    assert [n.index for n in graph.topological_order] == list(range(len(graph.nodes)))


def test_example_graphs_are_well_formed(dglu_builder, mlp_builder):
    for build in (dglu_builder, mlp_builder):
        verify(build().operation_graph())
