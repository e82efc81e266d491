"""Block-scaled codes, to the bit.

The order of operations is part of the definition; each step is one float32 operation, rounded to nearest even, with
subnormals kept, so that implementations can agree in every byte:

    amax  = max |x| over the block                (exact; NaN if a value is NaN)
    sf32  = (amax * |norm_const|) / dtype_max     (two roundings; a division, not a product with the reciprocal)
    scale = sf32 as E8M0, exponent rounded up, or as E4M3, nearest even; both saturate
    code  = (x * norm_const) / decode(scale)      (two roundings), then to nearest even, saturating

x enters as float32, which every type that a graph's tensor can have converts to exactly. Only the magnitude of
norm_const reaches the scale, which has no sign. An all-zero block stores the smallest scale (E8M0: 2**-127, E4M3: 0)
and zero codes. A NaN in a block makes its scale and all of its codes NaN (E2M1 has none: its largest value stands
there, under a NaN scale). Infinity gives the largest scale. Over a scale that is zero, zero stays zero and any other
value saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import ScaleLayout
from .codes import CODE_FORMATS, decode, decode_scale, encode, encode_scale, pack_fp4, unpack_fp4
from .layouts import swizzle_scales, unswizzle_scales
from .matmul import Specs, Values
from .rounding import torch_type


def quantize_blocks(
    x: torch.Tensor, block_size: int, codes: DataType, scale: DataType, norm_const: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (R, C), blocks along columns -> code bytes (R, C) and scale bytes (R, ceil(C / block_size)).

    A last block that is not full has only its own values. FP4 codes come one a byte.
    """
    rows, columns = x.shape
    blocks = -(-columns // block_size)
    norm = torch.as_tensor(norm_const, dtype=torch.float32, device=x.device)
    padded = x.new_zeros(rows, blocks * block_size)
    padded[:, :columns] = x
    block = padded.view(rows, blocks, block_size)
    amax = block.abs().amax(dim=2) if block.numel() else x.new_zeros(rows, blocks)
    dtype_max = torch.tensor(CODE_FORMATS[codes].largest, dtype=torch.float32, device=x.device)
    scales = encode_scale((amax * norm.abs()) / dtype_max, scale)
    divisor = decode_scale(scales, scale).to(torch.float32)[:, :, None]
    block = block * norm
    scaled = torch.where((block == 0) & (divisor == 0), block, block / divisor)
    return encode(scaled, codes).view(rows, blocks * block_size)[:, :columns], scales


def block_scale_quantize(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """(M, N) -> codes and scales as their tensors store them: FP4 two a byte, scales swizzled or plain."""
    codes, scale = DataType(attributes["data_type"]), DataType(attributes["scale_type"])
    along_rows = attributes["axis"] == 0
    x = inputs["x"].to(torch.float32)
    y, scales = quantize_blocks(
        x.T.contiguous() if along_rows else x, attributes["block_size"], codes, scale, inputs.get("norm_const", 1.0)
    )
    if attributes["swizzled"]:
        stored = swizzle_scales(scales)
    else:
        stored = scales.T.contiguous() if along_rows else scales
    y = (y.T if along_rows else y).contiguous()
    y = pack_fp4(y) if codes is DataType.FP4_E2M1 else y.view(torch_type(codes))
    return {"y": y, "scale": stored.view(torch_type(scale))}


def _scale_of_each(stored: torch.Tensor, layout: ScaleLayout, shape: tuple[int, int]) -> torch.Tensor:
    """Scale bytes as stored -> one per element of (M, N)."""
    rows, columns = layout.matrix(shape)
    assert isinstance(rows, int) and isinstance(columns, int)
    if layout.swizzled:
        matrix = unswizzle_scales(stored.view(torch.uint8), rows, columns)
    else:
        matrix = stored.view(torch.uint8) if layout.axis == 1 else stored.view(torch.uint8).T
    each = matrix.repeat_interleave(layout.block_size, dim=1)
    return each[:, : shape[1]] if layout.axis == 1 else each[:, : shape[0]].T


def block_scale_dequantize(inputs: Values, attributes: Mapping[str, Any], specs: Specs) -> dict[str, torch.Tensor]:
    """Codes and their scales -> `code * scale / norm_const`: (M, N), or (L, K, N) matrix by matrix."""
    x, scale, axis = inputs["x"], inputs["scale"], specs["x"].packed_axis - specs["x"].rank
    if specs["x"].rank == 3:
        values = torch.stack([_dequantized(c, s, axis, specs) for c, s in zip(x, scale, strict=True)])
    else:
        values = _dequantized(x, scale, axis, specs)
    norm = inputs["norm_const"] if "norm_const" in inputs else torch.ones(1, device=values.device)
    return {"y": values / norm}


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, packed_axis: int, specs: Specs) -> torch.Tensor:
    """One matrix of codes and its scales -> values, float64."""
    data_type, layout = specs["x"].data_type, specs["scale"].scale_layout
    if layout is None:
        raise ValueError(f"{specs['scale']} has no scale layout")
    stored = codes.view(torch.uint8)
    if data_type is DataType.FP4_E2M1:
        stored = unpack_fp4(stored) if packed_axis == -1 else unpack_fp4(stored.T).T
    values = decode(stored, data_type)
    each = _scale_of_each(scale, layout, (values.shape[0], values.shape[1]))
    return values * decode_scale(each, specs["scale"].data_type)


EVALUATE = {"block_scale_quantize": block_scale_quantize, "block_scale_dequantize": block_scale_dequantize}
