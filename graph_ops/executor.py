"""Runs a Plan: fused kernels and torch ops over the caller's buffers and workspace, in the plan's order.

`compile_plan` does once what does not depend on the buffers: it builds the fused kernels and turns steps into a flat
list. `Executable.run` then only makes views of the workspace and calls. It allocates nothing itself (torch's own ops
may), synchronises nothing, and keeps no buffer, view or pointer after it returns, so threads may share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..kernels import torch_ops
from ..kernels.problem import ROLES, Problem
from ..kernels.registry import KERNELS, FusedKernel, KernelEntry
from ..kernels.streams import current_stream
from .buffers import WORKSPACE_ALIGNMENT, Bound, storage_shape, storage_stride, torch_dtype
from .ir.dims import evaluate
from .ir.errors import GraphNotSupportedError, StateError
from .ir.tensor import TensorSpec
from .plan import Plan, Step
from .workspace import aligned

DECLINES = (NotImplementedError, ImportError, GraphNotSupportedError)
"""What a kernel may raise while it is built to say that it does not serve here; anything else propagates, but for the
ValueError of a variant: it is one of many to measure, and a configuration that cannot be compiled is left out."""

ROWS_ROLE = {rule: next(r.name for r in roles if r.name in ("a", "x")) for rule, roles in ROLES.items()}
"""The role whose rows a fused kernel walks; with no row there is nothing to launch."""

ROLES_WITHOUT_ROWS = ("dw", "dbias", "amax")
"""Outputs that have one slice an expert and no rows, so that a fused kernel writes every element of them."""

GROUPED_READS = {
    ("grouped_matmul", "a"),
    ("grouped_matmul_wgrad", "a"),
    ("grouped_matmul_wgrad", "dy"),
    ("group_sum", "x"),
    ("group_amax", "x"),
}
"""Inputs of which an op reads the rows of the groups that its `offsets` give, and no other."""


class KernelDeclined(Exception):
    """A kernel that the plan chose does not build on this machine; `__cause__` says why."""

    def __init__(self, kernel: str) -> None:
        super().__init__(kernel)
        self.kernel = kernel


@dataclass(frozen=True)
class UnfusedStep:
    """One node run by torch: ports to uids, compile-time scalars by value, and all else that `torch_ops.run` wants."""

    op: str
    inputs: tuple[tuple[str, int], ...]
    scalars: Mapping[str, float]
    outputs: tuple[tuple[str, int], ...]
    attributes: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]

    @property
    def makes(self) -> int | None:
        """The uid of the output that torch may allocate itself."""
        return self.outputs[0][1] if self.op in torch_ops.MAKE else None

    def _given(self, buffers: Mapping[int, Any]) -> dict[str, Any]:
        return {**{port: buffers[uid] for port, uid in self.inputs}, **self.scalars}

    def run(self, buffers: Mapping[int, Any], scratch: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        outputs = {port: buffers[uid] for port, uid in self.outputs}
        torch_ops.run(self.op, self._given(buffers), outputs, self.attributes, self.specs)

    def make(self, buffers: Mapping[int, Any], bindings: Mapping[str, int]) -> torch.Tensor | None:
        """Its output in a tensor that torch allocated, of the declared strides; None where `run` is left to do."""
        spec = self.specs[self.outputs[0][0]]
        made = torch_ops.make(self.op, self._given(buffers), torch_dtype(spec.data_type), self.attributes, self.specs)
        if made is None or made.stride() == storage_stride(spec, bindings):
            return made
        return allocate(spec, bindings, made.device, zeroed=False).copy_(made)


@dataclass(frozen=True)
class FusedStep:
    """One launch of a fused kernel.

    `zeroed` are outputs that must be zero before the launch: scales with padding, and virtual tensors of which a later
    step reads rows outside the groups; a fused kernel need write neither. `rows` is the tensor whose rows it walks.
    """

    kernel: FusedKernel
    roles: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]
    zeroed: tuple[int, ...]
    rows: TensorSpec
    accumulates: bool

    def run(self, buffers: Mapping[int, Any], scratch: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        for uid in self.zeroed:
            zero(buffers[uid])
        self.kernel.run({role: buffers[uid] for role, uid in self.roles}, scratch, bindings)

    def prepare(
        self, buffers: Mapping[int, Any], scratch: torch.Tensor | None, bindings: Mapping[str, int]
    ) -> Callable[[int], object] | None:
        """`run` as a function of the stream's handle, where the kernel has one and that is all."""
        prepare = getattr(self.kernel, "prepare", None)
        if prepare is None or self.zeroed:
            return None
        made: Callable[[int], object] | None = prepare({r: buffers[uid] for r, uid in self.roles}, scratch, bindings)
        return made

    def skip(self, buffers: Mapping[int, Any]) -> None:
        """What is left to do where there is no row to launch for."""
        if not self.accumulates:
            for uid in self.outputs:
                zero(buffers[uid])


