"""Configurations of the Hopper forward kernel that the GPU tests run: one or more for every option, and random ones.

Needs neither a GPU nor the DSL.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

from opfuse.kernels.sm90 import glu_tune
from opfuse.kernels.sm90.config import Activation, Schedule
from opfuse.kernels.sm90.glu_config import GluConfig, illegal, quantizes, smem_bytes

BASE = GluConfig(product_dtype="bf16", h_dtype="bf16", has_prob=True, schedule=glu_tune.P192)
CONCATENATED = replace(BASE, glu_layout="concatenated")
CODES = replace(BASE, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3", schedule=glu_tune.P128)
P128, P128_N = glu_tune.P128, glu_tune.P128_N


def largest() -> GluConfig:
    """The legal configuration that takes most of a CTA's shared memory."""
    schedules = (
        replace(P128, tile_n=n, ab_stages=s, ring_chunks=r)
        for n, s, r in itertools.product((64, 128, 192), range(2, 9), (2, 4, 8))
    )
    configs = (replace(BASE, schedule=s) for s in schedules)
    return max((c for c in configs if not illegal(c)), key=smem_bytes)


CASES: dict[str, GluConfig] = {
    "base": BASE,
    "p128": replace(BASE, schedule=P128),
    "p128_n": replace(BASE, schedule=P128_N),
    "c256": replace(BASE, schedule=glu_tune.C256),
    "p64": replace(BASE, schedule=Schedule(64, 256, True, 2, 1, 4, 2)),
    "c256x128": replace(BASE, schedule=Schedule(256, 128, False, 1, 2, 3, 2)),
    "no cluster": replace(BASE, schedule=Schedule(128, 128, True, 1, 1, 5, 2)),
    "deep ring": replace(BASE, h_dtype=None, schedule=replace(P128, ring_chunks=8)),
    "activation alone": GluConfig(schedule=glu_tune.P192),
    "rounded, not written": replace(BASE, h_dtype=None),
    "written, not rounded": replace(BASE, product_dtype=None),
    "concatenated": CONCATENATED,
    "concatenated p128_n": replace(CONCATENATED, schedule=P128_N),
    "concatenated no cluster": replace(CONCATENATED, schedule=Schedule(128, 128, True, 1, 1, 5, 2)),
    "concatenated n-major": replace(CONCATENATED, b_major="n"),
    "concatenated n-major p128": replace(CONCATENATED, b_major="n", schedule=P128),
    "concatenated discrete": replace(CONCATENATED, discrete_b=True),
    "apart": replace(CONCATENATED, separate_up=True),
    "apart p128": replace(CONCATENATED, separate_up=True, schedule=P128),
    "apart c256": replace(CONCATENATED, separate_up=True, schedule=glu_tune.C256),
    "apart no cluster": replace(CONCATENATED, separate_up=True, schedule=Schedule(128, 128, True, 1, 1, 5, 2)),
    "apart n-major": replace(CONCATENATED, separate_up=True, b_major="n"),
    "apart n-major p128_n": replace(CONCATENATED, separate_up=True, b_major="n", schedule=P128_N),
    "apart activation alone": GluConfig(glu_layout="concatenated", separate_up=True, schedule=P128),
    "interleaved1": replace(BASE, glu_layout="interleaved1"),
    "interleaved1 c256": replace(BASE, glu_layout="interleaved1", schedule=glu_tune.C256),
    "n-major": replace(BASE, b_major="n"),
    "discrete": replace(BASE, discrete_b=True),
    "discrete n-major": replace(BASE, discrete_b=True, b_major="n"),
    "geglu": replace(BASE, act=Activation("geglu")),
    "geglu other": replace(BASE, act=Activation("geglu", alpha=1.0, clamp_max=1.5, clamp_min=-0.5, offset=0.25)),
    "situglu": replace(BASE, act=Activation("situglu")),
    "situglu other": replace(BASE, act=Activation("situglu", beta1=1.25, beta2=2.0), glu_layout="interleaved1"),
    "alpha": replace(BASE, has_alpha=True),
    "alpha squared": replace(BASE, has_alpha=True, alpha_exponent=2),
    "bias": replace(BASE, bias_dtype="bf16", has_alpha=True, schedule=P128),
    "bias fp16 concatenated": replace(CONCATENATED, bias_dtype="fp16", schedule=P128),
    "bias fp32 interleaved1": replace(BASE, bias_dtype="fp32", glu_layout="interleaved1", schedule=P128),
    "fp16": replace(BASE, ab_dtype="fp16", product_dtype="fp16", h_dtype="fp16", d_dtype="fp16"),
    "mixed": replace(BASE, product_dtype="fp16", h_dtype="fp16"),
    "codes": CODES,
    "codes and d, of d": replace(CODES, d_dtype="bf16", source_dtype="bf16"),
    "codes and d, of FLOAT": replace(CODES, d_dtype="bf16"),
    "codes of fp16, plain, concatenated": replace(
        CODES, d_dtype="fp16", source_dtype="fp16", sf_swizzled=False, glu_layout="concatenated", h_dtype=None,
    ),
    "codes of rows and d": replace(CODES, q_col_dtype=None, d_dtype="bf16", source_dtype="bf16"),
    "codes of rows, e5m2, plain": replace(CODES, q_row_dtype="e5m2", q_col_dtype=None, sf_swizzled=False),
    "codes of rows, c256": replace(CODES, q_col_dtype=None, d_dtype="bf16", source_dtype="bf16", h_dtype=None,
                                   schedule=glu_tune.C256),
    "codes of rows, p128_n": replace(CODES, q_col_dtype=None, schedule=glu_tune.P128_N),
    "codes of columns, e5m2": replace(CODES, q_row_dtype=None, q_col_dtype="e5m2", d_dtype="bf16", source_dtype="bf16"),
    "codes, discrete n-major": replace(CODES, discrete_b=True, b_major="n"),
    "codes and d, concatenated": replace(CODES, d_dtype="bf16", source_dtype="bf16", glu_layout="concatenated"),
    "codes and d, deep ring": replace(CODES, d_dtype="bf16", source_dtype="bf16",
                                      schedule=replace(glu_tune.P128, ab_stages=3, ring_chunks=4)),
    "codes, apart": replace(CODES, separate_up=True, glu_layout="concatenated"),
    "codes, bias, alpha": replace(CODES, bias_dtype="bf16", has_alpha=True, act=Activation("geglu")),
    "codes alone": replace(CODES, h_dtype=None, product_dtype=None, has_prob=False, act=Activation("situglu")),
    "largest": largest(),
}  # fmt: skip


