"""What each data type can hold, and rounding to it: nearest, ties to even, exact from float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...graph_ops.ir.dtypes import DataType


@dataclass(frozen=True)
class Rounding:
    """A binary floating format: bits of precision (the hidden one counted), smallest normal exponent, largest value."""

    precision: int
    smallest_exponent: int
    largest: float


ROUNDING: dict[DataType, Rounding] = {
    DataType.FLOAT: Rounding(24, -126, DataType.FLOAT.info.largest or 0.0),
    DataType.HALF: Rounding(11, -14, DataType.HALF.info.largest or 0.0),
    DataType.BFLOAT16: Rounding(8, -126, DataType.BFLOAT16.info.largest or 0.0),
}
"""The types at which a graph's values round. Overflow gives infinity, as IEEE has it; codes saturate, these do not."""


def torch_type(data_type: DataType) -> torch.dtype:
    """The torch dtype that stores `data_type` (FP4: a byte for two)."""
    found: torch.dtype = getattr(torch, data_type.info.torch_name)
    return found


def round_to(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """`values` as a tensor of `data_type` holds them, still in the dtype of `values`.

    One rounding from float64: a cast by way of float32, as torch does it, would round twice. Types without a row in
    ROUNDING (integers, booleans, codes, DOUBLE) leave the values as they are.
    """
    if (rule := ROUNDING.get(data_type)) is None:
        return values
    exact = values.to(torch.float64)
    _, exponent = torch.frexp(exact)  # |x| in [2**(e-1), 2**e)
    exponent = (exponent - 1).clamp(min=rule.smallest_exponent)
    step = torch.ldexp(torch.ones_like(exact), exponent - (rule.precision - 1))
    rounded = torch.where(exact.isfinite(), torch.round(exact / step) * step, exact)
    overflow = rounded.abs() > rule.largest
    return torch.where(overflow, torch.copysign(torch.full_like(exact, torch.inf), exact), rounded).to(values.dtype)
