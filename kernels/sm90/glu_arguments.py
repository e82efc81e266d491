"""What a launch of the forward kernel passes, see arguments.py. Imports neither torch nor the DSL."""

from __future__ import annotations

from .arguments import Argument, matrix, memory, vector, weights
from .glu_config import GluConfig, scratch_tensors


def glu_arguments(config: GluConfig) -> tuple[Argument, ...]:
    """The tensors of one configuration, in the order of the launch; names as `glu_host.launch` has them."""
    out = [
        matrix("x", config.ab_dtype, "M", "K"),
        *_weights(config),
        vector("offsets", "int32", "L"),
    ]
    if config.h_dtype:
        out.append(matrix("h", config.h_dtype, "M", "2N"))
    if config.d_dtype:
        out.append(matrix("d", config.d_dtype, "M", "N"))
    for name, size, present in (("prob", "M", config.has_prob), ("alpha", "L", config.has_alpha)):
        out += [vector(name, "fp32", size)] * present
    if config.bias_dtype:
        out.append(matrix("bias", config.bias_dtype, "L", "2N"))
    for side, codes in (("row", config.q_row_dtype), ("col", config.q_col_dtype)):
        if codes:
            out += [matrix(f"q_{side}", "byte", "M", "N", 16), memory(f"sf_{side}")]
    return (*out, *[memory("workspace", 128)] * bool(scratch_tensors(config, 1)))


def _weights(config: GluConfig) -> tuple[Argument, ...]:
    names, columns = (("b", "b_up"), "N") if config.separate_up else (("b",), "2N")
    return tuple(weights(name, config.ab_dtype, config.b_major, config.discrete_b, columns) for name in names)
