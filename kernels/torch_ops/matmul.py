"""Grouped matmuls with cuBLAS and torch.

Three ways, all accumulating in float32 and rounding once:
- torch's grouped_mm on CUDA, where `serves_grouped_mm` holds and nothing comes between accumulator and rounding. It
  allocates its result, so that `MAKE` hands that over where the caller has no buffer of its own: no copy;
- on CUDA otherwise, one batched matmul over tiles of rows (rows.py): at most about twice the rows and the weights,
  but no offset is read on the host, and a FLOAT result is the accumulator itself;
- on the CPU, one matmul per expert.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...graph_ops.ir.errors import GraphNotSupportedError
from ...graph_ops.ir.tensor import TensorSpec
from ..rates import GROUPED_MM_MAJOR
from .precision import exact_float32
from .rows import Tiles, bounds, counts, make_tiles, outside, owner
from .uncovered import device_capability, zero_empty_experts, zero_rows

Inputs = Mapping[str, Any]
Outputs = Mapping[str, torch.Tensor]
Specs = Mapping[str, TensorSpec]

GROUPED_MM_ALIGNMENT = 16  # bytes, of base addresses and of every stride but the unit one: the TMA's unit
GROUPED_MM_EXPERTS = 1024  # groups that one launch takes


def grouped_mm_obstacles(
    rows: Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    out_type: torch.dtype,
    capability: tuple[int, int] | None,
) -> tuple[str, ...]:
    """Every reason why torch's grouped_mm cannot serve; empty where it can.

    `rows`: the operands cut by offsets, each (M, C), stored row by row. `weights`: (L, K, N) of either major, None
    for a weight gradient. `capability`: of the device that runs it, None for the CPU.
    """
    operands = [*rows, *([] if weights is None else [weights])]
    found = []
    if capability is None or capability[0] not in GROUPED_MM_MAJOR:
        found.append(f"device {capability or 'cpu'}: a kernel for compute capability 9.x and 10.x only")
    if any(t.dtype is not torch.bfloat16 for t in operands) or out_type is not torch.bfloat16:
        found.append(f"{[str(t.dtype) for t in operands]} -> {out_type}: bfloat16 throughout only")
    if any(t.numel() == 0 for t in operands):
        found.append("an empty operand")
    if weights is not None and weights.shape[0] >= GROUPED_MM_EXPERTS:
        found.append(f"{weights.shape[0]} experts: fewer than {GROUPED_MM_EXPERTS} only")
    for tensor in operands:
        found += _stride_obstacles(tensor, cut_by_offsets=tensor is not weights)
    return tuple(found)


def _stride_obstacles(tensor: torch.Tensor, cut_by_offsets: bool) -> list[str]:
    size = tensor.element_size()
    *outer, second, last = tensor.stride()
    row_major = last == 1 and second >= tensor.shape[-1]
    column_major = second == 1 and last >= tensor.shape[-2] and not cut_by_offsets
    found = []
    if not (row_major or column_major):
        found.append(f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: one unit stride, no overlap, "
                     + ("row by row" if cut_by_offsets else "either major"))  # fmt: skip
    for stride in (*outer, second if row_major else last):
        if stride * size % GROUPED_MM_ALIGNMENT:
            found.append(f"stride {stride} of {size} bytes: a multiple of {GROUPED_MM_ALIGNMENT} bytes only")
    if tensor.data_ptr() % GROUPED_MM_ALIGNMENT:
        found.append(f"address {tensor.data_ptr():#x}: a multiple of {GROUPED_MM_ALIGNMENT} only")
    return found


def serves_grouped_mm(
    rows: Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    out_type: torch.dtype,
    capability: tuple[int, int] | None,
) -> bool:
    """Whether torch's grouped_mm serves without reading offsets on the host; arguments as for its obstacles."""
    return not grouped_mm_obstacles(rows, weights, out_type, capability)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)  # torch 2.9 has only the private name
    result: torch.Tensor = (public or torch._grouped_mm)(a, b, offs=offsets.to(torch.int32))
    return result


def _capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    return device_capability(tensor.device.index) if tensor.is_cuda else None


def float32_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(T, R, K) x (T, K, N) -> float32 (T, R, N): the accumulator, never rounded to the operands' type."""
    with exact_float32():
        if a.is_cuda and a.dtype is not torch.float32 and a.shape[2] > 0:
            return torch.bmm(a, b, out_dtype=torch.float32)
        return torch.bmm(a.to(torch.float32), b.to(torch.float32))


def tile_height(rows: int, experts: int) -> int:
    """A power of two near the mean number of rows of an expert, so that tiles are at most 2 * L or so."""
    return int(max(16, 2 ** math.ceil(math.log2(max(1, rows / max(1, experts))))))


