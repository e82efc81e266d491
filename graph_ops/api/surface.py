"""What the drop-in calls accept, as data: each requirement names the row of NVIDIA's pages that it implements.

A `Call` is what the tensors and options of one call say, real tensors or samples alike. Every requirement that fails
gives a reason, and `check` collects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.condition import Reason
from ..ir.errors import GraphError
from ..scales import from_atom_view
from .common import FP4_STORAGE, FP8_TYPES, UnsupportedCall

BFLOAT16, FP8, FP4 = "bf16", "fp8", "fp4"
"""Families of operands; the last two are the block-scaled contract."""

ROW_MULTIPLE = 256
MAX_EXPERTS = 1024
SCALE_TYPES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)
HALF_TYPES = (torch.bfloat16, torch.float16)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call. `operands` by NVIDIA's name without `sample_` and `_tensor`; `options` as given; the rest is derived.

    `rows`, `depth`, `columns`, `experts`: M, K, N, L of the product A (M, K) x B (N, K, L), K counting elements.
    `family`: of A; `d_dtype`: of the D outputs. `quantized`: D comes as codes with scales.
    """

    name: str
    operands: Mapping[str, torch.Tensor | None]
    options: Mapping[str, Any]
    rows: int
    depth: int
    columns: int
    experts: int
    family: str
    b_dtype: torch.dtype
    b_major: str | None
    d_dtype: torch.dtype

    @property
    def discrete(self) -> bool:
        return self.operands.get("b") is None

    @property
    def block_scaled(self) -> bool:
        return self.family != BFLOAT16

    @property
    def quantized(self) -> bool:
        return self.d_dtype in (*FP8_TYPES, *FP4_STORAGE)

    @property
    def canonical(self) -> bool:
        """Whether outputs come as (M, X) instead of (M, X, 1), as A does."""
        return self["a"].dim() == 2

    @property
    def block_size(self) -> int:
        size: int = self.options["sf_vec_size"]
        return size

    def __contains__(self, operand: str) -> bool:
        return self.operands.get(operand) is not None

    def __getitem__(self, operand: str) -> torch.Tensor:
        tensor = self.operands[operand]
        assert tensor is not None, f"{self.name}: no {operand}"
        return tensor


@dataclass(frozen=True)
class Requirement:
    """One thing that a call must satisfy: its stable code, what is required, how to see it, and the row it is from."""

    code: str
    row: str
    requires: str
    holds: Callable[[Call], bool]
    observed: Callable[[Call], Any]
    applies: Callable[[Call], bool] = lambda call: True
    hint: str = ""

    def failure(self, call: Call) -> Reason | None:
        if not self.applies(call) or self.holds(call):
            return None
        return Reason(self.code, self.observed(call), self.requires, self.hint)


def check(requirements: Iterable[Requirement], call: Call) -> None:
    """Raises UnsupportedCall with every reason, if there is any."""
    if reasons := tuple(r for q in requirements if (r := q.failure(call)) is not None):
        raise UnsupportedCall(call.name, reasons)


def refuse(call: str, code: str, observed: object, required: str, hint: str = "") -> UnsupportedCall:
    """The error for what is wrong before the rest of a call can be read."""
    return UnsupportedCall(call, (Reason(code, observed, required, hint),))


# ---------------------------------------------------------------------- reading a call


def family_of(name: str, a: torch.dtype, b: torch.dtype) -> str:
    """Which contract A's and B's types choose. Raises UnsupportedCall("OPERAND_TYPE") for any other pair."""
    families = {torch.bfloat16: BFLOAT16, **dict.fromkeys(FP8_TYPES, FP8), **dict.fromkeys(FP4_STORAGE, FP4)}
    if a is not b and not {a, b} <= set(FP4_STORAGE):
        raise refuse(name, "OPERAND_TYPE", f"A is {a}, B is {b}", "A and B of one type")
    if a not in families:
        raise refuse(name, "OPERAND_TYPE", f"A and B are {a}", f"one of {[str(t) for t in families]}")
    return families[a]


