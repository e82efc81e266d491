"""Configuration of the Hopper grouped GEMM kernel, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, tuner, rules and tests all ask here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .config import BARRIER_BYTES, CHUNK_M, CONSUMERS, SMEM_LIMIT, TILE_K, Schedule, schedule_reasons

BOX_COLUMNS = 64  # of a chunk of y: one 128-byte swizzle row of a 16-bit type
CHUNK_BYTES = CHUNK_M * BOX_COLUMNS * 2
COLUMN_MULTIPLE = 8  # of N: rows of 16 bytes, for TMA and for the copies that end at the last column


@dataclass(frozen=True)
class GemmConfig:
    """What one compiled kernel computes, and its schedule.

    Tensors: a (M, K) and b (L, K, N) of `ab_dtype`, y (M, N), alpha (L,) float32, bias (L, N). A `bias_dtype` of None
    and a False flag mean that the tensor is absent.
    """

    ab_dtype: str = "bf16"
    b_major: str = "k"
    discrete_b: bool = False
    y_dtype: str = "bf16"
    has_alpha: bool = False
    alpha_exponent: int = 1
    bias_dtype: str | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)

    @property
    def through_ring(self) -> bool:
        """Whether y leaves through shared memory by TMA: of 16 bits; a lane's pair of float32 is stored as it is."""
        return self.y_dtype != "fp32"


def smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of a configuration in bytes: operand stages, output rings, barriers."""
    s = config.schedule
    operands = s.ab_stages * (s.tile_m + s.tile_n) * TILE_K * 2
    return operands + CONSUMERS * s.ring_chunks * CHUNK_BYTES * config.through_ring + BARRIER_BYTES


def scratch_tensors(config: GemmConfig, L) -> list[tuple[str, object, object]]:
    """32-bit tensors that a launch keeps in its workspace: (name, rows, columns). Works on any integer type."""
    return [("descriptors", L, 32)] if config.discrete_b else []


def illegal(config: GemmConfig, *, n: int | None = None, k: int | None = None) -> list[str]:
    """Every reason why this configuration cannot be built or run; empty when it can.

    `n` (columns of y) and `k` (depth) add the conditions on the problem.
    """
    s, out = config.schedule, []
    for name, allowed in (
        ("ab_dtype", ("bf16", "fp16")),
        ("b_major", ("k", "n")),
        ("y_dtype", ("bf16", "fp16", "fp32")),
        ("bias_dtype", ("bf16", "fp16", "fp32", None)),
        ("alpha_exponent", (1, 2)),
    ):
        if getattr(config, name) not in allowed:
            out.append(f"{name} is {getattr(config, name)!r}; built are {', '.join(map(repr, allowed))}")
    reasons = schedule_reasons(s)
    if not reasons and s.tile_n % BOX_COLUMNS:
        reasons.append(f"tile_n is {s.tile_n}; y leaves {BOX_COLUMNS} columns at a time, so a multiple of them")
    out += reasons
    if not out and smem_bytes(config) > SMEM_LIMIT:
        out.append(f"{smem_bytes(config)} bytes of shared memory; an SM gives one CTA {SMEM_LIMIT}")
    if n is not None and (n % COLUMN_MULTIPLE or n == 0):
        out.append(f"N is {n}; rows of y are a multiple of 16 bytes, so a positive multiple of {COLUMN_MULTIPLE}")
    if k is not None and (k % 8 or k == 0):
        out.append(f"K is {k}; TMA needs rows of a multiple of 16 bytes, so a positive multiple of 8")
    return out
