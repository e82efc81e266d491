"""32 lanes of a warp in numpy, as far as the quantizer's program needs them: a scalar of the kernel is an array (32,).

Integers are int64 masked to 32 bits where a register would be, floats float32, shared memory 64 KiB of bytes. Global
tensors are `Rows`, and an address of theirs is `Place`; a byte stored outside is an error, as is a misaligned word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.reference.codes import encode

LANE = np.arange(32)
KINDS = {"e4m3": DataType.FP8_E4M3, "e5m2": DataType.FP8_E5M2}
NOBODYS = 0xEE  # what shared memory holds before the warp writes


def integer(x: Any) -> Any:
    """In place of Int32, Uint32 and Int64."""
    return np.int64(x) if isinstance(x, (int, np.integer)) else np.asarray(x).astype(np.int64)


def word(x: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(x), (32,)).astype(np.int64) & 0xFFFFFFFF


def octets(words: Sequence[Any]) -> np.ndarray:
    """Little-endian bytes of a lane's words: (32, 4 * len(words))."""
    return np.stack([word(w) for w in words], 1).astype("<u4").view(np.uint8)


class Place:
    """An address in a global buffer."""

    def __init__(self, buffer: np.ndarray, offset: Any = 0) -> None:
        self.buffer, self.offset = buffer, offset

    def __add__(self, distance: Any) -> Place:
        return Place(self.buffer, self.offset + distance)


class Rows:
    """A row-major tensor with `pitch` bytes a row and `width` bytes an element, and its own `iterator`."""

    def __init__(self, buffer: np.ndarray, pitch: int = 0, width: int = 1) -> None:
        self.buffer, self.pitch, self.width, self.iterator = buffer.reshape(-1).view(np.uint8), pitch, width, self
        self.stride = (pitch // width, 1)
        self.shape = (buffer.size * buffer.itemsize // pitch, pitch // width) if pitch else (buffer.size,)

    def toint(self) -> Place:
        return Place(self.buffer)


class Lanes:
    """In place of `kernels.sm90.primitives`."""

    def __init__(self) -> None:
        self.shared = np.full(1 << 16, NOBODYS, np.uint8)

    def fresh_lane(self) -> np.ndarray:
        return LANE.astype(np.int64)

    def sync_warp(self) -> None:
        """Every lane has done each step before any does the next."""

    def bits(self, value: np.ndarray) -> np.ndarray:
        return value.view(np.uint32).astype(np.int64)

    def from_bits(self, value: Any) -> np.ndarray:
        return word(value).astype(np.uint32).view(np.float32)

    def select(self, condition: Any, yes: Any, no: Any) -> np.ndarray:
        return np.where(condition, yes, no)

    def max_magnitude(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The hardware's NaN is 0x7FFFFFFF."""
        nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
        return np.where(np.isnan(a) | np.isnan(b), nan, np.fmax(np.abs(a), np.abs(b)))

    def byte_permute(self, a: Any, b: Any, selector: int) -> np.ndarray:
        both = octets([a, b])
        return both[:, [selector >> 4 * i & 7 for i in range(4)]].copy().view("<u4")[:, 0].astype(np.int64)

    def pack_fp8x4(self, values: Sequence[np.ndarray], dtype: str) -> np.ndarray:
        codes = encode(torch.from_numpy(np.stack(values, 1)), KINDS[dtype]).numpy()
        return codes.view("<u4")[:, 0].astype(np.int64)

    def max_u16x2(self, a: Any, b: Any) -> np.ndarray:
        a, b = word(a), word(b)
        return np.maximum(a >> 16, b >> 16) << 16 | np.maximum(a & 0xFFFF, b & 0xFFFF)

    def unpack(self, pair: Any, dtype: str) -> list[np.ndarray]:
        halves = [word(pair) & 0xFFFF, word(pair) >> 16]
        if dtype == "bf16":
            return [self.from_bits(half << 16) for half in halves]
        values = [half.astype(np.uint16).view(np.float16).astype(np.float32) for half in halves]
        nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # the hardware's
        return [np.where(np.isnan(v), nan, v) for v in values]

    def _read(self, place: Place, count: int) -> np.ndarray:
        at = np.broadcast_to(place.offset, (32,))[:, None] + np.arange(4 * count)
        assert (at[:, 0] % (4 * count) == 0).all(), "misaligned"
        assert at.min() >= 0 and at.max() < place.buffer.size, "outside the tensor"
        return place.buffer[at].view("<u4").astype(np.int64)

    def load_global_v4(self, place: Place) -> list[np.ndarray]:
        return list(self._read(place, 4).T)

    def load_global(self, place: Place, dtype: Any) -> np.ndarray:
        """A float32."""
        return self.from_bits(self._read(place, 1)[:, 0])

    def _load(self, address: Any, words: int) -> list[np.ndarray]:
        assert (word(address) % (4 * words) == 0).all(), "misaligned"
        found = self.shared[word(address)[:, None] + np.arange(4 * words)].view("<u4")
        return [found[:, i].astype(np.int64) for i in range(words)]

    def _store(self, address: Any, words: Sequence[Any]) -> None:
        assert (word(address) % (4 * len(words)) == 0).all(), "misaligned"
        self.shared[word(address)[:, None] + np.arange(4 * len(words))] = octets(words)

    def load_shared_v2(self, address: Any) -> list[np.ndarray]:
        return self._load(address, 2)

    def load_shared_v4(self, address: Any) -> list[np.ndarray]:
        return self._load(address, 4)

    store_shared_v2 = store_shared_v4 = _store

    def load_shared_i32(self, address: Any) -> np.ndarray:
        return self._load(address, 1)[0]

    def store_shared_i32(self, address: Any, value: Any) -> None:
        self._store(address, [value])

    def store_shared_b8(self, address: Any, value: Any) -> None:
        self.shared[word(address)] = word(value) & 0xFF

    def stmatrix4(self, address: Any, words: Sequence[Any]) -> None:
        """Lane 8*t + r names row r of matrix t; lane l holds its bytes 4*(l%4) of row l//4, of each matrix."""
        rows = word(address).reshape(4, 8)
        for t, one in enumerate(words):
            at = rows[t][LANE // 4] + 4 * (LANE % 4)
            self.shared[at[:, None] + np.arange(4)] = octets([one])

    def row_address(self, tensor: Rows, row: Any, column: Any) -> Place:
        return tensor.toint() + (word(row) * tensor.pitch + word(column) * tensor.width)

    def _write(self, place: Place, data: np.ndarray, when: Any) -> None:
        inside = np.broadcast_to(True if when is None else when, (32,))
        at = np.broadcast_to(place.offset, (32,))[inside][:, None] + np.arange(data.shape[1])
        assert at.size == 0 or (at.min() >= 0 and at.max() < place.buffer.size), "outside the tensor"
        place.buffer[at] = data[inside]

    def store_global(self, place: Place, words: Sequence[Any], when: Any = None) -> None:
        self._write(place, octets(words), when)

    def store_global_b16(self, place: Place, value: Any, when: Any = None) -> None:
        self._write(place, octets([value])[:, :2], when)

    def store_global_b8(self, place: Place, value: Any, when: Any = None) -> None:
        self._write(place, octets([value])[:, :1], when)
