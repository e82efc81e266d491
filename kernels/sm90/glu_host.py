"""Host side of the forward kernel: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import launching
from .compiling import Functions
from .config import padded_bytes
from .glu_arguments import glu_arguments
from .glu_config import GluConfig, has_tiles, illegal, scale_bytes, scratch_tensors

if TYPE_CHECKING:
    import torch

KERNEL = "grouped GEMM + GLU"
FUNCTIONS = Functions("glu_entry", illegal)
ACTIVATION = ("d", "q_row", "q_col")
"""Outputs of which one at least is there: the activation, as it is or in codes."""
OUTPUTS = ("h", *ACTIVATION, "sf_row", "sf_col")
"""Outputs: zero where there is no row."""


def workspace_bytes(config: GluConfig, L: int) -> int:
    """Bytes of scratch memory one launch needs for L experts."""
    return sum(padded_bytes(rows, columns) for _, rows, columns in scratch_tensors(config, L))


def prepare(config: GluConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = FUNCTIONS.of(config), glu_arguments(config)
    tensors = {name: launching.as_bytes(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    activation = next(argument.name for argument in arguments if argument.name in ACTIVATION)
    given = launching.present(KERNEL, arguments, tensors, {"x": 2, activation: 2, "offsets": 1})
    x = given["x"]
    (M, K), N, L, device = x.shape, given[activation].shape[1], given["offsets"].shape[0], x.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    needed = {"workspace": workspace_bytes(config, L)}
    needed |= {f"sf_{side}": size for side, size in scale_bytes(config, M, N).items()}
    wrong = illegal(config, n=N, k=K) + launching.misfits(arguments, given, sizes, needed, device)
    launching.refuse(KERNEL, wrong)
    if not has_tiles(config, M):
        outputs = [given[name][: needed.get(name)] for name in OUTPUTS if name in given]
        return functools.partial(launching.zero, outputs)
    return launching.bound(function, arguments, given, sizes, config.schedule, device)


def launch(
    config: GluConfig,
    *,
    x: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (L, K, 2N), or (L, K, N), or (L,) int64 addresses of (K, 2N) buffers
    offsets: torch.Tensor,  # (L,) int32 end offsets
    d: torch.Tensor | None = None,  # (M, N)
    b_up: torch.Tensor | None = None,  # (L, K, N)
    h: torch.Tensor | None = None,  # (M, 2N)
    prob: torch.Tensor | None = None,  # (M,) float32
    alpha: torch.Tensor | None = None,  # (L,) float32
    bias: torch.Tensor | None = None,  # (L, 2N)
    q_row: torch.Tensor | None = None,  # (M, N) codes
    sf_row: torch.Tensor | None = None,  # scales as one contiguous buffer
    q_col: torch.Tensor | None = None,  # (M, N) codes
    sf_col: torch.Tensor | None = None,  # scales as one contiguous buffer
    workspace: torch.Tensor | None = None,  # uint8, `workspace_bytes`
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    The configuration says which tensors are present. Rows at or past offsets[-1] of h, d and the codes become zero; so
    do bytes of the scale buffers that belong to no row where `glu_config.zeroes_scales`, or they are not written.
    Raises as `prepare`.
    """
    prepare(config, {"x": x, "b": b, "b_up": b_up, "offsets": offsets, "d": d, "h": h, "prob": prob, "alpha": alpha,
                     "bias": bias, "q_row": q_row, "sf_row": sf_row, "q_col": q_col, "sf_col": sf_col,
                     "workspace": workspace})()  # fmt: skip
