"""Gated linear units, their derivative, and the movement of gate and up columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..dims import Dim, Expression, known_divisor
from ..dtypes import DataType
from ..layouts import GluLayout
from ..op import (
    BOOLEAN,
    FLOATING_TYPES,
    Attribute,
    InferenceInput,
    Inferred,
    OpSpec,
    Port,
    one_of,
    require,
    require_equal,
    require_rank,
)

ACTIVATIONS = ("swiglu", "geglu", "situglu")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _positive_finite(value: Any) -> bool:
    return _number(value) and 0 < value < math.inf


ACTIVATION_PARAMETERS: dict[str, tuple[str, ...]] = {
    "swiglu": (),
    "geglu": ("geglu_alpha", "clamp_min", "clamp_max", "linear_offset"),
    "situglu": ("situ_beta1", "situ_beta2"),
}
"""The parameters that each activation reads; one given to an activation that does not read it is an error."""

ACTIVATION_ATTRIBUTES = (
    Attribute("act", None, "the activation", *one_of(*ACTIVATIONS), required=True),
    Attribute("geglu_alpha", 1.702, "geglu: scale inside the sigmoid", _positive_finite, "positive and finite"),
    Attribute("clamp_min", -7.0, "geglu: lower bound of up (-inf: none)", _number, "a number"),
    Attribute("clamp_max", 7.0, "geglu: upper bound of gate and up (inf: none)", _number, "a number"),
    Attribute("linear_offset", 1.0, "geglu: added to the clamped up", _number, "a number"),
    Attribute("situ_beta1", 4.0, "situglu: range of the gate's tanh", _positive_finite, "positive and finite"),
    Attribute("situ_beta2", 25.0, "situglu: range of up's tanh", _positive_finite, "positive and finite"),
)


def _half(columns: Dim, layout: GluLayout, asked: str) -> Dim:
    """I, for 2I columns that `layout` describes. Raises GraphError unless whole blocks fill them."""
    step = 2 * (layout.width or 1)
    require(known_divisor(columns) % step == 0, "GLU_COLUMNS", asked, columns, f"a multiple of {step} for {layout}")
    if isinstance(columns, int):
        return columns // 2
    half = Expression(tuple((m, c // 2) for m, c in columns.terms))
    require(half * 2 == columns, "GLU_COLUMNS", asked, columns, "an even coefficient on every symbol")
    return half


def _layout(x: InferenceInput, asked: str) -> GluLayout:
    require_rank(x, 2, asked)
    require(x.glu_layout is not None, "GLU_LAYOUT_MISSING", f"{asked} = {x.name}", "a tensor without a GLU layout",
            "glu_layout=GluLayout.interleaved(w) or .concatenated() on the tensor",
            "a layout is never guessed from a shape")  # fmt: skip
    assert x.glu_layout is not None
    return x.glu_layout


def _check_parameters(attributes: Mapping[str, Any]) -> None:
    if attributes["act"] == "geglu":
        low, high = attributes["clamp_min"], attributes["clamp_max"]
        require(low < high, "ATTRIBUTE_VALUE", "geglu clamp_min, clamp_max", (low, high), "clamp_min < clamp_max")


def _check_prob(inputs: Mapping[str, InferenceInput], rows: Dim, asked: str) -> None:
    if prob := inputs.get("prob"):
        shapes = ((rows,), (rows, 1))
        wanted = f"({rows},) or ({rows}, 1), one per row"
        require(prob.dim in shapes, "SHAPE", f"{asked} prob = {prob.name}", prob.dim, wanted)


def _glu(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x = inputs["x"]
    layout = _layout(x, "glu x")
    half = _half(x.dim[1], layout, "glu x")
    _check_parameters(attributes)
    _check_prob(inputs, x.dim[0], "glu")
    return {"y": Inferred((x.dim[0], half))}


def _glu_backward(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    dy, x = inputs["dy"], inputs["x"]
    require_rank(dy, 2, "glu_backward dy")
    layout = _layout(x, "glu_backward x")
    half = _half(x.dim[1], layout, "glu_backward x")
    require(
        dy.dim == (x.dim[0], half), "SHAPE", f"glu_backward dy = {dy.name}", dy.dim, f"({x.dim[0]}, {half}), half of x"
    )
    _check_parameters(attributes)
    _check_prob(inputs, x.dim[0], "glu_backward")
    if beta := inputs.get("beta"):
        require_rank(beta, 1, "glu_backward beta")
        require("offsets" in inputs, "OFFSETS_MISSING", "glu_backward beta", "no offsets",
                "offsets=, to know each row's expert")  # fmt: skip
        require_equal(beta.dim[0], inputs["offsets"].dim[0], "glu_backward beta", "L, as offsets',")
    else:
        require("offsets" not in inputs, "ARGUMENT_UNUSED", "glu_backward offsets", "no beta", "beta= beside offsets=")
    outputs = {"dx": Inferred(x.dim, glu_layout=layout), "dprob": Inferred((x.dim[0],))}
    if attributes["recompute"]:
        outputs["activation"] = Inferred((x.dim[0], half))
    return outputs


def _convert(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x = inputs["x"]
    require(x.glu_layout is not None, "GLU_LAYOUT_MISSING", f"convert_glu_layout x = {x.name}", "no GLU layout",
            "a tensor that says its present layout")  # fmt: skip
    assert x.glu_layout is not None
    require(len(x.dim) > 0, "RANK", f"convert_glu_layout x = {x.name}", f"dim {x.dim}", "rank 1 or more")
    for layout in (x.glu_layout, to := GluLayout.parse(attributes["to"])):
        _half(x.dim[-1], layout, "convert_glu_layout x")
    return {"y": Inferred(x.dim, glu_layout=to)}


def _split(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x = inputs["x"]
    layout = _layout(x, "split_glu x")
    half = _half(x.dim[1], layout, "split_glu x")
    return {"gate": Inferred((x.dim[0], half)), "up": Inferred((x.dim[0], half))}


def _join(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    gate, up = inputs["gate"], inputs["up"]
    require_rank(gate, 2, "join_glu gate")
    require(gate.dim == up.dim, "SHAPE", "join_glu up", up.dim, f"{gate.dim}, as gate")
    layout = GluLayout.parse(attributes["layout"])
    columns = 2 * gate.dim[1]
    _half(columns, layout, "join_glu")
    return {"x": Inferred((gate.dim[0], columns), glu_layout=layout)}


def _is_layout(value: Any) -> bool:
    return isinstance(value, str) and (value == "concatenated" or value.startswith("interleaved("))


_PROB = Port("prob", "(M,) or (M, 1) router probability of each row", (DataType.FLOAT,), optional=True)

GLU = OpSpec(
    name="glu",
    doc="(M, 2I) -> (M, I): gated activation, times the row's probability. After a grouped matmul, rows of no expert "
    "are zero whatever prob holds there.",
    formula=(
        "swiglu: prob*up*gate*sigmoid(gate); geglu: prob*(y2+offset)*y1*sigmoid(alpha*y1), y1 = min(gate, clamp_max), "
        "y2 = clamp(up); situglu: prob * b1*tanh(gate/b1)*sigmoid(gate) * b2*tanh(up/b2)"
    ),
    inputs=(Port("x", "(M, 2I) pre-activation with a GLU layout"), _PROB),
    outputs=(Port("y", "(M, I)"),),
    attributes=ACTIVATION_ATTRIBUTES,
    infer=_glu,
)

GLU_BACKWARD = OpSpec(
    name="glu_backward",
    doc="(M, I), (M, 2I) -> dx (M, 2I), dprob (M,), and with recompute the forward's activation (M, I). After a "
    "grouped matmul, or with offsets, rows of no expert are zero whatever x and prob hold there.",
    formula=(
        "x first multiplied by beta[g]; swiglu: dup = dy*prob*gate*s, dgate = dy*prob*up*s*(1+gate*(1-s)), dprob = "
        "sum_n dy*gate*s*up; dx is the derivative by the scaled x; activation = glu(scaled x, prob); geglu and situglu "
        "as numerics gives them, masks 0/1 with equality kept"
    ),
    inputs=(
        Port("dy", "(M, I) gradient of the activation"),
        Port("x", "(M, 2I) saved pre-activation with a GLU layout"),
        _PROB,
        Port("beta", "(L,) scale of x per expert", (DataType.FLOAT,), optional=True),
        Port(
            "offsets", "(L,) end offsets, given exactly when beta is", (DataType.INT32, DataType.INT64), optional=True
        ),
    ),
    outputs=(
        Port("dx", "(M, 2I), the layout of x"),
        Port("dprob", "(M,) gradient of prob", default_type=DataType.FLOAT),
        Port("activation", "(M, I), only with recompute", optional=True),
    ),
    attributes=(*ACTIVATION_ATTRIBUTES, Attribute("recompute", False, "also give the forward's activation", *BOOLEAN)),
    infer=_glu_backward,
)

CONVERT_GLU_LAYOUT = OpSpec(
    name="convert_glu_layout",
    doc="Reorders gate and up columns of the last axis from the tensor's layout to `to`.",
    formula="a permutation of columns",
    inputs=(Port("x", "(..., 2I)", FLOATING_TYPES),),
    outputs=(Port("y", "(..., 2I)"),),
    attributes=(Attribute("to", None, "the layout to give", _is_layout, "a GLU layout's text", required=True),),
    infer=_convert,
)

SPLIT_GLU = OpSpec(
    name="split_glu",
    doc="(M, 2I) -> gate (M, I), up (M, I).",
    formula="the gate columns and the up columns, each in order",
    inputs=(Port("x", "(M, 2I) with a GLU layout"),),
    outputs=(Port("gate", "(M, I)"), Port("up", "(M, I)")),
    infer=_split,
)

JOIN_GLU = OpSpec(
    name="join_glu",
    doc="gate (M, I), up (M, I) -> (M, 2I) in `layout`.",
    formula="the inverse of split_glu",
    inputs=(Port("gate", "(M, I)"), Port("up", "(M, I)")),
    outputs=(Port("x", "(M, 2I)"),),
    attributes=(Attribute("layout", None, "the layout to give", _is_layout, "a GLU layout's text", required=True),),
    infer=_join,
)

OPS = (GLU, GLU_BACKWARD, CONVERT_GLU_LAYOUT, SPLIT_GLU, JOIN_GLU)
