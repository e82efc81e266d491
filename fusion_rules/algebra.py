"""Pointwise compositions as polynomials, so that every spelling of a GLU or its derivative is the same value.

A value becomes a sum of products with real coefficients over atoms: the gate and up columns of one tensor, sigmoids,
clamps, 0/1 masks, and everything else as it is. `s + g*s*(1-s)`, `swish_backward(1, g)` and `s*(1 + g - swish(g))` have
one polynomial. Only the derivation is algebra: the node that replaces a composition is computed by its own formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graph_ops.ir.dtypes import DataType
from ..graph_ops.ir.graph import Node
from .view import GraphView

TERM_LIMIT = 32
"""More terms than any spelling of a GLU's derivative needs; a longer polynomial is kept as an opaque value."""

Polynomial = Mapping[tuple[int, ...], float]
AtomKey = tuple[str | int | float | tuple[Any, ...], ...]

ALGEBRAIC_OPS = frozenset(
    ("add", "sub", "mul", "neg", "identity", "sigmoid", "swish", "swish_backward", "min", "max", "select")
)
_ORDERS = {"cmp_le": ("le", "ge"), "cmp_ge": ("ge", "le")}
"""Comparisons that keep equality, as a mask on the left and on the right operand; strict ones are another function."""

COMPARISONS = frozenset(_ORDERS)


def constant(value: float) -> Polynomial:
    return {(): value} if value else {}


def plus(left: Polynomial, right: Polynomial, scale: float = 1.0) -> Polynomial:
    """left + scale * right."""
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, 0.0) + scale * coefficient
    return {m: c for m, c in total.items() if c}


def equal(left: Polynomial, right: Polynomial) -> bool:
    """Equal up to the rounding of coefficients that were multiplied in another order."""
    return all(math.isclose(left.get(m, 0.0), right.get(m, 0.0), rel_tol=1e-9, abs_tol=1e-12) for m in {*left, *right})


