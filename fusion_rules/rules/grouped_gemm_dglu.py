"""quantize(dGLU(alpha^e * dy @ W2[g], h)) = one kernel: the product r never reaches memory.

    r = grouped_matmul(dy, W2, offsets);  d, dprob, activation = glu_backward(r, h, prob)
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)

1. r feeds port dy of one glu_backward, and nothing else reads it or asks for it as an output.
2. The product has no bias: a gradient has none.
3. A beta is per expert of the same offsets as the product, and so are dbias and amax.
4. d is written where something outside the fusion reads it, and stays inside otherwise; both quantizations, dbias and
   amax take the value that d's own tensor holds, rounded where that tensor rounds.
5. prob is one FLOAT factor per row.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import QUANTIZED_VALUES, ROW_FACTOR, epilogue_attachments, grouped_matmul

RULE = Rule(
    id="grouped_gemm_dglu",
    doc="quantize(dGLU(alpha^e * dy @ W2[g], h)) in one kernel; the product never reaches memory",
    patterns=(
        Pattern(
            core=(
                grouped_matmul("r", bias=False),
                NodePattern(
                    "dglu",
                    "glu_backward",
                    {"dy": "r", "x": "c"},
                    {"dx": "d", "dprob": "dprob"},
                    optional_inputs={"prob": "prob", "beta": "beta", "offsets": "offsets"},
                    optional_outputs={"activation": "activation"},
                ),
            ),
            attachments=epilogue_attachments("d"),
            always_written=(*QUANTIZED_VALUES, "dbias", "amax"),
        ),
    ),
    conditions=(ROW_FACTOR,),
    structure=(
        "the product feeds dy of one glu_backward and nothing else",
        "the product has no bias",
        "beta, group_sum and group_amax use the product's offsets",
        "quantize, group_sum and group_amax read dx itself",
    ),
)
