"""Graphs and kernel tables that the tests of the fusion pass share. No engine stands behind the kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from opfuse.fusion_rules import FusionReport, Verdict, VerdictKind, fuse
from opfuse.graph_ops.builder import GraphBuilder, Tensor
from opfuse.graph_ops.ir import DataType, GluLayout, OpGraph, ScaleLayout, verify
from opfuse.kernels.arch import ARCHES, Arch, ArchRange
from opfuse.kernels.condition import Condition
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KernelEntry

FLOAT, BF16, INT32 = DataType.FLOAT, DataType.BFLOAT16, DataType.INT32
E4M3, E5M2, E8M0 = DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FP8_E8M0
FUSIONS = ("grouped_gemm_dglu", "grouped_gemm_glu", "grouped_gemm_quant", "grouped_gemm_wgrad", "quantize_row_col")
LONE = ("grouped_gemm", "quantize")
"""Rules whose every match is one node."""
RULE_IDS = (*FUSIONS, *LONE)
SM90 = ARCHES["sm90"]
EXPERTS, DEPTH, COLUMNS = 4, 256, 128


def same(code: str, role_or_key: str, wanted: Any) -> Condition:
    """A condition that one attribute, or one absorbed value's rounding, has the wanted value where it is there."""

    def read(problem: Problem) -> Any:
        return problem.rounding.get(role_or_key, problem.attributes.get(role_or_key))

    return Condition(code, f"{role_or_key} = {wanted!r}", lambda p, a: f"{role_or_key} = {read(p)!r}",
                     lambda p, a: read(p) == wanted, applies=lambda p, a: read(p) is not None)  # fmt: skip


def typed(code: str, role: str, *wanted: DataType) -> Condition:
    return Condition(code, f"{role} in {wanted}", lambda p, a: f"{role} is {p[role].data_type!r}",
                     lambda p, a: p[role].data_type in wanted, applies=lambda p, a: role in p)  # fmt: skip


def without(*roles: str) -> tuple[Condition, ...]:
    """Conditions of a kernel that has no place for these roles."""
    return tuple(_absent(role) for role in roles)


def _absent(role: str) -> Condition:
    return Condition(
        f"NO_{role.upper()}", f"no {role}", lambda p, a: f"{role} is asked for", lambda p, a: role not in p
    )


def layout(role: str, wanted: GluLayout) -> Condition:
    return Condition("GLU_LAYOUT", f"{role} {wanted}", lambda p, a: f"{role} is {p[role].glu_layout}",
                     lambda p, a: p[role].glu_layout == wanted, applies=lambda p, a: role in p)  # fmt: skip


QUANTIZED = tuple(
    same(f"{side.upper()}_{key.upper()}", f"{side}.{key}", wanted)
    for side in ("q_row", "q_col")
    for key, wanted in (("block_size", 32), ("data_type", "FP8_E4M3"), ("scale_type", "FP8_E8M0"), ("swizzled", True))
)
EXACT = {
    "grouped_gemm_dglu": (
        same("ALPHA_EXPONENT", "alpha_exponent", 2), same("ACT", "act", "geglu"), same("RECOMPUTE", "recompute", False),
        same("GEGLU_ALPHA", "geglu_alpha", 1.702), same("CLAMP_MIN", "clamp_min", -7.0),
        same("CLAMP_MAX", "clamp_max", 7.0), same("LINEAR_OFFSET", "linear_offset", 1.0),
        same("SPLIT_GLU", "amax.split_glu", True), same("R_ROUNDING", "r", FLOAT), same("D_ROUNDING", "d", FLOAT),
        layout("c", GluLayout.interleaved(32)), typed("A_TYPE", "a", BF16), typed("D_TYPE", "d", BF16), *QUANTIZED,
    ),
    "grouped_gemm_glu": (
        same("ALPHA_EXPONENT", "alpha_exponent", 1), same("ACT", "act", "geglu"),
        same("GEGLU_ALPHA", "geglu_alpha", 1.702), same("CLAMP_MIN", "clamp_min", -7.0),
        same("CLAMP_MAX", "clamp_max", 7.0), same("LINEAR_OFFSET", "linear_offset", 1.0),
        same("SPLIT_GLU", "amax.split_glu", False), same("C_ROUNDING", "c", FLOAT), same("D_ROUNDING", "d", FLOAT),
        layout("b", GluLayout.interleaved(32)), typed("A_TYPE", "a", BF16), *QUANTIZED,
    ),
    "grouped_gemm_quant": (
        same("ALPHA_EXPONENT", "alpha_exponent", 1), same("SPLIT_GLU", "amax.split_glu", False),
        same("Y_ROUNDING", "y", FLOAT), same("D_ROUNDING", "d", FLOAT), typed("A_TYPE", "a", BF16), *QUANTIZED,
    ),
    "grouped_gemm_wgrad": (
        typed("DW_TYPE", "dw", FLOAT), same("A_ROUNDING", "a_values", FLOAT), typed("A_TYPE", "a", E4M3),
        typed("DY_TYPE", "dy", E4M3),
    ),
    "quantize_row_col": (*QUANTIZED, typed("X_TYPE", "x", BF16)),
}  # fmt: skip
"""Kernels that serve one configuration and decline every other: what a near miss must run into."""


