"""Grouped matrix products: the rows of expert g are `[offsets[g-1], offsets[g])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dtypes import MATMUL_TYPES, DataType
from ..op import (
    BOOLEAN,
    FLOATING_TYPES,
    INDEX_TYPES,
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

OFFSETS_DOC = "(L,) end offsets of the experts' rows, non-decreasing, last at most M"


def require_offsets(offsets: InferenceInput, asked: str) -> None:
    require_rank(offsets, 1, f"{asked} offsets")


def _grouped_matmul(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    a, b, offsets = inputs["a"], inputs["b"], inputs["offsets"]
    require_rank(a, 2, "grouped_matmul a")
    require_rank(b, 3, "grouped_matmul b")
    require_offsets(offsets, "grouped_matmul")
    experts, k, n = b.dim
    require_equal(a.dim[1], k, f"grouped_matmul a = {a.name}", "its K, as b's,")
    require_equal(offsets.dim[0], experts, f"grouped_matmul offsets = {offsets.name}", "L")
    if alpha := inputs.get("alpha"):
        require(alpha.dim == (experts,), "SHAPE", "grouped_matmul alpha", alpha.dim, f"({experts},), one per expert")
    if bias := inputs.get("bias"):
        require(bias.dim == (experts, n), "SHAPE", "grouped_matmul bias", bias.dim, f"({experts}, {n})")
    layouts = {t.glu_layout for t in (b, bias) if t is not None and t.glu_layout is not None}
    require(len(layouts) <= 1, "GLU_LAYOUT", "grouped_matmul b, bias", sorted(map(str, layouts)),
            "columns in one GLU layout", "convert_glu_layout brings one to the other")  # fmt: skip
    return {"y": Inferred((a.dim[0], n), glu_layout=next(iter(layouts), None))}


def _grouped_matmul_wgrad(inputs: Mapping[str, InferenceInput], attributes: Mapping[str, Any]) -> dict[str, Inferred]:
    a, dy, offsets = inputs["a"], inputs["dy"], inputs["offsets"]
    require_rank(a, 2, "grouped_matmul_wgrad a")
    require_rank(dy, 2, "grouped_matmul_wgrad dy")
    require_offsets(offsets, "grouped_matmul_wgrad")
    require_equal(dy.dim[0], a.dim[0], f"grouped_matmul_wgrad dy = {dy.name}", "rows M, as a's,")
    return {"dw": Inferred((offsets.dim[0], a.dim[1], dy.dim[1]), glu_layout=dy.glu_layout)}


GROUPED_MATMUL = OpSpec(
    name="grouped_matmul",
    doc="(M, K) x (L, K, N) -> (M, N): each row times the matrix of its expert.",
    formula="y[m,n] = alpha[g]**alpha_exponent * sum_k a[m,k] b[g,k,n] + bias[g,n]; rows outside every group are zero",
    inputs=(
        Port("a", "(M, K) rows, grouped by expert", MATMUL_TYPES),
        Port("b", "(L, K, N) weights, any strides, dense or discrete; y's columns have their GLU layout", MATMUL_TYPES),
        Port("offsets", OFFSETS_DOC, INDEX_TYPES),
        Port("alpha", "(L,) scale of each expert's product", (DataType.FLOAT,), optional=True),
        Port("bias", "(L, N) added to each row of its expert", FLOATING_TYPES, optional=True),
    ),
    outputs=(Port("y", "(M, N)"),),
    attributes=(Attribute("alpha_exponent", 1, "1: forward contract, 2: dGLU contract", *one_of(1, 2)),),
    infer=_grouped_matmul,
)

GROUPED_MATMUL_WGRAD = OpSpec(
    name="grouped_matmul_wgrad",
    doc="(M, K), (M, N) -> (L, K, N): the weight gradient of each expert.",
    formula="dw[g] = a[rows of g]^T dy[rows of g]; zero for an empty expert. accumulate: dw[g] += the same, in place",
    inputs=(
        Port("a", "(M, K)", MATMUL_TYPES),
        Port("dy", "(M, N)", MATMUL_TYPES),
        Port("offsets", OFFSETS_DOC, INDEX_TYPES),
    ),
    outputs=(Port("dw", "(L, K, N), the GLU layout of dy"),),
    attributes=(Attribute("accumulate", False, "add to what the output buffer holds", *BOOLEAN),),
    infer=_grouped_matmul_wgrad,
    reads_output=lambda attributes: ("dw",) if attributes["accumulate"] else (),
)

OPS = (GROUPED_MATMUL, GROUPED_MATMUL_WGRAD)
