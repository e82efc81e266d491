"""What the adapters of every family hand to their class, on a machine without a GPU.

Plans run through the executor on CPU tensors. The class's constructor and check_support judge the very views of each
run; what its compiled kernel would do is replaced by the equations of NVIDIA's pages on those views, which reads codes
and scales by the formulas of the pages and writes outputs the same way.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from opfuse.graph_ops.buffers import Binder, storage_shape, storage_stride
from opfuse.graph_ops.executor import compile_plan
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.errors import VariantPackError
from opfuse.graph_ops.ir.graph import OpGraph
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import launch
from opfuse.kernels.reference import evaluate_graph
from opfuse.kernels.reference.codes import decode, decode_scale, unpack_fp4
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.registry import KERNELS

cudnn = pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the class reads the device")

ROWS, ENDS = 768, [256, 256, 512]  # an empty expert, and 256 rows outside all groups
FP4 = torch.float4_e2m1fn_x2
TYPES = {torch.float8_e4m3fn: DataType.FP8_E4M3, torch.float8_e5m2: DataType.FP8_E5M2,
         torch.float8_e8m0fnu: DataType.FP8_E8M0}  # fmt: skip


def values(codes: torch.Tensor) -> torch.Tensor:
    """(R, C) codes, FP4 packed along the contiguous axis, as float64."""
    if codes.dtype is FP4:
        stored = codes.view(torch.uint8)
        return decode(unpack_fp4(stored) if stored.stride(1) == 1 else unpack_fp4(stored.T).T, DataType.FP4_E2M1)
    return decode(codes.view(torch.uint8), TYPES[codes.dtype]) if codes.dtype in TYPES else codes.double()


def scale_index(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Where the scale of (row, block) lies in the six axes of the pages' view."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    return r % 32, r // 32 % 4, r // 128, c % 4, c // 4


def scales(view: torch.Tensor, rows: int, columns: int, expert: int = 0) -> torch.Tensor:
    index = (*scale_index(rows, columns), torch.tensor(expert))
    stored = view.view(torch.uint8)[index]
    return decode_scale(stored, TYPES[view.dtype])


def dequantized(codes: torch.Tensor, view: torch.Tensor | None, block: int, expert: int = 0) -> torch.Tensor:
    """(R, C) codes with scales along C."""
    found = values(codes)
    if view is None:
        return found
    each = scales(view, found.shape[0], -(-found.shape[1] // block), expert).repeat_interleave(block, 1)
    return found * each[:, : found.shape[1]]


def activate(act: str, options: Mapping[str, Any], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation without prob; geglu clamps."""
    if act == "swiglu":
        return up * gate * gate.sigmoid()
    if act == "geglu":
        gate = gate.clamp(max=options["glu_clamp_max"])
        up = up.clamp(options["glu_clamp_min"], options["glu_clamp_max"]) + options["linear_offset"]
        return up * gate * (options["geglu_alpha"] * gate).sigmoid()
    b1, b2 = options["situ_beta1"], options["situ_beta2"]
    return b1 * torch.tanh(gate / b1) * gate.sigmoid() * b2 * torch.tanh(up / b2)


