"""Which schedule serves a shape of the grouped GEMM + GLU kernel, and its candidates."""

from __future__ import annotations

from dataclasses import replace

from .config import Schedule
from .glu_config import GluConfig, illegal, quantizes

# Names say schedule, tile and cluster: p ping-pong, c cooperative.
P128 = Schedule(128, 128, True, 2, 1, 5, 2, 8)
P128_N = Schedule(128, 128, True, 1, 2, 5, 2, 8)
P192 = Schedule(128, 192, True, 2, 1, 4, 2, 16)
C256 = Schedule(128, 256, False, 2, 1, 3, 2, 8)
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "c256": C256}


def candidates(config: GluConfig, *, n: int, k: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: GluConfig, *, n: int, k: int) -> GluConfig:
    """The configuration with the table's schedule for N columns of the activation and depth K."""
    return replace(config, schedule=_choose(config, n, k))


def _choose(config: GluConfig, n: int, k: int) -> Schedule:
    if quantizes(config):
        # 32 rows x 64 columns are quantized together: all that a warp has of a 128-column tile of the product.
        return P128
    # As the backward kernel's table: 192-column tiles where they waste little of N. With a bias they spill.
    return P192 if -(-n // 96) * 96 <= 1.02 * n and config.bias_dtype is None else P128