RunnableStep = UnfusedStep | FusedStep


def zero(buffer: torch.Tensor) -> None:
    """Zero bytes: also for types without arithmetic, and for scales, whose zero byte is not the value zero."""
    if buffer.element_size() == 1:
        buffer.view(torch.uint8).zero_()
    else:
        buffer.zero_()


def stored_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element, gaps included."""
    return 0 if 0 in shape else (sum((d - 1) * s for d, s in zip(shape, stride, strict=True)) + 1) * dtype.itemsize


@dataclass(frozen=True)
class Allocation:
    """What a buffer is allocated as. `alignment`: bytes, where more are promised than torch's allocator gives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    alignment: int

    @classmethod
    def of(cls, spec: TensorSpec, bindings: Mapping[str, int]) -> Allocation:
        """That of a tensor at some symbol values."""
        shape, stride = storage_shape(spec, bindings), storage_stride(spec, bindings)
        return cls(shape, stride, torch_dtype(spec.data_type), spec.alignment)

    def make(self, device: torch.device, *, zeroed: bool) -> torch.Tensor:
        """A new buffer."""
        if self.alignment <= WORKSPACE_ALIGNMENT[device.type]:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        else:
            size = stored_bytes(self.shape, self.stride, self.dtype)
            memory = torch.empty(size + self.alignment, dtype=torch.uint8, device=device)
            shift = -memory.data_ptr() % self.alignment
            made = memory[shift : shift + size].view(self.dtype).as_strided(self.shape, self.stride)
        if zeroed:
            zero(made)
        return made


def allocate(spec: TensorSpec, bindings: Mapping[str, int], device: torch.device, *, zeroed: bool) -> torch.Tensor:
    """A buffer of `spec`'s shape, strides, data type and alignment."""
    return Allocation.of(spec, bindings).make(device, zeroed=zeroed)


