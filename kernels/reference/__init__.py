"""The definition of every node, in float64 or float32, plain enough to be read: the oracle of all tests.

One file a family, formulas as numerics has them; bytes of codes and scales are exact.
"""

from __future__ import annotations

from .codes import (
    CODE_FORMATS,
    decode,
    decode_e8m0,
    decode_scale,
    encode,
    encode_e8m0,
    encode_scale,
    pack_fp4,
    unpack_fp4,
)
from .evaluate import EVALUATE, evaluate, evaluate_graph, store
from .layouts import deinterleave, glu_columns, interleave, swizzle_scales, swizzled_position, unswizzle_scales
from .rounding import ROUNDING, round_to, torch_type

__all__ = [
    "CODE_FORMATS", "EVALUATE", "ROUNDING", "decode", "decode_e8m0", "decode_scale", "deinterleave", "encode",
    "encode_e8m0", "encode_scale", "evaluate", "evaluate_graph", "glu_columns", "interleave", "pack_fp4", "round_to",
    "store", "swizzle_scales", "swizzled_position", "torch_type", "unpack_fp4", "unswizzle_scales",
]  # fmt: skip
