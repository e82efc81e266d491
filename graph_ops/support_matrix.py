"""What runs where: every rule with each kind of operands, weights and activation, asked of the pass for each arch.

Nothing is written down by hand: each cell is what `fuse` says of the graph that a user would declare for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..fusion_rules import VerdictKind, fuse
from ..fusion_rules.support import NO_KERNEL
from ..kernels.arch import ARCHES
from ..kernels.registry import KERNELS, KernelEntry
from .builder import GraphBuilder, Tensor
from .ir.dtypes import DataType
from .ir.graph import OpGraph
from .ir.layouts import GluLayout, ScaleLayout

EXPERTS, DEPTH, COLUMNS = 8, 256, 256
ARCH_NAMES = ("sm90", "sm100", "sm103", "sm107")
LAYOUT = GluLayout.interleaved(32)
MEASURED, COMPILED, DECLINES = "runs and is measured here", "compiles here, not run", "declines"
STATES = {"measured": MEASURED, "compiled": COMPILED}


@dataclass(frozen=True)
class Operands:
    """One kind of operands: their type, and block and scale of codes; `output` is d's type, None for MXFP8 codes."""

    name: str
    data_type: DataType
    block: int = 0
    scale: DataType = DataType.FP8_E8M0
    output: DataType | None = None


_BF16, _HALF, _E4M3, _FP4 = DataType.BFLOAT16, DataType.HALF, DataType.FP8_E4M3, DataType.FP4_E2M1
FLOATS = (Operands("bf16", _BF16, output=_BF16), Operands("fp16", _HALF, output=_HALF))
TO_CODES = (Operands("bf16 to mxfp8", _BF16),)
CODED = (
    Operands("mxfp8", _E4M3, 32),
    Operands("mxfp8 to bf16", _E4M3, 32, output=_BF16),
    Operands("nvfp4 to bf16", _FP4, 16, _E4M3, _BF16),
    Operands("mxfp4 to bf16", _FP4, 32, output=_BF16),
)
RULES: dict[str, tuple[tuple[Operands, ...], tuple[bool, ...], tuple[str, ...]]] = {
    "grouped_gemm_dglu": ((*FLOATS, *TO_CODES, *CODED), (False, True), ("swiglu", "geglu", "situglu")),
    "grouped_gemm_glu": ((*FLOATS, *TO_CODES, *CODED), (False, True), ("swiglu", "geglu", "situglu")),
    "grouped_gemm_quant": ((*TO_CODES, CODED[0]), (False, True), ("",)),
    "grouped_gemm_wgrad": ((*FLOATS, Operands("mxfp8", _E4M3, 32, output=_BF16), CODED[2]), (False,), ("",)),
    "quantize_row_col": (TO_CODES, (False,), ("",)),
    "grouped_gemm": ((*FLOATS, Operands("bf16 to float", _BF16, output=DataType.FLOAT)), (False, True), ("",)),
    "quantize": (TO_CODES, (False,), ("",)),
}
"""The kinds of operands, the weight modes (discrete or not) and the activations of each rule."""


@dataclass(frozen=True)
class Cell:
    """One answer: a state, the kernel that it is of, and for "declines" the code of the reason."""

    state: str
    kernel: str | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.state == DECLINES else self.state


@dataclass(frozen=True)
class MatrixRow:
    """One line: activations, and then weight modes, with the same answers stand together. `cells` go by ARCH_NAMES."""

    rule: str
    operands: str
    weights: tuple[str, ...]
    acts: tuple[str, ...]
    cells: tuple[Cell, ...]


def _coded(g: GraphBuilder, name: str, dim: tuple[Any, ...], kind: Operands, axis: int, **options: Any) -> Tensor:
    made = g.tensor(name, dim, data_type=kind.data_type, **options)
    if not kind.block:
        return made
    layout = ScaleLayout(kind.block, axis)
    *experts, rows, columns = dim
    scales = g.tensor(f"sf_{name}", (*experts, *layout.storage((rows, columns))), data_type=kind.scale,
                      scale_layout=layout, discrete=options.get("discrete", False))  # fmt: skip
    values = g.block_scale_dequantize(made, scales).set_data_type(_BF16)
    return values.set_stride(options["stride"]) if "stride" in options else values


