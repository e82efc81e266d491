"""Adapter onto kernels/sm90's plain grouped GEMM: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ..cache import KernelCache
from ..problem import Problem
from ..sm90 import gemm_host
from ..sm90.gemm_arguments import gemm_arguments
from ..sm90.gemm_config import GemmConfig
from .gemm_support import scheduled
from .launched import Launched, cached, kernel_cache
from .support import extents

KERNEL = "sm90.grouped_gemm"


def compiled(config: GemmConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    return cached(KERNEL, config, gemm_host.FUNCTIONS.compile, cache)


class GroupedGemm(Launched):
    """A FusedKernel: one configuration on one device. Rows that no expert owns are zero in y."""

    def __init__(self, problem: Problem, device: torch.device, config: GemmConfig) -> None:
        super().__init__(problem, device, config, gemm_arguments(config), compiled(config, kernel_cache()))
        gemm_host.FUNCTIONS.install(config, self._function)

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        M, K, N, L = (evaluate(extent, bindings) for extent in extents(self._problem))
        return {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        return gemm_host.workspace_bytes(self.config, sizes["L"])


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedGemm:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `gemm_support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedGemm(problem, torch.device(device), scheduled(problem, variant))


__all__ = ["KERNEL", "GroupedGemm", "build", "compiled", "kernel_cache", "scheduled"]
