"""Grouped matmuls of an FX graph that are no GLU's, forward or weight gradient, as ops of their own where kernels of
ours are estimated to beat torch's grouped_mm.

An op of ours costs the host no less than aten's does, so that as few run as memory allows; an op holds its inputs until
it returns.
- Those that read one gradient are one op: dx, which reads dh, ends with dh alive wherever dw1 follows. But parts of dx
  that are added up go before the weight gradients are made, and so do not join these.
- FC2 is one op with the GLU before it, where the rows that the GLU reads are held for the backward anyway.
- Never one with the GLU's derivative: dx and the weight gradients would keep h and the activation, 3 M I elements,
  alive beside themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch._inductor
from torch import fx

from ...ir.errors import OpfuseError
from ...ir.graph import OpGraph
from ...plan import Plan
from .importer import Imported, Importer
from .regions import is_product, outputs_of
from .spellings import GETITEM, GROUPED_MM, SLICE, SPLITS, TRANSPOSES, dims_of

RULES = ("grouped_gemm", "grouped_gemm_wgrad")

Planned = tuple[tuple[fx.Node, ...], Imported, Plan]


def lone_products(graph: fx.Graph, part: str, plan_of: Callable[[OpGraph], Plan]) -> Iterator[Planned]:
    """The grouped matmuls of `graph` that their plan gives to kernels, alone or with those that read the same gradient,
    as operation graphs with that plan: each read when it is asked for, as those before it may have been replaced."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    products = [n for n in graph.nodes if n.target is GROUPED_MM and _planned((n,), part, plan_of) is not None]
    for group in _siblings(products, places):
        together = _planned(group, part, plan_of)
        for one in [together] if together is not None else [_planned((node,), part, plan_of) for node in group]:
            if one is not None:
                yield one


def _planned(nodes: tuple[fx.Node, ...], part: str, plan_of: Callable[[OpGraph], Plan]) -> Planned | None:
    try:
        found = Importer(nodes, nodes, fuse_rounding=False, name=f"{part}.{nodes[0].name}").build()
    except OpfuseError:  # a form that no kernel serves
        return None
    plan = plan_of(found.graph)
    if len(plan.steps) != len(nodes) or any(step.rule not in RULES for step in plan.steps):
        return None
    return nodes, found, plan


def _siblings(products: Sequence[fx.Node], places: dict[fx.Node, int]) -> list[tuple[fx.Node, ...]]:
    """`products`, in order, in groups that read memory which one node of the graph made, and nothing made later than
    the first of the group: so none waits for another. Either all results of a group stay to the end, or none does."""
    groups: list[list[fx.Node]] = []
    for node in products:
        read = {memory_of(n) for n in node.all_input_nodes}
        for group in groups:
            shared = {memory_of(n) for n in group[0].all_input_nodes if len(dims_of(n)) == 2} & read
            made = any(n.op == "call_function" for n in shared) and all(places[n] < places[group[0]] for n in read)
            if made and _stays(node) == _stays(group[0]):
                group.append(node)
                break
        else:
            groups.append([node])
    return [tuple(group) for group in groups]


def _stays(node: fx.Node) -> bool:
    """Whether a value is read by the graph's caller alone, itself or views of it: it is there to the end."""
    memory = memory_of(node)
    return all(user.op == "output" or (memory_of(user) is memory and _stays(user)) for user in node.users)


def memory_of(node: fx.Node) -> fx.Node:
    """What made the memory that a node's value lies in: the node, or what it is a view of."""
    while node.target in (*TRANSPOSES, SLICE, *SPLITS) or (
        node.target is GETITEM and node.all_input_nodes[0].target in SPLITS
    ):
        node = node.all_input_nodes[0]
    return node


def with_reader(graph: fx.Graph, region: tuple[fx.Node, ...], taken: Collection[fx.Node]) -> tuple[fx.Node, ...] | None:
    """A region with the grouped matmul that reads what it computes, if there is one, in order; None where there is
    none, where it waits for more, and where the region's rows could go before it runs. `taken`: nodes of regions."""
    members = set(region)
    places = {node: place for place, node in enumerate(graph.nodes)}
    readers = {u for out in outputs_of(region) for u in out.users if is_product(u) and u.args[0] is out} - {*taken}
    if len(readers) != 1:
        return None
    (reader,) = readers
    others = [memory_of(n) for n in reader.all_input_nodes if n not in members]
    if any(places[n] > places[region[0]] for n in others):
        return None
    (output,) = (n for n in graph.nodes if n.op == "output")
    held = {memory_of(n) for n in output.all_input_nodes}
    rows = {memory_of(n) for m in region for n in m.all_input_nodes if n not in members and len(dims_of(n)) == 2}
    if not all(n.op == "placeholder" or n in held for n in rows):
        return None
    return (*region, reader)


def measured_by_inductor() -> bool:
    """Whether Inductor itself measures which kernel is best for a matmul, so that they are left to it."""
    config = torch._inductor.config
    return bool(config.max_autotune or config.max_autotune_gemm)


__all__ = ["RULES", "lone_products", "measured_by_inductor", "memory_of", "with_reader"]
