"""Problems, a float64 oracle and checks for the tests of the Hopper grouped GEMM."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from harness import LIMITS, POISON, TORCH, pick, relative  # type: ignore[import-not-found]
from opfuse.kernels.sm90 import gemm_host
from opfuse.kernels.sm90.gemm_config import GemmConfig
from parallel_build import load  # type: ignore[import-not-found]


@functools.cache
def installed(config: GemmConfig) -> None:
    """`gemm_host.launch` uses what the kernel cache has."""
    gemm_host.FUNCTIONS.install(config, load(config))


def launch(config: GemmConfig, tensors: dict) -> None:
    """Runs the kernel on what `make` made."""
    installed(config)
    gemm_host.launch(config, **{name: x for name, x in tensors.items() if name != "_keep"})


def make(config: GemmConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict:
    """Inputs and a poisoned output: `sizes` rows per expert and `tail` rows past the last offset, NaN in the inputs."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator(device="cuda").manual_seed(seed)
    L, M = len(sizes), sum(sizes) + tail
    ab = TORCH[config.ab_dtype]

    def randn(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=gc) * scale).to(dtype)

    b = randn(*((L, N, K) if config.b_major == "k" else (L, K, N)), dtype=ab, scale=K**-0.5)
    dense = b.transpose(1, 2) if config.b_major == "k" else b
    out = {"a": randn(M, K, dtype=ab), "b": dense, "offsets": torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()}
    if config.discrete_b:
        parts = [one.clone() for one in b]
        out["b"] = torch.tensor([one.data_ptr() for one in parts], dtype=torch.int64).cuda()
        out["_keep"] = {"parts": parts, "dense": dense}
        size = gemm_host.workspace_bytes(config, L)
        out["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    out["y"] = torch.full((M, N), POISON, device="cuda", dtype=TORCH[config.y_dtype])
    if tail:
        out["a"][-tail:] = float("nan")
    if config.has_alpha:
        out["alpha"] = pick(g, [-1.5, 0.5, 2.0], L)
    if config.bias_dtype:
        out["bias"] = randn(L, N, dtype=TORCH[config.bias_dtype])
    return out


def oracle(config: GemmConfig, t: dict) -> np.ndarray:
    """y in float64, unrounded, for the rows that belong to an expert."""
    ends = t["offsets"].tolist()
    dense = t["_keep"]["dense"] if config.discrete_b else t["b"]
    y = torch.zeros(ends[-1], dense.shape[2], dtype=torch.float64, device="cuda")
    for g, (s, e) in enumerate(zip([0, *ends[:-1]], ends)):
        if e > s:
            product = t["a"][s:e].double() @ dense[g].double()
            if config.has_alpha:
                product *= float(t["alpha"][g]) ** config.alpha_exponent
            y[s:e] = product + t["bias"][g].double() if config.bias_dtype else product
    return y.cpu().numpy()


def check(config: GemmConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict[str, float]:
    """Runs one problem and returns y's relative error, and the largest of one element beside the largest magnitude;
    raises AssertionError on a wrong one."""
    t = make(config, sizes, K, N, tail, seed)
    launch(config, t)
    torch.cuda.synchronize()
    ref, total, bad = oracle(config, t), sum(sizes), []
    errors = {"y": relative(t["y"][:total], ref)}
    largest = float(np.abs(ref).max(initial=1e-30))
    errors["worst"] = float(np.abs(t["y"][:total].double().cpu().numpy() - ref).max(initial=0.0)) / largest
    # Of one element twice what the norm may have: a value of the largest magnitude rounds by half a step.
    for name, limit in (("y", LIMITS[config.y_dtype]), ("worst", 2 * LIMITS[config.y_dtype])):
        if not errors[name] <= limit:
            bad.append(f"{name} {errors[name]:.2e} > {limit:.0e}")
    if not bool((t["y"][total:] == 0).all()):
        bad.append("y is not zero past the last offset")
    assert not bad, f"{'; '.join(bad)} ({dataclasses.asdict(config)}, sizes {sizes}, K {K}, N {N}, seed {seed})"
    return errors
