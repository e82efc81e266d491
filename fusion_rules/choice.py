"""Which of the possible fusions to make: those that do not overlap and save the most estimated time.

A kernel for one node is no fusion: it gets the nodes that no fusion takes, if it is estimated to beat torch there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..kernels.arch import Arch
from ..kernels.condition import Reason
from .candidates import Candidate, Judged
from .legality import CODES as LEGALITY_CODES
from .legality import CONTRACTION_CYCLE, cyclic_groups
from .view import GraphView

COST = "COST"
OVERLAP = "OVERLAP"
PRIORITY = "PRIORITY"
DISABLED = "DISABLED"

CODES: Mapping[str, str] = {
    COST: "the fusion is estimated to take no less time than its nodes apart, or than another kernel for them",
    OVERLAP: "a node of it belongs to another fusion, and together the others save more, or it is the only node",
    PRIORITY: "another kernel, listed earlier, does the same at the same estimate",
    DISABLED: "its rule or kernel was disabled by the caller",
}
"""Every reason for which a fusion that could be made is not."""

EXACT_LIMIT = 14
"""Overlapping candidates up to which every combination is weighed; more are taken greedily, most saved first."""


@dataclass(frozen=True, eq=False)
class Weighed:
    """A candidate with its estimated seconds, fused and as separate nodes."""

    candidate: Candidate
    fused: float
    apart: float

    @property
    def saved(self) -> float:
        return self.apart - self.fused

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.candidate.cover.nodes

    @property
    def alone(self) -> bool:
        """Whether it is one node, run by another kernel than torch's."""
        return len(self.nodes) == 1


@dataclass(frozen=True, eq=False)
class Choice:
    """The candidates `chosen` of those `weighed`; `open` are those that were neither disabled nor a loss, `dropped`
    those that were chosen first, each with the other fusions of the cycle that it would have closed."""

    weighed: Sequence[Weighed]
    open: Sequence[Weighed]
    chosen: Sequence[Weighed]
    dropped: Sequence[tuple[Weighed, Sequence[Weighed]]]


def weigh(candidates: Sequence[Candidate], view: GraphView, arch: Arch) -> list[Weighed]:
    """Every candidate with its estimates on `arch`, at the nominal values of the graph's symbols.

    The view keeps the estimates, which candidates of one form and kernel share.
    """
    costs = view.costs(arch)
    found = []
    for candidate in candidates:
        cover, kernel = candidate.cover, candidate.kernel
        known = Judged.of(kernel, arch, view).seconds
        seconds = known.get(cover.form)
        if seconds is None:
            fused = costs.match(cover.problem, cover.roles, kernel.launches(cover.problem)).seconds
            seconds = known[cover.form] = fused, sum([costs.nodes[index].seconds for index in cover.nodes])
        found.append(Weighed(candidate, *seconds))
    return found


def choose(weighed: Sequence[Weighed], view: GraphView, disable: Collection[str]) -> Choice:
    """The fusions to make. The same input gives the same choice."""
    open_ = [one for one in weighed if one.saved > 0]
    if disable:
        open_ = [one for one in open_ if _disabled(one, disable) is None]
    chosen = [one for part in _overlapping([one for one in open_ if not one.alone]) for one in _best(part)]
    dropped: list[tuple[Weighed, list[Weighed]]] = []
    while cycles := cyclic_groups(view, [one.nodes for one in chosen]):
        for cycle in cycles:
            worst = min((chosen[i] for i in cycle), key=lambda one: (one.saved, one.nodes))
            dropped.append((worst, [chosen[i] for i in cycle if chosen[i] is not worst]))
        gone = {id(one) for one, _ in dropped}
        chosen = [one for one in chosen if id(one) not in gone]
    taken = {index for one in chosen for index in one.nodes}
    rest = [one for one in open_ if one.alone and taken.isdisjoint(one.nodes)]
    chosen += [one for part in _overlapping(rest) for one in _best(part)]
    return Choice(weighed, open_, chosen, dropped)


def refusals(choice: Choice, view: GraphView, disable: Collection[str]) -> list[tuple[Weighed, Reason]]:
    """Each candidate that is not chosen, with the reason why not."""
    refused = [(one, reason) for one in choice.weighed if (reason := _refusal(one, disable)) is not None]
    for worst, waiting in choice.dropped:
        others = ", ".join(view.nodes[one.candidate.cover.anchor].name for one in waiting)
        refused.append(
            (
                worst,
                Reason(
                    CONTRACTION_CYCLE,
                    f"waits for the fusions at {others}, which wait for it",
                    "an order of the plan",
                    LEGALITY_CODES[CONTRACTION_CYCLE],
                ),
            )
        )
    taken = {i: one for one in choice.chosen for i in one.nodes}
    settled = {id(one) for one in choice.chosen} | {id(one) for one, _ in choice.dropped}
    refused.extend((one, _loss(one, taken, view)) for one in choice.open if id(one) not in settled)
    return refused


