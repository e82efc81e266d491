"""Raising: pointwise compositions that are a GLU or its derivative become one node, before anything is fused.

raise_glu: `prob * up * gate * sigmoid(gate)`, in any spelling and order, with gate and up from split_glu -> glu.
raise_glu_backward: its derivatives by gate and up, joined in the layout of the split -> glu_backward; a reduction over
the columns that is dprob, and the activation if it is computed too, become outputs of the same node.

A composition is raised only where it computes in FLOAT, nothing outside reads what is inside, and the result is the
same up to the order of float32 operations: no rounding moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..graph_ops.ir.dtypes import DataType
from ..graph_ops.ir.graph import Node, OpGraph
from ..graph_ops.ir.ops import OPS
from ..graph_ops.ir.tensor import TensorSpec, contiguous_stride
from ..kernels.condition import Reason
from .algebra import ALGEBRAIC_OPS, COMPARISONS, Algebra, equal
from .choice import DISABLED
from .glu_forms import Form, activation, read_backward, read_forward
from .legality import reaches
from .verdict import Raising, Verdict, VerdictKind
from .view import GraphView, tensor_text

RAISE_FORM = "RAISE_FORM"
RAISE_ROUNDING = "RAISE_ROUNDING"
RAISE_ESCAPES = "RAISE_ESCAPES"
RAISE_LAYOUT = "RAISE_LAYOUT"

CODES: Mapping[str, str] = {
    RAISE_FORM: "the composition is not a GLU that a node describes",
    RAISE_ROUNDING: "an intermediate value rounds to a type narrower than FLOAT, and one node would not round there",
    RAISE_ESCAPES: "a value inside the composition is read outside it, or is an output",
    RAISE_LAYOUT: "the gradients are joined in another layout than gate and up were split from",
}
"""Every reason why a composition is not raised, with its meaning."""

DERIVED_LIMIT = 128
"""Nodes that are looked at downstream of one tensor's gate and up columns; a GLU and its derivative need about 30."""


@dataclass(frozen=True)
class Raise:
    """One rewriting: its stable id, its algebra, and the op at which it begins."""

    id: str
    doc: str
    anchor_op: str


RAISES: Mapping[str, Raise] = {
    r.id: r
    for r in (
        Raise(
            "raise_glu", "prob * up * gate * sigmoid(gate), gate and up from split_glu(x) -> glu(x, prob)", "split_glu"
        ),
        Raise(
            "raise_glu_backward",
            "join_glu(d/dgate, d/dup) of a GLU of split_glu(x) -> glu_backward(dy, x, prob)",
            "join_glu",
        ),
    )
}


@dataclass(frozen=True)
class _Proposal:
    """A new node for a composition: `region` would go, `outputs` (port -> uid) stay, or `reason` says why not."""

    rule: str
    anchor: int
    region: frozenset[int] = frozenset()
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    reason: Reason | None = None


def raise_graph(graph: OpGraph, disable: Collection[str] = ()) -> tuple[OpGraph, tuple[Raising, ...]]:
    """`graph` with every composition that is a GLU or its derivative as one node, and what was raised.

    The tensors that the compositions give keep their uids, names and types. Returns `graph` itself where there is
    nothing to raise. `disable`: ids of RAISES.
    """
    if not any(node.op == "split_glu" for node in graph.structure.nodes):
        return graph, ()
    view = GraphView(graph)
    legal = _legal(view, [p for p in _proposals(view) if p.reason is None and p.rule not in disable])
    while legal:
        raised, made = _apply(graph, legal)
        if len(raised.topological_order) == len(raised.nodes):
            return raised, made
        legal.pop()  # compositions that wait for each other's results cannot all be single nodes
    return graph, ()


def unraised(view: GraphView, disable: Collection[str] = ()) -> Iterator[Verdict]:
    """For every split_glu and join_glu that is left in a raised graph: why its composition is not a GLU node."""
    if not any(node.op in ("split_glu", "join_glu") for node in view.nodes):
        return
    proposals = _proposals(view)
    legal = {id(p) for p in _legal(view, [p for p in proposals if p.reason is None])}
    for proposal in proposals:
        kind, reason = VerdictKind.NO_MATCH, proposal.reason
        if id(proposal) in legal and proposal.rule in disable:
            kind = VerdictKind.NOT_CHOSEN
            reason = Reason(
                DISABLED, f"{proposal.rule} is disabled", "its id not in disable", "plan again without it in disable"
            )
        elif reason is None:
            reason = _escape(view, proposal, proposal.region) or Reason(
                RAISE_ESCAPES, "its results feed its own operands", "results that nothing before the node reads"
            )
        nodes = tuple(sorted(proposal.region)) or (proposal.anchor,)
        yield Verdict(kind, proposal.rule, proposal.anchor, nodes, (reason,))


