"""Dims: a polynomial over symbols behaves as the integers that the symbols stand for."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opfuse.graph_ops.ir.dims import (
    Symbol,
    bind,
    ceil_div,
    evaluate,
    known_divisor,
    parse,
    round_up,
    symbol,
    symbols,
    upper_bound,
)
from opfuse.graph_ops.ir.errors import GraphError, VariantPackError

TABLE = {"M": symbol("M"), "N": symbol("N", multiple_of=32), "K": symbol("K", maximum=100)}
BINDINGS = st.fixed_dictionaries(
    {"M": st.integers(0, 500), "N": st.integers(0, 20).map(lambda n: 32 * n), "K": st.integers(0, 100)}
)
settings.register_profile("dims", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("dims")


def _leaf(dim):
    return dim, (lambda bindings: bindings[str(dim)] if not isinstance(dim, int) else dim)


def _combine(children):
    binary = st.tuples(st.sampled_from([operator.add, operator.sub, operator.mul]), children, children).map(
        lambda t: (t[0](t[1][0], t[2][0]), lambda b: t[0](t[1][1](b), t[2][1](b)))
    )
    return binary


def _rounded(children):
    def quotient(t):
        (dim, value), divisor, up = t
        if up:
            return round_up(dim, divisor), lambda b: -(-value(b) // divisor) * divisor
        return ceil_div(dim, divisor), lambda b: -(-value(b) // divisor)

    return st.tuples(children, st.sampled_from([1, 2, 3, 4, 32, 128]), st.booleans()).map(quotient)


LEAVES = st.one_of(st.integers(-20, 200).map(_leaf), st.sampled_from(list(TABLE.values())).map(_leaf))
DIMS = st.recursive(LEAVES, lambda c: st.one_of(_combine(c), _rounded(c)), max_leaves=8)


@given(DIMS, BINDINGS)
def test_evaluate_is_the_arithmetic_of_integers(case, bindings):
    dim, value = case
    assert evaluate(dim, bindings) == value(bindings), f"{dim} under {bindings}"


@given(DIMS, DIMS)
def test_equal_polynomials_compare_and_hash_equal(first, second):
    (a, _), (b, _) = first, second
    for left, right in ((a + b, b + a), (a * b, b * a), ((a + b) * 2, 2 * b + a * 2), (a - a, 0), (a + b - b, a)):
        assert left == right and hash(left) == hash(right)


@given(DIMS)
def test_text_reads_back_as_the_same_dim(case):
    dim, _ = case
    text = dim if isinstance(dim, int) else str(dim)
    assert parse(text, TABLE) == dim


@given(DIMS, BINDINGS)
def test_known_divisor_divides_every_value(case, bindings):
    dim, _ = case
    divisor, value = known_divisor(dim), evaluate(dim, bindings)
    assert value == 0 if divisor == 0 else value % divisor == 0


@given(DIMS, BINDINGS)
def test_upper_bound_bounds_every_value(case, bindings):
    dim, _ = case
    bound = upper_bound(dim)
    assert bound is None or evaluate(dim, bindings) <= bound


@pytest.mark.parametrize(
    ("dim", "divisor"),
    [
        (12, 12), (0, 0), (TABLE["M"], 1), (TABLE["N"], 32), (2 * TABLE["N"] + 64, 64), (TABLE["N"] * TABLE["N"], 1024),
        (ceil_div(TABLE["N"], 8), 4), (round_up(TABLE["M"], 128), 128), (TABLE["N"] + 1, 1),
    ],
)  # fmt: skip
def test_known_divisor_is_the_largest_known(dim, divisor):
    assert known_divisor(dim) == divisor


@pytest.mark.parametrize(
    ("dim", "bound"),
    [(7, 7), (TABLE["K"], 100), (3 * TABLE["K"] + 1, 301), (TABLE["K"] * TABLE["K"], 10_000), (TABLE["M"], None),
     (ceil_div(TABLE["K"], 32), 4), (10 - TABLE["K"], None)],
)  # fmt: skip
def test_upper_bound_is_tight_where_it_exists(dim, bound):
    assert upper_bound(dim) == bound


def test_rounding_keeps_what_is_a_multiple_already():
    assert round_up(TABLE["N"], 32) == TABLE["N"]
    assert round_up(4 * TABLE["M"], 4) == 4 * TABLE["M"]
    assert round_up(130, 128) == 256
    assert str(round_up(TABLE["M"], 128)) == "128*ceil_div(M, 128)"


def test_symbols_are_found_once_and_inside_quotients():
    dims = (ceil_div(TABLE["N"] + TABLE["M"], 64), TABLE["M"] * 2, 5)
    assert symbols(dims) == (Symbol("M"), Symbol("N", 32)), "in the order of the polynomial's terms"


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 9))
def test_bind_solves_a_linear_dim(value, slope, offset):
    bindings: dict[str, int] = {}
    bind(slope * TABLE["M"] + offset, slope * value + offset, bindings, "x dim 0")
    assert bindings == {"M": value}


def test_bind_checks_what_is_bound_and_says_where():
    bindings = {"M": 8}
    bind(2 * TABLE["M"], 16, bindings, "x dim 0")
    with pytest.raises(VariantPackError, match=r"SHAPE: y dim 1; seen 17; required 2\*M = 16 with M=8"):
        bind(2 * TABLE["M"], 17, bindings, "y dim 1")
    with pytest.raises(VariantPackError, match="required 5 = 5"):
        bind(5, 6, bindings, "z")


@pytest.mark.parametrize(
    ("dim", "extent", "code"),
    [(2 * TABLE["M"], 7, "SHAPE"), (TABLE["M"] + 8, 3, "SHAPE"), (TABLE["N"], 48, "SYMBOL_MULTIPLE"),
     (TABLE["K"], 101, "SYMBOL_MAXIMUM")],
)  # fmt: skip
def test_bind_refuses_and_binds_nothing(dim, extent, code):
    bindings: dict[str, int] = {}
    with pytest.raises(VariantPackError) as caught:
        bind(dim, extent, bindings, "x dim 0")
    assert caught.value.code == code and bindings == {}
    assert caught.value.asked == "x dim 0" and caught.value.seen is not None and caught.value.required


def test_bind_leaves_what_it_cannot_solve_for_later():
    bindings: dict[str, int] = {}
    for dim in (TABLE["M"] * TABLE["N"], TABLE["M"] + TABLE["N"], ceil_div(TABLE["M"], 32)):
        bind(dim, 4, bindings, "x")
    assert bindings == {}


def test_evaluating_an_unbound_symbol_names_it():
    with pytest.raises(KeyError, match="M"):
        evaluate(TABLE["M"] + 1, {})


@pytest.mark.parametrize("name", ["", "2M", "a b", "M-1", "for", "None", "ﬁ"])
def test_a_symbol_name_must_read_back(name):
    with pytest.raises(GraphError) as caught:
        symbol(name)
    assert caught.value.code == "SYMBOL_NAME"


@pytest.mark.parametrize(("given_", "code"), [((0, None), "SYMBOL_MULTIPLE"), ((1, -1), "SYMBOL_MAXIMUM")])
def test_a_symbol_makes_sane_promises(given_, code):
    with pytest.raises(GraphError) as caught:
        symbol("M", *given_)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Q",
        "M +",
        "M / 2",
        "M ** 2",
        "f(M)",
        "ceil_div(M)",
        "ceil_div(M, 0)",
        "ceil_div(M, N)",
        "True",
        "'M'",
        "M\0",
        "1.5",
    ],
)
def test_other_text_is_no_dim(text):
    with pytest.raises(GraphError) as caught:
        parse(text, TABLE)
    assert caught.value.code == "JSON_DIM"