def kernel(
    rule: str, conditions: Sequence[Condition] = (), *, name: str = "", arches: ArchRange | None = None,
    deterministic: bool = True, launches: Callable[[Problem], int] = lambda problem: 1,
) -> KernelEntry:  # fmt: skip
    return KernelEntry(
        id=name or f"test.{rule}", rule=rule, doc="a kernel that exists on paper",
        arches=arches or ArchRange((9, 0), (9, 1)), conditions=tuple(conditions), module="none", evidence="none",
        requires_packages=(), deterministic=deterministic, launches=launches,
    )  # fmt: skip


ANY_KERNELS = tuple(kernel(rule) for rule in FUSIONS)
"""One kernel for each fusion, which serves whatever the rule allows."""

EXACT_KERNELS = tuple(kernel(rule, EXACT[rule]) for rule in FUSIONS)


def frozen(g: GraphBuilder, *outputs: Tensor) -> OpGraph:
    for t in outputs:
        t.set_output(True)
    graph = g.operation_graph()
    verify(graph)
    return graph


def plan(
    graph: OpGraph, arch: Arch = SM90, *, kernels: Sequence[KernelEntry] = ANY_KERNELS, disable: Collection[str] = ()
) -> FusionReport:
    return fuse(graph, arch, kernels=kernels, disable=disable)


def chosen(report: FusionReport, rule: str) -> list[tuple[int, ...]]:
    return [m.nodes for m in report.matches if m.rule == rule]


def codes(report: FusionReport, rule: str, *kinds: VerdictKind) -> set[str]:
    return {r.code for v in said(report, rule, *kinds) for r in v.reasons}


def said(report: FusionReport, rule: str, *kinds: VerdictKind) -> list[Verdict]:
    return [v for v in report.verdicts if v.rule == rule and (not kinds or v.kind in kinds)]


@dataclass
class Parts:
    """A graph under construction with its tensors by name, so that a test can change one thing."""

    g: GraphBuilder = field(default_factory=lambda: GraphBuilder(name="test"))
    t: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        return self.t[name]

    def freeze(self) -> OpGraph:
        return frozen(self.g, *self.outputs)


def operands(
    p: Parts, depth: int = DEPTH, columns: int = COLUMNS, *, a_type: DataType = BF16, suffix: str = ""
) -> None:
    """a, b, offsets for a grouped matmul whose rows are a symbol."""
    g = p.g
    rows = g.symbol("M", multiple_of=256)
    p.t["a" + suffix] = g.tensor("a" + suffix, dim=(rows, depth), data_type=a_type)
    p.t["b" + suffix] = g.tensor("b" + suffix, dim=(EXPERTS, depth, columns), data_type=a_type)
    if "offsets" not in p.t:
        p.t["offsets"] = g.tensor("offsets", dim=(EXPERTS,), data_type=INT32)
        p.t["prob"] = g.tensor("prob", dim=(rows,), data_type=FLOAT)
        p.t["other_offsets"] = g.tensor("other_offsets", dim=(EXPERTS,), data_type=INT32)
        p.t["alpha"] = g.tensor("alpha", dim=(EXPERTS,), data_type=FLOAT)


def quantize(p: Parts, x: Tensor, along: int, **changes: Any) -> tuple[Tensor, Tensor]:
    options = {"block_size": 32, "axis": along, "data_type": E4M3, **changes}
    q, sf = p.g.block_scale_quantize(x, **options)
    p.outputs += [q, sf]
    return q, sf


