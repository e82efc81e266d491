"""Encoding and decoding of codes and scales: exhaustive, and in both implementations."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels import reference
from opfuse.kernels.torch_ops import quantize

NUMPY = {
    DataType.FP8_E4M3: ml_dtypes.float8_e4m3fn,
    DataType.FP8_E5M2: ml_dtypes.float8_e5m2,
    DataType.FP4_E2M1: ml_dtypes.float4_e2m1fn,
}
LARGEST = {DataType.FP8_E4M3: 448.0, DataType.FP8_E5M2: 57344.0, DataType.FP4_E2M1: 6.0}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ENCODERS = {
    "reference": reference.encode,
    "torch_ops": lambda values, data_type: quantize._encode(values.float(), data_type),
}
E8M0_ENCODERS = {"reference": reference.encode_e8m0, "torch_ops": quantize.encode_e8m0}


def every_bfloat16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def numpy_codes(values: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """By ml_dtypes, saturated first; one NaN code, E2M1's largest value for a NaN."""
    largest = LARGEST[data_type]
    array = values.numpy()
    clipped = np.where(np.isnan(array), np.float32(0), np.clip(array, -largest, largest)).astype(np.float32)
    codes = clipped.astype(NUMPY[data_type]).view(np.uint8)
    nan = 7 if data_type is DataType.FP4_E2M1 else 0x7F
    return torch.from_numpy(np.where(np.isnan(array), np.uint8(nan), codes))


@pytest.mark.parametrize("data_type", LARGEST)
def test_every_code_decodes_as_ml_dtypes_has_it(data_type):
    count = 16 if data_type is DataType.FP4_E2M1 else 256
    codes = ALL_BYTES[:count]
    want = torch.from_numpy(codes.numpy().view(NUMPY[data_type]).astype(np.float64))
    got = reference.decode(codes, data_type)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])
    assert torch.equal(torch.signbit(got)[~got.isnan()], torch.signbit(want)[~want.isnan()])


@pytest.mark.parametrize("data_type", LARGEST)
@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS.keys())
def test_every_finite_code_encodes_to_itself(data_type, encode):
    codes = ALL_BYTES[: 16 if data_type is DataType.FP4_E2M1 else 256]
    values = reference.decode(codes, data_type)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], data_type), codes[finite])


@pytest.mark.parametrize("data_type", LARGEST)
@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS.keys())
def test_c51_every_bfloat16_encodes_to_nearest_even_and_saturates(data_type, encode):
    values = every_bfloat16()
    assert torch.equal(encode(values, data_type), numpy_codes(values, data_type))


@pytest.mark.parametrize("data_type", LARGEST)
@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS.keys())
def test_halfway_cases_and_their_neighbours(data_type, encode):
    table = reference.codes.magnitudes(data_type)
    halfway = ((table[1:] + table[:-1]) / 2).float()
    values = torch.cat([torch.nextafter(halfway, torch.tensor(-math.inf)), halfway,
                        torch.nextafter(halfway, torch.tensor(math.inf))])  # fmt: skip
    values = torch.cat([values, -values])
    assert torch.equal(encode(values, data_type), numpy_codes(values, data_type))


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS.keys())
def test_c50_overflow_saturates_and_nan_stays(encode):
    values = torch.tensor([448.0, 464.0, 465.0, 480.0, 1000.0, math.inf, -math.inf, math.nan])
    codes = encode(values, DataType.FP8_E4M3)
    assert codes.tolist() == [0x7E] * 6 + [0xFE, 0x7F]
    codes = encode(values * 1000, DataType.FP8_E5M2)
    assert codes.tolist() == [0x7B] * 6 + [0xFB, 0x7F]
    negative_nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    assert encode(negative_nan, DataType.FP8_E4M3).tolist() == [0x7F]


@pytest.mark.parametrize("encode", E8M0_ENCODERS.values(), ids=E8M0_ENCODERS.keys())
def test_c45_e8m0_is_bit_arithmetic_not_a_cast(encode):
    """Each of the 254 powers of two, its float32 neighbours and the middle of the way to the next: always up."""
    power = reference.decode_e8m0(ALL_BYTES[:255]).float()
    up, down = (torch.nextafter(power, torch.tensor(limit)) for limit in (math.inf, 0.0))
    byte = torch.arange(255)
    assert torch.equal(encode(power).long(), byte)
    assert torch.equal(encode(up).long(), (byte + 1).clamp(max=254))
    assert torch.equal(encode(down).long(), byte)
    assert torch.equal(encode(power[:254] * 1.5).long(), byte[:254] + 1)
    assert torch.equal(encode(power[:254] * 1.25).long(), byte[:254] + 1), "a cast to nearest would stay below"
    special = torch.tensor([0.0, 1e-45, math.inf, torch.finfo(torch.float32).max, math.nan])
    assert encode(special).tolist() == [0, 0, 254, 254, 255]


