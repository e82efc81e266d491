"""Configuration of the Hopper grouped GEMM + dGLU kernel, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, tuner, rules and tests all ask here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .config import (
    ACTIVATIONS,
    BARRIER_BYTES,
    CHUNK_M,
    CHUNK_N,
    CONSUMERS,
    GLU_LAYOUTS,
    SMEM_LIMIT,
    TILE_K,
    Activation,
    Schedule,
    schedule_reasons,
)


@dataclass(frozen=True)
class DgluConfig:
    """What one compiled kernel computes, and its schedule.

    Tensors: dy (M, K) and b (L, K, N) of `ab_dtype`, c (M, 2N), d (M, 2N), activation (M, N), prob and dprob (M,)
    float32, alpha and beta (L,) float32, dbias (L, 2N), amax (L, 2) float32, q_* (M, 2N) 8-bit codes.
    A `*_dtype` of None and a False flag mean that the tensor is absent.
    Swizzled row scales need offsets that are multiples of 128. With q_col every offset, and M, must be a multiple of 32
    (128 where scales are swizzled): the caller's promise, and rows of a block that is not whole are not written.
    """

    ab_dtype: str = "bf16"
    b_major: str = "k"
    discrete_b: bool = False
    glu_layout: str = "interleaved32"
    act: Activation = field(default_factory=Activation)
    c_dtype: str = "bf16"
    d_dtype: str | None = "bf16"
    has_prob: bool = False
    has_alpha: bool = False
    alpha_exponent: int = 2
    has_beta: bool = False
    has_dprob: bool = False
    activation_dtype: str | None = None
    dbias_dtype: str | None = None
    has_amax: bool = False
    q_row_dtype: str | None = None
    q_col_dtype: str | None = None
    sf_swizzled: bool = True
    deterministic: bool = False
    schedule: Schedule = field(default_factory=Schedule)

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)


def smem_bytes(config: DgluConfig) -> int:
    """Dynamic shared memory of a configuration in bytes: operand stages, C/D rings, reduction scratch, barriers."""
    s = config.schedule
    ab = s.ab_stages * (s.tile_m + s.tile_n) * TILE_K * 2
    ring = CONSUMERS * s.ring_chunks * CHUNK_M * 2 * CHUNK_N * 2
    return ab + ring + scratch_bytes(config) + BARRIER_BYTES


def scratch_bytes(config: DgluConfig) -> int:
    """Shared memory of the cross-warp column reductions in bytes."""
    return CONSUMERS * 4 * 2 * CHUNK_N * 4 if config.dbias_dtype else 0


def scratch_tensors(config: DgluConfig, L: Any, M: Any, N: Any) -> list[tuple[str, Any, Any]]:
    """32-bit tensors that a launch keeps in its workspace: (name, rows, columns), in order. Works on any integer type.

    descriptors: a TMA descriptor per expert. dprob, dbias, amax: float32 partials, see `finishes`.
    """
    s = config.schedule
    out: list[tuple[str, Any, Any]] = []
    if config.discrete_b:
        out.append(("descriptors", L, 32))
    # Every expert may end in a cluster tile of its own, whatever the offsets are.
    slots = (M // (s.tile_m * s.cluster_m) + L) * s.cluster_m
    n_tiles = (N + (s.tile_n - 1)) // s.tile_n
    if config.has_dprob:
        out.append(("dprob", n_tiles, M))
    if config.dbias_dtype:
        out.append(("dbias", slots * (1 if s.pingpong else CONSUMERS), 2 * N))
    if config.has_amax:
        out.append(("amax", slots, n_tiles * (4 if s.pingpong else 8) * 2))
    return out


def finishes(config: DgluConfig) -> bool:
    """Whether a second kernel adds partials up."""
    return config.has_dprob or config.dbias_dtype is not None or config.has_amax


def illegal(config: DgluConfig, *, n: int | None = None, k: int | None = None) -> list[str]:
    """Every reason why this configuration cannot be built or run; empty when it can.

    `n` (columns of the matmul's result) and `k` (depth) add the conditions on the problem.
    """
    s, out = config.schedule, []
    for name, allowed in (
        ("ab_dtype", ("bf16", "fp16")),
        ("b_major", ("k", "n")),
        ("glu_layout", GLU_LAYOUTS),
        ("c_dtype", ("bf16", "fp16", "fp32")),
        ("d_dtype", ("bf16", "fp16", "fp32", None)),
        ("activation_dtype", ("bf16", "fp16", None)),
        ("dbias_dtype", ("bf16", "fp32", None)),
        ("q_row_dtype", ("e4m3", "e5m2", None)),
        ("q_col_dtype", ("e4m3", "e5m2", None)),
        ("alpha_exponent", (1, 2)),
    ):
        if getattr(config, name) not in allowed:
            out.append(f"{name} is {getattr(config, name)!r}; built are {', '.join(map(repr, allowed))}")
    if config.act.name not in ACTIVATIONS:
        out.append(f"act is {config.act.name!r}; built are {', '.join(ACTIVATIONS)}")
    if config.act.name == "situglu" and not (config.act.beta1 > 0 and config.act.beta2 > 0):
        out.append("situglu needs beta1 and beta2 above zero")
    if (config.q_row_dtype or config.q_col_dtype) and config.glu_layout == "interleaved1":
        out.append("quantized outputs need 32 gate or up columns side by side; glu_layout interleaved1 has 1")
    if config.q_col_dtype and (s.tile_m, s.pingpong, s.cluster_n) != (128, True, 1):
        out.append("column quantization needs a ping-pong schedule with tile_m 128 and cluster_n 1")
    if not (config.d_dtype or config.q_row_dtype or config.q_col_dtype):
        out.append("no gradient output: d, q_row and q_col are all absent")
    out += schedule_reasons(s)
    if not out and smem_bytes(config) > SMEM_LIMIT:
        out.append(f"{smem_bytes(config)} bytes of shared memory; an SM gives one CTA {SMEM_LIMIT}")
    if n is not None and n % CHUNK_N:
        out.append(f"N is {n}; the epilogue takes {CHUNK_N} columns at a time")
    if k is not None and (k % 8 or k == 0):
        out.append(f"K is {k}; TMA needs rows of a multiple of 16 bytes, so a positive multiple of 8")
    return out
