"""The matcher: anchored, port-aware, and it remembers the nearest miss.

It proposes sets of nodes; `legality` disposes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph_ops.ir.graph import Node
from ..kernels.condition import Reason
from .pattern import NodePattern, Pattern, Reach
from .view import GraphView, tensor_text

NO_READER = "NO_READER"
NO_PRODUCER = "NO_PRODUCER"
OP = "OP"
PORT = "PORT"
PORT_EXTRA = "PORT_EXTRA"
PORT_MISSING = "PORT_MISSING"
ATTRIBUTE = "ATTRIBUTE"
OPERAND = "OPERAND"
NODE_TAKEN = "NODE_TAKEN"
ATTACHMENT_MISSING = "ATTACHMENT_MISSING"

CODES: Mapping[str, str] = {
    NO_READER: "nothing else reads the value at which the pattern goes on",
    NO_PRODUCER: "the value at which the pattern goes on is a graph input",
    OP: "the node there has another op",
    PORT: "the node there has the value at another port",
    PORT_EXTRA: "the node has a port that the fusion would ignore",
    PORT_MISSING: "the node lacks a port that the fusion needs",
    ATTRIBUTE: "an attribute has another value",
    OPERAND: "an operand that two nodes must share differs",
    NODE_TAKEN: "the node already plays another part in the match",
    ATTACHMENT_MISSING: "none of the nodes that make the fusion worth while is there",
}
"""Every reason why a pattern does not match, with its meaning."""

CLOSE = frozenset((PORT, PORT_EXTRA, PORT_MISSING, ATTRIBUTE, OPERAND))
"""Reasons of a node that has the right op: worth telling even where a smaller form of the rule matches."""

_CLOSENESS = {
    code: rank
    for rank, code in enumerate(
        (NO_PRODUCER, NO_READER, OP, NODE_TAKEN, PORT, PORT_EXTRA, PORT_MISSING, ATTRIBUTE, OPERAND, ATTACHMENT_MISSING)
    )
}


@dataclass(eq=False)
class Match:
    """One way to fit a pattern: `nodes` maps labels to node indices, `values` names to tensor uids.

    `attached` are the labels of the attachments found; `left` the nodes that read an attachable value with the right
    op but do not fit, each with its reason.
    """

    pattern: Pattern
    nodes: Mapping[str, int]
    values: Mapping[str, int]
    attached: tuple[str, ...] = ()
    left: tuple[tuple[int, Reason], ...] = ()
    covers: dict[tuple[str, ...], Any] = field(default_factory=dict)  # filled by candidates.make_cover
    kind: Any = None  # filled by candidates


@dataclass
class Trace:
    """The nearest miss of a search: how many nodes fitted, which, and why the next one did not.

    The reason is formatted only when asked for: most misses are never read.
    """

    score: tuple[int, int] = (-1, -1)
    fitted: tuple[int, ...] = ()
    code: str = ""
    details: tuple[Any, ...] = ()

    def note(self, fitted: tuple[int, ...], code: str, *details: Any) -> None:
        score = (len(fitted), _CLOSENESS[code])
        if score > self.score:
            self.score, self.fitted, self.code, self.details = score, fitted, code, details

    def reason(self, view: GraphView) -> Reason:
        return _reason(view, self.code, *self.details)


class Silent(Trace):
    """The trace of a search whose misses nobody reads."""

    def note(self, fitted: tuple[int, ...], code: str, *details: Any) -> None:
        return


SILENT = Silent()


def fits(patterns: Sequence[Pattern], view: GraphView, anchor: Node) -> list[Match]:
    """Every match of `patterns` at `anchor`, each set of nodes once, by the first pattern that has it; `left` is not
    filled in."""
    found: dict[tuple[int, ...], Match] = {}
    for pattern in patterns:
        if pattern.begins is not None:
            port, ops = pattern.begins
            uid = anchor.output_uids.get(port)
            if uid is not None and ops.isdisjoint([view.nodes[i].op for i in view.read_by[uid]]):
                continue
        for match in matches(pattern, view, anchor, SILENT):
            found.setdefault(tuple(sorted(match.nodes.values())), match)
    return list(found.values())


def possible(pattern: Pattern, ops: Collection[str]) -> bool:
    """Whether a graph that has these ops alone can match."""
    for part in pattern.core:
        if part.op not in ops:
            return False
    needs = pattern.needs_any
    return not needs or any(a.op in ops for a in pattern.attachments if a.label in needs)


def matches(pattern: Pattern, view: GraphView, anchor: Node, trace: Trace) -> Iterator[Match]:
    """Every way to fit `pattern` with its anchor at `anchor`, each with all attachments that fit, in node order."""
    told = trace is not SILENT
    for nodes, values in embeddings(pattern, view, anchor, trace):
        found = _attach(pattern, view, nodes, values, told)
        if pattern.needs_any and not any(label in pattern.needs_any for label in found.attached):
            fitted = tuple(nodes.values())
            if found.left:
                trace.note(fitted, ATTACHMENT_MISSING, anchor, pattern, found.left[0][1])
            else:
                trace.note(fitted, ATTACHMENT_MISSING, anchor, pattern, None)
            continue
        yield found


def embeddings(
    pattern: Pattern, view: GraphView, anchor: Node, trace: Trace
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Every way to fit the pattern's core: (label -> node index, name -> tensor uid). Different labels are different
    nodes; the same set of nodes comes once per order of commutative operands that fits."""
    if pattern.early is not None:
        wanted, reach = pattern.core[1], pattern.reaches[0]
        uid = anchor.output_uids.get(pattern.early)
        if uid is not None and wanted.op not in [view.nodes[i].op for i in view.read_by[uid]]:
            trace.note((anchor.index,), NO_READER, uid, wanted, reach)
            for index in view.read_by[uid]:
                trace.note((anchor.index,), OP, view.nodes[index], wanted, reach)
            return []
    label = pattern.core[0].label
    partial = [({label: anchor.index}, values) for values in _bind(pattern.anchor, anchor, {}, trace, ())]
    for wanted, reach in zip(pattern.core[1:], pattern.reaches, strict=True):
        if not partial:
            break
        grown = []
        for nodes, values in partial:
            fitted = tuple(nodes.values())
            for node in _candidates(view, wanted, reach, values, trace, fitted):
                for bound in _bind(wanted, node, values, trace, fitted):
                    grown.append(({**nodes, wanted.label: node.index}, bound))
        partial = grown
    return partial


