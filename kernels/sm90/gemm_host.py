"""Host side of the plain grouped GEMM: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import launching
from .compiling import Functions
from .config import padded_bytes
from .gemm_arguments import gemm_arguments
from .gemm_config import GemmConfig, illegal, scratch_tensors

if TYPE_CHECKING:
    import torch

KERNEL = "grouped GEMM"
FUNCTIONS = Functions("gemm_entry", illegal)


def workspace_bytes(config: GemmConfig, L: int) -> int:
    """Bytes of scratch memory one launch needs for L experts."""
    return sum(padded_bytes(rows, columns) for _, rows, columns in scratch_tensors(config, L))


def prepare(config: GemmConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = FUNCTIONS.of(config), gemm_arguments(config)
    given = launching.present(KERNEL, arguments, tensors, {"a": 2, "y": 2, "offsets": 1})
    a = given["a"]
    (M, K), N, L, device = a.shape, given["y"].shape[1], given["offsets"].shape[0], a.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    needed = {"workspace": workspace_bytes(config, L)}
    wrong = illegal(config, n=N, k=K) + launching.misfits(arguments, given, sizes, needed, device)
    launching.refuse(KERNEL, wrong)
    if M == 0:
        return lambda: None
    return launching.bound(function, arguments, given, sizes, config.schedule, device)


def launch(
    config: GemmConfig,
    *,
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (L, K, N), or (L,) int64 addresses of (K, N) buffers
    offsets: torch.Tensor,  # (L,) int32 end offsets
    y: torch.Tensor,  # (M, N)
    alpha: torch.Tensor | None = None,  # (L,) float32
    bias: torch.Tensor | None = None,  # (L, N)
    workspace: torch.Tensor | None = None,  # uint8, `workspace_bytes`
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    The configuration says which tensors are present. Rows at or past offsets[-1] of y become zero.
    Raises as `prepare`.
    """
    prepare(config, {"a": a, "b": b, "offsets": offsets, "y": y, "alpha": alpha, "bias": bias,
                     "workspace": workspace})()  # fmt: skip
