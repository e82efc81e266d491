"""How operands of cudnn-frontend's grouped kernels look: which role becomes which argument, in which shape and stride.

Each family has one table of these; it describes the operands to the compiler and makes the views of each run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...graph_ops.ir.dims import ceil_div, evaluate
from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import SCALE_ATOM_COLUMNS, SCALE_ATOM_ROWS
from ..problem import Problem
from . import support
from .knobs import Knobs

ONES, SCRATCH = "ones", "scratch"


def torch_type(data_type: DataType) -> torch.dtype:
    """The torch dtype that the classes take for `data_type`: FP4 by its own name, not as bytes."""
    name = "float4_e2m1fn_x2" if data_type is DataType.FP4_E2M1 else data_type.info.torch_name
    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(frozen=True)
class Argument:
    """One operand of a class: the role it comes from, and the strided view of that role's memory it wants.

    `shape` and `stride` count elements. `absent` says what stands in where the graph has no such role: ONES, SCRATCH
    (memory that is written and not read), or "" for an operand that is there only with its role.
    """

    role: str
    sample: str  # keyword of the constructor
    execute: str  # keyword of execute
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: DataType
    absent: str = ""

    @property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, stride) in stored elements: two FP4 codes share one along the contiguous axis."""
        packed = self.data_type.info.packed
        if packed == 1:
            return self.shape, self.stride
        axis = self.stride.index(1)
        shape = tuple(d // packed if i == axis else d for i, d in enumerate(self.shape))
        return shape, tuple(1 if i == axis else s // packed for i, s in enumerate(self.stride))

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, without gaps."""
        count = 1
        for extent in self.shape:
            count *= extent
        return -(-count * self.data_type.info.bits // 8)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The operand over a buffer of its role."""
        dtype = torch_type(self.data_type)
        return (memory if memory.dtype is dtype else memory.view(dtype)).as_strided(*self.stored)


def rows(role: str, name: str, shape: tuple[int, int], data_type: DataType, absent: str = "") -> Argument:
    """A row-major (M, N) matrix as (M, N, 1)."""
    m, n = shape
    return Argument(role, f"sample_{name}", f"{name}_tensor", (m, n, 1), (n, 1, m * n), data_type, absent)


def vector(role: str, name: str, extent: int, absent: str = "", data_type: DataType = DataType.FLOAT) -> Argument:
    """One value for each expert, or a factor of its own."""
    return Argument(role, f"sample_{name}", f"{name}_tensor", (extent,), (1,), data_type, absent)


def per_row(role: str, m: int, absent: str = "") -> Argument:
    """One FLOAT for each row as (M, 1, 1)."""
    return Argument(role, f"sample_{role}", f"{role}_tensor", (m, 1, 1), (1, 1, 1), DataType.FLOAT, absent)


def offsets(experts: int) -> Argument:
    return Argument("offsets", "sample_padded_offsets", "padded_offsets", (experts,), (1,), DataType.INT32)


def scales(
    role: str, name: str, matrix: tuple[int, int], block: int, data_type: DataType, experts: int = 1, absent: str = ""
) -> Argument:
    """Swizzled scales of a `matrix` (rows, columns) in blocks along its columns, as the view of the 128x4 atoms."""
    row_blocks = -(-matrix[0] // SCALE_ATOM_ROWS)
    column_blocks = ceil_div(ceil_div(matrix[1], block), SCALE_ATOM_COLUMNS)
    assert isinstance(column_blocks, int)
    atom = SCALE_ATOM_ROWS * SCALE_ATOM_COLUMNS
    return Argument(
        role,
        f"sample_{name}",
        f"{name}_tensor",
        (32, 4, row_blocks, 4, column_blocks, experts),
        (16, 4, column_blocks * atom, 1, atom, row_blocks * column_blocks * atom),
        data_type,
        absent,
    )


@dataclass(frozen=True)
class Configuration:
    """What one compiled kernel is specialised for. Everything else, M above all, is free at each run.

    `types` has the data type of each role that the kernel is specialised for; a role with a stand-in is not one.
    `knobs` are those of a variant, None for the class's own.
    """

    k: int
    n: int
    experts: int
    discrete: bool
    b_major: str
    block: int
    act: str
    parameters: tuple[tuple[str, float], ...]
    types: tuple[tuple[str, DataType], ...]
    deterministic: bool
    knobs: Knobs | None = None

    def __contains__(self, role: str) -> bool:
        return any(name == role for name, _ in self.types)

    def type(self, role: str, otherwise: DataType | None = None) -> DataType:
        """The data type of a role that is there, or `otherwise`."""
        found = dict(self.types).get(role, otherwise)
        assert found is not None, role
        return found


PARAMETERS = ("geglu_alpha", "clamp_min", "clamp_max", "linear_offset", "situ_beta1", "situ_beta2")


def configure(problem: Problem, standing_in: tuple[str, ...], knobs: Knobs | None = None) -> Configuration:
    """The configuration that serves a problem which passed every condition of its kernel.

    `standing_in` are the roles for which the adapter has a stand-in, so that their presence changes no code.
    """
    given = problem.attributes
    if problem.rule == "grouped_gemm_wgrad":
        depth, columns, experts = problem["a"].dim[1], problem["dy"].dim[1], problem["dw"].dim[0]
        discrete, major = False, "n"
    else:
        _, depth, columns, experts = support.extents(problem)
        discrete, major = problem["b"].discrete, support.b_major(problem) or "k"
    scale = problem.get("sf_a")
    return Configuration(
        k=evaluate(depth, {}),
        n=evaluate(columns, {}),
        experts=evaluate(experts, {}),
        discrete=discrete,
        b_major=major,
        block=scale.scale_layout.block_size if scale is not None and scale.scale_layout is not None else 0,
        act=given.get("act", ""),
        parameters=tuple((name, float(given[name])) for name in PARAMETERS if name in given),
        types=tuple((r, t.data_type) for r, t in problem.tensors.items() if r not in standing_in),
        deterministic=problem.deterministic,
        knobs=knobs,
    )
