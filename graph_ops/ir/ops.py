"""The one table of operations."""

from __future__ import annotations

from .nodes import glu, groups, matmul, pointwise, quantize
from .op import OpSpec

OPS: dict[str, OpSpec] = {op.name: op for family in (matmul, glu, groups, quantize, pointwise) for op in family.OPS}
"""Every operation by name, in the order of the documentation."""
