"""What a launch of the grouped weight gradient passes, see arguments.py. Imports neither torch nor the DSL."""

from __future__ import annotations

from .arguments import Argument, matrix, vector
from .config import DTYPE_BITS
from .wgrad_config import WgradConfig


def wgrad_arguments(config: WgradConfig) -> tuple[Argument, ...]:
    """The tensors of one configuration, in the order of the launch; names as `wgrad_host.launch` has them."""
    pitch = 128 // DTYPE_BITS[config.dw_dtype]
    return (
        matrix("a", config.ab_dtype, "M", "K"),
        matrix("dy", config.ab_dtype, "M", "N"),
        vector("offsets", "int32", "L"),
        Argument("dw", config.dw_dtype, ("L", "K", "N"), (None, None, 1), pitch, 16),
    )
