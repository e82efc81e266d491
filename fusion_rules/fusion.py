"""The fusion pass: raise, match, judge, choose; with a verdict for every rule at every place where it could begin.

A plan is made of what is chosen; the verdicts are worked out when somebody asks, from the same graph and by the same
choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from ..graph_ops.ir.errors import GraphError
from ..graph_ops.ir.graph import Node, OpGraph
from ..kernels.arch import Arch
from ..kernels.condition import Reason
from ..kernels.registry import KERNELS, KernelEntry
from .candidates import Candidate, Judged, can_run, candidates, judge
from .choice import choose, refusals, weigh
from .matcher import CLOSE, Match, Trace, fits, matches, possible
from .raising import RAISES, raise_graph, unraised
from .rule import Rule
from .rules import RULES
from .verdict import FusedMatch, FusionReport, Verdict, VerdictKind
from .view import GraphView

NO_ANCHOR = "NO_ANCHOR"

_BY_ANCHOR: dict[str, tuple[tuple[int, Rule], ...]] = {
    op: tuple((i, r) for i, r in enumerate(RULES) if r.anchor_op == op) for op in {r.anchor_op for r in RULES}
}


def fuse(
    graph: OpGraph, arch: Arch, *, disable: Collection[str] = (), kernels: Sequence[KernelEntry] = KERNELS
) -> FusionReport:
    """Decides what to fuse in a verified `graph` for `arch`; nothing is imported, compiled or run.

    `disable` holds ids of rules, raises and kernels; GraphError("DISABLE_UNKNOWN") for any other. The matches of the
    report share no node, have an order together, and save estimated time; every other node runs unfused.
    """
    _check_ids(disable, kernels)
    raised, raisings = raise_graph(graph, disable)
    view = GraphView.of(raised)
    found: list[Candidate] = []
    for rule in RULES:
        able = [Judged.of(k, arch, view) for k in kernels if k.rule == rule.id and can_run(k, arch, view)]
        if able and rule.id not in disable:
            for match in _fits(rule, view):
                found.extend(candidates(rule, match, able, view))
    found.sort(key=lambda one: one.cover.parts[0])  # stable, so that the candidates of an anchor stay in rule order
    chosen = choose(weigh(found, view, arch), view, disable).chosen
    return FusionReport(
        graph=raised,
        arch=arch.name,
        raisings=raisings,
        matches=tuple([_fused(one.candidate) for one in sorted(chosen, key=lambda one: one.candidate.cover.anchor)]),
        tell=partial(_verdicts, raised, arch, frozenset(disable), tuple(kernels)),
    )


def _fits(rule: Rule, view: GraphView) -> list[Match]:
    """Every match of one rule. No arch, kernel or choice changes them, so that the view keeps them."""
    kept: list[Match] | None = view.fits.get(rule.id)
    if kept is None:
        patterns = [p for p in rule.patterns if possible(p, view.of_op)]
        anchors = view.of_op.get(rule.anchor_op, ()) if patterns else ()
        kept = view.fits[rule.id] = [match for anchor in anchors for match in fits(patterns, view, anchor)]
    return kept


def _verdicts(
    raised: OpGraph, arch: Arch, disable: Collection[str], kernels: Sequence[KernelEntry]
) -> tuple[Verdict, ...]:
    """What there is to say of every rule at every anchor of a raised graph, and of the choice."""
    view = GraphView.of(raised)
    serving = {rule.id: tuple(k for k in kernels if k.rule == rule.id) for rule in RULES}
    found: list[Candidate] = []
    verdicts: list[tuple[tuple[int, int], Verdict]] = []
    for node in raised.nodes:
        for place, rule in _BY_ANCHOR.get(node.op, ()):
            able, said = _at(rule, node, serving[rule.id], view, arch)
            found.extend(able)
            verdicts.extend(((node.index, place), v) for v in said)
    choice = choose(weigh(found, view, arch), view, disable)
    rank = {rule.id: i for i, rule in enumerate(RULES)}
    for one, reason in refusals(choice, view, disable):
        verdicts.append(_outcome(VerdictKind.NOT_CHOSEN, one.candidate, rank, (reason,)))
    for one in choice.chosen:
        verdicts.append(_outcome(VerdictKind.CHOSEN, one.candidate, rank, ()))
    kept = _without_noise(verdicts)
    kept.extend(((v.anchor, -1), v) for v in unraised(view, disable))
    kept.sort(key=lambda item: item[0])
    return tuple(v for _, v in kept)


def why_not(
    graph: OpGraph,
    rule_id: str,
    arch: Arch,
    node: int | str | None = None,
    *,
    disable: Collection[str] = (),
    kernels: Sequence[KernelEntry] = KERNELS,
) -> tuple[Verdict, ...]:
    """Every verdict of one rule (or raise): at `node`, by index in the raised graph or by name, or everywhere.

    Never empty: where the rule could not even begin, one verdict says so (its anchor is -1 if no node was asked about).
    A node that was raised stands for what it was raised into.
    Raises GraphError for an unknown rule or node.
    """
    known = [*RAISES, *(r.id for r in RULES)]
    if rule_id not in known:
        raise GraphError("RULE_UNKNOWN", asked=f"why_not {rule_id!r}", required=f"one of {known}")
    report = fuse(graph, arch, disable=disable, kernels=kernels)
    asked = None if node is None else _node(report, graph, node)
    said = [v for v in report.verdicts if v.rule == rule_id]
    if asked is not None:
        said = [v for v in said if asked.index == v.anchor or asked.index in v.nodes]
    if said:
        return tuple(said)
    op = RAISES[rule_id].anchor_op if rule_id in RAISES else next(r.anchor_op for r in RULES if r.id == rule_id)
    if asked is None:
        seen = f"no {op} in the graph that {rule_id} could begin at"
        return (Verdict(VerdictKind.NO_MATCH, rule_id, -1, (), (Reason(NO_ANCHOR, seen, f"a {op}"),)),)
    reason = Reason(
        NO_ANCHOR, f"{asked.name} is {asked.op}", f"a {op}, or a node of a match that begins at one", where=asked.path
    )
    return (Verdict(VerdictKind.NO_MATCH, rule_id, asked.index, (), (reason,)),)


def _check_ids(disable: Collection[str], kernels: Sequence[KernelEntry]) -> None:
    if isinstance(disable, str):
        raise GraphError("DISABLE_TYPE", asked=f"disable={disable!r}", seen="a string", required="a collection of ids")
    if not disable:
        return
    known = {*RAISES, *(r.id for r in RULES), *(k.id for k in kernels), *(k.id for k in KERNELS)}
    if unknown := sorted(set(disable) - known):
        raise GraphError("DISABLE_UNKNOWN", asked=f"disable={unknown}", required=f"ids of {sorted(known)}")


def _at(
    rule: Rule, anchor: Node, kernels: Sequence[KernelEntry], view: GraphView, arch: Arch
) -> tuple[list[Candidate], list[Verdict]]:
    """The candidates of one rule at one anchor, and what there is to say of the rest."""
    found, missed = _matches(rule, anchor, view)
    served: list[Candidate] = []
    verdicts: list[Verdict] = []
    for match in found:
        able, said = judge(rule, match, kernels, view, arch)
        served.extend(able)
        verdicts.extend(said)
        verdicts.extend(_left(rule, match))
    if missed is not None:
        verdicts.append(missed)
    return served, verdicts


def _matches(rule: Rule, anchor: Node, view: GraphView) -> tuple[list[Match], Verdict | None]:
    """Every match of one rule at one anchor, each set of nodes once, and the nearest miss where it tells something.

    No arch, kernel or choice changes them, so that the view keeps them.
    """
    key = (rule.id, anchor.index)
    if key in view.found:
        kept: tuple[list[Match], Verdict | None] = view.found[key]
        return kept
    misses: list[tuple[Trace, bool]] = []
    found: dict[tuple[int, ...], Match] = {}
    for pattern in rule.patterns:
        trace = Trace()
        fitting = list(matches(pattern, view, anchor, trace))
        for match in fitting:
            found.setdefault(tuple(sorted(match.nodes.values())), match)
        if not fitting:
            misses.append((trace, len(pattern.core) == 1))
    # Not of one node that another pattern took: a quantize along rows is none along columns.
    told = [
        m for m, alone in misses
        if not found or (m.code in CLOSE and not (alone and tuple(sorted(m.fitted or (anchor.index,))) in found))
    ]  # fmt: skip
    missed = None
    if told:
        nearest = max(told, key=lambda m: m.score)
        fitted = nearest.fitted or (anchor.index,)
        missed = Verdict(VerdictKind.NO_MATCH, rule.id, anchor.index, fitted, (nearest.reason(view),))
    view.found[key] = list(found.values()), missed
    return list(found.values()), missed


def _without_noise(verdicts: list[tuple[tuple[int, int], Verdict]]) -> list[tuple[tuple[int, int], Verdict]]:
    """Without the misses at anchors that are part of a match of the same rule which begins elsewhere."""
    begins: dict[tuple[str, int], int] = {}
    for _, v in verdicts:
        if v.kind is not VerdictKind.NO_MATCH:
            begins.update(((v.rule, i), v.anchor) for i in v.nodes if i != v.anchor)
    return [(k, v) for k, v in verdicts if v.kind is not VerdictKind.NO_MATCH or (v.rule, v.anchor) not in begins]


def _left(rule: Rule, match: Match) -> list[Verdict]:
    anchor = match.nodes[match.pattern.anchor.label]
    return [Verdict(VerdictKind.NO_MATCH, rule.id, anchor, (index,), (reason,)) for index, reason in match.left]


def _outcome(
    kind: VerdictKind, candidate: Candidate, rank: dict[str, int], reasons: tuple[Reason, ...]
) -> tuple[tuple[int, int], Verdict]:
    cover = candidate.cover
    verdict = Verdict(kind, cover.rule.id, cover.anchor, cover.nodes, reasons, candidate.kernel.id)
    return (cover.anchor, rank[cover.rule.id]), verdict


def _fused(candidate: Candidate) -> FusedMatch:
    cover = candidate.cover
    return FusedMatch(cover.rule.id, candidate.kernel.id, cover.nodes, cover.roles, cover.problem)


def _node(report: FusionReport, declared: OpGraph, node: int | str) -> Node:
    """The node of the raised graph: by index, by name, or the one that a declared node of that name was raised into."""
    found = [n for n in report.graph.nodes if node in (n.index, n.name)]
    if not found and isinstance(node, str):
        gone = {n.index for n in declared.nodes if n.name == node}
        into = {r.into for r in report.raisings if gone & set(r.nodes)}
        found = [n for n in report.graph.nodes if n.name in into]
    if len(found) != 1:
        raise GraphError(
            "NODE_UNKNOWN",
            asked=f"node {node!r}",
            seen=f"{len(found)} of that name or index",
            required=f"one of {[n.name for n in report.graph.nodes]}",
        )
    return found[0]
