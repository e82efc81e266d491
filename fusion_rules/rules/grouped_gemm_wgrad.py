"""dequantize(a)[g]^T @ dequantize(dy)[g] = one kernel: codes and scales feed the product directly.

    dw = grouped_matmul_wgrad(a, dy, offsets), where a, dy or both may be block_scale_dequantize of codes and scales

1. Scales lie along the rows (axis 0): the product sums over rows, and a scale must be constant along what is summed.
2. Dequantizing rounds nothing away: code times scale is exact in FLOAT and BFLOAT16, not in HALF.
3. No norm_const: the kernel has no place for it.
4. A dequantized operand has no other reader and is no output; else it stays unfused and feeds the product.
5. dw is written; accumulated into where no operand is dequantized, if the kernel can.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import DEQUANTIZE_ROUNDING, dequantized, scale_axis

_OPERANDS = ("a", "dy")


def _pattern(*quantized: str) -> Pattern:
    names = {p: f"{p}_values" if p in quantized else p for p in _OPERANDS}
    return Pattern(
        core=(
            NodePattern("wgrad", "grouped_matmul_wgrad", {**names, "offsets": "offsets"}, {"dw": "dw"}),
            *dequantized(*quantized),
        ),
        always_written=("dw",),
    )


SCALE_AXIS = scale_axis(
    "SCALE_AXIS",
    {"sf_a": 0, "sf_dy": 0},
    "scales along the rows (axis 0), over which the product sums",
    "quantize the operand along axis 0 for its weight gradient",
)

RULE = Rule(
    id="grouped_gemm_wgrad",
    doc="dequantize(a)[g]^T @ dequantize(dy)[g] in one kernel; codes and scales feed the product directly",
    patterns=(_pattern("a", "dy"), _pattern("a"), _pattern("dy"), _pattern()),
    conditions=(SCALE_AXIS, DEQUANTIZE_ROUNDING),
    structure=(
        "a, dy or both may come from block_scale_dequantize without norm_const",
        "dw is written; accumulated into where no operand is dequantized, if the kernel can",
    ),
)
