"""Pattern nodes and conditions that several rules share: each is written once, so that a fix reaches every rule."""

from __future__ import annotations

from typing import Any

from ...kernels.arch import Arch
from ...kernels.condition import Condition
from ...kernels.problem import Problem
from ..pattern import NodePattern

QUANTIZED_VALUES = ("q_row", "sf_row", "q_col", "sf_col")
"""What the quantize attachments write: codes mean nothing without their scales, so a kernel writes both or neither."""


def grouped_matmul(y: str, *, bias: bool) -> NodePattern:
    """The product `y` = a @ b[g], with its scale and, where the kernel's epilogue has a place for it, its bias."""
    optional = {"alpha": "alpha", "bias": "bias"} if bias else {"alpha": "alpha"}
    return NodePattern(
        "matmul", "grouped_matmul", {"a": "a", "b": "b", "offsets": "offsets"}, {"y": y}, optional_inputs=optional
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


def rounded_copy(wide: str, d: str) -> NodePattern:
    """`d` as a narrower copy of the value `wide`, which stays inside: codes and sums then take the wide value."""
    return NodePattern("round", "identity", {"x": wide}, {"y": d})


def _factor_shape(problem: Problem, arch: Arch) -> Any:
    prob = problem["prob"]
    return f"{prob.name} of shape ({', '.join(map(str, prob.dim))}), {prob.data_type!r}"


def _is_row_factor(problem: Problem, arch: Arch) -> bool:
    prob, rows = problem["prob"], problem["a"].dim[0]
    return prob.dim in ((rows, 1), (rows,)) and prob.data_type.value == "FLOAT"


WIDE_TYPE = Condition(
    code="WIDE_TYPE",
    requires="a FLOAT value before the rounding copy: the kernel holds it in float32",
    observed=lambda problem, arch: f"it rounds to {problem.rounding['d_wide']!r} first",
    holds=lambda problem, arch: problem.rounding["d_wide"].value == "FLOAT",
    hint="leave the value before identity virtual FLOAT",
    applies=lambda problem, arch: "d_wide" in problem.rounding,
    row="d",
)

ROW_FACTOR = Condition(
    code="ROW_FACTOR",
    requires="one FLOAT factor per row of the product: shape (M, 1), or (M,) at a port that takes it so",
    observed=_factor_shape,
    holds=_is_row_factor,
    hint="leave another product to an unfused mul",
    applies=lambda problem, arch: "prob" in problem,
    row="prob",
)
