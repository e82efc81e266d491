"""Host side of the forward kernel: compile a configuration once, launch it with plain torch tensors."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..streams import on_device
from .arguments import refusal, words_of
from .config import padded_bytes
from .glu_arguments import glu_arguments
from .glu_config import GluConfig, illegal, scratch_tensors
from .host import UnsupportedConfig, _multiprocessors

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_functions: dict[GluConfig, Callable] = {}


def workspace_bytes(config: GluConfig, L: int) -> int:
    """Bytes of scratch memory one launch needs for L experts."""
    return sum(padded_bytes(rows, columns) for _, rows, columns in scratch_tensors(config, L))


def compile_glu(config: GluConfig) -> Callable:
    """Compiles a configuration for sm_90a (no GPU needed) and returns the function object.

    Raises UnsupportedConfig with every reason when the configuration is not legal.
    """
    reasons = illegal(config)
    if reasons:
        raise UnsupportedConfig("; ".join(reasons))
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from .glu_entry import compile_entry

    return compile_entry(config)


def install(config: GluConfig, function: Callable) -> None:
    """Makes `launch` use a function that was compiled or loaded elsewhere."""
    with _lock:
        _functions[config] = function


def function_of(config: GluConfig) -> Callable:
    """The function of a configuration, compiled at most once in this process."""
    function = _functions.get(config)
    if function is None:
        with _lock:
            function = _functions.get(config)
            if function is None:
                function = _functions[config] = compile_glu(config)
    return function


def prepare(config: GluConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = function_of(config), glu_arguments(config)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    names = {argument.name for argument in arguments}
    wrong = [f"{name} is missing" for name in sorted(names - set(given))]
    # A workspace may be there for other configurations.
    wrong += [f"{name} is given, and not configured" for name in sorted(set(given) - names - {"workspace"})]
    _refuse(wrong)
    x, d, offsets = (given[name] for name in ("x", "d", "offsets"))
    ranks = {"x": (x, 2), "d": (d, 2), "offsets": (offsets, 1)}
    _refuse([f"{n} has shape {tuple(t.shape)}; required is rank {r}" for n, (t, r) in ranks.items() if t.dim() != r])
    (M, K), N, L, device = x.shape, d.shape[1], offsets.shape[0], x.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    wrong = illegal(config, n=N, k=K)
    wrong += [text for argument in arguments if (text := refusal(argument, given[argument.name], sizes, device))]
    if "workspace" in names and given["workspace"].numel() < workspace_bytes(config, L):
        wrong.append(f"workspace has {given['workspace'].numel()} bytes; required are {workspace_bytes(config, L)}")
    _refuse(wrong)
    if M == 0:
        return lambda: None
    opened = {a.name: a.opened(given[a.name].shape, given[a.name].stride()) for a in arguments}
    words = words_of(arguments, sizes, clusters(config, device), opened).at(given)
    return on_device(functools.partial(function, *words), device)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError("launch of the sm90 grouped GEMM + GLU: " + "; ".join(wrong))


def clusters(config: GluConfig, device: torch.device) -> int:
    """Clusters of one launch: as many as the device holds at a time."""
    return _multiprocessors(device.index) // config.schedule.cluster_size


def launch(
    config: GluConfig,
    *,
    x: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (L, K, 2N), or (L,) int64 addresses of (K, 2N) buffers
    offsets: torch.Tensor,  # (L,) int32 end offsets
    d: torch.Tensor,  # (M, N)
    h: torch.Tensor | None = None,  # (M, 2N)
    prob: torch.Tensor | None = None,  # (M,) float32
    alpha: torch.Tensor | None = None,  # (L,) float32
    bias: torch.Tensor | None = None,  # (L, 2N)
    workspace: torch.Tensor | None = None,  # uint8, `workspace_bytes`
) -> None:
    """Runs one configuration on torch's current stream; allocates nothing, waits for nothing, reads no offset.

    The configuration says which tensors are present. Rows at or past offsets[-1] of h and d become zero.
    Raises as `prepare`.
    """
    prepare(config, {"x": x, "b": b, "offsets": offsets, "d": d, "h": h, "prob": prob, "alpha": alpha, "bias": bias,
                     "workspace": workspace})()  # fmt: skip
