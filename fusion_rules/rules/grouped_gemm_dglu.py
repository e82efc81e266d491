"""quantize(dGLU(alpha^e * dy @ W2[g], h)) = one kernel: the product r never reaches memory.

    r = grouped_matmul(dy, W2, offsets);  d, dprob, activation = glu_backward(r, h, prob)
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)
    or the same of d_wide = glu_backward(...), beside its rounded copy d = identity(d_wide)

1. r feeds port dy of one glu_backward, and nothing else reads it or asks for it as an output.
2. The product has no bias: a gradient has none.
3. A beta is per expert of the same offsets as the product, and so are dbias and amax.
4. d is written where something outside the fusion reads it, and stays inside otherwise; both quantizations, dbias and
   amax take the value that d's own tensor holds, rounded where that tensor rounds.
5. In the second form they take d_wide, which is FLOAT and stays inside; d is written as its copy rounds it.
6. prob is one FLOAT factor per row.
7. dy and W2 may both be block_scale_dequantize of codes and scales along K, in a type in which that is exact and
   without norm_const; nothing else reads the values. With one of them dequantized alone, that node stays unfused.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import (
    DEQUANTIZE_ROUNDING,
    PRODUCT_SCALE_AXIS,
    QUANTIZED_VALUES,
    ROW_FACTOR,
    WIDE_TYPE,
    dequantized,
    epilogue_attachments,
    grouped_matmul,
    rounded_copy,
)


def _dglu(dx: str) -> NodePattern:
    return NodePattern(
        "dglu",
        "glu_backward",
        {"dy": "r", "x": "c"},
        {"dx": dx, "dprob": "dprob"},
        optional_inputs={"prob": "prob", "beta": "beta", "offsets": "offsets"},
        optional_outputs={"activation": "activation"},
    )


_WRITTEN = (*QUANTIZED_VALUES, "dbias", "amax")


def _form(value: str, *, codes: bool) -> Pattern:
    """`value` is what attachments read: d itself, or d_wide beside its rounded copy d."""
    copy = () if value == "d" else (rounded_copy(value, "d"),)
    operands = dequantized("a", "b") if codes else ()
    return Pattern(
        core=(grouped_matmul("r", bias=False, codes=codes), _dglu(value), *copy, *operands),
        attachments=epilogue_attachments(value),
        always_written=_WRITTEN,
    )


RULE = Rule(
    id="grouped_gemm_dglu",
    doc="quantize(dGLU(alpha^e * dy @ W2[g], h)) in one kernel; the product never reaches memory",
    patterns=(
        _form("d_wide", codes=True),
        _form("d", codes=True),
        _form("d_wide", codes=False),
        _form("d", codes=False),
    ),
    conditions=(ROW_FACTOR, WIDE_TYPE, PRODUCT_SCALE_AXIS, DEQUANTIZE_ROUNDING),
    structure=(
        "the product feeds dy of one glu_backward and nothing else",
        "the product has no bias",
        "beta, group_sum and group_amax use the product's offsets",
        "quantize, group_sum and group_amax read dx itself; dx may be written through one identity that rounds it",
        "dy and W2 may both come from block_scale_dequantize without norm_const",
    ),
)
