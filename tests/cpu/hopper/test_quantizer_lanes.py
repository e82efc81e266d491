"""The quantizer's program for a warp, run on 32 numpy lanes, against the reference quantizer, bit for bit.

What the GPU alone can show stays with tests/gpu: that warps and the TMA wait for one another.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.sm90.dglu_config import DgluConfig
from warp_lanes import KINDS, LANE, NOBODYS, Lanes, Rows, integer  # type: ignore[import-not-found]

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from opfuse.kernels.sm90 import dglu_host, quantizer, reductions, stores

UNTOUCHED = 0xA5
# Bits of block maxima: around 1.75 * 2**e in the middle of the range, at its ends and in the subnormals; infinity, NaN.
EDGES = [
    0, 1, 0x007FFFFF, 0x00800000, 0x04600000, 0x04600001, 0x04600002, 0x07E00000, 0x07E00001, 0x07E00002, 0x3FDFFFFF,
    0x3FE00000, 0x3FE00001, 0x43E00000, 0x43E00001, 0x7F5FFFFF, 0x7F600000, 0x7F600001, 0x7F7FFFFF, 0x7F800000,
    0x7F800001, 0x7FFFFFFF,
]  # fmt: skip


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    found = Lanes()
    for name, value in (
        ("p", found),
        ("cutlass", SimpleNamespace(max=np.maximum)),
        *((t, integer) for t in ("Int32", "Int64", "Uint32")),
    ):
        monkeypatch.setattr(quantizer, name, value)
    return found


def gradient(rows: int, columns: int, seed: int) -> np.ndarray:
    """Normal numbers of all sizes; rows 8 and on have each edge as their maximum, some columns NaN, infinity, zero."""
    g = np.random.default_rng(seed)
    x = (g.standard_normal((rows, columns)) * np.exp2(g.integers(-20, 20, (rows, columns)))).astype(np.float32)
    for row, edge in enumerate(EDGES, 8):
        value = np.array(edge, np.uint32).view(np.float32)
        x[row] = np.where(np.abs(x[row]) < value, x[row], 0)
        x[row, row % 32 :: 32] = -value
    x[:, 5], x[40:, 9], x[50, 33], x[70, 34], x[71, 34] = 0, 0, np.nan, np.inf, -np.inf
    x[96:], x[100:112] = x[96:] * np.float32(2.0**-130), x[100:112] * np.float32(2.0**-10)
    return x


def run(lanes: Lanes, config: DgluConfig, x: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """Codes and scale bytes by side; rows from `end` on are another expert's."""
    rows, n = x.shape[0], x.shape[1] // 2
    blocks = 2 if config.q_col_dtype else 1
    sizes = dglu_host.scale_bytes(config, rows, n)
    out = {s: np.full((rows, 2 * n), UNTOUCHED, np.uint8) for s in ("row", "col")}
    out |= {f"sf_{s}": np.full(sizes[s], UNTOUCHED, np.uint8) for s in ("row", "col")}
    tensors = [Rows(out[k], p) for k, p in (("row", 2 * n), ("sf_row", 0), ("col", 2 * n), ("sf_col", 0))]
    q = quantizer.Quantizer(config, n, rows, *tensors)
    for row in range(0, end, 16 * blocks):
        warp = row // 16 % 4
        pieces = [stores.Ring(config.glu_layout, warp, LANE).pieces(8192 * (1 + b)) for b in range(blocks)]
        free = np.ones(lanes.shared.size, bool)
        free[np.concatenate([np.arange(at, at + stores.PIECE_BYTES) for piece in pieces for at in piece])] = False
        for n0 in range(0, n, 32):
            lanes.shared[:] = NOBODYS
            left: list[np.ndarray] = []
            q.run(values_of(config, x, row, n0, blocks), pieces, integer(row), end, integer(n0),
                  lambda left=left: left.append(lanes.shared.copy()))  # fmt: skip
            assert (lanes.shared[free] == NOBODYS).all(), "wrote outside its pieces"
            assert len(left) == 1 and (left[0] == lanes.shared).all(), "uses its pieces after it gave them back"
    return out


