"""What a node or a fused kernel costs on an architecture, estimated from shapes alone. Imports no torch, needs no GPU.

The model is a roofline: every tensor is read or written once, all rows are live, and
`seconds = max(flops / rate, bytes / bandwidth) + launches * launch time`. It ranks plans and fills in `explain`;
nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..graph_ops.ir.dims import evaluate
from ..graph_ops.ir.graph import Node, OpGraph
from ..graph_ops.ir.tensor import TensorSpec
from .arch import Arch
from .problem import ROLES, Problem

NOMINAL_EXTENT = 8192
"""What a symbol is taken to be where no buffer binds it: a usual count of routed tokens on one GPU."""


@dataclass(frozen=True)
class Estimate:
    """Work of a step or plan on the target arch at `bindings`: never measured, for choice and explanation only.

    `flops` counts multiplications and additions apart, `bytes` what moves between memory and the chip.
    """

    flops: float
    bytes: float
    seconds: float
    launches: int

    @staticmethod
    def total(parts: Iterable[Estimate]) -> Estimate:
        """The estimates one after the other."""
        listed = tuple(parts)
        return Estimate(
            sum(p.flops for p in listed),
            sum(p.bytes for p in listed),
            sum(p.seconds for p in listed),
            sum(p.launches for p in listed),
        )


FLOPS_PER_ELEMENT: dict[str, float] = {
    "glu": 8,
    "glu_backward": 10,
    "convert_glu_layout": 0,
    "split_glu": 0,
    "join_glu": 0,
    "identity": 0,
    "block_scale_quantize": 4,
    "block_scale_dequantize": 2,
    "sigmoid": 4,
    "swish": 5,
    "swish_backward": 10,
    "gelu": 8,
}
"""Operations per element of the largest tensor of a node, to within a factor of two; 1 where an op is not listed."""

UNFUSED_LAUNCHES: dict[str, int] = {
    "grouped_matmul": 2,
    "grouped_matmul_wgrad": 2,
    "glu": 6,
    "glu_backward": 14,
    "group_sum": 4,
    "group_amax": 5,
    "block_scale_quantize": 12,
    "block_scale_dequantize": 5,
}
"""Kernels that torch launches for an unfused node, to within a factor of two; 2 where an op is not listed (the
arithmetic in float32, the rounding copy into the output)."""


def nominal_bindings(graph: OpGraph) -> dict[str, int]:
    """A value for every symbol of `graph`, to state estimates at: NOMINAL_EXTENT, no larger than the symbol's maximum,
    rounded down to a multiple of its `multiple_of` (one multiple where that gives 0 and the maximum allows it)."""
    return {atom.name: _nominal(atom.multiple_of, atom.maximum) for atom in graph.symbols}


def node_estimate(graph: OpGraph, node: Node, arch: Arch, bindings: Mapping[str, int]) -> Estimate:
    """One node, unfused: each distinct tensor moves once, an output that is accumulated into is also read."""
    inputs = {uid: graph.tensors[uid] for _, uid in node.inputs}
    outputs = {uid: graph.tensors[uid] for _, uid in node.outputs}
    reread = [graph.tensors[uid] for port, uid in node.outputs if port in node.reads_output]
    moved = (*inputs.values(), *outputs.values(), *reread)
    return _roofline(_node_flops(graph, node, bindings), moved, UNFUSED_LAUNCHES.get(node.op, 2), arch, bindings)


def match_estimate(problem: Problem, arch: Arch, bindings: Mapping[str, int], *, launches: int = 1) -> Estimate:
    """One fused kernel: reads each input role once, writes each output role once, in `launches` launches."""
    moved = list(problem.tensors.values())
    if problem.attributes.get("accumulate"):
        moved += [problem[role.name] for role in ROLES[problem.rule] if role.is_output and role.name in problem]
    return _roofline(_match_flops(problem, bindings), moved, launches, arch, bindings)


def _nominal(multiple: int, maximum: int | None) -> int:
    limit = NOMINAL_EXTENT if maximum is None else min(NOMINAL_EXTENT, maximum)
    value = limit // multiple * multiple
    if value == 0 and (maximum is None or maximum >= multiple):
        return multiple
    return value


def _roofline(
    flops: float, moved: Iterable[TensorSpec], launches: int, arch: Arch, bindings: Mapping[str, int]
) -> Estimate:
    size = sum(t.nbytes(bindings) for t in moved if not t.is_constant)
    seconds = max(flops / arch.bf16_flops, size / arch.memory_bytes_per_second) + launches * arch.launch_seconds
    return Estimate(float(flops), float(size), seconds, launches)


def _node_flops(graph: OpGraph, node: Node, bindings: Mapping[str, int]) -> float:
    inputs, outputs = graph.inputs_of(node), graph.outputs_of(node)
    if node.op == "grouped_matmul":
        return _matmul_flops(outputs["y"], inputs["a"], bindings)
    if node.op == "grouped_matmul_wgrad":
        return _matmul_flops(inputs["a"], inputs["dy"], bindings)
    largest = max(t.elements(bindings) for t in (*inputs.values(), *outputs.values()))
    return FLOPS_PER_ELEMENT.get(node.op, 1) * largest


def _match_flops(problem: Problem, bindings: Mapping[str, int]) -> float:
    if problem.rule == "grouped_gemm_wgrad":
        return _matmul_flops(problem["a"], problem["dy"], bindings)
    written = [problem[r.name] for r in ROLES[problem.rule] if r.is_output and r.name in problem]
    largest = max((t.elements(bindings) for t in (*written, *_saved(problem))), default=0)
    per_element = {"grouped_gemm_dglu": FLOPS_PER_ELEMENT["glu_backward"], "grouped_gemm_glu": FLOPS_PER_ELEMENT["glu"]}
    quantized = sum(role in problem for role in ("q_row", "q_col")) * FLOPS_PER_ELEMENT["block_scale_quantize"]
    epilogue = (per_element.get(problem.rule, 0) + quantized) * largest
    if "b" not in problem:
        return epilogue
    rows, columns = evaluate(problem["a"].dim[0], bindings), evaluate(problem["b"].dim[2], bindings)
    return 2.0 * rows * columns * evaluate(problem["b"].dim[1], bindings) + epilogue


def _saved(problem: Problem) -> tuple[TensorSpec, ...]:
    return tuple(problem[role] for role in ("c", "x") if role in problem)


def _matmul_flops(left: TensorSpec, right: TensorSpec, bindings: Mapping[str, int]) -> float:
    """2*M*N*K for two of the three matrices, which share their rows M."""
    rows = evaluate(left.dim[0], bindings)
    return 2.0 * rows * evaluate(left.dim[1], bindings) * evaluate(right.dim[1], bindings)


__all__ = ["FLOPS_PER_ELEMENT", "NOMINAL_EXTENT", "UNFUSED_LAUNCHES", "Estimate", "match_estimate", "node_estimate",
           "nominal_bindings"]  # fmt: skip
