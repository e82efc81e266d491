"""How aten spells what a region is made of: halves of columns, halves put side by side, silu, products."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ir.dtypes import DATA_TYPES
from ...ir.errors import GraphNotSupportedError, SourceLocation
from ...ir.layouts import GluLayout

aten, prims = torch.ops.aten, torch.ops.prims

DTYPES = {getattr(torch, info.torch_name): data_type for data_type, info in DATA_TYPES.items() if info.packed == 1}
FLOATING = (torch.bfloat16, torch.float16, torch.float32)

GROUPED_MM = aten._grouped_mm.default
SLICE, GETITEM = aten.slice.Tensor, operator.getitem
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
CONVERSIONS = (prims.convert_element_type.default, aten._to_copy.default)
COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)
TRANSPOSES = (aten.transpose.int, aten.permute.default, aten.t.default)


class NotImportable(GraphNotSupportedError):
    """An FX node that the operation graph cannot express; its region is left to the rest of the compiler."""


def decline(node: fx.Node, why: str, required: str = "an op that the operation graph has") -> NotImportable:
    return NotImportable("FX_IMPORT", asked=f"{node.name} [{node.target}]", seen=why, required=required)


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or number) that tracing left on a node."""
    return node.meta.get("val")


def location_of(node: fx.Node) -> SourceLocation | None:
    """The innermost line of the user's code that the node was traced from."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return SourceLocation(found[-1][0], int(found[-1][1])) if found else None


def dims_of(node: fx.Node) -> tuple[Any, ...]:
    """The node's shape, () for what is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def untransposed(node: Any) -> tuple[Any, bool]:
    """What `node` is a chain of transposes (of the last two axes) of, and whether their number is odd."""
    turned = False
    while isinstance(node, fx.Node) and node.target in TRANSPOSES and _swaps_last(node):
        node, turned = node.args[0], not turned
    return node, turned


def _swaps_last(node: fx.Node) -> bool:
    rank = len(dims_of(node))
    if node.target is aten.t.default:
        return rank == 2
    if node.target is aten.permute.default:
        order = list(range(rank))
        order[-2:] = order[:-3:-1]
        return [int(a) % rank for a in node.args[1]] == order  # type: ignore[union-attr,arg-type]
    return {int(a) % rank for a in node.args[1:3]} == {rank - 2, rank - 1}  # type: ignore[arg-type]


def half_of_slice(node: fx.Node) -> tuple[GluLayout, str] | None:
    """("concatenated" or "interleaved(1)", "gate" or "up") of a slice of half the columns of (M, 2I); None for any
    other slice or node."""
    if node.target is GETITEM:
        source, place = node.args
        if not isinstance(source, fx.Node) or source.target not in SPLITS or place not in (0, 1):
            return None
        (base, size), axis = source.args[:2], source.args[2] if len(source.args) > 2 else 0
        assert isinstance(base, fx.Node)
        shape = dims_of(base)
        halves = len(shape) == 2 and isinstance(shape[1], int) and size in (shape[1] / 2, [shape[1] / 2] * 2)
        if not halves or axis not in (1, -1):
            return None
        return GluLayout.concatenated(), ("gate", "up")[int(place)]  # type: ignore[arg-type]
    if node.target is not SLICE:
        return None
    base, axis, start, end, step = _padded(node.args, 1)
    assert isinstance(base, fx.Node)
    shape = dims_of(base)
    if len(shape) != 2 or axis not in (1, -1) or not isinstance(shape[1], int):
        return None
    return half_of_range(shape[1], start, end, step)


def _padded(arguments: Sequence[Any], given: int) -> tuple[Any, ...]:
    """Arguments of a slice with the defaults of axis, start, end and step, after `given` that have none."""
    defaults = (0, None, None, 1)
    return (*arguments, *defaults[len(arguments) - given :])


def half_of_range(columns: int, start: Any, end: Any, step: Any) -> tuple[GluLayout, str] | None:
    """Which half of `columns` columns `start:end:step` is, if it is one."""
    if not all(value is None or isinstance(value, int) for value in (start, end, step)):
        return None
    chosen = range(*slice(start, end, step).indices(columns))
    half = columns // 2
    for layout, which, wanted in (
        (GluLayout.concatenated(), "gate", range(half)),
        (GluLayout.concatenated(), "up", range(half, columns)),
        (GluLayout.interleaved(1), "gate", range(0, columns, 2)),
        (GluLayout.interleaved(1), "up", range(1, columns, 2)),
    ):
        if columns % 2 == 0 and chosen == wanted:
            return layout, which
    return None


