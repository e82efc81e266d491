"""Block-scaled quantization: torch_ops equals the reference and an independent numpy implementation in every byte."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import ScaleLayout
from opfuse.graph_ops.ir.nodes.quantize import BLOCK_FORMATS
from opfuse.kernels import reference

FORMATS = [(f.name, codes, f.block_size, f.scale) for f in BLOCK_FORMATS for codes in f.codes]
IDS = [f"{name}-{codes.value}".replace(" ", "_") for name, codes, _, _ in FORMATS]
LARGEST = {DataType.FP8_E4M3: 448.0, DataType.FP8_E5M2: 57344.0, DataType.FP4_E2M1: 6.0}
NUMPY = {
    DataType.FP8_E4M3: ml_dtypes.float8_e4m3fn,
    DataType.FP8_E5M2: ml_dtypes.float8_e5m2,
    DataType.FP4_E2M1: ml_dtypes.float4_e2m1fn,
}


def quantize_case(num, x, form, *, axis=1, swizzled=True, norm_const=None):
    _, codes, block, scale = form
    attributes = {"block_size": block, "axis": axis, "data_type": codes.value, "scale_type": scale.value,
                  "swizzled": swizzled}  # fmt: skip
    inputs = {"x": x} if norm_const is None else {"x": x, "norm_const": torch.tensor([norm_const])}
    return num.make_case("block_scale_quantize", inputs, attributes)


def dequantize(num, y, scale, form, *, axis=1, swizzled=True, norm_const=None):
    _, codes, block, scale_type = form
    layout = ScaleLayout(block, axis, swizzled)
    inputs = {"x": y, "scale": scale}
    if norm_const is not None:
        inputs["norm_const"] = torch.tensor([norm_const])
    return num.make_case(
        "block_scale_dequantize", inputs, layouts={"scale": layout}, input_types={"x": codes, "scale": scale_type}
    )


def assert_bit_exact(num, case, message, *, strided=False):
    got, want = case.run(strided=strided), case.oracle()
    for port in ("y", "scale"):
        assert got[port].dtype is want[port].dtype
        num.assert_same_bytes(got[port], want[port], f"{port}: {message}")
    return got


def special_blocks(block: int) -> torch.Tensor:
    """Rows of one block each: zeros, denormals, +-max, amax at powers of two and one step beside, infinity, NaN."""
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    firsts = [0.0, -0.0, 1e-45, 1e-40, -tiny, tiny * 3, huge, -huge, math.inf, -math.inf, math.nan]
    for power in (-127, -126, -30, -9, -1, 0, 1, 7, 9, 30, 126, 127):
        for largest in (1.0, 448.0, 57344.0, 6.0):
            value = torch.tensor(largest * 2.0**power, dtype=torch.float32)
            firsts += [float(torch.nextafter(value, torch.tensor(limit))) for limit in (0.0, math.inf)] + [float(value)]
    rows = torch.zeros(len(firsts), block)
    rows[:, 3] = torch.tensor(firsts)
    filled = rows.clone()
    spread = torch.linspace(-1, 1, block - 4)
    filled[:, 4:] = torch.where(rows[:, 3:4].isfinite(), rows[:, 3:4], torch.ones(1)) * spread
    return torch.cat([rows, filled])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_random_values(num, draw, dtype, form, swizzled, axis):
    x = draw.wide(70, 94).to(dtype)  # neither rows nor columns are whole blocks
    assert_bit_exact(num, quantize_case(num, x, form, axis=axis, swizzled=swizzled), f"seed {draw.seed}")


@pytest.mark.parametrize("norm_const", [None, 0.5, 1.7, -1.5, 0.0, 3e38])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_special_values(num, form, axis, norm_const):
    x = special_blocks(form[2])
    x = x.T.contiguous() if axis == 0 else x
    x = x if x.shape[1] % 2 == 0 else torch.nn.functional.pad(x, (0, 1))
    assert_bit_exact(num, quantize_case(num, x, form, axis=axis, norm_const=norm_const), f"norm_const {norm_const}")


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_strided_input_and_output(num, draw, form):
    x = draw.wide(128, 64).T  # (64, 128), column-major
    case = quantize_case(num, x, form, norm_const=0.5)
    got = assert_bit_exact(num, case, f"seed {draw.seed}", strided=True)
    assert not got["y"].is_contiguous()
    for port, data in quantize_case(num, x.contiguous(), form, norm_const=0.5).run().items():
        num.assert_same_bytes(got[port], data, port)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_rows_and_columns_are_quantized_independently(num, draw, form):
    """Each from x itself: quantizing the dequantized rows by columns would give other codes."""
    # Columns of different sizes: under one scale a row, the small ones keep few bits.
    x = draw.normal(64, 64) * torch.exp2(torch.arange(64.0) % 8)
    by_row, by_column = (quantize_case(num, x, form, axis=axis).run() for axis in (1, 0))
    turned = quantize_case(num, x.T.contiguous(), form, axis=1).run()
    num.assert_same_bytes(by_column["scale"], turned["scale"], f"seed {draw.seed}")
    back = dequantize(num, by_row["y"], by_row["scale"], form).run()["y"]
    again = quantize_case(num, back, form, axis=0).run()
    assert not torch.equal(again["y"].view(torch.uint8), by_column["y"].view(torch.uint8))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_round_trip_is_within_half_a_step(num, draw, form, swizzled, axis):
    x = draw.normal(70, 96)
    q = quantize_case(num, x, form, axis=axis, swizzled=swizzled, norm_const=1.5).run()
    case = dequantize(num, q["y"], q["scale"], form, axis=axis, swizzled=swizzled, norm_const=1.5)
    y = case.run()["y"]
    num.assert_close(y, case.oracle()["y"], case.oracle(torch.float32)["y"], f"seed {draw.seed}")
    blocks = -(-x.shape[axis] // form[2])
    amax = torch.stack([part.abs().amax(dim=axis) for part in x.split(form[2], dim=axis)], dim=axis)
    assert amax.shape[axis] == blocks
    amax = amax.repeat_interleave(form[2], dim=axis)[: x.shape[0], : x.shape[1]]
    step = {DataType.FP8_E4M3: 2**-4, DataType.FP8_E5M2: 2**-3, DataType.FP4_E2M1: 1 / 3}[form[1]]
    assert ((y - x).abs() <= step * amax).all(), f"seed {draw.seed}"
    assert torch.nn.functional.cosine_similarity(y.flatten(), x.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_c48_and_c53_all_zero_blocks_store_the_smallest_scale_and_decode_to_zero(num, form):
    x = torch.zeros(128, 64)
    x[32:64, :32] = torch.linspace(-2, 2, 32)  # one tile of values, zero blocks around it
    q = assert_bit_exact(num, quantize_case(num, x, form, swizzled=False), "one tile")
    scale = q["scale"].view(torch.uint8)
    assert (scale[:32] == 0).all() and (scale[:, 2 if form[2] == 16 else 1 :] == 0).all()
    y = dequantize(num, q["y"], q["scale"], form, swizzled=False).run()["y"]
    assert y.isfinite().all() and (y[x == 0] == 0).all()
    whole = quantize_case(num, torch.zeros(128, 64), form).run()
    assert (whole["y"].view(torch.uint8) == 0).all() and (whole["scale"].view(torch.uint8) == 0).all()


def test_c47_no_scale_byte_of_nvfp4_is_nan(num, draw):
    form = next(f for f in FORMATS if f[0] == "NVFP4")
    for factor in (1e-38, 1e-3, 1.0, 1e30, 3e38):
        x = draw.normal(64, 64).clamp(-1, 1) * factor
        x[:, :16] = 0
        q = assert_bit_exact(num, quantize_case(num, x, form, swizzled=False), f"factor {factor}, seed {draw.seed}")
        assert (q["scale"].view(torch.uint8) & 0x7F != 0x7F).all(), f"NaN scale at factor {factor}, seed {draw.seed}"
        assert (q["scale"].view(torch.uint8)[:, 0] == 0).all()


def numpy_quantize(x: np.ndarray, form) -> tuple[np.ndarray, np.ndarray]:
    """(rows, block) -> codes one a byte, scale bytes: numpy and ml_dtypes only."""
    _, codes, _, scale_type = form
    amax = np.abs(x).max(axis=1)
    sf32 = (amax / np.float32(LARGEST[codes])).astype(np.float32)
    if scale_type is DataType.FP8_E8M0:
        fraction, exponent = np.frexp(sf32.astype(np.float64))
        scale = np.where(sf32 == 0, 0, np.clip(exponent - (fraction == 0.5) + 127, 0, 254)).astype(np.uint8)
        divisor = np.ldexp(1.0, scale.astype(np.int32) - 127).astype(np.float32)
    else:
        rounded = np.minimum(sf32, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        scale, divisor = rounded.view(np.uint8), rounded.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = np.where(x == 0, x, x / divisor[:, None]).astype(np.float32)
    return np.clip(scaled, -LARGEST[codes], LARGEST[codes]).astype(NUMPY[codes]).view(np.uint8), scale


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_c52_ten_thousand_blocks_bit_exact_against_numpy(num, draw, form):
    x = torch.cat([draw.wide(6000, form[2]), draw.normal(4096, form[2])])
    codes, scale = numpy_quantize(x.numpy(), form)
    want = torch.from_numpy(codes)
    got = quantize_case(num, x, form, swizzled=False).run()
    y = reference.unpack_fp4(got["y"]) if form[1] is DataType.FP4_E2M1 else got["y"]
    num.assert_same_bytes(got["scale"], torch.from_numpy(scale)[:, None], f"scales, seed {draw.seed}")
    num.assert_same_bytes(y, want, f"codes, seed {draw.seed}")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_c55_padding_rows_and_padding_scales_are_zero_bytes(num, draw, form, axis):
    x = draw.normal(96, 64)
    x[64:] = 0  # rows outside every group, as grouped_matmul leaves them
    q = quantize_case(num, x, form, axis=axis).run()  # outputs start as 0xFF
    assert (q["y"].view(torch.uint8)[64:] == 0).all()
    memory = q["scale"].view(torch.uint8)
    rows, columns = ScaleLayout(form[2], axis).matrix((96, 64))
    matrix = reference.unswizzle_scales(memory, rows, columns)
    assert (matrix[64:] == 0).all() if axis == 1 else (matrix[:, 64 // form[2] :] == 0).all()
    assert int((memory != 0).sum()) == int((matrix != 0).sum()), "a padding scale is not zero"


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_nothing_to_quantize(num, shape, axis):
    assert_bit_exact(num, quantize_case(num, torch.zeros(shape), FORMATS[0], axis=axis), f"{shape}")


def test_nan_and_infinity_stay_in_their_block(num, draw):
    form = FORMATS[0]
    x = draw.normal(4, 64)
    x[0, 5], x[1, 40], x[2, 1] = math.nan, math.inf, -math.inf
    q = quantize_case(num, x, form, swizzled=False).run()
    scale, y = q["scale"].view(torch.uint8), q["y"].view(torch.uint8)
    assert scale[0, 0] == 0xFF and (y[0, :32] == 0x7F).all()
    assert scale[1, 1] == 0xFE and y[1, 40] == 0x7E and scale[2, 0] == 0xFE and y[2, 1] == 0xFE
    calm = quantize_case(num, torch.where(x.isfinite(), x, torch.zeros(1)), form, swizzled=False).run()
    for block in ((0, 1), (1, 0), (2, 1), (3, 0), (3, 1)):
        assert scale[block] == calm["scale"].view(torch.uint8)[block]


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_every_byte_dequantizes_as_the_oracle_says(num, form):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # every code under every scale
    y = codes if form[1] is DataType.FP4_E2M1 else codes.view(reference.torch_type(form[1]))
    columns = 256 * form[1].info.packed
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, columns // form[2])
    case = dequantize(num, y, scale.view(reference.torch_type(form[3])), form, swizzled=False)
    got, want = case.run()["y"], reference.store(case.oracle()["y"], DataType.FLOAT)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])
