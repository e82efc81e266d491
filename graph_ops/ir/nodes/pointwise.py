"""Pointwise ops and reductions in cuDNN's spelling, so that a GLU written from primitives can be recognised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dims import Dim
from ..dtypes import DataType
from ..errors import GraphError
from ..op import BOOLEAN, FLOATING_TYPES, Attribute, Infer, InferenceInput, Inferred, OpSpec, Port, one_of, require

REDUCTION_MODES = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2")
COMPARE_TYPES = (*FLOATING_TYPES, DataType.INT32, DataType.INT64)


def broadcast(shapes: Mapping[str, tuple[Dim, ...]], asked: str) -> tuple[Dim, ...]:
    """The common shape under numpy's rules. Raises GraphError("BROADCAST") where there is none."""
    rank = max(map(len, shapes.values()))
    result: list[Dim] = []
    for axis in range(-rank, 0):
        extents = {s[axis] for s in shapes.values() if len(s) >= -axis} - {1}
        if len(extents) > 1:
            raise GraphError("BROADCAST", asked=asked, seen=dict(shapes), required="shapes that broadcast")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def _pointwise(asked: str, boolean: bool) -> Infer:
    def infer(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
        dim = broadcast({port: t.dim for port, t in inputs.items()}, asked)
        layouts = {t.glu_layout for t in inputs.values() if t.glu_layout is not None and t.dim == dim}
        require(len(layouts) <= 1, "GLU_LAYOUT", asked, sorted(map(str, layouts)), "operands in one GLU layout",
                "convert_glu_layout brings one to the other")  # fmt: skip
        return {"y": Inferred(dim, glu_layout=next(iter(layouts), None),
                              data_type=DataType.BOOLEAN if boolean else None)}  # fmt: skip

    return infer


def _op(
    name: str,
    ports: tuple[str, ...],
    formula: str,
    *,
    commutative: bool = False,
    boolean: bool = False,
    attributes: tuple[Attribute, ...] = (),
    types: Mapping[str, tuple[DataType, ...]] | None = None,
) -> OpSpec:
    types = types or {}
    output = Port("y", "broadcast shape", (DataType.BOOLEAN,) if boolean else FLOATING_TYPES)
    return OpSpec(
        name=name,
        doc=f"Pointwise {name}, operands broadcast as in numpy.",
        formula=formula,
        inputs=tuple(Port(p, "operand", types.get(p, COMPARE_TYPES if boolean else FLOATING_TYPES)) for p in ports),
        outputs=(output,),
        attributes=attributes,
        infer=_pointwise(name, boolean),
        commutative=commutative,
    )


def _reduction(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x = inputs["x"]
    axes = attributes["axis"]
    rank = len(x.dim)
    require(len(set(axes)) == len(axes) and all(0 <= a < rank for a in axes), "AXIS", f"reduction x = {x.name}", axes,
            f"different axes in 0..{rank - 1}")  # fmt: skip
    if attributes["keep_dim"]:
        return {"y": Inferred(tuple(1 if i in axes else d for i, d in enumerate(x.dim)))}
    return {"y": Inferred(tuple(d for i, d in enumerate(x.dim) if i not in axes))}


_SWISH_BETA = Attribute(
    "swish_beta", 1.0, "scale inside the sigmoid", lambda v: isinstance(v, (int, float)), "a number"
)
_APPROXIMATE = Attribute("approximate", "none", "none: erf; tanh: the tanh form", *one_of("none", "tanh"))

POINTWISE = (
    _op("add", ("a", "b"), "a + b", commutative=True),
    _op("sub", ("a", "b"), "a - b"),
    _op("mul", ("a", "b"), "a * b", commutative=True),
    _op("div", ("a", "b"), "a / b"),
    _op("min", ("a", "b"), "min(a, b), NaN if either is", commutative=True),
    _op("max", ("a", "b"), "max(a, b), NaN if either is", commutative=True),
    _op("neg", ("x",), "-x"),
    _op("exp", ("x",), "exp(x)"),
    _op("tanh", ("x",), "tanh(x)"),
    _op("identity", ("x",), "x, rounded to the output's data type"),
    _op("sigmoid", ("x",), "1 / (1 + exp(-x))"),
    _op("swish", ("x",), "x * sigmoid(swish_beta*x)", attributes=(_SWISH_BETA,)),
    _op("swish_backward", ("dy", "x"), "dy * s * (1 + b*x*(1 - s)), s = sigmoid(b*x), b = swish_beta",
        attributes=(_SWISH_BETA,)),
    _op("gelu", ("x",), "x * Phi(x), by erf or by the tanh form", attributes=(_APPROXIMATE,)),
    _op("relu", ("x",), "max(x, 0)"),
    _op("srelu", ("x",), "max(x, 0)**2"),
    _op("cmp_eq", ("a", "b"), "a == b", commutative=True, boolean=True),
    _op("cmp_neq", ("a", "b"), "a != b", commutative=True, boolean=True),
    _op("cmp_gt", ("a", "b"), "a > b", boolean=True),
    _op("cmp_ge", ("a", "b"), "a >= b", boolean=True),
    _op("cmp_lt", ("a", "b"), "a < b", boolean=True),
    _op("cmp_le", ("a", "b"), "a <= b", boolean=True),
    _op("select", ("mask", "a", "b"), "a where mask, else b", types={"mask": (DataType.BOOLEAN,)}),
)  # fmt: skip

REDUCTION = OpSpec(
    name="reduction",
    doc="Reduces `axis` (a tuple) by `mode`, in float32.",
    formula="ADD, MUL, MIN, MAX, AMAX (of |x|), AVG, NORM1 (sum |x|), NORM2 (root of the sum of squares)",
    inputs=(Port("x", "any shape"),),
    outputs=(Port("y", "x's shape without `axis`, or with 1 there"),),
    attributes=(
        Attribute("mode", None, "what to compute", *one_of(*REDUCTION_MODES), required=True),
        Attribute("axis", None, "axes to reduce", lambda v: isinstance(v, tuple) and len(v) > 0
                  and all(isinstance(a, int) for a in v), "a non-empty tuple of axes", required=True),
        Attribute("keep_dim", False, "keep reduced axes as extent 1", *BOOLEAN),
    ),
    infer=_reduction,
)  # fmt: skip

OPS = (*POINTWISE, REDUCTION)
