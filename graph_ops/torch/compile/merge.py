"""Gate and up from two weights, brought side by side as fused kernels read them: in joint graphs, before AOTAutograd
cuts forward from backward.

    gate = x W1, up = x W3   ->   h = [gate, up], where one kernel takes both weights and writes h: no copy at all
                                  else h = x [W1; W3], or h = [gate, up]: whichever copies less
    dx = dgate W1^T + dup W3^T   ->   dx = dh [W1; W3]^T with dh = [dgate, dup], where that moves less
    dW1 = dgate^T x, dW3 = dup^T x   stay as they are, and read the halves of dh in place

W1 and W3 are tensors of their own, so what else lies side by side was copied there: 2 x bytes of both weights once a
pass, or 2 x bytes of h. [W1; W3] is made again in the backward rather than kept for it: kept, it would be a second copy
of the weights in every layer. dx then rounds once where eager rounds three times, and h once in either case, so this is
done only where roundings may be dropped, and only where a kernel of the arch takes what it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....kernels.cost import NOMINAL_EXTENT
from ...graph import Graph
from ...ir.dtypes import DataType
from ...ir.graph import OpGraph
from ...ir.layouts import GluLayout
from .regions import FIRST_CHECKPOINT, is_product, joins_of, late_nodes, outputs_of, sort_topologically
from .spellings import CONVERSIONS, DTYPES, GROUPED_MM, TRANSPOSES, aten, untransposed, value_of

WEIGHTS, ACTIVATIONS, NOTHING = "weights", "activations", "nothing"


@dataclass(frozen=True)
class Merge:
    """What became of gate and up of two weights. `copies`: what is copied so that h is one tensor. `one_dgrad`: dx is
    one product over both weights, which rounds once, and not the rounded sum of two rounded products."""

    gate: str
    up: str
    copies: str
    one_dgrad: bool = False

    def __str__(self) -> str:
        made = {WEIGHTS: "one product of both weights, copied side by side once a pass",
                ACTIVATIONS: "copied side by side, which moves less than their weights",
                NOTHING: "one kernel takes both weights and writes them side by side"}[self.copies]  # fmt: skip
        dx = "; dx is one product of both weights, rounded once" if self.one_dgrad else ""
        return f"{self.gate} and {self.up} (gate and up of two weights): {made}{dx}"


def merge_gate_up(
    graph: fx.Graph, region: Sequence[fx.Node], *, fuses_forward: bool, fuses_apart: Callable[[OpGraph], bool]
) -> Merge | None:
    """Brings gate and up of the region's GLU together, in place; None where they are not products of one x.

    `fuses_forward`: a kernel fuses the product of both weights with the GLU, so that to copy weights pays sooner.
    `fuses_apart`: whether one fuses such a graph of two products, which then needs no copy. Graphs without a derivative
    are left alone unless a kernel fuses the forward.
    """
    pair = _pair(region)
    if pair is None:
        return None
    late = late_nodes(graph)
    if pair.is_plain and fuses_apart(_apart(pair)):
        if not late:
            return None  # nobody reads h: both products and the GLU are a region as they stand
        return _tidied(graph, replace(_over_activations(graph, pair, late), copies=NOTHING))
    weights, h = pair.copied_bytes, 2 * _nbytes(pair.gate)
    if late:
        over_weights = 2 * weights < (3 if fuses_forward else 2) * h
    elif fuses_forward and weights < h:
        over_weights = True
    else:
        return None
    return _tidied(graph, (_over_weights if over_weights else _over_activations)(graph, pair, late))


def _tidied(graph: fx.Graph, merge: Merge) -> Merge:
    sort_topologically(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return merge


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

    @property
    def is_cast(self) -> bool:
        """Whether the weights are made in this graph, from parameters of another dtype: written side by side, they are
        copied no more than they are otherwise."""
        return self.w_gate.target in CONVERSIONS and self.w_up.target in CONVERSIONS

    @property
    def is_plain(self) -> bool:
        """Whether the weights are read as they are stored, and of known sizes."""
        values = [value_of(w) for w in (self.w_gate, self.w_up)]
        return not self.is_cast and all(isinstance(n, int) for v in values for n in (*v.shape, *v.stride()))

    @property
    def copied_bytes(self) -> int:
        """Of both weights, where they have to be copied."""
        return 0 if self.is_cast else 2 * _nbytes(self.w_gate)


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
    base, turned = untransposed(weight)
    return base if turned else None


def _shape(node: Any) -> tuple[Any, ...]:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _nbytes(node: fx.Node) -> int:
    """Bytes of the node's tensor; a symbolic extent counts as what it was when it was traced."""
    extents = [d if isinstance(d, int) else (d.node.has_hint() and d.node.hint) or NOMINAL_EXTENT for d in _shape(node)]
    return math.prod(int(d) for d in extents) * int(value_of(node).element_size())


def _apart(pair: _Pair) -> OpGraph:
    """The forward of gate and up with h written: what a kernel would have to fuse. The rows are a symbol, and the
    activation stands for any."""
    g = Graph(name="apart", intermediate_data_type=DataType.FLOAT)
    kind = DTYPES[value_of(pair.gate).dtype]
    (experts, columns, depth), rows = _shape(pair.w_gate), g.symbol("M")
    x = g.tensor("x", dim=(rows, depth), data_type=kind)
    offsets = g.tensor("offsets", dim=(experts,), data_type=DataType.INT32)
    sides = []
    for name, weight in (("gate", pair.w_gate), ("up", pair.w_up)):
        expert, row, column = value_of(weight).stride()
        b = g.tensor(f"w_{name}", dim=(experts, depth, columns), stride=(expert, column, row), data_type=kind)
        sides.append(g.grouped_matmul(x, b, offsets, name=name))
    gate, up = sides
    h = g.join_glu(gate, up, GluLayout.concatenated(), name="h").set_data_type(kind).set_output(True)
    g.glu(h, act="swiglu", name="act").set_data_type(kind).set_output(True)
    return g.operation_graph()


