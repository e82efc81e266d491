"""What the BF16 dGLU adapter hands to the class, on a machine without a GPU.

The class's constructor, check_support and execute run as they are, on CPU tensors, so they judge every view that the
adapter makes; only what `compile` would have produced is replaced by the page's equations on those very arguments.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from opfuse.graph_ops.buffers import Binder
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.executor import compile_plan
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.errors import VariantPackError
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels import addresses
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import grouped_dglu, knobs, support
from opfuse.kernels.cudnn.operands import torch_type
from opfuse.kernels.problem import Problem
from opfuse.kernels.reference import evaluate_graph
from opfuse.kernels.registry import KERNELS

pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")

BF16, F16, F32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT
ROWS, K, N, EXPERTS = 1024, 64, 96, 3
ENDS = [256, 256, 768]  # an empty expert, and 256 rows outside all groups
POISON = 0xFF


class Equations:
    """The page's equations, in float64, on the operands that the class passes to its compiled kernel."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.experts: dict[int, torch.Tensor] = {}  # address -> (N, K) matrix

    def __call__(self, a, c, d, offsets, alpha, beta, prob, dprob, b, b_ptrs, dbias, workspace, stream, offset,
                 activation=None):  # fmt: skip
        start = 0
        for g, end in enumerate(offsets.tolist()):
            rows, start = slice(start, end), end
            weights = self.experts[int(b_ptrs[g])] if b is None else self.api.normalize_b(b)[1][:, :, g]
            r = alpha[g].double() ** 2 * (a[rows, :, 0].double() @ weights.double().T)
            r = r.bfloat16().double() if self.api.round_dgrad_to_input_dtype else r
            gate, up = (beta[g] * c[rows, :, 0].double()).view(-1, N // 32, 2, 32).unbind(2)
            r, p = r.view(gate.shape), prob[rows, 0, 0].double()[:, None, None]
            if self.api.act_func == "dswiglu":
                s = gate.sigmoid()
                dup, dgate, act = r * p * gate * s, r * p * up * s * (1 + gate * (1 - s)), gate * s * up
            else:
                low, high, scale = self.api.glu_clamp_min, self.api.glu_clamp_max, self.api.geglu_alpha
                y1, y2 = gate.clamp(max=high), up.clamp(low, high) + offset
                s = (scale * y1).sigmoid()
                dgate = r * p * y2 * s * (1 + scale * y1 * (1 - s)) * (gate <= high)
                dup, act = r * p * y1 * s * ((low <= up) & (up <= high)), y1 * s * y2
            both = torch.stack([dgate, dup], 2).reshape(end - rows.start, 2 * N)
            d[rows, :, 0] = both.to(d.dtype)
            dprob[rows, 0, 0] += (r * act).sum((1, 2)).float()
            if activation is not None:
                activation[rows, :, 0] = (p * act).reshape(-1, N).to(activation.dtype)
            if dbias is not None:
                for tile in both.split(128):
                    dbias[g, :, 0] += tile.sum(0).bfloat16()


def check_addresses(addresses: torch.Tensor, name: str, count: int) -> int:
    assert addresses.shape == (count,) and addresses.dtype is torch.int64 and addresses.is_contiguous(), name
    return count


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Equations]]:
    """Lets the class believe in a B200 and run the equations; gives the kernels that were "compiled"."""
    from cuda.bindings import driver
    from cudnn.gemm.cutedsl.grouped.dglu import _bf16_api

    GroupedGemmDgluBf16API = _bf16_api.GroupedGemmDgluBf16API

    made: list[Equations] = []

    def compile_(api: Any) -> None:
        api._ensure_support_checked()
        made.append(Equations(api))
        api._compiled_kernel = made[-1]

    monkeypatch.setattr(GroupedGemmDgluBf16API, "compile", compile_)
    monkeypatch.setattr(GroupedGemmDgluBf16API, "_record_pointer_stream", lambda *_: None)
    monkeypatch.setattr(_bf16_api, "_validate_pointer_tensor", check_addresses)  # the class's, but for "on CUDA"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(grouped_dglu, "_stream", lambda device: driver.CUstream(0))
    grouped_dglu.compiled.cache_clear()
    yield made
    grouped_dglu.compiled.cache_clear()


