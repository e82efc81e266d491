"""Which nodes of an FX graph belong together: a grouped matmul, the GLU (or its derivative) beside it, and no more.

What cannot fuse is not taken away from the rest of the compiler: FC2, dgrads and weight gradients stay aten's, but for
those that a kernel of ours runs sooner by itself (lone.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....kernels import rates
from ....kernels.arch import Arch
from ....kernels.cost import NOMINAL_EXTENT
from .importer import Join, importable
from .spellings import (
    CONVERSIONS,
    GETITEM,
    GROUPED_MM,
    SLICE,
    aten,
    dims_of,
    is_view,
    padded_half,
    sigmoid_argument,
    swish_argument,
)

SIGMOIDS = (aten.silu.default, aten.sigmoid.default)
FIRST_CHECKPOINT = 1 << 20
"""The id of what is tagged here for the partitioner, beyond those that the user's own checkpoints count up."""

JOIN_OUTPUTS = 4
"""Outputs that are tried in pairs as gradients of gate and up; a GLU's derivative alone has two or three."""


def is_product(node: fx.Node) -> bool:
    """A grouped matmul of rows with weights: (M, K) x (L, K, N)."""
    if node.target is not GROUPED_MM or not all(isinstance(a, fx.Node) for a in node.args[:2]):
        return False
    return len(dims_of(node.args[0])) == 2 and len(dims_of(node.args[1])) == 3  # type: ignore[arg-type]


def find_regions(graph: fx.Graph) -> Iterator[tuple[fx.Node, ...]]:
    """Convex sets of nodes around grouped matmuls, in graph order. Regions share no product."""
    taken: set[fx.Node] = set()
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        if is_product(node) and node not in taken:
            grown = _grow(node, taken)
            where = [places[n] for n in grown]
            region = _convex(nodes[min(where) : max(where) + 1], grown)
            taken |= {n for n in region if is_product(n)}
            if len(region) > 1:
                yield region


