"""Layouts that are values on a tensor, never guessed from a shape: gate/up order and block-scale order."""

from __future__ import annotations

from dataclasses import dataclass

from .dims import Dim, ceil_div, round_up
from .errors import GraphError


@dataclass(frozen=True)
class GluLayout:
    """Where gate and up columns lie along an axis of 2I, gate first.

    `width` None: I gate columns, then I up columns (torch, Hugging Face, Megatron). `width` w: w gate columns, then
    their w up columns, and so on (32: cuDNN; 1: QuACK).
    """

    width: int | None

    @staticmethod
    def interleaved(width: int) -> GluLayout:
        """Alternating blocks of `width` gate and `width` up columns. Raises GraphError for a width below 1."""
        if width < 1:
            raise GraphError("GLU_LAYOUT", asked="GluLayout.interleaved", seen=width, required="width >= 1")
        return GluLayout(width)

    @staticmethod
    def concatenated() -> GluLayout:
        """All gate columns, then all up columns."""
        return GluLayout(None)

    def __str__(self) -> str:
        return "concatenated" if self.width is None else f"interleaved({self.width})"

    @staticmethod
    def parse(text: str) -> GluLayout:
        """The layout that `str` printed. Raises GraphError for other text."""
        if text == "concatenated":
            return GluLayout.concatenated()
        inner = text.removeprefix("interleaved(").removesuffix(")")
        if not inner.isdigit() or text != f"interleaved({inner})":
            raise GraphError("GLU_LAYOUT", asked=f"layout {text!r}", required="'concatenated' or 'interleaved(w)'")
        return GluLayout.interleaved(int(inner))


SCALE_ATOM_ROWS = 128
SCALE_ATOM_COLUMNS = 4


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of a block-scaled (M, N) tensor are stored.

    Blocks of `block_size` lie along `axis` of the codes. Not swizzled: (M, ceil(N/b)) for axis 1, (ceil(M/b), N) for
    axis 0, row-major. Swizzled: the 128x4 atom over the matrix (M, ceil(N/b)) for axis 1 and (N, ceil(M/b)) for axis 0,
    padded to whole atoms with zero bytes (numerics: "Scale atom").
    """

    block_size: int
    axis: int
    swizzled: bool = True

    def __post_init__(self) -> None:
        if self.axis not in (0, 1) or self.block_size < 1:
            seen = f"block_size={self.block_size}, axis={self.axis}"
            raise GraphError("SCALE_LAYOUT", asked="ScaleLayout", seen=seen, required="block_size >= 1, axis 0 or 1")

    def __str__(self) -> str:
        return f"{'swizzled' if self.swizzled else 'plain'}(block {self.block_size}, axis {self.axis})"

    def matrix(self, dim: tuple[Dim, Dim]) -> tuple[Dim, Dim]:
        """(rows, columns) of the unpadded scale matrix that the atom is laid over, for codes of shape `dim`."""
        rows, columns = dim if self.axis == 1 else (dim[1], dim[0])
        return rows, ceil_div(columns, self.block_size)

    def storage(self, dim: tuple[Dim, Dim]) -> tuple[Dim, Dim]:
        """Shape of the stored scales for codes of shape `dim`; swizzled ones are padded to whole atoms."""
        rows, columns = self.matrix(dim)
        if self.swizzled:
            return round_up(rows, SCALE_ATOM_ROWS), round_up(columns, SCALE_ATOM_COLUMNS)
        return (rows, columns) if self.axis == 1 else (columns, rows)
