"""Block-scaled codes: MXFP8, NVFP4 and FP4 with power-of-two scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dims import Dim
from ..dtypes import CODE_TYPES, DataType
from ..layouts import ScaleLayout
from ..op import (
    BOOLEAN,
    FLOATING_TYPES,
    Attribute,
    InferenceInput,
    Inferred,
    OpSpec,
    Port,
    one_of,
    require,
    require_rank,
)

SCALE_TYPES = (DataType.FP8_E8M0, DataType.FP8_E4M3)


@dataclass(frozen=True)
class BlockFormat:
    """A pairing of codes, block and scale that has a name."""

    name: str
    codes: tuple[DataType, ...]
    block_size: int
    scale: DataType


BLOCK_FORMATS = (
    BlockFormat("MXFP8", (DataType.FP8_E4M3, DataType.FP8_E5M2), 32, DataType.FP8_E8M0),
    BlockFormat("NVFP4", (DataType.FP4_E2M1,), 16, DataType.FP8_E4M3),
    BlockFormat("FP4 block 16, E8M0", (DataType.FP4_E2M1,), 16, DataType.FP8_E8M0),
    BlockFormat("MXFP4", (DataType.FP4_E2M1,), 32, DataType.FP8_E8M0),
)
"""The formats that mean something; any other pairing of codes, block and scale is refused by the graph."""


def _named(value: Any, types: tuple[DataType, ...]) -> bool:
    return any(value == t.value for t in types)


def _require_format(codes: DataType, block_size: int, scale: DataType, asked: str) -> None:
    known = any(codes in f.codes and (block_size, scale) == (f.block_size, f.scale) for f in BLOCK_FORMATS)
    require(known, "BLOCK_FORMAT", f"{asked} data_type, block_size, scale_type", (codes, block_size, scale),
            "one of " + ", ".join(f.name for f in BLOCK_FORMATS))  # fmt: skip


def _require_packing(codes: DataType, dim: tuple[Dim, ...], asked: str) -> None:
    packed = codes.info.packed
    whole = packed == 1 or (isinstance(dim[1], int) and dim[1] % packed == 0)
    require(whole, "PACKING", asked, dim, f"columns in multiples of {packed} for {codes!r}")


def _require_norm_const(inputs: Mapping[str, InferenceInput], asked: str) -> None:
    if norm_const := inputs.get("norm_const"):
        require(norm_const.dim == (1,), "SHAPE", f"{asked} norm_const", norm_const.dim, "(1,)")


def _block_scale_quantize(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x = inputs["x"]
    require_rank(x, 2, "block_scale_quantize x")
    codes, scale = DataType(attributes["data_type"]), DataType(attributes["scale_type"])
    _require_format(codes, attributes["block_size"], scale, "block_scale_quantize")
    _require_packing(codes, x.dim, "block_scale_quantize x")
    _require_norm_const(inputs, "block_scale_quantize")
    layout = ScaleLayout(attributes["block_size"], attributes["axis"], attributes["swizzled"])
    rows, columns = x.dim
    return {
        "y": Inferred(x.dim, glu_layout=x.glu_layout, scale_layout=layout, data_type=codes),
        "scale": Inferred(layout.storage((rows, columns)), scale_layout=layout, data_type=scale),
    }


def _block_scale_dequantize(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x, scale = inputs["x"], inputs["scale"]
    require(len(x.dim) in (2, 3), "RANK", f"block_scale_dequantize x = {x.name}", f"dim {x.dim}",
            "rank 2, or 3 for the weights of L experts")  # fmt: skip
    require(x.discrete == scale.discrete, "DISCRETE", f"block_scale_dequantize x = {x.name}, scale = {scale.name}",
            f"discrete {x.discrete} and {scale.discrete}", "both discrete, or neither")  # fmt: skip
    require(
        scale.scale_layout is not None,
        "SCALE_LAYOUT_MISSING",
        f"block_scale_dequantize scale = {scale.name}",
        "a tensor without a scale layout",
        "scale_layout=ScaleLayout(block_size, axis, swizzled) on the scales",
    )
    assert scale.scale_layout is not None
    _require_norm_const(inputs, "block_scale_dequantize")
    *experts, rows, columns = x.dim
    stored = (*experts, *scale.scale_layout.storage((rows, columns)))
    require(scale.dim == stored, "SHAPE", f"block_scale_dequantize scale = {scale.name}", scale.dim, f"{stored}")
    require(x.scale_layout in (None, scale.scale_layout), "SCALE_LAYOUT", f"block_scale_dequantize x = {x.name}",
            x.scale_layout, f"{scale.scale_layout}, as the scales")  # fmt: skip
    if x.data_type in CODE_TYPES and scale.data_type in SCALE_TYPES:  # else DATA_TYPE says what is wrong
        _require_format(x.data_type, scale.scale_layout.block_size, scale.data_type, "block_scale_dequantize")
        if len(x.dim) == 2:  # weights pack along the axis that is contiguous, which the verifier knows
            _require_packing(x.data_type, x.dim, "block_scale_dequantize x")
    return {"y": Inferred(x.dim, glu_layout=x.glu_layout)}


_NORM_CONST = Port("norm_const", "(1,) factor on x and on the scale", (DataType.FLOAT,), optional=True)

BLOCK_SCALE_QUANTIZE = OpSpec(
    name="block_scale_quantize",
    doc="(M, N) -> codes (M, N) and one scale per block of `block_size` along `axis`.",
    formula=(
        "sf32 = amax(block)*norm_const/dtype_max; scale = sf32 as E8M0, exponent rounded up, or as E4M3, nearest "
        "even, both saturating; code = saturating nearest-even of x*norm_const/scale; zero block: smallest scale, zero "
        "codes; a NaN in a block: NaN scale and NaN codes; Inf: largest scale, saturated codes"
    ),
    inputs=(Port("x", "(M, N)", FLOATING_TYPES), _NORM_CONST),
    outputs=(
        Port("y", "(M, N) codes", CODE_TYPES),
        Port("scale", "scales, stored as ScaleLayout.storage says", SCALE_TYPES),
    ),
    attributes=(
        Attribute("block_size", None, "elements that share a scale", *one_of(16, 32), required=True),
        Attribute("axis", None, "1: blocks along a row, 0: along a column", *one_of(0, 1), required=True),
        Attribute(
            "data_type", None, "type of the codes", lambda v: _named(v, CODE_TYPES), "a code type", required=True
        ),
        Attribute(
            "scale_type", "FP8_E8M0", "type of the scales", lambda v: _named(v, SCALE_TYPES), "FP8_E8M0 or FP8_E4M3"
        ),
        Attribute("swizzled", True, "scales in the 128x4 atom", *BOOLEAN),
    ),
    infer=_block_scale_quantize,
)

BLOCK_SCALE_DEQUANTIZE = OpSpec(
    name="block_scale_dequantize",
    doc="codes (M, N) and scales -> (M, N) values; weights (L, K, N) matrix by matrix, dense or discrete.",
    formula="y = code * scale of its block / norm_const",
    inputs=(
        Port("x", "(M, N) or (L, K, N) codes", CODE_TYPES),
        Port("scale", "scales with a scale layout; for (L, K, N) the scales of L matrices", SCALE_TYPES),
        _NORM_CONST,
    ),
    outputs=(Port("y", "the shape of x"),),
    infer=_block_scale_dequantize,
)

OPS = (BLOCK_SCALE_QUANTIZE, BLOCK_SCALE_DEQUANTIZE)
