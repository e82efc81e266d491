"""From a graph to a Plan: verify, fuse, order, estimate, lay out the workspace. Touches neither a GPU nor a kernel."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from ..fusion_rules import fuse
from ..fusion_rules.verdict import FusedMatch, FusionReport, Verdict, VerdictKind
from ..kernels.arch import Arch
from ..kernels.capture import not_capturable
from ..kernels.condition import Reason
from ..kernels.cost import Estimate, Sizes, match_estimate, node_estimate, nominal_bindings
from ..kernels.registry import KERNELS, KernelEntry
from .ir.errors import GraphNotSupportedError
from .ir.graph import Node, OpGraph
from .ir.tensor import TensorSpec
from .ir.verify import verify
from .plan import Plan, Step
from .workspace import WorkspaceLayout, lifetimes, plan_workspace

NEAREST = (VerdictKind.UNSUPPORTED, VerdictKind.NOT_CHOSEN, VerdictKind.NO_MATCH)
"""Verdicts on a node that stays unfused, from the nearest to a fusion to the farthest."""

FUSABLE = ("grouped_matmul", "grouped_matmul_wgrad")


def make_plan(
    graph: OpGraph,
    arch: Arch,
    *,
    fused: bool = True,
    disable: Collection[str] = (),
    strict: bool = False,
    kernels: Sequence[KernelEntry] = KERNELS,
    verified: bool = False,
) -> Plan:
    """The plan for `graph` on `arch`, which need not be the machine at hand.

    `fused=False` keeps every node apart; `disable` names rules and kernels not to use; `strict` makes a node that could
    fuse and does not an error; `kernels` are those to choose from; `verified` says that `verify` has
    passed on this very graph. Raises VerificationError, or GraphNotSupportedError with every reason under `strict`.
    """
    if not verified:
        verify(graph)
    bindings = nominal_bindings(graph)
    sizes = Sizes(bindings)
    apart = tuple(_unfused_step(graph, node, arch, sizes) for node in graph.topological_order)
    apart_workspace = _workspace(graph, apart, sizes)
    report = (
        fuse(graph, arch, disable=disable, kernels=kernels) if fused else FusionReport(graph, arch.name, (), (), ())
    )
    if report.graph is graph and not report.matches:
        steps, workspace = apart, apart_workspace
    else:
        alone = {step.nodes[0]: step for step in apart} if report.graph is graph else {}
        steps = _ordered_steps(report, arch, sizes, {k.id: k for k in kernels}, alone)
        workspace = _workspace(report.graph, steps, sizes)
    plan = Plan(
        graph=report.graph,
        arch=arch.name,
        fused=fused,
        steps=steps,
        report=report,
        bindings=bindings,
        estimate=Estimate.total(s.estimate for s in steps),
        workspace_bytes=workspace.nbytes_at(sizes),
        unfused_estimate=Estimate.total(s.estimate for s in apart),
        unfused_workspace_bytes=apart_workspace.nbytes_at(sizes),
        workspace=workspace,
    )
    if strict:
        require_fused(plan)
    return plan


def left_unfused(plan: Plan) -> tuple[tuple[Node, tuple[Verdict, ...]], ...]:
    """The nodes that could have fused and did not, in order, each with the verdicts on it, nearest first.

    Those are the grouped matmuls, for which every fusion here exists, and whatever else a rule matched.
    """
    if not plan.fused:
        return ()
    by_anchor: dict[int, list[Verdict]] = {}
    for verdict in plan.report.verdicts:
        if verdict.kind is not VerdictKind.CHOSEN:
            by_anchor.setdefault(verdict.anchor, []).append(verdict)
    found = []
    for step in plan.unfused_steps:
        node = plan.graph.nodes[step.nodes[0]]
        verdicts = by_anchor.get(node.index, [])
        if node.op in FUSABLE or any(v.kind is not VerdictKind.NO_MATCH for v in verdicts):
            verdicts.sort(key=lambda v: (NEAREST.index(v.kind), -len(v.nodes)))
            found.append((node, tuple(verdicts)))
    return tuple(sorted(found, key=lambda item: item[0].index))


def require_fused(plan: Plan) -> None:
    """Raises GraphNotSupportedError with every reason where a node that could fuse does not (see `left_unfused`)."""
    if not plan.fused:
        raise GraphNotSupportedError("STRICT", asked=f"strict=True for graph {plan.graph.name}", seen="fused=False",
                                     required="a plan that may fuse", hint="drop one of the two")  # fmt: skip
    left = left_unfused(plan)
    if not left:
        return
    lines = [_verdict_line(verdict, reason) for _, verdicts in left for verdict in verdicts
             for reason in (verdict.reasons or (None,))]  # fmt: skip
    raise GraphNotSupportedError(
        "UNFUSED",
        asked=f"strict=True for graph {plan.graph.name} on {plan.arch}",
        seen=f"{len(left)} nodes stay unfused: {', '.join(node.name for node, _ in left)}\n  "
        + "\n  ".join(lines)
        + "\n ",
        required="a fused kernel for each node at which a rule was tried",
        hint="change what the reasons name, or leave strict away to run these nodes unfused",
        where="; ".join(node.path for node, _ in left),
    )


def _verdict_line(verdict: Verdict, reason: Reason | None) -> str:
    what = (
        f"rule {verdict.rule}" + (f", kernel {verdict.kernel}" if verdict.kernel else "") + f" ({verdict.kind.value})"
    )
    if reason is None:
        return f"{what}: no reason beyond the verdict"
    step = reason.hint or "see why_not of the rule for the node"
    return f"{what}: check {reason.code}: observed {reason.observed}, required {reason.required}; next: {step}"


def _unfused_step(graph: OpGraph, node: Node, arch: Arch, sizes: Sizes) -> Step:
    specs: dict[str, TensorSpec] = {}
    buffers: dict[str, int] = {}
    for port, uid in node.inputs:
        specs[port] = tensor = graph.tensors[uid]
        if tensor.value is None:
            buffers["in." + port] = uid
    for port, uid in node.outputs:
        specs[port] = graph.tensors[uid]
        buffers["out." + port] = uid
    reason = not_capturable(node.op, node.attribute, specs, arch)
    estimate = node_estimate(graph, node, arch, sizes.bindings, sizes)
    return Step(f"torch.{node.op}", None, (node.index,), buffers, estimate, not reason, reason)


def _fused_step(match: FusedMatch, entry: KernelEntry, arch: Arch, sizes: Sizes) -> Step:
    return Step(
        kernel=match.kernel,
        rule=match.rule,
        nodes=match.nodes,
        buffers=match.roles,
        estimate=match_estimate(match.problem, arch, sizes.bindings, launches=entry.launches(match.problem)),
        capturable=entry.capturable,
        capture_reason="" if entry.capturable else f"kernel {entry.id} is declared not capturable",
        match=match,
    )


def _ordered_steps(
    report: FusionReport,
    arch: Arch,
    sizes: Sizes,
    entries: Mapping[str, KernelEntry],
    alone: Mapping[int, Step],
) -> tuple[Step, ...]:
    """Fused matches and remaining nodes as steps, producers first; of ready ones that whose first node came first.

    `alone` has steps of single nodes that are known already.
    """
    graph = report.graph
    taken = {index for match in report.matches for index in match.nodes}
    units = [(min(m.nodes), _fused_step(m, entries[m.kernel], arch, sizes)) for m in report.matches]
    units += [
        (n.index, alone.get(n.index) or _unfused_step(graph, n, arch, sizes))
        for n in graph.nodes
        if n.index not in taken
    ]
    units.sort(key=lambda unit: unit[0])
    unit_of = {index: position for position, (_, step) in enumerate(units) for index in step.nodes}
    needs: dict[int, set[int]] = {position: set() for position in range(len(units))}
    feeds: dict[int, set[int]] = {position: set() for position in range(len(units))}
    for node in graph.nodes:
        for _, uid in node.inputs:
            producer = graph.producers.get(uid)
            if producer is not None and (source := unit_of[producer.node.index]) != (target := unit_of[node.index]):
                needs[target].add(source)
                feeds[source].add(target)
    ready = [position for position, sources in needs.items() if not sources]
    heapq.heapify(ready)
    order: list[Step] = []
    while ready:
        position = heapq.heappop(ready)
        order.append(units[position][1])
        for target in feeds[position]:
            needs[target].discard(position)
            if not needs[target]:
                heapq.heappush(ready, target)
    if len(order) != len(units):
        raise RuntimeError(f"the fused matches of graph {graph.name} form a cycle: {[m.nodes for m in report.matches]}")
    return tuple(order)


def _workspace(graph: OpGraph, steps: Sequence[Step], sizes: Sizes) -> WorkspaceLayout:
    accesses = []
    for step in steps:
        if step.match is not None:
            accesses.append((step.reads, step.writes))
        else:
            node = graph.nodes[step.nodes[0]]
            accesses.append((tuple([uid for _, uid in node.inputs]), tuple([uid for _, uid in node.outputs])))
    return plan_workspace(lifetimes(graph.tensors, accesses), sizes)


__all__ = ["left_unfused", "make_plan", "require_fused"]
