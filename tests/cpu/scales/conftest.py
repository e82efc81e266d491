"""Helpers of the block-scale tests."""

from __future__ import annotations

import pytest
import torch

ATOM = 512


@pytest.fixture
def atom_loop():
    """The scale atom in four lines, as NVIDIA's documentation describes it: (R, C) bytes -> its padded memory, flat."""

    def ceil_div(value: int, divisor: int) -> int:
        return -(-value // divisor)

    def swizzle(matrix: torch.Tensor) -> torch.Tensor:
        rows, columns = matrix.shape
        atoms = ceil_div(columns, 4)
        memory = torch.zeros(ceil_div(rows, 128) * atoms * ATOM, dtype=torch.uint8)
        for m in range(rows):
            for k in range(columns):
                memory[(m // 128 * atoms + k // 4) * ATOM + m % 32 * 16 + m % 128 // 32 * 4 + k % 4] = matrix[m, k]
        return memory

    return swizzle


@pytest.fixture
def seed():
    """A fresh seed; pytest prints it with the arguments of a failing test."""
    return int(torch.seed() % 2**31)
