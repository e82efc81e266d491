"""TensorSpec: everything that the graph knows about one tensor, without its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .dims import Dim, evaluate
from .dtypes import DataType
from .errors import SourceLocation
from .layouts import GluLayout, ScaleLayout


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operation graph.

    `dim` and `stride` count elements and may hold symbols. `data_type` is where rounding happens, also for a virtual
    tensor. `is_virtual`: produced by a node and not an output, so it may never exist in memory. `is_output`: written
    to the caller's buffer. `discrete` (weights (L, K, N) only): L separate (K, N) buffers, or an int64 array of their
    addresses; `stride[1:]` describes each. `alignment` is the promised byte alignment of the data pointer.
    `multiple_of` (integer tensors only) promises that every value is a multiple of it: end offsets of padded groups.
    The promise is checked at execute where the values lie on the host; on a device it is the caller's, as reading
    them would synchronise. `value` is set for a compile-time scalar and for nothing else.
    """

    uid: int
    name: str
    dim: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    data_type: DataType
    is_virtual: bool = False
    is_output: bool = False
    glu_layout: GluLayout | None = None
    scale_layout: ScaleLayout | None = None
    alignment: int = 16
    discrete: bool = False
    multiple_of: int = 1
    value: float | None = None
    location: SourceLocation | None = None

    @property
    def rank(self) -> int:
        return len(self.dim)

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    @property
    def packed_axis(self) -> int:
        """The axis along which packed elements (FP4) share a stored one: the last, except that weights (L, K, N) pack
        along the axis that is contiguous, so K-major ones along K."""
        return 1 if self.rank == 3 and self.stride[1] == 1 and self.stride[2] != 1 else self.rank - 1

    @property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous_stride(self.dim)

    def elements(self, bindings: Mapping[str, int]) -> int:
        return math.prod(evaluate(d, bindings) for d in self.dim)

    def shape(self, bindings: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(d, bindings) for d in self.dim)

    def nbytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of the data itself (strided gaps not counted)."""
        return -(-self.elements(bindings) * self.data_type.info.bits // 8)

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dim))
        extras = [str(x) for x in (self.glu_layout, self.scale_layout) if x is not None]
        if self.discrete:
            extras.append("discrete")
        if self.multiple_of != 1:
            extras.append(f"values % {self.multiple_of} == 0")
        return f"{self.name} ({dims}) {self.data_type!r}" + "".join(f" {e}" for e in extras)


def contiguous_stride(dim: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides, in elements."""
    stride: list[Dim] = []
    step: Dim = 1
    for extent in reversed(dim):
        stride.append(step)
        step = step * extent
    return tuple(reversed(stride))