class Kernel:
    """Stands for the compiled class of one family."""

    def __init__(self, family: launch.Family, configuration: Any) -> None:
        self.family, self.configuration = family, configuration
        self.memory: dict[int, torch.Tensor] = {}  # address -> an expert's weights or scales
        self.options = family.constructor(configuration)
        self.runs = 0

    def scratch_workspace_bytes(self) -> int:
        return 128

    def execute(self, **given: Any) -> None:
        cls = getattr(cudnn, self.family.class_name)
        inspect.signature(cls.execute).bind(None, **given)
        self.judge(cls, given)
        self.runs += 1
        (self.wgrad if "wgrad_tensor" in given else self.product)(given)

    def judge(self, cls: Any, given: Mapping[str, Any]) -> None:
        """The class's own checks of the views of this run."""
        table = self.family.arguments(self.configuration, given["a_tensor"].shape["wgrad_tensor" in given])
        samples = {a.sample: given[a.execute] for a in table}
        with pytest.raises(RuntimeError, match="CUDA is not available"):
            cls(**samples, **self.options).check_support()

    def weights(self, given: Mapping[str, Any], expert: int, block: int) -> torch.Tensor:
        """(N, K) of one expert."""
        if given.get("b_tensor") is not None:
            return dequantized(given["b_tensor"][:, :, expert], given.get("sfb_tensor"), block, expert)
        b = self.memory[int(given["b_ptrs"][expert])].T
        if "sfb_ptrs" not in given:
            return b.double()
        stored = self.memory[int(given["sfb_ptrs"][expert])]
        r, c = stored.shape[0] // 128, stored.shape[1] // 4
        view = stored.as_strided((32, 4, r, 4, c, 1), (16, 4, c * 512, 1, 512, r * c * 512))
        return dequantized(b.view(FP4) if b.dtype is torch.uint8 else b, view, block)

    def product(self, given: Mapping[str, Any]) -> None:
        block, name = self.options.get("sf_vec_size", 0), self.family.class_name
        a = dequantized(given["a_tensor"][:, :, 0], given.get("sfa_tensor"), block)
        out = torch.zeros(ROWS, self.width(given), dtype=torch.float64)
        start = 0
        for expert, end in enumerate(given["padded_offsets"].tolist()):
            rows, start = slice(start, end), end
            if end == rows.start:
                continue
            alpha = given["alpha_tensor"][expert].double() ** (2 if "Dglu" in name else 1)
            r = alpha * (a[rows] @ self.weights(given, expert, block).T)
            if given.get("bias_tensor") is not None:
                r = r + given["bias_tensor"][:, expert].double()
            prob = given["prob_tensor"][rows, 0].double()
            if "Dglu" in name:
                out[rows] = self.backward(given, r, rows, prob, expert)
            elif "Quant" in name:
                out[rows] = r * prob
            else:
                if self.options.get("generate_c", True):
                    given["c_tensor"][rows, :, 0] = r.to(given["c_tensor"].dtype)
                gate, up = r.view(len(r), -1, 2, 32).unbind(2)
                options = {"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0, **given}
                y = activate(self.options["act_func"], options, gate, up)
                out[rows] = (y * prob[:, :, None]).reshape(len(r), -1)
            if given.get("dbias_tensor") is not None:
                given["dbias_tensor"][expert, :, 0] += out[rows].sum(0).to(torch.bfloat16)
            if given.get("amax_tensor") is not None:
                self.bound(given["amax_tensor"][expert].view(-1), out[rows])
        self.write(given, out, block)

    def width(self, given: Mapping[str, Any]) -> int:
        return int(given["d_row_tensor" if "d_row_tensor" in given else "d_tensor"].shape[1])

    def backward(self, given: Any, r: torch.Tensor, rows: slice, prob: torch.Tensor, expert: int) -> torch.Tensor:
        """dglu by autograd, away from the clamps' bounds, where its masks are the page's."""
        act = self.options["act_func"][1:]
        c = given["c_tensor"][rows, :, 0].double() * (given["beta_tensor"][expert].double() if act != "geglu" else 1)
        gate, up = (x.clone().requires_grad_() for x in c.view(len(c), -1, 2, 32).unbind(2))
        wide = r.view(gate.shape)
        with torch.enable_grad():
            y = activate(act, self.options, gate, up)
            dgate, dup = torch.autograd.grad(y, (gate, up), wide * prob[:, :, None])
        parts = (wide * y.detach()).sum(2)
        into = given["dprob_tensor"]
        if into.shape[1] == 1:
            into[rows, 0, 0] += parts.sum(1).float()
        else:
            for slot in range(into.shape[1]):
                into[rows, slot, 0] = parts[:, 8 * slot : 8 * slot + 8].sum(1).float()
        return torch.stack([dgate, dup], 2).reshape(len(c), -1)

    @staticmethod
    def bound(into: torch.Tensor, out: torch.Tensor) -> None:
        if into.shape[0] == 1:
            into[0] = torch.maximum(into[0], out.abs().max().float())
            return
        halves = out.view(len(out), -1, 2, 32).abs().amax((0, 1, 3)).float()
        into.copy_(torch.maximum(into, halves))

    def write(self, given: Mapping[str, Any], out: torch.Tensor, block: int) -> None:
        d = given["d_row_tensor" if "d_row_tensor" in given else "d_tensor"]
        if given.get("sfd_row_tensor") is None:
            d[: ENDS[-1], :, 0] = out[: ENDS[-1]].to(d.dtype)
            return
        for target, view, x, rows in ((d, given["sfd_row_tensor"], out, True),
                                      (given["d_col_tensor"], given["sfd_col_tensor"], out.T, False)):  # fmt: skip
            codes, found = quantize_blocks(x.float().contiguous(), block, TYPES[d.dtype], TYPES[view.dtype],
                                           given["norm_const_tensor"])  # fmt: skip
            live, blocks = ENDS[-1], ENDS[-1] // block
            stored = codes if rows else codes.T
            target.view(torch.uint8)[:live, :, 0] = stored[:live]
            found = found[:live] if rows else found[:, :blocks]
            index = (*scale_index(found.shape[0], found.shape[1]), torch.tensor(0))
            view.view(torch.uint8)[index] = found

    def wgrad(self, given: Mapping[str, Any]) -> None:
        a, b, start = given["a_tensor"], given["b_tensor"], 0
        if given["sfa_tensor"] is not None:
            a, b = (
                dequantized(x, self.atoms(s), 32) for x, s in ((a, given["sfa_tensor"]), (b.T, given["sfb_tensor"]))
            )
            b = b.T
        for expert, end in enumerate(given["offsets_tensor"].tolist()):
            given["wgrad_tensor"][expert] = (a[:, start:end].double() @ b[start:end].double()).to(torch.bfloat16)
            start = end

    @staticmethod
    def atoms(flat: torch.Tensor) -> torch.Tensor:
        r, c = flat.shape[0] // 128, flat.shape[1] // 4
        return flat.as_strided((32, 4, r, 4, c, 1), (16, 4, c * 512, 1, 512, r * c * 512))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Compiles nothing and runs the equations; gives the kernels that were "compiled"."""
    from cuda.bindings import driver

    made: list[Kernel] = []

    def compile_(family: Any, configuration: Any, device: torch.device) -> Kernel:
        made.append(Kernel(family, configuration))
        return made[-1]

    monkeypatch.setattr(launch, "_compile", compile_)
    monkeypatch.setattr(launch, "_shared", compile_)
    monkeypatch.setattr(launch, "_stream", lambda device: driver.CUstream(0))
    yield made


def operand(spec: Any, bindings: Mapping[str, int], generator: torch.Generator) -> Any:
    """Random contents of one graph input, in its declared strides; discrete ones as a list of matrices."""
    shape, stride = storage_shape(spec, bindings), storage_stride(spec, bindings)
    if spec.name in ("alpha", "prob", "norm_const"):
        choices = torch.tensor(
            [-1.5, 0.5, 2.0, 0.0] if spec.name == "prob" else [2.0] if "norm" in spec.name else [-1.5, 0.5]
        )
        return choices[torch.randint(len(choices), shape, generator=generator)]
    if spec.name == "offsets":
        return torch.tensor(ENDS, dtype=torch.int32)
    if spec.data_type in (DataType.FP8_E8M0, DataType.FP8_E4M3) and spec.name.startswith("sf_"):
        low, high = (124, 128) if spec.data_type is DataType.FP8_E8M0 else (48, 64)
        made = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        made = made.view(torch.float8_e8m0fnu if spec.data_type is DataType.FP8_E8M0 else torch.float8_e4m3fn)
    elif spec.data_type is DataType.FP4_E2M1:
        made = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    else:
        made = torch.randn(shape, generator=generator) / (8 if spec.name == "a" else 1)
        made = made.to(getattr(torch, spec.data_type.info.torch_name))
    kept = torch.empty_strided(shape, stride, dtype=made.dtype)
    kept.view(torch.uint8 if made.dtype.itemsize == 1 else made.dtype).copy_(
        made.view(torch.uint8) if made.dtype.itemsize == 1 else made)  # fmt: skip
    return [kept[g].clone(memory_format=torch.preserve_format) for g in range(shape[0])] if spec.discrete else kept


def number(codes: torch.Tensor) -> torch.Tensor:
    """What codes or scales stand for: zero has two signs."""
    stored, kind = codes.view(torch.uint8), TYPES[codes.dtype]
    return decode_scale(stored, kind) if kind is DataType.FP8_E8M0 else decode(stored, kind)


def run(
    graph: OpGraph, kernel: str, emulated: list[Kernel], seed: int, *, addresses: bool
) -> tuple[dict, dict, OpGraph]:
    """(what the plan wrote, what the oracle says, the plan's graph)."""
    entry = next(k for k in KERNELS if k.id == kernel)
    plan = make_plan(graph, ARCHES["sm100"], kernels=[entry])
    assert [s.kernel for s in plan.steps] == [kernel], plan.reasons
    executable, binder = compile_plan(plan, torch.device("cpu")), Binder(plan.graph, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    given = {t.uid: operand(t, {"M": ROWS}, generator) for t in plan.graph.graph_inputs}
    pack = dict(given)
    for uid, value in given.items():
        if isinstance(value, list):
            emulated[-1].memory.update({x.data_ptr(): x for x in value})
            if addresses:
                pack[uid] = torch.tensor([x.data_ptr() for x in value])
    bound = binder.bind(pack)
    outputs = {t.uid: executable.allocate_output(t, bound.bindings) for t in graph.graph_outputs}
    needed = executable.workspace_bytes(bound.bindings)
    memory = torch.full((needed + 512,), 0xFF, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 128 :]
    executable.run(bound.with_buffers(outputs), memory[:needed])
    assert (memory[needed:] == 0xFF).all(), "wrote behind the workspace"
    return outputs, evaluate_graph(graph, given), plan.graph


def test_every_case_of_the_compiled_table_runs_equal_to_the_oracle(program, emulated) -> None:
    seed = random.randrange(2**32)
    for index, (name, case) in enumerate(program.CASES.items()):
        graph = program.declare(case)
        outputs, oracle, made = run(graph, case["kernel"], emulated, seed, addresses=index % 2 == 1)
        assert emulated[-1].runs == 1
        for t in made.graph_outputs:
            got, want = outputs[t.uid], oracle[t.uid]
            if t.data_type in (DataType.FP8_E4M3, DataType.FP8_E8M0):
                same = (number(got) == number(want)).double().mean()
                assert same > 0.999, f"{name}: {t.name}, {same:.5f} of the codes, seed {seed}"
                continue
            bound = 8 * 2.0**-8 if t.data_type is DataType.BFLOAT16 else 1e-5
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error <= bound, f"{name}: {t.name} is off by {error:.2e}, seed {seed}"
            if t.rank == 2 and t.dim[0] != program.EXPERTS:
                assert (got[ENDS[-1] :].double() == 0).all(), f"{name}: rows outside all groups, seed {seed}"


@pytest.mark.parametrize(
    ("name", "zeroed"),
    [
        ("grouped_gemm_dglu.block_scaled-mxfp8-swiglu-dense-dbias_amax", ("dbias", "amax")),
        ("grouped_gemm_wgrad.block_scaled-mxfp8-none-dense", ("dw",)),
    ],
)
def test_no_rows_launch_nothing_and_zero_what_is_summed(program, emulated, name, zeroed) -> None:
    case = program.CASES[name]
    entry = next(k for k in KERNELS if k.id == case["kernel"])
    (step,) = make_plan(program.declare(case), ARCHES["sm100"], kernels=[entry]).fused_steps
    assert step.match is not None
    kernel = entry.build(step.match.problem, "cpu")
    buffers = {role: torch.full(t.shape({"M": 0}), 1.0) for role, t in step.match.problem.tensors.items()}
    kernel.run(buffers, None, {"M": 0})
    assert emulated[-1].runs == 0
    assert all((buffers[role] == 0).all() for role in zeroed)


def test_a_missing_workspace_is_a_named_error(program, emulated) -> None:
    case = program.CASES["grouped_gemm_glu.block_scaled-mxfp8-swiglu-dense"]
    entry = next(k for k in KERNELS if k.id == case["kernel"])
    (step,) = make_plan(program.declare(case), ARCHES["sm100"], kernels=[entry]).fused_steps
    assert step.match is not None
    kernel = entry.build(step.match.problem, "cpu")
    with pytest.raises(VariantPackError, match="WORKSPACE"):
        kernel.run({}, None, {"M": 256})
