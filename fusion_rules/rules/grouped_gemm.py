"""alpha[g]^e * (a @ b[g]) + bias[g] = one kernel for one node: a better implementation, where no larger rule applies.

    y = grouped_matmul(a, b, offsets, alpha, bias)

1. y is written, as its tensor rounds it; who reads it does not matter.
2. A rule that takes the product together with other nodes goes first: this one gets what those leave.
"""

from __future__ import annotations

from ..pattern import Pattern
from ..rule import Rule
from .common import grouped_matmul

RULE = Rule(
    id="grouped_gemm",
    doc="alpha^e * a @ b[g] + bias[g], a node that no larger fusion takes, by a kernel made for it",
    patterns=(Pattern(core=(grouped_matmul("y", bias=True),), always_written=("y",)),),
    structure=("no larger fusion takes the grouped_matmul",),
)
