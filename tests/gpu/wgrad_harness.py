"""Problems, a float64 oracle and checks for the tests of the Hopper weight gradient."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from harness import LIMITS, POISON, TORCH, relative  # type: ignore[import-not-found]
from opfuse.kernels.sm90 import wgrad_host
from opfuse.kernels.sm90.wgrad_config import WgradConfig
from parallel_build import load  # type: ignore[import-not-found]


@functools.cache
def installed(config: WgradConfig) -> None:
    """`wgrad_host.launch` uses what the kernel cache has."""
    wgrad_host.FUNCTIONS.install(config, load(config))


def launch(config: WgradConfig, tensors: dict) -> None:
    """Runs the kernel on what `make` made."""
    installed(config)
    wgrad_host.launch(config, **tensors)


def make(config: WgradConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict:
    """Inputs and a poisoned dw, or one of old values to add to: `sizes` rows per expert and `tail` rows past the last
    offset, NaN in the inputs. Products are of scale 1."""
    gc = torch.Generator(device="cuda").manual_seed(seed)
    L, M = len(sizes), sum(sizes) + tail

    def randn(*shape, dtype, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=gc) * scale).to(dtype)

    out = {
        "a": randn(M, K, dtype=TORCH[config.ab_dtype], scale=max(1, M // max(L, 1)) ** -0.5),
        "dy": randn(M, N, dtype=TORCH[config.ab_dtype]),
        "offsets": torch.tensor(sizes).cumsum(0).to(torch.int32).cuda(),
        "dw": torch.full((L, K, N), POISON, device="cuda", dtype=TORCH[config.dw_dtype]),
    }
    if config.accumulate:
        out["dw"] = randn(L, K, N, dtype=TORCH[config.dw_dtype])
    if tail:
        out["a"][-tail:] = float("nan")
        out["dy"][-tail:] = float("nan")
    return out


def oracle(config: WgradConfig, t: dict) -> np.ndarray:
    """dw in float64, of the rows that the offsets give; `t` as it is before the launch."""
    ends = t["offsets"].tolist()
    dw = t["dw"].double() if config.accumulate else torch.zeros_like(t["dw"], dtype=torch.float64)
    for g, (s, e) in enumerate(zip([0, *ends[:-1]], ends)):
        if e > s:
            dw[g] += t["a"][s:e].double().T @ t["dy"][s:e].double()
    return dw.cpu().numpy()


def wrong_experts(config: WgradConfig, t: dict, before: torch.Tensor, ref: np.ndarray) -> list[str]:
    """What is wrong with dw, by expert, whose first rows may be few: each against its own norm, and exactly where it
    has no rows."""
    ends, bad = t["offsets"].tolist(), []
    for g, (s, e) in enumerate(zip([0, *ends[:-1]], ends)):
        if e <= s:
            expected = before[g] if config.accumulate else torch.zeros_like(before[g])
            if not torch.equal(t["dw"][g], expected):
                bad.append(f"expert {g} has no rows, and its gradient is not as required")
        elif not (error := relative(t["dw"][g], ref[g])) <= LIMITS[config.dw_dtype]:
            bad.append(f"expert {g} of {e - s} rows: {error:.2e} > {LIMITS[config.dw_dtype]:.0e}")
    return bad


def check(config: WgradConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict[str, float]:
    """Runs one problem and returns the relative error; raises AssertionError on a wrong result."""
    t = make(config, sizes, K, N, tail, seed)
    before, ref = t["dw"].clone(), oracle(config, t)
    launch(config, t)
    torch.cuda.synchronize()
    bad = wrong_experts(config, t, before, ref)
    told = f"({dataclasses.asdict(config)}, sizes {sizes}, K {K}, N {N}, tail {tail}, seed {seed})"
    assert not bad, f"{'; '.join(bad[:5])} {told}"
    return {"dw": relative(t["dw"], ref)}
