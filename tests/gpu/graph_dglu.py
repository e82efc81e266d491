"""Graphs of the grouped GEMM + dGLU with every option, their data and oracle, and what is wrong with a result."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.buffers import torch_dtype
from opfuse.graph_ops.ir.layouts import ScaleLayout
from opfuse.kernels.reference import evaluate_graph
from opfuse.kernels.reference.codes import decode, decode_e8m0
from opfuse.kernels.reference.quantize import quantize_blocks

KERNEL = "sm90.grouped_gemm_dglu"
DEVICE = "cuda"
BF16, F16, F32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT
E4M3, E5M2 = DataType.FP8_E4M3, DataType.FP8_E5M2
SEED = int.from_bytes(os.urandom(4), "little")
FACTORS = (-1.5, 0.5, 2.0)
POISON = 0xFF  # every byte: NaN in each float type
# Largest error of one rounding in the norm of a tensor, and float32 sums with some cancellation.
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-4}
LEAST_SQNR = {E4M3: 27.0, E5M2: 21.0}
DERIVED = ("dbias", "amax", "q_row", "q_col")
OUTPUT_NAMES = ("d", "dprob", "activation", "dbias", "amax", "q_row", "sf_row", "q_col", "sf_col")


def new_graph(**options: Any) -> Graph:
    """Every graph of this file comes from here."""
    return Graph(device=DEVICE, **options)


@dataclass(frozen=True)
class Case:
    """One problem: what the graph declares, and the rows that experts get."""

    given: tuple[str, ...] = ("prob",)  # of alpha, beta, prob
    outputs: tuple[str, ...] = ("d", "dprob")
    act: str = "swiglu"
    parameters: dict[str, float] = field(default_factory=dict)
    layout: GluLayout = field(default_factory=lambda: GluLayout.interleaved(32))
    ab: DataType = BF16
    c: DataType = BF16
    d: DataType = BF16
    dbias: DataType = F32
    activation: DataType = BF16
    codes: DataType = E4M3
    major: str = "k"
    discrete: str = ""  # "list" of experts, or their "addresses"
    exponent: int = 2
    swizzled: bool = True
    deterministic: bool = False
    K: int = 256
    N: int = 384
    sizes: tuple[int, ...] = ()
    tail: int = -1

    @property
    def multiple(self) -> int:
        """What the scales' layout needs every end offset to divide by."""
        if self.swizzled and {"q_row", "q_col"} & set(self.outputs):
            return 128
        return 32 if "q_col" in self.outputs else 1

    @property
    def splits(self) -> tuple[tuple[int, ...], int]:
        """(rows by expert, rows past the last group)."""
        if self.sizes:
            return self.sizes, max(self.tail, 0)
        return {1: ((256, 0, 1, 300, 0, 77), 70), 32: ((64, 0, 32, 96), 32), 128: ((128, 0, 256, 128), 128)}[
            self.multiple
        ]


