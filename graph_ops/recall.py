"""What a graph remembers of calls whose buffers it has checked: the same buffers need no second look.

A check depends on where a tensor lies and how, never on what it holds, so that equal addresses of like tensors pass
alike: new values at an address, or another tensor that took over the memory, change nothing. Values that are checked
(offsets on the CPU) are looked at again each time, by the caller. No tensor is kept, only numbers and what they are
like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .alike import alike_to

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose attributes mean what torch says; a subclass may answer anything, and is checked each time."""

LIMIT = 256
SHAPES_AT_AN_ADDRESS = 16
"""Calls with the same addresses: buffers of a fixed capacity, say, of which each step uses as many rows as it has."""

_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Order:
    """What the keys of a variant pack mean: a uid for each.

    `numbers` are the places of keys that are integers: True and 1.0 equal 1, and are no keys. `lists` are the places of
    discrete weights that are given one by one.
    """

    uids: tuple[int, ...]
    numbers: tuple[int, ...]
    lists: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call that passed every check: the symbols' values, and the plan that was taken for them.

    `version` is that of the plans when it was. `launch` is all that the call does, as a function of the stream's
    handle, where the addresses are all it needs.
    """

    bindings: Mapping[str, int]
    choice: int
    version: int
    launch: Callable[[int], object] | None = None


@dataclass(frozen=True)
class Found:
    """A call that is allowed, and what it is given; a buffer is a tensor, or the list of discrete weights."""

    call: Call
    uids: tuple[int, ...]
    values: Sequence[Any]

    @property
    def buffers(self) -> dict[int, Any]:
        """The buffers by uid."""
        return dict(zip(self.uids, self.values, strict=True))


class Recall:
    """Calls by the addresses of their buffers, at most LIMIT. Entries are immutable and written whole, so threads may
    share it."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Any, ...], Order] = {}
        self._calls: dict[tuple[Any, ...], tuple[tuple[Callable[..., bool], Call], ...]] = {}

    def find(self, pack: Mapping[Any, Any], workspace: Any) -> Found | None:
        """The call that this pack repeats; None where it must be checked.

        `workspace`: a tensor, None, or a string that stands for a call which makes its own.
        """
        keys = tuple(pack)
        order = self._orders.get(keys)
        if order is None:
            return None
        for place in order.numbers:
            if keys[place].__class__ is not int:
                return None
        values = [*pack.values()]
        tensors = _tensors(order, values, workspace)
        if tensors is None or (key := _key(order, workspace, values, tensors)) is None:
            return None
        for alike, call in self._calls.get(key, ()):
            if alike(*tensors):
                return Found(call, order.uids, values)
        return None

    def keep(self, pack: Mapping[Any, Any], workspace: Any, buffers: Mapping[int, Any], call: Call) -> None:
        """Remembers a call that passed; not one whose buffers had to be converted, or that is no plain call."""
        keys, uids, values = tuple(pack), tuple(buffers), [*pack.values()]
        if len(keys) != len(uids):
            return
        order = Order(
            uids,
            tuple(place for place, key in enumerate(keys) if isinstance(key, int)),
            tuple(place for place, value in enumerate(values) if value.__class__ in (list, tuple)),
        )
        tensors = _tensors(order, values, workspace)
        checked = _tensors(order, [*buffers.values()], workspace)
        if tensors is None or checked is None or any(a is not b for a, b in zip(tensors, checked, strict=True)):
            return
        if (key := _key(order, workspace, values, tensors)) is None:
            return
        if len(self._calls) >= LIMIT or len(self._orders) >= LIMIT:
            self._calls.clear()
            self._orders.clear()
        kept = [held for held in self._calls.get(key, ()) if not held[0](*tensors)]  # one of an older version
        self._orders[keys] = order
        self._calls[key] = (*kept[1 - SHAPES_AT_AN_ADDRESS :], (alike_to(tensors), call))


def _tensors(order: Order, values: list[Any], workspace: Any) -> list[Any] | None:
    """The values of a pack, lists one by one, and the workspace if it is a tensor; None where a list is none.

    Lists become tuples in `values`: what is checked is what is run.
    """
    if not order.lists and (workspace is None or workspace.__class__ is str):
        return values
    tensors = [*values]
    for place in reversed(order.lists):
        if values[place].__class__ not in (list, tuple):
            return None
        values[place] = tensors[place : place + 1] = tuple(values[place])
    if workspace is not None and workspace.__class__ is not str:
        tensors.append(workspace)
    return tensors


def _key(order: Order, workspace: Any, values: list[Any], tensors: list[Any]) -> tuple[Any, ...] | None:
    """Where calls of these addresses are kept; None where a value is no plain tensor with memory of its own."""
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    room = workspace if workspace is None or workspace.__class__ is str else True
    lengths = tuple([len(values[place]) for place in order.lists]) if order.lists else ()
    try:
        return (order.uids, room, lengths, *map(_address, tensors))
    except RuntimeError:  # sparse, or wrapped by a transform
        return None


__all__ = ["Call", "Found", "Recall"]
