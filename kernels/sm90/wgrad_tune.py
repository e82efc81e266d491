"""Which schedule serves a shape of the grouped weight gradient, and its candidates."""

from __future__ import annotations

from dataclasses import replace

from .config import Schedule
from .wgrad_config import WgradConfig, illegal

# Names say schedule, tile and cluster: p ping-pong, c cooperative.
P128 = Schedule(128, 128, True, 2, 1, 6, 2, 8)
P128_N = Schedule(128, 128, True, 1, 2, 6, 2, 8)
P192 = Schedule(128, 192, True, 2, 1, 4, 2, 8)
C256 = Schedule(128, 256, False, 2, 1, 4, 2, 4)
C256_M = Schedule(256, 128, False, 1, 2, 4, 2, 8)
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "c256": C256, "c256_m": C256_M}


def candidates(config: WgradConfig, *, n: int, k: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: WgradConfig, *, n: int, k: int) -> WgradConfig:
    """The configuration with the table's schedule for K rows and N columns of one expert's gradient."""
    return replace(config, schedule=_choose(n))


def _choose(n: int) -> Schedule:
    # As the other kernels' tables: 192-column tiles where they waste little of N.
    return P192 if -(-n // 192) * 192 <= 1.02 * n else P128
