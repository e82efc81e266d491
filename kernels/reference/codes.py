"""Codes and scales of block-scaled formats, encoded and decoded by exact means: tables and float64 comparisons.

Nothing here casts to a float8 dtype: libraries disagree there (nearest or up for E8M0, NaN or the largest value on
overflow), so the bytes are derived from the formats' definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...graph_ops.ir.dtypes import DataType


@dataclass(frozen=True)
class CodeFormat:
    """A signed mini-float: exponent and mantissa bits, bias, largest finite value, and the byte that stands for NaN.

    E4M3 (fn) and E2M1 have no infinity; E2M1 has no NaN either, so a NaN becomes its largest value, as the hardware's
    saturating conversion does, and only the block's scale tells of it.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan_code: int


CODE_FORMATS: dict[DataType, CodeFormat] = {
    DataType.FP8_E4M3: CodeFormat(4, 3, 7, 448.0, 0x7F),
    DataType.FP8_E5M2: CodeFormat(5, 2, 15, 57344.0, 0x7F),
    DataType.FP4_E2M1: CodeFormat(2, 1, 1, 6.0, 0x7),
}

SMALLEST_E8M0 = 0  # 2**-127
LARGEST_E8M0 = 254  # 2**127
NAN_E8M0 = 255


def code_value(code: int, rule: CodeFormat) -> float:
    """The value of a code with the sign bit clear."""
    mantissa = code & ((1 << rule.mantissa_bits) - 1)
    exponent = code >> rule.mantissa_bits
    if exponent == 0:
        return float(mantissa * 2.0 ** (1 - rule.bias - rule.mantissa_bits))
    return float((1 + mantissa / 2**rule.mantissa_bits) * 2.0 ** (exponent - rule.bias))


@cache
def magnitudes(data_type: DataType) -> torch.Tensor:
    """Every finite non-negative value of a code type in order; a value's index is its code. float64."""
    rule = CODE_FORMATS[data_type]
    values = [code_value(code, rule) for code in range(1 << (rule.exponent_bits + rule.mantissa_bits))]
    return torch.tensor([v for v in values if v <= rule.largest], dtype=torch.float64)


def encode(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """Codes of `values`: nearest, ties to the even code, saturating (infinity too), NaN to the NaN code. uint8.

    FP4 codes come one a byte, in the low nibble; `pack_fp4` packs them.
    """
    rule, table = CODE_FORMATS[data_type], magnitudes(data_type).to(values.device)
    exact = values.to(torch.float64)
    size = exact.abs().clamp(max=rule.largest).nan_to_num(nan=0.0)
    low = (torch.searchsorted(table, size, right=True) - 1).clamp(0, len(table) - 2)
    middle = (table[low] + table[low + 1]) / 2
    up = (size > middle) | ((size == middle) & (low % 2 == 1))
    sign = torch.signbit(exact).long() << (rule.exponent_bits + rule.mantissa_bits)
    return torch.where(exact.isnan(), rule.nan_code, (low + up) | sign).to(torch.uint8)


def decode(codes: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """The values of codes (uint8; FP4 one a byte), float64."""
    rule = CODE_FORMATS[data_type]
    sign_bit = 1 << (rule.exponent_bits + rule.mantissa_bits)
    table = magnitudes(data_type).to(codes.device)
    beyond = [torch.nan] * (sign_bit - len(table))
    if data_type is DataType.FP8_E5M2:
        beyond[0] = torch.inf
    whole = torch.cat([table, torch.tensor(beyond, dtype=torch.float64, device=codes.device)])
    index = codes.long()
    size = whole[index & (sign_bit - 1)]
    return torch.where(index & sign_bit != 0, -size, size)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """(M, N) FP4 codes, one a byte -> (M, N/2) bytes, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """(M, N/2) bytes -> (M, N) FP4 codes, one a byte."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Scales as biased exponents, rounded up to a power of two: byte e stands for 2**(e - 127). uint8.

    Up, so that amax/scale never exceeds what a code holds (PTX `cvt.rp.satfinite.ue8m0`; "RCEIL"). Zero and whatever
    lies below gives 2**-127, infinity and whatever lies above 2**127, NaN 255. `values` are not negative.
    """
    exact = values.to(torch.float64)
    fraction, exponent = torch.frexp(exact)  # x = fraction * 2**exponent, fraction in [0.5, 1)
    power = exponent - (fraction == 0.5).int()  # the least p with 2**p >= x
    byte = (power + 127).clamp(SMALLEST_E8M0, LARGEST_E8M0)
    byte = torch.where(exact == 0, SMALLEST_E8M0, torch.where(exact.isinf(), LARGEST_E8M0, byte))
    return torch.where(exact.isnan(), NAN_E8M0, byte).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two that E8M0 bytes stand for, float64; 255 is NaN."""
    exponent = codes.to(torch.int32) - 127
    power = torch.ldexp(torch.ones(codes.shape, dtype=torch.float64, device=codes.device), exponent)
    return torch.where(codes == NAN_E8M0, torch.nan, power)


def encode_scale(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """Scale bytes: E8M0 rounded up, E4M3 to nearest even; both saturate, NaN stays NaN."""
    return encode_e8m0(values) if data_type is DataType.FP8_E8M0 else encode(values, data_type)


def decode_scale(codes: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """The values of scale bytes, float64."""
    return decode_e8m0(codes) if data_type is DataType.FP8_E8M0 else decode(codes, data_type)
