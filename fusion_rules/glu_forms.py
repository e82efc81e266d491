"""Reading a GLU, or its derivative, out of polynomials: which activation, with which parameters and operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..graph_ops.ir.dtypes import DataType
from .algebra import Algebra, Polynomial, constant, equal, plus


@dataclass(frozen=True)
class Form:
    """A GLU: its activation as node attributes, the atoms that it is made of, and the row factor's uid."""

    attributes: dict[str, Any]
    gate: int  # atom of the clamped gate
    scale: float  # inside the sigmoid
    up: int  # atom of the clamped up
    offset: float
    prob: int | None  # atom
    prob_uid: int | None


@dataclass(frozen=True)
class BackwardForm:
    """The derivative of a GLU by its pre-activation, with the incoming gradient."""

    form: Form
    dy: int  # atom
    dy_uid: int


def activation(algebra: Algebra, form: Form, *, by: int | None) -> Polynomial:
    """The activation without its row factor, times the atom `by` if one is given."""
    sigmoid = algebra.sigmoid({(form.gate,): form.scale})
    value = algebra.times({algebra.monomial((form.gate, sigmoid)): 1.0}, plus({(form.up,): 1.0}, constant(form.offset)))
    return value if by is None else algebra.times(value, {(by,): 1.0})


def read_forward(algebra: Algebra, value: Polynomial) -> Form | None:
    """The GLU that `value` is, or None."""
    if not 1 <= len(value) <= 2:
        return None
    main = max(value, key=len)
    sigmoids = [a for a in main if algebra.atoms[a][0] == "sigmoid"]
    if len(sigmoids) != 1 or (gate := _gate(algebra, sigmoids[0])) is None:
        return None
    rest = list(main)
    for used in (sigmoids[0], gate[0]):
        if used not in rest:
            return None
        rest.remove(used)
    up = [a for a in rest if _base(algebra, a) == "up"]
    factors = [a for a in rest if a not in up]
    if len(up) != 1 or len(factors) > 1:
        return None
    low, high = _bounds(algebra, up[0])
    prob = factors[0] if factors else None
    offset = value.get(algebra.monomial(a for a in main if a != up[0]), 0.0)
    form = _form(algebra, *gate, up[0], low, high, offset, prob)
    return form if form is not None and equal(value, activation(algebra, form, by=prob)) else None


def read_backward(algebra: Algebra, dgate: Polynomial, dup: Polynomial) -> BackwardForm | None:
    """The derivative of a GLU that `dgate` and `dup` are together, or None."""
    if len(dup) != 1:
        return None
    (monomial,) = dup
    sigmoids = [a for a in monomial if algebra.atoms[a][0] == "sigmoid"]
    if len(sigmoids) != 1 or (gate := _gate(algebra, sigmoids[0])) is None:
        return None
    rest = list(monomial)
    for used in (sigmoids[0], gate[0]):
        if used not in rest:
            return None
        rest.remove(used)
    up, low, high = algebra.atom("up"), -math.inf, math.inf
    operands = []
    for atom in rest:
        key = algebra.atoms[atom]
        if key[0] in ("le", "ge") and key[1] == up:
            low, high = (low, key[2]) if key[0] == "le" else (key[2], high)  # type: ignore[assignment]
        else:
            operands.append(atom)
    dims = _row_shape(algebra)
    gradients = [a for a in operands if _dim(algebra, a) == dims]
    factors = [a for a in operands if a not in gradients]
    if len(gradients) != 1 or len(factors) > 1:
        return None
    dy, prob = gradients[0], factors[0] if factors else None
    mask = (algebra.atom("le", algebra.atom("gate"), gate[2]),) if gate[2] < math.inf else ()
    by = (dy, *mask, *((prob,) if prob is not None else ()))
    offset = dgate.get(algebra.monomial((*by, sigmoids[0])), 0.0)
    form = _form(algebra, *gate, algebra.clamp(up, low, high), low, high, offset, prob)
    if form is None:
        return None
    s: Polynomial = {(sigmoids[0],): 1.0}
    slope = algebra.derivative(s, {(form.gate,): form.scale})
    factor = algebra.times({algebra.monomial(by): 1.0}, plus({(form.up,): 1.0}, constant(offset)))
    if not equal(dup, {monomial: 1.0}) or not equal(dgate, algebra.times(factor, slope)):
        return None
    return BackwardForm(form, dy, algebra.atoms[dy][1])  # type: ignore[arg-type]


def _gate(algebra: Algebra, sigmoid: int) -> tuple[int, float, float] | None:
    """(atom of the clamped gate, scale, upper bound) of a sigmoid over a multiple of the gate."""
    argument: Any = algebra.atoms[sigmoid][1]
    if len(argument) != 1:
        return None
    ((monomial, scale),) = argument
    if len(monomial) != 1 or _base(algebra, monomial[0]) != "gate":
        return None
    low, high = _bounds(algebra, monomial[0])
    return (monomial[0], scale, high) if low == -math.inf else None


def _base(algebra: Algebra, atom: int) -> Any:
    key: Any = algebra.atoms[atom]
    return algebra.atoms[key[1]][0] if key[0] == "clamp" else key[0]


def _bounds(algebra: Algebra, atom: int) -> tuple[float, float]:
    key: Any = algebra.atoms[atom]
    return (key[2], key[3]) if key[0] == "clamp" else (-math.inf, math.inf)


def _form(
    algebra: Algebra,
    gate: int,
    scale: float,
    bound: float,
    up: int,
    low: float,
    high: float,
    offset: float,
    prob: int | None,
) -> Form | None:
    """The form, where the parameters are those of one activation: one upper bound for gate and up."""
    prob_uid = None
    if prob is not None:
        prob_uid = _row_factor(algebra, prob)
        if prob_uid is None:
            return None
    if high != bound or not 0 < scale < math.inf:
        return None
    if (scale, bound, low, offset) == (1.0, math.inf, -math.inf, 0.0):
        return Form({"act": "swiglu"}, gate, scale, up, offset, prob, prob_uid)
    attributes = {"act": "geglu", "geglu_alpha": scale, "clamp_min": low, "clamp_max": high, "linear_offset": offset}
    return Form(attributes, gate, scale, up, offset, prob, prob_uid)


def _row_shape(algebra: Algebra) -> Any:
    """(M, I): the shape of gate and up."""
    made = next(u.node for u in algebra.view.uses[algebra.x] if u.node.op == "split_glu")
    return algebra.view.graph.tensors[made.output_uids["gate"]].dim


def _dim(algebra: Algebra, atom: int) -> Any:
    key: Any = algebra.atoms[atom]
    return algebra.view.graph.tensors[key[1]].dim if key[0] == "value" else None


def _row_factor(algebra: Algebra, atom: int) -> int | None:
    """The uid of a FLOAT factor per row, shape (M, 1); None for anything else."""
    key: Any = algebra.atoms[atom]
    if key[0] != "value":
        return None
    tensor = algebra.view.graph.tensors[key[1]]
    rows = algebra.view.graph.tensors[algebra.x].dim[0]
    return tensor.uid if tensor.dim == (rows, 1) and tensor.data_type is DataType.FLOAT else None
