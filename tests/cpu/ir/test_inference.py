"""Shape, layout and type inference of every op: what it gives, and every way in which it refuses."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pytest
from opfuse.graph_ops import DataType, GluLayout, GraphError, ScaleLayout
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import OPS, verify
from opfuse.graph_ops.ir import op as op_module
from opfuse.graph_ops.ir.nodes import glu, groups, matmul, pointwise, quantize

F32, I32, E4M3 = DataType.FLOAT, DataType.INT32, DataType.FP8_E4M3
WIDE = GluLayout.interleaved(32)


@pytest.fixture
def t():
    """A graph `g` and the tensors that the cases below pick from: M = 6 rows, K = 8, N = 64, L = 3 experts."""
    g = GraphBuilder()
    made = SimpleNamespace(g=g, m=g.symbol("M"))
    for name, dim, data_type, layout in [
        ("a", (made.m, 8), None, None), ("b", (3, 8, 64), None, None), ("offs", (3,), I32, None),
        ("offs4", (4,), I32, None), ("offs2d", (3, 1), I32, None), ("vec3", (3,), F32, None), ("vec4", (4,), F32, None),
        ("bias", (3, 64), None, None), ("bias_bad", (3, 63), None, None), ("y64", (made.m, 64), None, None),
        ("y32", (made.m, 32), None, None), ("other_rows", (7, 64), None, None), ("prob", (made.m,), F32, None),
        ("x", (made.m, 64), None, WIDE), ("flat", (made.m, 64), None, None), ("thin", (made.m, 48), None, WIDE),
        ("cube", (2, made.m, 64), None, WIDE), ("scalar", (), None, WIDE),
        ("concat", (made.m, 64), None, GluLayout.concatenated()),
        ("odd", (made.m, 63), None, None), ("one", (1,), F32, None), ("two", (2,), F32, None),
        ("codes", (made.m, 64), E4M3, None), ("codes4", (made.m, 63), DataType.FP4_E2M1, None),
        ("mask", (made.m, 64), DataType.BOOLEAN, None),
    ]:  # fmt: skip
        setattr(made, name, g.tensor(name, dim=dim, data_type=data_type, glu_layout=layout))
    plain = ScaleLayout(32, 1, swizzled=False)
    made.scale = g.tensor("scale", dim=(made.m, 2), data_type=DataType.FP8_E8M0, scale_layout=plain)
    made.scale_bad = g.tensor("scale_bad", dim=(made.m, 3), data_type=DataType.FP8_E8M0, scale_layout=plain)
    made.scale_bare = g.tensor("scale_bare", dim=(made.m, 2), data_type=DataType.FP8_E8M0)
    made.scale_e4m3 = g.tensor("scale_e4m3", dim=(made.m, 2), data_type=E4M3, scale_layout=plain)
    made.scale4 = g.tensor("scale4", dim=(made.m, 4), data_type=E4M3, scale_layout=ScaleLayout(16, 1, False))
    made.codes3_dense = g.tensor("codes3_dense", dim=(3, 8, 64), data_type=E4M3)
    made.codes_other = g.tensor("codes_other", dim=(made.m, 64), data_type=E4M3, scale_layout=ScaleLayout(32, 0, False))
    weights = ScaleLayout(32, 0, swizzled=False)
    made.codes3 = g.tensor("codes3", dim=(3, 64, 8), data_type=E4M3, discrete=True)
    made.scale3 = g.tensor("scale3", dim=(3, 2, 8), data_type=DataType.FP8_E8M0, scale_layout=weights)
    return made


def q(t, x=None, **changes):
    return t.g.block_scale_quantize(x or t.flat, **{**dict(block_size=32, axis=1, data_type=E4M3), **changes})


REFUSALS = [
    ("grouped_matmul", "RANK", lambda t: t.g.grouped_matmul(t.prob, t.b, t.offs)),
    ("grouped_matmul", "RANK", lambda t: t.g.grouped_matmul(t.a, t.bias, t.offs)),
    ("grouped_matmul", "RANK", lambda t: t.g.grouped_matmul(t.a, t.b, t.offs2d)),
    ("grouped_matmul", "SHAPE", lambda t: t.g.grouped_matmul(t.y64, t.b, t.offs)),
    ("grouped_matmul", "SHAPE", lambda t: t.g.grouped_matmul(t.a, t.b, t.offs4)),
    ("grouped_matmul", "SHAPE", lambda t: t.g.grouped_matmul(t.a, t.b, t.offs, alpha=t.vec4)),
    ("grouped_matmul", "SHAPE", lambda t: t.g.grouped_matmul(t.a, t.b, t.offs, bias=t.bias_bad)),
    ("grouped_matmul", "ATTRIBUTE_VALUE", lambda t: t.g.grouped_matmul(t.a, t.b, t.offs, alpha_exponent=3)),
    ("grouped_matmul_wgrad", "RANK", lambda t: t.g.grouped_matmul_wgrad(t.prob, t.y64, t.offs)),
    ("grouped_matmul_wgrad", "RANK", lambda t: t.g.grouped_matmul_wgrad(t.a, t.prob, t.offs)),
    ("grouped_matmul_wgrad", "RANK", lambda t: t.g.grouped_matmul_wgrad(t.a, t.y64, t.offs2d)),
    ("grouped_matmul_wgrad", "SHAPE", lambda t: t.g.grouped_matmul_wgrad(t.a, t.other_rows, t.offs)),
    ("grouped_matmul_wgrad", "ATTRIBUTE_VALUE", lambda t: t.g.grouped_matmul_wgrad(t.a, t.y64, t.offs, accumulate=1)),
    ("glu", "GLU_LAYOUT_MISSING", lambda t: t.g.glu(t.flat, act="swiglu")),
    ("glu", "GLU_COLUMNS", lambda t: t.g.glu(t.thin, act="swiglu")),
    ("glu", "RANK", lambda t: t.g.glu(t.cube, act="swiglu")),
    ("glu", "RANK", lambda t: t.g.glu(t.scalar, act="swiglu")),
    ("glu", "SHAPE", lambda t: t.g.glu(t.x, act="swiglu", prob=t.vec3)),
    ("glu", "ATTRIBUTE_VALUE", lambda t: t.g.glu(t.x, act="reglu")),
    ("glu", "ATTRIBUTE_MISSING", lambda t: t.g.glu(t.x, act=None)),
    ("glu", "ATTRIBUTE_VALUE", lambda t: t.g.glu(t.x, act="geglu", clamp_min=7.0, clamp_max=-7.0)),
    ("glu", "ATTRIBUTE_VALUE", lambda t: t.g.glu(t.x, act="geglu", linear_offset=float("nan"))),
    ("glu", "ATTRIBUTE_VALUE", lambda t: t.g.glu(t.x, act="situglu", situ_beta1=0.0)),
    ("glu", "ATTRIBUTE_VALUE", lambda t: t.g.glu(t.x, act="situglu", situ_beta2=float("inf"))),
    ("glu", "ARGUMENT_UNUSED", lambda t: t.g.glu(t.x, act="situglu", clamp_max=7.0)),
    ("glu_backward", "RANK", lambda t: t.g.glu_backward(t.prob, t.x, act="swiglu")),
    ("glu_backward", "GLU_LAYOUT_MISSING", lambda t: t.g.glu_backward(t.y32, t.flat, act="swiglu")),
    ("glu_backward", "GLU_COLUMNS", lambda t: t.g.glu_backward(t.y32, t.thin, act="swiglu")),
    ("glu_backward", "SHAPE", lambda t: t.g.glu_backward(t.y64, t.x, act="swiglu")),
    ("glu_backward", "SHAPE", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", prob=t.vec3)),
    ("glu_backward", "SHAPE", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", beta=t.vec3, offsets=t.offs4)),
    ("glu_backward", "RANK", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", beta=t.bias, offsets=t.offs)),
    ("glu_backward", "OFFSETS_MISSING", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", beta=t.vec3)),
    ("glu_backward", "ARGUMENT_UNUSED", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", offsets=t.offs)),
    ("glu_backward", "ATTRIBUTE_VALUE", lambda t: t.g.glu_backward(t.y32, t.x, act="swiglu", recompute=None)),
    ("convert_glu_layout", "GLU_LAYOUT_MISSING", lambda t: t.g.convert_glu_layout(t.flat, WIDE)),
    ("convert_glu_layout", "GLU_COLUMNS", lambda t: t.g.convert_glu_layout(t.concat, GluLayout.interleaved(48))),
    ("convert_glu_layout", "RANK", lambda t: t.g.convert_glu_layout(t.scalar, WIDE)),
    ("convert_glu_layout", "ATTRIBUTE_VALUE", lambda t: t.g.convert_glu_layout(t.x, 32)),
    ("split_glu", "GLU_LAYOUT_MISSING", lambda t: t.g.split_glu(t.flat)),
    ("split_glu", "RANK", lambda t: t.g.split_glu(t.cube)),
    ("join_glu", "SHAPE", lambda t: t.g.join_glu(t.y32, t.y64, WIDE)),
    ("join_glu", "RANK", lambda t: t.g.join_glu(t.prob, t.prob, WIDE)),
    ("join_glu", "GLU_COLUMNS", lambda t: t.g.join_glu(t.odd, t.odd, WIDE)),
    ("join_glu", "GLU_LAYOUT", lambda t: t.g.join_glu(t.y32, t.y32, "interleaved(x)")),
    ("group_sum", "RANK", lambda t: t.g.group_sum(t.prob, t.offs)),
    ("group_sum", "RANK", lambda t: t.g.group_sum(t.a, t.offs2d)),
    ("group_amax", "RANK", lambda t: t.g.group_amax(t.prob, t.offs)),
    ("group_amax", "RANK", lambda t: t.g.group_amax(t.a, t.offs2d)),
    ("group_amax", "GLU_LAYOUT_MISSING", lambda t: t.g.group_amax(t.flat, t.offs, split_glu=True)),
    ("block_scale_quantize", "RANK", lambda t: q(t, t.prob)),
    ("block_scale_quantize", "BLOCK_FORMAT", lambda t: q(t, block_size=16)),
    ("block_scale_quantize", "BLOCK_FORMAT", lambda t: q(t, scale_type=E4M3)),
    ("block_scale_quantize", "PACKING", lambda t: q(t, t.odd, data_type=DataType.FP4_E2M1)),
    ("block_scale_quantize", "SHAPE", lambda t: q(t, norm_const=t.two)),
    ("block_scale_quantize", "ATTRIBUTE_VALUE", lambda t: q(t, axis=2)),
    ("block_scale_quantize", "ATTRIBUTE_VALUE", lambda t: q(t, data_type=DataType.HALF)),
    ("block_scale_quantize", "ATTRIBUTE_VALUE", lambda t: q(t, scale_type=DataType.FLOAT)),
    ("block_scale_dequantize", "RANK", lambda t: t.g.block_scale_dequantize(t.prob, t.scale)),
    ("block_scale_dequantize", "SCALE_LAYOUT_MISSING", lambda t: t.g.block_scale_dequantize(t.codes, t.scale_bare)),
    ("block_scale_dequantize", "SHAPE", lambda t: t.g.block_scale_dequantize(t.codes, t.scale_bad)),
    ("block_scale_dequantize", "SHAPE", lambda t: t.g.block_scale_dequantize(t.codes, t.scale, norm_const=t.two)),
    ("block_scale_dequantize", "SCALE_LAYOUT", lambda t: t.g.block_scale_dequantize(t.codes_other, t.scale)),
    ("block_scale_dequantize", "BLOCK_FORMAT", lambda t: t.g.block_scale_dequantize(t.codes, t.scale_e4m3)),
    ("block_scale_dequantize", "PACKING", lambda t: t.g.block_scale_dequantize(t.codes4, t.scale4)),
    ("block_scale_dequantize", "DISCRETE", lambda t: t.g.block_scale_dequantize(t.codes3, t.scale3)),
    ("block_scale_dequantize", "SHAPE", lambda t: t.g.block_scale_dequantize(t.codes3_dense, t.scale)),
    ("reduction", "AXIS", lambda t: t.g.reduction(t.a, "ADD", 2)),
    ("reduction", "AXIS", lambda t: t.g.reduction(t.a, "ADD", (0, 0))),
    ("reduction", "ATTRIBUTE_VALUE", lambda t: t.g.reduction(t.a, "MEDIAN", 0)),
    ("reduction", "ATTRIBUTE_VALUE", lambda t: t.g.reduction(t.a, "ADD", ())),
    ("gelu", "ATTRIBUTE_VALUE", lambda t: t.g.gelu(t.a, approximate="sigmoid")),
]

BINARY = [op.name for op in OPS.values() if {"a", "b"} <= {p.name for p in op.inputs} and op in pointwise.POINTWISE]


@pytest.mark.parametrize(("op", "code", "call"), REFUSALS, ids=[f"{o}-{c}-{i}" for i, (o, c, _) in enumerate(REFUSALS)])
def test_an_op_refuses_what_does_not_fit(t, op, code, call):
    with pytest.raises(GraphError) as caught:
        call(t)
    error = caught.value
    assert error.code == code, str(error)
    assert __file__ in str(error.where), "the user's line"
    assert error.asked is not None and error.required is not None
    assert not t.g._pending, "a refused node is not in the graph"


@pytest.mark.parametrize("op", BINARY)
def test_a_binary_op_refuses_shapes_and_layouts_that_disagree(t, op):
    def apply(a, b):
        return t.g.select(t.mask, a, b) if op == "select" else getattr(t.g, op)(a, b)

    with pytest.raises(GraphError) as caught:
        apply(t.a, t.y64)
    assert caught.value.code == "BROADCAST"
    with pytest.raises(GraphError) as caught:
        apply(t.x, t.concat)
    assert caught.value.code == "GLU_LAYOUT" and "convert_glu_layout" in caught.value.hint
    assert apply(t.x, t.flat).glu_layout == WIDE, "an operand without a layout takes the other's"


def test_every_code_that_inference_can_raise_has_a_case():
    sources = "".join(inspect.getsource(m) for m in (glu, groups, matmul, pointwise, quantize, op_module))
    covered = {code for _, code, _ in REFUSALS} | {"BROADCAST", "GLU_LAYOUT", "ATTRIBUTE_UNKNOWN"}
    emitted = set(re.findall(r'(?:require\([^"]*?|GraphError\(\s*)"([A-Z_]+)"', sources))
    assert len(emitted) > 12 and emitted <= covered, f"without a case: {emitted - covered}"


def test_every_op_has_a_refusal():
    unary = {op.name for op in OPS.values() if len(op.inputs) == 1 and op in pointwise.POINTWISE}
    shape_free = unary | {"swish_backward"}
    assert {op for op, _, _ in REFUSALS} | set(BINARY) | shape_free >= set(OPS)


def test_an_unknown_attribute_is_named():
    with pytest.raises(GraphError) as caught:
        OPS["swish"].complete({"beta": 2.0})
    assert caught.value.code == "ATTRIBUTE_UNKNOWN" and "swish_beta" in str(caught.value.required)


def test_a_missing_glu_layout_says_how_to_give_one(t):
    with pytest.raises(GraphError, match=r"glu_layout=GluLayout.interleaved\(w\).*never guessed from a shape"):
        t.g.glu(t.flat, act="swiglu")


@pytest.mark.parametrize("op", [op for op in OPS.values() if op in pointwise.POINTWISE], ids=lambda op: op.name)
def test_pointwise_ops_keep_shape_and_layout(op):
    g = GraphBuilder()
    m = g.symbol("M")
    x = g.tensor("x", dim=(m, 64), glu_layout=WIDE)
    mask = g.tensor("mask", dim=(m, 64), data_type=DataType.BOOLEAN)
    out = getattr(g, op.name)(*[mask if p.name == "mask" else x for p in op.inputs]).set_output(True)
    assert (out.dim, out.glu_layout) == ((m, 64), WIDE)
    verify(g.operation_graph())


def test_every_op_is_documented_and_reachable_by_its_name():
    for name, op in OPS.items():
        assert name == op.name and op.doc and op.formula and op.outputs
        assert callable(getattr(GraphBuilder, name)), name
        assert all(p.doc and p.data_types for p in (*op.inputs, *op.outputs)), name
        assert all(a.doc and a.requirement for a in op.attributes), name
        assert all(a.required or a.allowed(a.default) for a in op.attributes), name


# ------------------------------------------------------------------ public cases


@pytest.mark.parametrize("size", [32, 64, 128])
def test_c22_square_weights_keep_the_major_that_was_said(size):
    """K == N: both majors have one shape, so only strides can tell, and they are carried, never guessed."""
    graphs = {}
    for major, stride in (("n", (size * size, size, 1)), ("k", (size * size, 1, size))):
        g = GraphBuilder()
        a, offs = g.tensor("a", dim=(256, size)), g.tensor("offs", dim=(2,), data_type=I32)
        b = g.tensor("b", dim=(2, size, size), stride=stride)
        g.grouped_matmul(a, b, offs).set_output(True)
        graphs[major] = g.operation_graph()
        verify(graphs[major])
        assert graphs[major].tensor(b.uid).stride == stride
    assert graphs["n"] != graphs["k"]


def test_c22_a_layout_is_never_read_off_a_shape(t):
    """2I == H: a tensor of the right width is no GLU operand until its layout is said."""
    for call in (lambda: t.g.glu(t.flat, act="swiglu"), lambda: t.g.split_glu(t.flat),
                 lambda: t.g.convert_glu_layout(t.flat, WIDE), lambda: t.g.glu_backward(t.y32, t.flat, act="swiglu"),
                 lambda: t.g.group_amax(t.flat, t.offs, split_glu=True)):  # fmt: skip
        with pytest.raises(GraphError) as caught:
            call()
        assert caught.value.code == "GLU_LAYOUT_MISSING"


def test_c29_a_converted_tensor_says_so(t):
    once = t.g.convert_glu_layout(t.concat, WIDE)
    assert once.glu_layout == WIDE and once.dim == t.concat.dim
    with pytest.raises(GraphError):
        t.g.add(once, t.concat)


def test_c103_one_predicate_serves_every_op_that_reads_a_layout(t):
    """The same shapes are refused with the same code by every op that halves GLU columns."""
    callers = [
        lambda: t.g.glu(t.thin, act="swiglu"), lambda: t.g.split_glu(t.thin),
        lambda: t.g.convert_glu_layout(t.thin, GluLayout.concatenated()),
        lambda: t.g.glu_backward(t.y32, t.thin, act="swiglu"),
    ]  # fmt: skip
    seen = []
    for call in callers:
        with pytest.raises(GraphError) as caught:
            call()
        seen.append((caught.value.code, caught.value.seen, caught.value.required))
    assert len(set(seen)) == 1 and seen[0][0] == "GLU_COLUMNS"
