"""quantize(GLU(alpha * x @ W1[g] + bias[g])) = one kernel; the pre-activation c is written only where it is wanted.

    c = grouped_matmul(x, W1, offsets, bias);  d = glu(c, prob)
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)
    or the same of d_wide = glu(...), beside its rounded copy d = identity(d_wide)

1. c feeds port x of one glu; where c is an output or something else reads it (the backward saves it), the kernel
   writes it as well.
2. The activation takes c as its tensor rounds it; a kernel that activates the unrounded product declines another type.
3. group_sum and group_amax use the product's offsets.
4. d is written where something outside the fusion reads it, and stays inside otherwise; in the second form d_wide is
   FLOAT and stays inside.
5. prob is one FLOAT factor per row.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import QUANTIZED_VALUES, ROW_FACTOR, WIDE_TYPE, epilogue_attachments, grouped_matmul, rounded_copy


def _glu(y: str) -> NodePattern:
    return NodePattern("glu", "glu", {"x": "c"}, {"y": y}, optional_inputs={"prob": "prob"})


_WRITTEN = (*QUANTIZED_VALUES, "dbias", "amax")

RULE = Rule(
    id="grouped_gemm_glu",
    doc="quantize(GLU(alpha * x @ W1[g] + bias[g])) in one kernel; the pre-activation is written only where wanted",
    patterns=(
        Pattern(
            core=(grouped_matmul("c", bias=True), _glu("d_wide"), rounded_copy("d_wide", "d")),
            attachments=epilogue_attachments("d_wide"),
            always_written=_WRITTEN,
        ),
        Pattern(
            core=(grouped_matmul("c", bias=True), _glu("d")),
            attachments=epilogue_attachments("d"),
            always_written=_WRITTEN,
        ),
    ),
    conditions=(ROW_FACTOR, WIDE_TYPE),
    structure=(
        "the product feeds x of one glu",
        "group_sum and group_amax use the product's offsets",
        "quantize, group_sum and group_amax read the activation itself, which may be written through one identity that "
        "rounds it",
    ),
)
