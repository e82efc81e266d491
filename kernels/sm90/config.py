"""Configuration of the Hopper grouped GEMM + dGLU kernel, and the one function that says whether it is legal.

Imports neither torch nor the DSL: host, tuner, rules and tests all ask here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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


def padded_bytes(rows, columns):
    """Workspace bytes of one scratch tensor; the next one starts on a 256-byte boundary."""
    return (rows * columns * 4 + 255) // 256 * 256


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
