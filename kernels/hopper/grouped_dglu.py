"""Adapter onto kernels/sm90's grouped GEMM + dGLU: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ..addresses import AddressArrays
from ..cache import CacheKey, KernelCache, source_digest
from ..problem import Problem
from ..sm90 import config as sm90_config
from ..sm90 import host
from ..sm90.config import DgluConfig
from . import support

KERNEL = "sm90.grouped_gemm_dglu"
SOURCES = Path(sm90_config.__file__).parent
COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")
WORKSPACE_ALIGNMENT = 256

Buffer = torch.Tensor | Sequence[torch.Tensor]

LAUNCH_ROLES = ("offsets", "c", "d", "prob", "alpha", "beta", "dprob", "activation", "dbias", "amax", "q_row",
                "sf_row", "q_col", "sf_col")  # fmt: skip
"""Roles that `host.launch` takes under their own name."""


@functools.cache
def kernel_cache() -> KernelCache:
    """The cache of this process: the default folder, read once."""
    return KernelCache()


@functools.cache
def _origin() -> tuple[str, dict[str, str]]:
    """(digest of the kernel's sources, versions of what compiles them)."""
    return source_digest(SOURCES.glob("*.py")), {name: metadata.version(name) for name in COMPILERS}


def compiled(config: DgluConfig, cache: KernelCache) -> Any:
    """The function of a configuration, from `cache` or compiled into it. Raises ImportError without the DSL."""
    sources, versions = _origin()
    key = CacheKey(KERNEL, "sm90a", sources, versions, config.as_dict())

    def compile_to(path: Path) -> None:
        path.write_bytes(host.export_object(host.compile_dglu(config)))

    return cache.get(key, compile_to, lambda path: host.load_object(path.read_bytes()))


class GroupedDglu:
    """A FusedKernel: one configuration on one device."""

    def __init__(self, problem: Problem, device: torch.device, config: DgluConfig) -> None:
        self.config = config
        self._problem, self._discrete = problem, problem["b"].discrete
        self._rows, _, self._columns, experts = support.extents(problem)
        assert isinstance(experts, int)
        self._experts = experts
        self._roles = tuple(role for role in LAUNCH_ROLES if role in problem)
        self._addresses = AddressArrays(device, support.ALIGNMENT)
        host.install(config, compiled(config, kernel_cache()))

    def _kernel_bytes(self, bindings: Mapping[str, int]) -> int:
        needed = host.workspace_bytes(
            self.config, self._experts, evaluate(self._rows, bindings), evaluate(self._columns, bindings)
        )
        return -(-needed // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of partials and descriptors, and of the experts' addresses where the weights are separate."""
        return self._kernel_bytes(bindings) + 8 * self._experts * self._discrete

    def run(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        """Launches on torch's current stream. Rows outside every group become zero in d, dprob, activation and codes;
        scales of such rows, and the padding of scales, are not written."""
        given: dict[str, Any] = {role: buffers[role] for role in self._roles}
        if "prob" in given:
            given["prob"] = given["prob"].reshape(-1)
        a: Any = buffers["a"]
        b: Any = buffers["b"]
        if self._discrete and not isinstance(b, torch.Tensor):
            assert workspace is not None
            start = self._kernel_bytes(bindings)
            b = self._addresses.on_device(b, workspace[start : start + 8 * self._experts].view(torch.int64))
        host.launch(self.config, dy=a, b=b, workspace=workspace, **given)


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedDglu:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedDglu(problem, torch.device(device), support.scheduled(problem, variant))