def _proposals(view: GraphView) -> list[_Proposal]:
    """What could be raised, or why not: one proposal for each join_glu, at least one for each tensor that is split."""
    splits: dict[int, list[Node]] = {}
    joins = []
    for node in view.nodes:
        if node.op == "split_glu":
            splits.setdefault(node.input_uids["x"], []).append(node)
        elif node.op == "join_glu":
            joins.append(node)
    found: list[_Proposal] = []
    joined: set[int] = set()
    for x, nodes in splits.items():
        derived = _derived(view, nodes)
        backward = [j for j in joins if all(uid in derived for _, uid in j.inputs)]
        joined.update(j.index for j in backward)
        made = [_backward(view, x, derived, join) for join in backward]
        taken = frozenset(i for p in made if p.reason is None for i in p.region)
        found.extend(made)
        found.extend(_forward(view, x, derived, nodes[0], taken, bool(taken)))
    for join in joins:
        if join.index not in joined:
            reason = Reason(
                RAISE_FORM,
                f"gate and up of {join.name} do not both derive from one split_glu",
                "derivatives of a GLU of split_glu(x)",
                where=join.path,
            )
            found.append(_Proposal("raise_glu_backward", join.index, reason=reason))
    return found


def _derived(view: GraphView, splits: Sequence[Node]) -> frozenset[int]:
    """Uids that algebraic ops compute from the outputs of `splits`, the outputs included."""
    found: dict[int, None] = {uid: None for split in splits for _, uid in split.outputs}
    waiting = list(found)
    for uid in waiting:
        for use in view.uses[uid]:
            if len(found) > DERIVED_LIMIT or use.node.op not in ALGEBRAIC_OPS | COMPARISONS:
                continue
            for _, made in use.node.outputs:
                if made not in found:
                    found[made] = None
                    waiting.append(made)
    return frozenset(found)


def _root(algebra: Algebra, uid: int) -> Any:
    """The polynomial of a result, which rounds only where the node that replaces it rounds."""
    made = algebra.view.producers.get(uid)
    if made is None or made.node.op not in ALGEBRAIC_OPS:
        return algebra.value(uid)
    return algebra.expression(made.node, uid)


def _backward(view: GraphView, x: int, derived: frozenset[int], join: Node) -> _Proposal:
    tensors = view.graph.tensors
    (_, dgate), (_, dup) = sorted(join.inputs)
    dx = join.output_uids["x"]
    wanted, seen = tensors[x].glu_layout, tensors[dx].glu_layout
    allowed = (DataType.FLOAT, tensors[dx].data_type)
    rounded = [u for u in (dgate, dup) if tensors[u].data_type not in allowed]
    for flatten in (True, False):
        algebra = Algebra(view, x, derived, flatten)
        read = read_backward(algebra, _root(algebra, dgate), _root(algebra, dup))
        if read is None:
            continue
        if rounded:
            return _Proposal("raise_glu_backward", join.index, reason=_rounds(view, rounded, join))
        if wanted != seen:
            reason = Reason(
                RAISE_LAYOUT,
                f"joined as {seen}",
                f"{wanted}, as {tensors[x].name} is split",
                f"join in {wanted}, then convert_glu_layout",
                join.path,
            )
            return _Proposal("raise_glu_backward", join.index, reason=reason)
        inputs = [("dy", read.dy_uid), ("x", x)] + (
            [("prob", read.form.prob_uid)] if read.form.prob_uid is not None else []
        )
        region = algebra.region((dgate, dup)) | {join.index}
        outputs, roots = _side_outputs(algebra, read.form, read.dy, [u for _, u in inputs], region)
        region |= roots
        attributes = OPS["glu_backward"].complete({**read.form.attributes, "recompute": "activation" in outputs})
        return _Proposal(
            "raise_glu_backward",
            join.index,
            frozenset(region),
            tuple(inputs),
            (("dx", dx), *outputs.items()),
            tuple(attributes.items()),
        )
    reason = _misfit(view, derived, "the derivatives by gate and up of swiglu or geglu", join)
    return _Proposal("raise_glu_backward", join.index, reason=reason)