def is_canonical_weight(b: torch.Tensor) -> bool:
    """(L, N, K) row by row, rather than the kernel's (N, K, L) view with a unit stride first or second."""
    return b.stride(2) == 1 and b.stride(1) != 1 and b.stride(0) != 1


def weights(b: torch.Tensor, b_major: str) -> torch.Tensor:
    """Dense weights as a view (L, K, N): of (N, K, L), or of canonical (L, N, K) or, N-major, (L, K, N)."""
    b = b.view(torch.uint8) if b.dtype is torch.float4_e2m1fn_x2 else b
    if not is_canonical_weight(b):
        return b.permute(2, 1, 0)
    return b if b_major == "n" else b.transpose(1, 2)


def major_of(weight: torch.Tensor) -> str | None:
    """ "k" or "n", the axis along which (L, K, N) is contiguous without gaps; None for another layout."""
    _, depth, columns = weight.shape
    for major, order in (("k", (depth * columns, 1, depth)), ("n", (depth * columns, columns, 1))):
        if all(d == 1 or s == w for d, s, w in zip(weight.shape, weight.stride(), order, strict=True)):
            return major
    return None


def read_call(
    name: str,
    operands: Mapping[str, torch.Tensor | None],
    options: Mapping[str, Any],
    *,
    d_dtype: torch.dtype,
    experts: int | None = None,
    b_shape: Sequence[int] | None = None,
    b_dtype: torch.dtype | None = None,
) -> Call:
    """The extents of a call. Raises UnsupportedCall where they cannot be read.

    Dense weights are operand `b`; else `b_shape` (N, K), `b_dtype` and `experts` describe the discrete ones.
    """
    a, b = operands["a"], operands.get("b")
    assert a is not None, "require_tensors has seen to it"
    if a.dim() not in (2, 3) or (a.dim() == 3 and a.shape[2] != 1):
        raise refuse(name, "SHAPE", f"A of shape {tuple(a.shape)}", "(M, K, 1), or (M, K)")
    packed = 2 if a.dtype in FP4_STORAGE else 1
    depth = a.shape[1] * packed
    if b is not None:
        if b.dim() != 3:
            raise refuse(name, "SHAPE", f"B of shape {tuple(b.shape)}", "(N, K, L), or (L, N, K)")
        view = weights(b, options["b_major"])
        family = family_of(name, a.dtype, b.dtype)
        experts, b_depth, columns = view.shape
        return Call(name, operands, options, a.shape[0], _same_depth(name, depth, b_depth * packed), columns, experts,
                    family, b.dtype, major_of(view), d_dtype)  # fmt: skip
    assert experts is not None and b_shape is not None and b_dtype is not None
    family = family_of(name, a.dtype, b_dtype)
    _same_depth(name, depth, b_shape[1])
    return Call(
        name, operands, options, a.shape[0], depth, b_shape[0], experts, family, b_dtype, options["b_major"], d_dtype
    )


def require_tensors(name: str, operands: Mapping[str, Any], *required: str) -> None:
    """Raises UnsupportedCall("TENSOR_TYPE") unless every operand is a torch tensor, or None where it may be."""
    others = {n: t for n, t in operands.items() if not isinstance(t, torch.Tensor) and (t is not None or n in required)}
    if others:
        raise refuse(name, "TENSOR_TYPE", ", ".join(f"{n} is {type(t).__name__}" for n, t in others.items()),
                     f"torch tensors, and {', '.join(required)} given")  # fmt: skip


def _same_depth(name: str, a: int, b: int) -> int:
    if a != b:
        raise refuse(name, "SHAPE", f"K = {a} in A and {b} in B", "one K (logical elements: an FP4 byte holds two)")
    return a


# ---------------------------------------------------------------------- what is common to both families of calls


def wrong_shapes(call: Call, shapes: Mapping[str, tuple[Shape, ...]]) -> list[str]:
    """Operands whose shape is none of those given, with both."""
    return [f"{n} {tuple(call[n].shape)}, not {wanted[0]}" for n, wanted in shapes.items()
            if n in call and tuple(call[n].shape) not in wanted]  # fmt: skip