def cut_by(node: fx.Node) -> fx.Node:
    """What the halves are of, for a node of which `half_of_slice` says that it is one."""
    base = node.all_input_nodes[0]
    return base.all_input_nodes[0] if node.target is GETITEM else base


def widened_from(node: fx.Node) -> fx.Node:
    """What `node` is a float32 copy of, if it is one: the halves of both hold the same values."""
    if node.target in CONVERSIONS and value_of(node).dtype is torch.float32:
        return node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """A view that the importer looks through: half the columns of a tensor."""
    return node.target in SPLITS or half_of_slice(node) is not None


@dataclass(frozen=True)
class Half:
    """One half of the columns of (M, 2I), the other half zero: what a slice's derivative is before both are added."""

    value: fx.Node
    layout: GluLayout
    which: str


def padded_half(node: fx.Node) -> Half | None:
    """The Half that a slice_backward, or a slice_scatter into zeros, is; None for any other node."""
    if node.target is aten.slice_backward.default:
        value, shape, axis, start, end, step = node.args
        columns = shape[1] if len(shape) == 2 else None  # type: ignore[arg-type,index]
    elif node.target is aten.slice_scatter.default:
        zeros, value, axis, start, end, step = _padded(node.args, 2)
        if not isinstance(zeros, fx.Node) or not _is_zero(zeros):
            return None
        shape = dims_of(node)
        columns = shape[1] if len(shape) == 2 else None
    else:
        return None
    found = half_of_range(columns, start, end, step) if axis in (1, -1) and isinstance(columns, int) else None
    return Half(value, *found) if found is not None and isinstance(value, fx.Node) else None


def _is_zero(node: fx.Node) -> bool:
    full = node.target is aten.full.default and node.args[1] == 0
    return bool(full or node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default))


def joined_halves(node: fx.Node) -> tuple[fx.Node, fx.Node, GluLayout] | None:
    """(gate, up, layout) where `node` puts two halves side by side: cat, or the sum of two padded halves."""
    if node.target is aten.cat.default:
        parts = node.args[0]
        axis = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or axis not in (1, -1):
            return None
        gate, up = parts
        if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or len(dims_of(gate)) != 2:
            return None
        return (gate, up, GluLayout.concatenated()) if dims_of(gate)[1] == dims_of(up)[1] else None
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        found = [padded_half(a) for a in node.args]  # type: ignore[arg-type]
        one, other = found if len(found) == 2 else (None, None)
        if one and other and one.layout == other.layout and {one.which, other.which} == {"gate", "up"}:
            first, second = (one, other) if one.which == "gate" else (other, one)
            return first.value, second.value, one.layout
    return None


def constant_of(node: fx.Node) -> float | None:
    """The number that a tensor without axes is filled with, as derivatives of clamps spell their zero."""
    if node.target is aten.scalar_tensor.default:
        value = node.args[0]
    elif node.target is aten.full.default and not node.args[0]:
        value = node.args[1]
    else:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def swish_argument(node: fx.Node) -> fx.Node | None:
    """x where `node` is x / (1 + exp(-x)), as Inductor spells silu."""
    if node.target is not aten.div.Tensor:
        return None
    x, below = node.args
    return x if isinstance(x, fx.Node) and _argument_below(below) is x else None


def sigmoid_argument(node: fx.Node) -> fx.Node | None:
    """x where `node` is 1 / (1 + exp(-x)), or that times 1, as Inductor of torch 2.11 and older spells the sigmoid in
    silu's derivative."""
    if node.target is aten.mul.Tensor and len(node.args) == 2 and node.args[1] == 1:
        inner = node.args[0]
        return sigmoid_argument(inner) if isinstance(inner, fx.Node) else None
    if node.target is aten.reciprocal.default:
        return _argument_below(node.args[0])
    if node.target is aten.div.Tensor and node.args[0] == 1:
        return _argument_below(node.args[1])
    return None


def _argument_below(node: Any) -> fx.Node | None:
    """x where `node` is 1 + exp(-x), or exp(-x) + 1."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs or 1 not in node.args:
        return None
    exp = next((a for a in node.args if isinstance(a, fx.Node)), None)
    if exp is None or exp.target is not aten.exp.default:
        return None
    neg = exp.args[0]
    if not isinstance(neg, fx.Node) or neg.target is not aten.neg.default:
        return None
    x = neg.args[0]
    return x if isinstance(x, fx.Node) else None
