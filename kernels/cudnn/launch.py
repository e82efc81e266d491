"""Compiles a class of cudnn-frontend for one configuration and launches it on a graph's buffers.

A `Family` says in data what differs between the classes. Importing this module imports no cuDNN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ...graph_ops.ir.errors import VariantPackError
from ..addresses import AddressArrays
from ..problem import Problem
from . import support, versions
from .knobs import Knobs, chosen
from .operands import ONES, SCRATCH, Argument, Configuration, configure, torch_type

REGION_ALIGNMENT = 128

Buffer = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Family:
    """One class and how a problem becomes its arguments.

    `arguments(configuration, rows)` is the table of operands. `zeroed` are outputs (or scratch) that the kernel adds
    or maximises into. `constructor` and `execution` are keywords besides operands. `addresses` are the roles of
    discrete weights with the keyword of their address array. `owns_scratch`: the object allocates its own scratch when
    it is compiled, so that it must not serve two streams; otherwise `execute` takes `workspace`. `finish` is called
    with the views of a run after the launch. `empty` are outputs that are zero where there are no rows to launch for.
    `knobs` are its variants.
    """

    class_name: str
    arguments: Callable[[Configuration, int], tuple[Argument, ...]]
    constructor: Callable[[Configuration], dict[str, Any]]
    standing_in: tuple[str, ...]
    knobs: tuple[Knobs, ...]
    zeroed: tuple[str, ...] = ()
    execution: Callable[[Configuration], dict[str, Any]] = lambda configuration: {}
    addresses: Mapping[str, str] = field(default_factory=lambda: {"b": "b_ptrs"})
    owns_scratch: bool = False
    finish: Callable[[Configuration, Mapping[str, torch.Tensor]], None] | None = None
    real_samples: tuple[str, ...] = ("sample_a",)
    empty: tuple[str, ...] = ()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` current: the classes ask torch for the current one. A cross-compilation has none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@lru_cache(maxsize=1)
def _descriptor_class() -> Any:
    """cuDNN's descriptor with an address, since some classes look at the alignment of every operand."""
    from cudnn.api_base import TensorDesc

    class Descriptor(TensorDesc):  # type: ignore[misc]
        def data_ptr(self) -> int:
            return 0

    return Descriptor


def samples(family: Family, configuration: Configuration, device: torch.device) -> dict[str, Any]:
    """The constructor's operands: real memory where the class reads some, descriptors otherwise."""
    describe = _descriptor_class()
    made: dict[str, Any] = {}
    for argument in family.arguments(configuration, support.ROW_MULTIPLE):
        dtype, (shape, stride) = torch_type(argument.data_type), argument.stored
        if argument.sample in family.real_samples:
            memory = torch.zeros(argument.nbytes, dtype=torch.uint8, device=device)
            made[argument.sample] = memory.view(dtype).as_strided(shape, stride)
        else:
            order = sorted(range(len(shape)), key=lambda i: (argument.stride[i], argument.shape[i]))
            made[argument.sample] = describe(dtype, argument.shape, argument.stride, tuple(order), device)
    return made


def instance(family: Family, configuration: Configuration, device: torch.device) -> Any:
    """The class's object, checked by the class itself. Raises what it raises where it refuses the configuration."""
    import cudnn

    cls = getattr(cudnn, family.class_name)
    knobs = configuration.knobs.keywords if configuration.knobs is not None else {}
    made = cls(**samples(family, configuration, device), **family.constructor(configuration), **knobs)
    made.check_support()
    return made


def _compile(family: Family, configuration: Configuration, device: torch.device) -> Any:
    with _on(device):
        made = instance(family, configuration, device)
        made.compile()
    return made


_shared = lru_cache(maxsize=256)(_compile)


