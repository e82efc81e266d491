"""Which graph serves a call of an op, for calls of tensors that have been checked before.

What an op checks, and the configuration that its graph is built from, follow from its choices and from what its tensors
are like: class, type, device, shape but for the number of rows, strides, and whether addresses are aligned. To work it
out takes 20 us, to recognise it 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..alike import alike_to
from ..recall import PLAIN
from .graphs import BuiltGraph

ALIGNMENT = 16
"""Bytes to which fused kernels want data pointers aligned. A call with a tensor that is not has graphs of its own."""

LAYOUTS, CHOICES = 16, 256
"""Kinds of tensors that are known of each choice, and choices."""


class KnownCalls:
    """Graphs by an op's choices and tensors; it keeps alive neither. Entries are written whole, so that threads may
    share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[tuple[Callable[..., bool], weakref.ref[BuiltGraph]], ...]] = {}

    def find(
        self,
        choices: tuple[Any, ...],
        rows: Sequence[torch.Tensor | None],  # each (M, ...)
        others: Sequence[torch.Tensor | None],
        configure: Callable[[], BuiltGraph],
    ) -> BuiltGraph:
        """The graph of a call: a known one, or what `configure` returns, which checks the tensors and raises.

        `choices`: all that `configure` reads beside the tensors, the op's name among it.
        """
        ours = [t for t in rows if t is not None]
        given = [*ours, *(t for t in others if t is not None)]
        bits = 0
        for tensor in given:
            bits |= tensor.data_ptr()
        key = (choices, bits % ALIGNMENT == 0, *[t is None for t in (*rows, *others)])
        if len({t.shape[0] for t in ours}) != 1:  # which is for `configure` to refuse
            return configure()
        for alike, held in self._known.get(key, ()):
            if alike(*given) and (graph := held()) is not None and not graph.dropped:
                return graph
        graph = configure()
        if PLAIN.issuperset(map(type, given)):
            alike = alike_to(given, open_sizes=[(place, 0) for place in range(len(ours))])
            kept = [one for one in self._known.get(key, ()) if not one[0](*given)]  # but for one whose graph is gone
            if len(self._known) >= CHOICES:
                self._known.clear()
            self._known[key] = ((alike, weakref.ref(graph)), *kept[: LAYOUTS - 1])
        return graph


KNOWN = KnownCalls()
"""Of every op of this process."""

__all__ = ["ALIGNMENT", "KNOWN", "KnownCalls"]
