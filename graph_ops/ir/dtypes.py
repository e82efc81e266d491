"""Data types of the operation graph, with cuDNN's names, declared in one table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DataType(enum.Enum):
    """Element types, named as in `cudnn.data_type`."""

    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    HALF = "HALF"
    BFLOAT16 = "BFLOAT16"
    FP8_E4M3 = "FP8_E4M3"
    FP8_E5M2 = "FP8_E5M2"
    FP8_E8M0 = "FP8_E8M0"
    FP4_E2M1 = "FP4_E2M1"
    INT32 = "INT32"
    INT64 = "INT64"
    UINT8 = "UINT8"
    BOOLEAN = "BOOLEAN"

    @property
    def info(self) -> DataTypeInfo:
        return DATA_TYPES[self]

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True)
class DataTypeInfo:
    """Facts about one data type.

    `torch_name` is the attribute of the `torch` module that stores it; `packed` says how many elements share one
    stored element (FP4: two in a byte, the even column in the low nibble).
    """

    bits: int
    kind: str  # "float", "code" (needs a scale to mean something), "scale", "int", "bool"
    torch_name: str
    largest: float | None = None
    packed: int = 1

    @property
    def is_floating(self) -> bool:
        return self.kind == "float"


DATA_TYPES: dict[DataType, DataTypeInfo] = {
    DataType.FLOAT: DataTypeInfo(32, "float", "float32", 3.4028234663852886e38),
    DataType.DOUBLE: DataTypeInfo(64, "float", "float64", 1.7976931348623157e308),
    DataType.HALF: DataTypeInfo(16, "float", "float16", 65504.0),
    DataType.BFLOAT16: DataTypeInfo(16, "float", "bfloat16", 3.3895313892515355e38),
    DataType.FP8_E4M3: DataTypeInfo(8, "code", "float8_e4m3fn", 448.0),
    DataType.FP8_E5M2: DataTypeInfo(8, "code", "float8_e5m2", 57344.0),
    DataType.FP8_E8M0: DataTypeInfo(8, "scale", "float8_e8m0fnu", 2.0**127),
    DataType.FP4_E2M1: DataTypeInfo(4, "code", "uint8", 6.0, packed=2),
    DataType.INT32: DataTypeInfo(32, "int", "int32"),
    DataType.INT64: DataTypeInfo(64, "int", "int64"),
    DataType.UINT8: DataTypeInfo(8, "int", "uint8"),
    DataType.BOOLEAN: DataTypeInfo(8, "bool", "bool"),
}

MATMUL_TYPES = (DataType.BFLOAT16, DataType.HALF, DataType.FLOAT)
"""Operand types that an unfused matmul reads directly; codes go through `block_scale_dequantize` first."""

CODE_TYPES = tuple(t for t, i in DATA_TYPES.items() if i.kind == "code")
FLOATING_TYPES = tuple(t for t, i in DATA_TYPES.items() if i.is_floating)