class Launcher:
    """A FusedKernel: one configuration of one family on one device.

    Compiled objects that take their scratch from the caller are shared within the process; those that own it are not.
    """

    def __init__(self, family: Family, problem: Problem, device: torch.device, variant: str | None = None) -> None:
        self.configuration = configure(problem, family.standing_in, chosen(family.knobs, variant))
        self._family, self._problem, self._device = family, problem, device
        compiled = _compile if family.owns_scratch else _shared
        self._kernel = compiled(family, self.configuration, device)
        self._addresses = {role: AddressArrays(device, support.ALIGNMENT) for role in family.addresses}

    def arguments(self, rows: int) -> tuple[Argument, ...]:
        return self._family.arguments(self.configuration, rows)

    def regions(self, rows: int) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of each piece of the workspace: the class's own scratch, and what the graph does not give."""
        missing = [a for a in self.arguments(rows) if a.role not in self._problem and a.absent]
        wanted = {"workspace": 0 if self._family.owns_scratch else self._kernel.scratch_workspace_bytes()}
        wanted["ones"] = 4 * max((math.prod(a.shape) for a in missing if a.absent == ONES), default=0)
        wanted.update((a.role, a.nbytes) for a in missing if a.absent == SCRATCH)
        if self.configuration.discrete:
            wanted.update((f"addresses of {role}", 8 * self.configuration.experts) for role in self._family.addresses)
        placed, end = {}, 0
        for name, nbytes in wanted.items():
            placed[name] = (end, nbytes)
            end += -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return placed

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of workspace, aligned to 128."""
        offset, nbytes = list(self.regions(self._rows(bindings)).values())[-1]
        return -(-(offset + nbytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT

    def run(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        """Launches on torch's current stream and reads nothing back.

        Discrete weights (and their scales) are a sequence of tensors or an int64 tensor of addresses on the device.
        Rows at or past the last end offset are zero where the kernel adds up and not written elsewhere. Raises
        VariantPackError without the workspace that it needs and for a misaligned expert.
        """
        rows, family = self._rows(bindings), self._family
        for role in family.zeroed:
            if role in self._problem:
                _tensor(buffers[role]).zero_()
        if rows == 0:
            for role in family.empty:
                _tensor(buffers[role]).zero_()
            return
        needed = self.workspace_bytes(bindings)
        if workspace is None and needed:
            raise VariantPackError("WORKSPACE", asked="workspace", seen=None, required=f"{needed} bytes")
        pieces: dict[str, torch.Tensor] = {}
        if workspace is not None:
            pieces = {name: workspace[at : at + nbytes] for name, (at, nbytes) in self.regions(rows).items()}
        if "ones" in pieces and pieces["ones"].numel():
            pieces["ones"].view(torch.float32).fill_(1.0)
        operands, views = self._views(buffers, pieces, rows)
        if self.configuration.discrete:
            for role, keyword in family.addresses.items():
                into = pieces[f"addresses of {role}"].view(torch.int64)
                operands[keyword] = self._addresses[role].on_device(buffers[role], into)
        if not family.owns_scratch:
            operands["workspace"] = pieces["workspace"]
        with _on(self._device):
            self._kernel.execute(
                **operands, **family.execution(self.configuration), current_stream=_stream(self._device)
            )
        if family.finish is not None:
            family.finish(self.configuration, views | {r: _tensor(buffers[r]) for r in ("dprob",) if r in buffers})

    def _views(
        self, buffers: Mapping[str, Buffer], pieces: Mapping[str, torch.Tensor], rows: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The operands by keyword of execute, and the same by role."""
        operands: dict[str, Any] = {}
        views: dict[str, torch.Tensor] = {}
        for argument in self.arguments(rows):
            if argument.role in self._problem:
                memory = _tensor(buffers[argument.role])
            elif argument.absent == ONES:
                memory = pieces["ones"].view(torch.float32)
            else:
                memory = pieces[argument.role]
                if argument.role in self._family.zeroed:
                    memory.zero_()
            operands[argument.execute] = views[argument.role] = argument.view(memory)
        return operands, views

    def _rows(self, bindings: Mapping[str, int]) -> int:
        return evaluate(self._problem["a"].dim[0], bindings)


def _tensor(buffer: Buffer) -> torch.Tensor:
    assert isinstance(buffer, torch.Tensor)
    return buffer


def _stream(device: torch.device) -> Any:
    """The caller's current stream as the CUDA binding's type."""
    from cuda.bindings import driver

    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)


def launcher(family: Family, problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem` (M stays free), as the class thinks best or as one of `family.knobs`.

    Raises ImportError without cudnn-frontend.
    """
    versions.warn_if_unknown(versions.installed())
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return Launcher(family, problem, where, variant)