def attach(p: Parts, d: Tensor, *, split: bool, which: Collection[str] = ("q_row", "q_col", "dbias", "amax")) -> None:
    """The four attachments, or those of `which`."""
    for side, axis in (("row", 1), ("col", 0)):
        if f"q_{side}" in which:
            p.t[f"q_{side}"], p.t[f"sf_{side}"] = quantize(p, d, axis)
    if "dbias" in which:
        p.t["dbias"] = p.g.group_sum(d, p["offsets"])
        p.outputs.append(p["dbias"])
    if "amax" in which:
        p.t["amax"] = p.g.group_amax(d, p["offsets"], split_glu=split)
        p.outputs.append(p["amax"])


def dglu(
    *, which: Collection[str] = ("q_row", "q_col", "dbias", "amax"), act: str = "geglu", glu: GluLayout | None = None,
    recompute: bool = False, exponent: int = 2, a_type: DataType = BF16, parameters: dict[str, Any] | None = None,
    r_type: DataType | None = None, parts: Parts | None = None, suffix: str = "",
) -> Parts:  # fmt: skip
    """grouped_matmul -> glu_backward -> attachments: nodes 0 to 5."""
    p = parts or Parts()
    operands(p, a_type=a_type, suffix=suffix)
    g = p.g
    p.t["c" + suffix] = g.tensor("c" + suffix, dim=(g.symbol("M", multiple_of=256), 2 * COLUMNS),
                                 glu_layout=glu or GluLayout.interleaved(32))  # fmt: skip
    p.t["r"] = g.grouped_matmul(
        p["a" + suffix], p["b" + suffix], p["offsets"], alpha=p["alpha"], alpha_exponent=exponent
    )
    if r_type is not None:
        p["r"].set_data_type(r_type)
    out = g.glu_backward(p["r"], p["c" + suffix], prob=p["prob"], act=act, recompute=recompute, **(parameters or {}))
    p.t["d"], p.t["dprob"] = out[:2]
    p.outputs.append(p["dprob"])
    if recompute:
        p.t["activation"] = out[2]
        p.outputs.append(out[2])
    attach(p, p["d"], split=True, which=which)
    return p


def glu(
    *, which: Collection[str] = ("q_row", "q_col", "dbias", "amax"), act: str = "geglu", exponent: int = 1,
    a_type: DataType = BF16, parameters: dict[str, Any] | None = None, glu: GluLayout | None = None,
    c_type: DataType | None = None,
) -> Parts:  # fmt: skip
    """grouped_matmul -> glu -> attachments: nodes 0 to 5. The product takes its layout from its weights."""
    p = Parts()
    operands(p, columns=2 * COLUMNS, a_type=a_type)
    p["b"]._glu_layout = glu or GluLayout.interleaved(32)
    p.t["c"] = p.g.grouped_matmul(p["a"], p["b"], p["offsets"], alpha=p["alpha"], alpha_exponent=exponent)
    if c_type is not None:
        p["c"].set_data_type(c_type)
    p.t["d"] = p.g.glu(p["c"], prob=p["prob"], act=act, **(parameters or {}))
    attach(p, p["d"], split=False, which=which)
    if not p.outputs:
        p.outputs.append(p["d"])
    return p


def quant(
    *, which: Collection[str] = ("q_row", "q_col", "dbias", "amax"), factor: bool = True, exponent: int = 1,
    a_type: DataType = BF16,
) -> Parts:  # fmt: skip
    """grouped_matmul -> mul by a factor per row -> attachments: nodes 0 to 5 (0 to 4 without factor)."""
    p = Parts()
    operands(p, a_type=a_type)
    p.t["y"] = p.g.grouped_matmul(p["a"], p["b"], p["offsets"], alpha=p["alpha"], alpha_exponent=exponent)
    p.t["d"] = p["y"]
    if factor:
        p.t["factor"] = p.g.tensor("factor", dim=(p["a"].dim[0], 1), data_type=FLOAT)
        p.t["d"] = p.g.mul(p["y"], p["factor"])
    attach(p, p["d"], split=False, which=which)
    if not p.outputs:
        p.outputs.append(p["d"])
    return p


def coded(p: Parts, name: str, columns: int, *, axis: int = 0, code: DataType = E4M3) -> Tensor:
    """Codes and scales of an (M, columns) operand as graph inputs, dequantized."""
    layout_ = ScaleLayout(32, axis)
    rows = p.g.symbol("M", multiple_of=256)
    p.t[name] = p.g.tensor(name, dim=(rows, columns), data_type=code, scale_layout=layout_)
    p.t[f"sf_{name}"] = p.g.tensor(
        f"sf_{name}", dim=layout_.storage((rows, columns)), data_type=E8M0, scale_layout=layout_
    )
    p.t[f"{name}_values"] = p.g.block_scale_dequantize(p[name], p[f"sf_{name}"])
    return p[f"{name}_values"]


