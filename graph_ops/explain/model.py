"""Explanation: a plan told as plain data, which the text, the JSON and the pictures are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...fusion_rules.verdict import Raising, Verdict, VerdictKind
from ...kernels.condition import Reason
from ..ir.graph import Node, OpGraph
from ..plan import Estimate, Plan, Step

NEAREST_FIRST = (VerdictKind.NOT_CHOSEN, VerdictKind.UNSUPPORTED, VerdictKind.NO_MATCH)
"""Verdicts that leave a node alone, from the nearest to a fusion to the farthest."""


@dataclass(frozen=True)
class ExplainedStep:
    """One step in order: what runs, which nodes it absorbed, what it reads and writes (role or port, tensor name).

    `title` is the kernel, with the variant of it that the plan takes.
    """

    kernel: str
    title: str
    rule: str | None
    nodes: tuple[Node, ...]
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    estimate: Estimate
    capturable: bool
    capture_reason: str

    @property
    def is_fused(self) -> bool:
        """Whether one kernel runs several nodes."""
        return self.rule is not None and len(self.nodes) > 1

    @property
    def is_lone_kernel(self) -> bool:
        """Whether a kernel other than torch's runs one node: nothing is fused."""
        return self.rule is not None and len(self.nodes) == 1


@dataclass(frozen=True)
class ExplainedVerdict:
    """How one rule fared at one place. `with_nodes` are the matched nodes; for no match, those that fitted first."""

    kind: VerdictKind
    rule: str
    kernel: str | None
    anchor: str
    with_nodes: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class LeftAlone:
    """A node that runs unfused, by `kernel` if that is not torch's. `verdicts` are told at the first node that they
    concern; a later node that the same verdicts concern names that one in `told_at`."""

    node: Node
    verdicts: tuple[ExplainedVerdict, ...]
    told_at: tuple[str, ...]
    kernel: str | None = None


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is. `str()` prints it as a database prints EXPLAIN; `to_json` and `to_mermaid` are the same
    facts. Estimates are the cost model's at `bindings`, never measured.

    `left_alone` has every unfused node; `alternatives` what else was possible for nodes that are fused.
    """

    graph: OpGraph
    arch: str
    may_fuse: bool
    bindings: Mapping[str, int]
    steps: tuple[ExplainedStep, ...]
    left_alone: tuple[LeftAlone, ...]
    alternatives: tuple[ExplainedVerdict, ...]
    raisings: tuple[Raising, ...]
    estimate: Estimate
    unfused_estimate: Estimate
    workspace_bytes: int
    unfused_workspace_bytes: int

    @property
    def fused_steps(self) -> tuple[ExplainedStep, ...]:
        return tuple(s for s in self.steps if s.is_fused)

    @property
    def lone_kernels(self) -> tuple[ExplainedStep, ...]:
        """The steps in which a kernel other than torch's runs one node."""
        return tuple(s for s in self.steps if s.is_lone_kernel)

    @property
    def fused_nodes(self) -> int:
        """How many nodes of the graph run inside a fused kernel."""
        return sum(len(s.nodes) for s in self.fused_steps)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason that was given against a fusion of a node that runs unfused."""
        return tuple(r for left in self.left_alone for v in left.verdicts for r in v.reasons)

    def __str__(self) -> str:
        from .text import render

        return render(self)

    def to_dict(self) -> dict[str, object]:
        """The explanation as plain JSON values, with `format` and `version`."""
        from .document import to_dict

        return to_dict(self)

    def to_json(self, indent: int | None = 1) -> str:
        """`to_dict` as JSON text."""
        from .document import to_json

        return to_json(self, indent)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart (GitHub renders it), each fused step a box around what it absorbed."""
        from .mermaid import render

        return render(self)


def explain(plan: Plan) -> Explanation:
    """Tells why `plan` is as it is. Needs no GPU, imports no kernel."""
    verdicts = {p: _verdict(plan.graph, v) for p, v in enumerate(plan.report.verdicts) if v.kind in NEAREST_FIRST}
    alone = {index for step in plan.lone_steps for index in step.nodes}
    others = [p for p in verdicts if not alone & {(v := plan.report.verdicts[p]).anchor, *v.nodes}]
    return Explanation(
        graph=plan.graph,
        arch=plan.arch,
        may_fuse=plan.fused,
        bindings=dict(plan.bindings),
        steps=tuple(_step(plan.graph, s) for s in plan.steps),
        left_alone=_left_alone(plan, verdicts),
        alternatives=tuple(verdicts[p] for p in others),
        raisings=plan.report.raisings,
        estimate=plan.estimate,
        unfused_estimate=plan.unfused_estimate,
        workspace_bytes=plan.workspace_bytes,
        unfused_workspace_bytes=plan.unfused_workspace_bytes,
    )


def _step(graph: OpGraph, step: Step) -> ExplainedStep:
    written = set(step.writes)
    named = [(role.removeprefix("in.").removeprefix("out."), uid) for role, uid in step.buffers.items()]
    return ExplainedStep(
        kernel=step.kernel,
        title=step.title,
        rule=step.rule,
        nodes=tuple(graph.nodes[i] for i in step.nodes),
        reads=tuple((role, graph.tensors[uid].name) for role, uid in named if uid not in written),
        writes=tuple((role, graph.tensors[uid].name) for role, uid in named if uid in written),
        estimate=step.estimate,
        capturable=step.capturable,
        capture_reason=step.capture_reason,
    )


def _verdict(graph: OpGraph, verdict: Verdict) -> ExplainedVerdict:
    return ExplainedVerdict(
        kind=verdict.kind,
        rule=verdict.rule,
        kernel=verdict.kernel,
        anchor=graph.nodes[verdict.anchor].name,
        with_nodes=tuple(graph.nodes[i].name for i in verdict.nodes),
        reasons=verdict.reasons,
    )


def _left_alone(plan: Plan, verdicts: Mapping[int, ExplainedVerdict]) -> tuple[LeftAlone, ...]:
    """Unfused nodes in the order in which they run; every verdict once, at the first of its nodes."""
    concerns: dict[int, list[int]] = {}
    for position in verdicts:
        said = plan.report.verdicts[position]
        for index in dict.fromkeys((said.anchor, *said.nodes)):
            concerns.setdefault(index, []).append(position)
    told: dict[int, str] = {}
    found: list[LeftAlone] = []
    for step in plan.lone_steps:
        for index in step.nodes:
            node = plan.graph.nodes[index]
            mine = concerns.get(index, [])
            before = dict.fromkeys(told[p] for p in mine if p in told)
            fresh = [p for p in mine if p not in told]
            told.update((p, node.name) for p in fresh)
            near = sorted((verdicts[p] for p in fresh), key=lambda v: (NEAREST_FIRST.index(v.kind), -len(v.with_nodes)))
            found.append(LeftAlone(node, tuple(near), tuple(before), step.title if step.is_fused else None))
    return tuple(found)
