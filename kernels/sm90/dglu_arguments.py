"""What a launch of the grouped GEMM + dGLU kernel passes, as data."""

from __future__ import annotations

from .arguments import Argument, matrix, memory, vector, weights
from .dglu_config import DgluConfig, scratch_tensors


def dglu_arguments(config: DgluConfig) -> tuple[Argument, ...]:
    """The tensors of one configuration, in the order of the launch; names as `dglu_host.launch` has them."""
    out = [
        matrix("dy", config.ab_dtype, "M", "K"),
        weights("b", config.ab_dtype, config.b_major, config.discrete_b),
        vector("offsets", "int32", "L"),
        matrix("c", config.c_dtype, "M", "2N"),
    ]
    if config.d_dtype:
        out.append(matrix("d", config.d_dtype, "M", "2N"))
    for name, size, present in (
        ("prob", "M", config.has_prob), ("alpha", "L", config.has_alpha), ("beta", "L", config.has_beta),
        ("dprob", "M", config.has_dprob),
    ):  # fmt: skip
        out += [vector(name, "fp32", size)] * present
    if config.activation_dtype:
        out.append(matrix("activation", config.activation_dtype, "M", "N"))
    if config.dbias_dtype:
        out.append(matrix("dbias", config.dbias_dtype, "L", "2N", 1, 4))
    out += [matrix("amax", "fp32", "L", 2, 1, 4)] * config.has_amax
    for side, codes in (("row", config.q_row_dtype), ("col", config.q_col_dtype)):
        if codes:
            out += [matrix(f"q_{side}", "byte", "M", "2N", 16), memory(f"sf_{side}")]
    return (*out, *[memory("workspace", 128)] * bool(scratch_tensors(config, 1, 1, 1)))
