"""Inside a compiled host function: tensors over the integers that a launch passes (`arguments`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from .arguments import SIZES, Argument
from .primitives import DTYPES

ELEMENTS = {**DTYPES, "int32": cutlass.Int32, "int64": cutlass.Int64, "byte": cutlass.Uint8}


def traced(arguments: Sequence[Argument]) -> list[Any]:
    """What the function is compiled with: one compilation serves every size, stride and address."""
    count = sum(argument.count for argument in arguments)
    return [cutlass.Int32(1)] * (len(SIZES) + 1) + [cutlass.Int64(16)] * count + [make_fake_stream()]


def read(arguments: Sequence[Argument], words: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """(sizes, tensors by name, clusters, stream) of the words that the function was called with."""
    sizes, rest = dict(zip(SIZES, words, strict=False)), iter(words[len(SIZES) + 1 : -1])
    tensors = {argument.name: _tensor(argument, sizes, rest) for argument in arguments}
    return sizes, tensors, words[len(SIZES)], words[-1]


def _tensor(argument: Argument, sizes: Mapping[str, Any], words: Iterator[Any]) -> cute.Tensor:
    pointer = cute.make_ptr(
        ELEMENTS[argument.dtype], next(words), cute.AddressSpace.gmem, assumed_align=argument.alignment
    )
    # The same types as tensors would have: the kernel is compiled to the same machine code.
    shape = tuple(
        next(words) if extent is None else sizes[extent] if isinstance(extent, str) else extent
        for extent in argument.shape
    )
    strides = tuple(_multiple(next(words), argument.pitch) if stride is None else stride for stride in argument.stride)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))


def _multiple(stride: Any, pitch: int) -> Any:
    return stride if pitch == 1 else cute.assume(stride, divby=pitch)
