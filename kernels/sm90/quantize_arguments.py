"""What a launch of the quantize kernel passes, see arguments.py. Imports neither torch nor the DSL."""

from __future__ import annotations

from .arguments import Argument, matrix, memory, vector
from .quantize_config import PIECE, QuantizeConfig, sides


def quantize_arguments(config: QuantizeConfig) -> tuple[Argument, ...]:
    """The tensors of one configuration, in the order of the launch; names as `quantize_host.launch` has them."""
    out = [matrix("x", config.x_dtype, "M", "N", 4 if config.x_dtype == "fp32" else 8)]
    norms = {"row": config.has_norm_row, "col": config.has_norm_col}
    for side in sides(config):
        out += [vector(f"norm_const_{side}", "fp32", 1)] * norms[side]
        out += [matrix(f"q_{side}", "byte", "M", "N", PIECE, PIECE), memory(f"sf_{side}")]
    return tuple(out)
