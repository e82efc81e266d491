"""What the configurations of the Hopper kernels share: limits, names, activations and schedules.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

SMEM_LIMIT = 227 * 1024  # bytes one CTA may use on sm_90
BARRIER_BYTES = 1024  # mbarriers, tile records and their alignment
TILE_K = 64  # one 128-byte swizzle row of a 16-bit operand
CHUNK_M, CHUNK_N = 64, 32  # rows x compact columns that one epilogue step handles
WARPGROUP = 128
CONSUMERS = 2  # warpgroups that compute
MAX_EXPERTS = 1024
# Registers a thread: 24 * 128 + 240 * 256 = 64512, all that a CTA of 384 threads is launched with.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240

DTYPE_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3": 8, "e5m2": 8}
GLU_LAYOUTS = ("interleaved32", "concatenated", "interleaved1")
ACTIVATIONS = ("swiglu", "geglu", "situglu")


def log2(power: int) -> int:
    return power.bit_length() - 1


@dataclass(frozen=True)
class Activation:
    """The GLU's activation and its constants; constants that the activation does not read keep their defaults."""

    name: str = "swiglu"
    alpha: float = 1.702  # geglu: factor inside the sigmoid
    clamp_max: float = 7.0
    clamp_min: float = -7.0
    offset: float = 1.0
    beta1: float = 4.0  # situglu
    beta2: float = 25.0


@dataclass(frozen=True)
class Schedule:
    """How the work is cut: CTA tile, warpgroup roles, cluster, pipeline depths and tile order."""

    tile_m: int = 128
    tile_n: int = 128  # compact columns: 2 * tile_n columns of C and D
    pingpong: bool = True  # each consumer warpgroup owns a tile of its own; else both share one
    cluster_m: int = 2
    cluster_n: int = 1
    ab_stages: int = 4
    ring_chunks: int = 4  # C/D chunks in flight per consumer warpgroup
    band: int = 8  # N tiles that are walked together before M advances past them

    @property
    def m_blocks(self) -> int:
        """64-row blocks that one consumer warpgroup accumulates."""
        return self.tile_m // (64 if self.pingpong else 128)

    @property
    def accumulators(self) -> int:
        """float32 accumulators a thread."""
        return self.m_blocks * self.tile_n // 2

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n


def schedule_reasons(s: Schedule) -> list[str]:
    """Every reason why no kernel is built with this schedule, whatever it computes."""
    out = []
    if s.tile_n % CHUNK_N or not 64 <= s.tile_n <= 256:
        out.append(f"tile_n is {s.tile_n}; wgmma and the epilogue need a multiple of {CHUNK_N} from 64 to 256")
    if s.tile_m not in ((64, 128) if s.pingpong else (128, 256)):
        out.append(f"tile_m is {s.tile_m}; ping-pong takes 64 or 128, cooperative 128 or 256")
    elif s.accumulators > 192:
        out.append(f"{s.accumulators} accumulators a thread; more than 192 leave no registers for the epilogue")
    if (s.cluster_m, s.cluster_n) not in ((1, 1), (2, 1), (1, 2)):
        # Clusters of four computed right, but not all 32 fit on an H200 at once, so a second wave doubled the time.
        out.append(f"cluster {s.cluster_m}x{s.cluster_n}; 1x1, 2x1 and 1x2 are built")
    if s.ab_stages < 2:
        out.append(f"ab_stages is {s.ab_stages}; the mainloop needs 2")
    if s.ring_chunks not in (2, 4, 8):
        # One chunk is stored while the next one is computed; powers of two turn the ring's arithmetic into masks.
        out.append(f"ring_chunks is {s.ring_chunks}; 2, 4 and 8 are built")
    if s.band < 1:
        out.append(f"band is {s.band}; at least 1")
    return out


def padded_bytes(rows, columns):
    """Workspace bytes of one scratch tensor; the next one starts on a 256-byte boundary."""
    return (rows * columns * 4 + 255) // 256 * 256
