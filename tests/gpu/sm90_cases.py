"""Configurations of the Hopper dGLU kernel that the GPU tests run: one or more for every option, and random ones.

Needs neither a GPU nor the DSL.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

from opfuse.kernels.sm90 import dglu_tune
from opfuse.kernels.sm90.config import Activation, Schedule
from opfuse.kernels.sm90.dglu_config import DgluConfig, illegal, smem_bytes

BASE = DgluConfig(has_prob=True, has_dprob=True, schedule=dglu_tune.P128)
ROW_COL = replace(BASE, q_row_dtype="e4m3", q_col_dtype="e4m3")
# Plain outputs take any split; swizzled scales need 128-row groups, plain column scales 32-row ones.
ANY = [[256, 512], [0, 1, 300, 0, 77, 640, 129, 0], [0, 0, 1000], [1, 1, 1], [700, 0, 0], [512, 256, 0]]
ALIGNED_32 = [[64, 0, 32, 96], [32, 320, 0]]
ALIGNED_128 = [[256, 0, 512, 128], [128, 384, 0, 0, 128]]
FIT = {"any": ANY, "32": ALIGNED_32, "128": ALIGNED_128}


def largest() -> DgluConfig:
    """The legal configuration that takes most of a CTA's shared memory."""
    stages, rings, tiles = range(2, 9), (2, 4, 8), (64, 96, 128, 160, 192)
    schedules = (
        replace(dglu_tune.P128, tile_n=n, ab_stages=s, ring_chunks=r)
        for n, s, r in itertools.product(tiles, stages, rings)
    )
    configs = (replace(BASE, dbias_dtype="fp32", schedule=s) for s in schedules)
    return max((c for c in configs if not illegal(c)), key=smem_bytes)


CASES: dict[str, DgluConfig] = {
    "base": BASE,
    "p192": replace(BASE, schedule=dglu_tune.P192),
    "p128_n": replace(BASE, schedule=dglu_tune.P128_N),
    "c256": replace(BASE, schedule=dglu_tune.C256),
    "c256x128": replace(BASE, schedule=Schedule(256, 128, False, 1, 2, 4, 2)),
    "p64x256": replace(BASE, schedule=Schedule(64, 256, True, 2, 1, 4, 4)),
    "no cluster": replace(BASE, schedule=Schedule(128, 128, True, 1, 1, 5, 4)),
    "plain": DgluConfig(schedule=dglu_tune.P128),
    "concatenated": replace(BASE, glu_layout="concatenated"),
    "interleaved1": replace(BASE, glu_layout="interleaved1"),
    "n-major": replace(BASE, b_major="n"),
    "discrete": replace(BASE, discrete_b=True),
    "discrete n-major": replace(BASE, discrete_b=True, b_major="n"),
    "geglu": replace(BASE, act=Activation("geglu")),
    "geglu other": replace(BASE, act=Activation("geglu", alpha=1.0, clamp_max=1.5, clamp_min=-0.5, offset=0.25)),
    "situglu": replace(BASE, act=Activation("situglu")),
    "situglu other": replace(BASE, act=Activation("situglu", beta1=1.25, beta2=2.0)),
    "alpha beta": replace(BASE, has_alpha=True, has_beta=True),
    "alpha once": replace(BASE, has_alpha=True, alpha_exponent=1),
    "recompute": replace(BASE, activation_dtype="bf16"),
    "recompute fp16": replace(BASE, activation_dtype="fp16", has_prob=False),
    "dbias": replace(BASE, dbias_dtype="fp32"),
    "dbias bf16 c256": replace(BASE, dbias_dtype="bf16", schedule=dglu_tune.C256),
    "amax": replace(BASE, has_amax=True),
    "amax c256": replace(BASE, has_amax=True, schedule=dglu_tune.C256),
    "fp16": replace(BASE, ab_dtype="fp16", c_dtype="fp16", d_dtype="fp16"),
    "mixed": replace(BASE, c_dtype="fp16", d_dtype="bf16", glu_layout="concatenated"),
    "c fp32": replace(BASE, c_dtype="fp32"),
    "c fp32 d fp16": replace(BASE, c_dtype="fp32", d_dtype="fp16", glu_layout="interleaved1"),
    "d fp32": replace(BASE, d_dtype="fp32"),
    "c d fp32": replace(BASE, c_dtype="fp32", d_dtype="fp32", glu_layout="interleaved1", schedule=dglu_tune.P96),
    "deterministic": replace(BASE, dbias_dtype="fp32", has_amax=True, deterministic=True),
    "row": replace(BASE, d_dtype="fp32", q_row_dtype="e4m3"),
    "row e5m2 plain": replace(BASE, d_dtype="fp32", q_row_dtype="e5m2", sf_swizzled=False, glu_layout="concatenated"),
    "col": replace(BASE, d_dtype="fp32", q_col_dtype="e4m3"),
    "row col": replace(ROW_COL, d_dtype="fp32"),
    "row col e5m2 plain": replace(
        BASE, d_dtype="fp32", q_row_dtype="e5m2", q_col_dtype="e5m2", sf_swizzled=False, glu_layout="concatenated",
    ),
    "codes alone": replace(ROW_COL, d_dtype=None),
    "codes and bf16 d": replace(ROW_COL),
    "largest": largest(),
    "everything": replace(
        ROW_COL, has_alpha=True, has_beta=True, dbias_dtype="fp32", has_amax=True, activation_dtype="bf16",
        schedule=dglu_tune.P96,
    ),
}  # fmt: skip


def splits(config: DgluConfig) -> list[list[int]]:
    """Rows by expert that the configuration's scales allow."""
    quantized = config.q_row_dtype or config.q_col_dtype
    if quantized and config.sf_swizzled:
        return FIT["128"]
    return FIT["32"] if config.q_col_dtype else FIT["any"]


def random_config(seed: int) -> DgluConfig:
    """A legal configuration; draws again until one is."""
    r = random.Random(seed)
    while True:
        quantized = r.random() < 0.3
        pick = r.choice
        config = DgluConfig(
            ab_dtype=pick(["bf16", "bf16", "fp16"]), b_major=pick("kn"), discrete_b=r.random() < 0.25,
            glu_layout=pick(["interleaved32", "concatenated", "interleaved1"]),
            act=Activation(
                pick(["swiglu", "geglu", "situglu"]), alpha=pick([1.0, 1.702]), clamp_max=pick([7.0, 1.5]),
                clamp_min=pick([-7.0, -0.5]), offset=pick([0.0, 1.0]), beta1=pick([4.0, 1.25]), beta2=pick([25.0, 2.0]),
            ),
            c_dtype=pick(["bf16", "bf16", "fp16", "fp32"]),
            d_dtype=pick(["bf16", "fp16", "fp32", *([None] if quantized else [])]),
            has_prob=r.random() < 0.7, has_alpha=r.random() < 0.4, alpha_exponent=pick([1, 2]),
            has_beta=r.random() < 0.4, has_dprob=r.random() < 0.7,
            activation_dtype=pick([None, "bf16", "fp16"]), dbias_dtype=pick([None, None, "bf16", "fp32"]),
            has_amax=r.random() < 0.3, q_row_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None,
            q_col_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None, sf_swizzled=r.random() < 0.7,
            deterministic=r.random() < 0.2, schedule=pick(list(dglu_tune.SHIPPED.values())),
        )  # fmt: skip
        if not illegal(config):
            return config


RANDOM = [random_config(seed) for seed in range(int(os.environ.get("OPFUSE_RANDOM_CONFIGS", "200")))]
"""200 take some 90 seconds of a 16-core machine to compile, once."""
