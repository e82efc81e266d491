"""Pointwise ops and reductions against the oracle, and NaN, broadcasting, constants and empty extents."""

from __future__ import annotations

import math

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.nodes.pointwise import POINTWISE, REDUCTION_MODES

TYPES = {torch.bfloat16: DataType.BFLOAT16, torch.float16: DataType.HALF, torch.float32: DataType.FLOAT}
PLAIN = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": lambda x: -x,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "swish": lambda x: x * torch.sigmoid(1.3 * x),
    "swish_backward": lambda dy, x: dy * torch.sigmoid(1.3 * x) * (1 + 1.3 * x * (1 - torch.sigmoid(1.3 * x))),
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
}
COMPARE = {
    "cmp_eq": torch.eq,
    "cmp_neq": torch.ne,
    "cmp_gt": torch.gt,
    "cmp_ge": torch.ge,
    "cmp_lt": torch.lt,
    "cmp_le": torch.le,
}
ATTRIBUTES = {"swish": {"swish_beta": 1.3}, "swish_backward": {"swish_beta": 1.3}}
PORTS = {op.name: [p.name for p in op.inputs] for op in POINTWISE}


def test_every_op_is_tested():
    assert set(PLAIN) | set(COMPARE) | {"select"} == set(PORTS)


@pytest.mark.parametrize("op", PLAIN)
def test_arithmetic(num, draw, dtype, op):
    values = [draw.normal(17, 33, dtype=dtype) for _ in PORTS[op]]
    if op == "div":
        values[1] = values[1].sign() * (values[1].abs() + 0.25)
    case = num.make_case(
        op, dict(zip(PORTS[op], values, strict=True)), ATTRIBUTES.get(op), output_types={"y": TYPES[dtype]}
    )
    y, want = case.run(strided=True)["y"], case.oracle()["y"]
    num.assert_close(y, want, PLAIN[op](*values), f"seed {draw.seed}")
    assert ((y.double() - want).abs() <= 0.5001 * torch.finfo(dtype).eps * want.abs() + 2e-5).all(), "rounded twice"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_forms(num, draw, dtype, approximate):
    x = draw.normal(17, 33, dtype=dtype)
    case = num.make_case("gelu", {"x": x}, {"approximate": approximate}, output_types={"y": TYPES[dtype]})
    plain = torch.nn.functional.gelu(x, approximate=approximate)
    num.assert_close(case.run()["y"], case.oracle()["y"], plain, f"seed {draw.seed}")


def test_the_two_gelus_differ(num, draw):
    x = draw.normal(1000)
    erf, tanh = (num.make_case("gelu", {"x": x}, {"approximate": a}).run()["y"] for a in ("none", "tanh"))
    assert (erf - tanh).abs().max() > 1e-4


@pytest.mark.parametrize("op", COMPARE)
def test_comparisons(num, draw, dtype, op):
    a, b = draw.scalars(200).to(dtype), draw.scalars(200).to(dtype)
    a[0] = math.nan
    case = num.make_case(op, {"a": a, "b": b})
    want = COMPARE[op](a, b)
    assert case.specs["y"].data_type is DataType.BOOLEAN
    assert torch.equal(case.run()["y"], want) and torch.equal(case.oracle()["y"], want)


@pytest.mark.parametrize("op", COMPARE)
def test_integers_compare_exactly(num, op):
    big = 2**24
    a, b = torch.tensor([big + 1, big, 3]), torch.tensor([big, big + 1, 3], dtype=torch.int32)
    case = num.make_case(op, {"a": a, "b": b})
    assert torch.equal(case.run()["y"], COMPARE[op](a, b.long())) and torch.equal(case.oracle()["y"], case.run()["y"])
    mixed = num.make_case(op, {"a": a, "b": b.float()})
    assert torch.equal(mixed.run()["y"], COMPARE[op](a, b.float().long())), "float32 does not hold every integer"


def test_select(num, draw, dtype):
    mask = draw.normal(17, 33) > 0
    a, b = draw.normal(17, 33, dtype=dtype), draw.normal(17, 33, dtype=dtype)
    b[mask] = math.nan
    case = num.make_case("select", {"mask": mask, "a": a, "b": b}, output_types={"y": TYPES[dtype]})
    assert torch.equal(torch.nan_to_num(case.run()["y"]), torch.nan_to_num(torch.where(mask, a, b)))
    assert not case.run()["y"][mask].isnan().any()


