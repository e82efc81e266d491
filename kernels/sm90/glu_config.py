"""Configuration of the Hopper grouped GEMM + GLU kernel, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, tuner, rules and tests all ask here. Schedule and activation are those of the
backward kernel (config.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

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

# Bytes of one chunk in shared memory: 64 rows x 64 columns of h, 64 rows x 32 columns of the activation.
H_CHUNK_BYTES, D_CHUNK_BYTES = CHUNK_M * 2 * CHUNK_N * 2, CHUNK_M * CHUNK_N * 2


@dataclass(frozen=True)
class GluConfig:
    """What one compiled kernel computes, and its schedule.

    Tensors: x (M, K) and b (L, K, 2N) of `ab_dtype`, h (M, 2N), d (M, N), prob (M,) and alpha (L,) float32, bias
    (L, 2N). h is the product as it is written, d the activation. `separate_up`: b (L, K, N) has the gate's weights,
    and b_up, of the same shape, those of up; h is concatenated. A `*_dtype` of None and a False flag mean that the
    tensor is absent; `product_dtype` is where the product rounds before the activation reads it, None for nowhere.
    The schedule's `tile_n` counts columns of the product.
    """

    ab_dtype: str = "bf16"
    b_major: str = "k"
    discrete_b: bool = False
    separate_up: bool = False
    glu_layout: str = "interleaved32"
    act: Activation = field(default_factory=Activation)
    product_dtype: str | None = None
    h_dtype: str | None = None
    d_dtype: str = "bf16"
    has_prob: bool = False
    has_alpha: bool = False
    alpha_exponent: int = 1
    bias_dtype: str | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)


def chunk_bytes(config: GluConfig) -> int:
    """Shared memory of one chunk of the outputs in bytes."""
    return D_CHUNK_BYTES + (H_CHUNK_BYTES if config.h_dtype else 0)


def smem_bytes(config: GluConfig) -> int:
    """Dynamic shared memory of a configuration in bytes: operand stages, output rings, barriers."""
    s = config.schedule
    operands = s.ab_stages * (s.tile_m + s.tile_n) * TILE_K * 2
    return operands + CONSUMERS * s.ring_chunks * chunk_bytes(config) + BARRIER_BYTES


def scratch_tensors(config: GluConfig, L) -> list[tuple[str, object, object]]:
    """32-bit tensors that a launch keeps in its workspace: (name, rows, columns). Works on any integer type."""
    return [("descriptors", L, 32)] if config.discrete_b else []


def illegal(config: GluConfig, *, n: int | None = None, k: int | None = None) -> list[str]:
    """Every reason why this configuration cannot be built or run; empty when it can.

    `n` (columns of the activation) and `k` (depth) add the conditions on the problem.
    """
    s, out = config.schedule, []
    for name, allowed in (
        ("ab_dtype", ("bf16", "fp16")),
        ("b_major", ("k", "n")),
        ("glu_layout", GLU_LAYOUTS),
        ("product_dtype", ("bf16", "fp16", None)),
        ("h_dtype", ("bf16", "fp16", None)),
        ("d_dtype", ("bf16", "fp16")),
        ("bias_dtype", ("bf16", "fp16", "fp32", None)),
        ("alpha_exponent", (1, 2)),
    ):
        if getattr(config, name) not in allowed:
            out.append(f"{name} is {getattr(config, name)!r}; built are {', '.join(map(repr, allowed))}")
    if config.product_dtype and config.h_dtype and config.product_dtype != config.h_dtype:
        out.append(f"the product rounds to {config.product_dtype}, and h, which is its value, is {config.h_dtype}")
    if config.separate_up and (config.discrete_b or config.glu_layout != "concatenated"):
        out.append("weights of gate and up apart are built dense, with h concatenated")
    if config.act.name not in ACTIVATIONS:
        out.append(f"act is {config.act.name!r}; built are {', '.join(ACTIVATIONS)}")
    if config.act.name == "situglu" and not (config.act.beta1 > 0 and config.act.beta2 > 0):
        out.append("situglu needs beta1 and beta2 above zero")
    reasons = schedule_reasons(s)
    if not reasons and s.tile_n % (2 * CHUNK_N):
        reasons.append(f"tile_n is {s.tile_n}; a tile holds gate and up columns in pairs of {CHUNK_N}, so a multiple "
                       f"of {2 * CHUNK_N}")  # fmt: skip
    out += reasons
    if not out and smem_bytes(config) > SMEM_LIMIT:
        out.append(f"{smem_bytes(config)} bytes of shared memory; an SM gives one CTA {SMEM_LIMIT}")
    if n is not None and (n % CHUNK_N or n == 0):
        out.append(f"N is {n}; the epilogue takes {CHUNK_N} columns of the activation at a time")
    if k is not None and (k % 8 or k == 0):
        out.append(f"K is {k}; TMA needs rows of a multiple of 16 bytes, so a positive multiple of 8")
    return out
