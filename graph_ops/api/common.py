"""What the drop-in calls share: their result, their refusal, views of NVIDIA's tensor shapes, and the graph cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from ...kernels.condition import Reason
from ..graph import Graph
from ..ir.dtypes import DATA_TYPES, DataType
from ..ir.errors import OpfuseError

Key = TypeVar("Key", bound=Hashable)

DATA_TYPE_OF: dict[torch.dtype, DataType] = {
    getattr(torch, info.torch_name): t for t, info in DATA_TYPES.items() if info.packed == 1
}
"""Our data type of each torch type that stores one element apiece."""

FP4_STORAGE = (torch.uint8, torch.float4_e2m1fn_x2)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class TupleDict(dict[str, Any]):
    """A dict that unpacks like a tuple, as cuDNN's: iteration gives its values in order, and an int is an index."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        if not isinstance(key, int):
            return super().__getitem__(key)
        if not 0 <= key < len(self):
            raise IndexError(f"index {key} of a TupleDict with {len(self)} items")
        return list(self.values())[key]


class UnsupportedCall(OpfuseError, ValueError):
    """A call outside the documented contract. `reasons` has everything that is wrong with it, `code` is the first's."""

    def __init__(self, call: str, reasons: tuple[Reason, ...]) -> None:
        self.call, self.reasons = call, reasons
        first = reasons[0]
        super().__init__(first.code, asked=call, seen=first.observed, required=first.required, hint=first.hint or None)

    def __str__(self) -> str:
        lines = [f"  {reason}" for reason in getattr(self, "reasons", ())]
        return "\n".join([f"{self.call}: {len(lines)} reason{'s' * (len(lines) > 1)}", *lines])


def data_type(dtype: torch.dtype) -> DataType:
    """Our data type of a torch dtype; both FP4 storages are FP4_E2M1."""
    return DataType.FP4_E2M1 if dtype in FP4_STORAGE else DATA_TYPE_OF[dtype]


def matrix(t: torch.Tensor) -> torch.Tensor:
    """(M, X, 1), or (M, X) -> (M, X), over the same memory; FP4 as bytes."""
    t = t.view(torch.uint8) if t.dtype is torch.float4_e2m1fn_x2 else t
    return t.squeeze(2) if t.dim() == 3 else t


def rows(t: torch.Tensor) -> torch.Tensor:
    """(M, 1, 1), or (M,) -> (M,), over the same memory."""
    return t.as_strided((t.shape[0],), (t.stride(0),))


def column_view(t: torch.Tensor, canonical: bool) -> torch.Tensor:
    """(M, X) -> (M, X, 1) with NVIDIA's strides (X, 1, M*X); as it is for canonical calls."""
    m, x = t.shape
    return t if canonical else t.as_strided((m, x, 1), (x, 1, m * x))


class GraphCache(Generic[Key]):
    """Built graphs by configuration, the least recently used given up beyond `limit`. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[Key], Graph]) -> Graph:
        """The graph of `key`, made and built on first use."""
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
                return graph
        graph = make(key).build()
        with self._lock:
            graph = self._graphs.setdefault(key, graph)
            while len(self._graphs) > self.limit:
                self._graphs.popitem(last=False)
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Gives up every graph."""
        with self._lock:
            self._graphs.clear()


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Makes `stream` torch's current one: a torch.cuda.Stream, or a CUDA handle (`cuda.CUstream`, an int)."""
    if stream is None:
        return nullcontext()
    if not isinstance(stream, torch.cuda.Stream):
        stream = torch.cuda.ExternalStream(int(stream), device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)
