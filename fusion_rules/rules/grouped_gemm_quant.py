"""quantize(prob * (alpha^e * a @ b[g] + bias[g])) = one kernel; the product reaches memory as codes.

    y = grouped_matmul(a, b, offsets, bias);  d = mul(y, prob), or y itself
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)
    or the same of the wide product, beside its rounded copy d = identity(d_wide)

1. At least one quantize reads d: without one there is nothing to fuse.
2. A factor on y is one FLOAT per row, in either order of mul's operands; y then has no other reader and is no output.
3. group_sum and group_amax use the product's offsets.
4. d is written where something outside the fusion reads it, and stays inside otherwise; beside a rounded copy the wide
   product is FLOAT and stays inside.
5. a and b may both be block_scale_dequantize of codes and scales along K, in a type in which that is exact and without
   norm_const; nothing else reads the values. With one of them dequantized alone, that node stays unfused.
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

_WORTH = ("quantize_row", "quantize_col")
_WRITTEN = (*QUANTIZED_VALUES, "dbias", "amax")


def _factor(y: str) -> NodePattern:
    return NodePattern("factor", "mul", {"a": "y", "b": "prob"}, {"y": y})


def _form(value: str, *, factor: bool, codes: bool) -> Pattern:
    """`value` is what attachments read: d itself, or d_wide beside its rounded copy d."""
    copy = () if value == "d" else (rounded_copy(value, "d"),)
    product = (grouped_matmul("y" if factor else value, bias=True, codes=codes),)
    core = (*product, *((_factor(value),) if factor else ()), *copy, *(dequantized("a", "b") if codes else ()))
    return Pattern(core=core, attachments=epilogue_attachments(value), needs_any=_WORTH, always_written=_WRITTEN)


RULE = Rule(
    id="grouped_gemm_quant",
    doc="quantize(prob * (alpha^e * a @ b[g] + bias[g])) in one kernel; the product reaches memory as codes",
    patterns=tuple(
        _form(value, factor=factor, codes=codes)
        for codes in (True, False)
        for factor, value in ((True, "d_wide"), (True, "d"), (False, "d_wide"), (False, "d"))
    ),
    conditions=(ROW_FACTOR, WIDE_TYPE, PRODUCT_SCALE_AXIS, DEQUANTIZE_ROUNDING),
    structure=(
        "at least one block_scale_quantize reads the product, or the product times prob",
        "group_sum and group_amax use the product's offsets",
        "a and b may both come from block_scale_dequantize without norm_const",
    ),
)
