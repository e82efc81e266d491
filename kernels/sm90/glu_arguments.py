"""What a launch of the forward kernel passes, see arguments.py. Imports neither torch nor the DSL."""

from __future__ import annotations

from .arguments import Argument, matrix, memory, vector
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
    out.append(matrix("d", config.d_dtype, "M", "N"))
    for name, size, present in (("prob", "M", config.has_prob), ("alpha", "L", config.has_alpha)):
        out += [vector(name, "fp32", size)] * present
    if config.bias_dtype:
        out.append(matrix("bias", config.bias_dtype, "L", "2N"))
    return (*out, *[memory("workspace", 128)] * bool(scratch_tensors(config, 1)))


def _weights(config: GluConfig) -> tuple[Argument, ...]:
    if config.discrete_b:
        return (vector("b", "int64", "L", 8),)
    stride = (None, 1, None) if config.b_major == "k" else (None, None, 1)
    names, columns = (("b", "b_up"), "N") if config.separate_up else (("b",), "2N")
    return tuple(Argument(name, config.ab_dtype, ("L", "K", columns), stride, 8, 16) for name in names)
