"""Tensor extents that may depend on symbols, so that one graph serves every token count.

A `Dim` is an int or an `Expression`: a polynomial with integer coefficients over atoms, an atom being a `Symbol` or a
rounded-up quotient. Expressions are canonical, so equal values compare equal (`2*M == M+M`).
"""

from __future__ import annotations

import ast
import keyword
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from .errors import GraphError, VariantPackError


@dataclass(frozen=True, order=True)
class Symbol:
    """A named extent, bound by the buffers of each execute.

    `multiple_of` is a promise that every bound value is a multiple; `maximum` an upper bound. Both are checked when
    a buffer binds the symbol, and support conditions may rely on them.
    """

    name: str
    multiple_of: int = 1
    maximum: int | None = None


@dataclass(frozen=True)
class _CeilDiv:
    numerator: Expression
    divisor: int


Atom = Symbol | _CeilDiv
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Expression:
    """A polynomial over symbols: `terms` maps a sorted monomial to its coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _collect([*self.terms, *_terms(other)])

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return self + (-1) * other

    def __neg__(self) -> Dim:
        return (-1) * self

    def __rsub__(self, other: Dim) -> Dim:
        return (-1) * self + other

    def __mul__(self, other: Dim) -> Dim:
        return _collect((tuple(sorted(m + n, key=_atom_text)), c * d) for m, c in self.terms for n, d in _terms(other))

    __rmul__ = __mul__

    def __str__(self) -> str:
        return _text(self)

    __repr__ = __str__


Dim = int | Expression


def symbol(name: str, multiple_of: int = 1, maximum: int | None = None) -> Expression:
    """The extent named `name`. Raises GraphError for a name that is no identifier, a multiple below 1 or a maximum
    below 0."""
    if not name.isidentifier() or keyword.iskeyword(name) or unicodedata.normalize("NFKC", name) != name:
        # The name must read back as it was written, and Python's parser reads dims.
        raise GraphError("SYMBOL_NAME", asked=f"symbol {name!r}", required="a Python identifier that is no keyword")
    if maximum is not None and maximum < 0:
        raise GraphError("SYMBOL_MAXIMUM", asked=f"symbol {name!r}", seen=maximum, required="maximum >= 0")
    if multiple_of < 1:
        raise GraphError("SYMBOL_MULTIPLE", asked=f"symbol {name!r}", seen=multiple_of, required="multiple_of >= 1")
    return Expression((((Symbol(name, multiple_of, maximum),), 1),))


def ceil_div(value: Dim, divisor: int) -> Dim:
    """`value / divisor` rounded up; exact when the divisor is known to divide."""
    if isinstance(value, int):
        return -(-value // divisor)
    if all(c % divisor == 0 for _, c in value.terms):
        return _collect((m, c // divisor) for m, c in value.terms)
    return Expression((((_CeilDiv(value, divisor),), 1),))


def round_up(value: Dim, multiple: int) -> Dim:
    """The smallest multiple of `multiple` that is at least `value`."""
    return value if known_divisor(value) % multiple == 0 else ceil_div(value, multiple) * multiple


def known_divisor(value: Dim) -> int:
    """The largest integer known to divide `value` whatever the symbols are bound to (0 for the integer 0)."""
    if isinstance(value, int):
        return abs(value)
    return reduce(math.gcd, (abs(c) * math.prod(_atom_divisor(a) for a in m) for m, c in value.terms), 0)


def upper_bound(value: Dim) -> int | None:
    """The largest value that the symbols' maxima allow, None where one has none (or a coefficient is negative)."""
    if isinstance(value, int):
        return value
    total = 0
    for monomial, coefficient in value.terms:
        bounds = [_atom_bound(a) for a in monomial]
        if coefficient < 0 or any(b is None for b in bounds):
            return None
        total += coefficient * math.prod(b for b in bounds if b is not None)
    return total


def evaluate(value: Dim, bindings: Mapping[str, int]) -> int:
    """The integer that `value` has under `bindings`. Raises KeyError for an unbound symbol."""
    if isinstance(value, int):
        return value
    return sum(c * math.prod(_atom_value(a, bindings) for a in m) for m, c in value.terms)


def symbols(values: Iterable[Dim]) -> tuple[Symbol, ...]:
    """Every symbol in `values`, each once, in order of appearance."""
    found: dict[Symbol, None] = {}
    for value in values:
        if isinstance(value, Expression):
            for monomial, _ in value.terms:
                for atom in monomial:
                    found.update(dict.fromkeys((atom,) if isinstance(atom, Symbol) else symbols((atom.numerator,))))
    return tuple(found)


