"""Graphs of the grouped GEMM + GLU with every option, their data and oracle, and what is wrong with a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import graph_dglu as shared  # type: ignore[import-not-found]
import torch
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.buffers import torch_dtype
from opfuse.kernels.reference import evaluate_graph

KERNEL = "sm90.grouped_gemm_glu"
BF16, F16, F32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT
# Of the elements of an output, those that may differ from the unfused plan's: where the product rounds the other way,
# or an approximate exp tips the activation. One that reads the product in another type differs in 30 %.
DIFFERING = 0.05


@dataclass(frozen=True)
class GluCase:
    """One problem: what the graph declares, and the rows that experts get.

    `product` is where the product rounds before the activation reads it; c, if written, is that value, or a copy of a
    FLOAT one. N columns of the activation. `apart`: gate and up have weights of their own, and c is concatenated.
    """

    given: tuple[str, ...] = ("prob",)  # of alpha, bias, prob
    outputs: tuple[str, ...] = ("c", "d")
    act: str = "swiglu"
    parameters: dict[str, float] = field(default_factory=dict)
    layout: GluLayout = field(default_factory=lambda: GluLayout.interleaved(32))
    ab: DataType = BF16
    product: DataType = BF16
    c: DataType = BF16
    d: DataType = BF16
    bias: DataType = BF16
    major: str = "k"
    apart: bool = False
    discrete: str = ""  # "list" of experts, or their "addresses"
    exponent: int = 1
    K: int = 256
    N: int = 384
    sizes: tuple[int, ...] = (256, 0, 1, 300, 0, 77)
    tail: int = 70

    @property
    def splits(self) -> tuple[tuple[int, ...], int]:
        """(rows by expert, rows past the last group)."""
        return self.sizes, self.tail


CONCATENATED, BY_ONE = GluLayout.concatenated(), GluLayout.interleaved(1)
WIDE = {"clamp_min": -0.5, "clamp_max": 1.5, "geglu_alpha": 1.0, "linear_offset": 0.25}
CASES: dict[str, GluCase] = {
    "prob": GluCase(),
    "plain": GluCase(given=()),
    "activation alone, rounded product": GluCase(outputs=("d",)),
    "activation alone, FLOAT product": GluCase(outputs=("d",), product=F32),
    "c a copy of a FLOAT product": GluCase(product=F32),
    "concatenated": GluCase(layout=CONCATENATED),
    "interleaved by 1": GluCase(layout=BY_ONE),
    "n-major": GluCase(major="n"),
    "concatenated, n-major": GluCase(layout=CONCATENATED, major="n"),
    "apart": GluCase(apart=True),
    "apart, n-major": GluCase(apart=True, major="n", act="geglu", parameters=WIDE),
    "apart, activation alone": GluCase(apart=True, outputs=("d",), given=()),
    "apart, activation alone, FLOAT product": GluCase(apart=True, outputs=("d",), product=F32),
    "apart, c a copy of a FLOAT product": GluCase(apart=True, product=F32),
    "apart, fp16, columns that no tile divides": GluCase(apart=True, ab=F16, product=F16, c=F16, d=F16, K=328, N=416),
    "discrete list": GluCase(discrete="list", layout=CONCATENATED),
    "discrete addresses, n-major": GluCase(discrete="addresses", major="n"),
    "alpha": GluCase(given=("alpha", "prob")),
    "alpha squared": GluCase(given=("alpha", "prob"), exponent=2),
    "bias": GluCase(given=("alpha", "bias", "prob")),
    "FLOAT bias, concatenated": GluCase(given=("bias",), bias=F32, layout=CONCATENATED),
    "HALF bias, interleaved by 1": GluCase(given=("bias", "prob"), bias=F16, layout=BY_ONE),
    "geglu": GluCase(act="geglu"),
    "geglu, every parameter": GluCase(act="geglu", parameters=WIDE),
    "situglu": GluCase(act="situglu", parameters={"situ_beta1": 1.25, "situ_beta2": 2.0}),
    "fp16": GluCase(ab=F16, product=F16, c=F16, d=F16),
    "HALF c and d of bf16 operands": GluCase(product=F16, c=F16, d=F16),
    "the last group is empty": GluCase(sizes=(512, 256, 0), tail=0),
    "all rows in one expert": GluCase(sizes=(0, 0, 700, 0), tail=0),
    "one row each": GluCase(sizes=(1, 1, 1), tail=5),
    "2N == K, k-major": GluCase(K=256, N=128),
    "2N == K, n-major": GluCase(K=256, N=128, major="n"),
    "depth and columns that no tile divides": GluCase(K=328, N=416),
}  # fmt: skip


def declare(graph: Graph, case: GluCase) -> dict[str, Any]:
    """Declares the case; its tensors by role."""
    m, experts, K, wide = graph.symbol("M"), len(case.sizes), case.K, 2 * case.N
    width = case.N if case.apart else wide
    stride = (K * width, 1, K) if case.major == "k" else (K * width, width, 1)
    t: dict[str, Any] = {
        "a": graph.tensor("a", (m, K), data_type=case.ab),
        "b": graph.tensor("b", (experts, K, width), stride, data_type=case.ab, discrete=bool(case.discrete),
                          glu_layout=None if case.apart else case.layout),
        "offsets": graph.tensor("offsets", (experts,), data_type=DataType.INT32),
    }  # fmt: skip
    if "alpha" in case.given:
        t["alpha"] = graph.tensor("alpha", (experts,), data_type=F32)
    if "bias" in case.given:
        t["bias"] = graph.tensor("bias", (experts, wide), data_type=case.bias, glu_layout=case.layout)
    if "prob" in case.given:
        t["prob"] = graph.tensor("prob", (m,), data_type=F32)
    exponent = {"alpha": t["alpha"], "alpha_exponent": case.exponent} if "alpha" in t else {}
    if case.apart:
        t["b_up"] = graph.tensor("b_up", (experts, K, width), stride, data_type=case.ab)
        gate, up = (graph.grouped_matmul(t["a"], t[b], t["offsets"], name=b) for b in ("b", "b_up"))
        sides = gate.set_data_type(case.product), up.set_data_type(case.product)
        product = graph.join_glu(*sides, GluLayout.concatenated(), name="fc1")
    else:
        product = graph.grouped_matmul(t["a"], t["b"], t["offsets"], bias=t.get("bias"), name="fc1", **exponent)
    product.set_data_type(case.product)
    if "c" in case.outputs:
        t["c"] = graph.identity(product, name="round") if case.product is F32 else product
        t["c"].set_data_type(case.c)
    t["d"] = graph.glu(product, act=case.act, prob=t.get("prob"), name="glu", **case.parameters)
    t["d"].set_data_type(case.d)
    for role in case.outputs:
        t[role].set_name(role).set_output(True)
    return t


def operands(case: GluCase, seed: int) -> dict[str, Any]:
    """Products of scale 2, NaN in rows past the last group; factors that show when they are left out or applied
    twice."""
    sizes, tail = case.splits
    experts, rows, wide = len(sizes), sum(sizes) + tail, 2 * case.N
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: DataType, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(torch_dtype(dtype)).to(shared.DEVICE)

    def pick(count: int, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=g)].to(shared.DEVICE)

    width = case.N if case.apart else wide
    stored = (experts, width, case.K) if case.major == "k" else (experts, case.K, width)
    weights = {name: randn(*stored, dtype=case.ab, scale=2 * case.K**-0.5) for name in ("b", "b_up")[: 1 + case.apart]}
    made: dict[str, Any] = {
        "a": randn(rows, case.K, dtype=case.ab),
        **{name: b.transpose(1, 2) if case.major == "k" else b for name, b in weights.items()},
        "offsets": torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(shared.DEVICE),
    }
    if "alpha" in case.given:
        made["alpha"] = pick(experts, shared.FACTORS)
    if "bias" in case.given:
        made["bias"] = randn(experts, wide, dtype=case.bias)
    if "prob" in case.given:
        made["prob"] = pick(rows, (*shared.FACTORS, 0.0))
    for role in {"a", "prob"} & set(made) if tail else ():
        made[role][-tail:] = float("nan")
    return made


def poisoned(case: GluCase, rows: int) -> dict[str, torch.Tensor]:
    """Output buffers of bytes 0xFF."""
    shapes = {"c": ((rows, 2 * case.N), case.c), "d": ((rows, case.N), case.d)}
    made = {}
    for name in case.outputs:
        shape, data_type = shapes[name]
        made[name] = torch.empty(shape, dtype=torch_dtype(data_type), device=shared.DEVICE)
        made[name].view(torch.uint8).fill_(shared.POISON)
    return made


def oracle(case: GluCase, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """c and d by role, of float64 sums, rounded where the graph rounds but for the activation."""
    graph = shared.new_graph(io_data_type=BF16)
    tensors = declare(graph, replace(case, d=F32))
    op_graph = graph.operation_graph()
    values = {tensors[role].uid: value.cpu() for role, value in inputs.items()}
    if op_graph.tensors[tensors["b"].uid].discrete:
        values[tensors["b"].uid] = list(values[tensors["b"].uid])
    found = evaluate_graph(op_graph, values)
    return {role: found[tensors[role].uid] for role in case.outputs}


def build(case: GluCase, **options: Any) -> Graph:
    """A graph of the case, planned unless `fused=False` is among the options."""
    graph = shared.new_graph(name="glu", io_data_type=BF16, **options)
    declare(graph, case)
    graph.build()
    if options.get("fused", True):
        assert [s.kernel for s in graph.plan.steps] == [KERNEL], f"{case}\n{graph.explain()}"
    return graph


def check(case: GluCase, seed: int) -> None:
    """Planned against unfused and float64, called and executed; raises AssertionError with all that is wrong."""
    planned, apart = build(case), build(case, fused=False)
    inputs = operands(case, seed)
    passed, rows, total = shared.as_passed(case, inputs), inputs["a"].shape[0], sum(case.sizes)
    want = oracle(case, inputs)
    unfused = dict(apart({**inputs, "b": shared.separate(inputs["b"])} if case.discrete else inputs))
    got = poisoned(case, rows)
    shared.run(planned, passed, got)
    called = dict(planned(shared.pack_of(passed)))
    bad = []
    for name, value in got.items():
        error = shared.relative(value[:total], want[name][:total])
        if not error <= shared.LIMITS[value.dtype]:
            bad.append(f"{name}: error {error:.2e}, limit {shared.LIMITS[value.dtype]:.0e}")
        if not shared.cosine(value[:total], want[name][:total]) > 0.999:
            bad.append(f"{name}: cosine {shared.cosine(value[:total], want[name][:total]):.6f}")
        differing = float((value[:total] != unfused[name][:total]).double().mean())
        if differing > DIFFERING:
            bad.append(f"{name}: {differing:.1%} of the elements are not the unfused plan's")
        if bool(shared.as_bytes(value[total:]).any()):
            bad.append(f"{name}: rows outside every group are not zero")
        if not torch.equal(shared.as_bytes(called[name]), shared.as_bytes(value)):
            bad.append(f"{name}: a call and an execute differ")
    assert not bad, "\n  ".join([f"seed {seed}, {case}", *bad])


@dataclass(frozen=True)
class CodesCase:
    """A forward whose activation leaves as MXFP8: the axes of its codes, where it rounds before, and whether it is
    written as well: itself, or, of a FLOAT activation, a copy."""

    axes: tuple[int, ...] = (1, 0)
    activation: DataType = F32
    written: bool = False
    c_written: bool = True
    swizzled: bool = True
    layout: GluLayout = field(default_factory=lambda: GluLayout.interleaved(32))
    K: int = 256
    N: int = 384
    sizes: tuple[int, ...] = (256, 0, 128, 384)
    tail: int = 128


CODES: dict[str, CodesCase] = {
    "codes alone": CodesCase(),
    "codes beside a copy of a FLOAT activation": CodesCase(written=True),
    "codes of the bf16 activation, written": CodesCase(activation=BF16, written=True),
    "codes of a bf16 activation, not written": CodesCase(activation=BF16, c_written=False),
    "codes of rows, fp16 activation": CodesCase(axes=(1,), activation=F16, written=True),
    "codes of columns, plain scales in groups of 32": CodesCase(
        axes=(0,), activation=BF16, written=True, swizzled=False, sizes=(32, 0, 96, 320), tail=0, N=448, K=328,
    ),
    "codes, concatenated": CodesCase(layout=CONCATENATED, N=448),
}  # fmt: skip


def declare_codes(graph: Graph, case: CodesCase) -> dict[str, Any]:
    """Declares the case; its outputs by role."""
    multiple = 128 if case.swizzled else 32
    m, experts = graph.symbol("M", multiple_of=multiple), len(case.sizes)
    a = graph.tensor("a", (m, case.K))
    b = graph.tensor("b", (experts, case.K, 2 * case.N), (case.K * 2 * case.N, 1, case.K), glu_layout=case.layout)
    offsets = graph.tensor("offsets", (experts,), data_type=DataType.INT32, multiple_of=multiple)
    c = graph.grouped_matmul(a, b, offsets, name="fc1").set_data_type(BF16)
    d = graph.glu(c, act="swiglu", prob=graph.tensor("prob", (m,), data_type=F32)).set_data_type(case.activation)
    out = {"c": c} if case.c_written else {}
    if case.written:
        out["d"] = graph.identity(d).set_data_type(BF16) if case.activation is F32 else d
    for axis in case.axes:
        side = "row" if axis == 1 else "col"
        out[f"q_{side}"], out[f"sf_{side}"] = graph.block_scale_quantize(
            d, block_size=32, axis=axis, data_type=DataType.FP8_E4M3, swizzled=case.swizzled)  # fmt: skip
    for role, tensor in out.items():
        tensor.set_name(role).set_output(True)
    return out


def check_codes(case: CodesCase, seed: int) -> None:
    """Planned against unfused, into poisoned buffers: codes that differ are neighbours, and few; where the activation
    is written as it was quantized, codes and scales are those of it, to the bit."""
    values = operands(GluCase(K=case.K, N=case.N, sizes=case.sizes, tail=case.tail, layout=case.layout), seed)
    rows, total, found = sum(case.sizes) + case.tail, sum(case.sizes), []
    for fused in (True, False):
        graph = shared.new_graph(name="glu_codes", io_data_type=BF16, fused=fused)
        made = declare_codes(graph, case)
        graph.build()
        assert not fused or [s.kernel for s in graph.plan.steps] == [KERNEL], f"{case}\n{graph.explain()}"
        specs = {role: graph.operation_graph().tensors[t.uid] for role, t in made.items()}
        out = {}
        for role, spec in specs.items():
            out[role] = torch.empty(spec.shape({"M": rows}), dtype=torch_dtype(spec.data_type), device=shared.DEVICE)
            out[role].view(torch.uint8).fill_(shared.POISON)
        shared.run(graph, values, out)
        found.append({role: x.view(torch.uint8) if role[:2] in ("q_", "sf") else x for role, x in out.items()})
    got, want = found
    bad = [f"{role}: rows outside every group are not zero" for role in got.keys() - {"sf_row", "sf_col"}
           if bool(shared.as_bytes(got[role][total:]).any())]  # fmt: skip
    for role, x in got.items():
        mine, theirs = (x, want[role]) if role[:2] == "sf" else (x[:total], want[role][:total])
        differing = float((mine != theirs).double().mean())
        if differing > DIFFERING:
            bad.append(f"{role}: {differing:.1%} of the elements are not the unfused plan's")
    if case.written and case.activation is not F32:
        alone = shared.new_graph(name="codes", io_data_type=BF16, fused=False)
        d = alone.tensor("d", (alone.symbol("M", multiple_of=32), case.N), data_type=case.activation)
        for axis in case.axes:
            side = "row" if axis == 1 else "col"
            codes, scales = alone.block_scale_quantize(
                d, block_size=32, axis=axis, data_type=DataType.FP8_E4M3, swizzled=case.swizzled
            )
            codes.set_name(f"q_{side}").set_output(True)
            scales.set_name(f"sf_{side}").set_output(True)
        alone.build()
        for role, value in dict(alone({"d": got["d"]})).items():
            if not torch.equal(value.view(torch.uint8)[: len(got[role])], got[role]):
                bad.append(f"{role} is not that of d")
    assert not bad, "\n  ".join([f"seed {seed}, {case}", *bad])


def configurations(cases: Sequence[Any]) -> list[Any]:
    """What the cases compile, each once."""
    from opfuse.graph_ops.planner import make_plan
    from opfuse.kernels.arch import ARCHES
    from opfuse.kernels.hopper import glu_support

    found: dict[Any, None] = {}
    for case in cases:
        graph = Graph(arch="sm90", io_data_type=BF16)
        (declare_codes if isinstance(case, CodesCase) else declare)(graph, case)
        (step,) = make_plan(graph.operation_graph(), ARCHES["sm90"]).steps
        assert step.match is not None, case
        found[glu_support.scheduled(step.match.problem)] = None
    return list(found)
