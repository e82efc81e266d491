"""Configurations of the Hopper grouped GEMM that the GPU tests run: one or more for every option, and random ones.

Needs neither a GPU nor the DSL.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

from opfuse.kernels.sm90 import gemm_tune
from opfuse.kernels.sm90.config import Schedule
from opfuse.kernels.sm90.gemm_config import GemmConfig, illegal, smem_bytes

BASE = GemmConfig(schedule=gemm_tune.P192)
P128 = gemm_tune.P128
FP16 = replace(BASE, ab_dtype="fp16", y_dtype="fp16")


def largest() -> GemmConfig:
    """The legal configuration that takes most of a CTA's shared memory."""
    schedules = (
        replace(P128, tile_n=n, ab_stages=s, ring_chunks=r)
        for n, s, r in itertools.product((64, 128, 192), range(2, 9), (2, 4, 8))
    )
    configs = (replace(BASE, schedule=s) for s in schedules)
    return max((c for c in configs if not illegal(c)), key=smem_bytes)


CASES: dict[str, GemmConfig] = {
    "base": BASE,
    **{name: replace(BASE, schedule=schedule) for name, schedule in gemm_tune.SHIPPED.items() if name != "p192"},
    "p64": replace(BASE, schedule=Schedule(64, 256, True, 2, 1, 4, 2)),
    "p192_n": replace(BASE, schedule=Schedule(128, 192, True, 1, 2, 4, 4)),
    "c256x128": replace(BASE, schedule=Schedule(256, 128, False, 1, 2, 4, 2)),
    "c256x192": replace(BASE, schedule=Schedule(256, 192, False, 1, 1, 3, 2)),
    "no cluster": replace(BASE, schedule=Schedule(128, 128, True, 1, 1, 5, 2)),
    "deep ring": replace(BASE, schedule=replace(P128, ab_stages=3, ring_chunks=8, band=1)),
    "n-major": replace(BASE, b_major="n"),
    "n-major p128_n": replace(BASE, b_major="n", schedule=gemm_tune.P128_N),
    "discrete": replace(BASE, discrete_b=True),
    "discrete n-major": replace(BASE, discrete_b=True, b_major="n", schedule=P128),
    "alpha": replace(BASE, has_alpha=True),
    "alpha squared": replace(BASE, has_alpha=True, alpha_exponent=2),
    "bias": replace(BASE, bias_dtype="bf16", has_alpha=True),
    "bias fp16": replace(FP16, bias_dtype="fp16"),
    "bias fp32": replace(BASE, bias_dtype="fp32", schedule=gemm_tune.C256),
    "fp16": FP16,
    "mixed": replace(BASE, y_dtype="fp16"),
    "float": replace(BASE, y_dtype="fp32"),
    "float p128": replace(BASE, y_dtype="fp32", schedule=P128),
    "float c256": replace(BASE, y_dtype="fp32", schedule=gemm_tune.C256),
    "float bias": replace(FP16, y_dtype="fp32", bias_dtype="fp32", has_alpha=True),
    "largest": largest(),
}  # fmt: skip


def random_config(seed: int) -> GemmConfig:
    """A legal configuration; draws again until one is."""
    r = random.Random(seed)
    while True:
        pick = r.choice
        config = GemmConfig(
            ab_dtype=pick(["bf16", "bf16", "fp16"]), b_major=pick("kn"), discrete_b=r.random() < 0.25,
            y_dtype=pick(["bf16", "bf16", "fp16", "fp32"]), has_alpha=r.random() < 0.4, alpha_exponent=pick([1, 2]),
            bias_dtype=pick([None, None, "bf16", "fp16", "fp32"]), schedule=pick(list(gemm_tune.SHIPPED.values())),
        )  # fmt: skip
        if not illegal(config):
            return config


RANDOM = [random_config(seed) for seed in range(min(30, int(os.environ.get("OPFUSE_RANDOM_CONFIGS", "30"))))]
