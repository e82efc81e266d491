"""The one module that decides whether a set of nodes may become one kernel, for every rule.

A matcher proposes; what is wrong with replacing the nodes at once, whatever the rule, is said here and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ..graph_ops.ir.op import OpSpec
from ..graph_ops.ir.ops import OPS
from ..kernels.condition import Reason
from .view import GraphView, tensor_text

INTERIOR_VALUE_ESCAPES = "INTERIOR_VALUE_ESCAPES"
INTERIOR_VALUE_IS_OUTPUT = "INTERIOR_VALUE_IS_OUTPUT"
NOT_CONVEX = "NOT_CONVEX"
IN_PLACE_WRITER = "IN_PLACE_WRITER"
NOT_EXACT_COVER = "NOT_EXACT_COVER"
OPERAND_PRODUCED_INSIDE = "OPERAND_PRODUCED_INSIDE"
CONTRACTION_CYCLE = "CONTRACTION_CYCLE"

CODES: Mapping[str, str] = {
    INTERIOR_VALUE_ESCAPES: "a value that the kernel does not write is read outside",
    INTERIOR_VALUE_IS_OUTPUT: "a value that the kernel does not write is an output of the graph",
    NOT_CONVEX: "a path leaves the nodes and comes back, so that they cannot run at once",
    IN_PLACE_WRITER: "one of several nodes accumulates into what its output buffer holds",
    NOT_EXACT_COVER: "a node is absorbed twice, or a value that it writes has no place in the kernel",
    OPERAND_PRODUCED_INSIDE: "the kernel would read from memory a value that it is itself to compute",
    CONTRACTION_CYCLE: "together with other fusions the plan would wait for itself",
}
"""Every reason for which a match is illegal, with its meaning."""

_NEVER = OpSpec.__dataclass_fields__["reads_output"].default
_MAY_ACCUMULATE = frozenset(op.name for op in OPS.values() if op.reads_output is not _NEVER)


def illegalities(
    view: GraphView,
    nodes: Sequence[int],
    *,
    read: Iterable[int],
    written: Iterable[int],
    interior: Iterable[int],
) -> tuple[Reason, ...]:
    """Every reason why `nodes` cannot become one kernel that reads the tensors `read` from memory, writes `written` to
    memory and keeps `interior` to itself; empty where it can."""
    inside = frozenset(nodes)
    return (
        *_cover(view, nodes, inside, {*written, *interior}),
        *_interior(view, inside, interior),
        *_operands(view, inside, read),
        *_in_place(view, nodes),
        *_convex(view, inside),
    )


def _cover(view: GraphView, nodes: Sequence[int], inside: frozenset[int], placed: set[int]) -> list[Reason]:
    found = []
    if len(inside) < len(nodes):
        twice = sorted({i for i in nodes if list(nodes).count(i) > 1})
        names = ", ".join(view.nodes[i].name for i in twice)
        where = view.nodes[twice[0]].path
        found.append(Reason(NOT_EXACT_COVER, f"{names} more than once", "each node exactly once", where=where))
    for index in nodes:
        node = view.nodes[index]
        for port, uid in node.outputs:
            if uid not in placed:
                seen = f"{port} = {tensor_text(view.graph, uid)} has no place"
                required = "a place for every value that an absorbed node writes"
                found.append(Reason(NOT_EXACT_COVER, seen, required, where=node.path))
    return found


def _interior(view: GraphView, inside: frozenset[int], interior: Iterable[int]) -> list[Reason]:
    found = []
    for uid in interior:
        outside = [view.nodes[i] for i in view.read_by[uid] if i not in inside]
        if not outside and not view.graph.tensors[uid].is_output:
            continue
        text = tensor_text(view.graph, uid)
        where = view.nodes[view.written_by[uid]].path
        if outside:
            readers = ", ".join(dict.fromkeys(n.name for n in outside))
            found.append(
                Reason(
                    INTERIOR_VALUE_ESCAPES,
                    f"{text} -> {readers}",
                    "no reader outside the fusion",
                    "compute it twice, or leave this part unfused",
                    where,
                )
            )
        if view.graph.tensors[uid].is_output:
            found.append(
                Reason(
                    INTERIOR_VALUE_IS_OUTPUT,
                    f"{text} is an output",
                    "a virtual tensor",
                    "no kernel of this rule writes it: drop set_output, or leave this part unfused",
                    where,
                )
            )
    return found


def _operands(view: GraphView, inside: frozenset[int], read: Iterable[int]) -> list[Reason]:
    return [
        Reason(
            OPERAND_PRODUCED_INSIDE,
            f"{tensor_text(view.graph, uid)}, written by {view.nodes[made].name}",
            "operands that exist before the kernel runs",
            where=view.nodes[made].path,
        )
        for uid in dict.fromkeys(read)
        if (made := view.written_by.get(uid)) is not None and made in inside
    ]


def _in_place(view: GraphView, nodes: Sequence[int]) -> list[Reason]:
    """Of several nodes none may accumulate. Alone one may: its kernel has the attribute, and decides."""
    if len(nodes) == 1:
        return []
    return [
        Reason(
            IN_PLACE_WRITER,
            f"{view.nodes[i].name} accumulates into {', '.join(ports)}",
            "outputs that are only written",
            "accumulate=False and an add, or leave this part unfused",
            view.nodes[i].path,
        )
        for i in nodes
        if view.nodes[i].op in _MAY_ACCUMULATE and (ports := view.nodes[i].reads_output)
    ]


def is_convex(view: GraphView, nodes: Sequence[int]) -> bool:
    """Whether no path leaves `nodes` and comes back."""
    return not _convex(view, frozenset(nodes))


def _convex(view: GraphView, inside: frozenset[int]) -> list[Reason]:
    position = view.position
    places = [position[i] for i in inside]
    last = max(places)
    if last - min(places) + 1 == len(inside):
        return []
    # A path that comes back stays below the last node's position: the search never looks further.
    seen: set[int] = set()
    waiting = [s for i in sorted(inside) for s in view.successors(i) if s not in inside and position[s] < last]
    first_of = dict.fromkeys(waiting)
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        for successor in view.successors(index):
            if successor in inside:
                left = next(iter(first_of))
                return [
                    Reason(
                        NOT_CONVEX,
                        f"a path leaves to {view.nodes[left].name} and comes back from "
                        f"{view.nodes[index].name} to {view.nodes[successor].name}",
                        "no path through other nodes",
                        where=view.nodes[index].path,
                    )
                ]
            if position[successor] < last:
                waiting.append(successor)
    return []


def reaches(view: GraphView, sources: Iterable[int], targets: Iterable[int]) -> bool:
    """Whether a path leads from a node of `sources` to a node of `targets` (a common node counts)."""
    position = view.position
    wanted = frozenset(targets)
    last = max((position[t] for t in wanted), default=-1)
    waiting = [s for s in sources if position[s] <= last]
    seen: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index in wanted:
            return True
        if index not in seen:
            seen.add(index)
            waiting.extend(s for s in view.successors(index) if position[s] <= last)
    return False


def cyclic_groups(view: GraphView, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sets of `groups` (by their place in the sequence) that form a cycle once each group is one node; each group alone
    is convex. Empty where the contracted graph has an order."""
    position = view.position
    spans = sorted((min(position[i] for i in g), max(position[i] for i in g)) for g in groups)
    if all(before[1] < after[0] for before, after in itertools.pairwise(spans)):
        return []  # every path runs upward, so convex groups whose spans are apart cannot wait for each other
    import networkx

    owner = {i: ("group", g) for g, members in enumerate(groups) for i in members}
    contracted = networkx.DiGraph()
    for node in view.nodes:
        start = owner.get(node.index, ("node", node.index))
        for successor in view.successors(node.index):
            end = owner.get(successor, ("node", successor))
            if start != end:
                contracted.add_edge(start, end)
    components = networkx.strongly_connected_components(contracted)
    found = [sorted(g for kind, g in c if kind == "group") for c in components if len(c) > 1]
    return sorted(found)
