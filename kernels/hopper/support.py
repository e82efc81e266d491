"""What the support surfaces of our kernels for sm90 share: how a problem is read, and conditions.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...graph_ops.ir.dims import Dim, known_divisor
from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.layouts import GluLayout
from ...graph_ops.ir.tensor import TensorSpec
from ..arch import Arch, ArchRange
from ..condition import Condition
from ..problem import Problem
from ..sm90.config import MAX_EXPERTS, Activation

ARCHES = ArchRange((9, 0), (9, 1))
"""sm90 alone: wgmma exists nowhere else."""

DTYPE_NAMES = {
    DataType.BFLOAT16: "bf16",
    DataType.HALF: "fp16",
    DataType.FLOAT: "fp32",
    DataType.FP8_E4M3: "e4m3",
    DataType.FP8_E5M2: "e5m2",
}
LAYOUT_NAMES = {
    GluLayout.interleaved(32): "interleaved32",
    GluLayout.interleaved(1): "interleaved1",
    GluLayout.concatenated(): "concatenated",
}
ROW_PITCH = 8  # elements: TMA takes rows at multiples of 16 bytes, and narrower types keep the same pitch
ALIGNMENT = 16
VECTOR_ROLES = ("offsets", "alpha", "beta", "prob", "dprob")
VECTOR_TYPES = {"offsets": DataType.INT32} | dict.fromkeys(("alpha", "beta", "prob", "dprob"), DataType.FLOAT)


def extents(problem: Problem) -> tuple[Dim, Dim, Dim, Dim]:
    """(M, K, N, L): rows, depth, columns of the product, experts."""
    experts, depth, columns = problem["b"].dim
    return problem["a"].dim[0], depth, columns, experts


def b_major(problem: Problem) -> str | None:
    """ "k" or "n": the contiguous axis of the weights, the other's stride being fit for TMA; None for neither."""
    b = problem["b"]
    k_stride, n_stride = b.stride[1], b.stride[2]
    if b.discrete:  # addresses say nothing of strides: each expert's matrix is packed
        packed = {"k": (1, b.dim[1]), "n": (b.dim[2], 1)}
        return next((major for major, strides in packed.items() if (k_stride, n_stride) == strides), None)
    if not divides(b.stride[0], ROW_PITCH):
        return None
    if k_stride == 1 and divides(n_stride, ROW_PITCH):
        return "k"
    return "n" if n_stride == 1 and divides(k_stride, ROW_PITCH) else None


def type_name(problem: Problem, role: str) -> str | None:
    """The configuration's name of a role's data type, None where the role is absent."""
    return DTYPE_NAMES.get(problem[role].data_type, repr(problem[role].data_type)) if role in problem else None


def activation(problem: Problem) -> Activation:
    """The activation and its parameters, as a kernel's configuration has them."""
    given = problem.attributes
    act = {"name": given["act"]}
    if given["act"] == "geglu":
        act |= {"alpha": given["geglu_alpha"], "clamp_max": given["clamp_max"], "clamp_min": given["clamp_min"],
                "offset": given["linear_offset"]}  # fmt: skip
    elif given["act"] == "situglu":
        act |= {"beta1": given["situ_beta1"], "beta2": given["situ_beta2"]}
    return Activation(**act)


def typical(extent: Dim) -> int:
    """The extent; a symbol counts as a usual model's, so that it falls in the table's middle class."""
    return extent if isinstance(extent, int) else 2048


def divides(stride: Dim, pitch: int) -> bool:
    """Whether a stride is known to be a multiple of `pitch`; none of a broadcast axis, 0, which TMA was never given."""
    return stride != 0 and known_divisor(stride) % pitch == 0


def row_pitch(tensor: TensorSpec, pitch: int) -> bool:
    """Whether a tensor is row-major with rows at multiples of `pitch` elements."""
    return tensor.stride[1] == 1 and divides(tensor.stride[0], pitch)


def bad_matrices(p: Problem, roles: Iterable[str]) -> list[str]:
    """Those of `roles` that are not row-major with rows as TMA takes them."""
    return [f"{r} stride {p[r].stride}" for r in roles if r in p and not row_pitch(p[r], ROW_PITCH)]


def bad_vectors(p: Problem) -> list[str]:
    """Vectors of another type than the kernels read, or with gaps."""
    return [
        f"{r} {p[r].data_type!r} stride {p[r].stride}"
        for r in VECTOR_ROLES
        if r in p and (p[r].data_type is not VECTOR_TYPES[r] or p[r].stride[0] != 1)
    ]


def _misaligned(p: Problem) -> list[str]:
    return [f"{r} {t.alignment}" for r, t in p.tensors.items() if t.alignment % ALIGNMENT and not t.is_virtual]


def present(*roles: str) -> Callable[[Problem, Arch], bool]:
    """A condition's `applies`: one of the roles is there."""
    return lambda p, a: any(role in p for role in roles)


def rounding(p: Problem, value: str) -> Any:
    """The data type that an interior value rounds to."""
    return p.rounding.get(value, DataType.FLOAT)


CONTIGUOUS = "pass a contiguous copy"

# What every grouped matmul here asks of its problem.
OPERAND_TYPE = Condition(
    "OPERAND_TYPE", "BFLOAT16 or HALF a and b",
    lambda p, a: f"a is {p['a'].data_type!r}, b is {p['b'].data_type!r}",
    lambda p, a: p["a"].data_type is p["b"].data_type and p["a"].data_type in (DataType.BFLOAT16, DataType.HALF),
    "identity(x) with a 16-bit data type converts, with its rounding",
)  # fmt: skip
DEPTH_MULTIPLE = Condition(
    "DEPTH_MULTIPLE", "K positive and known to be a multiple of 8 (16 bytes a row)",
    lambda p, a: f"K = {extents(p)[1]}",
    lambda p, a: known_divisor(extents(p)[1]) % 8 == 0 and extents(p)[1] != 0, "pad K with zeros in a and b",
)  # fmt: skip
EXPERTS = Condition(
    "EXPERTS", f"1 to {MAX_EXPERTS} experts, as an integer", lambda p, a: f"L = {extents(p)[3]}",
    lambda p, a: isinstance(extents(p)[3], int) and 1 <= known_divisor(extents(p)[3]) <= MAX_EXPERTS,
    "split the experts over several graphs",
)  # fmt: skip
B_LAYOUT = Condition(
    "B_LAYOUT", f"K-major or N-major weights, the other strides multiples of {ROW_PITCH}; discrete ones packed",
    lambda p, a: f"b {p['b'].dim} with stride {p['b'].stride}", lambda p, a: b_major(p) is not None, CONTIGUOUS,
)  # fmt: skip
POINTERS = Condition(
    "ALIGNMENT", f"data pointers aligned to {ALIGNMENT} bytes",
    lambda p, a: "promised bytes: " + ", ".join(_misaligned(p)), lambda p, a: not _misaligned(p),
    "torch's own allocations are aligned; set_alignment_value(16) promises it",
)  # fmt: skip
ACT_PARAMETERS = Condition(
    "ACT_PARAMETERS", "activation parameters that are finite in float32",
    lambda p, a: {k: v for k, v in p.attributes.items() if isinstance(v, float) and not math.isfinite(v)},
    lambda p, a: all(math.isfinite(v) for v in p.attributes.values() if isinstance(v, float)),
    "a finite bound beyond the data, 3e38 say, clamps nothing",
)  # fmt: skip
