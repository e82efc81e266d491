"""Patterns as values: which nodes, joined through which ports, a fusion absorbs.

A pattern names values, not edges: two ports that carry the same name carry the same tensor. A name is also the role
that the value has in the kernel's problem (`kernels.problem.ROLES`), so that a match needs no lowering code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..graph_ops.ir.ops import OPS


@dataclass(frozen=True, eq=False)
class NodePattern:
    """One node of a pattern.

    `inputs` and `outputs` map every port that must be there to the name of its value, `optional_inputs` and
    `optional_outputs` those that may be. A node with any other port does not match: what a pattern does not name, a
    kernel would ignore. `attributes` maps an attribute to the values that it may have; all others are free and reach
    the kernel's problem, each under `prefix` + its name. The operands of a commutative op match in both orders.
    """

    label: str
    op: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    optional_outputs: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefix: str = ""

    @cached_property
    def input_names(self) -> Mapping[str, str]:
        return {**self.inputs, **self.optional_inputs}

    @cached_property
    def output_names(self) -> Mapping[str, str]:
        return {**self.outputs, **self.optional_outputs}

    @cached_property
    def swapped_names(self) -> Mapping[str, str] | None:
        """`input_names` with the operands of a commutative op exchanged; None for other ops."""
        spec = OPS[self.op]
        if not spec.commutative:
            return None
        first, second = (p.name for p in spec.inputs[:2])
        exchange = {first: second, second: first}
        return {exchange.get(port, port): name for port, name in self.input_names.items()}


@dataclass(frozen=True)
class Reach:
    """How a pattern node is found from values that are already bound: through the value `name`, which this node reads
    at `port` (downstream) or writes at `port` (upstream)."""

    name: str
    port: str
    downstream: bool


@dataclass(frozen=True, eq=False)
class Shape:
    """A pattern with some of its attachments: its nodes, the names that they write, and those that they only read."""

    parts: tuple[NodePattern, ...]
    made: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Pattern:
    """A connected set of nodes. `core[0]` is the anchor, and each later node shares a value with an earlier one.

    `attachments` are nodes that read a value of the core and join the fusion where they are there and the kernel
    takes them; at least one of `needs_any` must be there, if any is named. `always_written` are the values that a
    kernel writes whether or not something reads them.
    """

    core: tuple[NodePattern, ...]
    attachments: tuple[NodePattern, ...] = ()
    needs_any: tuple[str, ...] = ()
    always_written: tuple[str, ...] = ()

    @property
    def anchor(self) -> NodePattern:
        return self.core[0]

    @cached_property
    def _shapes(self) -> dict[tuple[str, ...], Shape]:
        return {}

    def shape(self, attached: tuple[str, ...]) -> Shape:
        """The pattern with the attachments of these labels, and no other."""
        if attached not in self._shapes:
            parts = (*self.core, *(a for a in self.attachments if a.label in attached))
            made = dict.fromkeys(name for part in parts for name in part.output_names.values())
            read = dict.fromkeys(name for part in parts for name in part.input_names.values())
            self._shapes[attached] = Shape(parts, tuple(made), tuple(name for name in read if name not in made))
        return self._shapes[attached]

    @cached_property
    def early(self) -> str | None:
        """The anchor's output port that the second node of the core reads, if it does. Most anchors have no such reader
        and are rejected before anything is bound."""
        if len(self.core) < 2 or not self.reaches[0].downstream:
            return None
        return next((p for p, name in self.core[0].output_names.items() if name == self.reaches[0].name), None)

    @cached_property
    def begins(self) -> tuple[str, frozenset[str]] | None:
        """The anchor's output port and the ops of which one must read it, where the pattern cannot match without."""
        if self.early is not None:
            return self.early, frozenset((self.core[1].op,))
        if not self.needs_any:
            return None
        needed = [(r.name, a.op) for a, r in zip(self.attachments, self.attachment_reaches, strict=True)
                  if a.label in self.needs_any]  # fmt: skip
        ports = [port for port, name in self.anchor.outputs.items() if all(name == n for n, _ in needed)]
        return (ports[0], frozenset(op for _, op in needed)) if ports else None

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """How each node of the core after the anchor is reached."""
        return tuple(self._reach(self.core[:i], node) for i, node in enumerate(self.core) if i)

    @cached_property
    def attachment_reaches(self) -> tuple[Reach, ...]:
        return tuple(self._reach(self.core, node) for node in self.attachments)

    def _reach(self, earlier: tuple[NodePattern, ...], node: NodePattern) -> Reach:
        written = {name for e in earlier for name in e.output_names.values()}
        read = {name for e in earlier for name in e.input_names.values()}
        for port, name in node.inputs.items():
            if name in written:
                return Reach(name, port, downstream=True)
        for port, name in node.outputs.items():
            if name in read:
                return Reach(name, port, downstream=False)
        for port, name in node.inputs.items():
            if name in read:
                return Reach(name, port, downstream=True)
        raise ValueError(f"pattern node {node.label} shares no value with {[e.label for e in earlier]}")
