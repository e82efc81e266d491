"""The quantize kernel's program for the warps of a CTA, run on 32 numpy lanes, against the reference, bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.reference.layouts import swizzle_scales
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.sm90.quantize_config import QuantizeConfig, scale_bytes
from warp_lanes import KINDS, LANE, NOBODYS, Lanes, Rows, integer  # type: ignore[import-not-found]

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from opfuse.kernels.sm90 import quantize_row_col, quantizer

UNTOUCHED = 0xA5
EXCHANGE, ATOMS = 4096, 1024
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    found = Lanes()
    for module in (quantize_row_col, quantizer):
        monkeypatch.setattr(module, "p", found)
        names = SimpleNamespace(max=np.maximum, min=np.minimum, Float32=np.float32)
        for name, value in (("cutlass", names), *((t, integer) for t in ("Int32", "Int64", "Uint32"))):
            monkeypatch.setattr(module, name, value)
    return found


def values(rows: int, columns: int, dtype: str, seed: int) -> torch.Tensor:
    """Numbers of all sizes, subnormals among them; NaN, infinities, and blocks of zeros along rows and columns."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-24, 12, (rows, columns), generator=g))
    x[: rows // 4] *= 2.0**-120
    x[:, 3], x[5] = 0, 0
    x[7, 9 % columns], x[rows - 1, columns - 1] = torch.inf, -torch.inf
    x[9, 40 % columns] = torch.nan
    return x.to(TYPES[dtype])


def run(lanes: Lanes, config: QuantizeConfig, x: torch.Tensor, norms: dict[str, float]) -> dict[str, np.ndarray]:
    """Codes and scale bytes by side, of every CTA and warp one after another."""
    rows, columns = x.shape
    sizes = scale_bytes(config, rows, columns)
    out: dict[str, np.ndarray] = {}
    sides: list[Any] = []
    for side in ("row", "col"):
        if side not in sizes:
            sides.append((None, None, None))
            continue
        out[side] = np.full((rows, columns), UNTOUCHED, np.uint8)
        out[f"sf_{side}"] = np.full(sizes[side], UNTOUCHED, np.uint8)
        norm = Rows(np.array([norms[side]], np.float32)) if side in norms else None
        sides.append((Rows(out[side], columns), Rows(out[f"sf_{side}"]), norm))
    given = Rows(x.view(torch.uint8).numpy().copy(), columns * x.itemsize, x.itemsize)
    for m in range(-(-rows // 128)):
        for n in range(-(-columns // 128)):
            lanes.shared[:] = NOBODYS
            tile = quantize_row_col.Tile(config, given, sides[0], sides[1], (m, n), integer(EXCHANGE), integer(ATOMS))
            for warp in range(8):
                own = EXCHANGE + warp * quantize_row_col.WARP_BYTES
                before = lanes.shared.copy()
                tile.codes(integer(warp))
                before[own : own + quantize_row_col.WARP_BYTES] = lanes.shared[own : own + quantize_row_col.WARP_BYTES]
                before[ATOMS : ATOMS + 1024] = lanes.shared[ATOMS : ATOMS + 1024]
                assert (before == lanes.shared).all(), "wrote outside its area"
            for warp in range(8):
                tile.scales(warp * 32 + LANE)
    return out


def expected(config: QuantizeConfig, x: torch.Tensor, norms: dict[str, float]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for side, dtype, swizzled in (
        ("row", config.q_row_dtype, config.row_swizzled), ("col", config.q_col_dtype, config.col_swizzled)
    ):  # fmt: skip
        if dtype is None:
            continue
        along = x.float() if side == "row" else x.float().T.contiguous()
        codes, scales = quantize_blocks(along, 32, KINDS[dtype], DataType.FP8_E8M0, norms.get(side, 1.0))
        out[side] = (codes if side == "row" else codes.T).numpy()
        stored = swizzle_scales(scales) if swizzled else scales if side == "row" else scales.T
        out[f"sf_{side}"] = stored.contiguous().view(-1).numpy()
    return out


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (QuantizeConfig(), (128, 128)),
        (QuantizeConfig(x_dtype="fp16", q_row_dtype="e5m2", row_swizzled=False), (192, 160)),
        (QuantizeConfig(x_dtype="fp32", q_col_dtype="e5m2", col_swizzled=False), (133, 72)),
        (QuantizeConfig(q_col_dtype=None, row_swizzled=False), (33, 264)),
        (QuantizeConfig(q_row_dtype=None, has_norm_col=True), (257, 40)),
        (QuantizeConfig(has_norm_row=True, has_norm_col=True, col_swizzled=False), (40, 136)),
        (QuantizeConfig(x_dtype="fp32", has_norm_row=True), (10, 48)),
    ],
)
def test_codes_and_scales_are_the_definitions(lanes: Lanes, config: QuantizeConfig, shape: tuple[int, int]) -> None:
    """Sizes that are no multiples of a block or an atom; every byte is written."""
    seed = random.randrange(2**31)
    norms = {side: factor for side, factor, given in (
        ("row", -2.75, config.has_norm_row), ("col", 3e30, config.has_norm_col)) if given}  # fmt: skip
    x = values(*shape, config.x_dtype, seed)
    with np.errstate(all="ignore"):
        out, wanted = run(lanes, config, x, norms), expected(config, x, norms)
    assert out.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_array_equal(out[name], want, err_msg=f"{name}, seed {seed}")
