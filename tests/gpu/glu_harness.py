"""Problems, a float64 oracle and checks for the tests of the Hopper forward kernel, grouped GEMM + GLU."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from harness import LIMITS, POISON, TORCH, check_quantized, pick, relative, split_columns  # type: ignore[import-not-found]
from opfuse.kernels.sm90 import glu_host
from opfuse.kernels.sm90.epilogue_math import NumpyMath
from opfuse.kernels.sm90.glu_config import GluConfig, scale_bytes
from opfuse.kernels.sm90.glu_math import glu
from parallel_build import load  # type: ignore[import-not-found]


@functools.cache
def installed(config: GluConfig) -> None:
    """`glu_host.launch` uses what the kernel cache has."""
    glu_host.FUNCTIONS.install(config, load(config))


def launch(config: GluConfig, tensors: dict) -> None:
    """Runs the kernel on what `make` made."""
    installed(config)
    glu_host.launch(config, **{name: x for name, x in tensors.items() if name != "_keep"})


def make(config: GluConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict:
    """Inputs and poisoned outputs: `sizes` rows per expert and `tail` rows past the last offset, NaN in the inputs."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator(device="cuda").manual_seed(seed)
    L, M = len(sizes), sum(sizes) + tail
    ab = TORCH[config.ab_dtype]

    def randn(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=gc) * scale).to(dtype)

    def poisoned(*shape, dtype):
        return torch.full(shape, POISON, device="cuda", dtype=dtype)

    # Products of scale 2: gates of both signs, some of them saturated, and some beyond small clamps.
    shape = (L, 2 * N, K) if config.b_major == "k" else (L, K, 2 * N)
    b = randn(*shape, dtype=ab, scale=2.0 * K**-0.5)
    dense = b.transpose(1, 2) if config.b_major == "k" else b
    out = {"x": randn(M, K, dtype=ab), "b": dense, "offsets": torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()}
    if config.separate_up:
        gate, up = b.chunk(2, 1 if config.b_major == "k" else 2)
        for name, half in (("b", gate.contiguous()), ("b_up", up.contiguous())):
            out[name] = half.transpose(1, 2) if config.b_major == "k" else half
    if config.discrete_b:
        parts = [one.clone() for one in b]
        out["b"] = torch.tensor([one.data_ptr() for one in parts], dtype=torch.int64).cuda()
        out["_keep"] = {"parts": parts, "dense": dense}
    if config.h_dtype:
        out["h"] = poisoned(M, 2 * N, dtype=TORCH[config.h_dtype])
    if config.d_dtype:
        out["d"] = poisoned(M, N, dtype=TORCH[config.d_dtype])
    for side, count in scale_bytes(config, M, N).items():
        out[f"q_{side}"] = torch.full((M, N), 0xA5, dtype=torch.uint8, device="cuda")
        # Padding scales are the caller's to zero; 0xA5 behind the end guards the buffer.
        out[f"sf_{side}"] = torch.full((count + 256,), 0xA5, dtype=torch.uint8, device="cuda")
        out[f"sf_{side}"][:count] = 0
    if config.has_prob:
        out["prob"] = pick(g, [-1.5, 0.5, 2.0, 0.0, 0.75], M)
    for name in ("x", "prob"):
        if name in out and tail:
            out[name][-tail:] = float("nan")
    if config.has_alpha:
        out["alpha"] = pick(g, [-1.5, 0.5, 2.0], L)
    if config.bias_dtype:
        out["bias"] = randn(L, 2 * N, dtype=TORCH[config.bias_dtype])
    if config.discrete_b:
        size = glu_host.workspace_bytes(config, L)
        out["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    return out


def oracle(config: GluConfig, t: dict) -> dict[str, np.ndarray]:
    """h in float64, and d of h as it rounds before the activation, for the rows that belong to an expert."""
    ends = t["offsets"].tolist()
    dense = t["_keep"]["dense"] if config.discrete_b else t["b"]
    if config.separate_up:
        dense = torch.cat([t["b"], t["b_up"]], 2)
    h = torch.zeros(ends[-1], dense.shape[2], dtype=torch.float64, device="cuda")
    for g, (s, e) in enumerate(zip([0, *ends[:-1]], ends)):
        if e > s:
            product = t["x"][s:e].double() @ dense[g].double()
            if config.has_alpha:
                product *= float(t["alpha"][g]) ** config.alpha_exponent
            h[s:e] = product + t["bias"][g].double() if config.bias_dtype else product
    read = h.to(TORCH[config.product_dtype]).double() if config.product_dtype else h
    gate, up = split_columns(read.cpu().numpy(), config.glu_layout)
    y = glu(gate, up, config.act, NumpyMath())
    if config.has_prob:
        y = y * t["prob"][: ends[-1]].double().cpu().numpy()[:, None]
    return {"h": h.cpu().numpy(), "d": y}


# Of the elements of d, those that may differ from the oracle's once both are rounded: where h rounds the other way in
# float32 than in float64, or an approximate exp tips d. An activation that reads h in the wrong type differs in 30 %.
DIFFERING = 0.05


def check(config: GluConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict[str, float]:
    """Runs one problem and returns the relative error of every output; raises AssertionError on a wrong one."""
    t = make(config, sizes, K, N, tail, seed)
    launch(config, t)
    torch.cuda.synchronize()
    ref, total, errors, bad = oracle(config, t), sum(sizes), {}, []
    for name, kind in (("h", config.h_dtype), ("d", config.d_dtype)):
        if kind is None:
            continue
        errors[name] = relative(t[name][:total], ref[name])
        if not errors[name] <= LIMITS[kind]:
            bad.append(f"{name} {errors[name]:.2e} > {LIMITS[kind]:.0e}")
        if not bool((t[name][total:] == 0).all()):
            bad.append(f"{name} is not zero past the last offset")
    for side, dtype in (("row", config.q_row_dtype), ("col", config.q_col_dtype)):
        if dtype and total:
            exact = t["d"][:total] if config.d_dtype and config.source_dtype else None
            check_quantized(config, t, side, dtype, total, ref["d"], errors, bad, exact)
    if total and config.d_dtype:
        rounded = torch.from_numpy(ref["d"]).cuda().to(TORCH[config.d_dtype])
        errors["differing"] = float((t["d"][:total] != rounded).double().mean())
        if errors["differing"] > DIFFERING:
            bad.append(f"{errors['differing']:.1%} of d differ from the rounded oracle")
    assert not bad, f"{'; '.join(bad)} ({dataclasses.asdict(config)}, sizes {sizes}, K {K}, N {N}, seed {seed})"
    return errors