# ---------------------------------------------------------------------- rewriting


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node with its fake value, told of the same place in the user's code, and checkpoint, as `like`."""
    node = graph.call_function(target, args)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    values = torch.utils._pytree.tree_map(lambda a: value_of(a) if isinstance(a, fx.Node) else a, args)
    with value_of(like).fake_mode:
        node.meta["val"] = target(*values)
    return node


def _policy(nodes: Sequence[fx.Node], policy: CheckpointPolicy) -> None:
    """Tells the partitioner whether the backward is given the nodes' values or makes them; what lies in a checkpoint of
    the user's own stays the user's."""
    for node in nodes:
        if "recompute" not in node.meta:
            node.meta.update(recompute=policy, ac_graph_id=FIRST_CHECKPOINT)


def _turned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    rank = len(_shape(node))
    return _call(graph, node, aten.permute.default, node, [*range(rank - 2), rank - 1, rank - 2])


def _halves(graph: fx.Graph, node: fx.Node, half: int) -> tuple[fx.Node, fx.Node]:
    """Gate and up of (M, 2I)."""
    return (
        _call(graph, node, aten.slice.Tensor, node, 1, 0, half),
        _call(graph, node, aten.slice.Tensor, node, 1, half, 2 * half),
    )


def _both_weights(graph: fx.Graph, pair: _Pair) -> fx.Node:
    """[W1; W3] (L, 2I, H), made by whichever pass reads it, but for casts, which are kept as they would be apart."""
    weight = _call(graph, pair.gate, aten.cat.default, [pair.w_gate, pair.w_up], 1)
    if not pair.is_cast:
        _policy([weight], CheckpointPolicy.MUST_RECOMPUTE)
    return weight


def _over_weights(graph: fx.Graph, pair: _Pair, late: set[fx.Node]) -> Merge:
    """gate and up as the halves of one product."""
    half = _shape(pair.gate)[1]
    with graph.inserting_before(pair.gate):  # operands of both: sorting moves what stands too early
        weight = _both_weights(graph, pair)
        h = _call(graph, pair.gate, GROUPED_MM, pair.x, _turned(graph, weight), pair.offsets)  # (M, 2I)
        for old, new in zip((pair.gate, pair.up), _halves(graph, h, half), strict=True):
            old.replace_all_uses_with(new)
    merge = Merge(pair.gate.name, pair.up.name, WEIGHTS)
    return replace(merge, one_dgrad=_join_gradients(graph, pair, late, weight))


def _over_activations(graph: fx.Graph, pair: _Pair, late: set[fx.Node]) -> Merge:
    """gate and up copied side by side, and read there: the backward is given h, not both as well."""
    half = _shape(pair.gate)[1]
    with graph.inserting_before(pair.gate):
        h = _call(graph, pair.gate, aten.cat.default, [pair.gate, pair.up], 1)  # (M, 2I)
        halves = _halves(graph, h, half)
        _policy([h], CheckpointPolicy.MUST_SAVE)
        _policy(halves, CheckpointPolicy.MUST_RECOMPUTE)
    for old, new in zip((pair.gate, pair.up), halves, strict=True):
        for reader in [n for n in old.users if n is not h]:
            reader.replace_input_with(old, new)
    merge = Merge(pair.gate.name, pair.up.name, ACTIVATIONS)
    return replace(merge, one_dgrad=_join_gradients(graph, pair, late, None))


def _join_gradients(graph: fx.Graph, pair: _Pair, late: set[fx.Node], weight: fx.Node | None) -> bool:
    """dgate and dup as halves of one tensor, where dgrads name them. True where dgate W1^T + dup W3^T became one
    product over both weights."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in late and is_product(node) and node.args[2:] == (pair.offsets,):
            base, turned = untransposed(node.args[1])
            if not turned and base in (pair.w_gate, pair.w_up) and _shape(node.args[0]) == _shape(pair.gate):
                found[base] = node
    if len(found) != 2:
        return False
    products = found[pair.w_gate], found[pair.w_up]
    gradients = [p.args[0] for p in products]
    total = _sum_of(products)
    # Apart, dx costs a second product written, and both read and summed: 4 x its bytes. Together, both weights copied.
    one_dgrad = total is not None and 2 * pair.copied_bytes < 4 * _nbytes(total)
    with graph.inserting_before(products[0]):
        dh = _call(graph, gradients[0], aten.cat.default, list(gradients), 1)  # type: ignore[arg-type]  # (M, 2I)
        halves = _halves(graph, dh, _shape(pair.gate)[1])
        if one_dgrad:
            assert total is not None
            weight = weight if weight is not None else _both_weights(graph, pair)
            total.replace_all_uses_with(_call(graph, total, GROUPED_MM, dh, weight, pair.offsets))
    for node, new in zip(gradients, halves, strict=True):
        for reader in [u for u in node.users if u.target is GROUPED_MM or u.target in TRANSPOSES]:  # type: ignore[union-attr]
            reader.replace_input_with(node, new)  # type: ignore[arg-type]
    return one_dgrad


def _sum_of(products: tuple[fx.Node, fx.Node]) -> fx.Node | None:
    """The node that adds both products, which nothing else reads."""
    readers = {u for p in products for u in p.users}
    if len(readers) != 1:
        return None
    (add,) = readers
    return add if add.target is aten.add.Tensor and not add.kwargs and set(add.args) == set(products) else None