def _candidates(
    view: GraphView, wanted: NodePattern, reach: Reach, values: dict[str, int], trace: Trace, fitted: tuple[int, ...]
) -> list[Node]:
    """Nodes of the wanted op next to the bound value that have no part yet, each once, in node order."""
    uid = values[reach.name]
    if not reach.downstream:
        made = view.written_by.get(uid)
        if made is not None and view.nodes[made].op == wanted.op and made not in fitted:
            return [view.nodes[made]]
        trace.note(fitted, *((NO_PRODUCER, uid) if made is None else (OP, view.nodes[made])), wanted, reach)
        return []
    trace.note(fitted, NO_READER, uid, wanted, reach)
    found: list[Node] = []
    for index in view.read_by[uid]:
        node = view.nodes[index]
        if index in fitted:
            continue
        if node.op != wanted.op:
            trace.note(fitted, OP, node, wanted, reach)
        elif not found or found[-1] is not node:
            found.append(node)
    return found


def _bind(
    wanted: NodePattern, node: Node, values: dict[str, int], trace: Trace, fitted: tuple[int, ...]
) -> list[dict[str, int]]:
    """The bindings of `values` that let `node` be `wanted`: none, one, or two for a commutative op."""
    if wanted.attributes:
        attribute = node.attribute
        for name, allowed in wanted.attributes.items():
            if attribute.get(name) not in allowed:
                trace.note(fitted, ATTRIBUTE, node, wanted, name)
                return []
    bound = dict(values)
    if not _bind_ports(wanted, node, node.outputs, wanted.output_names, wanted.outputs, bound, trace, fitted):
        return []
    swapped = wanted.swapped_names
    if swapped is None:
        fits = _bind_ports(wanted, node, node.inputs, wanted.input_names, wanted.inputs, bound, trace, fitted)
        return [bound] if fits else []
    other = dict(bound)
    found = []
    if _bind_ports(wanted, node, node.inputs, wanted.input_names, wanted.inputs, bound, trace, fitted):
        found.append(bound)
    if _bind_ports(wanted, node, node.inputs, swapped, swapped, other, trace, fitted) and other not in found:
        found.append(other)
    return found


