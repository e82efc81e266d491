"""What a launch passes to a compiled function: integers, laid out as data says.

First `SIZES`, then the number of clusters, then for each tensor its address and those of its extents and strides that
compilation left open, at last the stream. An integer costs a call 0.04 us and a tensor 0.13, which TVM-FFI reads
through DLPack; and integers can be worked out before, where buffers do not move. Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZES = ("M", "K", "N", "2N", "L")
"""Rows, depth, columns of the product, twice as many, experts."""

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int32": "int32", "int64": "int64",
               "byte": "uint8"}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One tensor of a launch: extents by name of SIZES or as numbers, strides in elements, alignment in bytes.

    An extent or a stride of None is given at the launch, a stride as a multiple of `pitch`.
    """

    name: str
    dtype: str
    shape: tuple[str | int | None, ...]
    stride: tuple[int | None, ...]
    pitch: int = 1
    alignment: int = 4

    @property
    def count(self) -> int:
        """How many integers it is."""
        return 1 + self.shape.count(None) + self.stride.count(None)

    def opened(self, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
        """What a launch gives of a tensor with this shape and these strides: the open extents, then the open strides.

        A stride that is never walked, of a single row say, becomes one that is fit for a descriptor.
        """
        extents = [seen for seen, extent in zip(shape, self.shape, strict=True) if extent is None]
        strides = [
            seen if extent > 1 or seen % self.pitch == 0 else self.pitch
            for extent, seen, fixed in zip(shape, stride, self.stride, strict=True) if fixed is None
        ]  # fmt: skip
        return (*extents, *strides)


def matrix(name: str, dtype: str, rows: str, columns: str | int, pitch: int = 8, alignment: int = 16) -> Argument:
    """Row-major; by default rows and address as TMA takes them."""
    return Argument(name, dtype, (rows, columns), (None, 1), pitch, alignment)


def vector(name: str, dtype: str, size: str | int, alignment: int = 4) -> Argument:
    """Without gaps."""
    return Argument(name, dtype, (size,), (1,), 1, alignment)


def weights(name: str, dtype: str, major: str, discrete: bool, columns: str = "N") -> Argument:
    """(L, K, columns) weights with that contiguous axis, or the (L,) addresses of discrete ones."""
    if discrete:
        return vector(name, "int64", "L", 8)
    return Argument(name, dtype, ("L", "K", columns), (None, 1, None) if major == "k" else (None, None, 1), 8, 16)


def memory(name: str, alignment: int = 16) -> Argument:
    """Bytes without gaps."""
    return Argument(name, "byte", (None,), (1,), 1, alignment)


@dataclass(frozen=True)
class Words:
    """The integers of a launch but for the stream, addresses still missing: `places` has theirs, by name."""

    values: tuple[int, ...]
    places: tuple[tuple[int, str], ...]

    def at(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """The integers with the addresses of these tensors."""
        words = list(self.values)
        for place, name in self.places:
            words[place] = tensors[name].data_ptr()
        return words


def words_of(
    arguments: Sequence[Argument], sizes: Mapping[str, int], clusters: int, opened: Mapping[str, Sequence[int]]
) -> Words:
    """The words for these sizes; `opened` has each tensor's, see `Argument.opened`."""
    values, places = [*(sizes[name] for name in SIZES), clusters], []
    for argument in arguments:
        places.append((len(values), argument.name))
        values += (0, *opened[argument.name])
    return Words(tuple(values), tuple(places))


def refusal(argument: Argument, tensor: torch.Tensor, sizes: Mapping[str, int], device: torch.device) -> str | None:
    """Why a tensor cannot be this argument: what it is, and what is required; None where it can."""
    shape = tuple(sizes[extent] if isinstance(extent, str) else extent for extent in argument.shape)
    if (
        str(tensor.dtype) == f"torch.{TORCH_NAMES[argument.dtype]}"
        and tensor.device == device
        and len(shape) == tensor.dim()
        and all(extent is None or seen == extent for seen, extent in zip(tensor.shape, shape, strict=True))
        and (not tensor.numel() or _walks(argument, tensor))
    ):
        return None
    strides = tuple(f"{argument.pitch}i" if stride is None else stride for stride in argument.stride)
    return (
        f"{argument.name} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device} at "
        f"{tensor.data_ptr():#x}; required is {TORCH_NAMES[argument.dtype]} {shape}, strides {strides}, on {device} at "
        f"a multiple of {argument.alignment} bytes"
    )


def _walks(argument: Argument, tensor: torch.Tensor) -> bool:
    """Whether address and strides are as the argument has them."""
    return tensor.data_ptr() % argument.alignment == 0 and all(
        extent <= 1 or (seen % argument.pitch == 0 if stride is None else seen == stride)
        for extent, seen, stride in zip(tensor.shape, tensor.stride(), argument.stride, strict=True)
    )