CASES: dict[str, dict[str, Any]] = {
    "dense_all_given": dict(given=("alpha", "beta", "prob")),
    "dense_nothing_given": dict(outputs=("d",)),
    "n_major_geglu_dbias": dict(
        given=("alpha",), act="geglu", major="n", c=F32, d=F32, outputs=("d", "dprob", "dbias"),
    ),
    "half_c_and_d": dict(given=("prob",), c=F16, d=F16),
    "discrete_list_rounded": dict(given=("beta", "prob"), discrete="list", product=BF16),
    "discrete_addresses_n_major_activation": dict(
        given=("alpha", "beta", "prob"), act="geglu", discrete="addresses", major="n",
        outputs=("d", "dprob", "activation"),
        parameters=dict(geglu_alpha=1.0, clamp_max=0.75, clamp_min=-0.5, linear_offset=0.0),
    ),
    "dbias_with_everything": dict(given=("alpha", "beta", "prob"), d=F32, outputs=("d", "dprob", "dbias")),
}  # fmt: skip


def declare(case: dict[str, Any]) -> tuple[Any, dict[str, Any], Problem]:
    """The graph of a case, its tensors by role, and the problem that a fusion of it would make."""
    g = GraphBuilder(io_data_type=BF16)
    m, layout = g.symbol("M", multiple_of=256), GluLayout.interleaved(32)
    stride = (K * N, 1, K) if case.get("major", "k") == "k" else None
    t: dict[str, Any] = {
        "a": g.tensor("a", (m, K)),
        "b": g.tensor("b", (EXPERTS, K, N), stride, discrete="discrete" in case),
        "offsets": g.tensor("offsets", (EXPERTS,), data_type=DataType.INT32, multiple_of=256),
        "c": g.tensor("c", (m, 2 * N), data_type=case.get("c"), glu_layout=layout),
    }
    for role, dim in (("alpha", (EXPERTS,)), ("beta", (EXPERTS,)), ("prob", (m,))):
        if role in case.get("given", ()):
            t[role] = g.tensor(role, dim, data_type=F32)
    outputs = case.get("outputs", ("d", "dprob"))
    product = g.grouped_matmul(t["a"], t["b"], t["offsets"], alpha=t.get("alpha"), alpha_exponent=2)
    product.set_data_type(case.get("product", F32))
    made = g.glu_backward(product, t["c"], act=case.get("act", "swiglu"), prob=t.get("prob"), beta=t.get("beta"),
                          offsets=t["offsets"] if "beta" in t else None, recompute="activation" in outputs,
                          **case.get("parameters", {}))  # fmt: skip
    t.update(zip(("d", "dprob", "activation"), made, strict=False))
    if case.get("d"):
        t["d"].set_data_type(case["d"])
    if "dbias" in outputs:
        t["dbias"] = g.group_sum(t["d"], t["offsets"])
    for role in outputs:
        t[role].set_output(True).set_alignment_value(32)
    graph = g.operation_graph()
    attributes = dict(graph.nodes[0].attribute) | dict(graph.nodes[1].attribute)
    roles = [r for r in t if r in outputs or t[r].uid not in graph.producers]
    specs = {r: graph.tensors[t[r].uid] for r in roles}
    return graph, t, Problem("grouped_gemm_dglu", specs, attributes, {"r": case.get("product", F32)})