def _side_outputs(
    algebra: Algebra, form: Form, dy: int, inputs: Sequence[int], region: set[int]
) -> tuple[dict[str, int], set[int]]:
    """dprob and the recomputed activation where the graph has them: port -> uid, and the nodes that they add."""
    view = algebra.view
    outputs: dict[str, int] = {}
    roots: set[int] = set()
    sources = [made.node.index for uid in inputs if (made := view.producers.get(uid)) is not None]
    gradient = activation(algebra, form, by=dy)
    forward = activation(algebra, form, by=form.prob)
    for uid in sorted(algebra.derived):
        if (
            "dprob" not in outputs
            and algebra.view.graph.tensors[uid].data_type is DataType.FLOAT
            and equal(algebra.value(uid), gradient)
        ):
            for use in view.uses[uid]:
                node = use.node
                if node.op != "reduction" or not _sums_columns(node) or _feeds(view, node.output_uids["y"], sources):
                    continue
                outputs["dprob"] = node.output_uids["y"]
                roots |= {node.index, *algebra.region((uid,))}
                break
    for uid in sorted(algebra.derived, key=lambda u: -view.producers[u].node.index):
        if "activation" in outputs or not equal(_root(algebra, uid), forward):
            continue
        outside = [u for u in view.uses[uid] if u.node.index not in region | roots]
        if (outside or view.graph.tensors[uid].is_output) and not _feeds(view, uid, sources):
            outputs["activation"] = uid
            roots |= algebra.region((uid,))
    return {p: outputs[p] for p in ("dprob", "activation") if p in outputs}, roots


def _sums_columns(node: Node) -> bool:
    attribute = node.attribute
    return (attribute["mode"], attribute["axis"], attribute["keep_dim"]) == ("ADD", (1,), False)


def _feeds(view: GraphView, uid: int, sources: Sequence[int]) -> bool:
    """Whether the node's operands wait for this result: one node for both would wait for itself."""
    return reaches(view, [u.node.index for u in view.uses[uid]], sources)


def _forward(
    view: GraphView, x: int, derived: frozenset[int], split: Node, taken: frozenset[int], served: bool
) -> list[_Proposal]:
    """The outermost GLUs of `x` outside `taken`; a reason where there is none and no derivative serves the split."""
    found: list[_Proposal] = []
    illegal: list[_Proposal] = []
    inside = set(taken)
    algebra = Algebra(view, x, derived, True)
    values = sorted(derived, key=lambda u: (-view.position[view.producers[u].node.index], u))
    for uid in values:
        node = view.producers[uid].node
        if node.op not in ALGEBRAIC_OPS or node.index in inside:
            continue
        form = read_forward(algebra, _root(algebra, uid))
        if form is None:
            continue
        inputs = (("x", x), *((("prob", form.prob_uid),) if form.prob_uid is not None else ()))
        attributes = tuple(OPS["glu"].complete(form.attributes).items())
        proposal = _Proposal(
            "raise_glu", split.index, frozenset(algebra.region((uid,))), inputs, (("y", uid),), attributes
        )
        if _escape(view, proposal, proposal.region | taken) is None:
            found.append(proposal)
            inside |= proposal.region
        else:
            illegal.append(proposal)
    if not found and not illegal and not served:
        reason = _misfit(view, derived, "prob * up * gate * sigmoid(gate), or its clamped form", split)
        return [_Proposal("raise_glu", split.index, reason=reason)]
    return found or illegal[:1]


def _misfit(view: GraphView, derived: frozenset[int], wanted: str, anchor: Node) -> Reason:
    """Why no form was read: a value that rounds on the way, or else another formula."""
    rounded = [u for u in sorted(derived) if _rounds_inside(view, u)]
    if rounded:
        return _rounds(view, rounded, anchor)
    return Reason(RAISE_FORM, f"the composition at {anchor.name} is another function", wanted, where=anchor.path)


def _rounds_inside(view: GraphView, uid: int) -> bool:
    """Whether a value that algebraic ops read rounds where one node would not."""
    tensors, node = view.graph.tensors, view.producers[uid].node
    exact = [DataType.FLOAT, DataType.BOOLEAN]
    if node.op == "split_glu":
        exact.append(tensors[node.input_uids["x"]].data_type)
    return tensors[uid].data_type not in exact and any(use.node.op in ALGEBRAIC_OPS for use in view.uses[uid])


def _rounds(view: GraphView, uids: Sequence[int], anchor: Node) -> Reason:
    tensors = view.graph.tensors
    seen = ", ".join(f"{tensors[u].name} rounds to {tensors[u].data_type!r}" for u in uids)
    return Reason(
        RAISE_ROUNDING, seen, "FLOAT inside the composition", "set_data_type(DataType.FLOAT) on it", anchor.path
    )


