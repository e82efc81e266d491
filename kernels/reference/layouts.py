"""Permutations of columns and of scales, as index arithmetic: GLU layouts and the 128x4 scale atom."""

from __future__ import annotations

import torch

from ...graph_ops.ir.layouts import SCALE_ATOM_COLUMNS, SCALE_ATOM_ROWS, GluLayout

ATOM = SCALE_ATOM_ROWS * SCALE_ATOM_COLUMNS


def glu_columns(columns: int, layout: GluLayout) -> torch.Tensor:
    """Where gate and up columns lie: entry i < I is the column of gate i, entry I + i that of up i. int64 (2I,).

    Raises ValueError where whole blocks of the layout do not fill `columns`.
    """
    half = columns // 2
    width = layout.width or half or 1
    if columns % (2 * width):
        raise ValueError(f"{columns} columns are not whole blocks of {layout}")
    unit = torch.arange(half)
    gate = unit // width * (2 * width) + unit % width
    return torch.cat([gate, gate + width])


def interleave(x: torch.Tensor, width: int) -> torch.Tensor:
    """Concatenated gate and up columns (..., 2I) -> blocks of `width`, gate first."""
    order = glu_columns(x.shape[-1], GluLayout.interleaved(width))
    out = torch.empty_like(x)
    out[..., order] = x
    return out


def deinterleave(x: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of `interleave`: (..., 2I) in blocks of `width` -> all gate columns, then all up columns."""
    return x[..., glu_columns(x.shape[-1], GluLayout.interleaved(width))]


def swizzled_position(row: torch.Tensor, column: torch.Tensor, columns: int) -> torch.Tensor:
    """Where scale (row, column) of a matrix with `columns` columns lies in the memory of 128x4 atoms.

    Within an atom of 512, rows 32 apart are neighbours: `(m % 32) * 16 + (m % 128 // 32) * 4 + k % 4`; atoms follow
    one another along a row block (numerics: "Scale atom").
    """
    atoms_in_row = -(-columns // SCALE_ATOM_COLUMNS)
    atom = row // SCALE_ATOM_ROWS * atoms_in_row + column // SCALE_ATOM_COLUMNS
    position: torch.Tensor = atom * ATOM + row % 32 * 16 + row % 128 // 32 * 4 + column % SCALE_ATOM_COLUMNS
    return position


def _positions(rows: int, columns: int) -> torch.Tensor:
    return swizzled_position(torch.arange(rows)[:, None], torch.arange(columns)[None, :], columns)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """A scale matrix (R, C) -> its memory in 128x4 atoms, shaped (R rounded up to 128, C rounded up to 4).

    Padding is zero bytes. Any one-byte dtype.
    """
    rows, columns = scales.shape
    shape = (-(-rows // SCALE_ATOM_ROWS) * SCALE_ATOM_ROWS, -(-columns // SCALE_ATOM_COLUMNS) * SCALE_ATOM_COLUMNS)
    memory = torch.zeros(shape[0] * shape[1], dtype=torch.uint8, device=scales.device)
    memory[_positions(rows, columns).to(scales.device)] = scales.contiguous().view(torch.uint8)
    return memory.view(shape).view(scales.dtype)


def unswizzle_scales(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scale matrix (rows, columns) that `swizzle_scales` stored, padding left out."""
    stored = memory.contiguous().view(torch.uint8).flatten()
    return stored[_positions(rows, columns).to(memory.device)].view(memory.dtype)
