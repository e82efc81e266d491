"""Where virtual tensors live: slots of one workspace of the caller's, shared by tensors that are never live together.

A slot is as large as its largest tensor, so slots, offsets and the total are stated over the symbols and grow with
them: a workspace that serves the largest token count serves every smaller one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..kernels.cost import Sizes
from .ir.dims import check_symbol
from .ir.errors import WorkspaceError
from .ir.graph import OpGraph
from .ir.tensor import TensorSpec

ALIGNMENT = 256
"""Byte alignment of every tensor in a workspace: what TMA, vector loads and torch's own allocator expect."""


class Lifetime(NamedTuple):
    """A virtual tensor and the steps, first and last included, between which its bytes must stay as they are."""

    tensor: TensorSpec
    first: int
    last: int


@dataclass(frozen=True)
class WorkspaceLayout:
    """`slots` lie one after the other; the tensors of a slot start at its first byte."""

    slots: tuple[tuple[TensorSpec, ...], ...] = ()

    def offsets(self, bindings: Mapping[str, int]) -> dict[int, int]:
        """The first byte of each virtual tensor, by uid."""
        sizes = Sizes(bindings)
        found: dict[int, int] = {}
        start = 0
        for slot in self.slots:
            found.update((t.uid, start) for t in slot)
            start += _slot_bytes(slot, sizes)
        return found

    def nbytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of all slots, a multiple of ALIGNMENT."""
        return self.nbytes_at(Sizes(bindings))

    def nbytes_at(self, sizes: Sizes) -> int:
        """The same, for sizes that are known."""
        return sum(_slot_bytes(slot, sizes) for slot in self.slots)


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to whole alignments."""
    return -(-nbytes // alignment) * alignment


def lifetimes(
    tensors: Mapping[int, TensorSpec], accesses: Iterable[tuple[Iterable[int], Iterable[int]]]
) -> list[Lifetime]:
    """The lifetime of each virtual tensor, in order of writing. `accesses` has (reads, writes) of each step in order.

    A tensor lives from the step that writes it to the last that reads it; one that nobody reads lives for its step.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, (reads, writes) in enumerate(accesses):
        for uid in writes:
            if tensors[uid].is_virtual:
                first.setdefault(uid, index)
                last[uid] = index
        for uid in reads:
            if uid in first:
                last[uid] = index
    return [Lifetime(tensors[uid], start, last[uid]) for uid, start in first.items()]


def plan_workspace(living: Sequence[Lifetime], sizes: Sizes) -> WorkspaceLayout:
    """Slots for tensors in order of writing; `sizes` decide only which free slot fits best, never what is right.

    A tensor takes the free slot that wastes least: the smallest that holds it, else the largest, which grows.
    """
    slots: list[list[TensorSpec]] = []
    size: list[int] = []
    busy: list[tuple[int, int]] = []  # (last step, slot)
    free: list[int] = []
    for life in living:
        while busy and busy[0][0] < life.first:
            free.append(heapq.heappop(busy)[1])
        need = sizes.span(life.tensor)
        if free:
            chosen = min(free, key=lambda slot: (size[slot] < need, abs(size[slot] - need), slot))
            free.remove(chosen)
        else:
            chosen = len(slots)
            slots.append([])
            size.append(0)
        slots[chosen].append(life.tensor)
        size[chosen] = max(size[chosen], need)
        heapq.heappush(busy, (life.last, chosen))
    return WorkspaceLayout(tuple(tuple(slot) for slot in slots))


def _slot_bytes(slot: Sequence[TensorSpec], sizes: Sizes) -> int:
    return aligned(max(sizes.span(t) for t in slot))


def workspace_bindings(graph: OpGraph, given: Mapping[str, int] | None) -> dict[str, int]:
    """Symbol values to size a workspace at: those given, else the symbols' maxima.

    Raises WorkspaceError("WORKSPACE_SYMBOLS") for an unknown symbol or one with neither, VariantPackError for a value
    that breaks a symbol's promise.
    """
    values = dict(given or {})
    by_name = {s.name: s for s in graph.symbols}
    if unknown := sorted(set(values) - set(by_name)):
        raise WorkspaceError(
            "WORKSPACE_SYMBOLS",
            asked=f"workspace size with {unknown}",
            seen=f"symbols {list(by_name)}",
            required="values of this graph's symbols",
        )
    for name, atom in by_name.items():
        if name in values:
            check_symbol(atom, values[name], "workspace size")
        elif atom.maximum is not None:
            values[name] = atom.maximum
        else:
            raise WorkspaceError(
                "WORKSPACE_SYMBOLS",
                asked="workspace size",
                seen=f"no value for {name}",
                required="a value in bindings=, or a maximum on the symbol",
                hint=f"get_workspace_size({{{name!r}: ...}})",
            )
    return values
