"""Reductions over the rows of each expert: bias gradient and amax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dtypes import DataType
from ..op import BOOLEAN, INDEX_TYPES, Attribute, InferenceInput, Inferred, OpSpec, Port, require, require_rank
from .matmul import OFFSETS_DOC, require_offsets


def _group_sum(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x, offsets = inputs["x"], inputs["offsets"]
    require_rank(x, 2, "group_sum x")
    require_offsets(offsets, "group_sum")
    return {"y": Inferred((offsets.dim[0], x.dim[1]), glu_layout=x.glu_layout)}


def _group_amax(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    x, offsets = inputs["x"], inputs["offsets"]
    require_rank(x, 2, "group_amax x")
    require_offsets(offsets, "group_amax")
    if not attributes["split_glu"]:
        return {"y": Inferred((offsets.dim[0],))}
    require(x.glu_layout is not None, "GLU_LAYOUT_MISSING", f"group_amax x = {x.name}", "no GLU layout",
            "a tensor with a GLU layout, for split_glu=True")  # fmt: skip
    return {"y": Inferred((offsets.dim[0], 2))}


GROUP_SUM = OpSpec(
    name="group_sum",
    doc="(M, N) -> (L, N): sum of each expert's rows (a bias gradient).",
    formula="y[g,n] = sum over rows m of g of x[m,n], in float32, rounded once; zero for an empty expert",
    inputs=(Port("x", "(M, N)"), Port("offsets", OFFSETS_DOC, INDEX_TYPES)),
    outputs=(Port("y", "(L, N)"),),
    infer=_group_sum,
)

GROUP_AMAX = OpSpec(
    name="group_amax",
    doc="(M, N) -> (L,), or (L, 2) for gate and up apart: largest magnitude in each expert's rows.",
    formula="y[g] = max over rows m of g and n of |x[m,n]|; zero for an empty expert; NaN if a value is NaN",
    inputs=(Port("x", "(M, N)"), Port("offsets", OFFSETS_DOC, INDEX_TYPES)),
    outputs=(Port("y", "(L,) or (L, 2)", default_type=DataType.FLOAT),),
    attributes=(Attribute("split_glu", False, "gate columns in [:,0], up columns in [:,1]", *BOOLEAN),),
    infer=_group_amax,
)

OPS = (GROUP_SUM, GROUP_AMAX)
