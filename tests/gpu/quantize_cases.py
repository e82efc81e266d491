"""Configurations of the Hopper quantize kernel that the GPU tests run, and how a launch is checked: bit for bit.

The configurations need neither a GPU nor the DSL.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.reference.layouts import swizzle_scales
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.sm90 import quantize_host
from opfuse.kernels.sm90.quantize_config import QuantizeConfig, scale_bytes, sides

BASE = QuantizeConfig()
CASES: dict[str, QuantizeConfig] = {
    "base": BASE,
    "plain": replace(BASE, row_swizzled=False, col_swizzled=False),
    "rows": replace(BASE, q_col_dtype=None),
    "columns": replace(BASE, q_row_dtype=None),
    "plain rows, e5m2": replace(BASE, q_row_dtype="e5m2", q_col_dtype=None, row_swizzled=False),
    "plain columns, e5m2": replace(BASE, q_row_dtype=None, q_col_dtype="e5m2", col_swizzled=False),
    "fp16, one side plain": replace(BASE, x_dtype="fp16", q_row_dtype="e5m2", row_swizzled=False),
    "fp32, the other plain": replace(BASE, x_dtype="fp32", q_col_dtype="e5m2", col_swizzled=False),
    "fp32 rows": replace(BASE, x_dtype="fp32", q_col_dtype=None),
    "fp32 columns": replace(BASE, x_dtype="fp32", q_row_dtype=None),
    "norm_const": replace(BASE, has_norm_row=True, has_norm_col=True),
    "norm_const of rows": replace(BASE, x_dtype="fp32", has_norm_row=True),
    "norm_const of columns, fp16": replace(BASE, x_dtype="fp16", has_norm_col=True),
}  # fmt: skip
SHAPES = ((128, 128), (384, 2048), (1, 8), (33, 264), (257, 40), (1000, 1544), (31, 4096), (4097, 128))
"""Rows and columns: whole atoms, less than a block, blocks and atoms that are not whole."""

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {"e4m3": DataType.FP8_E4M3, "e5m2": DataType.FP8_E5M2}
POISON, GUARD = 0xA5, 64


@functools.cache
def installed(config: QuantizeConfig) -> None:
    """`quantize_host.launch` uses what the kernel cache has."""
    from parallel_build import load  # type: ignore[import-not-found]

    quantize_host.FUNCTIONS.install(config, load(config))


def values(rows: int, columns: int, dtype: str, seed: int) -> torch.Tensor:
    """Unit-scale numbers beside others of all sizes, subnormals too; NaN, infinities, and blocks of zeros."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=g)
    some = torch.rand(rows, 1, device="cuda", generator=g) < 0.5
    x = torch.where(some, x, x * torch.exp2(torch.randint(-30, 12, x.shape, device="cuda", generator=g)))
    x[: rows // 8] *= 2.0**-122
    x[rows // 2 :: 5] = 0
    x[:, columns // 3 :: 7] = 0
    for _ in range(1 + rows * columns // 5000):
        at = [int(torch.randint(n, (1,), device="cuda", generator=g)) for n in (rows, columns)]
        x[at[0], at[1]] = [torch.nan, torch.inf, -torch.inf][at[1] % 3]
    return x.to(TYPES[dtype])


def buffers(config: QuantizeConfig, x: torch.Tensor, pitch: int | None = None) -> dict[str, Any]:
    """Poisoned outputs, `GUARD` bytes more of scales, and norm_const; codes with rows at multiples of `pitch`."""
    rows, columns = x.shape
    out: dict[str, Any] = {"x": x}
    for side, count in scale_bytes(config, rows, columns).items():
        wide = torch.full((rows, pitch or columns), POISON, dtype=torch.uint8, device="cuda")
        out[f"q_{side}"] = wide[:, :columns]
        out[f"sf_{side}"] = torch.full((count + GUARD,), POISON, dtype=torch.uint8, device="cuda")
    for side, factor, given in (("row", -2.75, config.has_norm_row), ("col", 1.5e-3, config.has_norm_col)):
        if given:
            out[f"norm_const_{side}"] = torch.tensor([factor], device="cuda")
    return out


def wrong(config: QuantizeConfig, t: dict[str, Any]) -> list[str]:
    """What differs from the definition, or was written outside."""
    found, x = [], t["x"]
    for side in sides(config):
        dtype, swizzled = (config.q_row_dtype, config.row_swizzled) if side == "row" else (
            config.q_col_dtype, config.col_swizzled)  # fmt: skip
        along = x.float() if side == "row" else x.float().T.contiguous()
        norm = t.get(f"norm_const_{side}", torch.ones(1, device=x.device))
        codes, scales = quantize_blocks(along, 32, CODES[str(dtype)], DataType.FP8_E8M0, norm)
        codes = codes if side == "row" else codes.T
        stored = swizzle_scales(scales) if swizzled else scales if side == "row" else scales.T
        if differing := int((t[f"q_{side}"] != codes).sum()):
            found.append(f"{differing} of {codes.numel()} codes of {side}")
        count = stored.numel()
        if differing := int((t[f"sf_{side}"][:count] != stored.reshape(-1)).sum()):
            found.append(f"{differing} of {count} scales of {side}")
        if not bool((t[f"sf_{side}"][count:] == POISON).all()):
            found.append(f"bytes behind the scales of {side}")
        base = t[f"q_{side}"]._base
        if base is not None and not bool((base[:, x.shape[1] :] == POISON).all()):
            found.append(f"bytes beside the codes of {side}")
    return found


def launch(config: QuantizeConfig, t: dict[str, Any]) -> None:
    installed(config)
    quantize_host.launch(config, **t)


def check(config: QuantizeConfig, rows: int, columns: int, seed: int, pitch: int = 0) -> None:
    """Runs one problem; raises AssertionError on any byte that is not the definition's. `pitch`: columns beside."""
    x = values(rows, columns + pitch, config.x_dtype, seed)[:, :columns]
    t = buffers(config, x, columns + pitch)
    launch(config, t)
    torch.cuda.synchronize()
    assert not (found := wrong(config, t)), f"{'; '.join(found)} ({config}, {rows} x {columns}, seed {seed})"