WIDE = {"clamp_min": -0.5, "clamp_max": 1.5, "geglu_alpha": 1.0, "linear_offset": 0.25}
CASES: dict[str, Case] = {
    "plain": Case(given=(), outputs=("d",)),
    "prob": Case(),
    "alpha squared, beta": Case(given=("alpha", "beta", "prob")),
    "alpha once": Case(given=("alpha", "prob"), exponent=1),
    "concatenated": Case(layout=GluLayout.concatenated()),
    "interleaved by 1": Case(layout=GluLayout.interleaved(1)),
    "n-major": Case(major="n"),
    "discrete list": Case(discrete="list"),
    "discrete addresses, n-major": Case(discrete="addresses", major="n"),
    "geglu": Case(act="geglu"),
    "geglu, every parameter": Case(act="geglu", parameters=WIDE),
    "situglu": Case(act="situglu"),
    "situglu, every parameter": Case(act="situglu", parameters={"situ_beta1": 1.25, "situ_beta2": 2.0}),
    "fp16": Case(ab=F16, c=F16, d=F16),
    "float c": Case(c=F32),
    "float d": Case(d=F32),
    "recompute": Case(outputs=("d", "dprob", "activation")),
    "recompute without prob": Case(given=(), outputs=("d", "activation"), activation=F16),
    "dbias of the unrounded gradient": Case(outputs=("d", "dprob", "dbias")),
    "bf16 dbias": Case(outputs=("d", "dprob", "dbias"), dbias=BF16, layout=GluLayout.concatenated()),
    "amax": Case(outputs=("d", "dprob", "amax")),
    "deterministic": Case(outputs=("d", "dprob", "dbias", "amax"), deterministic=True),
    "row codes beside float d": Case(outputs=("d", "dprob", "q_row"), d=F32),
    "row and column codes beside float d": Case(outputs=("d", "dprob", "q_row", "q_col"), d=F32),
    "row and column codes beside bf16 d": Case(outputs=("d", "dprob", "q_row", "q_col", "dbias")),
    "codes alone": Case(outputs=("q_row", "q_col", "dprob")),
    "E5M2, plain scales": Case(outputs=("q_row", "q_col"), codes=E5M2, swizzled=False, layout=GluLayout.concatenated()),
    "plain row scales, any groups": Case(outputs=("d", "q_row"), swizzled=False),
    "everything": Case(
        given=("alpha", "beta", "prob"), outputs=("d", "dprob", "activation", "dbias", "amax", "q_row", "q_col"),
    ),
    "C08: the last group is empty": Case(sizes=(512, 256, 0)),
    "C08: the last group is empty, discrete": Case(sizes=(512, 256, 0), discrete="list"),
    "C19: groups that end inside tiles": Case(given=("alpha", "prob"), sizes=(128, 130, 65)),
    "C57: columns that no atom of scales divides": Case(outputs=("d", "q_row", "q_col"), d=F32, N=416),
    "C22: N == K, k-major": Case(K=256, N=256),
    "C22: N == K, n-major": Case(K=256, N=256, major="n"),
    "all rows in one expert": Case(sizes=(0, 0, 700, 0)),
    "one row each": Case(sizes=(1, 1, 1)),
    "depth and columns that no tile divides": Case(K=328, N=416),
}  # fmt: skip


def declare(graph: Graph, case: Case) -> dict[str, Any]:
    """Declares the case; its tensors by role. A 16-bit d beside what derives from the gradient is a copy of it."""
    m, experts, K, N = graph.symbol("M"), len(case.splits[0]), case.K, case.N
    stride = (K * N, 1, K) if case.major == "k" else (K * N, N, 1)
    t: dict[str, Any] = {
        "a": graph.tensor("a", (m, K), data_type=case.ab),
        "b": graph.tensor("b", (experts, K, N), stride, data_type=case.ab, discrete=bool(case.discrete)),
        "offsets": graph.tensor("offsets", (experts,), data_type=DataType.INT32, multiple_of=case.multiple),
        "c": graph.tensor("c", (m, 2 * N), data_type=case.c, glu_layout=case.layout),
    }
    for role, dim in (("alpha", (experts,)), ("beta", (experts,)), ("prob", (m,))):
        if role in case.given:
            t[role] = graph.tensor(role, dim, data_type=F32)
    exponent = {"alpha": t["alpha"], "alpha_exponent": case.exponent} if "alpha" in t else {}
    r = graph.grouped_matmul(t["a"], t["b"], t["offsets"], name="fc2_dgrad", **exponent)
    made = graph.glu_backward(
        r, t["c"], act=case.act, prob=t.get("prob"), beta=t.get("beta"), offsets=t["offsets"] if "beta" in t else None,
        recompute="activation" in case.outputs, name="dglu", **case.parameters,
    )  # fmt: skip
    wide, t["dprob"] = made[:2]
    if "activation" in case.outputs:
        t["activation"] = made[2].set_data_type(case.activation)
    derives = set(DERIVED) & set(case.outputs)
    if "d" in case.outputs:
        t["d"] = graph.identity(wide, name="round").set_data_type(case.d) if derives and case.d is not F32 else wide
        t["d"].set_data_type(case.d)
    if "dbias" in case.outputs:
        t["dbias"] = graph.group_sum(wide, t["offsets"], name="bias_grad").set_data_type(case.dbias)
    if "amax" in case.outputs:
        t["amax"] = graph.group_amax(wide, t["offsets"], split_glu=True, name="amax").set_data_type(F32)
    for side, axis in (("row", 1), ("col", 0)):
        if f"q_{side}" in case.outputs:
            t[f"q_{side}"], t[f"sf_{side}"] = graph.block_scale_quantize(
                wide, block_size=32, axis=axis, data_type=case.codes, swizzled=case.swizzled, name=f"quantize_{side}"
            )
    for role in written(case):
        t[role].set_name(role).set_output(True)
    return t


def written(case: Case) -> list[str]:
    """The names of the graph's outputs."""
    sides = [f"sf_{q[2:]}" for q in case.outputs if q.startswith("q_")]
    return [name for name in OUTPUT_NAMES if name in case.outputs or name in sides]


