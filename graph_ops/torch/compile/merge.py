"""Gate and up from two weights, as one grouped matmul over both: before AOTAutograd cuts forward from backward.

    gate = x W1, up = x W3   ->   h = x [W1; W3], gate and up its halves
    dx = dgate W1^T + dup W3^T   ->   dx = [dgate, dup] [W1; W3]^T, summed in one accumulator
    dW1 = dgate^T x, dW3 = dup^T x   ->   halves of [dgate, dup]^T x

Only then do gate, up and their gradients lie as fused kernels read and write them, without copies of activations; the
weights are copied instead, once a step. dx rounds once where eager rounds three times, so this is done only under
`fuse_rounding`, and only where a kernel of the arch could fuse what it leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .regions import find_regions, is_product, joins_of, outputs_of, sort_topologically
from .spellings import GROUPED_MM, aten, value_of

TRANSPOSES = (aten.transpose.int, aten.permute.default, aten.t.default)


def merge_gate_up(graph: fx.Graph) -> int:
    """Merges every pair of products that are gate and up of one GLU, in place. How many there were."""
    merged = 0
    for region in list(find_regions(graph)):
        pair = _pair(region)
        if pair is not None:
            _merge(graph, pair)
            merged += 1
    if merged:
        sort_topologically(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return merged


@dataclass(frozen=True)
class _Pair:
    """gate = x @ w_gate^T and up = x @ w_up^T, the weights (L, I, H) as they are stored."""

    gate: fx.Node
    up: fx.Node
    w_gate: fx.Node
    w_up: fx.Node

    @property
    def x(self) -> Any:
        return self.gate.args[0]

    @property
    def offsets(self) -> Any:
        return self.gate.args[2]


def _pair(region: Sequence[fx.Node]) -> _Pair | None:
    for join in joins_of(region, outputs_of(region)):
        gate, up = join.gate, join.up
        same = is_product(gate) and is_product(up) and gate.args[0] is up.args[0] and gate.args[2:] == up.args[2:]
        if not same or len(gate.args) != 3 or gate.kwargs.get("bias") is not None:
            continue
        weights = [_stored(n.args[1]) for n in (gate, up)]
        if weights[0] is not None and weights[1] is not None and _shape(weights[0]) == _shape(weights[1]):
            return _Pair(gate, up, weights[0], weights[1])
    return None


def _stored(weight: Any) -> fx.Node | None:
    """(L, I, H) of a weight (L, H, I) that is its transpose; None for one that is not."""
    base, turned = _untransposed(weight)
    return base if turned else None


def _untransposed(node: Any) -> tuple[Any, bool]:
    """What `node` is a chain of transposes (of the last two axes) of, and whether their number is odd."""
    turned = False
    while isinstance(node, fx.Node) and node.target in TRANSPOSES and _swaps_last(node):
        node, turned = node.args[0], not turned
    return node, turned


def _swaps_last(node: fx.Node) -> bool:
    rank = len(_shape(node))
    if node.target is aten.t.default:
        return rank == 2
    if node.target is aten.permute.default:
        order = list(range(rank))
        order[-2:] = order[:-3:-1]
        return [int(a) % rank for a in node.args[1]] == order  # type: ignore[union-attr,arg-type]
    return {int(a) % rank for a in node.args[1:3]} == {rank - 2, rank - 1}  # type: ignore[arg-type]


def _shape(node: Any) -> tuple[Any, ...]:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node with its fake value, told of the same place in the user's code as `like`."""
    node = graph.call_function(target, args)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    values = torch.utils._pytree.tree_map(lambda a: value_of(a) if isinstance(a, fx.Node) else a, args)
    with value_of(like).fake_mode:
        node.meta["val"] = target(*values)
    return node


def _turned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    rank = len(_shape(node))
    return _call(graph, node, aten.permute.default, node, [*range(rank - 2), rank - 1, rank - 2])


def _halves(graph: fx.Graph, node: fx.Node, axis: int, half: int) -> tuple[fx.Node, fx.Node]:
    return (
        _call(graph, node, aten.slice.Tensor, node, axis, 0, half),
        _call(graph, node, aten.slice.Tensor, node, axis, half, 2 * half),
    )


def _merge(graph: fx.Graph, pair: _Pair) -> None:
    half = _shape(pair.w_gate)[1]
    readers = [n for n in graph.nodes if n.target is GROUPED_MM and n not in (pair.gate, pair.up)]
    with graph.inserting_before(pair.gate):  # operands of both: sorting moves what stands too early
        weight = _call(graph, pair.gate, aten.cat.default, [pair.w_gate, pair.w_up], 1)  # (L, 2I, H)
        h = _call(graph, pair.gate, GROUPED_MM, pair.x, _turned(graph, weight), pair.offsets)  # (M, 2I)
        for old, new in zip((pair.gate, pair.up), _halves(graph, h, 1, half), strict=True):
            old.replace_all_uses_with(new)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs:
            _merge_dgrad(graph, pair, node, weight, half, readers)


def _merge_dgrad(
    graph: fx.Graph, pair: _Pair, add: fx.Node, weight: fx.Node, half: int, readers: Sequence[fx.Node]
) -> None:
    """Merges dx = dgate W1^T + dup W3^T, and the weight gradients that read the same dgate and dup."""
    found: dict[fx.Node, fx.Node] = {}
    for operand in add.args:
        if not isinstance(operand, fx.Node) or not is_product(operand) or operand.args[2] is not pair.offsets:
            return
        base, turned = _untransposed(operand.args[1])
        if turned or base not in (pair.w_gate, pair.w_up) or len(operand.users) > 1:
            return
        found[base] = operand.args[0]  # type: ignore[assignment]
    if len(found) != 2:
        return
    dgate, dup = found[pair.w_gate], found[pair.w_up]
    with graph.inserting_before(add):
        dh = _call(graph, dgate, aten.cat.default, [dgate, dup], 1)  # (M, 2I)
        add.replace_all_uses_with(_call(graph, add, GROUPED_MM, dh, weight, pair.offsets))
        gradients = [_weight_gradient(pair, d, readers) for d in (dgate, dup)]
        first, second = gradients
        if first is not None and second is not None:
            whole = _call(graph, first, GROUPED_MM, _turned(graph, dh), pair.x, pair.offsets)  # (L, 2I, H)
            for old, new in zip((first, second), _halves(graph, whole, 1, half), strict=True):
                old.replace_all_uses_with(new)
        rest = _halves(graph, dh, 1, half)
    for node, new in zip((dgate, dup), rest, strict=True):
        for reader in [u for u in node.users if u.target is GROUPED_MM or u.target in TRANSPOSES]:
            reader.replace_input_with(node, new)


def _weight_gradient(pair: _Pair, gradient: fx.Node, readers: Sequence[fx.Node]) -> fx.Node | None:
    """gradient^T x (L, I, H), where the graph has it."""
    for node in readers:
        left, turned = _untransposed(node.args[0])
        if turned and left is gradient and node.args[1] is pair.x and node.args[2] is pair.offsets:
            return node
    return None
