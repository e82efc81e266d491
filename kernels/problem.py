"""Problem: what one fused kernel is asked to do. Rules build it, support conditions read it, adapters run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graph_ops.ir.tensor import TensorSpec


@dataclass(frozen=True)
class Role:
    """One tensor that a fused kernel may read or write, by the name that adapters, reasons and plans use."""

    name: str
    doc: str
    is_output: bool = False
    optional: bool = True


_MATMUL = (
    Role("a", "(M, K) rows", optional=False),
    Role("b", "(L, K, N) weights, dense or discrete", optional=False),
    Role("sf_a", "scales of a's codes, along K"),
    Role("sf_b", "scales of b's codes, along K"),
    Role("offsets", "(L,) end offsets", optional=False),
    Role("alpha", "(L,) scale of the product"),
)
_QUANTIZED = (
    Role("norm_const_row", "(1,) factor of the row-quantized output"),
    Role("norm_const_col", "(1,) factor of the column-quantized output"),
    Role("q_row", "codes with scales along rows", is_output=True),
    Role("sf_row", "their scales", is_output=True),
    Role("q_col", "codes with scales along columns", is_output=True),
    Role("sf_col", "their scales", is_output=True),
)

ROLES: dict[str, tuple[Role, ...]] = {
    "grouped_gemm_dglu": (
        *_MATMUL,
        Role("c", "(M, 2N) saved pre-activation", optional=False),
        Role("prob", "(M,) router probability"),
        Role("beta", "(L,) scale of c"),
        Role("d", "(M, 2N) gradient of the pre-activation", is_output=True),
        Role("dprob", "(M,) gradient of prob", is_output=True),
        Role("activation", "(M, N) recomputed activation", is_output=True),
        Role("dbias", "(L, 2N) bias gradient", is_output=True),
        Role("amax", "(L, 2) or (L,) largest magnitude of d", is_output=True),
        *_QUANTIZED,
    ),
    "grouped_gemm_glu": (
        *_MATMUL,
        Role("b_up", "(L, K, N) weights of up, where b has those of the gate alone"),
        Role("bias", "(L, 2N) bias of the product"),
        Role("prob", "(M,) router probability"),
        Role("c", "(M, 2N) pre-activation, written when it is an output", is_output=True),
        Role("d", "(M, N) activation", is_output=True),
        Role("dbias", "(L, N) column sums of d per expert", is_output=True),
        Role("amax", "(L,) largest magnitude of d", is_output=True),
        *_QUANTIZED,
    ),
    "grouped_gemm_quant": (
        *_MATMUL,
        Role("bias", "(L, N) bias of the product"),
        Role("prob", "(M,) factor of each row"),
        Role("d", "(M, N) product", is_output=True),
        Role("dbias", "(L, N) column sums of d per expert", is_output=True),
        Role("amax", "(L,) largest magnitude of d", is_output=True),
        *_QUANTIZED,
    ),
    "grouped_gemm": (
        *(role for role in _MATMUL if not role.name.startswith("sf_")),
        Role("bias", "(L, N) bias of the product"),
        Role("y", "(M, N) product", is_output=True, optional=False),
    ),
    "grouped_gemm_wgrad": (
        Role("a", "(M, K) rows", optional=False),
        Role("dy", "(M, N) gradient rows", optional=False),
        Role("offsets", "(L,) end offsets", optional=False),
        Role("sf_a", "scales of a's codes"),
        Role("sf_dy", "scales of dy's codes"),
        Role("dw", "(L, K, N) weight gradient", is_output=True, optional=False),
    ),
    "quantize_row_col": (
        Role("x", "(M, N) values", optional=False),
        *_QUANTIZED,
    ),
    "quantize": (
        Role("x", "(M, N) values", optional=False),
        *_QUANTIZED,
    ),
}
"""The roles of each rule, in the order in which plans list them."""


@dataclass(frozen=True)
class Problem:
    """A request to one fused kernel.

    `rule` is a rule id; `tensors` has the TensorSpec of each role that is present (a role that is absent is not
    asked for). `attributes` are those of the absorbed nodes (activation and its parameters, alpha_exponent, ...) and
    `rounding`: the data type at which each absorbed virtual tensor rounds, by role or value name. A kernel that rounds
    elsewhere must decline.
    """

    rule: str
    tensors: Mapping[str, TensorSpec]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    rounding: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False

    def __contains__(self, role: str) -> bool:
        return role in self.tensors

    def __getitem__(self, role: str) -> TensorSpec:
        return self.tensors[role]

    def get(self, role: str) -> TensorSpec | None:
        return self.tensors.get(role)
