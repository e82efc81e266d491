"""Fusion: which subgraphs one kernel can serve, and why the rest is left alone. Imports neither torch nor a kernel."""

from __future__ import annotations

from .fusion import fuse, why_not
from .raising import RAISES, raise_graph
from .rule import Rule
from .rules import RULES
from .support import SupportRow, support_table
from .verdict import FusedMatch, FusionReport, Raising, Verdict, VerdictKind

__all__ = [
    "RAISES", "RULES", "FusedMatch", "FusionReport", "Raising", "Rule", "SupportRow", "Verdict", "VerdictKind", "fuse",
    "raise_graph", "support_table", "why_not",
]  # fmt: skip
