"""Which schedule serves a shape of the grouped GEMM kernel, and its candidates."""

from __future__ import annotations

from dataclasses import replace

from .config import Schedule
from .gemm_config import GemmConfig, illegal

# Names say schedule, tile and cluster: p ping-pong, c cooperative. Depths: as many stages as fit, then chunks.
P128 = Schedule(128, 128, True, 2, 1, 6, 2, 8)
P128_N = Schedule(128, 128, True, 1, 2, 6, 2, 8)
P192 = Schedule(128, 192, True, 2, 1, 4, 4, 8)
P192_N = Schedule(128, 192, True, 1, 2, 4, 4, 8)
C256 = Schedule(128, 256, False, 2, 1, 4, 2, 8)
C256X128 = Schedule(256, 128, False, 1, 2, 4, 2, 8)
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "p192_n": P192_N, "c256": C256, "c256x128": C256X128}


def candidates(config: GemmConfig, *, n: int, k: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: GemmConfig, *, n: int, k: int) -> GemmConfig:
    """The configuration with the table's schedule for N columns and depth K."""
    return replace(config, schedule=_choose(n))


def _choose(n: int) -> Schedule:
    # As the forward kernel's table, until measured: 192-column tiles where they waste little of N.
    return P192 if -(-n // 192) * 192 <= 1.02 * n else P128
