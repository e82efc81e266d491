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
SHIPPED = {"p128": P128, "p128_n": P128_N, "p192": P192, "c256": C256}
CHOSEN = (P128_N, P192, P128)
"""What the table chooses from, the first of equals: P128_N ties with P128 or is up to 4 % faster (N = 256). C256 is 0
to 12 % slower, its epilogue exposed; P192 across N, and bands of 4 and 16, tie or are slower."""
MULTIPROCESSORS = 132  # of an H200, for which the choice is made


def waves(schedule: Schedule, *, n: int, k: int, experts: int) -> int:
    """Tiles that the busiest multiprocessor computes: K x N of every expert, covered by whole cluster tiles."""
    s = schedule
    tiles = -(-k // (s.tile_m * s.cluster_m)) * -(-n // (s.tile_n * s.cluster_n)) * experts
    return -(-tiles // (MULTIPROCESSORS // s.cluster_size))


def candidates(config: WgradConfig, *, n: int, k: int, experts: int) -> list[Schedule]:
    """Legal schedules worth measuring, the table's choice first."""
    first = schedule_for(config, n=n, k=k, experts=experts).schedule
    rest = [s for s in SHIPPED.values() if s != first]
    return [s for s in (first, *rest) if not illegal(replace(config, schedule=s), n=n, k=k)]


def schedule_for(config: WgradConfig, *, n: int, k: int, experts: int) -> WgradConfig:
    """The configuration with the schedule for `experts` gradients of K rows and N columns.

    Every expert has the same tiles, so that padding and the last wave are known, and they decide: a column of a tile
    costs the same in all of these. On an H200 that foretells P192 against P128_N to within 1 % in most of the 20 weight
    gradients of samples/shapes.json and to 3 % in all but those of N = 2880, where P192 is 7 % better than foretold,
    and of N = 256, where it is 27 % worse.
    """

    def work(schedule: Schedule) -> int:
        return waves(schedule, n=n, k=k, experts=experts) * schedule.tile_m * schedule.tile_n

    return replace(config, schedule=min(CHOSEN, key=work))
