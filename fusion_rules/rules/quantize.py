"""quantize(x) along one axis = one pass over x, alone: where no kernel made x, and no other side is asked for.

    q_row, sf_row = block_scale_quantize(x, axis=1)
    or q_col, sf_col = block_scale_quantize(x, axis=0)

1. A single node: what is saved is the several passes that tensor arithmetic makes of it.
2. It has its own norm_const, codes and scale format, which the kernel judges.
"""

from __future__ import annotations

from ..pattern import Pattern
from ..rule import Rule
from .common import QUANTIZED_VALUES, quantize

RULE = Rule(
    id="quantize",
    doc="quantize(x) along rows or along columns in one pass over x",
    patterns=tuple(Pattern(core=(quantize("x", axis),), always_written=QUANTIZED_VALUES) for axis in (1, 0)),
    structure=("one block_scale_quantize",),
)
