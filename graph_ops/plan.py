"""Plan and Step: pure data, what will run, in which order, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..fusion_rules.verdict import FusedMatch, FusionReport
from ..kernels.condition import Reason
from ..kernels.cost import Estimate
from ..kernels.problem import ROLES
from .ir.graph import OpGraph
from .workspace import WorkspaceLayout

UNFUSED = "unfused"


@dataclass(frozen=True)
class Step:
    """One unit of execution: a kernel of the registry, over several nodes or in torch's stead for one; or one node by
    torch.

    `kernel` is a registry id or `torch.<op>`. `buffers` maps roles (fused) or `in.<port>`/`out.<port>` (unfused) to
    tensor uids. `capturable` False carries its reason. `variant`: the way to build the kernel, None for its own choice.
    """

    kernel: str
    rule: str | None
    nodes: tuple[int, ...]
    buffers: Mapping[str, int]
    estimate: Estimate
    capturable: bool = True
    capture_reason: str = ""
    match: FusedMatch | None = None
    variant: str | None = None

    @property
    def is_fused(self) -> bool:
        return self.rule is not None

    @property
    def title(self) -> str:
        """The kernel as plans and explanations name it: `kernel`, or `kernel[variant]`."""
        return self.kernel if self.variant is None else f"{self.kernel}[{self.variant}]"

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The uids of the tensors that the step writes."""
        if self.rule is None:
            return tuple(uid for name, uid in self.buffers.items() if name.startswith("out."))
        written = {role.name for role in ROLES[self.rule] if role.is_output}
        return tuple(uid for name, uid in self.buffers.items() if name in written)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The uids of the tensors that the step reads, each once."""
        written = set(self.writes)
        return tuple(dict.fromkeys(uid for uid in self.buffers.values() if uid not in written))


@dataclass(frozen=True)
class Plan:
    """Ordered steps for one graph and arch.

    `graph` is the graph that the steps' node indices refer to (raised, unless unfused). Workspace bytes are stated at
    `bindings`, the nominal values of symbols used for estimates, and hold the virtual tensors: what a fused kernel
    needs as scratch is known once it is built. `workspace` is the same over the symbols.
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
    workspace: WorkspaceLayout = field(default_factory=WorkspaceLayout)

    @cached_property
    def name(self) -> str:
        """`unfused`, or the kernels that are not torch's, `kernel[variant]` where one is chosen, with how often each:
        stable over runs, used to select a plan."""
        kernels = Counter(s.title for s in self.fused_steps)
        return "+".join(k if n == 1 else f"{k}*{n}" for k, n in sorted(kernels.items())) or UNFUSED

    @property
    def fused_steps(self) -> tuple[Step, ...]:
        """The steps by kernels of the registry, those for one node among them."""
        return tuple(s for s in self.steps if s.is_fused)

    @property
    def fusions(self) -> tuple[Step, ...]:
        """The fused steps of more than one node."""
        return tuple(s for s in self.steps if len(s.nodes) > 1)

    @property
    def lone_steps(self) -> tuple[Step, ...]:
        """The steps of one node, fused with no other: by torch, or by a kernel made for that node."""
        return tuple(s for s in self.steps if len(s.nodes) == 1)

    @property
    def unfused_steps(self) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if not s.is_fused)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason for which a node stays unfused."""
        left = {n for s in self.unfused_steps for n in s.nodes}
        return tuple(r for v in self.report.verdicts if left & {v.anchor, *v.nodes} for r in v.reasons)


__all__ = ["UNFUSED", "Estimate", "Plan", "Step"]
