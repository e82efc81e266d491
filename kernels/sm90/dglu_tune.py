"""Which schedule serves a shape: a table from measurements on an H200 (NOTES.md has them), and its candidates."""

from __future__ import annotations

from dataclasses import replace

from .config import Schedule
from .dglu_config import DgluConfig, illegal

# Names say schedule, tile and cluster: p ping-pong, c cooperative.
P128 = Schedule(128, 128, True, 2, 1, 5, 4, 8)
P128_N = Schedule(128, 128, True, 1, 2, 5, 4, 8)
P192 = Schedule(128, 192, True, 2, 1, 4, 4, 16)
P96 = Schedule(128, 96, True, 2, 1, 5, 4, 8)
C256 = Schedule(128, 256, False, 2, 1, 3, 4, 8)
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "p96": P96, "c256": C256}


def _wide_fits(n: int) -> bool:
    """Whether 192-column tiles waste little of N: at 3 % (N = 2048) they tie with 128, at 12 % (1024) they lose 7 %."""
    return -(-n // 192) * 192 <= 1.02 * n


def candidates(config: DgluConfig, *, n: int, k: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: DgluConfig, *, n: int, k: int) -> DgluConfig:
    """The configuration with the table's schedule for N columns and depth K."""
    return replace(config, schedule=_choose(config, n, k))


def _choose(config: DgluConfig, n: int, k: int) -> Schedule:
    if config.q_col_dtype is not None:
        # 96 columns are 2 to 5 % slower even where they divide N and 128 do not (N = 2880, 768). Two of these outputs
        # beside the codes, or pairs of float32, leave 128 accumulators too few registers.
        others = (config.d_dtype, config.dbias_dtype, config.activation_dtype, config.has_amax or None)
        return P128 if others.count(None) >= 3 and config.d_dtype != "fp32" else P96
    if n <= 256:
        # dy is read once: both N tiles of a row block sit in one cluster. 4 % faster than 2x1 at N = 256, K = 1536.
        return P128_N
    return P192 if _wide_fits(n) and _lean(config) else P128


def _lean(config: DgluConfig) -> bool:
    """Whether the epilogue leaves room for 192 accumulators: what is declined here spills. With dbias the two tiles tie
    at K >= 2880, and 192 is 5 to 17 % slower below, where its longer epilogue no longer hides."""
    extras = (config.dbias_dtype, config.activation_dtype, config.q_row_dtype, config.has_amax or None)
    return not any(extras) and config.glu_layout != "concatenated" and "fp32" not in (config.c_dtype, config.d_dtype)
