"""Do two buffers share memory? By byte ranges, and exactly for column windows of one wider matrix."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_START = itemgetter(0)

Extent = tuple[int, int, bool, str, "torch.Tensor"]
"""First byte, byte past the last, whether it is written, the name for errors, and the tensor."""


def first_overlap(extents: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two extents that share a byte, one of them written; None where there are none.

    Ranges that interleave count as shared, unless both are matrices with the same row pitch and disjoint columns.
    """
    ordered = sorted(extents, key=_START)
    furthest = furthest_written = -1
    for start, end, written, _, _ in ordered:
        if start < furthest_written or (written and start < furthest):
            return _exact_overlap(ordered)
        if end > furthest:
            furthest = end
        if written and end > furthest_written:
            furthest_written = end
    return None


def _exact_overlap(ordered: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other[0] >= one[1]:
                break
            if (one[2] or other[2]) and not _disjoint_columns(one, other):
                return one, other
    return None


def _disjoint_columns(one: Extent, other: Extent) -> bool:
    """Whether two row-major matrices with one row pitch lie in different columns of it."""
    a, b = one[4], other[4]
    if a.dim() != 2 or b.dim() != 2 or a.stride(1) != 1 or b.stride(1) != 1:
        return False
    pitch = a.stride(0) * a.element_size()
    if pitch != b.stride(0) * b.element_size() or pitch == 0:
        return False
    width_a, width_b = a.shape[1] * a.element_size(), b.shape[1] * b.element_size()
    shift = (other[0] - one[0]) % pitch
    return width_a <= shift and shift + width_b <= pitch
