"""What a node or a fused kernel costs on an architecture, estimated from shapes alone. Imports no torch, needs no GPU.

The model is a roofline: every tensor is read or written once, all rows are live, and
`seconds = max(flops / rate, bytes / bandwidth) + launches * launch time`. It ranks plans and fills in `explain`;
nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graph_ops.ir.dims import Dim, evaluate
from ..graph_ops.ir.dtypes import DataType
from ..graph_ops.ir.graph import Node, OpGraph
from ..graph_ops.ir.tensor import TensorSpec
from . import rates
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
            sum([p.flops for p in listed]),
            sum([p.bytes for p in listed]),
            sum([p.seconds for p in listed]),
            sum([p.launches for p in listed]),
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

TILED_LAUNCHES, TILED_ROWS, TILES_AN_EXPERT = 14, 1.5, 2
"""Of a grouped matmul over tiles (torch_ops/matmul.py): kernels that torch launches, rows with padding as a multiple of
the rows (1 to 2: a tile's height is a power of two), and copies of each expert's weights."""
STACKING_LAUNCHES = 2
"""Of separate experts' weights, which torch wants side by side: they are copied at each run."""


def nominal_bindings(graph: OpGraph) -> dict[str, int]:
    """A value for every symbol of `graph`, to state estimates at: NOMINAL_EXTENT, no larger than the symbol's maximum,
    rounded down to a multiple of its `multiple_of` (one multiple where that gives 0 and the maximum allows it)."""
    return {atom.name: _nominal(atom.multiple_of, atom.maximum) for atom in graph.symbols}


class Size(NamedTuple):
    """Of a tensor: its elements, the bytes of its data, and those from its first to its last element."""

    elements: int
    nbytes: int
    span: int


class Sizes:
    """What dims and tensors come to at fixed symbol values. Each distinct dim and tensor is worked out once.

    Keyed by identity, which is safe because everything seen is kept alive, and spares hashing expressions.
    """

    def __init__(self, bindings: Mapping[str, int]) -> None:
        self.bindings = bindings
        self._dims: dict[int, tuple[Dim, int]] = {}
        self._sizes: dict[int, Size] = {}
        self._kept: list[object] = []

    def of(self, dim: Dim) -> int:
        """The extent or stride."""
        if isinstance(dim, int):
            return dim
        held = self._dims.get(id(dim))
        if held is None:
            held = self._dims[id(dim)] = (dim, evaluate(dim, self.bindings))
        return held[1]

    def size(self, tensor: TensorSpec) -> Size:
        """All three sizes of a tensor."""
        found = self._sizes.get(id(tensor))
        if found is None:
            count = last = 1
            for dim, stride in zip(tensor.dim, tensor.stride, strict=True):
                extent = dim if isinstance(dim, int) else self.of(dim)
                count *= extent
                last += (extent - 1) * (stride if isinstance(stride, int) else self.of(stride))
            bits = tensor.data_type.info.bits
            found = self._sizes[id(tensor)] = Size(count, -(-count * bits // 8), -(-last * bits // 8) if count else 0)
            self._kept.append(tensor)
        return found

    def elements(self, tensor: TensorSpec) -> int:
        """Elements of a tensor."""
        return self.size(tensor).elements

    def nbytes(self, tensor: TensorSpec) -> int:
        """Bytes of its data, gaps of its strides not counted."""
        return self.size(tensor).nbytes

    def span(self, tensor: TensorSpec) -> int:
        """Bytes from the first to the last element, gaps included; 0 for an empty tensor."""
        return self.size(tensor).span

    def learn(self, graph: OpGraph) -> None:
        """Works out every tensor of `graph`, those that are alike together: they share one Size."""
        structure = graph.structure
        of_kind = [self.size(tensor) for tensor in structure.tensors]
        kinds = structure.tensor_kind
        self._sizes.update([(id(tensor), of_kind[kinds[uid]]) for uid, tensor in graph.tensors.items()])
        self._kept.append(graph.tensors)


def node_estimate(
    graph: OpGraph, node: Node, arch: Arch, bindings: Mapping[str, int], sizes: Sizes | None = None
) -> Estimate:
    """One node, unfused: each distinct tensor moves once, an output that is accumulated into is also read.

    `sizes` of the same bindings spares repeated work over many nodes.
    """
    sizes = sizes or Sizes(bindings)
    moved = largest = 0
    seen = set()
    for _, uid in node.inputs + node.outputs:
        if uid in seen:
            continue
        seen.add(uid)
        tensor = graph.tensors[uid]
        if tensor.value is None:
            count, size, _ = sizes.size(tensor)
            moved += size
            largest = max(largest, count)
    for port in node.reads_output:
        moved += sizes.nbytes(graph.tensors[node.output_uids[port]])
    launches, slower = UNFUSED_LAUNCHES.get(node.op, 2), 1.0
    if node.op == "grouped_matmul":
        ports = {port: graph.tensors[uid] for port, uid in (*node.inputs, *node.outputs)}
        flops = _matmul_flops(ports["y"], ports["a"], sizes)
        if _tiled(ports, arch, not {"alpha", "bias"}.isdisjoint(ports)):
            moved += _tiled_bytes(ports, sizes)
            launches, slower = TILED_LAUNCHES, TILED_ROWS
        else:
            slower = rates.factor(rates.GROUPED_MM, arch.name, sizes.of(ports["a"].dim[1]))
        if ports["b"].discrete and arch.is_cuda:
            moved += 2 * sizes.nbytes(ports["b"])
            launches += STACKING_LAUNCHES
    elif node.op == "grouped_matmul_wgrad":
        ports = {port: graph.tensors[uid] for port, uid in (*node.inputs, *node.outputs)}
        flops = _matmul_flops(ports["a"], ports["dy"], sizes)
        if _tiled(ports, arch, bool(node.reads_output)):
            moved += _tiled_wgrad_bytes(ports, sizes)
            launches, slower = TILED_LAUNCHES, TILED_ROWS
        else:
            slower = _wgrad_factor(rates.GROUPED_MM_WGRAD, ports, arch, sizes)
    else:
        flops = FLOPS_PER_ELEMENT.get(node.op, 1) * largest
    return _roofline(flops, moved, launches, arch, slower)


def match_estimate(
    problem: Problem, arch: Arch, bindings: Mapping[str, int], *, launches: int = 1, sizes: Sizes | None = None
) -> Estimate:
    """One fused kernel: reads each input role once, writes each output role once, in `launches` launches.

    `sizes` of the same bindings spares repeated work over many kernels.
    """
    sizes = sizes or Sizes(bindings)
    moved = sum(sizes.nbytes(t) for t in problem.tensors.values() if t.value is None)
    if problem.attributes.get("accumulate"):
        moved += sum(sizes.nbytes(problem[r.name]) for r in ROLES[problem.rule] if r.is_output and r.name in problem)
    slower = 1.0
    if problem.rule == "grouped_gemm":
        slower = rates.factor(rates.GROUPED_GEMM, arch.name, sizes.of(problem["a"].dim[1]))
    elif problem.rule == "grouped_gemm_wgrad":
        slower = _wgrad_factor(rates.GROUPED_WGRAD, problem.tensors, arch, sizes)
    return _roofline(_match_flops(problem, sizes), moved, launches, arch, slower)


class Costs:
    """Estimates of one graph on one arch. Nodes that are alike share one, and so do alike matches."""

    def __init__(self, graph: OpGraph, arch: Arch, bindings: Mapping[str, int]) -> None:
        self.arch, self.sizes = arch, Sizes(bindings)
        self.sizes.learn(graph)
        self._structure = structure = graph.structure
        of_kind = [node_estimate(graph, node, arch, bindings, self.sizes) for node in structure.nodes]
        self.nodes: tuple[Estimate, ...] = tuple([of_kind[kind] for kind in structure.node_kind])
        self._matches: dict[tuple[Any, ...], Estimate] = {}

    def match(self, problem: Problem, roles: Mapping[str, int], launches: int) -> Estimate:
        """One fused kernel whose roles are these tensors of the graph."""
        kind_of = self._structure.tensor_kind
        kinds = tuple([kind_of[uid] for uid in roles.values()])
        key = (problem.rule, tuple(roles), kinds, bool(problem.attributes.get("accumulate")), launches)
        estimate = self._matches.get(key)
        if estimate is None:
            estimate = match_estimate(problem, self.arch, self.sizes.bindings, launches=launches, sizes=self.sizes)
            self._matches[key] = estimate
        return estimate


def _nominal(multiple: int, maximum: int | None) -> int:
    limit = NOMINAL_EXTENT if maximum is None else min(NOMINAL_EXTENT, maximum)
    value = limit // multiple * multiple
    if value == 0 and (maximum is None or maximum >= multiple):
        return multiple
    return value


def _roofline(flops: float, size: int, launches: int, arch: Arch, slower: float = 1.0) -> Estimate:
    """`slower`: how often longer than at the dense rate the arithmetic takes."""
    arithmetic, traffic = slower * flops / arch.bf16_flops, size / arch.memory_bytes_per_second
    return Estimate(float(flops), float(size), max(arithmetic, traffic) + launches * arch.launch_seconds, launches)


def _tiled(ports: Mapping[str, TensorSpec], arch: Arch, more: bool) -> bool:
    """Whether an unfused grouped matmul or weight gradient runs over tiles of rows, as torch_ops does where torch's
    grouped_mm cannot. `more`: it does more than to multiply."""
    if arch.capability is None:
        return False
    plain = all(ports[port].data_type is DataType.BFLOAT16 for port in ("a", "b", "y", "dy", "dw") if port in ports)
    return not plain or more or arch.capability[0] not in rates.GROUPED_MM_MAJOR


def _tiled_bytes(ports: Mapping[str, TensorSpec], sizes: Sizes) -> int:
    """What the tiles move beside operands and result: rows and weights gathered, the float32 product and its copy."""
    rows, weights = sizes.nbytes(ports["a"]), sizes.nbytes(ports["b"])
    product = 4 * sizes.elements(ports["y"])
    return round(2 * TILED_ROWS * rows + 2 * TILES_AN_EXPERT * weights + (2 * TILED_ROWS + 2) * product)


def _tiled_wgrad_bytes(ports: Mapping[str, TensorSpec], sizes: Sizes) -> int:
    """The same of a weight gradient: rows of both operands gathered, a float32 product for each tile, their sum."""
    rows = sizes.nbytes(ports["a"]) + sizes.nbytes(ports["dy"])
    return round(2 * TILED_ROWS * rows + (2 * TILES_AN_EXPERT + 2) * 4 * sizes.elements(ports["dw"]))


def _wgrad_factor(
    table: Mapping[str, rates.Factors], tensors: Mapping[str, TensorSpec], arch: Arch, sizes: Sizes
) -> float:
    """A weight gradient sums over an expert's rows: their number is its depth."""
    rows, experts = sizes.of(tensors["a"].dim[0]), sizes.of(tensors["dw"].dim[0])
    return rates.factor(table, arch.name, rows // max(experts, 1))


def _match_flops(problem: Problem, sizes: Sizes) -> float:
    if problem.rule == "grouped_gemm_wgrad":
        return _matmul_flops(problem["a"], problem["dy"], sizes)
    written = [problem[r.name] for r in ROLES[problem.rule] if r.is_output and r.name in problem]
    read = [problem[role] for role in ("c", "x") if role in problem]
    largest = max((sizes.elements(t) for t in (*written, *read)), default=0)
    per_element = {"grouped_gemm_dglu": FLOPS_PER_ELEMENT["glu_backward"], "grouped_gemm_glu": FLOPS_PER_ELEMENT["glu"]}
    quantized = sum(role in problem for role in ("q_row", "q_col")) * FLOPS_PER_ELEMENT["block_scale_quantize"]
    epilogue = (per_element.get(problem.rule, 0) + quantized) * largest
    if "b" not in problem:
        return epilogue
    rows, (_, k, n) = problem["a"].dim[0], problem["b"].dim
    products = 1 + ("b_up" in problem)
    return products * 2.0 * sizes.of(rows) * sizes.of(k) * sizes.of(n) + epilogue


def _matmul_flops(left: TensorSpec, right: TensorSpec, sizes: Sizes) -> float:
    """2*M*N*K for two of the three matrices, which share their rows M."""
    return 2.0 * sizes.of(left.dim[0]) * sizes.of(left.dim[1]) * sizes.of(right.dim[1])


__all__ = ["FLOPS_PER_ELEMENT", "NOMINAL_EXTENT", "UNFUSED_LAUNCHES", "Costs", "Estimate", "Sizes", "match_estimate",
           "node_estimate", "nominal_bindings"]  # fmt: skip
