"""What a graph remembers of calls whose buffers it has checked: the same buffers need no second look.

A check depends on where a tensor lies and how, never on what it holds, so that equal signatures pass alike: new values
at an address, or another tensor that took over the memory, change nothing. Values that are checked (offsets on the
CPU) are looked at again each time, by the caller. No tensor is kept, only numbers, types and devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose attributes mean what torch says; a subclass may answer anything, and is checked each time."""

LIMIT = 256


@dataclass(frozen=True)
class Order:
    """What the keys of a variant pack mean: a uid for each, and the places of outputs.

    `numbers` are the places of keys that are integers: True and 1.0 equal 1, and are no keys.
    """

    uids: tuple[int, ...]
    written: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call that passed every check: the symbols' values, and the plan that was taken for them."""

    bindings: Mapping[str, int]
    choice: int


class Recall:
    """Calls by signature, at most LIMIT. Entries are immutable and written whole, so threads may share it."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Any, ...], Order] = {}
        self._calls: dict[tuple[Any, ...], Call] = {}

    def find(self, pack: Mapping[Any, Any], workspace: Any) -> tuple[Call, dict[int, torch.Tensor]] | None:
        """The call that this pack repeats, and its buffers by uid; None where it must be checked.

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
        signature = _signature(values, workspace)
        if signature is None or (call := self._calls.get((order.uids, signature))) is None:
            return None
        for place in order.written:
            held = values[place]
            if held.requires_grad or held.is_inference():  # allowed or not by more than the tensor
                return None
        return call, dict(zip(order.uids, values, strict=True))

    def keep(
        self,
        pack: Mapping[Any, Any],
        workspace: Any,
        buffers: Mapping[int, Any],
        written: Sequence[int],
        call: Call,
    ) -> None:
        """Remembers a call that passed; not one whose buffers had to be converted, or that is no plain call."""
        keys, values = tuple(pack), [*pack.values()]
        uids = tuple(buffers)
        if len(values) != len(uids) or any(a is not b for a, b in zip(values, buffers.values(), strict=True)):
            return
        if (signature := _signature(values, workspace)) is None:
            return
        if len(self._calls) >= LIMIT or len(self._orders) >= LIMIT:
            self._calls.clear()
            self._orders.clear()
        places = tuple(place for place, uid in enumerate(uids) if uid in written)
        numbers = tuple(place for place, key in enumerate(keys) if isinstance(key, int))
        self._orders[keys] = Order(uids, places, numbers)
        self._calls[uids, signature] = call


def _signature(values: list[Any], workspace: Any) -> tuple[Any, ...] | None:
    """All that the checks of buffers read, for plain strided tensors; None where one is something else."""
    tensors = values if workspace is None or workspace.__class__ is str else [*values, workspace]
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        read = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors]
    except RuntimeError:  # no memory of its own: sparse, or wrapped by a transform
        return None
    return (*read, workspace if tensors is values else len(tensors))


__all__ = ["Call", "Recall"]