def operands(case: Case, seed: int) -> dict[str, Any]:
    """Unit-scale inputs on the device, NaN in rows past the last group; factors that show when they are left out or
    applied twice."""
    sizes, tail = case.splits
    experts, rows = len(sizes), sum(sizes) + tail
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: DataType, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(torch_dtype(dtype)).to(DEVICE)

    def pick(count: int, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=g)].to(DEVICE)

    stored = (experts, case.N, case.K) if case.major == "k" else (experts, case.K, case.N)
    b = randn(*stored, dtype=case.ab, scale=case.K**-0.5)
    made: dict[str, Any] = {
        "a": randn(rows, case.K, dtype=case.ab),
        "b": b.transpose(1, 2) if case.major == "k" else b,
        "offsets": torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(DEVICE),
        "c": randn(rows, 2 * case.N, dtype=case.c, scale=2.0),
    }
    vectors = {"alpha": (experts, FACTORS), "beta": (experts, FACTORS), "prob": (rows, (*FACTORS, 0.0))}
    made |= {role: pick(*vectors[role]) for role in case.given}
    for role in {"a", "c", "prob"} & set(made) if tail else ():
        made[role][-tail:] = float("nan")
    return made


def as_passed(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """The variant pack's inputs: separate experts where the case has them. `_keep` is what addresses point at."""
    if not case.discrete:
        return dict(inputs)
    experts = separate(inputs["b"])
    if case.discrete == "list":
        return {**inputs, "b": experts}
    return {**inputs, "b": torch.tensor([e.data_ptr() for e in experts], device=DEVICE), "_keep": experts}


def separate(b: torch.Tensor) -> list[torch.Tensor]:
    """Each expert's matrix in memory of its own, with its strides."""
    return [e.clone(memory_format=torch.preserve_format) for e in b]


def pack_of(passed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in passed.items() if name != "_keep"}


def poisoned(case: Case, rows: int) -> dict[str, torch.Tensor]:
    """Output buffers of bytes 0xFF."""
    experts, width = len(case.splits[0]), 2 * case.N
    shapes: dict[str, tuple[tuple[int, ...], DataType]] = {
        "d": ((rows, width), case.d), "dprob": ((rows,), F32), "activation": ((rows, case.N), case.activation),
        "dbias": ((experts, width), case.dbias), "amax": ((experts, 2), F32),
    }  # fmt: skip
    for side, axis in (("row", 1), ("col", 0)):
        stored = ScaleLayout(32, axis, case.swizzled).storage((rows, width))
        shapes[f"q_{side}"], shapes[f"sf_{side}"] = ((rows, width), case.codes), (stored, DataType.FP8_E8M0)  # type: ignore[assignment]
    made = {}
    for name in written(case):
        shape, data_type = shapes[name]
        made[name] = torch.empty(shape, dtype=torch_dtype(data_type), device=DEVICE)
        made[name].view(torch.uint8).fill_(POISON)
    return made


def run(graph: Graph, passed: dict[str, Any], outputs: dict[str, torch.Tensor]) -> None:
    """execute into `outputs`, with a workspace of exactly the size asked for, poisoned."""
    nbytes = graph.get_workspace_size({"M": passed["a"].shape[0]})
    workspace = torch.full((nbytes,), POISON, dtype=torch.uint8, device=DEVICE) if nbytes else None
    graph.execute({**pack_of(passed), **outputs}, workspace)


def oracle(case: Case, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every output in float64, rounded to float32 at most (codes and scales apart), by role; the gradient as `dx`."""
    graph = new_graph(io_data_type=BF16)
    tensors = declare(graph, replace(case, d=F32, dbias=F32, activation=F32))
    op_graph = graph.operation_graph()
    values = {tensors[role].uid: value.cpu() for role, value in inputs.items()}
    if op_graph.tensors[tensors["b"].uid].discrete:
        values[tensors["b"].uid] = list(values[tensors["b"].uid])
    found = evaluate_graph(op_graph, values)
    made = {role: found[t.uid] for role, t in tensors.items() if t.uid in found}
    node = next(n for n in op_graph.nodes if n.op == "glu_backward")
    made["dx"] = found[node.output_uids["dx"]]
    return made


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, in norm; infinite where a NaN or infinity is."""
    error = (got.double().cpu() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return float(error) if bool(error.isfinite()) else float("inf")


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the angle between them; 1 where both are zero, as few rows are whose probs are all drawn as zero."""
    if not (got.any() or want.any()):
        return 1.0
    return float(torch.nn.functional.cosine_similarity(got.double().cpu().flatten(), want.double().flatten(), 0))


def scale_matrix(case: Case, stored: torch.Tensor, side: str, rows: int) -> torch.Tensor:
    """Scale bytes as stored -> (rows, blocks) along rows, (blocks, columns) along columns."""
    raw, width = stored.view(torch.uint8).cpu(), 2 * case.N
    if not case.swizzled:
        return raw
    high, blocks = (rows, width // 32) if side == "row" else (width, -(-rows // 32))
    r, k = torch.meshgrid(torch.arange(high), torch.arange(blocks), indexing="ij")
    at = (r // 128 * -(-blocks // 4) + k // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4
    matrix = raw.flatten()[at.flatten()].view(high, blocks)
    return matrix if side == "row" else matrix.T


def complaints(case: Case, got: dict[str, torch.Tensor], unfused: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
               ) -> list[str]:  # fmt: skip
    """Everything that is wrong with the outputs of a planned run into poisoned buffers."""
    bad: list[str] = []
    sizes, tail = case.splits
    total = sum(sizes)
    for name, value in got.items():
        if name.startswith(("q_", "sf_")):
            continue
        rows = slice(None) if name in ("dbias", "amax") else slice(0, total)
        truth = want[name][rows]
        error, apart = relative(value[rows], truth), relative(unfused[name][rows], truth)
        if not error <= LIMITS[value.dtype] or not error <= 2 * apart + 1e-5:
            bad.append(f"{name}: error {error:.2e}, unfused {apart:.2e}, limit {LIMITS[value.dtype]:.0e}")
        if truth.norm() > 0 and not cosine(value[rows], truth) > 0.999:
            bad.append(f"{name}: cosine {cosine(value[rows], truth):.6f}")
        if rows.stop is not None and tail and bool(as_bytes(value[total:]).any()):
            bad.append(f"{name}: rows outside every group are not zero")
    for side in ("row", "col"):
        if f"q_{side}" in got:
            bad += wrong_codes(case, side, got, unfused, want["dx"])
    return bad


def wrong_codes(case: Case, side: str, got: dict[str, torch.Tensor], unfused: dict[str, torch.Tensor],
                dx: torch.Tensor) -> list[str]:  # fmt: skip
    bad: list[str] = []
    total, rows = sum(case.splits[0]), got[f"q_{side}"].shape[0]
    codes = got[f"q_{side}"].view(torch.uint8)[:total].cpu()
    matrix = scale_matrix(case, got[f"sf_{side}"], side, rows)
    scales = matrix[:total] if side == "row" else matrix[: total // 32]
    each = scales.repeat_interleave(32, dim=1 if side == "row" else 0)
    value = decode(codes, case.codes) * decode_e8m0(each)
    noise = (value - dx[:total].double()).norm()
    sqnr = 20 * float(torch.log10(dx[:total].double().norm() / noise)) if bool(noise > 0) else float("inf")
    if not sqnr >= LEAST_SQNR[case.codes]:
        bad.append(f"q_{side}: {sqnr:.1f} dB")
    other = unfused[f"q_{side}"].view(torch.uint8)[:total].cpu()
    if not float((codes != other).double().mean()) <= 0.02:
        bad.append(f"q_{side}: {float((codes != other).double().mean()):.2%} of codes differ from the unfused plan's")
    if "d" in case.outputs and case.d is F32:  # bit for bit, of the float32 value that the kernel itself gives
        x = got["d"][:total].cpu()
        wanted, factors = quantize_blocks(x if side == "row" else x.T.contiguous(), 32, case.codes, DataType.FP8_E8M0)
        wanted, factors = (wanted, factors) if side == "row" else (wanted.T, factors.T)
        for what, one, two in (("codes", codes, wanted), ("scales", scales, factors)):
            if not torch.equal(one, two.contiguous()):
                bad.append(f"{what} of q_{side}: {int((one != two).sum())} of {one.numel()} differ from the reference")
    if case.swizzled:
        raw = got[f"sf_{side}"].view(torch.uint8).cpu()
        layout = ScaleLayout(32, 1 if side == "row" else 0, True)
        real, stored = layout.matrix((rows, 2 * case.N)), layout.storage((rows, 2 * case.N))
        if real != stored and int((raw != 0).sum()) > int((matrix != 0).sum()):
            bad.append(f"sf_{side}: padding is not zero")
    return bad


def build(case: Case, **options: Any) -> tuple[Graph, dict[str, Any]]:
    """A graph of the case, planned unless `fused=False` is among the options."""
    graph = new_graph(name="dglu", io_data_type=BF16, deterministic=case.deterministic, **options)
    tensors = declare(graph, case)
    graph.build()
    if options.get("fused", True):
        assert [s.kernel for s in graph.plan.steps] == [KERNEL], f"{case}\n{graph.explain()}"
    return graph, tensors


def check(case: Case, seed: int) -> None:
    """Planned against unfused and float64, called and executed; raises AssertionError with all that is wrong."""
    (planned, _), (apart, _) = build(case), build(case, fused=False)
    inputs = operands(case, seed)
    passed, rows = as_passed(case, inputs), inputs["a"].shape[0]
    want = oracle(case, inputs)
    unfused_pack = {**inputs, "b": separate(inputs["b"])} if case.discrete else inputs
    unfused = dict(apart(unfused_pack))
    buffers = poisoned(case, rows)
    run(planned, passed, buffers)
    bad = complaints(case, buffers, unfused, want)
    called, total = dict(planned(pack_of(passed))), sum(case.splits[0])
    for name, value in called.items():
        rows_written = total if name in ("d", "dprob", "activation", "q_row", "q_col") else None
        same = torch.equal(as_bytes(value[:rows_written]), as_bytes(buffers[name][:rows_written]))
        if not same and not name.startswith("sf_"):
            bad.append(f"{name}: a call and an execute differ")
        if rows_written is not None and bool(as_bytes(value[total:]).any()):
            bad.append(f"{name}: a call leaves rows outside every group other than zero")
    assert not bad, "\n  ".join([f"seed {seed}, {case}", *bad])


# ------------------------------------------------------------------ sizes of single tests

MANY = Case(sizes=tuple(37 + i if i % 16 == 3 else 0 for i in range(64)), tail=0)
LONG = Case(given=(), outputs=("d",), K=64, N=4096, sizes=(262_144 + 300,))
HEAVY = Case(given=(), outputs=("d",), K=4096, N=14336, sizes=(0,) * 63 + (100,))
GRID = Case(act="geglu", given=(), outputs=("d",), K=64, N=32, sizes=(9,))
BIG = Case(K=2048, N=768, sizes=(2048,) * 8)
TUNED = replace(BIG, sizes=(512,) * 8)


def configurations(cases: Sequence[Case]) -> list[Any]:
    """What the cases compile, each once; of TUNED every variant too."""
    from opfuse.graph_ops.planner import make_plan
    from opfuse.kernels.arch import ARCHES
    from opfuse.kernels.hopper import dglu_support

    found: dict[Any, None] = {}
    for case in cases:
        graph = Graph(arch="sm90", io_data_type=BF16, deterministic=case.deterministic)
        declare(graph, case)
        (step,) = make_plan(graph.operation_graph(), ARCHES["sm90"]).steps
        assert step.match is not None, case
        names = (None, *dglu_support.variants(step.match.problem)) if case is TUNED else (None,)
        found |= dict.fromkeys(dglu_support.scheduled(step.match.problem, name) for name in names)
    return list(found)


def finish_within(seconds: float, what: str) -> None:
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            pytest.exit(f"{what}: the kernel hangs; nothing after it can run", returncode=3)
        time.sleep(0.01)


class Exporter:
    """A tensor of a framework that speaks DLPack 1.0: its capsules carry a version."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.asked = tensor, False

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = True
        return self._tensor.__dlpack__(**{**options, "max_version": (1, 0)})

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def need_memory(gibibytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.1f} are free")


def run_threads(jobs: Sequence[Callable[[], None]], wrong: list[str]) -> None:
    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a thread's failure is this test's: it is told, not lost
            wrong.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    wrong.extend("a thread hangs" for thread in threads if thread.is_alive())


def milliseconds(graph: Graph, pack: dict[str, Any], workspace: torch.Tensor | None, repeats: int = 30) -> float:
    """Median GPU time of one execute."""
    taken = []
    for _ in range(repeats + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.execute(pack, workspace)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken[5:])


def ready(case: Case) -> tuple[Graph, dict[str, Any], torch.Tensor | None]:
    graph, _ = build(case)
    inputs = operands(case, SEED)
    rows = inputs["a"].shape[0]
    nbytes = graph.get_workspace_size({"M": rows})
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) if nbytes else None
    return graph, {**inputs, **poisoned(case, rows)}, workspace
