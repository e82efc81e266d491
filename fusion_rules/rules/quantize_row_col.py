"""(quantize(x, rows), quantize(x, columns)) = one pass over x, read once.

    q_row, sf_row = block_scale_quantize(x, axis=1);  q_col, sf_col = block_scale_quantize(x, axis=0)

1. Both read the same tensor, one along each axis; they are independent, so neither feeds the other.
2. Each has its own norm_const, codes and scale format, which the kernel judges.
"""

from __future__ import annotations

from ..pattern import Pattern
from ..rule import Rule
from .common import QUANTIZED_VALUES, quantize

RULE = Rule(
    id="quantize_row_col",
    doc="(quantize(x, rows), quantize(x, columns)) in one pass over x",
    patterns=(Pattern(core=(quantize("x", 1), quantize("x", 0)), always_written=QUANTIZED_VALUES),),
    structure=("two block_scale_quantize of one tensor, along axis 1 and along axis 0",),
)