@pytest.mark.parametrize("shapes", [((17, 33), (33,)), ((17, 1), (1, 33)), ((1,), (17, 33)), ((4, 1, 3), (5, 3))])
def test_broadcasting(num, draw, shapes):
    a, b = (draw.normal(*s) for s in shapes)
    case = num.make_case("sub", {"a": a, "b": b})
    assert torch.equal(case.run()["y"], a - b)


@pytest.mark.parametrize("op", ["sub", "div", "min", "cmp_gt"])
def test_compile_time_scalars(num, draw, dtype, op):
    """A number on either side, or on both, is what its data type holds."""
    x = draw.scalars(40).to(dtype)
    function = {**PLAIN, **COMPARE}[op]
    for a, b in ((x, 0.3), (0.3, x), (0.3, 0.7)):
        case = num.make_case(op, {"a": a, "b": b})
        operands = (t.float() if isinstance(t, torch.Tensor) else torch.tensor(t) for t in (a, b))
        assert torch.equal(case.run()["y"], function(*operands)), f"{op}({a}, {b})"
    narrow = num.make_case("add", {"a": torch.zeros(3), "b": 0.3}, input_types={"b": DataType.BFLOAT16})
    assert narrow.run()["y"].tolist() == [float(torch.tensor(0.3).bfloat16())] * 3
    assert narrow.oracle()["y"].tolist() == narrow.run()["y"].tolist()


@pytest.mark.parametrize("op", ["min", "max", "relu", "srelu", "add"])
def test_nan_propagates(num, op):
    values = [torch.tensor([math.nan, 1.0, math.nan]), torch.tensor([2.0, math.nan, math.nan])][: len(PORTS[op])]
    case = num.make_case(op, dict(zip(PORTS[op], values, strict=True)))
    assert torch.equal(case.run()["y"].isnan(), case.oracle()["y"].isnan())
    assert case.run()["y"].isnan().sum() == (3 if len(values) == 2 else 2)


@pytest.mark.parametrize("mode", REDUCTION_MODES)
@pytest.mark.parametrize("axis", [(0,), (1,), (2,), (0, 2), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("keep_dim", [False, True])
def test_reduction(num, draw, dtype, mode, axis, keep_dim):
    x = draw.normal(5, 7, 6)
    x = (x.sign() * (1 + 0.1 * x) if mode == "MUL" else x).to(dtype)  # a product of 210 that float16 still holds
    case = num.make_case("reduction", {"x": x}, {"mode": mode, "axis": axis, "keep_dim": keep_dim},
                         output_types={"y": TYPES[dtype]})  # fmt: skip
    y, want = case.run(strided=True)["y"], case.oracle()["y"]
    num.assert_close(y, want, plain_reduction(x, mode, axis, keep_dim), f"seed {draw.seed}")


def plain_reduction(x, mode, axis, keep_dim):
    for a in sorted(axis, reverse=True) if mode == "MUL" else ():
        x = x.prod(dim=a, keepdim=keep_dim)
    return {
        "ADD": lambda: x.sum(dim=axis, keepdim=keep_dim),
        "MUL": lambda: x,
        "MIN": lambda: x.amin(dim=axis, keepdim=keep_dim),
        "MAX": lambda: x.amax(dim=axis, keepdim=keep_dim),
        "AMAX": lambda: x.abs().amax(dim=axis, keepdim=keep_dim),
        "AVG": lambda: x.mean(dim=axis, keepdim=keep_dim),
        "NORM1": lambda: x.abs().sum(dim=axis, keepdim=keep_dim),
        "NORM2": lambda: torch.linalg.vector_norm(x, dim=axis, keepdim=keep_dim),
    }[mode]()


@pytest.mark.parametrize("mode", REDUCTION_MODES)
def test_reduction_of_nothing(num, mode):
    case = num.make_case("reduction", {"x": torch.zeros(0, 3)}, {"mode": mode, "axis": (0,)})
    y, want = case.run()["y"], case.oracle()["y"]
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y[~y.isnan()].double(), want[~want.isnan()])
    assert y.tolist()[0] == {"MUL": 1.0, "MIN": math.inf, "MAX": -math.inf}.get(mode, 0.0) or mode == "AVG"


@pytest.mark.parametrize("mode", ["MIN", "MAX", "AMAX", "ADD"])
def test_reduction_propagates_nan(num, mode):
    x = torch.tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0]])
    assert num.make_case("reduction", {"x": x}, {"mode": mode, "axis": (1,)}).run()["y"].isnan().tolist() == [
        True,
        False,
    ]
