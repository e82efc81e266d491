"""From a structural match to what may be fused: covers, their problems, and what each kernel says of them.

`candidates` gives what a plan is chosen from, `judge` the same with every reason against the rest; both ask `_served`.

A cover is the core of a match with some of its attachments. A kernel may serve fewer attachments than a match has; the
largest covers that it serves become candidates, and what they leave out stays unfused with its reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..graph_ops.ir.dtypes import DataType
from ..graph_ops.ir.nodes.glu import ACTIVATION_PARAMETERS
from ..kernels.arch import Arch
from ..kernels.condition import Reason, failures
from ..kernels.problem import Problem
from ..kernels.registry import KernelEntry
from . import legality
from .matcher import Match
from .pattern import Shape
from .rule import Rule
from .support import FIXED, first_failing, holds, kernel_failures, no_kernel, rule_failures
from .verdict import Verdict, VerdictKind
from .view import GraphView

_PARAMETERS = frozenset(p for names in ACTIVATION_PARAMETERS.values() for p in names)
_UNREAD = {act: _PARAMETERS.difference(names) for act, names in ACTIVATION_PARAMETERS.items()}
"""For each activation the parameters of others, which it does not read."""


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
class Judged:
    """What one kernel serves on one arch in one graph, by kind of match; with `seconds`, fused and apart, by form.

    It keeps kernel and arch alive, so that their ids stand for them.
    """

    kernel: KernelEntry
    arch: Arch
    served: dict[Any, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    seconds: dict[Form, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def of(kernel: KernelEntry, arch: Arch, view: GraphView) -> Judged:
        key = id(kernel), id(arch)
        found: Judged | None = view.judged.get(key)
        if found is None:
            found = view.judged[key] = Judged(kernel, arch)
        return found


@dataclass(frozen=True, eq=False)
class Form:
    """What the covers of alike matches with the same attachments have in common.

    `labels` name the nodes; the others name values: those that fill roles of the rule, in the order of roles, and those
    that the kernel reads, writes and keeps to itself. `rounding` and `attributes` are the problem's.
    """

    labels: tuple[str, ...]
    placed: tuple[str, ...]
    read: tuple[str, ...]
    written: tuple[str, ...]
    interior: tuple[str, ...]
    rounding: Mapping[str, DataType]
    attributes: Mapping[str, Any]
    known_legal: list[bool] = field(default_factory=list)  # one entry once a cover of the form was looked at


@dataclass(frozen=True, eq=False)
class Cover:
    """The nodes that one kernel would replace, by the part they play, and its problem.

    `kind` is equal for matches that are judged alike (see `_kind`).
    """

    rule: Rule
    match: Match
    view: GraphView
    kind: Any
    form: Form
    parts: tuple[int, ...]

    @property
    def anchor(self) -> int:
        return self.parts[0]

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(self.parts))

    @cached_property
    def roles(self) -> Mapping[str, int]:
        values = self.match.values
        return {name: values[name] for name in self.form.placed}

    @cached_property
    def problem(self) -> Problem:
        """Covers of one form share attributes and rounding, which nobody writes to."""
        tensors, form = self.view.graph.tensors, self.form
        specs = {name: tensors[uid] for name, uid in self.roles.items()}
        return Problem(self.rule.id, specs, form.attributes, form.rounding, self.view.graph.deterministic)

    @cached_property
    def illegal(self) -> tuple[Reason, ...]:
        """What legality says against it."""
        form, values = self.form, self.match.values
        if form.known_legal and form.known_legal[0]:
            return ()
        found = legality.illegalities(
            self.view,
            self.parts,
            read=[values[name] for name in form.read],
            written=[values[name] for name in form.written],
            interior=[values[name] for name in form.interior],
        )
        form.known_legal[:] = [not found]
        return found


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
    kind = match.kind
    if kind is None:
        kind = match.kind = _kind(match, view)
    form: Form | None = view.forms.get((kind, attached))
    if form is None:
        form = view.forms[kind, attached] = _form(rule, match, attached, view)
    nodes = match.nodes
    return Cover(rule, match, view, kind, form, tuple([nodes[label] for label in form.labels]))


def _kind(match: Match, view: GraphView) -> Any:
    """All that decides what a match can be covered by and what a kernel says of that: alike matches are judged once.

    Conditions judge a problem by everything but names, uids and source lines, and so do node kinds. Apart from them a
    cover, whole or smaller, depends on who else reads what the match makes. Where more of the graph would count (a path
    leaves and comes back, an attachment feeds another, one tensor has two names), a match is like no other.
    """
    values, read_by = match.values, view.read_by
    inside = tuple(match.nodes.values())
    if len(set(values.values())) < len(values) or not legality.is_convex(view, inside):
        return match
    core_makes = match.pattern.shape(()).made
    readers = []
    for name in match.pattern.shape(match.attached).made:
        if name not in values:
            readers.append(-1)
            continue
        read = read_by[values[name]]
        outside = len([index for index in read if index not in inside])
        if outside < len(read) and name not in core_makes:
            return match
        readers.append(2 if outside else 1 if read else 0)
    node_kind = view.graph.structure.node_kind
    return match.pattern, match.attached, tuple([node_kind[i] for i in inside]), tuple(readers)


def _form(rule: Rule, match: Match, attached: tuple[str, ...], view: GraphView) -> Form:
    values, read_by, tensors, roles = match.values, view.read_by, view.graph.tensors, rule.roles
    shape = match.pattern.shape(attached)
    indices = [match.nodes[part.label] for part in shape.parts]
    read = [name for name in shape.operands if name in values]
    written: list[str] = []
    interior: list[str] = []
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
                or any(index not in indices for index in read_by[uid])
            )
        ):
            written.append(name)
            continue
        interior.append(name)
        if read_by[uid]:
            rounding[name] = tensors[uid].data_type
    named = {*read, *written}
    return Form(
        labels=tuple(part.label for part in shape.parts),
        placed=tuple(name for name in roles if name in named),
        read=tuple(read),
        written=tuple(written),
        interior=tuple(interior),
        rounding=rounding,
        attributes=_attributes(shape, indices, view),
    )


def _attributes(shape: Shape, indices: Sequence[int], view: GraphView) -> dict[str, Any]:
    """The attributes of every node under its prefix; parameters that an activation does not read are left out."""
    found: dict[str, Any] = {}
    for part, index in zip(shape.parts, indices, strict=True):
        key = part.prefix, index
        under = view.prefixed.get(key)
        if under is None:
            attribute = view.nodes[index].attribute
            unread = _UNREAD[attribute["act"]] if attribute.get("act") is not None else ()
            under = view.prefixed[key] = {part.prefix + k: v for k, v in attribute.items() if k not in unread}
        found.update(under)
    return found


def candidates(rule: Rule, match: Match, kernels: Sequence[Judged], view: GraphView) -> list[Candidate]:
    """The candidates of `judge` for kernels that can run, and no word about the rest."""
    found = []
    kind = match.kind
    if kind is None:
        kind = match.kind = _kind(match, view)
    for judged in kernels:
        served = judged.served.get(kind)
        if served is None:
            served = _first_served(rule, match, judged, view)
            if not make_cover(rule, match, match.attached, view).illegal:  # what is illegal is told by names
                judged.served[kind] = served
        found.extend([Candidate(make_cover(rule, match, attached, view), judged.kernel) for attached in served])
    return found


def can_run(kernel: KernelEntry, arch: Arch, view: GraphView) -> bool:
    """Whether nothing in FIXED speaks against the kernel, whatever the match."""
    return arch in kernel.arches and (kernel.deterministic or not view.graph.deterministic)


def _first_served(rule: Rule, match: Match, judged: Judged, view: GraphView) -> tuple[tuple[str, ...], ...]:
    """The attachments of the covers that the kernel serves. Most kernels fail for one reason that holds for every
    cover, which is sought first: all reasons are gathered only where a smaller cover may have none."""

    def cover(attached: tuple[str, ...]) -> Cover:
        return make_cover(rule, match, attached, view)

    kernel, arch = judged.kernel, judged.arch
    whole = cover(match.attached)
    objections = _objections(whole, arch)
    first = None if objections else first_failing(kernel.conditions, whole.problem, arch)
    if not objections and first is None:
        return (match.attached,)
    if not match.attached:
        return ()
    if first is not None:
        seen = str(first.observed(whole.problem, arch))
        if all(
            (reason := first.failure(cover(a).problem, arch)) is not None and str(reason.observed) == seen
            for a in _least(match)
        ):
            return ()
    return tuple(_served(match, kernel, cover, (*objections, *kernel_failures(kernel, whole.problem, arch)), arch))


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


def _ask(
    match: Match,
    whole: Cover,
    kernel: KernelEntry,
    cover: Callable[[tuple[str, ...]], Cover],
    objections: tuple[Reason, ...],
    arch: Arch,
) -> Answer:
    """What `kernel` says of the whole match on `arch`. The view keeps it for every match of the same kind."""
    kind = whole.match if whole.illegal else whole.kind  # what is illegal is told, and compared, by names
    key = (kind, id(kernel), id(arch))  # the last two are kept alive by the answer, so that an id stands for one object
    kept: Answer | None = whole.view.answers.get(key)
    if kept is None:
        reasons = kernel_failures(kernel, whole.problem, arch)
        codes = {r.code for r in reasons}
        conditions = tuple(c for c in kernel.conditions if c.code in codes)
        failing = replace(kernel, conditions=conditions) if reasons else None
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
            smaller = cover(chosen)
            if (
                not smaller.illegal
                and holds(suspects, smaller.problem, arch)
                and holds(kernel.conditions, smaller.problem, arch)
                and holds(smaller.rule.conditions, smaller.problem, arch)
            ):
                found.append(chosen)
    return found
