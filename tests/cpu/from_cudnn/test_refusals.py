"""What cannot be read is named, all of it: node types, attributes, inputs, shapes, data types."""

from __future__ import annotations

import re

import pytest
from opfuse.graph_ops import Graph, GraphNotSupportedError
from opfuse.graph_ops.from_cudnn import UnsupportedCudnnGraph


def product(kit, g, **changes):
    fto = changes.pop("fto", None) or kit.offsets(g)
    x, w = changes.pop("x", None) or kit.rows(g, "x", kit.K), kit.weights(g, "w", kit.K, kit.I)
    return g.moe_grouped_matmul(x, w, fto, **{**dict(mode=kit.NONE, name="mm"), **changes})


def quantize(kit, g, group_offset=None, **changes):
    swizzled = changes.pop("swizzled", True)
    how = {**dict(block_size=32, axis=2, name="q"), **changes}
    y, scale = g.block_scale_quantize(input=kit.rows(g, "v", kit.I), group_offset=group_offset, **how)
    y.set_output(True).set_data_type(kit.D.FP8_E4M3)
    scale.set_output(True).set_data_type(kit.D.FP8_E8M0)
    if swizzled:
        scale.set_reordering_type(kit.cudnn.tensor_reordering.F8_128x4)
    return y


def reduced(kit, g, dim, mode="ADD", group_offset=None):
    y = g.reduction(input=kit.rows(g, "v", kit.I), mode=getattr(kit.cudnn.reduction_mode, mode),
                    group_offset=group_offset,
                    name="red")  # fmt: skip
    return (y if dim is None else y.set_dim(dim)).set_output(True)


def halves(kit, g, *cuts):
    h = kit.rows(g, "h", 2 * kit.I)
    return [g.slice(input=h, slices=[slice(0, 1), slice(0, kit.M), cut], name="cut") for cut in cuts]


def ragged(kit, g):
    x = kit.rows(g, "x", kit.K)
    return g.neg(input=x.set_ragged_offset(kit.offsets(g)))


def two_factors(kit, g):
    """A product has room for one factor by expert, and none beside a bias."""
    first, second = (g.tensor(name=n, dim=[kit.L, 1, 1], data_type=kit.D.FLOAT) for n in ("alpha", "again"))
    return g.mul(a=g.mul(a=product(kit, g), b=first), b=second)


def factor_behind_another_node(kit, g):
    alpha = g.tensor(name="alpha", dim=[kit.L, 1, 1], data_type=kit.D.FLOAT)
    return g.mul(a=g.neg(input=product(kit, g)), b=alpha)