def values_of(config: DgluConfig, x: np.ndarray, row: int, n0: int, blocks: int) -> list[list[list[np.ndarray]]]:
    """The accumulator layout: [block][side][2*j + i + 8*r], a row of NaN where there is none."""
    n, padded = x.shape[1] // 2, np.concatenate([x, np.full((32, x.shape[1]), np.nan, np.float32)])

    def value(block: int, side: int, r: int, j: int, i: int) -> np.ndarray:
        column = reductions.column_of(config.glu_layout, n0 + 8 * j + 2 * (LANE % 4) + i, side, n)
        return padded[row + 16 * block + 8 * r + LANE // 4, column]

    return [
        [[value(b, side, r, j, i) for r in (0, 1) for j in range(4) for i in (0, 1)] for side in (0, 1)]
        for b in range(blocks)
    ]


def unswizzled(flat: np.ndarray, swizzled: bool, rows: int, blocks: int) -> np.ndarray:
    if not swizzled:
        return flat.reshape(rows, blocks)
    r, k = np.meshgrid(np.arange(rows), np.arange(blocks), indexing="ij")
    return flat[(r // 128 * -(-blocks // 4) + k // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4]


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize(
    ("layout", "row", "col", "end"),
    [
        ("interleaved32", "e4m3", "e4m3", 128),
        ("concatenated", "e5m2", "e4m3", 96),
        ("interleaved32", None, "e5m2", 128),
        ("interleaved32", "e5m2", None, 117),
        ("concatenated", "e4m3", None, 93),
    ],
)
def test_codes_and_scales_are_the_definitions(
    lanes: Lanes, layout: str, row: str | None, col: str | None, end: int, swizzled: bool
) -> None:
    seed = random.randrange(2**31)
    x = gradient(128, 192, seed)
    config = DgluConfig(glu_layout=layout, d_dtype=None, q_row_dtype=row, q_col_dtype=col, sf_swizzled=swizzled)
    with np.errstate(all="ignore"):
        out = run(lanes, config, x, end)
    for side, dtype in (("row", row), ("col", col)):
        if dtype is None:
            continue
        axis: Any = (lambda t: t) if side == "row" else (lambda t: t.T)
        inner = torch.from_numpy(np.ascontiguousarray(axis(x[:end])))
        codes, scales = quantize_blocks(inner, 32, KINDS[dtype], DataType.FP8_E8M0)
        got = out[side]
        np.testing.assert_array_equal(got[:end], axis(codes.numpy()), err_msg=f"{side} codes, seed {seed}")
        assert (got[end:] == UNTOUCHED).all(), f"{side} codes past the expert's rows, seed {seed}"
        if side == "row":
            stored = unswizzled(out["sf_row"], swizzled, 128, 6)
            used, rest = stored[:end], stored[end:]
        elif swizzled:
            stored = unswizzled(out["sf_col"], True, 192, 4)
            used, rest = stored[:, : end // 32], stored[:, end // 32 :]
        else:
            stored = out["sf_col"].reshape(4, 192).T
            used, rest = stored[:, : end // 32], stored[:, end // 32 :]
        np.testing.assert_array_equal(used, scales.numpy(), err_msg=f"{side} scales, seed {seed}")
        assert (rest == UNTOUCHED).all(), f"{side} scales past the expert's rows, seed {seed}"


@pytest.mark.parametrize("dtype", KINDS)
def test_scales_of_every_exponent(lanes: Lanes, dtype: str) -> None:
    """The byte, and a reciprocal that is exactly its inverse, for maxima around each exponent's 1.0 and 1.75."""
    near = [m + d for m in (0, 0x600000, 0x7FFFFF) for d in (-2, -1, 0, 1, 2)]
    words = np.array(sorted({max(0, (e << 23) + m) for e in range(255) for m in near}))
    words = np.append(words[words < 0x7F800000], [0x7F800000, 0x7FC00000, 0x7FFFFFFF])
    blocks = np.zeros((words.size, 32), np.float32)
    blocks[:, 3] = words.astype(np.uint32).view(np.float32)
    _, want = quantize_blocks(torch.from_numpy(blocks), 32, KINDS[dtype], DataType.FP8_E8M0)
    byte, factor = quantizer.scale_of(words, dtype)
    np.testing.assert_array_equal(byte, want.numpy()[:, 0])
    inverse = factor.astype(np.uint32).view(np.float32)
    finite = byte < 255
    np.testing.assert_array_equal(inverse[finite], np.exp2(127.0 - byte[finite]))
    assert np.isnan(inverse[~finite]).all() and (~finite).sum() == 2
