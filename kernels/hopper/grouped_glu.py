"""Adapter onto kernels/sm90's grouped GEMM + GLU: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate, known_divisor
from ..cache import KernelCache
from ..problem import Problem
from ..sm90 import glu_host
from ..sm90.glu_arguments import glu_arguments
from ..sm90.glu_config import GluConfig, has_tiles, zeroes_scales
from .glu_support import gate_columns, scheduled
from .launched import Launched, cached, kernel_cache
from .support import extents

KERNEL = "sm90.grouped_gemm_glu"


def compiled(config: GluConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    return cached(KERNEL, config, glu_host.FUNCTIONS.compile, cache)


class GroupedGlu(Launched):
    """A FusedKernel: one configuration on one device. Zero where no expert owns a row: c, d, codes, and with
    `zeroes_scales` every byte of the scales that is no group's."""

    role_of = {"x": "a", "h": "c"}
    outputs = glu_host.OUTPUTS

    def __init__(self, problem: Problem, device: torch.device, config: GluConfig) -> None:
        super().__init__(problem, device, config, glu_arguments(config), compiled(config, kernel_cache()))
        glu_host.FUNCTIONS.install(config, self._function)
        self.zeroes_scales = zeroes_scales(config, known_divisor(extents(problem)[2]) // gate_columns(problem))

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        M, K, columns, L = (evaluate(extent, bindings) for extent in extents(self._problem))
        N = columns // gate_columns(self._problem)
        return {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        return glu_host.workspace_bytes(self.config, sizes["L"])

    def has_tiles(self, sizes: Mapping[str, int]) -> bool:
        return has_tiles(self.config, sizes["M"])


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedGlu:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `glu_support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedGlu(problem, torch.device(device), scheduled(problem, variant))


__all__ = ["KERNEL", "GroupedGlu", "build", "compiled", "kernel_cache", "scheduled"]
