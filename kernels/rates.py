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
    # Measured on an H200, torch 2.11, 2026-11-30: ten shapes of samples/shapes.json as fc1, fc2, dact and dx, against
    # a dense 8192^3 bf16 matmul in the same rounds. K = 256: 2.06; 512: 1.52; 768: 1.30 to 1.35; 1024: 1.29; 1536:
    # 1.11 to 1.27; 2048: 1.06 to 1.18; 2880: 1.05 to 1.14; 3072: 1.03; 4096 and more: 0.97 to 1.02.
    "sm90": (
        (383, 2.05), (639, 1.52), (895, 1.32), (1279, 1.28), (1791, 1.15), (2463, 1.12), (3071, 1.08), (3583, 1.03),
    ),
}  # fmt: skip
"""torch's grouped_mm by architecture; where it was not measured, it is taken to run at the dense rate."""

GROUPED_GEMM: Mapping[str, Factors] = {
    # Not measured yet: placeholders. The forward kernel, whose mainloop this is, takes 0.95 to 0.98 of the dense rate's
    # time at K = 2048 and more and 1.02 at 1536 (kernels/sm90/NOTES.md); the shallower ones are guesses.
    "sm90": ((383, 1.30), (639, 1.15), (895, 1.08), (1279, 1.04), (1791, 1.02)),
}
"""Our plain grouped GEMM."""

GROUPED_MM_WGRAD: Mapping[str, Factors] = {
    # Measured as GROUPED_MM, of the same shapes' dw1 and dw2, whose depth is the rows of an expert. 1024 rows: 1.23 to
    # 1.27; 2048: 1.05 to 1.22; 2560: 1.03 to 1.05; 3072: 1.04 to 1.09; 4096: 1.00 to 1.11.
    "sm90": ((1535, 1.25), (2303, 1.12), (3583, 1.05), (8191, 1.03)),
}
"""torch's grouped_mm as a weight gradient."""

GROUPED_WGRAD: Mapping[str, Factors] = {
    # Not measured yet: placeholders.
    "sm90": ((1535, 1.10), (2303, 1.04), (3583, 1.02), (8191, 1.01)),
}
"""Our grouped weight gradient."""


def factor(table: Mapping[str, Factors], arch: str, depth: int) -> float:
    """The factor at `depth` on an architecture; 1 where the table has none for it."""
    return next((value for limit, value in table.get(arch, ()) if depth <= limit), 1.0)
