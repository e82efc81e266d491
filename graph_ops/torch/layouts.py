"""GLU layouts of weights: converting between them, and a tag that says which one a tensor has.

A tensor of torch does not know the order of its gate and up columns, and a shape never tells. `convert_glu_layout` tags
what it returns, and whoever is given a tagged tensor with another claim about it refuses.
"""

from __future__ import annotations

import torch

from ..ir.errors import GraphError, VariantPackError
from ..ir.layouts import GluLayout

TAG = "opfuse_glu_layout"
"""The attribute in which a tagged tensor carries its layout, as text."""


def as_layout(layout: GluLayout | str) -> GluLayout:
    """A GluLayout, or the one that a text names: "concatenated", "interleaved(32)". Raises GraphError."""
    if isinstance(layout, GluLayout):
        return layout
    if not isinstance(layout, str):
        raise GraphError("GLU_LAYOUT", asked="a GLU layout", seen=repr(layout),
                         required="a GluLayout, 'concatenated' or 'interleaved(w)'")  # fmt: skip
    return GluLayout.parse(layout)


def tag(weight: torch.Tensor, layout: GluLayout) -> torch.Tensor:
    """`weight`, marked as having `layout`."""
    setattr(weight, TAG, str(layout))
    return weight


def tagged(weight: torch.Tensor) -> str | None:
    """The layout that `weight` is marked as having, None for none."""
    found: str | None = getattr(weight, TAG, None)
    return found


def check_tag(weight: torch.Tensor, layout: GluLayout | str, asked: str) -> None:
    """Raises VariantPackError where `weight` is tagged with another layout. One without a tag is believed."""
    seen = tagged(weight)
    if seen is not None and seen != str(layout):
        raise VariantPackError(
            "GLU_LAYOUT",
            asked=asked,
            seen=f"a weight that was converted to {seen}",
            required=str(layout),
            hint="convert_glu_layout(weight, source, to) reorders gate and up, once",
        )


def convert_glu_layout(
    weight: torch.Tensor, source: GluLayout | str, to: GluLayout | str, *, dim: int = 1
) -> torch.Tensor:
    """`weight` with the gate and up slices along `dim` (of 2I) reordered from layout `source` to `to`; differentiable.

    Raises VariantPackError for a weight that is tagged with another layout than `source` (so nothing is interleaved
    twice), or whose I is no multiple of a layout's width. The result is contiguous and tagged.
    """
    source, to = as_layout(source), as_layout(to)
    check_tag(weight, source, f"convert_glu_layout from {source}")
    columns = weight.shape[dim] if -weight.dim() <= dim < weight.dim() else 0
    if not columns:
        raise VariantPackError(
            "GLU_COLUMNS",
            asked=f"convert_glu_layout along axis {dim}",
            seen=f"shape {tuple(weight.shape)}",
            required="an axis of 2I, with I at least 1",
        )
    for layout in (source, to):
        if columns % (2 * (layout.width or 1)):
            raise VariantPackError(
                "GLU_COLUMNS",
                asked=f"convert_glu_layout to {to}",
                seen=f"{columns} along axis {dim}",
                required=f"a multiple of {2 * (layout.width or 1)} for {layout}",
            )
    moved = _whole_along(weight, dim).movedim(dim, 0)
    half = columns // 2
    rest = moved.shape[1:]
    gate, up = moved.reshape(-1, 2, source.width or half, *rest).unbind(1)
    shape = (-1, to.width or half, *rest)
    joined = torch.stack([gate.reshape(shape), up.reshape(shape)], 1).reshape(moved.shape)
    return tag(_sharded_as(joined.movedim(0, dim).contiguous(), weight), to)


def _whole_along(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """`weight`, gathered if it is a DTensor with shards along `dim`: halves of a shard are not shards of the halves."""
    placements = getattr(weight, "placements", None)
    if placements is None or not any(p.is_shard(dim % weight.dim()) for p in placements):
        return weight
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_shard(dim % weight.dim()) else p for p in placements]
    gathered: torch.Tensor = weight.redistribute(placements=whole)  # type: ignore[attr-defined]
    return gathered


def _sharded_as(converted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`converted`, in shards where `weight` is one, the same ones: what a checkpoint of shards relies on."""
    placements = getattr(weight, "placements", None)
    if placements is None or converted.placements == placements:  # type: ignore[attr-defined]
        return converted
    shards: torch.Tensor = converted.redistribute(placements=placements)  # type: ignore[attr-defined]
    return shards