def declare(rule: str, kind: Operands, discrete: bool, act: str) -> OpGraph:
    """The graph that a user would declare for one row: M free in multiples of 256, K-major weights."""
    g = GraphBuilder()
    m = g.symbol("M", multiple_of=256)
    if rule in ("quantize_row_col", "quantize"):
        x = g.tensor("x", (m, COLUMNS), data_type=kind.data_type)
        return _written(g, x, kind, (1, 0) if rule == "quantize_row_col" else (1,))
    offsets = g.tensor("offsets", (EXPERTS,), data_type=DataType.INT32, multiple_of=256)
    if rule == "grouped_gemm_wgrad":
        a, dy = (_coded(g, name, (m, DEPTH), kind, 0) for name in ("a", "dy"))
        g.grouped_matmul_wgrad(a, dy, offsets).set_data_type(kind.output or _BF16).set_output(True)
        return g.operation_graph()
    glu = {"glu_layout": LAYOUT} if rule == "grouped_gemm_glu" else {}
    stride = (DEPTH * COLUMNS, 1, DEPTH)
    a = _coded(g, "a", (m, DEPTH), kind, 1)
    b = _coded(g, "b", (EXPERTS, DEPTH, COLUMNS), kind, 0, stride=stride, discrete=discrete, **glu)
    product = g.grouped_matmul(a, b, offsets)
    if rule in ("grouped_gemm_quant", "grouped_gemm"):
        return _written(g, product, kind)
    prob = g.tensor("prob", (m,), data_type=DataType.FLOAT)
    if rule == "grouped_gemm_glu":
        return _written(g, g.glu(product, act=act, prob=prob), kind)
    c = g.tensor("c", (m, 2 * COLUMNS), data_type=_HALF if kind.data_type is _HALF else _BF16, glu_layout=LAYOUT)
    dx, dprob = g.glu_backward(product, c, act=act, prob=prob)
    dprob.set_output(True)
    return _written(g, dx, kind)


def _written(g: GraphBuilder, value: Tensor, kind: Operands, axes: Sequence[int] = (1, 0)) -> OpGraph:
    """The graph with `value` as its output, or its MXFP8 codes along these axes."""
    if kind.output is not None:
        value.set_data_type(kind.output).set_output(True)
        return g.operation_graph()
    for axis in axes:
        for t in g.block_scale_quantize(value, block_size=32, axis=axis, data_type=_E4M3):
            t.set_output(True)
    return g.operation_graph()


def ask(rule: str, graph: OpGraph, arch: str, kernels: Sequence[KernelEntry]) -> Cell:
    """What the pass says of the rule for the whole graph: the first kernel that serves it, else the nearest decline:
    of a kernel for the arch where there is one, and with the fewest reasons."""
    nearest: tuple[tuple[bool, int], Cell] | None = None
    for kernel in (k for k in kernels if k.rule == rule):
        verdicts = fuse(graph, ARCHES[arch], kernels=(kernel,)).verdicts
        judged = [v for v in verdicts if v.rule == rule and v.kernel == kernel.id]
        whole = [v for v in judged if len(v.nodes) == len(graph.nodes)]
        if any(v.kind in (VerdictKind.CHOSEN, VerdictKind.NOT_CHOSEN) for v in whole):
            return Cell(STATES[kernel.evidence], kernel.id)
        reasons = next((v.reasons for v in (*whole, *judged) if v.reasons), ())
        if reasons:
            rank = (ARCHES[arch] not in kernel.arches, len(reasons))
            if nearest is None or rank < nearest[0]:
                nearest = rank, Cell(DECLINES, kernel.id, reasons[0].code)
    return nearest[1] if nearest is not None else Cell(DECLINES, None, NO_KERNEL)


def support_matrix(kernels: Sequence[KernelEntry] = KERNELS) -> tuple[MatrixRow, ...]:
    """Every row, activations and weight modes with equal answers in one."""
    return tuple(itertools.chain.from_iterable(_rows(rule, kernels) for rule in RULES))


def _rows(rule: str, kernels: Sequence[KernelEntry]) -> Iterator[MatrixRow]:
    kinds, modes, acts = RULES[rule]
    for kind in kinds:
        lines: dict[tuple[tuple[str, ...], tuple[Cell, ...]], list[str]] = {}
        for discrete in modes:
            answers: dict[tuple[Cell, ...], list[str]] = {}
            for act in acts:
                graph = declare(rule, kind, discrete, act)
                cells = tuple(ask(rule, graph, arch, kernels) for arch in ARCH_NAMES)
                answers.setdefault(cells, []).append(act)
            mode = "" if len(modes) == 1 else "discrete" if discrete else "dense"
            for cells, alike in answers.items():
                lines.setdefault((tuple(a for a in alike if a), cells), []).append(mode)
        for (together, cells), weights in lines.items():
            yield MatrixRow(rule, kind.name, tuple(w for w in weights if w), together, cells)


def markdown(rows: Sequence[MatrixRow]) -> str:
    """The matrix as a Markdown table: one column for each arch; every other arch runs unfused."""
    names = ("rule", "operands", "weights", "act", *ARCH_NAMES)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = (f"`{row.rule}`", row.operands, ", ".join(row.weights), ", ".join(row.acts), *map(str, row.cells))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


__all__ = ["Cell", "MatrixRow", "ask", "declare", "markdown", "support_matrix"]
