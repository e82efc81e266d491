"""Adapter onto kernels/sm90's grouped GEMM + dGLU: from roles to launch arguments, compiled objects from the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
from ..sm90.arguments import Words, dglu_arguments, words_of
from ..sm90.config import DgluConfig
from . import support

KERNEL = "sm90.grouped_gemm_dglu"
SOURCES = Path(sm90_config.__file__).parent
COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")
WORKSPACE_ALIGNMENT = 256

Buffer = torch.Tensor | Sequence[torch.Tensor]

ROLE_OF = {"dy": "a"}
"""Roles of the kernel's arguments that have another name there."""
TEMPLATES = 256
_UNKNOWN = object()


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
    """A FusedKernel: one configuration on one device.

    Its only state is a bounded cache of a launch's integers by symbol values: sizes and strides, no addresses.
    """

    def __init__(self, problem: Problem, device: torch.device, config: DgluConfig) -> None:
        self.config = config
        self._problem, self._device, self._discrete = problem, device, problem["b"].discrete
        _, _, _, experts = support.extents(problem)
        assert isinstance(experts, int)
        self._experts = experts
        self._addresses = AddressArrays(device, support.ALIGNMENT)
        self._arguments = dglu_arguments(config)
        self._function = compiled(config, kernel_cache())
        self._stream = host.current_stream(device)
        self._templates: dict[tuple[Any, ...], Words | None] = {}
        host.install(config, self._function)

    def _kernel_bytes(self, bindings: Mapping[str, int]) -> int:
        rows, _, columns, _ = (evaluate(extent, bindings) for extent in support.extents(self._problem))
        needed = host.workspace_bytes(self.config, self._experts, rows, columns)
        return -(-needed // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of partials and descriptors, and of the experts' addresses where the weights are separate."""
        return self._kernel_bytes(bindings) + 8 * self._experts * self._discrete

    def run(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        """Launches on torch's current stream. Rows outside every group become zero in d, dprob, activation and codes;
        scales of such rows, and the padding of scales, are not written."""
        tensors: dict[str, Any] = {**buffers, "dy": buffers["a"], "workspace": workspace}
        if self._discrete and not isinstance(buffers["b"], torch.Tensor):
            assert workspace is not None
            start = self._kernel_bytes(bindings)
            into = workspace[start : start + 8 * self._experts].view(torch.int64)
            tensors["b"] = self._addresses.on_device(buffers["b"], into)
        words = self._template(bindings)
        if words is None:
            for name in host.OUTPUTS:
                if name in tensors:
                    tensors[name].view(torch.uint8).zero_()
        else:
            self._function(*words.at(tensors), self._stream())

    def prepare(
        self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]
    ) -> Callable[[int], object] | None:
        """`run` of these buffers as a function of the stream's handle, which holds addresses and no tensor; None where
        `run` does more than to launch."""
        words = self._template(bindings)
        if words is None or not isinstance(buffers["b"], torch.Tensor):
            return None
        tensors: dict[str, Any] = {**buffers, "dy": buffers["a"], "workspace": workspace}
        return functools.partial(self._function, *words.at(tensors))

    def _template(self, bindings: Mapping[str, int]) -> Words | None:
        """The launch's integers at these symbol values, as the problem declares its tensors; None where no expert can
        own a row."""
        key = (*bindings.items(),)
        known = self._templates.get(key, _UNKNOWN)
        if isinstance(known, Words) or known is None:
            return known
        made = self._words(bindings)
        if len(self._templates) >= TEMPLATES:
            self._templates.clear()
        self._templates[key] = made
        return made

    def _words(self, bindings: Mapping[str, int]) -> Words | None:
        M, K, N, L = (evaluate(extent, bindings) for extent in support.extents(self._problem))
        if not host.has_tiles(self.config, M):
            return None
        opened: dict[str, tuple[int, ...]] = {}
        for argument in self._arguments:
            if argument.name == "workspace":
                opened["workspace"] = (self._kernel_bytes(bindings),)
            elif argument.name.startswith("sf_"):
                opened[argument.name] = (math.prod(self._problem[argument.name].shape(bindings)),)
            elif argument.count > 1:
                spec = self._problem[ROLE_OF.get(argument.name, argument.name)]
                stride = tuple(evaluate(one, bindings) for one in spec.stride)
                opened[argument.name] = argument.opened(spec.shape(bindings), stride)
            else:
                opened[argument.name] = ()
        sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
        return words_of(self._arguments, sizes, host.clusters(self.config, self._device), opened)


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedDglu:
    """Compiles the kernel for `problem`, or loads it; `variant` is one of `support.variants(problem)`. Raises
    ImportError without the DSL, UnsupportedConfig where the kernel's legality function declines (condition LEGAL says
    so first)."""
    return GroupedDglu(problem, torch.device(device), support.scheduled(problem, variant))
