"""dequantize(a)[g]^T @ dequantize(dy)[g] = one kernel: codes and scales feed the product directly.

    dw = grouped_matmul_wgrad(a, dy, offsets), where a, dy or both may be block_scale_dequantize of codes and scales

1. Scales lie along the rows (axis 0): the product sums over rows, and a scale must be constant along what is summed.
2. Dequantizing rounds nothing away: code times scale is exact in FLOAT and BFLOAT16, not in HALF.
3. No norm_const: the kernel has no place for it.
4. A dequantized operand has no other reader and is no output; else it stays unfused and feeds the product.
5. dw is written, not accumulated into.
"""

from __future__ import annotations

from typing import Any

from ...graph_ops.ir.dtypes import DataType
from ...kernels.arch import Arch
from ...kernels.condition import Condition
from ...kernels.problem import Problem
from ..pattern import NodePattern, Pattern
from ..rule import Rule

EXACT_TYPES = (DataType.FLOAT, DataType.BFLOAT16)
"""Types in which a code times its scale is exact: E4M3 and E2M1 have at most 4 bits, E4M3 scales 4, E8M0 scales 1."""

_OPERANDS = ("a", "dy")


def _dequantize(operand: str) -> NodePattern:
    return NodePattern(
        f"dequantize_{operand}",
        "block_scale_dequantize",
        {"x": operand, "scale": f"sf_{operand}"},
        {"y": f"{operand}_values"},
    )


def _pattern(*quantized: str) -> Pattern:
    names = {p: f"{p}_values" if p in quantized else p for p in _OPERANDS}
    return Pattern(
        core=(
            NodePattern("wgrad", "grouped_matmul_wgrad", {**names, "offsets": "offsets"}, {"dw": "dw"}),
            *(_dequantize(p) for p in quantized),
        ),
        always_written=("dw",),
    )


def _scales(problem: Problem) -> dict[str, Any]:
    return {r: problem[r].scale_layout for r in ("sf_a", "sf_dy") if r in problem}


def _scales_text(problem: Problem, arch: Arch) -> str:
    return ", ".join(f"{role}: {layout}" for role, layout in _scales(problem).items())


def _scales_along_rows(problem: Problem, arch: Arch) -> bool:
    return all(layout is not None and layout.axis == 0 for layout in _scales(problem).values())


def _dequantized(problem: Problem) -> dict[str, DataType]:
    return {name: problem.rounding[name] for p in _OPERANDS if (name := f"{p}_values") in problem.rounding}


SCALE_AXIS = Condition(
    code="SCALE_AXIS",
    requires="scales along the rows (axis 0), over which the product sums",
    observed=_scales_text,
    holds=_scales_along_rows,
    hint="quantize the operand along axis 0 for its weight gradient",
    applies=lambda problem, arch: bool(_scales(problem)),
    row="sf_a, sf_dy",
)

DEQUANTIZE_ROUNDING = Condition(
    code="DEQUANTIZE_ROUNDING",
    requires=f"dequantized values in one of {list(EXACT_TYPES)}, where code times scale is exact",
    observed=lambda problem, arch: ", ".join(f"{k} rounds to {t!r}" for k, t in _dequantized(problem).items()),
    holds=lambda problem, arch: all(t in EXACT_TYPES for t in _dequantized(problem).values()),
    hint="set_data_type(DataType.FLOAT) on the dequantized tensor",
    applies=lambda problem, arch: bool(_dequantized(problem)),
    row="a, dy",
)

RULE = Rule(
    id="grouped_gemm_wgrad",
    doc="dequantize(a)[g]^T @ dequantize(dy)[g] in one kernel; codes and scales feed the product directly",
    patterns=(_pattern("a", "dy"), _pattern("a"), _pattern("dy"), _pattern()),
    conditions=(SCALE_AXIS, DEQUANTIZE_ROUNDING),
    structure=(
        "a, dy or both may come from block_scale_dequantize without norm_const",
        "dw is written, not accumulated into",
    ),
)