REFUSED = {
    "BATCH behind": (factor_behind_another_node, "tensor alpha", "right beside a grouped matmul"),
    "BATCH factors": (two_factors, "tensor again", "right beside a grouped matmul"),
    "NODE": (lambda kit, g: g.matmul(kit.rows(g, "a", kit.K), g.tensor(name="b", dim=[1, kit.K, 8])), "node matmul.0",
             "MATMUL"),
    "POINTWISE": (lambda kit, g: g.erf(input=kit.rows(g, "x", 8), name="e"), "node e", "mode erf"),
    "ATTRIBUTE mode": (lambda kit, g: product(kit, g, mode=kit.cudnn.moe_grouped_matmul_mode.GATHER,
                                              token_index=kit.rows(g, "index", 1)), "node mm", "mode = GATHER"),
    "INPUT": (lambda kit, g: product(kit, g, token_index=kit.rows(g, "index", 1)), "node mm", "token_index"),
    "ATTRIBUTE transpose": (lambda kit, g: quantize(kit, g, axis=1, transpose=True), "node q", "transpose = True"),
    "ATTRIBUTE axis": (lambda kit, g: quantize(kit, g, axis=0), "node q", "axis = 0"),
    "ATTRIBUTE slope": (lambda kit, g: g.relu(input=kit.rows(g, "x", 8), negative_slope=0.1, name="r"), "node r",
                        "negative_slope = 0.1"),
    "BLOCK_FORMAT": (lambda kit, g: quantize(kit, g, block_size=16), "node q", "FP8_E4M3, 16"),
    "GROUP_OFFSET row": (lambda kit, g: quantize(kit, g, group_offset=kit.offsets(g, 64)), "node q", "multiples of 64"),
    "GROUP_OFFSET column": (lambda kit, g: quantize(kit, g, axis=1, group_offset=kit.offsets(g, 32)), "node q",
                            "multiples of 32"),
    "GROUP_OFFSET plain": (lambda kit, g: quantize(kit, g, swizzled=False, group_offset=kit.offsets(g, 128)), "node q",
                           "plain scales"),
    "OFFSETS": (lambda kit, g: product(kit, g, fto=kit.offsets(g, experts=kit.L - 1)), "tensor first_token_offset",
                "boundaries"),
    "REDUCTION mode": (lambda kit, g: reduced(kit, g, [1, kit.M, 1], "MUL_NO_ZEROS"), "node red", "MUL_NO_ZEROS"),
    "REDUCTION group": (lambda kit, g: reduced(kit, g, [kit.L, 1, 1], "MAX", kit.offsets(g)), "node red",
                        "MAX by expert"),
    "REDUCTION none": (lambda kit, g: reduced(kit, g, [1, kit.M, kit.I]), "node red", "at least one axis"),
    "REDUCTION shape": (lambda kit, g: reduced(kit, g, [kit.L, 1, 1], "ADD", kit.offsets(g)), "node red", "[4, 1, 96]"),
    "COMPUTE_DATA_TYPE": (lambda kit, g: g.neg(input=kit.rows(g, "x", 8), compute_data_type=kit.D.HALF, name="n"),
                          "node n",
                          "HALF"),
    "DATA_TYPE": (lambda kit, g: g.neg(input=kit.rows(g, "x", 8, kit.D.INT8)), "tensor x", "INT8"),
    "BATCH": (lambda kit, g: g.neg(input=g.tensor(name="x", dim=[3, 4, 8])), "tensor x", "(3, 4, 8)"),
    "REORDERING": (lambda kit, g: g.neg(input=g.tensor(name="x", dim=[1, 128, 8],
                                                       reordering_type=kit.cudnn.tensor_reordering.F8_128x4)),
                                                       "tensor x",
                   "F8_128x4"),
    "RAGGED_OFFSET": (ragged, "tensor x", "ragged"),
    "SLICE third": (lambda kit, g: halves(kit, g, slice(0, 64))[0], "node cut", "slice(0, 64"),
    "SLICE mixed": (lambda kit, g: halves(kit, g, slice(0, 96), slice(1, 192, 2))[1], "node cut", "one half"),
    "CONCATENATE": (lambda kit, g: g.concatenate(inputs=[kit.rows(g, n, 32) for n in "abc"], axis=2, name="cat"),
                    "node cat",
                    "3 tensors"),
    "VIRTUAL_INPUT": (lambda kit, g: g.neg(input=g.tensor(name="x", dim=[1, 4, 8], is_virtual=True)), "tensor x",
                      "virtual"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_named(kit, case):
    declare, where, says = REFUSED[case]
    g = kit.graph(name="refused")
    y = declare(kit, g)
    y.set_output(True)
    with pytest.raises(UnsupportedCudnnGraph) as error:
        Graph.from_cudnn(g, device="cpu")
    code = case.split()[0]
    found = [r for r in error.value.reasons if r.code == code]
    assert found, str(error.value)
    assert any(re.match(re.escape(where), r.where) and says in str(r) for r in found), str(error.value)
    assert isinstance(error.value, GraphNotSupportedError) and error.value.code == "CUDNN_GRAPH"


def test_c111_everything_unreadable_is_listed_at_once(kit):
    g = kit.graph(name="many")
    y = g.erf(input=product(kit, g, mode=kit.cudnn.moe_grouped_matmul_mode.SCATTER), name="e")
    g.neg(input=y, name="after").set_output(True)
    log = g.log(input=kit.rows(g, "i", 8, kit.D.INT8), name="l")
    codes, _ = g.block_scale_quantize(input=log, block_size=32, axis=1, transpose=True, name="q")
    codes.set_output(True)
    reduced(kit, g, None)
    with pytest.raises(UnsupportedCudnnGraph) as error:
        Graph.from_cudnn(g, device="cpu")
    assert [(r.code, r.where) for r in error.value.reasons] == [
        ("ATTRIBUTE", "node mm"), ("POINTWISE", "node e"), ("POINTWISE", "node l"), ("DATA_TYPE", "tensor i (uid 7)"),
        ("ATTRIBUTE", "node q"), ("REDUCTION", "node red"),
    ]  # fmt: skip
    assert str(error.value).splitlines()[0] == "CUDNN_GRAPH: cuDNN graph many; seen 6 that cannot be read:"


def test_starts_without_the_end_say_why_they_are_not_enough(kit):
    g = kit.graph()
    with pytest.raises(
        UnsupportedCudnnGraph, match=r"OFFSETS: dim \[4, 1, 1\] for 4 experts.*where the last expert ends"
    ):
        product(kit, g, fto=kit.offsets(g, experts=kit.L - 1)).set_output(True)
        Graph.from_cudnn(g, device="cpu")