def matrices(m: int, columns: int) -> tuple[Shape, Shape]:
    return (m, columns, 1), (m, columns)


def vectors(m: int) -> tuple[Shape, Shape]:
    return (m, 1, 1), (m,)


def wrong_scales(call: Call, scales: Mapping[str, tuple[int, int, int | None]]) -> list[str]:
    """Scale operands that are not the atoms of a matrix (rows, columns) for that many experts (None: not by expert)."""
    found = []
    for name, (rows, columns, experts) in scales.items():
        if name in call:
            try:
                from_atom_view(call[name], rows, columns, experts)
            except GraphError as error:
                found.append(f"{name} {error.seen}, not {error.required}")
    return found


def wrong_types(call: Call, types: Mapping[str, tuple[torch.dtype, ...]]) -> list[str]:
    return [f"{n} is {call[n].dtype}, not {' or '.join(map(str, wanted))}" for n, wanted in types.items()
            if n in call and call[n].dtype not in wanted]  # fmt: skip


def loose_matrices(call: Call, names: Sequence[str]) -> list[str]:
    """Operands (M, X, 1) that are not row by row without gaps."""
    return [f"{n} stride {call[n].stride()}" for n in names if n in call and call[n].numel()
            and call[n].stride()[:2] != (call[n].shape[1], 1)]  # fmt: skip


def elsewhere(call: Call) -> list[str]:
    home = call["a"].device
    return [f"{n} on {t.device}" for n, t in call.operands.items() if t is not None and t.device != home]


def scale_types(call: Call) -> dict[str, str]:
    return {n: str(call[n].dtype) for n in ("sfa", "sfb", "sfd_row", "sfd_col") if n in call}


def elements_of_16_bytes(dtype: torch.dtype) -> int:
    return 32 if dtype in FP4_STORAGE else 16 // dtype.itemsize


def misaligned(call: Call, written: Mapping[str, tuple[int, torch.dtype]]) -> list[str]:
    """Contiguous extents that are no multiple of 16 bytes: A and B, and those `written` (name: extent, type)."""
    inner = call.columns if call.b_major == "n" else call.depth
    extents = {"A": (call.depth, call["a"].dtype), "B": (inner, call.b_dtype), **written}
    return [f"{name}: {n} elements of {t}" for name, (n, t) in extents.items() if n % elements_of_16_bytes(t)]


