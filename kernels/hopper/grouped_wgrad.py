"""Adapter onto kernels/sm90's grouped weight gradient: from roles to launch arguments, compiled objects from the
cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ..cache import KernelCache
from ..problem import Problem
from ..sm90 import wgrad_host
from ..sm90.wgrad_arguments import wgrad_arguments
from ..sm90.wgrad_config import WgradConfig
from .launched import Launched, cached, kernel_cache
from .wgrad_support import extents, scheduled

KERNEL = "sm90.grouped_gemm_wgrad"


def compiled(config: WgradConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    return cached(KERNEL, config, wgrad_host.FUNCTIONS.compile, cache)


class GroupedWgrad(Launched):
    """A FusedKernel: one configuration on one device. An expert without rows gets zeros, or nothing added."""

    def __init__(self, problem: Problem, device: torch.device, config: WgradConfig) -> None:
        super().__init__(problem, device, config, wgrad_arguments(config), compiled(config, kernel_cache()))
        self.outputs = () if config.accumulate else ("dw",)
        wgrad_host.FUNCTIONS.install(config, self._function)

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        M, K, N, L = (evaluate(extent, bindings) for extent in extents(self._problem))
        return {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        return 0


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedWgrad:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `wgrad_support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedWgrad(problem, torch.device(device), scheduled(problem, variant))


__all__ = ["KERNEL", "GroupedWgrad", "build", "compiled", "kernel_cache", "scheduled"]
