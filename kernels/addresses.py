"""Addresses of separate expert weights, as an int64 array on the device, without waiting for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from ..graph_ops.ir.errors import VariantPackError

KEPT = 64  # address sets kept in pinned memory: a model alternates between its layers' experts


class AddressArrays:
    """The address arrays of one kernel on one device; owns the pinned memory that they are copied from.

    An array that a capture used is kept for the kernel's life, since the graph reads it at every replay. Run once with
    the same experts before a capture: pinning new memory is not allowed inside one. Safe to use from several threads.
    """

    def __init__(self, device: torch.device, alignment: int) -> None:
        self._device, self._alignment = device, alignment
        self._recent: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._captured: dict[tuple[int, ...], torch.Tensor] = {}
        self._guard = threading.Lock()

    def on_device(self, b: torch.Tensor | Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """The (L,) int64 addresses: `b` itself where it holds them, else those of its tensors, copied to `into`.

        Raises VariantPackError for an expert that is not aligned.
        """
        if isinstance(b, torch.Tensor):
            return b
        key = tuple(t.data_ptr() for t in b)
        if misaligned := [i for i, address in enumerate(key) if address % self._alignment]:
            raise VariantPackError("ALIGNMENT", asked="discrete weights", seen=f"experts {misaligned}",
                                   required=f"addresses aligned to {self._alignment} bytes")  # fmt: skip
        cuda = self._device.type == "cuda"
        with self._guard:
            host = self._recent.pop(key, self._captured.get(key))
            if host is None:
                host = torch.tensor(key, dtype=torch.int64, pin_memory=cuda)
            self._recent[key] = host
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
            if cuda and torch.cuda.is_current_stream_capturing():
                self._captured[key] = host
        return into.copy_(host, non_blocking=True)
