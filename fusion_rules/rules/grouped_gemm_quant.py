"""quantize(prob * (alpha^e * a @ b[g] + bias[g])) = one kernel; the product reaches memory as codes.

    y = grouped_matmul(a, b, offsets, bias);  d = mul(y, prob), or y itself
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)

1. At least one quantize reads d: without one there is nothing to fuse.
2. A factor on y is one FLOAT per row, in either order of mul's operands; y then has no other reader and is no output.
3. group_sum and group_amax use the product's offsets.
4. d is written where something outside the fusion reads it, and stays inside otherwise.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import QUANTIZED_VALUES, ROW_FACTOR, epilogue_attachments, grouped_matmul

_WORTH = ("quantize_row", "quantize_col")
_WRITTEN = (*QUANTIZED_VALUES, "dbias", "amax")

RULE = Rule(
    id="grouped_gemm_quant",
    doc="quantize(prob * (alpha^e * a @ b[g] + bias[g])) in one kernel; the product reaches memory as codes",
    patterns=(
        Pattern(
            core=(
                grouped_matmul("y", bias=True),
                NodePattern("factor", "mul", {"a": "y", "b": "prob"}, {"y": "d"}),
            ),
            attachments=epilogue_attachments("d"),
            needs_any=_WORTH,
            always_written=_WRITTEN,
        ),
        Pattern(
            core=(grouped_matmul("d", bias=True),),
            attachments=epilogue_attachments("d"),
            needs_any=_WORTH,
            always_written=_WRITTEN,
        ),
    ),
    conditions=(ROW_FACTOR,),
    structure=(
        "at least one block_scale_quantize reads the product, or the product times prob",
        "group_sum and group_amax use the product's offsets",
    ),
)
