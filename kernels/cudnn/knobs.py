"""Tiles, clusters and schedulers that cudnn-frontend 1.32's grouped kernels take, as data: variants to be measured.

Read from each class's check_support (`_bf16_api.py`, `_blockscaled_api.py`, `api.py` under `cudnn/gemm/cutedsl`). Each
table holds combinations that are legal for every problem that the kernel serves and on every arch that it serves: a
cluster of the block-scaled kernels covers at most 256 rows, and their tiles are 256 columns wide but in wgrad. None of
them changes what is computed. Dynamic scheduling resets its counter on the device, before each run: with dense weights
that is one more launch. The other knobs stay as block_scaled_dglu says. Imports neither torch nor cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..problem import Problem

Shape = tuple[int, int]


@dataclass(frozen=True)
class Knobs:
    """One way to build a kernel: elements (M, N) of a tile, CTAs (M, N) of a cluster, who hands out the tiles."""

    tile: Shape
    cluster: Shape
    dynamic: bool = False

    @property
    def name(self) -> str:
        """What plans call it, as 256x256_2x1_dynamic."""
        shapes = (f"{m}x{n}" for m, n in (self.tile, self.cluster))
        return "_".join((*shapes, *(("dynamic",) if self.dynamic else ())))

    @property
    def keywords(self) -> dict[str, Any]:
        """What the classes' constructors take. wgrad's has no word for the scheduler, which is static there."""
        scheduler = {"use_dynamic_sched": True} if self.dynamic else {}
        return {"mma_tiler_mn": self.tile, "cluster_shape_mn": self.cluster, **scheduler}


BLOCK_SCALED = (
    Knobs((256, 256), (2, 1), dynamic=True),
    Knobs((256, 256), (2, 2)),
    Knobs((128, 256), (1, 1)),
    Knobs((128, 256), (1, 1), dynamic=True),
    Knobs((128, 256), (1, 2)),
)
BF16 = (
    Knobs((256, 256), (2, 1), dynamic=True),
    Knobs((256, 256), (2, 2)),
    Knobs((256, 128), (2, 1)),
    Knobs((128, 256), (1, 1)),
    Knobs((128, 128), (1, 1)),
    Knobs((128, 128), (1, 1), dynamic=True),
)
WGRAD = (
    Knobs((256, 256), (2, 2)),
    Knobs((256, 128), (2, 1)),
    Knobs((128, 256), (1, 1)),
    Knobs((128, 128), (1, 1)),
)
"""Beside the classes' own default, which the adapters build unasked: 256x256 in clusters of 2x1, static."""


def variants(table: tuple[Knobs, ...]) -> Callable[[Problem], tuple[str, ...]]:
    """The names of a table, whatever the problem: each is legal for all that the conditions let through."""
    names = tuple(knobs.name for knobs in table)
    return lambda problem: names


def chosen(table: tuple[Knobs, ...], variant: str | None) -> Knobs | None:
    """The knobs of that name, None for the class's own. Raises ValueError for a name that is not in the table."""
    if variant is None:
        return None
    known = {knobs.name: knobs for knobs in table}
    if variant not in known:
        raise ValueError(f"no variant {variant!r}: there are {list(known)}")
    return known[variant]