@dataclass(frozen=True)
class Placement:
    """Where all lies in a workspace at some symbol values: `views` has uid, first byte, end, type, shape, stride.

    `idle` are the fused steps, by place, that have no row there; `outputs` what the graph's outputs are, by uid.
    """

    views: tuple[tuple[int, int, int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
    scratch: tuple[int, int]
    idle: Collection[int]
    outputs: Mapping[int, Allocation]

    @property
    def nbytes(self) -> int:
        return self.scratch[1]


@dataclass(frozen=True)
class Executable:
    """A plan built for a device.

    `makers` has, by its place, each step whose output is the graph's and may be torch's own tensor. Its only state is a
    bounded cache of placements by symbol values: numbers, never buffers.
    """

    CACHE_LIMIT = 256

    plan: Plan
    device: torch.device
    steps: tuple[RunnableStep, ...]
    virtual: tuple[TensorSpec, ...]
    partly_written: frozenset[int]
    symbols: tuple[str, ...]
    not_capturable: tuple[str, ...]
    makers: Mapping[int, TensorSpec]
    _placements: dict[tuple[int, ...], Placement] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def stream(self) -> Callable[[], int]:
        """Gives the handle of torch's current stream on the device."""
        return current_stream(self.device)

    @cached_property
    def _only_launches(self) -> bool:
        """Whether no step runs an op of torch that autograd could see."""
        return all(isinstance(s, FusedStep) and not s.zeroed and hasattr(s.kernel, "prepare") for s in self.steps)

    @cached_property
    def made(self) -> frozenset[int]:
        """The outputs that need no buffer when `launch` is called."""
        return frozenset(spec.uid for spec in self.makers.values())

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of workspace for these symbol values: virtual tensors, then the largest scratch of a fused kernel."""
        return self.placement(bindings).nbytes

    def allocate_output(self, spec: TensorSpec, bindings: Mapping[str, int]) -> torch.Tensor:
        """A buffer for a graph output; zeroed where a fused kernel may leave out rows outside the groups."""
        zeroed = spec.uid in self.partly_written
        return self.placement(bindings).outputs[spec.uid].make(self.device, zeroed=zeroed)

    def run(self, bound: Bound, workspace: torch.Tensor | None) -> None:
        """`launch` of a checked variant pack."""
        self.launch(bound.buffers, bound.bindings, workspace)

    def launch(
        self, given: Mapping[int, Any], bindings: Mapping[str, int], workspace: torch.Tensor | None
    ) -> Mapping[int, Any]:
        """Runs every step on torch's current stream. Buffers and workspace have passed every check.

        Outputs among `made` may be missing from `given`: the steps that write them allocate them. Returns every buffer.
        Raises StateError("NOT_CAPTURABLE") before anything is launched, where a CUDA graph is being captured and a step
        cannot be part of one.
        """
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):  # data types are declared
                return self.launch(given, bindings, workspace)
        if (torch.is_grad_enabled() and not self._only_launches) or not self.is_current():
            with torch.no_grad(), self._current_device():
                return self._launch(given, bindings, workspace)
        return self._launch(given, bindings, workspace)

    def prepare(
        self, given: Mapping[int, Any], bindings: Mapping[str, int], workspace: torch.Tensor | None
    ) -> Callable[[int], object] | None:
        """`launch` of these buffers as a function of the stream's handle, to be called with the device current.

        It holds addresses and no tensor. None where some step needs more: torch, or what a run reads anew.
        """
        placement = self.placement(bindings)
        if placement.views or placement.idle or self.not_capturable:  # which is looked at in each call
            return None
        scratch = self._scratch(placement, self._memory(placement, workspace))
        launches = [
            step.prepare(given, scratch, bindings) if isinstance(step, FusedStep) else None for step in self.steps
        ]
        ready = [launch for launch in launches if launch is not None]
        if len(ready) < len(launches) or not ready:
            return None
        return ready[0] if len(ready) == 1 else functools.partial(_each, tuple(ready))

    def _launch(
        self, given: Mapping[int, Any], bindings: Mapping[str, int], workspace: torch.Tensor | None
    ) -> Mapping[int, Any]:
        if self.not_capturable and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "NOT_CAPTURABLE",
                asked=f"execute of graph {self.plan.graph.name} in CUDA graph capture",
                seen="; ".join(self.not_capturable),
                required="steps that run without the host",
                hint="explain() lists them; run outside capture",
            )
        buffers = dict(given)
        placement = self.placement(bindings)
        scratch = None
        if placement.views or placement.nbytes:
            memory = self._memory(placement, workspace)
            for uid, start, end, dtype, shape, stride in placement.views:
                buffers[uid] = memory[start:end].view(dtype).as_strided(shape, stride)
            scratch = self._scratch(placement, memory)
        for place, step in enumerate(self.steps):
            if place in placement.idle:
                assert isinstance(step, FusedStep)
                step.skip(buffers)
            elif place in self.makers and (spec := self.makers[place]).uid not in buffers:
                assert isinstance(step, UnfusedStep)
                made = step.make(buffers, bindings)
                buffers[spec.uid] = self.allocate_output(spec, bindings) if made is None else made
                if made is None:
                    step.run(buffers, scratch, bindings)
            else:
                step.run(buffers, scratch, bindings)
        return buffers

    def placement(self, bindings: Mapping[str, int]) -> Placement:
        """The layout of the workspace at these symbol values."""
        key = tuple([bindings[name] for name in self.symbols])
        placement = self._placements.get(key)
        if placement is None:
            placement = self._place(bindings)
            if len(self._placements) >= self.CACHE_LIMIT:
                self._placements.clear()
            self._placements[key] = placement
        return placement

    def _place(self, bindings: Mapping[str, int]) -> Placement:
        offsets = self.plan.workspace.offsets(bindings)
        views = []
        for spec in self.virtual:
            shape, stride = storage_shape(spec, bindings), storage_stride(spec, bindings)
            dtype = torch_dtype(spec.data_type)
            start = offsets[spec.uid]
            views.append((spec.uid, start, start + stored_bytes(shape, stride, dtype), dtype, shape, stride))
        first = self.plan.workspace.nbytes(bindings)
        needs = [aligned(s.kernel.workspace_bytes(bindings)) for s in self.steps if isinstance(s, FusedStep)]
        idle = [
            place for place, step in enumerate(self.steps)
            if isinstance(step, FusedStep) and evaluate(step.rows.dim[0], bindings) == 0
        ]  # fmt: skip
        outputs = {spec.uid: Allocation.of(spec, bindings) for spec in self.plan.graph.graph_outputs}
        return Placement(tuple(views), (first, first + max(needs, default=0)), frozenset(idle), outputs)

    def _memory(self, placement: Placement, workspace: torch.Tensor | None) -> torch.Tensor:
        """The workspace as bytes; none where there are no rows, so nothing to hold."""
        if workspace is None or not placement.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if workspace.dtype is torch.uint8 and workspace.dim() == 1:
            return workspace
        return workspace.view(-1).view(torch.uint8)

    def _scratch(self, placement: Placement, memory: torch.Tensor) -> torch.Tensor | None:
        first, last = placement.scratch
        if first == last:
            return None
        return memory if (first, last) == (0, memory.numel()) else memory[first:last]

    def is_current(self) -> bool:
        """Whether the plan's device is torch's current one."""
        return self.device.type != "cuda" or torch.cuda.current_device() == self.device.index

    def _current_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_current() else torch.cuda.device(self.device)


def _each(launches: Sequence[Callable[[int], object]], stream: int) -> None:
    for launch in launches:
        launch(stream)


def compile_plan(plan: Plan, device: torch.device, *, kernels: Sequence[KernelEntry] = KERNELS) -> Executable:
    """Builds the fused kernels of a plan and its list of steps. Raises KernelDeclined where a kernel does not build."""
    entries = {k.id: k for k in kernels}
    steps = tuple(_compile_step(plan, step, device, entries) for step in plan.steps)
    virtual = {
        uid: plan.graph.tensors[uid] for step in plan.steps for uid in step.writes if plan.graph.tensors[uid].is_virtual
    }
    zeroed = {uid for step in steps if isinstance(step, FusedStep) for uid in step.zeroed}
    outputs = {
        uid: spec for uid, spec in plan.graph.tensors.items()
        if spec.is_output and spec.alignment <= WORKSPACE_ALIGNMENT[device.type]
    }  # fmt: skip
    makers = {
        place: outputs[step.makes] for place, step in enumerate(steps)
        if isinstance(step, UnfusedStep) and step.makes in outputs
    }  # fmt: skip
    if makers:
        torch_ops.prepare(device)
    partly_written = {
        uid for step, built in zip(plan.steps, steps, strict=True) if isinstance(built, FusedStep)
        for uid in _partly_written(step, entries[step.kernel], built.kernel)
    }  # fmt: skip
    return Executable(
        plan=plan,
        device=device,
        steps=steps,
        virtual=tuple(virtual.values()),
        partly_written=frozenset(partly_written - zeroed),
        symbols=tuple(s.name for s in plan.graph.symbols),
        not_capturable=tuple(f"{s.kernel}: {s.capture_reason}" for s in plan.steps if not s.capturable),
        makers=makers,
    )


def _compile_step(plan: Plan, step: Step, device: torch.device, entries: Mapping[str, KernelEntry]) -> RunnableStep:
    graph = plan.graph
    if step.match is None:
        node = graph.nodes[step.nodes[0]]
        inputs = graph.inputs_of(node)
        groups = None if "offsets" in inputs else graph.row_groups(node)
        return UnfusedStep(
            op=node.op,
            inputs=(
                *((p, uid) for p, uid in node.inputs if not inputs[p].is_constant),
                *(() if groups is None else (("offsets", groups),)),
            ),
            scalars={p: t.value for p, t in inputs.items() if t.value is not None},
            outputs=node.outputs,
            attributes=node.spec.complete(node.attribute),
            specs={**inputs, **graph.outputs_of(node)},
        )
    problem, entry = step.match.problem, entries[step.kernel]
    try:
        kernel = entry.build(problem, device, step.variant)
    except (*DECLINES, ValueError) as error:
        if isinstance(error, ValueError) and step.variant is None:
            raise
        raise KernelDeclined(step.kernel) from error
    offsets, partial = step.buffers.get("offsets"), _partly_written(step, entry, kernel)
    return FusedStep(
        kernel=kernel,
        roles=tuple(step.buffers.items()),
        outputs=step.writes,
        zeroed=tuple(
            uid for role, uid in step.buffers.items()
            if uid in step.writes and (_has_padding(problem, role, kernel) or (
                graph.tensors[uid].is_virtual and uid in partial and not _read_within_groups(plan, uid, offsets)))
        ),
        rows=problem[ROWS_ROLE[problem.rule]],
        accumulates=bool(problem.attributes.get("accumulate")),
    )  # fmt: skip


def _zeroes_scales(kernel: FusedKernel) -> bool:
    """Whether a kernel writes every byte of its scales, those of no row too."""
    return bool(getattr(kernel, "zeroes_scales", False))


def _has_padding(problem: Problem, role: str, kernel: FusedKernel) -> bool:
    """Whether `role` is a tensor of swizzled scales that may have padding, whose bytes are zero by definition and which
    the kernel does not write."""
    layout = problem[role].scale_layout
    codes = problem.get(role.replace("sf_", "q_"))
    if _zeroes_scales(kernel) or not role.startswith("sf_") or layout is None or not layout.swizzled or codes is None:
        return False
    rows, columns = codes.dim
    return layout.matrix((rows, columns)) != layout.storage((rows, columns))


def _partly_written(step: Step, entry: KernelEntry, kernel: FusedKernel) -> tuple[int, ...]:
    """The outputs of which a fused kernel may leave out rows: those outside every group, where there are groups."""
    if "offsets" not in step.buffers:
        return ()
    left_out = [
        role for role in step.buffers
        if role not in ROLES_WITHOUT_ROWS
        and not (_zeroes_scales(kernel) if role.startswith("sf_") else entry.zeroes_rows)
    ]  # fmt: skip
    written = set(step.writes)
    return tuple(step.buffers[role] for role in left_out if step.buffers[role] in written)


def _read_within_groups(plan: Plan, uid: int, offsets: int | None) -> bool:
    """Whether every reader of a fused kernel's output looks only at the rows inside the groups of the same offsets."""
    for step in plan.steps:
        if uid not in step.reads:
            continue
        if step.buffers.get("offsets" if step.is_fused else "in.offsets") != offsets or offsets is None:
            return False
        names = [name for name, held in step.buffers.items() if held == uid]
        if step.is_fused:
            if any(name not in ("a", "dy", "c", "prob") for name in names):
                return False
        elif any((step.kernel.removeprefix("torch."), name.removeprefix("in.")) not in GROUPED_READS for name in names):
            return False
    return True


__all__ = ["Executable", "KernelDeclined", "allocate", "compile_plan", "zero"]
