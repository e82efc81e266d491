"""Conditions on MXFP8 codes and scales that several kernels for sm90 share. Imports neither torch nor the DSL."""

from __future__ import annotations

import math

from ...graph_ops.ir.dtypes import DataType
from ..condition import Condition
from ..problem import Problem
from .support import CONTIGUOUS, present, row_pitch

CODE_PITCH = 16  # codes: 16 bytes
BLOCK = 32
CODE_TYPES = (DataType.FP8_E4M3, DataType.FP8_E5M2)
SWIZZLED_ROW_GROUPS = 128  # rows: a group's row scales start on an atom
SWIZZLED_COLUMN_GROUPS = 4 * BLOCK
CODES = ("q_row", "q_col")


def source_type(p: Problem) -> DataType:
    """The data type of the value d that derived outputs are computed from: in its wide form, its own, or FLOAT."""
    stored = p["d"].data_type if "d" in p else DataType.FLOAT
    found: DataType = p.rounding.get("d_wide", p.rounding.get("d", stored))
    return found


def _formats(p: Problem) -> list[str]:
    wrong = []
    for side in ("row", "col"):
        if f"q_{side}" in p:
            block, scale = p.attributes[f"q_{side}.block_size"], p.attributes[f"q_{side}.scale_type"]
            codes = p[f"q_{side}"].data_type
            if (block, scale) != (BLOCK, "FP8_E8M0") or codes not in CODE_TYPES:
                wrong.append(f"q_{side}: {codes!r}, blocks of {block}, {scale} scales")
    return wrong


def code_layout(pitch: int) -> Condition:
    """CODE_LAYOUT of a kernel that takes rows of codes at multiples of `pitch` bytes."""

    def wrong(p: Problem) -> list[str]:
        codes = [f"{r} stride {p[r].stride}" for r in CODES if r in p and not row_pitch(p[r], pitch)]
        return codes + [f"{r} stride {p[r].stride}" for r in ("sf_row", "sf_col") if r in p and not p[r].is_contiguous]

    return Condition(
        "CODE_LAYOUT", f"row-major codes, rows at multiples of {pitch}, and scales without gaps",
        lambda p, a: ", ".join(wrong(p)), lambda p, a: not wrong(p), CONTIGUOUS, present(*CODES),
    )  # fmt: skip


def group_multiple(p: Problem) -> int:
    """What every end offset must divide by, for the scales that are asked for."""
    wanted = 1
    for role, plain, swizzled in (("sf_row", 1, SWIZZLED_ROW_GROUPS), ("sf_col", BLOCK, SWIZZLED_COLUMN_GROUPS)):
        if role in p and (layout := p[role].scale_layout) is not None:
            wanted = math.lcm(wanted, swizzled if layout.swizzled else plain)
    return wanted


NO_NORM_CONST = Condition(
    "NORM_CONST", "no norm_const", lambda p, a: "norm_const on " + ", ".join(
        side for side in ("row", "col") if f"norm_const_{side}" in p),
    lambda p, a: "norm_const_row" not in p and "norm_const_col" not in p, "fold it into alpha or prob",
)  # fmt: skip
BLOCK_FORMAT = Condition(
    "BLOCK_FORMAT", "MXFP8: E4M3 or E5M2 codes, E8M0 scales of 32", lambda p, a: "; ".join(_formats(p)),
    lambda p, a: not _formats(p), "another format is quantized unfused", present(*CODES),
)  # fmt: skip
CODE_LAYOUT = code_layout(CODE_PITCH)
SCALE_LAYOUTS_EQUAL = Condition(
    "SCALE_LAYOUTS_EQUAL", "row and column scales both swizzled or both plain",
    lambda p, a: f"rows {p['sf_row'].scale_layout}, columns {p['sf_col'].scale_layout}",
    lambda p, a: p.attributes["q_row.swizzled"] == p.attributes["q_col.swizzled"], "give both the same `swizzled`",
    lambda p, a: "sf_row" in p and "sf_col" in p,
)  # fmt: skip
GROUP_MULTIPLE = Condition(
    "GROUP_MULTIPLE", "end offsets promised to be multiples of what the scales' layout needs (32 for plain column "
    "scales, 128 for swizzled ones)",
    lambda p, a: f"offsets promise multiples of {p['offsets'].multiple_of}, scales need {group_multiple(p)}",
    lambda p, a: p["offsets"].multiple_of % group_multiple(p) == 0,
    "pad each expert's rows and declare g.tensor(..., multiple_of=128)", present("sf_row", "sf_col"),
)  # fmt: skip
