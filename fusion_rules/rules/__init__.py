"""The fusions, one a file; `RULES` is the one table, in the order of reports and of preference among equals."""

from __future__ import annotations

from ..rule import Rule
from . import (
    grouped_gemm,
    grouped_gemm_dglu,
    grouped_gemm_glu,
    grouped_gemm_quant,
    grouped_gemm_wgrad,
    quantize,
    quantize_row_col,
)

RULES: tuple[Rule, ...] = (
    grouped_gemm_dglu.RULE,
    grouped_gemm_glu.RULE,
    grouped_gemm_quant.RULE,
    grouped_gemm_wgrad.RULE,
    quantize_row_col.RULE,
    grouped_gemm.RULE,
    quantize.RULE,
)
"""Every rule. Ids are stable and never re-used."""
