"""Adapter onto kernels/sm90's quantize kernel: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cache import KernelCache
from ..problem import Problem
from ..sm90 import quantize_host
from ..sm90.quantize_arguments import quantize_arguments
from ..sm90.quantize_config import QuantizeConfig
from .launched import Launched, cached, kernel_cache
from .quantize_support import configuration

KERNEL = "sm90.quantize_row_col"


def compiled(config: QuantizeConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    return cached(KERNEL, config, quantize_host.FUNCTIONS.compile, cache)


class QuantizeRowCol(Launched):
    """A FusedKernel: one configuration on one device. Every byte of codes and scales is written."""

    zeroes_scales = True

    def __init__(self, problem: Problem, device: torch.device, config: QuantizeConfig) -> None:
        super().__init__(problem, device, config, quantize_arguments(config), compiled(config, kernel_cache()))
        quantize_host.FUNCTIONS.install(config, self._function)

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        M, N = self._problem["x"].shape(bindings)
        return quantize_host.extents(M, N)

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        return 0

    def clusters(self) -> int:
        """The grid follows the sizes."""
        return 1


def scheduled(problem: Problem, variant: str | None = None) -> QuantizeConfig:
    """The configuration that `build` builds, by the name that adapters with several schedules have for it."""
    assert variant is None, "one schedule serves every shape"
    return configuration(problem)


def build(problem: Problem, device: Any) -> QuantizeRowCol:
    """Compiles the kernel for `problem`, or loads it. Raises ImportError without the DSL."""
    return QuantizeRowCol(problem, torch.device(device), scheduled(problem))


__all__ = ["KERNEL", "QuantizeRowCol", "build", "compiled", "kernel_cache", "scheduled"]
