"""Configuration of the Hopper grouped weight gradient, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, tuner, rules and tests all ask here. The schedule is that of the other kernels
(config.py); its `tile_m` and `tile_n` count rows (K) and columns (N) of an expert's gradient.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .config import BARRIER_BYTES, CHUNK_M, CONSUMERS, DTYPE_BITS, SMEM_LIMIT, TILE_K, Schedule, schedule_reasons

CHUNK_ROW_BYTES = 128  # of one row of a chunk in shared memory, a swizzle row: 64 columns of 16 bits, 32 of float32
CHUNK_BYTES = CHUNK_M * CHUNK_ROW_BYTES
OPERAND_COLUMNS = 64  # columns of a and of dy that one swizzle row holds


@dataclass(frozen=True)
class WgradConfig:
    """What one compiled kernel computes, and its schedule.

    Tensors: a (M, K) and dy (M, N) of `ab_dtype`, dw (L, K, N) of `dw_dtype`, all row-major. dw[g] is written, zero
    for an expert without rows, or with `accumulate` added to, which then is left as it is.
    """

    ab_dtype: str = "bf16"
    dw_dtype: str = "bf16"
    accumulate: bool = False
    schedule: Schedule = field(default_factory=Schedule)

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)


def chunk_columns(config: WgradConfig) -> int:
    """Columns of dw that a chunk holds."""
    return CHUNK_ROW_BYTES * 8 // DTYPE_BITS[config.dw_dtype]


def smem_bytes(config: WgradConfig) -> int:
    """Dynamic shared memory of a configuration in bytes: operand stages, output rings, barriers."""
    s = config.schedule
    operands = s.ab_stages * (s.tile_m + s.tile_n) * TILE_K * 2
    return operands + CONSUMERS * s.ring_chunks * CHUNK_BYTES + BARRIER_BYTES


def illegal(config: WgradConfig, *, n: int | None = None, k: int | None = None) -> list[str]:
    """Every reason why this configuration cannot be built or run; empty when it can.

    `k` and `n` (rows and columns of one expert's gradient) add the conditions on the problem.
    """
    s, out = config.schedule, []
    for name, allowed in (("ab_dtype", ("bf16", "fp16")), ("dw_dtype", ("bf16", "fp16", "fp32"))):
        if getattr(config, name) not in allowed:
            out.append(f"{name} is {getattr(config, name)!r}; built are {', '.join(map(repr, allowed))}")
    if config.accumulate and config.dw_dtype != "fp32":
        # The memory system adds what it is given: a 16-bit product would round before it is added.
        out.append(f"accumulate adds in float32 alone; dw_dtype is {config.dw_dtype!r}")
    reasons = schedule_reasons(s)
    if not reasons and s.tile_n % OPERAND_COLUMNS:
        reasons.append(f"tile_n is {s.tile_n}; dy is loaded {OPERAND_COLUMNS} columns at a time")
    out += reasons
    if not out and smem_bytes(config) > SMEM_LIMIT:
        out.append(f"{smem_bytes(config)} bytes of shared memory; an SM gives one CTA {SMEM_LIMIT}")
    for name, extent in (("K", k), ("N", n)):
        if extent is not None and (extent % 8 or extent == 0):
            out.append(f"{name} is {extent}; TMA needs rows of a multiple of 16 bytes, so a positive multiple of 8")
    return out
