"""What a launch of the plain grouped GEMM passes, see arguments.py. Imports neither torch nor the DSL."""

from __future__ import annotations

from .arguments import Argument, matrix, memory, vector, weights
from .gemm_config import GemmConfig, scratch_tensors


def gemm_arguments(config: GemmConfig) -> tuple[Argument, ...]:
    """The tensors of one configuration, in the order of the launch; names as `gemm_host.launch` has them."""
    out = [
        matrix("a", config.ab_dtype, "M", "K"),
        weights("b", config.ab_dtype, config.b_major, config.discrete_b),
        vector("offsets", "int32", "L"),
        matrix("y", config.y_dtype, "M", "N"),
    ]
    out += [vector("alpha", "fp32", "L")] * config.has_alpha
    if config.bias_dtype:
        out.append(matrix("bias", config.bias_dtype, "L", "N"))
    return (*out, *[memory("workspace", 128)] * bool(scratch_tensors(config, 1)))
