"""Which of the possible fusions to make: those that do not overlap and save the most estimated time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..kernels.arch import Arch
from ..kernels.condition import Reason
from ..kernels.cost import Costs, nominal_bindings
from .candidates import Candidate
from .legality import CODES as LEGALITY_CODES
from .legality import CONTRACTION_CYCLE, cyclic_groups
from .view import GraphView

COST = "COST"
OVERLAP = "OVERLAP"
PRIORITY = "PRIORITY"
DISABLED = "DISABLED"

CODES: Mapping[str, str] = {
    COST: "the fusion is estimated to take no less time than its nodes apart, or than another kernel for them",
    OVERLAP: "a node of it belongs to another fusion, and together the others save more",
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


def weigh(candidates: Sequence[Candidate], view: GraphView, arch: Arch) -> list[Weighed]:
    """Every candidate with its estimates on `arch`, at the nominal values of the graph's symbols.

    The view keeps the estimates: they depend on the graph and the arch alone.
    """
    costs = view.costs.get(arch)
    if costs is None:
        costs = view.costs[arch] = Costs(view.graph, arch, nominal_bindings(view.graph))
    found = []
    for candidate in candidates:
        cover = candidate.cover
        fused = costs.match(cover.problem, cover.roles, candidate.kernel.launches(cover.problem)).seconds
        found.append(Weighed(candidate, fused, sum([costs.nodes[index].seconds for index in cover.nodes])))
    return found


def choose(
    weighed: Sequence[Weighed], view: GraphView, disable: Collection[str]
) -> tuple[list[Weighed], list[tuple[Weighed, Reason]]]:
    """The fusions to make, and each of the others with the reason why not. The same input gives the same choice."""
    refused: list[tuple[Weighed, Reason]] = []
    open_: list[Weighed] = []
    for one in weighed:
        if (reason := _refusal(one, disable)) is not None:
            refused.append((one, reason))
        else:
            open_.append(one)
    chosen = [one for part in _overlapping(open_) for one in _best(part)]
    while cycles := cyclic_groups(view, [one.nodes for one in chosen]):
        for cycle in cycles:
            worst = min((chosen[i] for i in cycle), key=lambda one: (one.saved, one.nodes))
            others = ", ".join(
                view.nodes[chosen[i].candidate.cover.anchor].name for i in cycle if chosen[i] is not worst
            )
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
        dropped = {id(one) for one, _ in refused}
        chosen = [one for one in chosen if id(one) not in dropped]
    taken = {i: one for one in chosen for i in one.nodes}
    settled = {id(one) for one in chosen} | {id(one) for one, _ in refused}
    refused.extend((one, _loss(one, taken, view)) for one in open_ if id(one) not in settled)
    return chosen, refused


def _refusal(one: Weighed, disable: Collection[str]) -> Reason | None:
    rule, kernel = one.candidate.cover.rule.id, one.candidate.kernel.id
    for what in (rule, kernel):
        if what in disable:
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
