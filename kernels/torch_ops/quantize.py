"""Block-scaled codes with torch, byte for byte what the reference defines (reference/quantize.py has the steps)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import SCALE_ATOM_COLUMNS, SCALE_ATOM_ROWS, ScaleLayout
from .matmul import Inputs, Outputs, Specs, matrices

LARGEST = {DataType.FP8_E4M3: 448.0, DataType.FP8_E5M2: 57344.0, DataType.FP4_E2M1: 6.0}
NAN_CODE = 0x7F  # of E4M3 and E5M2


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # A tensor, because CUDA divides by a host number through its reciprocal, which rounds twice.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """float32 >= 0 -> E8M0 bytes, rounded up, by bit arithmetic: the exponent, plus one where a mantissa is left."""
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)  # 2**-127 is the subnormal 0x400000
    byte = (exponent + above).clamp_(max=254)
    return torch.where(values.isnan(), 255, byte).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> float32 powers of two, NaN for 255."""
    wide = codes.to(torch.int32)
    bits = torch.where(wide == 0, 0x400000, wide << 23)
    return bits.view(torch.float32).masked_fill(wide == 255, torch.nan)


def _encode_fp8(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    # Saturated first: casts differ on overflow (NaN, infinity, the largest). One NaN, whatever sign it had.
    stored = torch.float8_e4m3fn if data_type is DataType.FP8_E4M3 else torch.float8_e5m2
    largest = LARGEST[data_type]
    bytes_ = values.clamp(min=-largest, max=largest).to(stored).view(torch.uint8)
    return bytes_.masked_fill_(values.isnan(), NAN_CODE)


def _encode_fp4(values: torch.Tensor) -> torch.Tensor:
    size = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    # Halfway between neighbours, ties to the even code: passed from above at 0.25, 1.25, 2.5 and 5, met at the others.
    for halfway, tie_goes_up in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (size >= halfway) if tie_goes_up else (size > halfway)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code.masked_fill_(values.isnan(), 7)


def _encode(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    return _encode_fp4(values) if data_type is DataType.FP4_E2M1 else _encode_fp8(values, data_type)


def _decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """(M, N/2) bytes -> float32 (M, N): `(2 + mantissa)/4 * 2**exponent`, or mantissa/2 where the exponent is 0."""
    code = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    size = quarters.to(torch.float32) * 0.25
    return torch.where(code & 8 != 0, -size, size)


def _decode_scale(codes: torch.Tensor, data_type: DataType) -> torch.Tensor:
    if data_type is DataType.FP8_E8M0:
        return decode_e8m0(codes)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _encode_scale(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    return encode_e8m0(values) if data_type is DataType.FP8_E8M0 else _encode_fp8(values, data_type)


def swizzle(matrix: torch.Tensor) -> torch.Tensor:
    """Scale bytes (R, C) -> the 128x4 atoms' memory, shaped (R up to 128s, C up to 4s), padding zero."""
    rows, columns = matrix.shape
    row_blocks, column_blocks = -(-rows // SCALE_ATOM_ROWS), -(-columns // SCALE_ATOM_COLUMNS)
    padded = matrix.new_zeros(row_blocks * SCALE_ATOM_ROWS, column_blocks * SCALE_ATOM_COLUMNS)
    padded[:rows, :columns] = matrix
    atoms = padded.view(row_blocks, 4, 32, column_blocks, 4)
    return atoms.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def unswizzle(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle`, padding left out."""
    row_blocks, column_blocks = memory.shape[0] // SCALE_ATOM_ROWS, memory.shape[1] // SCALE_ATOM_COLUMNS
    atoms = memory.reshape(row_blocks, column_blocks, 32, 4, 4)
    return atoms.permute(0, 3, 2, 1, 4).reshape(memory.shape)[:rows, :columns]


def _blocked(x: torch.Tensor, axis: int, block_size: int) -> torch.Tensor:
    """(M, N) -> (blocks, block_size, N) for axis 0, (M, blocks, block_size) for axis 1; the last block padded by 0."""
    short = -x.shape[axis] % block_size
    if short:
        x = torch.nn.functional.pad(x, (0, short) if axis == 1 else (0, 0, 0, short))
    return x.view(*x.shape[:axis], x.shape[axis] // block_size, block_size, *x.shape[axis + 1 :])


def block_scale_quantize(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """(M, N) -> codes and scales, in the bytes that the reference gives."""
    codes, scale_type = DataType(attributes["data_type"]), DataType(attributes["scale_type"])
    axis, block_size = attributes["axis"], attributes["block_size"]
    x = inputs["x"].to(torch.float32)
    out, stored = outputs["y"].view(torch.uint8), outputs["scale"].view(torch.uint8)
    if x.numel() == 0:
        out.zero_()
        stored.zero_()
        return
    block = _blocked(x, axis, block_size)
    amax = block.abs().amax(dim=axis + 1)
    if "norm_const" in inputs:
        norm = inputs["norm_const"].to(torch.float32)
        amax, block = amax * norm.abs(), block * norm
    scale = _encode_scale(amax / _constant(LARGEST[codes], x), scale_type)
    divisor = _decode_scale(scale, scale_type).unsqueeze(axis + 1)
    scaled = torch.where((block == 0) & (divisor == 0), block, block / divisor)
    byte = _encode(scaled.flatten(axis, axis + 1)[: x.shape[0], : x.shape[1]], codes)
    out.copy_(byte[:, 0::2] | (byte[:, 1::2] << 4) if codes is DataType.FP4_E2M1 else byte)
    if attributes["swizzled"]:
        stored.copy_(swizzle(scale if axis == 1 else scale.t()))
    else:
        stored.copy_(scale)


def block_scale_dequantize(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """Codes and scales -> code * scale / norm_const: (M, N), or (L, K, N) matrix by matrix."""
    y = outputs["y"]
    if y.numel() == 0:
        return
    axis = specs["x"].packed_axis - specs["x"].rank
    norm = inputs["norm_const"].to(torch.float32) if "norm_const" in inputs else None
    if specs["x"].rank == 2:
        pairs = [(inputs["x"], inputs["scale"], y)]
    else:
        codes, scales = matrices(inputs["x"], specs["x"], y.device), matrices(inputs["scale"], specs["scale"], y.device)
        pairs = list(zip(codes, scales, y, strict=True))
    for one, scale, out in pairs:
        values = _dequantized(one, scale, axis, specs)
        out.copy_(values if norm is None else values / norm)


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, packed_axis: int, specs: Specs) -> torch.Tensor:
    """One matrix of codes and its scales -> float32 values."""
    layout = specs["scale"].scale_layout
    assert layout is not None, f"{specs['scale']} has no scale layout"
    if specs["x"].data_type is DataType.FP4_E2M1:
        values = _decode_fp4(codes) if packed_axis == -1 else _decode_fp4(codes.t()).t()
    else:
        values = codes.to(torch.float32)
    return values * _decode_scale(_per_element(scale.view(torch.uint8), layout, values), specs["scale"].data_type)


def _per_element(stored: torch.Tensor, layout: ScaleLayout, values: torch.Tensor) -> torch.Tensor:
    """Stored scale bytes -> one for each element of `values` (M, N)."""
    matrix = stored
    if layout.swizzled:
        rows, columns = layout.matrix((values.shape[0], values.shape[1]))
        assert isinstance(rows, int) and isinstance(columns, int)
        matrix = unswizzle(stored, rows, columns)
        matrix = matrix if layout.axis == 1 else matrix.t()
    each = matrix.repeat_interleave(layout.block_size, dim=layout.axis)
    return each[: values.shape[0], : values.shape[1]]


RUN = {"block_scale_quantize": block_scale_quantize, "block_scale_dequantize": block_scale_dequantize}
