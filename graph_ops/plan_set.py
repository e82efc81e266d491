"""The plans of one graph: which are open, which is taken for given sizes, and what was built of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kernels.registry import KernelEntry
from .ir.errors import GraphNotSupportedError, StateError
from .ir.graph import OpGraph
from .log import log_build_fallback
from .plan import Plan
from .planner import make_plan
from .target import Target

if TYPE_CHECKING:
    import torch

    from .buffers import Binder
    from .executor import Executable
    from .recall import Found
    from .tuning import Progress, TuningRecord

ITS_OWN = "its own"
"""Stands for the workspace of a call that makes one."""

HEURISTICS = ("A", "FALLBACK")
"""Modes of planning. A: the fused plan, then plans that do without one of its kernels, then the unfused plan; behind
them the fused plan with variants of its kernels, for policy ALL to measure. FALLBACK: the unfused plan."""


def candidate_plans(
    graph: OpGraph, target: Target, modes: Sequence[str], kernels: Sequence[KernelEntry]
) -> tuple[Plan, ...]:
    """The plans that `modes` ask for, best first, each name once. `graph` is verified."""

    def plan(fused: bool, without: Collection[str] = ()) -> Plan:
        return make_plan(
            graph, target.arch, fused=fused, disable=(*target.disable, *without), kernels=kernels, verified=True
        )

    found: dict[str, Plan] = {}
    varied: dict[str, Plan] = {}
    for mode in modes:
        if mode == "A" and target.fused:
            best = plan(True)
            found.setdefault(best.name, best)
            varied = {other.name: other for other in _variants(best, kernels)}
            for kernel in sorted({step.kernel for step in best.fused_steps}):
                other = plan(True, [kernel])
                if other.fused_steps:
                    found.setdefault(other.name, other)
            if not best.fused_steps:
                continue  # the same nodes as the unfused plan, and it carries the reasons
        unfused = plan(False)
        found.setdefault(unfused.name, unfused)
    return (*found.values(), *varied.values())


def _variants(plan: Plan, kernels: Sequence[KernelEntry]) -> Iterator[Plan]:
    """The plan with one of its kernels built another way: wherever it runs and has that variant."""
    entries = {k.id: k for k in kernels}
    offered: dict[tuple[str, str], set[int]] = {}
    for place, step in enumerate(plan.steps):
        if step.match is not None:
            for variant in entries[step.kernel].variants(step.match.problem):
                offered.setdefault((step.kernel, variant), set()).add(place)
    for (_, variant), places in offered.items():
        steps = (replace(s, variant=variant) if i in places else s for i, s in enumerate(plan.steps))
        yield replace(plan, steps=tuple(steps))


class PlanSet:
    """Plans in order of preference, and what was built of them. Changes under the lock of the graph that owns it."""

    def __init__(self, graph: OpGraph, target: Target, modes: Sequence[str], kernels: Sequence[KernelEntry]) -> None:
        self.target = target
        self.plans = candidate_plans(graph, target, modes, kernels)
        self.pinned: int | None = None
        self.record: TuningRecord | None = None
        self.version = 0  # grows with every change of what `choice` answers
        self._kernels = kernels
        self._barred: set[int] = set()
        self._chosen: int | None = None
        self._executables: dict[int, Executable] = {}
        self._device: torch.device | None = None

    @property
    def open(self) -> tuple[int, ...]:
        """The plans that may be taken, best first: the pinned one, or all that are not deselected."""
        if self.pinned is not None:
            return (self.pinned,)
        return tuple(i for i in range(len(self.plans)) if i not in self._barred)

    @property
    def preferred(self) -> Plan:
        """The plan that is pinned, won the last measurement, was built, or stands first among the open ones."""
        if self.pinned is None and self._chosen is not None:
            return self.plans[self._chosen]
        return self.plans[next(iter(self.open), 0)]

    def at(self, index: int, asked: str) -> Plan:
        """The plan of that index. Raises StateError("PLAN_INDEX")."""
        if not 0 <= index < len(self.plans):
            raise StateError("PLAN_INDEX", asked=f"{asked}({index})", seen=f"{len(self.plans)} plans",
                             required=f"an index from 0 to {len(self.plans) - 1}")  # fmt: skip
        return self.plans[index]

    def pin(self, index: int) -> None:
        """Takes this plan and no other; builds it if plans are built. Raises StateError for a deselected one."""
        plan = self.at(index, "select_plan")
        if index in self._barred:
            raise StateError("PLAN_DESELECTED", asked=f"select_plan({index})", seen=f"{plan.name}, deselected",
                             required="a plan that is not")  # fmt: skip
        if self._device is not None:
            self.executable(index)
        self.pinned = index
        self.version += 1

    def deselect(self, names: Sequence[str]) -> None:
        """Bars every plan whose name contains one of `names`. Raises StateError for a name that no plan contains."""
        for name in names:
            barred = {i for i, plan in enumerate(self.plans) if name in plan.name}
            if not barred:
                raise StateError(
                    "ENGINE_UNKNOWN",
                    asked=f"deselect_engines([{name!r}])",
                    seen=[p.name for p in self.plans],
                    required="part of a plan's name",
                )
            self._barred |= barred
        if self.pinned in self._barred:
            self.pinned = None
        self.version += 1

    def build_first(self, device: torch.device) -> None:
        """Builds the first open plan that builds (and with known winners, those too)."""
        self._device = device
        built = self._build(self.open, enough=1)
        self._chosen = built[0]
        for name in set(self.record.winners.values()) if self.record else ():
            self.executable(self._index_of(name))
        self._chosen = self._last_winner()
        self.version += 1

    def build_all(self, binder: Binder, sizes: Sequence[Mapping[str, int]]) -> None:
        """Builds every open plan and, if there is more than one, measures them at each of `sizes`."""
        from .tuning import Progress, TuningRecord, tune

        self._device = binder.device
        with Progress(len(self.open), sys.stderr) as progress:
            built = self._build(self.open, enough=len(self.plans), progress=progress)
        self._chosen = built[0]
        self.record = self.record or TuningRecord()
        if len(built) > 1:
            tune([self._executables[i] for i in built], binder, sizes, self.record)
        self._chosen = self._last_winner()
        self.version += 1

    def choice(self, bindings: Mapping[str, int]) -> int:
        """The index of the plan that runs at these symbol values."""
        if self.pinned is not None:
            return self.pinned
        assert self._chosen is not None and self._device is not None
        if self.record is not None and (name := self.record.winner(self._device, bindings)) is not None:
            return self._index_of(name)
        return self._chosen

    def repeated(self, binder: Binder, pack: Mapping[Any, Any], workspace: torch.Tensor | str | None) -> Found | None:
        """The call that this pack repeats, if the same plan would run again: checked then, and not now, but for the
        values of offsets on the CPU. `workspace`: a string for calls that make their own. Raises VariantPackError."""
        found = binder.recall.find(pack, workspace)
        if found is None or found.call.version != self.version:
            return None
        if binder.checks_values:
            binder.check_values(found.buffers, found.call.bindings)
        return found

    def accept(
        self, binder: Binder, pack: Mapping[Any, Any], workspace: torch.Tensor | None, *, outputs_required: bool
    ) -> Found:
        """Checks a variant pack (and the workspace, where outputs are required) and remembers it, see `repeated`.
        Raises VariantPackError or WorkspaceError."""
        from .recall import Call, Found

        place = workspace if outputs_required else ITS_OWN
        version = self.version
        bound = binder.bind(binder.collect(pack, outputs_required=outputs_required))
        index = self.choice(bound.bindings)
        launch = None
        if outputs_required:
            executable = self.executable(index)
            binder.check_workspace(workspace, executable.workspace_bytes(bound.bindings), bound.extents)
            launch = executable.prepare(bound.buffers, bound.bindings, workspace)
        call = Call(bound.bindings, index, version, launch)
        binder.recall.keep(pack, place, bound.buffers, call)
        return Found(call, tuple(bound.buffers), tuple(bound.buffers.values()))

    def executable(self, index: int) -> Executable:
        """The plan of that index, built. Raises GraphNotSupportedError("BUILD_DECLINED") where it does not build."""
        found = self._executables.get(index)
        if found is not None:
            return found
        from .executor import KernelDeclined, compile_plan

        assert self._device is not None
        try:
            return self._executables.setdefault(
                index, compile_plan(self.plans[index], self._device, kernels=self._kernels)
            )
        except KernelDeclined as declined:
            cause = declined.__cause__
            raise GraphNotSupportedError(
                "BUILD_DECLINED",
                asked=f"plan {self.plans[index].name}",
                seen=f"{type(cause).__name__}: {cause}",
                required=f"kernel {declined.kernel} builds on this machine",
                hint="install the packages that `opfuse env` finds missing, or run another plan",
            ) from cause

    def workspace_bytes(self, bindings: Mapping[str, int], *, at_most: bool) -> int:
        """Bytes for the plan that runs at `bindings`; `at_most`: for whichever plan runs at these values or below."""
        if not at_most or self.record is None or self.pinned is not None:
            return self.executable(self.choice(bindings)).workspace_bytes(bindings)
        return max(e.workspace_bytes(bindings) for e in self._executables.values())

    def _build(self, indices: Sequence[int], enough: int, progress: Progress | None = None) -> list[int]:
        built: list[int] = []
        declined: list[str] = []
        for index in indices:
            if progress is not None:
                progress.step(f"building {self.plans[index].name}")
            try:
                self.executable(index)
            except GraphNotSupportedError as error:
                if error.code != "BUILD_DECLINED" or self.target.strict or self.pinned is not None:
                    raise
                log_build_fallback(self.plans[index], error)
                declined.append(f"{self.plans[index].name}: {error.seen}")
                continue
            built.append(index)
            if len(built) == enough:
                break
        if not built:
            raise GraphNotSupportedError(
                "NO_PLAN_BUILT",
                asked="build_plans",
                seen="; ".join(declined),
                required="one plan that builds",
                hint="do not deselect the unfused plan",
            )
        return built

    def _last_winner(self) -> int | None:
        """What won at the last sizes that were measured on such a device; else the plan chosen so far."""
        from .tuning import device_name

        assert self._device is not None
        device, winners = device_name(self._device), self.record.winners if self.record is not None else {}
        names = [name for (measured, _), name in winners.items() if measured == device]
        return self._index_of(names[-1]) if names else self._chosen

    def _index_of(self, name: str) -> int:
        return next(i for i, plan in enumerate(self.plans) if plan.name == name)