def _bind_ports(
    wanted: NodePattern,
    node: Node,
    given: tuple[tuple[str, int], ...],
    names: Mapping[str, str],
    required: Mapping[str, str],
    bound: dict[str, int],
    trace: Trace,
    fitted: tuple[int, ...],
) -> bool:
    """Adds the tensors at `given` ports to `bound`; False, with a note, where one does not fit."""
    seen = 0
    for port, uid in given:
        name = names.get(port)
        if name is None:
            trace.note(fitted, PORT_EXTRA, node, wanted, port)
            return False
        if port in required:
            seen += 1
        known = bound.setdefault(name, uid)
        if known != uid:
            elsewhere = [p for p, u in given if u == known]
            trace.note(fitted, PORT if elsewhere else OPERAND, node, wanted, port, known, uid, elsewhere)
            return False
    if seen < len(required):
        trace.note(fitted, PORT_MISSING, node, wanted, sorted(set(required) - {p for p, _ in given}))
        return False
    return True


def _attach(pattern: Pattern, view: GraphView, nodes: dict[str, int], values: dict[str, int], told: bool) -> Match:
    """The match with every attachment that fits; `told`: with what is left, and why."""
    if not pattern.attachments:
        return Match(pattern, nodes, values)
    nodes, bound = dict(nodes), dict(values)
    attached: list[str] = []
    left: dict[int, Reason] = {}
    taken = set(nodes.values())
    for wanted, reach in zip(pattern.attachments, pattern.attachment_reaches, strict=True):
        if reach.name not in values:
            continue
        for index in view.read_by[values[reach.name]]:
            node = view.nodes[index]
            if node.op != wanted.op or index in taken:
                continue
            trace = Trace() if told else SILENT
            found = _bind(wanted, node, values, trace, ())
            if found and wanted.label not in nodes:
                nodes[wanted.label] = index
                taken.add(index)
                bound.update(found[0])
                attached.append(wanted.label)
            elif told and found:
                left[index] = _reason(view, NODE_TAKEN, node, wanted)
            elif told:
                left.setdefault(index, trace.reason(view))
    kept = tuple([(i, r) for i, r in left.items() if i not in taken]) if left else ()
    return Match(pattern, nodes, bound, tuple(attached), kept)


def _reason(view: GraphView, code: str, *details: Any) -> Reason:
    graph = view.graph
    if code in (NO_READER, NO_PRODUCER):
        uid, wanted, reach = details
        what = "no other node reads it" if code == NO_READER else "no node writes it"
        return Reason(code, f"{tensor_text(graph, uid)}: {what}", _wanted(wanted, reach))
    node = details[0]
    where = node.path
    if code == OP:
        _, wanted, reach = details
        return Reason(code, f"{node.name} is {node.op}", _wanted(wanted, reach), where=where)
    if code == NODE_TAKEN:
        what = " and ".join(f"{k} = {v[0]!r}" for k, v in details[1].attributes.items())
        seen = f"{node.name} is a second {node.op}" + (f" with {what}" if what else "")
        return Reason(code, seen, "one node for each part of the fusion", where=where)
    if code == ATTACHMENT_MISSING:
        _, pattern, cause = details
        wanted = [a for a in pattern.attachments if a.label in pattern.needs_any]
        seen = "none" if cause is None else f"none that fits ({cause})"
        return Reason(code, seen, "at least one of " + ", ".join(f"{a.label} ({a.op})" for a in wanted), where=where)
    wanted = details[1]
    if code == ATTRIBUTE:
        name = details[2]
        allowed = " or ".join(map(repr, wanted.attributes[name]))
        return Reason(code, f"{name} = {node.attribute.get(name)!r}", f"{name} = {allowed} on {wanted.op}", where=where)
    if code == PORT_EXTRA:
        return Reason(code, f"{node.op} has {details[2]}", f"{wanted.op} without {details[2]}", where=where)
    if code == PORT_MISSING:
        return Reason(code, f"{node.op} without {', '.join(details[2])}", f"{wanted.op} with it", where=where)
    port, known, uid, elsewhere = details[2:]
    seen = f"{tensor_text(graph, uid)} at {port}" + (
        f", and {tensor_text(graph, known)} at {', '.join(elsewhere)}" if elsewhere else ""
    )
    return Reason(code, seen, f"{tensor_text(graph, known)} at {port} of {wanted.op}", where=where)


def _wanted(wanted: NodePattern, reach: Reach) -> str:
    verb = "reads" if reach.downstream else "writes"
    return f"a {wanted.op} that {verb} it at port {reach.port}"