def bind(value: Dim, extent: int, bindings: dict[str, int], where: str) -> None:
    """Makes `value` equal `extent`: binds a lone unbound symbol, else checks. Raises VariantPackError.

    An expression with an unbound symbol that is not of the form `c * M + d` is left to a later check.
    """
    unbound = [s for s in symbols((value,)) if s.name not in bindings]
    if not unbound:
        if (expected := evaluate(value, bindings)) != extent:
            bound = ", ".join(f"{s.name}={bindings[s.name]}" for s in symbols((value,)))
            raise VariantPackError(
                "SHAPE",
                asked=where,
                seen=extent,
                required=f"{value} = {expected}" + (f" with {bound}" if bound else ""),
            )
        return
    assert isinstance(value, Expression)
    slope = dict(value.terms).get((unbound[0],))
    rest = value - (slope or 0) * Expression((((unbound[0],), 1),))
    if len(unbound) > 1 or slope is None or not isinstance(rest, int):
        return
    quotient, remainder = divmod(extent - rest, slope)
    if remainder or quotient < 0:
        raise VariantPackError(
            "SHAPE", asked=where, seen=extent, required=f"{value} for a whole {unbound[0].name} >= 0"
        )
    check_symbol(unbound[0], quotient, where)
    bindings[unbound[0].name] = quotient


def check_symbol(atom: Symbol, value: int, where: str) -> None:
    """Raises VariantPackError where `value` breaks a promise that the symbol made."""
    if value % atom.multiple_of:
        raise VariantPackError("SYMBOL_MULTIPLE", asked=where, seen=f"{atom.name} = {value}",
                               required=f"a multiple of {atom.multiple_of}, as the symbol was declared")  # fmt: skip
    if atom.maximum is not None and value > atom.maximum:
        raise VariantPackError("SYMBOL_MAXIMUM", asked=where, seen=f"{atom.name} = {value}",
                               required=f"at most {atom.maximum}, as the symbol was declared")  # fmt: skip


def parse(text: str | int, table: Mapping[str, Expression]) -> Dim:
    """The dim that `str(dim)` printed; `table` has the symbols by name. Raises GraphError for anything else."""
    if isinstance(text, int):
        return text

    unreadable = GraphError("JSON_DIM", asked=f"dim {text!r}", required=f"an expression over {sorted(table)}")

    def walk(node: ast.expr) -> Dim:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return number
            case ast.Name(id=name) if name in table:
                return table[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return walk(left) + walk(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return walk(left) * walk(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -1 * walk(operand)
            case ast.Call(func=ast.Name(id="ceil_div"), args=[numerator, ast.Constant(value=int() as divisor)]) if (
                divisor > 0
            ):
                return ceil_div(walk(numerator), divisor)
        raise unreadable

    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise unreadable from error
    return walk(tree.body)


def _terms(value: Dim) -> Iterable[tuple[Monomial, int]]:
    return value.terms if isinstance(value, Expression) else (((), value),)


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Dim:
    total: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    kept = sorted(((m, c) for m, c in total.items() if c), key=lambda t: (-len(t[0]), [_atom_text(a) for a in t[0]]))
    if all(not m for m, _ in kept):
        return sum(c for _, c in kept)
    return Expression(tuple(kept))


def _atom_text(atom: Atom) -> str:
    return atom.name if isinstance(atom, Symbol) else f"ceil_div({_text(atom.numerator)}, {atom.divisor})"


def _text(value: Expression) -> str:
    def term(monomial: Monomial, coefficient: int) -> str:
        factors = [_atom_text(a) for a in monomial]
        return "*".join(factors if coefficient == 1 and factors else [str(coefficient), *factors])

    return " + ".join(term(m, c) for m, c in value.terms)


def _atom_divisor(atom: Atom) -> int:
    if isinstance(atom, Symbol):
        return atom.multiple_of
    divisor = known_divisor(atom.numerator)
    return divisor // atom.divisor if divisor and divisor % atom.divisor == 0 else 1


def _atom_bound(atom: Atom) -> int | None:
    if isinstance(atom, Symbol):
        return atom.maximum
    bound = upper_bound(atom.numerator)
    return None if bound is None else -(-bound // atom.divisor)


def _atom_value(atom: Atom, bindings: Mapping[str, int]) -> int:
    if isinstance(atom, Symbol):
        return bindings[atom.name]
    return -(-evaluate(atom.numerator, bindings) // atom.divisor)
