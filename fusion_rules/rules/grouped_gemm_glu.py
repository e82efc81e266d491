"""quantize(GLU(alpha * x @ W1[g] + bias[g])) = one kernel; the pre-activation c is written only where it is wanted.

    c = grouped_matmul(x, W1, offsets, bias);  d = glu(c, prob)
    q_row, sf_row = quantize(d, rows);  q_col, sf_col = quantize(d, columns)
    dbias = group_sum(d);  amax = group_amax(d)
    or the same of d_wide = glu(...), beside its rounded copy d = identity(d_wide)
    or of c_wide = grouped_matmul(...), beside its rounded copy c = identity(c_wide), which the backward saves

1. c feeds port x of one glu; where c is an output or something else reads it (the backward saves it), the kernel
   writes it as well.
2. The activation takes c as its tensor rounds it; a kernel that activates the unrounded product declines another type.
3. group_sum and group_amax use the product's offsets.
4. d is written where something outside the fusion reads it, and stays inside otherwise; in the second form d_wide is
   FLOAT and stays inside.
5. prob is one FLOAT factor per row.
6. In the third form the activation takes c_wide, which is FLOAT and stays inside; c is written as its copy rounds it.
7. x and W1 may both be block_scale_dequantize of codes and scales along K, in a type in which that is exact and without
   norm_const; nothing else reads the values. With one of them dequantized alone, that node stays unfused.
8. gate and up may have weights of their own: c = join_glu(x @ W_gate[g], x @ W_up[g]), concatenated, of the same rows
   and offsets. Nothing else reads either product, which rounds as c does or not at all; neither has a scale or bias.
"""

from __future__ import annotations

from ..pattern import NodePattern, Pattern
from ..rule import Rule
from .common import (
    DEQUANTIZE_ROUNDING,
    PRODUCT_SCALE_AXIS,
    PRODUCT_WIDE_TYPE,
    QUANTIZED_VALUES,
    ROW_FACTOR,
    WIDE_TYPE,
    dequantized,
    epilogue_attachments,
    grouped_matmul,
    rounded_copy,
)


def _glu(c: str, y: str) -> NodePattern:
    return NodePattern("glu", "glu", {"x": c}, {"y": y}, optional_inputs={"prob": "prob"})


_WRITTEN = (*QUANTIZED_VALUES, "dbias", "amax")


def _copies(c: str, d: str) -> tuple[NodePattern, ...]:
    return tuple(rounded_copy(f"{n}_wide", n, f"round_{n}") for n in ("c", "d") if f"{n}_wide" in (c, d))


def _form(c: str, d: str, *, codes: bool) -> Pattern:
    """`c` is what the glu reads, `d` what attachments read: the values themselves, or wide ones beside their copies."""
    operands = dequantized("a", "b") if codes else ()
    return Pattern(
        core=(grouped_matmul(c, bias=True, codes=codes), _glu(c, d), *_copies(c, d), *operands),
        attachments=epilogue_attachments(d),
        always_written=_WRITTEN,
    )


def _apart(c: str, d: str) -> Pattern:
    """Gate and up as two products of the same rows; `c` and `d` as in `_form`."""
    gate, up = (
        NodePattern(label, "grouped_matmul", {"a": "a", "b": b, "offsets": "offsets"}, {"y": label})
        for label, b in (("gate", "b"), ("up", "b_up"))
    )
    join = NodePattern("join", "join_glu", {"gate": "gate", "up": "up"}, {"x": c},
                       attributes={"layout": ("concatenated",)}, prefix="join.")  # fmt: skip
    return Pattern(core=(gate, join, up, _glu(c, d), *_copies(c, d)), attachments=epilogue_attachments(d),
                   always_written=_WRITTEN)  # fmt: skip


RULE = Rule(
    id="grouped_gemm_glu",
    doc="quantize(GLU(alpha * x @ W1[g] + bias[g])) in one kernel; the pre-activation is written only where wanted",
    patterns=(
        *(_form(c, d, codes=codes) for codes in (True, False) for c in ("c_wide", "c") for d in ("d_wide", "d")),
        *(_apart(c, d) for c in ("c_wide", "c") for d in ("d_wide", "d")),
    ),
    conditions=(ROW_FACTOR, WIDE_TYPE, PRODUCT_WIDE_TYPE, PRODUCT_SCALE_AXIS, DEQUANTIZE_ROUNDING),
    structure=(
        "the product feeds x of one glu",
        "group_sum and group_amax use the product's offsets",
        "quantize, group_sum and group_amax read the activation itself, which may be written through one identity that "
        "rounds it",
        "the pre-activation may be written through one identity that rounds it",
        "gate and up may be two products of the same rows, put side by side by join_glu, concatenated",
        "x and W1 may both come from block_scale_dequantize without norm_const",
    ),
)
