"""Host side: compile a configuration once, launch it on torch's current stream."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..streams import on_device
from .arguments import dglu_arguments, refusal, words_of
from .config import DgluConfig, illegal, padded_bytes, scratch_tensors

if TYPE_CHECKING:
    import torch

ENTRY = "opfuse_sm90_dglu"  # symbol of an exported object
OUTPUTS = ("d", "dprob", "activation", "dbias", "amax", "q_row", "sf_row", "q_col", "sf_col")
"""Outputs: zero where there is no row."""
_lock = threading.Lock()
_functions: dict[DgluConfig, Callable] = {}


class UnsupportedConfig(ValueError):
    """A configuration that `config.illegal` declines, with every reason, or the compiler, with what it said."""


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


def compile_dglu(config: DgluConfig) -> Callable:
    """Compiles a configuration for sm_90a (no GPU needed) and returns the function object.

    Raises UnsupportedConfig with every reason when the configuration is not legal, or where the compiler fails on it.
    """
    reasons = illegal(config)
    if reasons:
        raise UnsupportedConfig("; ".join(reasons))
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from cutlass.base_dsl.common import DSLBaseError

    from .entry import compile_entry

    try:
        return compile_entry(config)
    except DSLBaseError as error:
        plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        raise UnsupportedConfig(f"the compiler fails: {plain}") from error


def export_object(function: Any) -> bytes:
    """A compiled function as the bytes of a relocatable object, for a cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dglu.o")
        function.export_to_c(str(path), function_name=ENTRY)
        return path.read_bytes()


def load_object(data: bytes) -> Callable:
    """The function of an exported object; needs the DSL's runtime library, not its compiler."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dglu.o")
        path.write_bytes(data)
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)


def install(config: DgluConfig, function: Callable) -> None:
    """Makes `launch` use a function that was compiled or loaded elsewhere."""
    with _lock:
        _functions[config] = function


def function_of(config: DgluConfig) -> Callable:
    """The function of a configuration, compiled at most once in this process."""
    function = _functions.get(config)
    if function is None:
        with _lock:
            function = _functions.get(config)
            if function is None:
                function = _functions[config] = compile_dglu(config)
    return function


@functools.cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def has_tiles(config: DgluConfig, M: int) -> bool:
    """Whether an expert can own a row of M: column quantization has groups of whole 32-row blocks."""
    return M > 0 if config.q_col_dtype is None else M >= 32


def clusters(config: DgluConfig, device: torch.device) -> int:
    """Clusters of one launch: as many as the device holds at a time."""
    return _multiprocessors(device.index) // config.schedule.cluster_size


def prepare(config: DgluConfig, tensors: Mapping[str, torch.Tensor | None]) -> Callable[[], object]:
    """The launch that `launch` does of the same tensors, as a function that may be called while they lie where they
    are: it holds their addresses, not them.

    Raises UnsupportedConfig, and ValueError, which names every tensor that is missing, superfluous, or not of the type,
    shape, strides, alignment or device that the configuration has for it.
    """
    function, arguments = function_of(config), dglu_arguments(config)
    given = {name: _as_bytes(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    names = {argument.name for argument in arguments}
    wrong = [f"{name} is missing" for name in sorted(names - set(given))]
    # A workspace may be there for other configurations.
    wrong += [f"{name} is given, and not configured" for name in sorted(set(given) - names - {"workspace"})]
    _refuse(wrong)
    dy, c, offsets = (given[name] for name in ("dy", "c", "offsets"))
    ranks = {"dy": (dy, 2), "c": (c, 2), "offsets": (offsets, 1)}
    _refuse([f"{n} has shape {tuple(t.shape)}; required is rank {r}" for n, (t, r) in ranks.items() if t.dim() != r])
    (M, K), N, L, device = dy.shape, c.shape[1] // 2, offsets.shape[0], dy.device
    sizes = {"M": M, "K": K, "N": N, "2N": 2 * N, "L": L}
    wrong = illegal(config, n=N, k=K)
    wrong += [text for argument in arguments if (text := refusal(argument, given[argument.name], sizes, device))]
    needed = {"workspace": workspace_bytes(config, L, M, N)}
    needed |= {f"sf_{side}": size for side, size in scale_bytes(config, M, N).items()}
    for name in needed.keys() & names:
        if given[name].numel() < needed[name]:
            wrong.append(f"{name} has {given[name].numel()} bytes; required are {needed[name]}")
    _refuse(wrong)
    if not has_tiles(config, M):
        outputs = {name: given[name] for name in OUTPUTS if name in given}
        return functools.partial(_zero, [output[: needed.get(name)] for name, output in outputs.items()])
    opened = {a.name: a.opened(given[a.name].shape, given[a.name].stride()) for a in arguments}
    words = words_of(arguments, sizes, clusters(config, device), opened).at(given)
    return on_device(functools.partial(function, *words), device)


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError("launch of the sm90 grouped GEMM + dGLU: " + "; ".join(wrong))


def _zero(outputs: Sequence[torch.Tensor]) -> None:
    for output in outputs:
        output.zero_()


def _as_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Codes and scales as bytes, scales in one dimension: their types are the caller's affair."""
    import torch

    if not name.startswith(("q_", "sf_")):
        return tensor
    flat = tensor.view(-1) if name.startswith("sf_") else tensor
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


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