def random_config(seed: int) -> GluConfig:
    """A legal configuration; draws again until one is."""
    r = random.Random(seed)
    coded = r.random() < 0.4  # once: fewer of these are legal
    while True:
        pick = r.choice
        config = GluConfig(
            ab_dtype=pick(["bf16", "bf16", "fp16"]), b_major=pick("kn"), discrete_b=r.random() < 0.25,
            glu_layout=pick(["interleaved32", "concatenated", "interleaved1"]),
            act=Activation(pick(["swiglu", "geglu", "situglu"]), alpha=pick([1.0, 1.702]), offset=pick([0.0, 1.0])),
            product_dtype=pick([None, "bf16", "fp16"]), h_dtype=pick([None, "bf16", "fp16"]),
            d_dtype=pick(["bf16", "fp16", *([None] if coded else [])]), has_prob=r.random() < 0.7,
            has_alpha=r.random() < 0.4, alpha_exponent=pick([1, 2]),
            bias_dtype=pick([None, None, "bf16", "fp16", "fp32"]),
            q_row_dtype=pick([None, "e4m3", "e5m2"]) if coded else None,
            q_col_dtype=pick([None, "e4m3", "e5m2"]) if coded else None,
            sf_swizzled=not coded or r.random() < 0.7, schedule=pick(list(glu_tune.SHIPPED.values())),
        )  # fmt: skip
        if quantizes(config) and r.random() < 0.6:
            config = replace(config, source_dtype=config.d_dtype or pick(["bf16", "fp16"]))
        if config.glu_layout == "concatenated" and not config.discrete_b and r.random() < 0.5:
            config = replace(config, separate_up=True)
        if not illegal(config):
            return config


RANDOM = [random_config(seed) for seed in range(min(30, int(os.environ.get("OPFUSE_RANDOM_CONFIGS", "200"))))]
