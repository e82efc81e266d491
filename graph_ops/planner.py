"""From a graph to a Plan: verify, fuse, order, estimate, lay out the workspace. Touches neither a GPU nor a kernel."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter

from ..fusion_rules import fuse
from ..fusion_rules.verdict import FusedMatch, FusionReport, Verdict, VerdictKind
from ..fusion_rules.view import GraphView
from ..kernels.arch import Arch
from ..kernels.capture import not_capturable
from ..kernels.condition import Reason
from ..kernels.cost import Costs, Estimate, Sizes
from ..kernels.registry import KERNELS, KernelEntry
from .ir.errors import GraphNotSupportedError
from .ir.graph import Node, OpGraph
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
    costs = GraphView.of(graph).costs(arch)
    sizes = costs.sizes
    order = graph.topological_order
    apart_workspace = _workspace(graph, map(_accesses, order), sizes)
    if fused:
        report = fuse(graph, arch, disable=disable, kernels=kernels)
    else:
        report = FusionReport(graph, arch.name, (), ())
    costs_here = costs if report.graph is graph else GraphView.of(report.graph).costs(arch)
    if report.graph is graph and not report.matches:
        make = _unfused_steps(graph, arch, costs)
        steps, workspace = tuple([make(node) for node in order]), apart_workspace
    else:
        steps = _ordered_steps(report, arch, costs_here, {k.id: k for k in kernels})
        accesses = [_accesses(report.graph.nodes[s.nodes[0]]) if s.rule is None else (s.reads, s.writes) for s in steps]
        workspace = _workspace(report.graph, accesses, costs_here.sizes)
    plan = Plan(
        graph=report.graph,
        arch=arch.name,
        fused=fused,
        steps=steps,
        report=report,
        bindings=sizes.bindings,
        estimate=Estimate.total([s.estimate for s in steps]),
        workspace_bytes=workspace.nbytes_at(costs_here.sizes),
        unfused_estimate=Estimate.total([costs.nodes[node.index] for node in order]),
        unfused_workspace_bytes=apart_workspace.nbytes_at(sizes),
        workspace=workspace,
    )
    if strict:
        require_fused(plan)
    return plan


def left_unfused(plan: Plan) -> tuple[tuple[Node, tuple[Verdict, ...]], ...]:
    """The nodes that could have fused and did not, in order, each with the verdicts on it, nearest first.

    Those are the grouped matmuls, for which every fusion here exists, and whatever else a rule matched. A node that a
    kernel of its own runs, or would if torch's were not estimated to be as good, is left only by a fusion of several
    nodes that matched it.
    """
    if not plan.fused or not plan.lone_steps:
        return ()
    by_anchor: dict[int, list[Verdict]] = {}
    for verdict in plan.report.verdicts:
        if verdict.kind is not VerdictKind.CHOSEN:
            by_anchor.setdefault(verdict.anchor, []).append(verdict)
    found = []
    for step in plan.lone_steps:
        node = plan.graph.nodes[step.nodes[0]]
        verdicts = by_anchor.get(node.index, [])
        matched = [v for v in verdicts if v.kind is not VerdictKind.NO_MATCH]
        served = step.is_fused or any(v.kind is VerdictKind.NOT_CHOSEN and len(v.nodes) == 1 for v in matched)
        if any(len(v.nodes) > 1 for v in matched) or (not served and (matched or node.op in FUSABLE)):
            verdicts.sort(key=_nearness)
            found.append((node, tuple(verdicts)))
    return tuple(sorted(found, key=lambda item: item[0].index))


def _nearness(verdict: Verdict) -> tuple[bool, int, int]:
    """Fusions of several nodes before kernels for one node; then the nearest, then the largest."""
    lone = verdict.kind is not VerdictKind.NO_MATCH and len(verdict.nodes) == 1
    return lone, NEAREST.index(verdict.kind), -len(verdict.nodes)


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


def _unfused_steps(graph: OpGraph, arch: Arch, costs: Costs) -> Callable[[Node], Step]:
    """What makes the step of a node by itself. Alike nodes differ in their buffers only."""
    known: dict[int, tuple[str, tuple[str | None, ...], str]] = {}
    kinds, tensors = graph.structure.node_kind, graph.tensors

    def make(node: Node) -> Step:
        ports = node.inputs + node.outputs
        kind = kinds[node.index]
        if kind not in known:
            named = [None if tensors[uid].value is not None else f"in.{port}" for port, uid in node.inputs]
            reason = not_capturable(node.op, node.attribute, {port: tensors[uid] for port, uid in ports}, arch)
            known[kind] = f"torch.{node.op}", (*named, *(f"out.{port}" for port, _ in node.outputs)), reason
        kernel, names, reason = known[kind]
        buffers = {name: uid for name, (_, uid) in zip(names, ports, strict=True) if name is not None}
        return Step(kernel, None, (node.index,), buffers, costs.nodes[node.index], not reason, reason)

    return make


def _fused_step(match: FusedMatch, entry: KernelEntry, costs: Costs) -> Step:
    return Step(
        kernel=match.kernel,
        rule=match.rule,
        nodes=match.nodes,
        buffers=match.roles,
        estimate=costs.match(match.problem, match.roles, entry.launches(match.problem)),
        capturable=entry.capturable,
        capture_reason="" if entry.capturable else f"kernel {entry.id} is declared not capturable",
        match=match,
    )


def _ordered_steps(
    report: FusionReport, arch: Arch, costs: Costs, entries: Mapping[str, KernelEntry]
) -> tuple[Step, ...]:
    """Fused matches and remaining nodes as steps, producers first; of ready ones that whose first node came first."""
    graph = report.graph
    make = _unfused_steps(graph, arch, costs)
    taken = {index for match in report.matches for index in match.nodes}
    units = [(min(m.nodes), _fused_step(m, entries[m.kernel], costs)) for m in report.matches]
    units += [(n.index, make(n)) for n in graph.nodes if n.index not in taken]
    units.sort(key=itemgetter(0))
    unit_of = {index: place for place, (_, step) in enumerate(units) for index in step.nodes}
    edges = []
    written_by = graph.written_by
    for node in graph.nodes:
        target = unit_of[node.index]
        for _, uid in node.inputs:
            producer = written_by.get(uid)
            if producer is not None and (source := unit_of[producer]) != target:
                edges.append((source, target))
    if all(source < target for source, target in edges):
        return tuple([step for _, step in units])
    needs: list[set[int]] = [set() for _ in units]
    feeds: list[set[int]] = [set() for _ in units]
    for source, target in edges:
        needs[target].add(source)
        feeds[source].add(target)
    ready = [place for place, sources in enumerate(needs) if not sources]
    order: list[Step] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(units[place][1])
        for target in feeds[place]:
            needs[target].discard(place)
            if not needs[target]:
                heapq.heappush(ready, target)
    if len(order) != len(units):
        raise RuntimeError(f"the fused matches of graph {graph.name} form a cycle: {[m.nodes for m in report.matches]}")
    return tuple(order)


def _accesses(node: Node) -> tuple[list[int], list[int]]:
    return [uid for _, uid in node.inputs], [uid for _, uid in node.outputs]


def _workspace(
    graph: OpGraph, accesses: Iterable[tuple[Sequence[int], Sequence[int]]], sizes: Sizes
) -> WorkspaceLayout:
    return plan_workspace(lifetimes(graph.tensors, accesses), sizes)


__all__ = ["left_unfused", "make_plan", "require_fused"]
