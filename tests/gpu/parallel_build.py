"""Compiles kernels into the cache on disk, in as many processes as the machine has cores.

A kernel takes one core some 6 seconds, tests need some 300 of them: 2 minutes on 16 cores, once. No GPU is needed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opfuse.kernels.cache import CacheKey, KernelCache

ADAPTERS = {
    "DgluConfig": "opfuse.kernels.hopper.grouped_dglu",
    "GluConfig": "opfuse.kernels.hopper.grouped_glu",
    "QuantizeConfig": "opfuse.kernels.hopper.quantize_row_col",
    "GemmConfig": "opfuse.kernels.hopper.grouped_gemm",
    "WgradConfig": "opfuse.kernels.hopper.grouped_wgrad",
}
"""Class of a configuration -> the module whose `compiled(config, cache)` compiles it and whose `kernel_cache()` the
library uses."""


@dataclass(frozen=True)
class Built:
    """What a fill did: kernels found, kernels compiled, seconds, processes, and what failed with what."""

    found: int
    compiled: int
    seconds: float
    processes: int
    failed: dict[Any, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = (
            f"kernels: {self.found} found, {self.compiled} compiled by {self.processes} processes, {self.seconds:.0f} s"
        )
        return "\n  failed: ".join([told, *(f"{config}: {error}" for config, error in self.failed.items())])


class _KeyReader:
    """Stands for a cache and gives the key that it is asked for."""

    def get(self, key: CacheKey, compile_to: Callable[[Path], None], load: Callable[[Path], Any]) -> CacheKey:
        return key


def adapter(config: Any) -> Any:
    return importlib.import_module(ADAPTERS[type(config).__name__])


def key_of(config: Any) -> CacheKey:
    """The key of a configuration's entry in the cache."""
    return adapter(config).compiled(config, _KeyReader())


def _compile(config: Any, folder: Path) -> None:
    adapter(config).compiled(config, KernelCache(folder))


def fill(folder: Path, wanted: Iterable[Any], workers: int | None = None) -> Built:
    """Compiles what the cache at `folder` does not have. A configuration that fails is left out and told."""
    begin, every = time.monotonic(), list(dict.fromkeys(wanted))
    missing = [c for c in every if not (folder / f"{key_of(c).digest}.json").exists()]
    if not missing:
        return Built(len(every), 0, time.monotonic() - begin, 0)
    workers = max(1, min(len(missing), workers or os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {config: pool.submit(_compile, config, folder) for config in missing}
        failed = {config: repr(error) for config, job in jobs.items() if (error := job.exception()) is not None}
    found, compiled = len(every) - len(missing), len(missing) - len(failed)
    return Built(found, compiled, time.monotonic() - begin, workers, failed)


def load(config: Any) -> Any:
    """The function of a configuration from the library's cache, compiled into it where it is missing."""
    return adapter(config).compiled(config, adapter(config).kernel_cache())