def _escape(view: GraphView, proposal: _Proposal, allowed: Collection[int]) -> Reason | None:
    """A value inside the composition that something outside `allowed` needs."""
    kept = {uid for _, uid in proposal.outputs}
    for index in sorted(proposal.region):
        for _, uid in view.nodes[index].outputs:
            if uid in kept:
                continue
            readers = dict.fromkeys(u.node.name for u in view.uses[uid] if u.node.index not in allowed)
            if readers or view.graph.tensors[uid].is_output:
                seen = f"{tensor_text(view.graph, uid)} -> {', '.join(readers) or 'output'}"
                return Reason(
                    RAISE_ESCAPES,
                    seen,
                    "no reader outside the composition",
                    "compute it apart from the composition",
                    view.nodes[index].path,
                )
    return None


def _legal(view: GraphView, proposals: Sequence[_Proposal]) -> list[_Proposal]:
    """Those whose inner values nothing else needs: compositions that share a value go together or not at all."""
    legal = list(proposals)
    while True:
        allowed = frozenset(i for p in legal for i in p.region)
        kept = [p for p in legal if _escape(view, p, allowed) is None]
        if len(kept) == len(legal):
            return kept
        legal = kept


def _apply(graph: OpGraph, proposals: Sequence[_Proposal]) -> tuple[OpGraph, tuple[Raising, ...]]:
    """The graph with the proposals' nodes in place of their regions, and no split_glu node that only those used."""
    gone = {i for p in proposals for i in p.region}
    served = {uid for p in proposals for port, uid in p.inputs if port == "x"}
    for node in graph.nodes:
        if node.op == "split_glu" and node.input_uids["x"] in served and _dead(graph, node, gone):
            gone.add(node.index)
    tensors: dict[int, TensorSpec] = dict(graph.tensors)
    placed: dict[int, list[Node]] = {}
    raisings = []
    for proposal in proposals:
        anchor = graph.nodes[max(proposal.region)]
        op = "glu" if proposal.rule == "raise_glu" else "glu_backward"
        name = f"{op}.of.{anchor.name}"
        outputs = _with_dprob(proposal, tensors, name) if op == "glu_backward" else proposal.outputs
        node = Node(-1, op, name, proposal.inputs, outputs, proposal.attributes, anchor.location)
        placed.setdefault(anchor.index, []).append(node)
        raisings.append(Raising(proposal.rule, tuple(sorted(proposal.region)), name))
    nodes = [n for node in graph.nodes for n in (*(() if node.index in gone else (node,)), *placed.get(node.index, ()))]
    used = {uid for n in nodes for _, uid in (*n.inputs, *n.outputs)}
    inner = {uid for i in gone for _, uid in (*graph.nodes[i].inputs, *graph.nodes[i].outputs)} - used
    kept = {uid: t for uid, t in tensors.items() if uid not in inner or uid in _caller_tensors(graph)}
    changed = replace(graph, nodes=tuple(replace(n, index=i) for i, n in enumerate(nodes)), tensors=kept)
    order = changed.topological_order
    if len(order) == len(nodes) and any(n.index != i for i, n in enumerate(order)):
        changed = replace(changed, nodes=tuple(replace(n, index=i) for i, n in enumerate(order)))
    return changed, tuple(raisings)


def _caller_tensors(graph: OpGraph) -> set[int]:
    return {t.uid for t in graph.graph_inputs}


def _dead(graph: OpGraph, node: Node, gone: Collection[int]) -> bool:
    return not any(
        graph.tensors[uid].is_output or any(u.node.index not in gone for u in graph.uses[uid])
        for _, uid in node.outputs
    )


def _with_dprob(proposal: _Proposal, tensors: dict[int, TensorSpec], name: str) -> tuple[tuple[str, int], ...]:
    """The outputs in port order; glu_backward always has a dprob, which nothing reads if the graph had none."""
    outputs = dict(proposal.outputs)
    if "dprob" not in outputs:
        uid = max(tensors) + 1
        dim = (tensors[outputs["dx"]].dim[0],)
        tensors[uid] = TensorSpec(uid, f"{name}::dprob", dim, contiguous_stride(dim), DataType.FLOAT, is_virtual=True)
        outputs["dprob"] = uid
    return tuple((p, outputs[p]) for p in ("dx", "dprob", "activation") if p in outputs)
