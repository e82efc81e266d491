"""Which schedule serves a shape of the grouped GEMM kernel, and its candidates."""

from __future__ import annotations

from dataclasses import replace

from .config import Schedule
from .gemm_config import GemmConfig, illegal

# Names say schedule, tile and cluster: p ping-pong, c cooperative. Depths: as many stages as fit, then chunks.
# Left out, measured on an H200 over ten shapes as fc2 and dx: clusters of one 15 to 28 % slower than p128, 128x192 in
# 1x2 clusters 4 to 5 %, cooperative 256x128 7 to 10 %. Bands of 4, 8 and 16 tie within 0.3 %.
P128 = Schedule(128, 128, True, 2, 1, 6, 2, 16)
P128_N = Schedule(128, 128, True, 1, 2, 6, 2, 8)
P192 = Schedule(128, 192, True, 2, 1, 4, 4, 8)
C256 = Schedule(128, 256, False, 2, 1, 4, 2, 8)
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "c256": C256}


def candidates(config: GemmConfig, *, n: int, k: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: GemmConfig, *, n: int, k: int) -> GemmConfig:
    """The configuration with the table's schedule for N columns and depth K."""
    return replace(config, schedule=_choose(n))


def _choose(n: int) -> Schedule:
    # 192-column tiles where they cover N with no more columns than 128-column ones do: 3 to 6 % faster at N = 1536, up
    # to 1.5 % at 2880. Where they waste 1 to 3 % of N they are 1 to 3 % slower.
    return P192 if -(-n // 192) * 192 <= -(-n // 128) * 128 else P128