def _grow(product: fx.Node, taken: set[fx.Node]) -> set[fx.Node]:
    """Pointwise readers of the product, their readers, and what those compute from on the same rows and columns."""
    rows, columns = dims_of(product)
    widths = (columns, 2 * columns, columns // 2)

    def fits(node: fx.Node) -> bool:
        if not importable(node):
            return False
        if is_view(node):
            return True
        shape = dims_of(node)
        if node.target is aten.sum.dim_IntList:
            return len(shape) <= 2 and shape[0] == rows
        return len(shape) == 2 and shape[0] == rows and shape[1] in widths

    region = {product}
    waiting = [product]
    while waiting:
        node = waiting.pop()
        near = [n for n in node.users if fits(n)]
        if not is_product(node):
            for n in node.all_input_nodes:
                sibling = is_product(n) and n not in taken and dims_of(n)[0] == rows
                if sibling or (fits(n) and n.target is not aten.sum.dim_IntList):
                    near.append(n)
        for n in near:
            if n not in region:
                region.add(n)
                waiting.append(n)
    return region


def _convex(span: Sequence[fx.Node], region: set[fx.Node]) -> tuple[fx.Node, ...]:
    """`region`, in order, without nodes that wait for something outside which waits for the region. `span`: the nodes
    from the region's first to its last, operands before readers."""
    outside: set[fx.Node] = set()
    kept: dict[fx.Node, None] = {}
    for node in span:
        needs = node.all_input_nodes
        if node in region and not any(n in outside for n in needs):
            kept[node] = None
        elif any(n in outside or n in kept for n in needs):
            outside.add(node)
    return tuple(kept)


def outputs_of(region: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Nodes of the region whose values others read; for a view that others read, what it is a view of."""
    members = set(region)
    found: dict[fx.Node, None] = {}
    for node in region:
        if all(user in members for user in node.users):
            continue
        source = node
        while is_view(source):
            source = source.all_input_nodes[0]
        if source in members:
            found[source] = None
    return tuple(found)


def joins_of(region: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Iterator[Join]:
    """Ways to read gate and up as halves of one tensor, where they are two: products or operands of one shape."""
    members = set(region)

    def base(node: fx.Node) -> fx.Node:
        while node in members and node.target in CONVERSIONS:
            node = node.all_input_nodes[0]
        return node

    gates: dict[fx.Node, None] = {}
    operands: dict[fx.Node, None] = {}
    for node in region:
        x = swish_argument(node) or sigmoid_argument(node)
        if node.target in SIGMOIDS:
            x = node.all_input_nodes[0]
        elif node.target is aten.silu_backward.default:
            x = node.all_input_nodes[1] if len(node.all_input_nodes) > 1 else None
        if x is not None:
            gates[base(x)] = None
        if node.target is aten.mul.Tensor:
            for operand in map(base, node.all_input_nodes):
                if operand not in members or is_product(operand):
                    operands[operand] = None
    for gate in gates:
        if is_view(gate) or (gate in members and not is_product(gate)):
            continue
        for up in operands:
            if up is gate or dims_of(up) != dims_of(gate) or up.meta["val"].dtype != gate.meta["val"].dtype:
                continue
            yield Join(gate, up)
            written = [o for o in outputs if dims_of(o) == dims_of(gate) and o not in (gate, up)]
            for dgate, dup in permutations(written[:JOIN_OUTPUTS], 2):
                yield Join(gate, up, dgate, dup)


def drop_whole_slices(graph: fx.Graph) -> None:
    """Replaces slices (and their derivatives) that take all of a tensor: `h[:, :n]` makes one along axis 0."""
    for node in list(graph.nodes):
        if node.target not in (SLICE, aten.slice_backward.default):
            continue
        base = node.args[0]
        if not isinstance(base, fx.Node) or dims_of(base) != dims_of(node):
            continue
        if base.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(base)
            graph.erase_node(node)


def drop_detaches(graph: fx.Graph) -> None:
    """Replaces detaches, which mean nothing in a graph that has its derivatives, by what they detach."""
    for node in list(graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def share_conversions(graph: fx.Graph) -> None:
    """One node for equal conversions of one tensor, as `x.bfloat16()` written twice makes two."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in CONVERSIONS:
            continue
        kept = first.setdefault((node.target, node.args, tuple(sorted(node.kwargs.items()))), node)
        if kept is not node and "recompute" not in node.meta:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What of a joint graph waits for a gradient, and so belongs to the backward."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or any(n in late for n in node.all_input_nodes):
            late.add(node)
    return late


def recompute_inner_values(graph: fx.Graph, *, activations: bool) -> None:
    """Asks the partitioner of a joint graph not to save what lies inside a GLU: one node computes it, forward and
    backward, so to save it would cost memory and the fusion. `activations`: nor what the GLU gives, which the backward
    can write beside the gradient. What the user checkpoints is left as it is."""
    late = late_nodes(graph)
    for region in find_regions(graph):
        if any("recompute" in n.meta for n in region):
            continue
        early = {n for n in region if n not in late and not is_product(n)}
        for node in early:
            inside = any(u in early for u in node.users) and all(u in early or u in late for u in node.users)
            if inside or (activations and any(map(is_product, node.users))):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = FIRST_CHECKPOINT


def clone_views(graph: fx.Graph, region: Sequence[fx.Node]) -> None:
    """Gives every outside reader of a view in the region a view of its own, so that the region's can go."""
    members = set(region)
    for node in reversed(region):
        if not is_view(node) or all(u in members for u in node.users):
            continue
        readers = [u for u in node.users if u not in members]
        with graph.inserting_after(node):
            copy = graph.node_copy(node)
        copy.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, copy)


def sort_topologically(graph: fx.Graph) -> None:
    """Orders nodes so that operands come first, and otherwise as they stood."""
    ordered: list[fx.Node] = []
    placed: set[fx.Node] = set()
    for node in list(graph.nodes):
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [n for n in last.all_input_nodes if n not in placed]
            if last in placed or not missing:
                waiting.pop()
                if last not in placed:
                    placed.add(last)
                    ordered.append(last)
            else:
                waiting.extend(missing)
    for before, node in pairwise(ordered):
        before.append(node)


def device_of(region: Sequence[fx.Node]) -> torch.device:
    """The device of the region's tensors."""
    device: torch.device = next(n for n in region if n.target is not GETITEM and dims_of(n)).meta["val"].device
    return device


def framework_seconds(region: Sequence[fx.Node], arch: Arch, *, one_pass: bool) -> float:
    """What the region costs as torch runs it, by the rates that plans are estimated with.

    A grouped matmul is two launches; the rest is one pass over what it reads and writes (`one_pass`, as Inductor
    generates it) or one an op. A symbolic extent counts as a plan's nominal one.
    """
    members = set(region)

    def nbytes(node: fx.Node) -> int:
        extents = [d if isinstance(d, int) else NOMINAL_EXTENT for d in dims_of(node)]
        return math.prod(extents) * node.meta["val"].element_size() if extents else 0

    def seconds(flops: float, size: int, launches: int) -> float:
        return max(flops / arch.bf16_flops, size / arch.memory_bytes_per_second) + launches * arch.launch_seconds

    total = 0.0
    passes: list[set[fx.Node]] = []
    for node in region:
        tensors = {n for n in (node, *node.all_input_nodes) if dims_of(n)}
        if is_product(node):
            rows, depth = (d if isinstance(d, int) else NOMINAL_EXTENT for d in dims_of(node.args[0]))  # type: ignore[arg-type]
            flops = 2.0 * rows * depth * dims_of(node)[1] * rates.factor(rates.GROUPED_MM, arch.name, depth)
            total += seconds(flops, sum(map(nbytes, tensors)), 2)
        elif not is_view(node) and padded_half(node) is None:
            passes.append(tensors)
    if one_pass and passes:
        touched = set().union(*passes)
        inner = {n for n in touched & members if not is_product(n) and not is_view(n) and n.users.keys() <= members}
        passes = [touched - inner]
    return total + sum(seconds(0.0, sum(map(nbytes, tensors)), 1) for tensors in passes)


__all__ = [
    "clone_views", "device_of", "drop_detaches", "drop_whole_slices", "find_regions", "framework_seconds",
    "is_product", "joins_of", "late_nodes", "outputs_of", "recompute_inner_values", "share_conversions",
    "sort_topologically",
]  # fmt: skip
