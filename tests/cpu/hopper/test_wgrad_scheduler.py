"""The weight gradient's scheduler, run on 32 numpy lanes: who gets the tiles left over, against sorting.

What the GPU alone can show stays with tests/gpu: that records and stages reach who waits for them.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from warp_lanes import LANE, Lanes, integer  # type: ignore[import-not-found]

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from opfuse.kernels.sm90 import wgrad_scheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's functions on numpy lanes."""
    lanes = Lanes()
    arch = SimpleNamespace(
        lane_idx=lambda: LANE.astype(np.int64),
        sync_warp=lanes.sync_warp,
        shuffle_sync=lambda value, lane: np.broadcast_to(value, (32,))[lane],
    )
    loop = {"range": lambda *bounds, unroll=1: range(*bounds), "range_constexpr": range}
    for name, value in (("p", lanes), ("cute", SimpleNamespace(arch=arch)), ("cutlass", SimpleNamespace(**loop)),
                        ("Int32", integer)):  # fmt: skip
        monkeypatch.setattr(wgrad_scheduler, name, value)
    lanes.load_shared_u32 = lanes.load_shared_i32
    own = {name: getattr(wgrad_scheduler, name).__wrapped__ for name in ("_first_keys", "_share_rest", "_rank")}
    for name, function in own.items():
        monkeypatch.setattr(wgrad_scheduler, name, function)
    return SimpleNamespace(lanes=lanes, **own)


def shared_out(scheduler: Any, clusters: int, mine: int, experts: list[tuple[int, int]]) -> list[int]:
    """The rank of `mine` at each expert, (tiles left over, cost), in shared memory from byte 64 on."""
    scheduler._first_keys(64, clusters)
    return [int(scheduler._share_rest(64, clusters, mine, rest, cost)) for rest, cost in experts]


@pytest.mark.parametrize("clusters", [1, 39, 64, 66, 160])
def test_the_rest_goes_to_those_with_least(scheduler: Any, clusters: int, seed: int) -> None:
    r = random.Random(seed)
    experts = [(r.randrange(clusters), r.choice([3, 18, 34, 700, 70_000])) for _ in range(5)]
    given = np.zeros(clusters, np.int64)
    expected = []
    for rest, cost in experts:
        order = np.lexsort((np.arange(clusters), given))
        ranks = np.empty(clusters, np.int64)
        ranks[order] = np.arange(clusters)
        expected.append(ranks)
        given[order[:rest]] += cost
    for mine in {0, clusters - 1, *r.sample(range(clusters), min(clusters, 3))}:
        found = shared_out(scheduler, clusters, mine, experts)
        assert found == [int(ranks[mine]) for ranks in expected], (seed, mine, experts)


def test_every_tile_left_over_has_one_owner(scheduler: Any, seed: int) -> None:
    """Even where costs are so large that the keys wrap around."""
    r = random.Random(seed)
    experts = [(r.randrange(66), r.choice([3, 2**23, 2**24 - 1])) for _ in range(3)]
    ranks = [shared_out(scheduler, 66, mine, experts) for mine in range(66)]
    for of_expert in zip(*ranks):
        assert sorted(of_expert) == list(range(66)), (seed, experts)


def test_even_splits_go_round(scheduler: Any) -> None:
    """Where experts cost the same, tiles are handed out in turn: neighbours work on neighbouring tiles."""
    experts, clusters, rest = [(25, 34)] * 6, 66, 25
    found = [shared_out(scheduler, clusters, mine, experts) for mine in (0, 25, 65)]
    for turn in range(2):
        assert [ranks[turn] for ranks in found] == [(mine - rest * turn) % clusters for mine in (0, 25, 65)]
