"""Plan and Step: pure data, what will run, in which order, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..fusion_rules.verdict import FusedMatch, FusionReport, Verdict
from ..kernels.condition import Reason
from ..kernels.cost import Estimate
from .ir.graph import OpGraph


@dataclass(frozen=True)
class Step:
    """One unit of execution: a fused kernel over several nodes, or one node unfused.

    `kernel` is a registry id or `torch.<op>`. `buffers` maps roles (fused) or `in.<port>`/`out.<port>` (unfused) to
    tensor uids. `capturable` False carries its reason.
    """

    kernel: str
    rule: str | None
    nodes: tuple[int, ...]
    buffers: Mapping[str, int]
    estimate: Estimate
    capturable: bool = True
    capture_reason: str = ""
    match: FusedMatch | None = None

    @property
    def is_fused(self) -> bool:
        return self.rule is not None


@dataclass(frozen=True)
class Plan:
    """Ordered steps for one graph and arch.

    `graph` is the graph that the steps' node indices refer to (raised, unless unfused). Workspace bytes are stated at
    `bindings`: the nominal values of symbols used for estimates.
    """

    graph: OpGraph
    arch: str
    fused: bool
    steps: tuple[Step, ...]
    report: FusionReport
    bindings: Mapping[str, int]
    estimate: Estimate
    workspace_bytes: int
    unfused_estimate: Estimate
    unfused_workspace_bytes: int

    @property
    def fused_steps(self) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if s.is_fused)

    @property
    def unfused_steps(self) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if not s.is_fused)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason for which a node stays unfused."""
        left = {n for s in self.unfused_steps for n in s.nodes}
        return tuple(r for v in self.report.verdicts if left & {v.anchor, *v.nodes} for r in v.reasons)

    def verdicts_at(self, node: int) -> tuple[Verdict, ...]:
        """The verdicts of every rule that was anchored at, or reached, `node`."""
        return tuple(v for v in self.report.verdicts if node == v.anchor or node in v.nodes)


__all__ = ["Estimate", "Plan", "Step"]