def random_operands(problem: Problem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Unit-scale operands; alpha, beta and prob drawn from values that show a factor left out or applied twice."""
    shapes = {role: t.shape({"M": ROWS}) for role, t in problem.tensors.items() if not t.is_output}
    made = {}
    for role, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if role in ("alpha", "beta", "prob"):
            x = torch.tensor([-1.5, 0.5, 2.0, 0.0])[
                torch.randint(4 if role == "prob" else 3, shape, generator=generator)
            ]
        made[role] = x.to(torch_type(problem[role].data_type))
    made["a"] = made["a"] / 8
    made["offsets"] = torch.tensor(ENDS, dtype=torch.int32)
    if problem["b"].stride[1] == 1:
        made["b"] = made["b"].mT.contiguous().mT
    return made


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """`nbytes` poisoned bytes that start at a multiple of 128, with 256 more behind them."""
    memory = torch.full((nbytes + 512,), POISON, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][: nbytes + 256]


def run_case(case: dict[str, Any], emulated: list[Equations], seed: int) -> tuple[dict, dict, Problem]:
    """(what the adapter wrote, what the oracle says, the problem) of one run on fresh data."""
    graph, tensors, problem = declare(case)
    assert [str(r) for k in (support.BF16_DGLU,) for c in k if (r := c.failure(problem, ARCHES["sm100"]))] == []
    generator = torch.Generator().manual_seed(seed)
    operands = random_operands(problem, generator)
    kernel = grouped_dglu.build(problem, "cpu")
    buffers: dict[str, Any] = dict(operands)
    if "discrete" in case:
        experts = [operands["b"][g].clone(memory_format=torch.preserve_format) for g in range(EXPERTS)]
        emulated[-1].experts = {x.data_ptr(): x.T for x in experts}
        addresses = torch.tensor([x.data_ptr() for x in experts])
        buffers["b"] = experts if case["discrete"] == "list" else addresses
    written = {}
    for role, spec in problem.tensors.items():
        if spec.is_output:
            dtype = torch_type(spec.data_type)
            written[role] = torch.full(spec.shape({"M": ROWS}), float("nan"), dtype=dtype)
    needed = kernel.workspace_bytes({"M": ROWS})
    memory = aligned_bytes(needed)
    kernel.run(buffers | written, memory[:needed], {"M": ROWS})
    assert (memory[needed:] == POISON).all(), "wrote behind the workspace"
    values = {tensors[r].uid: [*operands["b"]] if r == "b" and "discrete" in case else operands[r] for r in operands}
    oracle = evaluate_graph(graph, values)
    return written, {r: oracle[tensors[r].uid] for r in written}, problem


@pytest.mark.parametrize("name", CASES)
def test_run_equals_the_oracle(emulated: list[Equations], name: str) -> None:
    seed = random.randrange(2**32)
    written, oracle, _ = run_case(CASES[name], emulated, seed)
    assert set(written) == set(CASES[name].get("outputs", ("d", "dprob")))
    live = ENDS[-1]
    for role, got in written.items():
        got, want = got.double(), oracle[role].double()
        if role != "dbias":  # outside all groups: the accumulator's zeros, else what was there
            outside = got[live:] == 0 if role == "dprob" else got[live:].isnan()
            assert outside.all(), f"{role}: rows outside all groups (seed {seed})"
            got, want = got[:live], want[:live]
        # One rounding into 16 bits; float32 sums, of a product that may have rounded to the other side of a near tie;
        # bf16 sums of up to four 128-row tiles.
        near_tie = 2.0**-9 if CASES[name].get("product") is BF16 else 1e-5
        bound = {"dprob": near_tie, "dbias": 6 * 2.0**-8}.get(role, 2.0**-7)
        assert (got - want).norm() <= bound * want.norm(), f"{role}: seed {seed}"
        assert torch.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.999, f"{role}: seed {seed}"


@pytest.mark.parametrize("name", ["dense_all_given", "discrete_list_rounded", "dbias_with_everything"])
def test_executor_runs_a_plan_for_sm100(emulated: list[Equations], name: str) -> None:
    """The executor's buffers, workspace and scratch reach the class as it wants them; outside rows come out zero."""
    seed = random.randrange(2**32)
    graph, tensors, problem = declare(CASES[name])
    operands = random_operands(problem, torch.Generator().manual_seed(seed))
    plan = make_plan(graph, ARCHES["sm100"], kernels=[k for k in KERNELS if k.id.startswith("cudnn.")])
    assert [s.kernel for s in plan.steps] == ["cudnn.grouped_gemm_dglu.bf16"]
    executable, binder = compile_plan(plan, torch.device("cpu")), Binder(plan.graph, torch.device("cpu"))
    given: dict[int, Any] = {tensors[r].uid: x for r, x in operands.items()}
    if problem["b"].discrete:
        experts = [operands["b"][g].clone(memory_format=torch.preserve_format) for g in range(EXPERTS)]
        emulated[-1].experts = {x.data_ptr(): x.T for x in experts}
        given[tensors["b"].uid] = experts
    bound = binder.bind(given)
    outputs = {t.uid: executable.allocate_output(t, bound.bindings) for t in graph.graph_outputs}
    needed = executable.workspace_bytes(bound.bindings)
    executable.run(bound.with_buffers(outputs), aligned_bytes(needed)[:needed])
    oracle = evaluate_graph(graph, {**given, tensors["b"].uid: [*operands["b"]]})
    for role in (r for r, t in problem.tensors.items() if t.is_output):
        got, want = outputs[tensors[role].uid].double(), oracle[tensors[role].uid].double()
        assert (got - want).norm() <= 6 * 2.0**-8 * want.norm(), f"{role}: seed {seed}"
        if role != "dbias":
            assert (got[ENDS[-1] :] == 0).all(), f"{role}: seed {seed}"


SPECIALISING: tuple[dict[str, Any], ...] = (
    dict(k=128),
    dict(n=64),
    dict(experts=3),
    dict(b_major="n"),
    dict(product=BF16),
    dict(changes={"c": dict(data_type=F16)}),
    dict(changes={"d": dict(data_type=F32)}),
    dict(changes={"b": dict(discrete=True)}),
    dict(roles=("dbias",), changes={"d": dict(data_type=F32)}),
    dict(act="geglu"),
    dict(act="geglu", roles=("activation",)),
    dict(act="geglu", attributes=dict(clamp_max=9.0)),
    dict(act="geglu", attributes=dict(clamp_min=-9.0)),
    dict(act="geglu", attributes=dict(geglu_alpha=1.0)),
    dict(act="geglu", attributes=dict(linear_offset=0.0)),
)
"""What makes another kernel than the first; each field of the configuration is changed by one of them."""


def test_one_compilation_serves_every_row_count(emulated: list[Equations], make_problem) -> None:
    """Configurations that differ compile apart; M and the role of prob do not matter to what is compiled."""
    first = grouped_dglu.build(make_problem(), "cpu")
    others = [grouped_dglu.build(make_problem(), "cpu", k.name) for k in knobs.BF16]
    assert len(emulated) == 1 + len(others)
    grouped_dglu.build(make_problem(rows=512, roles=("prob",)), "cpu")
    assert len(emulated) == 1 + len(others)
    changed = {"knobs"} if all(k.configuration.knobs is not None for k in others) else set()
    for change in SPECIALISING:
        before = len(emulated)
        kernel = grouped_dglu.build(make_problem(**change), "cpu")
        assert len(emulated) == before + 1, change
        changed |= {f.name for f in fields(kernel.configuration)
                    if getattr(kernel.configuration, f.name) != getattr(first.configuration, f.name)}  # fmt: skip
    assert changed == {f.name for f in fields(grouped_dglu.DgluConfiguration)}


def test_no_rows_gives_zeros(emulated: list[Equations], make_problem) -> None:
    """M = 0: no launch, and a bias gradient of zeros."""
    problem = make_problem(roles=("dbias",), changes={"d": dict(data_type=F32)})
    buffers = {role: torch.zeros(t.shape({"M": 0})) for role, t in problem.tensors.items()}
    buffers["dbias"].fill_(float("nan"))
    kernel = grouped_dglu.build(problem, "cpu")
    emulated[-1].__class__ = type("Forbidden", (Equations,), {"__call__": lambda *_: pytest.fail("launched")})
    kernel.run(buffers, None, {"M": 0})
    assert (buffers["dbias"] == 0).all()


def test_refusals_come_before_the_launch(emulated: list[Equations], make_problem) -> None:
    """A missing workspace, a misaligned expert and an activation beyond 32 bits are named errors."""
    problem = make_problem(changes={"b": dict(discrete=True)})
    kernel = grouped_dglu.build(problem, "cpu")
    buffers: dict[str, Any] = {
        role: torch.zeros(t.shape({"M": 256}), dtype=torch_type(t.data_type)) for role, t in problem.tensors.items()
    }
    with pytest.raises(VariantPackError, match="WORKSPACE"):
        kernel.run(buffers, None, {"M": 256})
    memory = torch.zeros(64 * 32 + 8, dtype=torch.bfloat16)
    odd = memory[1:][: 64 * 32].view(64, 32)
    with pytest.raises(VariantPackError, match=r"ALIGNMENT.*experts \[0, 1\]"):
        kernel.run(buffers | {"b": [odd, odd]}, aligned_bytes(kernel.workspace_bytes({"M": 256})), {"M": 256})
    recompute = grouped_dglu.build(make_problem(act="geglu", roles=("activation",)), "cpu")
    large = {role: torch.empty(1) for role in ("d", "activation", "dprob")}
    with pytest.raises(VariantPackError, match="ACTIVATION_SIZE"):
        recompute.run(large, None, {"M": 2**26})


def test_address_arrays_are_kept_for_the_latest_sets(emulated: list[Equations], make_problem) -> None:
    """A list of experts costs one address array per set of addresses, and the oldest sets go."""
    kernel = grouped_dglu.build(make_problem(changes={"b": dict(discrete=True)}), "cpu")
    into = torch.zeros(2, dtype=torch.int64)
    sets = [[torch.zeros(16), torch.zeros(16)] for _ in range(addresses.KEPT + 3)]
    for experts in [*sets, sets[-1]]:
        kernel._addresses.on_device(experts, into)
        assert into.tolist() == [x.data_ptr() for x in experts]
    assert len(kernel._addresses._recent) <= addresses.KEPT


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (dict(), 1 + 1 + 1),  # the kernel; dprob zeroed; ones
        (dict(roles=("alpha", "beta", "prob")), 1 + 1),
        (dict(without=("dprob",)), 1 + 1),
        (dict(changes={"b": dict(discrete=True)}), 1 + 2 + 1 + 1),  # addresses and their descriptors
        (dict(roles=("dbias",)), 1 + 2 + 1),
    ],
)
def test_launches(make_problem, entry, case: dict, expected: int) -> None:
    assert entry.launches(make_problem(**case)) == expected
