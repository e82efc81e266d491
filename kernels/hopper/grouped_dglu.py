"""Adapter onto kernels/sm90's grouped GEMM + dGLU: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate, known_divisor
from ..cache import KernelCache
from ..problem import Problem
from ..sm90 import dglu_host
from ..sm90.dglu_arguments import dglu_arguments
from ..sm90.dglu_config import DgluConfig
from .dglu_support import scheduled
from .launched import Launched, cached, kernel_cache
from .support import extents

KERNEL = "sm90.grouped_gemm_dglu"


def compiled(config: DgluConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    return cached(KERNEL, config, dglu_host.FUNCTIONS.compile, cache)


class GroupedDglu(Launched):
    """A FusedKernel: one configuration on one device. Zero where no expert owns a row: d, dprob, activation, codes, and
    with `zeroes_scales` every byte of the scales that is no group's."""

    role_of = {"dy": "a"}
    outputs = dglu_host.OUTPUTS

    def __init__(self, problem: Problem, device: torch.device, config: DgluConfig) -> None:
        super().__init__(problem, device, config, dglu_arguments(config), compiled(config, kernel_cache()))
        dglu_host.FUNCTIONS.install(config, self._function)
        columns = extents(problem)[2]
        self.zeroes_scales = dglu_host.zeroes_scales(config, known_divisor(columns))

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        M, K, N, L = (evaluate(extent, bindings) for extent in extents(self._problem))
        return {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        return dglu_host.workspace_bytes(self.config, sizes["L"], sizes["M"], sizes["N"])

    def has_tiles(self, sizes: Mapping[str, int]) -> bool:
        return dglu_host.has_tiles(self.config, sizes["M"])


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedDglu:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedDglu(problem, torch.device(device), scheduled(problem, variant))


__all__ = ["KERNEL", "GroupedDglu", "build", "compiled", "kernel_cache", "scheduled"]
