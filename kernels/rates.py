"""What part of an architecture's dense rate grouped matmuls reach, as data. Imports no torch, needs no GPU.

A factor multiplies the time of a matmul's FLOPs at the dense rate. It depends on the depth K above all: what a kernel
does beside the products of a tile, or does not hide, is the same for every depth.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPED_MM_MAJOR = (9, 10)
"""Compute capabilities whose torch.grouped_mm reads offsets on the device; others read them on the host."""

Factors = tuple[tuple[int, float], ...]
"""(depth up to which it holds, factor), ascending; 1 beyond."""

GROUPED_MM: Mapping[str, Factors] = {
    # Measured on an H200, torch 2.11, 2026-11-30: the ten shapes of samples/shapes.json as fc1, fc2, dact and dx,
    # against a dense 8192^3 bf16 matmul in the same rounds. K = 256: 2.06; 512: 1.52; 768: 1.30 to 1.35; 1024: 1.29;
    # 1536: 1.11 to 1.27; 2048: 1.06 to 1.18; 2880: 1.05 to 1.14; 3072: 1.03; 4096 and more: 0.97 to 1.02.
    "sm90": (
        (383, 2.05), (639, 1.52), (895, 1.32), (1279, 1.28), (1791, 1.15), (2463, 1.12), (3071, 1.08), (3583, 1.03),
    ),
}  # fmt: skip
"""torch's grouped_mm by architecture; where it was not measured, it is taken to run at the dense rate."""

GROUPED_GEMM: Mapping[str, Factors] = {
    # Measured on an H200, 2026-11-30, the same ten shapes as fc2 and dx. K = 256: 1.18; 512 to 1024: 0.95 to 1.00; 1536
    # and more: 0.93 to 0.97, which counts as the dense rate.
    "sm90": ((383, 1.18),),
}
"""Our plain grouped GEMM."""

GROUPED_MM_WGRAD: Mapping[str, Factors] = {
    # Measured as GROUPED_MM, of the same shapes' dw1 and dw2, whose depth is the rows of an expert. 1024 rows: 1.23 to
    # 1.27; 2048: 1.05 to 1.22; 2560: 1.03 to 1.05; 3072: 1.04 to 1.09; 4096: 1.00 to 1.11.
    "sm90": ((1535, 1.25), (2303, 1.12), (3583, 1.05), (8191, 1.03)),
}
"""torch's grouped_mm as a weight gradient."""

GROUPED_WGRAD: Mapping[str, Factors] = {
    # Measured in the same rounds as torch's, 0.78 to 0.93 of its time. 1024 rows: 0.96 to 1.00; 2048: 0.93 to 1.01,
    # and 1.10 where N = 256; 2560 and 3072: 0.94 to 0.97; 4096: 0.93 to 1.00.
    "sm90": ((1535, 0.98), (8191, 0.96)),
}
"""Our grouped weight gradient."""


def factor(table: Mapping[str, Factors], arch: str, depth: int) -> float:
    """The factor at `depth` on an architecture; 1 where the table has none for it."""
    return next((value for limit, value in table.get(arch, ()) if depth <= limit), 1.0)
