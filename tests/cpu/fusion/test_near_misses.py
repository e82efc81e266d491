"""Graphs that are one step away from each rule and must not fuse: each with the reason that it must give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import BF16, E5M2, FLOAT, Parts, codes, plan  # type: ignore[import-not-found]
from opfuse.graph_ops.ir import DataType, GluLayout

Build = Callable[[], Parts]
CASES: list[tuple[str, str, str, Build]] = []
"""(rule, name, reason code, graph)."""


def near(rule: str, code: str) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        CASES.append((rule, build.__name__.removeprefix(f"{rule}_"), code, build))
        return build

    return register


def variants(rule: str, make: Callable[..., Parts], *cases: tuple[str, str, dict]) -> None:
    for name, code, arguments in cases:
        CASES.append((rule, name, code, functools.partial(make, **arguments)))


variants(
    "grouped_gemm_dglu", fg.dglu,
    ("other_exponent", "ALPHA_EXPONENT", {"exponent": 1}),
    ("other_activation", "ACT", {"act": "swiglu"}),
    ("other_alpha", "GEGLU_ALPHA", {"parameters": {"geglu_alpha": 1.0}}),
    ("other_clamp_max", "CLAMP_MAX", {"parameters": {"clamp_max": 10.0}}),
    ("other_clamp_min", "CLAMP_MIN", {"parameters": {"clamp_min": -10.0}}),
    ("other_offset", "LINEAR_OFFSET", {"parameters": {"linear_offset": 0.0}}),
    ("recompute", "RECOMPUTE", {"recompute": True}),
    ("concatenated", "GLU_LAYOUT", {"glu": GluLayout.concatenated()}),
    ("interleaved_1", "GLU_LAYOUT", {"glu": GluLayout.interleaved(1)}),
    ("half_operands", "A_TYPE", {"a_type": DataType.HALF}),
    ("product_rounds", "R_ROUNDING", {"r_type": BF16}),
)  # fmt: skip
variants(
    "grouped_gemm_glu", fg.glu,
    ("other_exponent", "ALPHA_EXPONENT", {"exponent": 2}),
    ("other_activation", "ACT", {"act": "swiglu"}),
    ("other_alpha", "GEGLU_ALPHA", {"parameters": {"geglu_alpha": 1.0}}),
    ("other_clamp_max", "CLAMP_MAX", {"parameters": {"clamp_max": 10.0}}),
    ("other_clamp_min", "CLAMP_MIN", {"parameters": {"clamp_min": -10.0}}),
    ("other_offset", "LINEAR_OFFSET", {"parameters": {"linear_offset": 0.0}}),
    ("concatenated", "GLU_LAYOUT", {"glu": GluLayout.concatenated()}),
    ("half_operands", "A_TYPE", {"a_type": DataType.HALF}),
    ("product_rounds", "C_ROUNDING", {"c_type": BF16}),
)  # fmt: skip
variants(
    "grouped_gemm_quant", fg.quant,
    ("other_exponent", "ALPHA_EXPONENT", {"exponent": 2}),
    ("half_operands", "A_TYPE", {"a_type": DataType.HALF}),
    ("no_quantize", "ATTACHMENT_MISSING", {"which": ("dbias", "amax")}),
    ("nothing_attached", "ATTACHMENT_MISSING", {"which": ()}),
)  # fmt: skip
variants(
    "grouped_gemm_wgrad", fg.wgrad,
    ("scales_along_columns", "SCALE_AXIS", {"axis": 1}),
    ("one_scale_along_columns", "SCALE_AXIS", {"axis": 1, "quantized": ("dy",)}),
    ("in_place_writer", "IN_PLACE_WRITER", {"accumulate": True}),
    ("in_place_writer_of_one_quantized", "IN_PLACE_WRITER", {"accumulate": True, "quantized": ("a",)}),
)  # fmt: skip
variants(
    "quantize_row_col", fg.row_col,
    ("float_input", "X_TYPE", {"x_type": FLOAT}),
    ("other_row_codes", "Q_ROW_DATA_TYPE", {"row": {"data_type": E5M2}}),
    ("other_col_codes", "Q_COL_DATA_TYPE", {"col": {"data_type": E5M2}}),
    ("plain_row_scales", "Q_ROW_SWIZZLED", {"row": {"swizzled": False}}),
    ("plain_col_scales", "Q_COL_SWIZZLED", {"col": {"swizzled": False}}),
    ("fp4_rows", "Q_ROW_BLOCK_SIZE",
     {"row": {"block_size": 16, "data_type": DataType.FP4_E2M1, "scale_type": DataType.FP8_E4M3}}),
    ("fp4_columns", "Q_COL_SCALE_TYPE",
     {"col": {"block_size": 16, "data_type": DataType.FP4_E2M1, "scale_type": DataType.FP8_E4M3}}),
)  # fmt: skip


@near("grouped_gemm_dglu", "PORT")
def swapped_operands() -> Parts:
    """The product is the saved activation, and something else is the gradient."""
    p = Parts()
    fg.operands(p, columns=2 * fg.COLUMNS)
    p["b"]._glu_layout = GluLayout.interleaved(32)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    dy = p.g.tensor("dy", dim=(p["a"].dim[0], fg.COLUMNS))
    p.outputs += p.g.glu_backward(dy, y, act="swiglu")
    return p


@near("grouped_gemm_dglu", "INTERIOR_VALUE_ESCAPES")
def extra_reader() -> Parts:
    p = fg.dglu()
    p.outputs.append(p.g.relu(p["r"]))
    return p


@near("grouped_gemm_dglu", "INTERIOR_VALUE_IS_OUTPUT")
def interior_output() -> Parts:
    p = fg.dglu()
    p.outputs.append(p["r"])
    return p


@near("grouped_gemm_dglu", "OP")
def pointwise_between() -> Parts:
    p = Parts()
    fg.operands(p)
    c = p.g.tensor("c", dim=(p["a"].dim[0], 2 * fg.COLUMNS), glu_layout=GluLayout.interleaved(32))
    p.outputs += p.g.glu_backward(p.g.relu(p.g.grouped_matmul(p["a"], p["b"], p["offsets"])), c, act="geglu")
    return p


@near("grouped_gemm_dglu", "PORT_EXTRA")
def biased_product() -> Parts:
    p = Parts()
    fg.operands(p)
    c = p.g.tensor("c", dim=(p["a"].dim[0], 2 * fg.COLUMNS), glu_layout=GluLayout.interleaved(32))
    bias = p.g.tensor("bias", dim=(fg.EXPERTS, fg.COLUMNS))
    r = p.g.grouped_matmul(p["a"], p["b"], p["offsets"], alpha=p["alpha"], alpha_exponent=2, bias=bias)
    p.outputs += p.g.glu_backward(r, c, act="geglu")
    return p


@near("grouped_gemm_dglu", "OPERAND")
def beta_of_other_experts() -> Parts:
    p = Parts()
    fg.operands(p)
    c = p.g.tensor("c", dim=(p["a"].dim[0], 2 * fg.COLUMNS), glu_layout=GluLayout.interleaved(32))
    r = p.g.grouped_matmul(p["a"], p["b"], p["offsets"], alpha_exponent=2)
    p.outputs += p.g.glu_backward(r, c, act="geglu", beta=p["alpha"], offsets=p["other_offsets"])
    return p


@near("grouped_gemm_dglu", "NOT_CONVEX")
def path_outside() -> Parts:
    """The saved activation is computed from the product: one kernel would wait for itself."""
    p = Parts()
    fg.operands(p)
    r = p.g.grouped_matmul(p["a"], p["b"], p["offsets"], alpha_exponent=2)
    c = p.g.join_glu(p.g.relu(r), p.g.srelu(r), GluLayout.interleaved(32))
    p.outputs += p.g.glu_backward(r, c, act="geglu")
    return p


@near("grouped_gemm_dglu", "NO_READER")
def product_alone() -> Parts:
    p = Parts()
    fg.operands(p)
    p.outputs.append(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]))
    return p


@near("grouped_gemm_dglu", "D_TYPE")
def other_gradient_type() -> Parts:
    p = fg.dglu(which=())
    p["d"].set_data_type(DataType.HALF)
    p.outputs.append(p["d"])
    return p


@near("grouped_gemm_glu", "OP")
def relu_between() -> Parts:
    p = Parts()
    fg.operands(p, columns=2 * fg.COLUMNS)
    p["b"]._glu_layout = GluLayout.interleaved(32)
    p.outputs.append(p.g.glu(p.g.relu(p.g.grouped_matmul(p["a"], p["b"], p["offsets"])), act="geglu"))
    return p


@near("grouped_gemm_glu", "OP")
def backward_reads_it() -> Parts:
    return swapped_operands()


@near("grouped_gemm_glu", "NOT_CONVEX")
def factor_from_the_product() -> Parts:
    """The row factor is a sum over the product itself."""
    p = Parts()
    fg.operands(p, columns=2 * fg.COLUMNS)
    p["b"]._glu_layout = GluLayout.interleaved(32)
    c = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    p.outputs += [c, p.g.glu(c, prob=p.g.reduction(c, "ADD", 1), act="geglu")]
    return p


@near("grouped_gemm_glu", "NO_READER")
def product_without_glu() -> Parts:
    return product_alone()


@near("grouped_gemm_glu", "OP")
def split_and_join_between() -> Parts:
    p = Parts()
    fg.operands(p, columns=2 * fg.COLUMNS)
    p["b"]._glu_layout = GluLayout.interleaved(32)
    c = p.g.convert_glu_layout(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]), GluLayout.concatenated())
    p.outputs.append(p.g.glu(c, act="geglu"))
    return p


@near("grouped_gemm_quant", "INTERIOR_VALUE_ESCAPES")
def quant_extra_reader() -> Parts:
    p = fg.quant()
    p.outputs.append(p.g.relu(p["y"]))
    return p


@near("grouped_gemm_quant", "INTERIOR_VALUE_IS_OUTPUT")
def quant_interior_output() -> Parts:
    p = fg.quant()
    p.outputs.append(p["y"])
    return p


def _times(p: Parts, factor: fg.Tensor) -> Parts:
    d = p.g.mul(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]), factor)
    fg.quantize(p, d, 1)
    return p


@near("grouped_gemm_quant", "ROW_FACTOR")
def factor_per_column() -> Parts:
    p = Parts()
    fg.operands(p)
    return _times(p, p.g.tensor("factor", dim=(fg.COLUMNS,), data_type=FLOAT))


@near("grouped_gemm_quant", "ROW_FACTOR")
def factor_per_element() -> Parts:
    p = Parts()
    fg.operands(p)
    return _times(p, p.g.tensor("factor", dim=(p["a"].dim[0], fg.COLUMNS), data_type=FLOAT))


@near("grouped_gemm_quant", "ROW_FACTOR")
def factor_is_a_number() -> Parts:
    p = Parts()
    fg.operands(p)
    return _times(p, p.g.tensor_scalar(2.0))


@near("grouped_gemm_quant", "ROW_FACTOR")
def factor_in_bf16() -> Parts:
    p = Parts()
    fg.operands(p)
    return _times(p, p.g.tensor("factor", dim=(p["a"].dim[0], 1), data_type=BF16))


@near("grouped_gemm_quant", "OPERAND_PRODUCED_INSIDE")
def square_of_the_product() -> Parts:
    p = Parts()
    fg.operands(p)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    fg.quantize(p, p.g.mul(y, y), 1)
    return p


@near("grouped_gemm_quant", "ATTACHMENT_MISSING")
def quantize_of_another_tensor() -> Parts:
    p = fg.row_col()
    fg.operands(p)
    p.outputs.append(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]))
    return p


@near("grouped_gemm_quant", "ATTACHMENT_MISSING")
def rounded_between() -> Parts:
    p = Parts()
    fg.operands(p)
    y = p.g.identity(p.g.grouped_matmul(p["a"], p["b"], p["offsets"])).set_data_type(BF16)
    fg.quantize(p, y, 1)
    return p


@near("grouped_gemm_quant", "Y_ROUNDING")
def product_rounds_before_the_factor() -> Parts:
    p = fg.quant()
    p["y"].set_data_type(BF16)
    return p


@near("grouped_gemm_quant", "NOT_CONVEX")
def factor_waits_for_the_product() -> Parts:
    p = Parts()
    fg.operands(p)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    return_ = p.g.reduction(y, "AMAX", 1, keep_dim=True)
    fg.quantize(p, p.g.mul(y, return_), 1)
    return p


@near("grouped_gemm_wgrad", "INTERIOR_VALUE_ESCAPES")
def wgrad_extra_reader() -> Parts:
    p = fg.wgrad()
    p.outputs += [p.g.relu(p["a_values"]), p.g.relu(p["dy_values"])]
    return p


@near("grouped_gemm_wgrad", "INTERIOR_VALUE_IS_OUTPUT")
def wgrad_interior_output() -> Parts:
    p = fg.wgrad()
    p.outputs += [p["a_values"], p["dy_values"]]
    return p


@near("grouped_gemm_wgrad", "DEQUANTIZE_ROUNDING")
def dequantized_to_half() -> Parts:
    p = fg.wgrad()
    for name in ("a_values", "dy_values"):
        p[name].set_data_type(DataType.HALF)
    return p


@near("grouped_gemm_wgrad", "A_ROUNDING")
def dequantized_to_bf16() -> Parts:
    p = fg.wgrad()
    for name in ("a_values", "dy_values"):
        p[name].set_data_type(BF16)
    return p


@near("grouped_gemm_wgrad", "DW_TYPE")
def gradient_in_bf16() -> Parts:
    p = fg.wgrad()
    p["dw"].set_data_type(BF16)
    return p


@near("grouped_gemm_wgrad", "OPERAND_PRODUCED_INSIDE")
def one_operand_twice() -> Parts:
    """a and dy are one tensor: absorbed for one, it would have to be in memory for the other."""
    p = Parts()
    fg.operands(p)
    a = fg.coded(p, "a", fg.DEPTH)
    p.t["dw"] = p.g.grouped_matmul_wgrad(a, a, p["offsets"]).set_data_type(FLOAT)
    p.outputs.append(p["dw"])
    return p


def _wgrad_of(p: Parts, a: fg.Tensor, dy: fg.Tensor) -> Parts:
    p.outputs.append(p.g.grouped_matmul_wgrad(a, dy, p["offsets"]).set_data_type(FLOAT))
    return p


@near("grouped_gemm_wgrad", "PORT_EXTRA")
def with_norm_const() -> Parts:
    p = fg.wgrad()
    norm = p.g.tensor("norm", dim=(1,), data_type=FLOAT)
    for pending in p.g._pending:
        if pending.op == "block_scale_dequantize":
            pending.inputs["norm_const"] = norm
    return p


@near("grouped_gemm_wgrad", "A_TYPE")
def values_from_a_relu() -> Parts:
    p = Parts()
    fg.operands(p)
    a, dy = fg.coded(p, "a", fg.DEPTH), fg.coded(p, "dy", fg.COLUMNS)
    return _wgrad_of(p, p.g.relu(a), p.g.relu(dy))


@near("grouped_gemm_wgrad", "DY_TYPE")
def values_from_the_caller() -> Parts:
    return fg.wgrad(quantized=())


@near("quantize_row_col", "NO_READER")
def rows_only() -> Parts:
    p = Parts()
    fg.quantize(p, p.g.tensor("x", dim=(256, fg.COLUMNS)), 1)
    return p


@near("quantize_row_col", "ATTRIBUTE")
def rows_twice() -> Parts:
    return fg.row_col(col={"axis": 1})


@near("quantize_row_col", "ATTRIBUTE")
def columns_twice() -> Parts:
    return fg.row_col(row={"axis": 0})


@near("quantize_row_col", "ATTRIBUTE")
def of_two_tensors() -> Parts:
    p = fg.row_col()
    p.g._pending[1].inputs["x"] = p.g.tensor("x2", dim=p["x"].dim)
    return p


@near("quantize_row_col", "ATTRIBUTE")
def columns_of_a_copy() -> Parts:
    p = Parts()
    x = p.g.tensor("x", dim=(256, fg.COLUMNS))
    fg.quantize(p, x, 1)
    fg.quantize(p, p.g.identity(x), 0)
    return p


@near("quantize_row_col", "NOT_CONVEX")
def column_norm_from_the_rows() -> Parts:
    """The columns' norm_const waits for the scales of the rows."""
    p = Parts()
    x = p.g.tensor("x", dim=(256, fg.COLUMNS))
    q, sf = fg.quantize(p, x, 1, swizzled=False)
    norm = p.g.reduction(p.g.block_scale_dequantize(q, sf), "AMAX", (0, 1), keep_dim=False)
    norm = p.g.mul(norm, p.g.tensor("one", dim=(1,), data_type=FLOAT))
    fg.quantize(p, x, 0, norm_const=norm)
    return p