def wgrad(*, quantized: Collection[str] = ("a", "dy"), axis: int = 0, accumulate: bool = False) -> Parts:
    """block_scale_dequantize of a and dy -> grouped_matmul_wgrad."""
    p = Parts()
    operands(p)
    values = {}
    for name, columns in (("a", DEPTH), ("dy", COLUMNS)):
        if name in quantized:
            values[name] = coded(p, name, columns, axis=axis)
        else:
            values[name] = p.t[name] = p.g.tensor(name, dim=(p["prob"].dim[0], columns), data_type=FLOAT)
    p.t["dw"] = p.g.grouped_matmul_wgrad(values["a"], values["dy"], p["offsets"], accumulate=accumulate)
    p["dw"].set_data_type(FLOAT)
    p.outputs.append(p["dw"])
    return p


def coded_product(
    rule: str, *, axes: tuple[int, int] = (1, 0), which: Collection[str] = ("q_row", "q_col"),
    codes_of: Collection[str] = ("a", "b"), values: DataType = BF16, copied: DataType | None = None,
    norm: bool = False, act: str = "geglu",
) -> Parts:  # fmt: skip
    """A rule's graph with a, b or both behind block_scale_dequantize. `copied`: the type of the value before identity
    of c (glu) or of d (the others), which then is an output of its own."""
    p = Parts()
    columns = 2 * COLUMNS if rule == "grouped_gemm_glu" else COLUMNS
    operands(p, columns=columns)
    g, interleaved = p.g, GluLayout.interleaved(32)
    rows = p["a"].dim[0]
    for name, dim, axis in (("a", (rows, DEPTH), axes[0]), ("b", (EXPERTS, DEPTH, columns), axes[1])):
        if name not in codes_of:
            p[name]._glu_layout = interleaved if name == "b" and rule == "grouped_gemm_glu" else None
            continue
        layout_ = ScaleLayout(32, axis)
        *experts, height, width = dim
        p.t[f"{name}_codes"] = g.tensor(f"{name}_codes", dim=dim, data_type=E4M3,
                                        glu_layout=interleaved if rule == "grouped_gemm_glu" and name == "b" else None)
        p.t[f"sf_{name}"] = g.tensor(f"sf_{name}", dim=(*experts, *layout_.storage((height, width))), data_type=E8M0,
                                     scale_layout=layout_)  # fmt: skip
        factor = g.tensor(f"norm_{name}", dim=(1,), data_type=FLOAT) if norm else None
        p.t[name] = g.block_scale_dequantize(p[f"{name}_codes"], p[f"sf_{name}"], norm_const=factor)
        p[name].set_data_type(values)
    product = p.t["y"] = g.grouped_matmul(p["a"], p["b"], p["offsets"])
    if rule == "grouped_gemm_dglu":
        c = g.tensor("c", dim=(rows, 2 * COLUMNS), glu_layout=interleaved)
        p.t["d"], dprob = g.glu_backward(product, c, prob=p["prob"], act=act)
        p.outputs.append(dprob)
    elif rule == "grouped_gemm_glu":
        p.t["d"] = g.glu(product, prob=p["prob"], act=act)
    else:
        p.t["d"] = product
    attach(p, p["d"], split=rule == "grouped_gemm_dglu", which=which)
    if copied is not None:
        source = product if rule == "grouped_gemm_glu" else p["d"]
        source.set_data_type(copied)
        p.outputs.append(g.identity(source).set_data_type(BF16))
    return p


def row_col(*, x_type: DataType = BF16, row: dict[str, Any] | None = None, col: dict[str, Any] | None = None) -> Parts:
    """Two block_scale_quantize of one graph input."""
    p = Parts()
    p.t["x"] = p.g.tensor("x", dim=(p.g.symbol("M", multiple_of=256), COLUMNS), data_type=x_type)
    p.t["q_row"], p.t["sf_row"] = quantize(p, p["x"], 1, **(row or {}))
    p.t["q_col"], p.t["sf_col"] = quantize(p, p["x"], 0, **(col or {}))
    return p


WHOLE = {
    "grouped_gemm_dglu": dglu, "grouped_gemm_glu": glu, "grouped_gemm_quant": quant, "grouped_gemm_wgrad": wgrad,
    "quantize_row_col": row_col,
}  # fmt: skip
"""For each rule a graph that it fuses whole."""
