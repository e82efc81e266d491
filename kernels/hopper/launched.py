"""What the adapters of our kernels share: compiled objects from the cache on disk, and a launch as integers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ..addresses import AddressArrays
from ..cache import CacheKey, KernelCache, compiler_versions, source_digest
from ..problem import Problem
from ..sm90 import compiling, launching
from ..sm90 import config as sm90_config
from ..sm90.arguments import Argument, Words, words_of
from ..streams import current_stream
from . import support

SOURCES = Path(sm90_config.__file__).parent
WORKSPACE_ALIGNMENT = 256

Buffer = torch.Tensor | Sequence[torch.Tensor]

TEMPLATES = 256
_UNKNOWN = object()


@functools.cache
def kernel_cache() -> KernelCache:
    """The cache of this process: the default folder, read once."""
    return KernelCache()


@functools.cache
def origin() -> tuple[str, dict[str, str]]:
    """(digest of the kernels' sources, versions of what compiles them), as they were when first asked for."""
    return source_digest(SOURCES.glob("*.py")), compiler_versions()


def cached(kernel: str, config: Any, compile_config: Callable[[Any], Any], cache: KernelCache) -> Any:
    """The function of a kernel's configuration, from `cache` or compiled into it. Raises ImportError without the
    DSL."""
    sources, versions = origin()
    key = CacheKey(kernel, "sm90a", sources, versions, config.as_dict())

    def compile_to(path: Path) -> None:
        path.write_bytes(compiling.export_object(compile_config(config)))

    return cache.get(key, compile_to, lambda path: compiling.load_object(path.read_bytes()))


class Launched:
    """A FusedKernel: one configuration on one device.

    Its only state is a bounded cache of a launch's integers by symbol values: sizes and strides, no addresses.
    `role_of` gives the roles of arguments that have another name there; `outputs` the arguments that become zero where
    no expert can own a row.
    """

    role_of: Mapping[str, str] = {}
    outputs: Sequence[str] = ()

    def __init__(
        self, problem: Problem, device: torch.device, config: Any, arguments: Sequence[Argument], function: Any
    ) -> None:
        self.config = config
        self._problem, self._device = problem, device
        self._discrete = "b" in problem and problem["b"].discrete
        # How many addresses a launch passes: a number, as conditions EXPERTS require.
        self._experts = evaluate(problem["b"].dim[0], {}) if self._discrete else 0
        self._addresses = AddressArrays(device, support.ALIGNMENT)
        self._arguments, self._function = arguments, function
        self._stream = current_stream(device)
        self._templates: dict[tuple[Any, ...], Words | None] = {}

    def sizes(self, bindings: Mapping[str, int]) -> dict[str, int]:
        """The extents by the names of `arguments.SIZES`."""
        raise NotImplementedError

    def scratch_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the kernel's own workspace."""
        raise NotImplementedError

    def has_tiles(self, sizes: Mapping[str, int]) -> bool:
        """Whether an expert can own a row."""
        return sizes["M"] > 0

    def clusters(self) -> int:
        """Clusters of one launch."""
        return launching.clusters(self.config.schedule, self._device)

    def _kernel_bytes(self, bindings: Mapping[str, int]) -> int:
        return -(-self.scratch_bytes(self.sizes(bindings)) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of the kernel's scratch, and of the experts' addresses where the weights are separate."""
        return self._kernel_bytes(bindings) + 8 * self._experts * self._discrete

    def run(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        """Launches on torch's current stream. Rows outside every group become zero in every output but scales: those of
        such rows, and padding, are not written, unless the kernel `zeroes_scales`."""
        tensors = self._tensors(buffers, workspace)
        if self._discrete and not isinstance(buffers["b"], torch.Tensor):
            assert workspace is not None
            start = self._kernel_bytes(bindings)
            into = workspace[start : start + 8 * self._experts].view(torch.int64)
            tensors["b"] = self._addresses.on_device(buffers["b"], into)
        words = self._template(bindings)
        if words is None:
            for name in self.outputs:
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
        if words is None or (self._discrete and not isinstance(buffers["b"], torch.Tensor)):
            return None
        return functools.partial(self._function, *words.at(self._tensors(buffers, workspace)))

    def words(self, bindings: Mapping[str, int]) -> tuple[Callable[..., object], Words] | None:
        """The function of `run` and its integers at these symbol values, addresses missing and the stream: `places` has
        them by role, and "workspace". None where `run` does more than to launch."""
        words = self._template(bindings)
        if words is None or self._discrete:
            return None
        named = tuple((place, self.role_of.get(name, name)) for place, name in words.places)
        return self._function, Words(words.values, named)

    def _tensors(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None) -> dict[str, Any]:
        renamed = {name: buffers[role] for name, role in self.role_of.items() if role in buffers}
        return {**buffers, **renamed, "workspace": workspace}

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
        sizes = self.sizes(bindings)
        if not self.has_tiles(sizes):
            return None
        opened: dict[str, tuple[int, ...]] = {}
        for argument in self._arguments:
            if argument.name == "workspace":
                opened["workspace"] = (self._kernel_bytes(bindings),)
            elif argument.name.startswith("sf_"):
                opened[argument.name] = (math.prod(self._problem[argument.name].shape(bindings)),)
            elif argument.count > 1:
                spec = self._problem[self.role_of.get(argument.name, argument.name)]
                stride = tuple(evaluate(one, bindings) for one in spec.stride)
                opened[argument.name] = argument.opened(spec.shape(bindings), stride)
            else:
                opened[argument.name] = ()
        return words_of(self._arguments, sizes, self.clusters(), opened)
