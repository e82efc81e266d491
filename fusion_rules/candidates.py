"""From a structural match to what may be fused: covers, their problems, and what each kernel says of them.

A cover is the core of a match with some of its attachments. A kernel may serve fewer attachments than a match has; the
largest covers that it serves become candidates, and what they leave out stays unfused with its reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
    """What a kernel says of a whole match on an arch: why not, and the smaller covers that it serves instead."""

    kernel: KernelEntry
    arch: Arch
    reasons: tuple[Reason, ...]
    served: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Cover:
    """The nodes that one kernel would replace, and its problem; `illegal` has what legality says against it."""

    rule: Rule
    anchor: int
    attached: tuple[str, ...]
    nodes: tuple[int, ...]
    roles: Mapping[str, int]
    problem: Problem
    illegal: tuple[Reason, ...]
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)


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
    illegal = legality.illegalities(view, indices, read=operands, written=written, interior=interior)
    return Cover(rule, indices[0], attached, tuple(sorted(indices)), placed, problem, illegal)


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
    candidates: list[Candidate] = []
    verdicts: list[Verdict] = []
    for kernel in kernels:
        answer = _ask(match, whole, kernel, cover, objections, arch)
        reasons = answer.reasons
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


def _ask(
    match: Match,
    whole: Cover,
    kernel: KernelEntry,
    cover: Callable[[tuple[str, ...]], Cover],
    objections: tuple[Reason, ...],
    arch: Arch,
) -> Answer:
    """What `kernel` says of the whole match on `arch`. The cover keeps it: conditions depend on nothing else."""
    key = (id(kernel), id(arch))  # both are kept alive by the answer, so that an id stands for one object
    if key not in whole.answers:
        reasons = (*objections, *kernel_failures(kernel, whole.problem, arch))
        served = _served(match, kernel, cover, reasons, arch) if reasons else []
        whole.answers[key] = Answer(kernel, arch, reasons, tuple(served))
    return whole.answers[key]


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
