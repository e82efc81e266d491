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
PIECE_BYTES = 1024  # a piece of the quantizer's shared memory


@dataclass(frozen=True)
class GluConfig:
    """What one compiled kernel computes, and its schedule.

    Tensors: x (M, K) and b (L, K, 2N) of `ab_dtype`, h (M, 2N), d (M, N), prob (M,) and alpha (L,) float32, bias
    (L, 2N), q_* (M, N) 8-bit codes. h is the product as it is written, d the activation. `separate_up`: b (L, K, N) has
    the gate's weights, and b_up, of the same shape, those of up; h is concatenated. A `*_dtype` of None and a False
    flag mean that the tensor is absent; `product_dtype` is where the product rounds before the activation reads it, and
    `source_dtype` where the activation rounds before it is quantized, None for nowhere.
    The schedule's `tile_n` counts columns of the product. Scales and q_col ask of offsets what DgluConfig says.
    """

    ab_dtype: str = "bf16"
    b_major: str = "k"
    discrete_b: bool = False
    separate_up: bool = False
    glu_layout: str = "interleaved32"
    act: Activation = field(default_factory=Activation)
    product_dtype: str | None = None
    h_dtype: str | None = None
    d_dtype: str | None = "bf16"
    has_prob: bool = False
    has_alpha: bool = False
    alpha_exponent: int = 1
    bias_dtype: str | None = None
    q_row_dtype: str | None = None
    q_col_dtype: str | None = None
    sf_swizzled: bool = True
    source_dtype: str | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def as_dict(self) -> dict:
        """Plain values, for cache keys and records."""
        return asdict(self)


def quantizes(config: GluConfig) -> bool:
    """Whether the activation leaves as codes too, or as codes alone."""
    return config.q_row_dtype is not None or config.q_col_dtype is not None


def chunk_bytes(config: GluConfig) -> int:
    """Shared memory of one chunk of the outputs in bytes."""
    return (D_CHUNK_BYTES if config.d_dtype else 0) + (H_CHUNK_BYTES if config.h_dtype else 0)


def codes_in_h(config: GluConfig) -> bool:
    """Whether the quantizer's lanes meet where h was, once its stores have read it: memory of their own would cost an
    operand stage beside both rings, and with it 5 to 7 % on an H200."""
    return config.q_col_dtype is not None and config.h_dtype is not None and config.d_dtype is not None


def codes_bytes(config: GluConfig) -> int:
    """Shared memory in which the quantizer's lanes meet: of each warp two pieces for 16 rows, and with columns for 32
    rows."""
    if not quantizes(config) or codes_in_h(config):
        return 0
    return 4 * CONSUMERS * 2 * PIECE_BYTES * (2 if config.q_col_dtype else 1)


def smem_bytes(config: GluConfig) -> int:
    """Dynamic shared memory of a configuration in bytes: operand stages, output rings, barriers."""
    s = config.schedule
    operands = s.ab_stages * (s.tile_m + s.tile_n) * TILE_K * 2
    return operands + CONSUMERS * s.ring_chunks * chunk_bytes(config) + codes_bytes(config) + BARRIER_BYTES


def scale_bytes(config: GluConfig, M: int, N: int) -> dict[str, int]:
    """Bytes of the scales by side, the 128 x 4 atom's padding included where they are swizzled."""
    sides = {"row": (M, N // 32, config.q_row_dtype), "col": (N, -(-M // 32), config.q_col_dtype)}
    return {
        side: -(-rows // 128) * -(-blocks // 4) * 512 if config.sf_swizzled else rows * blocks
        for side, (rows, blocks, codes) in sides.items() if codes
    }  # fmt: skip


def zeroes_scales(config: GluConfig, N: int) -> bool:
    """Whether the kernel writes every byte of the scales, those of no expert's row as zero."""
    return config.sf_swizzled and N % 128 == 0


def has_tiles(config: GluConfig, M: int) -> bool:
    """Whether an expert can own a row of M: column quantization has groups of whole 32-row blocks."""
    return M > 0 if config.q_col_dtype is None else M >= 32


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
        ("d_dtype", ("bf16", "fp16", None)),
        ("q_row_dtype", ("e4m3", "e5m2", None)),
        ("q_col_dtype", ("e4m3", "e5m2", None)),
        ("source_dtype", ("bf16", "fp16", None)),
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
    out += _illegal_codes(config)
    reasons = schedule_reasons(s)
    if not reasons and s.tile_n % (2 * CHUNK_N):
        reasons.append(f"tile_n is {s.tile_n}; a tile holds gate and up columns in pairs of {CHUNK_N}, so a multiple "
                       f"of {2 * CHUNK_N}")  # fmt: skip
    out += reasons
    if not out and smem_bytes(config) > SMEM_LIMIT:
        out.append(f"{smem_bytes(config)} bytes of shared memory; an SM gives one CTA {SMEM_LIMIT}")
    if n is not None and (n % CHUNK_N or n == 0):
        out.append(f"N is {n}; the epilogue takes {CHUNK_N} columns of the activation at a time")
    elif n is not None and quantizes(config) and n % (2 * CHUNK_N):
        out.append(f"N is {n}; {2 * CHUNK_N} columns of the activation are quantized at a time")
    if k is not None and (k % 8 or k == 0):
        out.append(f"K is {k}; TMA needs rows of a multiple of 16 bytes, so a positive multiple of 8")
    return out


def _illegal_codes(config: GluConfig) -> list[str]:
    """What is wrong with the outputs that are derived from the activation."""
    s, out = config.schedule, []
    if not quantizes(config):
        if config.d_dtype is None:
            out.append("no output of the activation: d, q_row and q_col are all absent")
        if config.source_dtype is not None:
            out.append("source_dtype without codes")
        return out
    if config.source_dtype and config.d_dtype and config.source_dtype != config.d_dtype:
        out.append(f"codes of the activation as {config.source_dtype}, and d, which is its value, is {config.d_dtype}")
    if config.glu_layout == "interleaved1":
        out.append("quantized outputs need 32 gate or up columns side by side; glu_layout interleaved1 has 1")
    if s.tile_n % (4 * CHUNK_N):
        out.append(f"tile_n is {s.tile_n}; {2 * CHUNK_N} columns of the activation are quantized at a time, so a "
                   f"multiple of {4 * CHUNK_N}")  # fmt: skip
    if config.q_col_dtype and (s.tile_m, s.pingpong, s.cluster_n) != (128, True, 1):
        out.append("column quantization needs a ping-pong schedule with tile_m 128 and cluster_n 1")
    return out
