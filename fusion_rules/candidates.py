"""From a structural match to what may be fused: covers, their problems, and what each kernel says of them.

A cover is the core of a match with some of its attachments. A kernel may serve fewer attachments than a match has; the
largest covers that it serves become candidates, and what they leave out stays unfused with its reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ..graph_ops.ir.dtypes import DataType
from ..graph_ops.ir.nodes.glu import ACTIVATION_PARAMETERS
from ..graph_ops.ir.tensor import TensorSpec
from ..kernels.arch import Arch
from ..kernels.condition import Reason, failures
from ..kernels.problem import Problem
from ..kernels.registry import KernelEntry
from . import legality
from .matcher import Match
from .pattern import Shape
from .rule import Rule
from .support import FIXED, kernel_failures, no_kernel, rule_failures
from .verdict import Verdict, VerdictKind
from .view import GraphView

_PARAMETERS = frozenset(p for names in ACTIVATION_PARAMETERS.values() for p in names)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a kernel says of one kind of match on an arch.

    `failing` is the kernel with those of its conditions alone that fail, None where it serves the match; `served` are
    the smaller covers that it serves instead, by their attachments.
    """

    kernel: KernelEntry
    arch: Arch
    failing: KernelEntry | None
    served: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Cover:
    """The nodes that one kernel would replace, by the part they play, and its problem.

    `read`, `written` and `interior` are the tensors that the kernel reads, writes and keeps to itself.
    """

    rule: Rule
    anchor: int
    attached: tuple[str, ...]
    parts: tuple[int, ...]
    roles: Mapping[str, int]
    problem: Problem
    read: tuple[int, ...]
    written: tuple[int, ...]
    interior: tuple[int, ...]
    view: GraphView

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(self.parts))

    @cached_property
    def illegal(self) -> tuple[Reason, ...]:
        """What legality says against it."""
        return legality.illegalities(
            self.view, self.parts, read=self.read, written=self.written, interior=self.interior
        )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A cover that a kernel serves on the arch at hand."""

    cover: Cover
    kernel: KernelEntry


def make_cover(rule: Rule, match: Match, attached: tuple[str, ...], view: GraphView) -> Cover:
    """The cover of `match` with the attachments `attached`. The match keeps it: no arch or kernel changes it."""
    if attached not in match.covers:
        match.covers[attached] = _make_cover(rule, match, attached, view)
    cover: Cover = match.covers[attached]
    return cover


def _make_cover(rule: Rule, match: Match, attached: tuple[str, ...], view: GraphView) -> Cover:
    graph, values, uses, tensors, roles = view.graph, match.values, view.uses, view.graph.tensors, rule.roles
    shape = match.pattern.shape(attached)
    indices = [match.nodes[part.label] for part in shape.parts]
    named = {name: values[name] for name in shape.operands if name in values}
    operands = tuple(named.values())
    written: list[int] = []
    interior: list[int] = []
    rounding: dict[str, DataType] = {}
    for name in shape.made:
        uid = values.get(name)
        if uid is None:
            continue
        role = roles.get(name)
        if (
            role is not None
            and role.is_output
            and (
                name in match.pattern.always_written
                or tensors[uid].is_output
                or any(u.node.index not in indices for u in uses[uid])
            )
        ):
            named[name] = uid
            written.append(uid)
            continue
        interior.append(uid)
        if uses[uid]:
            rounding[name] = tensors[uid].data_type
    placed: dict[str, int] = {}
    specs: dict[str, TensorSpec] = {}
    for name in roles:
        if name in named:
            placed[name] = uid = named[name]
            specs[name] = tensors[uid]
    problem = Problem(
        rule=rule.id,
        tensors=specs,
        attributes=dict(_attributes(shape, tuple(view.nodes[i].attributes for i in indices))),
        rounding=rounding,
        deterministic=graph.deterministic,
    )
    return Cover(rule, indices[0], attached, tuple(indices), placed, problem, operands, tuple(written),
                 tuple(interior), view)  # fmt: skip


@lru_cache(maxsize=4096)
def _attributes(shape: Shape, given: tuple[tuple[tuple[str, Any], ...], ...]) -> dict[str, Any]:
    """The attributes of every node under its prefix; parameters that an activation does not read are left out."""
    found: dict[str, Any] = {}
    for part, attributes in zip(shape.parts, given, strict=True):
        act = dict(attributes).get("act")
        unread = _PARAMETERS - set(ACTIVATION_PARAMETERS[act]) if act is not None else ()
        found.update((part.prefix + name, value) for name, value in attributes if name not in unread)
    return found


def judge(
    rule: Rule, match: Match, kernels: Sequence[KernelEntry], view: GraphView, arch: Arch
) -> tuple[list[Candidate], list[Verdict]]:
    """The candidates of `match`, and a verdict for every kernel (and attachment) that cannot serve it."""

    def cover(attached: tuple[str, ...]) -> Cover:
        return make_cover(rule, match, attached, view)

    whole = cover(match.attached)
    objections = _objections(whole, arch)
    if objections and _common(objections, [_objections(cover(a), arch) for a in _least(match)]):
        return [], [Verdict(VerdictKind.UNSUPPORTED, rule.id, whole.anchor, whole.nodes, objections)]
    if not kernels:
        reasons = (*objections, no_kernel(rule))
        return [], [Verdict(VerdictKind.UNSUPPORTED, rule.id, whole.anchor, whole.nodes, reasons)]
    kind: Any = None
    candidates: list[Candidate] = []
    verdicts: list[Verdict] = []
    for kernel in kernels:
        if kind is None:
            kind = _kind(match, whole)
        answer = _ask(match, whole, kind, kernel, cover, objections, arch)
        reasons = objections
        if answer.failing is not None:
            reasons = (*objections, *kernel_failures(answer.failing, whole.problem, arch))
        if not reasons:
            candidates.append(Candidate(whole, kernel))
            continue
        served = [cover(a) for a in answer.served]
        candidates.extend(Candidate(c, kernel) for c in served)
        if served:
            kept = set().union(*(c.nodes for c in served))
            nodes = tuple(i for i in whole.nodes if i not in kept) or whole.nodes
        else:
            nodes = whole.nodes
        verdicts.append(Verdict(VerdictKind.UNSUPPORTED, rule.id, whole.anchor, nodes, reasons, kernel.id))
    return candidates, verdicts


def _kind(match: Match, whole: Cover) -> Any:
    """All that decides what a kernel says of the match, so that alike matches are judged once.

    Conditions judge a problem by everything but names, uids and source lines, and so do node kinds. Apart from them a
    smaller cover depends on who else reads what the match makes. Where more of the graph would count (the whole is
    illegal, an attachment feeds another, one tensor has two names), the match is of no kind but its own: its cover.
    """
    view, values = whole.view, match.values
    if whole.illegal or len(set(values.values())) < len(values):
        return whole
    inside, uses = whole.parts, view.uses
    core_makes = match.pattern.shape(()).made
    readers = []
    for name in match.pattern.shape(match.attached).made:
        if name not in values:
            readers.append(-1)
            continue
        read = uses[values[name]]
        outside = len([use for use in read if use.node.index not in inside])
        if outside < len(read) and name not in core_makes:
            return whole
        readers.append(2 if outside else 1 if read else 0)
    node_kind = view.graph.structure.node_kind
    return match.pattern, match.attached, tuple([node_kind[i] for i in inside]), tuple(readers)


def _ask(
    match: Match,
    whole: Cover,
    kind: Any,
    kernel: KernelEntry,
    cover: Callable[[tuple[str, ...]], Cover],
    objections: tuple[Reason, ...],
    arch: Arch,
) -> Answer:
    """What `kernel` says of the whole match on `arch`. The view keeps it for every match of the same kind."""
    key = (kind, id(kernel), id(arch))  # both are kept alive by the answer, so that an id stands for one object
    kept: Answer | None = whole.view.answers.get(key)
    if kept is None:
        reasons = kernel_failures(kernel, whole.problem, arch)
        codes = {r.code for r in reasons}
        failing = replace(kernel, conditions=tuple(c for c in kernel.conditions if c.code in codes)) if reasons else None
        against = (*objections, *reasons)
        served = _served(match, kernel, cover, against, arch) if against else []
        kept = whole.view.answers[key] = Answer(kernel, arch, failing, tuple(served))
    return kept


def _objections(cover: Cover, arch: Arch) -> tuple[Reason, ...]:
    """What legality and the rule itself say against a cover, whatever the kernel."""
    return cover.illegal + rule_failures(cover.rule, cover.problem, arch)


def _least(match: Match) -> list[tuple[str, ...]]:
    """The smallest covers: no attachment, or one of those without which the rule is not worth while."""
    needs = match.pattern.needs_any
    return [(label,) for label in match.attached if label in needs] if needs else [()]


def _common(first: Sequence[Reason], others: Sequence[Sequence[Reason]]) -> bool:
    """Whether some reason of `first` is in all of `others`."""
    named = [{(r.code, str(r.observed)) for r in other} for other in others]
    return any(all((r.code, str(r.observed)) in other for other in named) for r in first)


def _served(
    match: Match,
    kernel: KernelEntry,
    cover: Callable[[tuple[str, ...]], Cover],
    reasons: Sequence[Reason],
    arch: Arch,
) -> list[tuple[str, ...]]:
    """The largest proper subsets of the attachments that `kernel` serves, larger and earlier ones first.

    `reasons` are those against all of them. The conditions behind them are asked first of each subset, so that most
    subsets cost only those.
    """
    if not match.attached or any(r.code in FIXED for r in reasons):
        return []
    codes = {r.code for r in reasons}
    suspects = tuple(c for c in kernel.conditions if c.code in codes)

    def suspected(attached: tuple[str, ...]) -> tuple[Reason, ...]:
        smaller = cover(attached)
        return (*_objections(smaller, arch), *failures(suspects, smaller.problem, arch))

    if _common(reasons, [suspected(a) for a in _least(match)]):
        return []  # what fails with every attachment and with none does not depend on them
    found: list[tuple[str, ...]] = []
    needs = match.pattern.needs_any
    for size in range(len(match.attached) - 1, -1, -1):
        for chosen in itertools.combinations(match.attached, size):
            if any(set(chosen) <= set(larger) for larger in found) or (needs and not set(needs) & set(chosen)):
                continue
            if not suspected(chosen) and not kernel_failures(kernel, cover(chosen).problem, arch):
                found.append(chosen)
    return found
