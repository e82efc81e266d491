"""Block scales as bytes: the 128x4 atom, NVIDIA's six-dimensional view of it, packing per expert, and FP4 nibbles.

Scale (m, k) of a matrix (R, C) lies in atom `m//128 * ceil(C/4) + k//4` of 512 bytes, at byte
`m%32 * 16 + m%128//32 * 4 + k%4` of it: within an atom, rows 32 apart are neighbours.

           k = 0..3
          +--------+
    m=0   |0 1 2 3 |  bytes 0..3       m=32: bytes 4..7   m=64: 8..11   m=96: 12..15
    m=1   |        |  bytes 16..19     m=33: bytes 20..23 ...
    ...   |        |
    m=31  |        |  bytes 496..499   m=63: bytes 500..503 ...
          +--------+

Everything works on any device and reads nothing on the host; any one-byte dtype goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.reference.codes import pack_fp4, unpack_fp4
from ..kernels.torch_ops import quantize as _atom
from .ir.dims import ceil_div, round_up
from .ir.errors import GraphError
from .ir.layouts import SCALE_ATOM_COLUMNS, SCALE_ATOM_ROWS

ATOM_BYTES = SCALE_ATOM_ROWS * SCALE_ATOM_COLUMNS
VIEW_ORDER = (3, 4, 1, 5, 2, 0)
"""Memory (L, R/128, C/4, 32, 4, 4), permuted so, is the view (32, 4, R/128, 4, C/4, L)."""


def scale_shape(rows: int, columns: int, block_size: int) -> tuple[int, int]:
    """Shape of the swizzled scales of a matrix (rows, columns) with blocks of `block_size` along its columns."""
    shape = (round_up(rows, SCALE_ATOM_ROWS), round_up(ceil_div(columns, block_size), SCALE_ATOM_COLUMNS))
    assert isinstance(shape[0], int) and isinstance(shape[1], int)
    return shape[0], shape[1]


def swizzle(matrix: torch.Tensor) -> torch.Tensor:
    """Scales (R, C) -> their memory in 128x4 atoms, shaped (R up to 128s, C up to 4s); padding is zero bytes."""
    return _atom.swizzle(_bytes(matrix)).view(matrix.dtype)


def unswizzle(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scales (rows, columns) that `swizzle` stored, padding left out."""
    return _atom.unswizzle(_bytes(memory), rows, columns).contiguous().view(memory.dtype)


def to_atom_view(memory: torch.Tensor) -> torch.Tensor:
    """Swizzled memory (R, C), or (L, R, C) for L experts -> the view (32, 4, R/128, 4, C/4, L) of the same bytes."""
    experts, rows, columns = memory.shape if memory.dim() == 3 else (1, *memory.shape)
    atoms = memory.view(experts, rows // SCALE_ATOM_ROWS, columns // SCALE_ATOM_COLUMNS, 32, 4, 4)
    return atoms.permute(VIEW_ORDER)


def from_atom_view(view: torch.Tensor, rows: int, columns: int, experts: int | None = None) -> torch.Tensor:
    """The inverse of `to_atom_view`, over the same bytes: (R, C), or with `experts` (L, R, C).

    `view`: the six-dimensional view, its memory (L, R/128, C/4, 32, 4, 4), or any contiguous buffer of those bytes.
    `rows`, `columns`: of the unpadded scale matrix. Raises GraphError("SCALE_VIEW") where the bytes are others.
    """
    stored = scale_shape(rows, columns, 1)
    blocks = (experts or 1, stored[0] // SCALE_ATOM_ROWS, stored[1] // SCALE_ATOM_COLUMNS)
    if view.dim() == 6 and tuple(view.shape) == (32, 4, blocks[1], 4, blocks[2], blocks[0]):
        view = view.permute(_inverse(VIEW_ORDER))
    size = blocks[0] * blocks[1] * blocks[2] * ATOM_BYTES
    if not view.is_contiguous() or view.numel() != size:
        raise GraphError("SCALE_VIEW", asked=f"scales of {blocks[0]} matrices ({rows}, {columns})",
                         seen=f"shape {tuple(view.shape)}, stride {view.stride()}",
                         required=f"whole 128x4 atoms: the view (32, 4, {blocks[1]}, 4, {blocks[2]}, {blocks[0]}), or "
                         f"a contiguous buffer of {size} bytes")  # fmt: skip
    return view.view(stored if experts is None else (experts, *stored))


def pack_columns_by_expert(memory: torch.Tensor, offsets: torch.Tensor, block_size: int) -> torch.Tensor:
    """Swizzled column scales of (M, N) codes -> the same atoms with those of each expert together; same shape.

    `memory`: (N up to 128s, M/block_size up to 4s), whose atoms run along M within each block of 128 columns.
    `offsets`: (L,) end offsets, multiples of 4 * block_size, so that no atom has two experts' scales. Atoms past
    `offsets[-1]` come last. The expert's atoms start where its rows do, at byte `start / (4*block_size) * N/128 * 512`.
    """
    return _regroup(memory, offsets, block_size, forward=True)


def unpack_columns_by_expert(memory: torch.Tensor, offsets: torch.Tensor, block_size: int) -> torch.Tensor:
    """The inverse of `pack_columns_by_expert`."""
    return _regroup(memory, offsets, block_size, forward=False)


def _regroup(memory: torch.Tensor, offsets: torch.Tensor, block_size: int, *, forward: bool) -> torch.Tensor:
    down, across = memory.shape[0] // SCALE_ATOM_ROWS, memory.shape[1] // SCALE_ATOM_COLUMNS
    ends = offsets.to(torch.int64).div(SCALE_ATOM_COLUMNS * block_size, rounding_mode="floor")
    ends = torch.cat([ends, torch.full((1,), across, dtype=torch.int64, device=ends.device)])  # what no expert owns
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    column = torch.arange(across, device=memory.device)
    owner = torch.searchsorted(ends, column, right=True)
    start, width = starts[owner], (ends - starts)[owner]
    row = torch.arange(down, device=memory.device)[:, None]
    together = (start * down + row * width + column - start).flatten()  # where atom (row, column) goes
    atoms = memory.reshape(down * across, ATOM_BYTES)
    out = torch.empty_like(_bytes(atoms))
    if forward:
        out[together] = _bytes(atoms)
    else:
        out.copy_(_bytes(atoms)[together])
    return out.view(memory.dtype).view(memory.shape)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


__all__ = [
    "ATOM_BYTES", "from_atom_view", "pack_columns_by_expert", "pack_fp4", "scale_shape", "swizzle", "to_atom_view",
    "unpack_columns_by_expert", "unpack_fp4", "unswizzle",
]  # fmt: skip
