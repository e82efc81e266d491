"""Host side of the backward kernel: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import launching
from .compiling import Functions
from .config import padded_bytes
from .dglu_arguments import dglu_arguments
from .dglu_config import DgluConfig, illegal, scratch_tensors

if TYPE_CHECKING:
    import torch

KERNEL = "grouped GEMM + dGLU"
FUNCTIONS = Functions("dglu_entry", illegal)
OUTPUTS = ("d", "dprob", "activation", "dbias", "amax", "q_row", "sf_row", "q_col", "sf_col")
"""Outputs: zero where there is no row."""


def workspace_bytes(config: DgluConfig, L: int, M: int, N: int) -> int:
    """Bytes of scratch memory one launch needs: L experts, M rows, N columns of the matmul's result."""
    return sum(padded_bytes(rows, columns) for _, rows, columns in scratch_tensors(config, L, M, N))


def scale_bytes(config: DgluConfig, M: int, N: int) -> dict[str, int]:
    """Bytes of the scale buffers, by side: the 128 x 4 atom's padding included where scales are swizzled.

    Where `zeroes_scales`, the kernel zeroes what belongs to no expert's row; else it writes real scales only, and the
    rest is the caller's to zero.
    """
    sides = {"row": (M, 2 * N // 32), "col": (2 * N, -(-M // 32))}
    if not config.sf_swizzled:
        return {side: rows * blocks for side, (rows, blocks) in sides.items()}
    return {side: -(-rows // 128) * -(-blocks // 4) * 512 for side, (rows, blocks) in sides.items()}


def zeroes_scales(config: DgluConfig, N: int) -> bool:
    """Whether the kernel writes every byte of the scale buffers."""
    return config.sf_swizzled and N % 64 == 0


def has_tiles(config: DgluConfig, M: int) -> bool:
    """Whether an expert can own a row of M: column quantization has groups of whole 32-row blocks."""
    return M > 0 if config.q_col_dtype is None else M >= 32


def prepare(config: DgluConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = FUNCTIONS.of(config), dglu_arguments(config)
    tensors = {name: launching.as_bytes(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    given = launching.present(KERNEL, arguments, tensors, {"dy": 2, "c": 2, "offsets": 1})
    dy = given["dy"]
    (M, K), N, L, device = dy.shape, given["c"].shape[1] // 2, given["offsets"].shape[0], dy.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    needed = {"workspace": workspace_bytes(config, L, M, N)}
    needed |= {f"sf_{side}": size for side, size in scale_bytes(config, M, N).items()}
    wrong = illegal(config, n=N, k=K) + launching.misfits(arguments, given, sizes, needed, device)
    launching.refuse(KERNEL, wrong)
    if not has_tiles(config, M):
        outputs = {name: given[name] for name in OUTPUTS if name in given}
        return functools.partial(launching.zero, [output[: needed.get(name)] for name, output in outputs.items()])
    return launching.bound(function, arguments, given, sizes, config.schedule, device)


def launch(
    config: DgluConfig,
    *,
    dy: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (L, K, N), or (L,) int64 addresses of (K, N) buffers
    offsets: torch.Tensor,  # (L,) int32 end offsets
    c: torch.Tensor,  # (M, 2N)
    d: torch.Tensor | None = None,  # (M, 2N)
    prob: torch.Tensor | None = None,  # (M,) float32
    alpha: torch.Tensor | None = None,  # (L,) float32
    beta: torch.Tensor | None = None,  # (L,) float32
    dprob: torch.Tensor | None = None,  # (M,) float32
    activation: torch.Tensor | None = None,  # (M, N)
    dbias: torch.Tensor | None = None,  # (L, 2N)
    amax: torch.Tensor | None = None,  # (L, 2) float32
    q_row: torch.Tensor | None = None,  # (M, 2N) codes
    sf_row: torch.Tensor | None = None,  # scales as one contiguous buffer
    q_col: torch.Tensor | None = None,  # (M, 2N) codes
    sf_col: torch.Tensor | None = None,  # scales as one contiguous buffer
    workspace: torch.Tensor | None = None,  # uint8, `workspace_bytes`
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    The configuration says which tensors are present. Rows at or past offsets[-1] of d, activation, dprob and the codes
    become zero; so do bytes of the scale buffers that belong to no row where `zeroes_scales`, or they are not written.
    Raises as `prepare`.
    """
    prepare(config, {
        "dy": dy, "b": b, "offsets": offsets, "c": c, "d": d, "prob": prob, "alpha": alpha, "beta": beta,
        "dprob": dprob, "activation": activation, "dbias": dbias, "amax": amax, "q_row": q_row, "sf_row": sf_row,
        "q_col": q_col, "sf_col": sf_col, "workspace": workspace,
    })()  # fmt: skip