@dataclass
class Algebra:
    """The polynomials of the values that derive from the gate and up columns of one tensor, `x`.

    `derived` are the uids that do; every other value is an atom, but for a product with a factor per row, which
    `flatten` opens so that a probability is found inside it.
    """

    view: GraphView
    x: int
    derived: frozenset[int]
    flatten: bool
    atoms: list[AtomKey] = field(default_factory=list)
    _ids: dict[AtomKey, int] = field(default_factory=dict)
    _known: dict[int, Polynomial] = field(default_factory=dict)

    def atom(self, *key: Any) -> int:
        """The number of the atom with this key."""
        if key not in self._ids:
            self._ids[key] = len(self.atoms)
            self.atoms.append(key)
        return self._ids[key]

    def sigmoid(self, argument: Polynomial) -> int:
        return self.atom("sigmoid", tuple(sorted(argument.items())))

    def clamp(self, base: int, low: float, high: float) -> int:
        return base if (low, high) == (-math.inf, math.inf) else self.atom("clamp", base, low, high)

    def times(self, left: Polynomial, right: Polynomial) -> Polynomial:
        total: dict[tuple[int, ...], float] = {}
        for m, c in left.items():
            for n, d in right.items():
                key = self.monomial((*m, *n))
                total[key] = total.get(key, 0.0) + c * d
        return {m: c for m, c in total.items() if c}

    def monomial(self, atoms: Iterable[int]) -> tuple[int, ...]:
        """Atoms as a key of a polynomial: sorted, and a mask times itself is the mask."""
        listed = sorted(atoms)
        return tuple(
            a for i, a in enumerate(listed) if not (i and a == listed[i - 1] and self.atoms[a][0] in ("le", "ge"))
        )

    def value(self, uid: int) -> Polynomial:
        """The polynomial of a tensor as its readers see it: a tensor that rounds is an atom."""
        if uid not in self._known:
            self._known[uid] = self._value(uid)
        return self._known[uid]

    def _value(self, uid: int) -> Polynomial:
        tensor = self.view.graph.tensors[uid]
        if tensor.value is not None:
            return constant(tensor.value)
        made = self.view.producers.get(uid)
        if made is not None and made.node.op == "split_glu" and made.node.input_uids["x"] == self.x:
            exact = tensor.data_type in (self.view.graph.tensors[self.x].data_type, DataType.FLOAT)
            return {(self.atom(made.port) if exact else self.atom("value", uid),): 1.0}
        if made is not None and tensor.data_type is DataType.FLOAT and self.opens(uid):
            return self.expression(made.node, uid)
        return {(self.atom("value", uid),): 1.0}

    def opens(self, uid: int) -> bool:
        """Whether the value is looked into: it derives from gate and up, or is a product with a factor per row."""
        made = self.view.producers.get(uid)
        if made is None or made.node.op not in ALGEBRAIC_OPS:
            return False
        if uid in self.derived:
            return True
        tensors = self.view.graph.tensors
        return self.flatten and made.node.op == "mul" and any(tensors[u].dim[-1:] == (1,) for _, u in made.node.inputs)

    def expression(self, node: Node, uid: int) -> Polynomial:
        """What `node` computes before its output rounds; the output's own atom where that is too long."""
        found = self._expression(node, uid)
        return found if len(found) <= TERM_LIMIT else {(self.atom("value", uid),): 1.0}

    def _expression(self, node: Node, uid: int) -> Polynomial:
        given = node.input_uids
        match node.op:
            case "select":
                return self._select(given, uid)
            case "min" | "max":
                return self._bound(node.op, self.value(given["a"]), self.value(given["b"]), uid)
            case "add" | "sub":
                return plus(self.value(given["a"]), self.value(given["b"]), 1.0 if node.op == "add" else -1.0)
            case "mul":
                return self.times(self.value(given["a"]), self.value(given["b"]))
            case "neg":
                return plus({}, self.value(given["x"]), -1.0)
            case "identity":
                return self.value(given["x"])
            case "sigmoid":
                return {(self.sigmoid(self.value(given["x"])),): 1.0}
        x, beta = self.value(given["x"]), node.attribute["swish_beta"]
        s: Polynomial = {(self.sigmoid(plus({}, x, beta)),): 1.0}
        if node.op == "swish":
            return self.times(x, s)
        return self.times(self.value(given["dy"]), self.derivative(s, plus({}, x, beta)))

    def derivative(self, s: Polynomial, scaled: Polynomial) -> Polynomial:
        """s * (1 + scaled*(1 - s)): the derivative of x*sigmoid(scaled), scaled a multiple of x."""
        return self.times(s, plus(constant(1.0), self.times(scaled, plus(constant(1.0), s, -1.0))))

    def _bound(self, op: str, left: Polynomial, right: Polynomial, uid: int) -> Polynomial:
        opaque: Polynomial = {(self.atom("value", uid),): 1.0}
        if set(left) <= {()}:
            left, right = right, left
        (monomial, coefficient), *rest = left.items() or [((), 0.0)]
        if rest or coefficient != 1.0 or len(monomial) != 1 or not set(right) <= {()}:
            return opaque
        bound, base, low, high = right.get((), 0.0), monomial[0], -math.inf, math.inf
        if self.atoms[base][0] == "clamp":
            _, base, low, high = self.atoms[base]  # type: ignore[assignment]
        if not low <= bound <= high:
            return opaque
        return {(self.clamp(base, *((low, bound) if op == "min" else (bound, high))),): 1.0}

    def _select(self, given: Mapping[str, int], uid: int) -> Polynomial:
        made = self.view.producers.get(given["mask"])
        mask = None if made is None else self._mask(made.node)
        if mask is None:
            return {(self.atom("value", uid),): 1.0}
        kept: Polynomial = {(mask,): 1.0}
        yes, no = self.value(given["a"]), self.value(given["b"])
        return plus(self.times(kept, yes), self.times(plus(constant(1.0), kept, -1.0), no))

    def _mask(self, node: Node) -> int | None:
        """The atom of `value <= bound` or `value >= bound`; None for any other comparison."""
        if node.op not in _ORDERS:
            return None
        left, right = self.value(node.input_uids["a"]), self.value(node.input_uids["b"])
        order = _ORDERS[node.op][0]
        if set(left) <= {()}:
            left, right, order = right, left, _ORDERS[node.op][1]
        if len(left) != 1 or not set(right) <= {()}:
            return None
        ((monomial, coefficient),) = left.items()
        if coefficient != 1.0 or len(monomial) != 1:
            return None
        return self.atom(order, monomial[0], right.get((), 0.0))

    def region(self, uids: Iterable[int]) -> set[int]:
        """Indices of the nodes that the polynomials of `uids` look into, the nodes that write `uids` included; not the
        split_glu nodes, which move values without computing."""
        found: set[int] = set()
        waiting = [(uid, True) for uid in uids]
        tensors = self.view.graph.tensors
        while waiting:
            uid, root = waiting.pop()
            made = self.view.producers.get(uid)
            if made is None or made.node.index in found:
                continue
            if (made.node.op in COMPARISONS and not root) or (
                self.opens(uid) and (root or tensors[uid].data_type is DataType.FLOAT)
            ):
                found.add(made.node.index)
                waiting.extend((u, False) for _, u in made.node.inputs)
        return found