def tiled_matmul(a: torch.Tensor, b: torch.Tensor, tiles: Tiles, owners: torch.Tensor) -> torch.Tensor:
    """(M, K) x (L, K, N) -> float32 (M, N) by one batched matmul over tiles; rows outside every group are zero."""
    k_major = b.stride(1) == 1
    stored = b.transpose(1, 2) if k_major else b  # gathers whole rows, whichever way they lie
    weights = stored.index_select(0, tiles.expert)
    product = float32_bmm(tiles.gather(a), weights.transpose(1, 2) if k_major else weights)
    return tiles.scatter(product, owners)


def tiled_wgrad(a: torch.Tensor, dy: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """(M, K), (M, N) -> float32 (L, K, N): a batched matmul over tiles, then the sum of each expert's tiles."""
    return tiles.sum(float32_bmm(tiles.gather_zeroed(a).transpose(1, 2), tiles.gather_zeroed(dy)))


def grouped_matmul(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """y[m,n] = alpha[g]**e * sum_k a[m,k] b[g,k,n] + bias[g,n]; rows outside every group are zero."""
    a, offsets, y = inputs["a"], inputs["offsets"], outputs["y"]
    b = dense_weights(inputs["b"], specs["b"], a, y.shape[1])
    if y.numel() == 0:
        return
    if len(b) == 0:
        y.zero_()
    elif not a.is_cuda:
        _matmul_each(a, b, inputs, y, attributes["alpha_exponent"])
    elif not {"alpha", "bias"} & set(inputs) and serves_grouped_mm([a], b, y.dtype, _capability(a)):
        _store_unless(outside(offsets, a.shape[0])[:, None], _grouped_mm(a, b, offsets), y)
    else:
        y.copy_(grouped_matmul_float32(a, b, offsets, inputs, attributes["alpha_exponent"]))


def make_grouped_matmul(inputs: Inputs, out_type: torch.dtype, attributes: Mapping[str, Any], specs: Specs
                        ) -> torch.Tensor | None:  # fmt: skip
    """What `grouped_matmul` computes, in a tensor that torch allocated; None where its grouped_mm does not serve."""
    a, b, offsets = inputs["a"], inputs["b"], inputs["offsets"]
    if {"alpha", "bias"} & set(inputs) or specs["b"].discrete:
        return None
    if not serves_grouped_mm([a], b, out_type, _capability(a)):
        return None
    offsets = offsets.to(torch.int32)
    y = _grouped_mm(a, b, offsets)
    zero_rows(y, offsets)
    return y


def grouped_matmul_float32(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, inputs: Inputs, exponent: int
) -> torch.Tensor:
    """The unrounded result (M, N) over tiles, `alpha` and `bias` of `inputs` applied. M, N and L are not 0."""
    rows, experts = a.shape[0], b.shape[0]
    owners = owner(offsets, rows)
    y = tiled_matmul(a, b, make_tiles(offsets, rows, tile_height(rows, experts)), owners)
    expert = owners.clamp(max=experts - 1)
    if "alpha" in inputs:
        y *= (inputs["alpha"].to(torch.float32) ** exponent)[expert][:, None]
    if "bias" in inputs:
        y += inputs["bias"][expert].masked_fill_((owners == experts)[:, None], 0)
    return y


def _matmul_each(a: torch.Tensor, b: torch.Tensor, inputs: Inputs, y: torch.Tensor, exponent: int) -> None:
    end = 0
    with exact_float32():
        for expert, (start, end) in enumerate(bounds(inputs["offsets"], a.shape[0])):
            if start == end:
                continue
            product = a[start:end].to(torch.float32) @ b[expert].to(torch.float32)
            if "alpha" in inputs:
                product *= inputs["alpha"][expert].to(torch.float32) ** exponent
            if "bias" in inputs:
                product += inputs["bias"][expert]
            y[start:end] = product
    y[end:].zero_()


def grouped_matmul_wgrad(inputs: Inputs, outputs: Outputs, attributes: Mapping[str, Any], specs: Specs) -> None:
    """dw[g] = a[rows of g]^T dy[rows of g], or dw[g] += it; an empty expert gives exact zero, or adds nothing.

    Deterministic on every device. No rows at all still write all of dw.
    """
    a, dy, offsets, dw = inputs["a"], inputs["dy"], inputs["offsets"], outputs["dw"]
    accumulate = attributes["accumulate"]
    if dw.numel() == 0:
        return
    if a.shape[0] == 0:
        if not accumulate:
            dw.zero_()
    elif not a.is_cuda:
        _wgrad_each(a, dy, offsets, dw, accumulate)
    elif not accumulate and serves_grouped_mm([a, dy], None, dw.dtype, _capability(a)):
        _store_unless((counts(offsets) == 0)[:, None, None], _grouped_mm(a.t(), dy, offsets), dw)
    else:
        tiles = make_tiles(offsets, a.shape[0], tile_height(a.shape[0], offsets.shape[0]))
        total = tiled_wgrad(a, dy, tiles)
        dw.copy_(total.add_(dw) if accumulate else total)


def make_grouped_matmul_wgrad(inputs: Inputs, out_type: torch.dtype, attributes: Mapping[str, Any], specs: Specs
                              ) -> torch.Tensor | None:  # fmt: skip
    """What `grouped_matmul_wgrad` computes, in a tensor that torch allocated; None as `make_grouped_matmul`."""
    a, dy, offsets = inputs["a"], inputs["dy"], inputs["offsets"]
    if attributes["accumulate"] or not len(offsets) or not serves_grouped_mm([a, dy], None, out_type, _capability(a)):
        return None
    offsets = offsets.to(torch.int32)
    dw = _grouped_mm(a.t(), dy, offsets)
    zero_empty_experts(dw, offsets)
    return dw


def _wgrad_each(a: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, dw: torch.Tensor, accumulate: bool) -> None:
    with exact_float32():
        for expert, (start, end) in enumerate(bounds(offsets, a.shape[0])):
            if start == end:
                if not accumulate:
                    dw[expert].zero_()
                continue
            product = a[start:end].to(torch.float32).T @ dy[start:end].to(torch.float32)
            dw[expert] = product.add_(dw[expert]) if accumulate else product


def _store_unless(skipped: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """`out` = value, zero where `skipped`: grouped_mm leaves rows and experts without work unwritten."""
    torch.where(skipped, torch.zeros((), dtype=value.dtype, device=value.device), value, out=out)


def dense_weights(b: Any, spec: TensorSpec, a: torch.Tensor, columns: int) -> torch.Tensor:
    """Weights as one (L, K, N) tensor, or as a sequence of (K, N) on the CPU, where no copy is needed.

    `b`: that tensor, a sequence of L matrices, or for a discrete spec an int64 array of their addresses, whose values
    are read on the host.
    """
    b = matrices(b, spec, a.device, (a.shape[1], columns))
    if isinstance(b, (list, tuple)) and a.is_cuda and b:
        return torch.stack(list(b)) if b[0].stride(-1) == 1 else torch.stack([m.t() for m in b]).transpose(1, 2)
    return b  # type: ignore[no-any-return]


class _Memory:
    """Device memory at an address, in the form that torch takes over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def matrices(
    b: Any, spec: TensorSpec, device: torch.device, shape: tuple[int, ...] | None = None
) -> torch.Tensor | Sequence[torch.Tensor]:
    """What holds L matrices: `b` itself, or for an int64 array of addresses a tensor at each, whose values are read on
    the host. `shape`: of one matrix, by default what `spec` declares. GraphNotSupportedError for symbols there."""
    if not (spec.discrete and isinstance(b, torch.Tensor) and b.dtype is torch.int64):
        return b  # type: ignore[no-any-return]
    extents = spec.dim[1:] if shape is None else shape
    if not all(isinstance(e, int) for e in (*extents, *spec.stride[1:])):
        raise GraphNotSupportedError("DISCRETE_STRIDE", asked=f"weights {spec.name} by address",
                                     seen=f"dim {spec.dim}, stride {spec.stride}",
                                     required="integer extents and strides", hint="give L tensors instead")  # fmt: skip
    dtype: torch.dtype = getattr(torch, spec.data_type.info.torch_name)
    packed = spec.data_type.info.packed
    along = spec.packed_axis - 1
    size = tuple(int(e) // (packed if i == along else 1) for i, e in enumerate(extents))  # type: ignore[arg-type]
    stride = tuple(int(s) // (1 if i == along else packed) for i, s in enumerate(spec.stride[1:]))  # type: ignore[arg-type]
    if 0 in size:
        return [torch.empty(size, dtype=dtype, device=device) for _ in range(b.shape[0])]
    nbytes = dtype.itemsize * (1 + sum((e - 1) * s for e, s in zip(size, stride, strict=True)))
    found = []
    for address in b.tolist():
        if device.type == "cuda":
            memory = torch.as_tensor(_Memory(address, nbytes), device=device)
        else:
            memory = torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=torch.uint8)
        found.append(memory.view(dtype).as_strided(size, stride))
    return found


RUN = {"grouped_matmul": grouped_matmul, "grouped_matmul_wgrad": grouped_matmul_wgrad}
MAKE = {"grouped_matmul": make_grouped_matmul, "grouped_matmul_wgrad": make_grouped_matmul_wgrad}
"""Ops of one output that torch may allocate itself."""