# With values that another kernel could take, the smaller form would fuse: an activation that no kernel here has.
variants(
    "grouped_gemm_dglu", functools.partial(fg.coded_product, "grouped_gemm_dglu", act="swiglu"),
    ("scales_of_a_along_rows", "PRODUCT_SCALE_AXIS", {"axes": (0, 0)}),
    ("scales_of_b_along_columns", "PRODUCT_SCALE_AXIS", {"axes": (1, 1)}),
    ("dequantized_to_half", "DEQUANTIZE_ROUNDING", {"values": DataType.HALF}),
)  # fmt: skip
variants(
    "grouped_gemm_glu", functools.partial(fg.coded_product, "grouped_gemm_glu", act="swiglu"),
    ("codes_along_rows", "PRODUCT_SCALE_AXIS", {"axes": (0, 0)}),
    ("copy_of_a_rounded_product", "PRODUCT_WIDE_TYPE", {"copied": DataType.HALF}),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "code", "build"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_near_misses_do_not_fuse(rule, name, code, build):
    graph = build().freeze()
    report = plan(graph, kernels=[k for k in fg.EXACT_KERNELS if k.rule == rule])
    whole = [v for v in report.verdicts if v.rule == rule and v.reasons]
    assert not report.matches
    assert whole, "declined without a reason"
    found = codes(report, rule)
    assert code in found, f"{found}: {[str(r) for v in whole for r in v.reasons]}"
    for verdict in whole:
        for reason in verdict.reasons:
            assert reason.code and reason.required and str(reason.observed)


@pytest.mark.parametrize("rule", fg.FUSIONS)
def test_each_rule_has_ten_near_misses(rule):
    assert sum(case[0] == rule for case in CASES) >= 10
