"""Host side of the grouped weight gradient: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import launching
from .compiling import Functions
from .wgrad_arguments import wgrad_arguments
from .wgrad_config import WgradConfig, illegal

if TYPE_CHECKING:
    import torch

KERNEL = "grouped weight gradient"
FUNCTIONS = Functions("wgrad_entry", illegal)


def prepare(config: WgradConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = FUNCTIONS.of(config), wgrad_arguments(config)
    given = launching.present(KERNEL, arguments, tensors, {"a": 2, "dy": 2, "offsets": 1, "dw": 3})
    a, dw = given["a"], given["dw"]
    (M, K), N, L, device = a.shape, given["dy"].shape[1], given["offsets"].shape[0], a.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    wrong = illegal(config, n=N, k=K) + launching.misfits(arguments, given, sizes, {}, device)
    launching.refuse(KERNEL, wrong)
    if M == 0:
        return (lambda: None) if config.accumulate else dw.zero_
    return launching.bound(function, arguments, given, sizes, config.schedule, device)


def launch(
    config: WgradConfig,
    *,
    a: torch.Tensor,  # (M, K)
    dy: torch.Tensor,  # (M, N)
    offsets: torch.Tensor,  # (L,) int32 end offsets
    dw: torch.Tensor,  # (L, K, N)
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    Rows at or past offsets[-1] count as nothing, whatever they hold. Raises as `prepare`.
    """
    prepare(config, {"a": a, "dy": dy, "offsets": offsets, "dw": dw})()
