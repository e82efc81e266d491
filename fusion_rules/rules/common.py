"""Pattern nodes and conditions that several rules share: each is written once, so that a fix reaches every rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ...kernels.arch import Arch
from ...kernels.condition import Condition
from ...kernels.problem import Problem
from ..pattern import NodePattern

QUANTIZED_VALUES = ("q_row", "sf_row", "q_col", "sf_col")
"""What the quantize attachments write: codes mean nothing without their scales, so a kernel writes both or neither."""


EXACT_TYPES = (DataType.FLOAT, DataType.BFLOAT16)
"""Types in which a code times its scale is exact: E4M3 and E2M1 have at most 4 bits, E4M3 scales 4, E8M0 scales 1."""


def grouped_matmul(y: str, *, bias: bool, codes: bool = False) -> NodePattern:
    """The product `y` = a @ b[g], with its scale and, where the kernel's epilogue has a place for it, its bias.

    `codes`: a and b are the codes behind `dequantized("a", "b")`, which must then stand in the same core.
    """
    optional = {"alpha": "alpha", "bias": "bias"} if bias else {"alpha": "alpha"}
    inputs = {"a": "a_values", "b": "b_values"} if codes else {"a": "a", "b": "b"}
    return NodePattern("matmul", "grouped_matmul", {**inputs, "offsets": "offsets"}, {"y": y}, optional_inputs=optional)


def dequantized(*operands: str) -> tuple[NodePattern, ...]:
    """One dequantize for each operand: its codes and scales become `<operand>_values`. norm_const has no place."""
    return tuple(
        NodePattern(
            f"dequantize_{operand}",
            "block_scale_dequantize",
            {"x": operand, "scale": f"sf_{operand}"},
            {"y": f"{operand}_values"},
        )
        for operand in operands
    )


def quantize(x: str, axis: int) -> NodePattern:
    """`x` quantized in blocks along `axis`: 1 gives the row outputs, 0 the column outputs."""
    side = "row" if axis == 1 else "col"
    return NodePattern(
        f"quantize_{side}",
        "block_scale_quantize",
        {"x": x},
        {"y": f"q_{side}", "scale": f"sf_{side}"},
        optional_inputs={"norm_const": f"norm_const_{side}"},
        attributes={"axis": (axis,)},
        prefix=f"q_{side}.",
    )


def epilogue_attachments(d: str) -> tuple[NodePattern, ...]:
    """What a grouped matmul's epilogue may also do with the value `d` that it holds: in the order of their worth."""
    return (
        quantize(d, 1),
        quantize(d, 0),
        NodePattern("dbias", "group_sum", {"x": d, "offsets": "offsets"}, {"y": "dbias"}),
        NodePattern("amax", "group_amax", {"x": d, "offsets": "offsets"}, {"y": "amax"}, prefix="amax."),
    )


def rounded_copy(wide: str, d: str, label: str = "round") -> NodePattern:
    """`d` as a narrower copy of the value `wide`, which stays inside: codes and sums then take the wide value."""
    return NodePattern(label, "identity", {"x": wide}, {"y": d})


def _factor_shape(problem: Problem, arch: Arch) -> Any:
    prob = problem["prob"]
    return f"{prob.name} of shape ({', '.join(map(str, prob.dim))}), {prob.data_type!r}"


def _is_row_factor(problem: Problem, arch: Arch) -> bool:
    prob, rows = problem["prob"], problem["a"].dim[0]
    return prob.dim in ((rows, 1), (rows,)) and prob.data_type.value == "FLOAT"


def _wide_type(value: str, code: str) -> Condition:
    return Condition(
        code=code,
        requires="a FLOAT value before the rounding copy: the kernel holds it in float32",
        observed=lambda problem, arch: f"it rounds to {problem.rounding[value]!r} first",
        holds=lambda problem, arch: problem.rounding[value].value == "FLOAT",
        hint="leave the value before identity virtual FLOAT",
        applies=lambda problem, arch: value in problem.rounding,
        row=value.removesuffix("_wide"),
    )


WIDE_TYPE = _wide_type("d_wide", "WIDE_TYPE")
PRODUCT_WIDE_TYPE = _wide_type("c_wide", "PRODUCT_WIDE_TYPE")

ROW_FACTOR = Condition(
    code="ROW_FACTOR",
    requires="one FLOAT factor per row of the product: shape (M, 1), or (M,) at a port that takes it so",
    observed=_factor_shape,
    holds=_is_row_factor,
    hint="leave another product to an unfused mul",
    applies=lambda problem, arch: "prob" in problem,
    row="prob",
)


def scale_axis(code: str, axes: Mapping[str, int], requires: str, hint: str) -> Condition:
    """The scales of each role of `axes` lie along that axis: the one over which the product sums."""

    def layouts(problem: Problem) -> dict[str, Any]:
        return {r: problem[r].scale_layout for r in axes if r in problem}

    return Condition(
        code=code,
        requires=requires,
        observed=lambda problem, arch: ", ".join(f"{r}: {layout}" for r, layout in layouts(problem).items()),
        holds=lambda problem, arch: all(
            layout is not None and layout.axis == axes[r] for r, layout in layouts(problem).items()
        ),
        hint=hint,
        applies=lambda problem, arch: bool(layouts(problem)),
        row=", ".join(axes),
    )


def _dequantized_types(problem: Problem) -> dict[str, DataType]:
    return {name: t for name, t in problem.rounding.items() if name.endswith("_values")}


DEQUANTIZE_ROUNDING = Condition(
    code="DEQUANTIZE_ROUNDING",
    requires=f"dequantized values in one of {list(EXACT_TYPES)}, where code times scale is exact",
    observed=lambda problem, arch: ", ".join(f"{k} rounds to {t!r}" for k, t in _dequantized_types(problem).items()),
    holds=lambda problem, arch: all(t in EXACT_TYPES for t in _dequantized_types(problem).values()),
    hint="set_data_type(DataType.FLOAT) on the dequantized tensor",
    applies=lambda problem, arch: bool(_dequantized_types(problem)),
    row="dequantized operands",
)

PRODUCT_SCALE_AXIS = scale_axis(
    "PRODUCT_SCALE_AXIS",
    {"sf_a": 1, "sf_b": 0},
    "scales along K, over which the product sums: axis 1 of a (M, K), axis 0 of each b (K, N)",
    "quantize a along axis 1 and each expert's (K, N) matrix along axis 0",
)