def _disabled(one: Weighed, disable: Collection[str]) -> str | None:
    """The id of its rule or kernel, whichever is disabled."""
    candidate = one.candidate
    return next((what for what in (candidate.cover.rule.id, candidate.kernel.id) if what in disable), None)


def _refusal(one: Weighed, disable: Collection[str]) -> Reason | None:
    if (what := _disabled(one, disable)) is not None:
        return Reason(DISABLED, f"{what} is disabled", "its id not in disable", "plan again without it in disable")
    if one.saved <= 0:
        return Reason(
            COST,
            f"{_text(one.fused)} fused",
            f"less than {_text(one.apart)}, its nodes apart",
            "fusion that loses is not chosen",
        )
    return None


def _loss(one: Weighed, taken: Mapping[int, Weighed], view: GraphView) -> Reason:
    won = list({id(taken[i]): taken[i] for i in one.nodes if i in taken}.values())
    if len(won) == 1 and won[0].nodes == one.nodes:
        if won[0].fused < one.fused:
            return Reason(
                COST,
                f"{_text(one.fused)} with this kernel",
                f"less than {_text(won[0].fused)}, with {won[0].candidate.kernel.id}",
            )
        return Reason(
            PRIORITY,
            f"{_text(one.fused)}, as with {won[0].candidate.kernel.id}",
            "a lower estimate, or an earlier place in the table",
            f"disable {won[0].candidate.kernel.id} to use this one",
        )
    shared = [view.nodes[i].name for i in one.nodes if i in taken]
    by = ", ".join(f"{w.candidate.cover.rule.id} at {view.nodes[w.candidate.cover.anchor].name}" for w in won)
    if one.alone:
        return Reason(OVERLAP, f"{shared[0]} fused by {by}", "a node that no fusion takes",
                      f"disable {won[0].candidate.cover.rule.id} to prefer this one")  # fmt: skip
    return Reason(
        OVERLAP,
        f"{', '.join(shared)} fused by {by}",
        f"more than {_text(sum(w.saved for w in won))} saved, here {_text(one.saved)}",
        f"disable {won[0].candidate.cover.rule.id} to prefer this one",
    )


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


def _overlapping(weighed: Sequence[Weighed]) -> list[list[Weighed]]:
    """`weighed` in parts that share no node, each in the order given."""
    leader = list(range(len(weighed)))

    def root(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    owner: dict[int, int] = {}
    for place, one in enumerate(weighed):
        for index in one.nodes:
            first = owner.setdefault(index, place)
            low, high = sorted((root(first), root(place)))
            leader[high] = low
    parts: dict[int, list[Weighed]] = {}
    for place, one in enumerate(weighed):
        parts.setdefault(root(place), []).append(one)
    return list(parts.values())


def _best(part: Sequence[Weighed]) -> list[Weighed]:
    """The members of `part` that share no node and save most; among equals the earlier ones."""
    if len(part) == 1:
        return list(part)
    ranked = sorted(range(len(part)), key=lambda i: (-part[i].saved, i))
    if len(part) > EXACT_LIMIT:
        kept: list[int] = []
        taken: set[int] = set()
        for i in ranked:
            if taken.isdisjoint(part[i].nodes):
                kept.append(i)
                taken.update(part[i].nodes)
        return [part[i] for i in sorted(kept)]
    best, best_saved = [], 0.0
    waiting: list[tuple[int, tuple[int, ...], frozenset[int], float]] = [(0, (), frozenset(), 0.0)]
    while waiting:
        place, kept_, used, saved = waiting.pop()
        if saved > best_saved * (1 + 1e-12):
            best, best_saved = list(kept_), saved
        if place == len(ranked) or saved + sum(part[i].saved for i in ranked[place:]) <= best_saved:
            continue
        i = ranked[place]
        waiting.append((place + 1, kept_, used, saved))
        if used.isdisjoint(part[i].nodes):
            waiting.append((place + 1, (*kept_, i), used | frozenset(part[i].nodes), saved + part[i].saved))
    return [part[i] for i in sorted(best)]
