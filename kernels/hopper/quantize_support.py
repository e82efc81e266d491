"""What our quantize kernel for sm90 serves, as data, for the rules quantize_row_col and quantize alike.

Imports neither torch nor the DSL. Roles: x; norm_const, codes and scales of either side or both.
"""

from __future__ import annotations

from ...graph_ops.ir.dims import known_divisor
from ...graph_ops.ir.dtypes import DataType
from ..condition import Condition
from ..problem import Problem
from ..sm90.quantize_config import PIECE, QuantizeConfig
from .codes_support import BLOCK_FORMAT, code_layout
from .support import CONTIGUOUS, POINTERS, row_pitch, type_name

PITCH = {DataType.BFLOAT16: 8, DataType.HALF: 8, DataType.FLOAT: 4}
"""Types of x, and the multiple of elements at which rows of it begin: 16 bytes."""


def configuration(problem: Problem) -> QuantizeConfig:
    """The configuration that a problem asks for."""
    return QuantizeConfig(
        x_dtype=type_name(problem, "x") or "",
        q_row_dtype=type_name(problem, "q_row"),
        q_col_dtype=type_name(problem, "q_col"),
        row_swizzled=problem.attributes.get("q_row.swizzled", True),
        col_swizzled=problem.attributes.get("q_col.swizzled", True),
        has_norm_row="norm_const_row" in problem,
        has_norm_col="norm_const_col" in problem,
    )


QUANTIZE: tuple[Condition, ...] = (
    Condition(
        "X_TYPE", "BFLOAT16, HALF or FLOAT x", lambda p, a: f"x is {p['x'].data_type!r}",
        lambda p, a: p["x"].data_type in PITCH, "identity(x) with one of these types converts, with its rounding",
    ),
    Condition(
        "COLUMN_MULTIPLE", f"N positive and known to be a multiple of {PIECE}", lambda p, a: f"N = {p['x'].dim[1]}",
        lambda p, a: known_divisor(p["x"].dim[1]) % PIECE == 0 and p["x"].dim[1] != 0, "pad the columns with zeros",
    ),
    Condition(
        "MATRIX_LAYOUT", "row-major x, rows at multiples of 16 bytes", lambda p, a: f"x stride {p['x'].stride}",
        lambda p, a: row_pitch(p["x"], PITCH.get(p["x"].data_type, 1)), CONTIGUOUS,
    ),
    POINTERS,
    BLOCK_FORMAT,
    code_layout(PIECE),
)  # fmt: skip
"""Every condition of the kernel, in the order in which reasons list them."""