def bad_offsets(call: Call) -> str:
    """What is wrong with offsets that lie on the CPU, where looking is free; "" for others and for good ones."""
    offsets = call["padded_offsets"]
    if offsets.device.type != "cpu" or offsets.is_meta or call.options.get("is_sample"):
        return ""
    ends = offsets.tolist()
    if unaligned := [e for e in ends if e % ROW_MULTIPLE]:
        padded = [sum(-(-(e - s) // ROW_MULTIPLE) * ROW_MULTIPLE for s,
                      e in zip([0, *ends], ends[: i + 1], strict=False))
                  for i in range(len(ends))]  # fmt: skip
        return f"ends {unaligned} of {ends} (padded: {padded})"
    if ends != sorted(ends) or (ends and ends[0] < 0):
        return f"ends {ends}, which decrease"
    return f"last end {ends[-1]} of {call.rows} rows" if ends and ends[-1] > call.rows else ""


def _tile(call: Call) -> tuple[int, int]:
    rows, columns = call.options["mma_tiler_mn"]
    return rows, columns


def cluster_of(call: Call) -> tuple[int, int]:
    """The cluster as given, or NVIDIA's default for the tile."""
    given = call.options["cluster_shape_mn"]
    return tuple(given) if given is not None else ((2, 1) if _tile(call)[0] == 256 else (1, 1))


def _cluster_fits(call: Call) -> bool:
    cluster, tall = cluster_of(call), _tile(call)[0] == 256
    powers = len(cluster) == 2 and all(isinstance(c, int) and c in (1, 2, 4) for c in cluster)
    if not powers or (tall and cluster[0] % 2):
        return False
    return (cluster[0] // (2 if tall else 1)) * _tile(call)[0] in (128, 256)


def _tile_fits(call: Call) -> bool:
    if len(call.options["mma_tiler_mn"]) != 2:
        return False
    rows, columns = _tile(call)
    wide = columns == 256 if call.block_scaled else columns % 32 == 0 and 32 <= columns <= 256
    return rows in (128, 256) and wide


COMMON = (
    Requirement(
        "EXPERTS", "Expert count must be <= 1024", "1 to 1024 experts",
        lambda c: 1 <= c.experts <= MAX_EXPERTS, lambda c: f"L = {c.experts}",
    ),
    Requirement(
        "ROW_MULTIPLE", "Each group's M dimension is aligned to m_aligned (256)", "M a multiple of 256",
        lambda c: c.rows % ROW_MULTIPLE == 0, lambda c: f"M = {c.rows}",
        hint="pad every expert's rows to a multiple of 256",
    ),
    Requirement(
        "M_ALIGNED", "m_aligned: Must be 256", "m_aligned = 256",
        lambda c: c.options["m_aligned"] == ROW_MULTIPLE, lambda c: c.options["m_aligned"],
    ),
    Requirement(
        "OFFSETS", "padded_offsets: cumulative aligned end offsets",
        "non-decreasing ends in multiples of 256, at most M",
        lambda c: not bad_offsets(c), bad_offsets, lambda c: c["padded_offsets"].dtype is torch.int32,
        hint="pad every expert's rows to a multiple of 256",
    ),
    Requirement(
        "DEVICE", "All tensors on one device", "every tensor on A's device",
        lambda c: not elsewhere(c), lambda c: ", ".join(elsewhere(c)),
    ),
    Requirement(
        "ACC_DTYPE", "acc_dtype: Must be torch.float32", "None or torch.float32",
        lambda c: c.options["acc_dtype"] in (None, torch.float32), lambda c: c.options["acc_dtype"],
    ),
    Requirement(
        "CD_MAJOR", "cd_major: Must be 'n'", "'n'",
        lambda c: c.options.get("cd_major", "n") == "n", lambda c: c.options.get("cd_major"),
    ),
    Requirement(
        "B_MAJOR", "b_major: 'k' (default) or 'n'. Must be 'k' for FP4", "'k', or 'n' for types other than FP4",
        lambda c: c.options["b_major"] in (("k",) if c.family == FP4 else ("k", "n")),
        lambda c: f"b_major = {c.options['b_major']!r} for {c.b_dtype}",
    ),
    Requirement(
        "TILE", "TILE_M in {128, 256}; TILE_N = 256 (BF16: a multiple of 32 up to 256)", "a tile of the kernels",
        _tile_fits, lambda c: f"mma_tiler_mn = {c.options['mma_tiler_mn']}",
    ),
    Requirement(
        "CLUSTER", "powers of two, each <= 4, product <= 16; CLUSTER_M even when TILE_M = 256",
        "a cluster of the kernels, at most 256 rows of it side by side",
        _cluster_fits,
        lambda c: f"cluster_shape_mn = {c.options['cluster_shape_mn']} with tile {c.options['mma_tiler_mn']}",
        lambda c: _tile_fits(c),
    ),
    Requirement(
        "STREAM", "current_stream", "no stream for tensors on the CPU",
        lambda c: c.options.get("current_stream") is None or c["a"].device.type == "cuda",
        lambda c: f"a stream with tensors on {c['a'].device}",
    ),
)  # fmt: skip

_BLOCK_SCALES = (
    Requirement(
        "SCALES_MISSING", "SFA, SFB", "scales of A and of B",
        lambda c: "sfa" in c and ("sfb" in c or "sfb_ptrs" in c or (c.discrete and bool(c.options.get("is_sample")))),
        lambda c: "no " + " and no ".join(n for n in ("sfa", "sfb") if n not in c),
    ),
    Requirement(
        "SCALE_TYPE", "sf_dtype: float8_e8m0fnu or float8_e4m3fn", "E8M0 or E4M3 scales",
        lambda c: all(c[n].dtype in SCALE_TYPES for n in scale_types(c)), scale_types,
    ),
    Requirement(
        "SCALE_TYPES_DIFFER", "Scale factor tensors must have the same dtype", "one type for every scale tensor",
        lambda c: len(set(scale_types(c).values())) <= 1, scale_types,
    ),
    Requirement(
        "BLOCK_SIZE", "sf_vec_size: {16, 32}", "16 or 32",
        lambda c: c.block_size in (16, 32), lambda c: f"sf_vec_size = {c.block_size}",
    ),
    Requirement(
        "E4M3_SCALES_32", "sf_dtype=float8_e4m3fn is incompatible with sf_vec_size=32",
        "E4M3 scales with sf_vec_size 16",
        lambda c: c.block_size != 32, lambda c: "sf_vec_size = 32", lambda c: c["sfa"].dtype is torch.float8_e4m3fn,
        hint="MXFP8 takes E8M0 scales only, although NVIDIA's table lists E4M3",
    ),
    Requirement(
        "FP8_BLOCK_16", "FP8 ab_dtype with sf_vec_size=16 is not supported", "sf_vec_size = 32 for FP8",
        lambda c: c.block_size != 16, lambda c: f"sf_vec_size = 16 for {c.b_dtype}", lambda c: c.family == FP8,
    ),
    Requirement(
        "SFD_TRIPLE", "sfd_row, sfd_col and norm_const: all None or all not None", "all three or none of them",
        lambda c: len({"sfd_row" in c, "sfd_col" in c, "norm_const" in c}) == 1,
        lambda c: "only " + ", ".join(n for n in ("sfd_row", "sfd_col", "norm_const") if n in c),
        lambda c: bool(c.options.get("is_class")),
    ),
    Requirement(
        "D_COL_TYPE", "D_row and D_col must have the same dtype", "one type for both",
        lambda c: c["d_col"].dtype is c.d_dtype, lambda c: f"D is {c.d_dtype}, D_col {c['d_col'].dtype}",
        lambda c: "d_col" in c,
    ),
)  # fmt: skip


def _of_block_scaled(requirement: Requirement) -> Requirement:
    """The same, asked of block-scaled calls only, and where the scales are missing not of them."""

    def applies(call: Call) -> bool:
        readable = requirement.code == "SCALES_MISSING" or "sfa" in call
        return call.block_scaled and readable and requirement.applies(call)

    return replace(requirement, applies=applies)


BLOCK_SCALES = tuple(map(_of_block_scaled, _BLOCK_SCALES))

SCHEDULE = ("mma_tiler_mn", "cluster_shape_mn", "vector_f32", "use_dynamic_sched")
"""Options that say how one of NVIDIA's kernels runs and not what it computes. They are checked, and reported as without
effect where they are not at their default, since a plan's kernels choose for themselves."""


def idle_options(call: Call, defaults: Mapping[str, Any]) -> tuple[Reason, ...]:
    """A reason for each schedule option that is not at its default and changes nothing here."""

    def plain(value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, tuple)) else value

    chosen = {
        **{n: plain(call.options[n]) for n in SCHEDULE if n in call.options},
        "cluster_shape_mn": cluster_of(call),
    }
    usual = {**{n: plain(defaults[n]) for n in SCHEDULE if n in defaults}}
    usual["cluster_shape_mn"] = (2, 1) if _tile(call)[0] == 256 else (1, 1)
    return tuple(Reason("SCHEDULE_OPTION", f"{name} = {value}", f"{name} = {usual[name]}",
                        "it steers one of NVIDIA's kernels and changes no result; a plan's kernels choose their own")
                 for name, value in chosen.items() if name in usual and value != usual[name])  # fmt: skip


__all__ = [
    "BFLOAT16", "BLOCK_SCALES", "COMMON", "FP4", "FP8", "HALF_TYPES", "Call", "Requirement", "check", "idle_options",
    "is_canonical_weight", "loose_matrices", "major_of", "matrices", "misaligned", "read_call", "refuse",
    "require_tensors", "vectors", "weights", "wrong_scales", "wrong_shapes", "wrong_types",
]  # fmt: skip
