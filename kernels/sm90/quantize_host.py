"""Host side of the quantize kernel: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..streams import on_device
from . import launching
from .arguments import words_of
from .compiling import Functions
from .quantize_arguments import quantize_arguments
from .quantize_config import QuantizeConfig, illegal, scale_bytes

if TYPE_CHECKING:
    import torch

KERNEL = "quantize"
FUNCTIONS = Functions("quantize_entry", illegal)


def extents(M: int, N: int) -> dict[str, int]:
    """The extents by the names of `arguments.SIZES`: no matmul, no experts."""
    return {"M": M, "K": 0, "N": N, "2N": 2 * N, "L": 0}


def prepare(config: QuantizeConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = FUNCTIONS.of(config), quantize_arguments(config)
    tensors = {name: launching.as_bytes(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    given = launching.present(KERNEL, arguments, tensors, {"x": 2})
    (M, N), device = given["x"].shape, given["x"].device
    needed = {f"sf_{side}": size for side, size in scale_bytes(config, M, N).items()}
    sizes = extents(M, N)
    wrong = illegal(config, n=N) + launching.misfits(arguments, given, sizes, needed, device)
    launching.refuse(KERNEL, wrong)
    if M == 0:
        return lambda: None
    opened = {a.name: a.opened(given[a.name].shape, given[a.name].stride()) for a in arguments}
    return on_device(functools.partial(function, *words_of(arguments, sizes, 1, opened).at(given)), device)


def launch(
    config: QuantizeConfig,
    *,
    x: torch.Tensor,  # (M, N)
    q_row: torch.Tensor | None = None,  # (M, N), 8 bits
    sf_row: torch.Tensor | None = None,  # `scale_bytes`
    norm_const_row: torch.Tensor | None = None,  # (1,) float32
    q_col: torch.Tensor | None = None,  # (M, N), 8 bits
    sf_col: torch.Tensor | None = None,  # `scale_bytes`
    norm_const_col: torch.Tensor | None = None,  # (1,) float32
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing.

    The configuration says which tensors are present. Every byte of codes and scales is written. Raises as `prepare`.
    """
    prepare(config, {"x": x, "q_row": q_row, "sf_row": sf_row, "norm_const_row": norm_const_row, "q_col": q_col,
                     "sf_col": sf_col, "norm_const_col": norm_const_col})()  # fmt: skip
