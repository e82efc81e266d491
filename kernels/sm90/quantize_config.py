"""Configuration of the Hopper quantize kernel, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, rules and tests all ask here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

PIECE = 8  # neighbouring columns of a row that one lane holds: 8 bytes of codes
TILE = 128  # rows and columns of a CTA: one 128 x 4 atom of either scales
WARP_TILE = (32, 64)  # rows x columns of a warp
DTYPES = ("bf16", "fp16", "fp32")
CODES = ("e4m3", "e5m2", None)


@dataclass(frozen=True)
class QuantizeConfig:
    """What one compiled kernel computes: MXFP8 of x (M, N) along its rows, its columns, or both.

    `q_row_dtype` and `q_col_dtype` are those of the codes (M, N), None where a side is not asked for. Scales are E8M0,
    one for 32 values: plain (M, N / 32) and (M / 32, N), or swizzled 128 x 4 atoms of (M, N / 32) and (N, M / 32).
    norm_const_row and norm_const_col, each (1,) float32, multiply x before that side is quantized.
    """

    x_dtype: str = "bf16"
    q_row_dtype: str | None = "e4m3"
    q_col_dtype: str | None = "e4m3"
    row_swizzled: bool = True
    col_swizzled: bool = True
    has_norm_row: bool = False
    has_norm_col: bool = False

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)


def sides(config: QuantizeConfig) -> tuple[str, ...]:
    """The sides that are asked for, of "row" and "col"."""
    asked = (("row", config.q_row_dtype), ("col", config.q_col_dtype))
    return tuple(side for side, codes in asked if codes is not None)


def scale_bytes(config: QuantizeConfig, M: int, N: int) -> dict[str, int]:
    """Bytes of the scales by side, all of which the kernel writes: an atom's padding, where swizzled, becomes zero."""
    matrices = {"row": (M, -(-N // 32), config.row_swizzled), "col": (N, -(-M // 32), config.col_swizzled)}
    return {
        side: -(-rows // 128) * -(-blocks // 4) * 512 if swizzled else rows * blocks
        for side, (rows, blocks, swizzled) in matrices.items() if side in sides(config)
    }  # fmt: skip


def illegal(config: QuantizeConfig, *, n: int | None = None) -> list[str]:
    """Every reason why this configuration cannot be built or run; empty when it can.

    `n` (columns) adds the condition on the problem.
    """
    out = []
    for name, allowed in (("x_dtype", DTYPES), ("q_row_dtype", CODES), ("q_col_dtype", CODES)):
        if getattr(config, name) not in allowed:
            out.append(f"{name} is {getattr(config, name)!r}; built are {', '.join(map(repr, allowed))}")
    if not sides(config):
        out.append("neither rows nor columns are quantized")
    for side, given in (("row", config.has_norm_row), ("col", config.has_norm_col)):
        if given and side not in sides(config):
            out.append(f"norm_const_{side} without codes of its side")
    if n is not None and (n % PIECE or n == 0):
        out.append(f"N is {n}; a lane takes {PIECE} neighbouring columns")
    return out