def test_e8m0_decodes_every_byte():
    want = torch.from_numpy(ALL_BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    for got in (reference.decode_e8m0(ALL_BYTES), quantize.decode_e8m0(ALL_BYTES).double()):
        assert torch.equal(got[:255], want[:255]) and bool(got[255].isnan())


def test_fp4_packing_puts_the_even_column_low(num):
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert reference.pack_fp4(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(reference.unpack_fp4(reference.pack_fp4(codes)), codes)
    pairs = ALL_BYTES[None]
    assert torch.equal(reference.pack_fp4(reference.unpack_fp4(pairs)), pairs)
    assert torch.equal(
        quantize._decode_fp4(pairs).double(), reference.decode(reference.unpack_fp4(pairs), DataType.FP4_E2M1)
    )


@pytest.mark.parametrize("encode", E8M0_ENCODERS.values(), ids=E8M0_ENCODERS.keys())
def test_c42_exponent_rounds_up_once(encode):
    """amax 150 over 448: 126. The recipe that first rounds each exponent would give 127."""
    assert encode(torch.tensor([150.0]) / torch.tensor(448.0)).tolist() == [126]


@pytest.mark.parametrize("amax", [2.7, 5.5, 1.2, 447.99, 448.0, 448.01, 3e38, 1e-30])
@pytest.mark.parametrize("data_type", LARGEST)
@pytest.mark.parametrize("encode", E8M0_ENCODERS.values(), ids=E8M0_ENCODERS.keys())
def test_c43_the_largest_value_of_a_block_never_saturates(encode, data_type, amax):
    value = torch.tensor([amax])
    scale = reference.decode_e8m0(encode(value / torch.tensor(LARGEST[data_type])))
    assert float(value.double() / scale) <= LARGEST[data_type]
    assert float(value.double() / (scale / 2)) > LARGEST[data_type], "a smaller scale would have done"


@pytest.mark.parametrize("exponent", [-120, -30, -9, 0, 3, 20, 100])
@pytest.mark.parametrize("data_type", LARGEST)
def test_amax_at_a_power_of_two_times_the_largest_code_and_one_step_beside(data_type, exponent):
    """Rounding of `amax / dtype_max` in float32 must not hide that amax has passed a power of two."""
    exact = torch.tensor([LARGEST[data_type] * 2.0**exponent])
    above, below = (torch.nextafter(exact, torch.tensor(limit)) for limit in (math.inf, 0.0))
    for encode in E8M0_ENCODERS.values():
        bytes_ = [int(encode(v / torch.tensor(LARGEST[data_type]))) for v in (below, exact, above)]
        assert bytes_ == [exponent + 127, exponent + 127, exponent + 128]


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (130, 5), (256, 8), (1, 1), (127, 3)])
def test_c58_the_scale_atom_against_a_loop(rows, columns):
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    row_blocks, atoms = -(-rows // 128), -(-columns // 4)
    memory = [0] * (row_blocks * atoms * 512)
    for m in range(rows):
        for k in range(columns):
            memory[((m // 128) * atoms + k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4] = int(
                scales[m, k]
            )
    want = torch.tensor(memory, dtype=torch.uint8).view(row_blocks * 128, atoms * 4)
    for swizzle in (reference.swizzle_scales, quantize.swizzle):
        assert torch.equal(swizzle(scales), want)
    assert torch.equal(reference.unswizzle_scales(want, rows, columns), scales)
    assert torch.equal(quantize.unswizzle(want, rows, columns), scales)


def test_c58_the_view_of_the_contract_is_this_memory():
    """(32, 4, ceil(M/128), 4, ceil(K'/4), 1) with strides (16, 4, 512 * ceil(K'/4), 1, 512, ...)."""
    rows, columns = 256, 8
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    memory = reference.swizzle_scales(scales).flatten()
    view = memory.as_strided((32, 4, rows // 128, 4, columns // 4), (16, 4, 512 * (columns // 4), 1, 512))
    m, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    assert torch.equal(view[m % 32, m % 128 // 32, m // 128, k % 4, k // 4], scales)
