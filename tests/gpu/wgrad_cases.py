"""Configurations of the Hopper weight gradient that the GPU tests run: one or more for every option, and random ones.

Needs neither a GPU nor the DSL.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

from opfuse.kernels.sm90 import wgrad_tune
from opfuse.kernels.sm90.config import Schedule
from opfuse.kernels.sm90.wgrad_config import WgradConfig, illegal, smem_bytes

BASE = WgradConfig(schedule=wgrad_tune.P192)
P128 = wgrad_tune.P128
C256_M = Schedule(256, 128, False, 1, 2, 4, 2, 8)


def largest() -> WgradConfig:
    """The legal configuration that takes most of a CTA's shared memory."""
    schedules = (
        replace(P128, tile_n=n, ab_stages=s, ring_chunks=r)
        for n, s, r in itertools.product((64, 128, 192), range(2, 9), (2, 4, 8))
    )
    return max((c for s in schedules if not illegal(c := replace(BASE, schedule=s))), key=smem_bytes)


CASES: dict[str, WgradConfig] = {
    "base": BASE,
    "p128": replace(BASE, schedule=P128),
    "p128_n": replace(BASE, schedule=wgrad_tune.P128_N),
    "c256": replace(BASE, schedule=wgrad_tune.C256),
    "c256_m": replace(BASE, schedule=C256_M),
    "p64": replace(BASE, schedule=Schedule(64, 256, True, 2, 1, 4, 2)),
    "narrow": replace(BASE, schedule=Schedule(128, 64, True, 1, 2, 4, 4, 16)),
    "no cluster": replace(BASE, schedule=Schedule(128, 128, True, 1, 1, 5, 2)),
    "cooperative, no cluster": replace(BASE, schedule=Schedule(128, 128, False, 1, 1, 3, 8)),
    "two stages": replace(BASE, schedule=replace(P128, ab_stages=2, band=3)),
    "fp16": replace(BASE, ab_dtype="fp16", dw_dtype="fp16"),
    "fp16 to bf16": replace(BASE, ab_dtype="fp16"),
    "fp32": replace(BASE, dw_dtype="fp32"),
    "fp32 c256": replace(BASE, dw_dtype="fp32", schedule=wgrad_tune.C256),
    "accumulate": replace(BASE, dw_dtype="fp32", accumulate=True),
    "accumulate c256_m": replace(BASE, dw_dtype="fp32", accumulate=True, schedule=C256_M),
    "largest": largest(),
}


def random_config(seed: int) -> WgradConfig:
    """A legal configuration; draws again until one is."""
    r = random.Random(seed)
    while True:
        pick = r.choice
        schedule = pick(list(wgrad_tune.SHIPPED.values()))
        if r.random() < 0.5:
            schedule = Schedule(
                tile_m=pick([64, 128, 256]), tile_n=pick([64, 128, 192, 256]), pingpong=pick([False, True]),
                cluster_m=pick([1, 2]), cluster_n=pick([1, 2]), ab_stages=pick([2, 3, 4, 5]), ring_chunks=pick([2, 4]),
                band=pick([1, 3, 8]),
            )  # fmt: skip
        config = WgradConfig(
            pick(["bf16", "bf16", "fp16"]), pick(["bf16", "fp16", "fp32"]), r.random() < 0.3, schedule
        )  # fmt: skip
        if not illegal(config):
            return config


RANDOM = [random_config(seed) for seed in range(min(30, int(os.environ.get("OPFUSE_RANDOM_CONFIGS", "200"))))]
