"""Graphs, buffers and stand-in kernels for the planner and the executor.

A stand-in kernel computes what a fused kernel would by composing torch ops, so that fused plans run without a GPU. Like
a real one it leaves rows past the last group and the padding of scales unwritten, and scribbles over its scratch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.builder import Tensor
from opfuse.graph_ops.ir import OPS, OpGraph, TensorSpec, contiguous_stride
from opfuse.graph_ops.target import ArchLike, DeviceLike
from opfuse.kernels import torch_ops
from opfuse.kernels.arch import ARCHES, Arch, ArchRange
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KernelEntry

torch.set_num_threads(1)

MODULE = "opfuse_stand_in_kernels"
EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 64
FACTORS = (-1.5, 0.5, 2.0, 0.0)
ROW_OUTPUTS = ("d", "c", "dprob", "activation")


class StandIn:
    """One fused kernel's problem, done by unfused ops in the same order of roundings."""

    def __init__(self, problem: Problem, device: Any) -> None:
        self.problem, self.device = problem, device

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        return 96 + 8 * sum(bindings.values())

    def run(self, buffers: Mapping[str, Any], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        assert workspace is not None and workspace.numel() >= self.workspace_bytes(bindings)
        assert set(buffers) == set(self.problem.tensors)
        workspace.fill_(0xFF)
        values: dict[str, Any] = dict(buffers)
        specs: dict[str, TensorSpec] = dict(self.problem.tensors)
        for op, inputs, outputs, prefix in COMPOSITIONS[self.problem.rule](self.problem):
            self._apply(op, inputs, outputs, prefix, values, specs)
        workspace.fill_(0xFF)
        rows = int(buffers["offsets"][-1]) if "offsets" in buffers else None
        for role in self.problem.tensors:
            if role + "!" not in values:
                continue
            made = values[role + "!"]
            if role.startswith("sf_"):  # padding, whose bytes are zero, is left as it is
                raw = made.view(torch.uint8)
                buffers[role].view(torch.uint8)[raw != 0] = raw[raw != 0]
                continue
            last = rows if role in ROW_OUTPUTS else None
            buffers[role][:last].copy_(made[:last])

    def _apply(
        self, op: str, inputs: Mapping[str, str], outputs: Mapping[str, str], prefix: str, values: dict[str, Any],
        specs: dict[str, TensorSpec],
    ) -> None:  # fmt: skip
        """Runs one op into fresh tensors: `name!` holds what was computed for the role `name`."""
        given = {port: name for port, name in inputs.items() if name in specs}
        attributes = {a.name: self.problem.attributes.get(prefix + a.name, a.default) for a in OPS[op].attributes}
        inferred = OPS[op].infer({p: _infer_input(specs[n]) for p, n in given.items()}, attributes)
        made: dict[str, torch.Tensor] = {}
        for port, name in outputs.items():
            if port not in inferred:
                continue
            shape = inferred[port]
            if name not in self.problem:
                data_type = shape.data_type or self.problem.rounding.get(name, DataType.FLOAT)
                specs[name] = TensorSpec(
                    0, name, shape.dim, contiguous_stride(shape.dim), data_type, glu_layout=shape.glu_layout,
                    scale_layout=shape.scale_layout,
                )  # fmt: skip
                extents = specs[name].shape(_bindings(self.problem, values))
                made[port] = torch.empty(extents, dtype=getattr(torch, data_type.info.torch_name))
            else:
                made[port] = torch.empty_like(values[name], memory_format=torch.contiguous_format)
        ports = {port: specs[name] for port, name in {**given, **outputs}.items() if name in specs}
        read = {port: values.get(name + "!", values.get(name)) for port, name in given.items()}
        torch_ops.run(op, read, made, attributes, ports)
        for port, tensor in made.items():
            values[outputs[port] + "!"] = tensor


def _infer_input(spec: TensorSpec) -> Any:
    from opfuse.graph_ops.ir.op import InferenceInput

    return InferenceInput.of(spec)


def _bindings(problem: Problem, values: Mapping[str, Any]) -> dict[str, int]:
    from opfuse.graph_ops.ir.dims import bind

    bindings: dict[str, int] = {}
    for role, spec in problem.tensors.items():
        if isinstance(values[role], torch.Tensor) and not spec.discrete:
            factor = spec.data_type.info.packed
            for axis, dim in enumerate(spec.dim):
                bind(dim, values[role].shape[axis] * (factor if axis == spec.rank - 1 else 1), bindings, role)
    return bindings


Composition = Sequence[tuple[str, Mapping[str, str], Mapping[str, str], str]]


def _epilogue(problem: Problem) -> list[tuple[str, Mapping[str, str], Mapping[str, str], str]]:
    found: list[tuple[str, Mapping[str, str], Mapping[str, str], str]] = []
    x = "d" if problem.rule != "quantize_row_col" else "x"
    for side in ("row", "col"):
        if f"q_{side}" in problem:
            found.append(("block_scale_quantize", {"x": x, "norm_const": f"norm_const_{side}"},
                          {"y": f"q_{side}", "scale": f"sf_{side}"}, f"q_{side}."))  # fmt: skip
    if "dbias" in problem:
        found.append(("group_sum", {"x": x, "offsets": "offsets"}, {"y": "dbias"}, ""))
    if "amax" in problem:
        found.append(("group_amax", {"x": x, "offsets": "offsets"}, {"y": "amax"}, "amax."))
    return found


def _matmul(y: str) -> tuple[str, Mapping[str, str], Mapping[str, str], str]:
    names = ("a", "b", "offsets", "alpha", "bias")
    return ("grouped_matmul", {n: n for n in names}, {"y": y}, "")


def _dglu(problem: Problem) -> Composition:
    backward = {"dy": "r", "x": "c", "prob": "prob", "beta": "beta"} | (
        {"offsets": "offsets"} if "beta" in problem else {}
    )
    outputs = {"dx": "d", "dprob": "dprob", "activation": "activation"}
    return [_matmul("r"), ("glu_backward", backward, outputs, ""), *_epilogue(problem)]


def _glu(problem: Problem) -> Composition:
    return [_matmul("c"), ("glu", {"x": "c", "prob": "prob"}, {"y": "d"}, ""), *_epilogue(problem)]


def _quant(problem: Problem) -> Composition:
    if "prob" not in problem:
        return [_matmul("d"), *_epilogue(problem)]
    return [_matmul("y"), ("mul", {"a": "y", "b": "prob"}, {"y": "d"}, ""), *_epilogue(problem)]


def _wgrad(problem: Problem) -> Composition:
    steps: list[tuple[str, Mapping[str, str], Mapping[str, str], str]] = []
    operands = {}
    for p in ("a", "dy"):
        operands[p] = p
        if f"sf_{p}" in problem:
            operands[p] = f"{p}_values"
            steps.append(("block_scale_dequantize", {"x": p, "scale": f"sf_{p}"}, {"y": f"{p}_values"}, ""))
    return [*steps, ("grouped_matmul_wgrad", {**operands, "offsets": "offsets"}, {"dw": "dw"}, "")]


COMPOSITIONS: dict[str, Callable[[Problem], Composition]] = {
    "grouped_gemm_dglu": _dglu,
    "grouped_gemm_glu": _glu,
    "grouped_gemm_quant": _quant,
    "grouped_gemm_wgrad": _wgrad,
    "quantize_row_col": _epilogue,
}


def stand_in(rule: str, suffix: str = "", **changes: Any) -> KernelEntry:
    """A registry entry for a stand-in kernel of `rule` on sm90."""
    entry: dict[str, Any] = dict(
        id=f"test.{rule}{suffix}", rule=rule, doc="a stand-in", arches=ArchRange((9, 0), (9, 1)), conditions=(),
        module=MODULE, evidence="measured", requires_packages=(), deterministic=True,
    )  # fmt: skip
    return KernelEntry(**{**entry, **changes})


STAND_INS = tuple(stand_in(rule) for rule in COMPOSITIONS)


class EmulatedGraph(Graph):
    """A graph that is planned for sm90 and run on the CPU, with stand-in kernels."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"kernels": STAND_INS, **options})

    def _resolve(self, arch: ArchLike | None, device: DeviceLike | None) -> tuple[Arch, torch.device | None]:
        return ARCHES["sm90"], torch.device("cpu")


def declare_dglu(graph: Graph, *, rows: Any = None, quantized: bool = True, keep_d: bool = False) -> dict[str, Tensor]:
    """The FC2 backward: product, GLU backward, quantized both ways, and the bias gradient."""
    m = graph.symbol("M") if rows is None else rows
    width, hidden, experts = INTERMEDIATE, HIDDEN, EXPERTS
    t = {
        "dy": graph.tensor("dy", (m, hidden)),
        "w2": graph.tensor("w2", (experts, hidden, width), (width * hidden, 1, hidden)),
        "h": graph.tensor("h", (m, 2 * width), glu_layout=GluLayout.interleaved(32)),
        "offs": graph.tensor("offs", (experts,), data_type=DataType.INT32),
        "prob": graph.tensor("prob", (m,), data_type=DataType.FLOAT),
    }
    r = graph.grouped_matmul(t["dy"], t["w2"], t["offs"], name="fc2")
    t["dh"], t["dprob"] = graph.glu_backward(r, t["h"], prob=t["prob"], act="swiglu", name="dglu")
    t["dbias"] = graph.group_sum(t["dh"], t["offs"], name="dbias")
    written = ["dprob", "dbias"]
    if quantized:
        for side, axis in (("row", 1), ("col", 0)):
            t[f"q_{side}"], t[f"sf_{side}"] = graph.block_scale_quantize(
                t["dh"], block_size=32, axis=axis, data_type=DataType.FP8_E4M3, name=f"quantize_{side}"
            )
            written += [f"q_{side}", f"sf_{side}"]
    if keep_d or not quantized:
        written.append("dh")
    for name in written:
        t[name].set_output(True).set_name(name)
    return t


def even_ends(rows: int, experts: int = EXPERTS) -> list[int]:
    return [rows * (g + 1) // experts for g in range(experts)]


def random_value(spec: TensorSpec, bindings: Mapping[str, int], generator: torch.Generator, ends: Sequence[int]) -> Any:
    """Unit-scale data; vectors and per-row factors from FACTORS; `offs` as given."""
    shape = spec.shape(bindings)
    dtype = getattr(torch, spec.data_type.info.torch_name)
    if spec.data_type.info.kind == "int":
        return torch.tensor(ends, dtype=dtype)
    if spec.rank == 1 or shape[-1] == 1:
        return torch.tensor(FACTORS)[torch.randint(len(FACTORS), shape, generator=generator)].to(dtype)
    value = torch.randn(shape, generator=generator)
    if spec.rank == 3:
        value = value / shape[1] ** 0.5
        if not spec.is_contiguous:
            value = value.transpose(1, 2).contiguous().transpose(1, 2)
    return value.to(dtype)


def random_pack(graph: OpGraph, rows: int, seed: int, ends: Sequence[int] | None = None) -> dict[Any, Any]:
    """A buffer for every graph input, by uid."""
    generator = torch.Generator().manual_seed(seed)
    bindings = {s.name: rows for s in graph.symbols}
    return {
        spec.uid: random_value(spec, bindings, generator, even_ends(rows) if ends is None else ends)
        for spec in graph.graph_inputs
    }


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a buffer with bytes 0xFF: NaN in every float type."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int16)
    raw.fill_(255 if tensor.element_size() == 1 else -1)
    return tensor


def is_poison(tensor: torch.Tensor) -> bool:
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int16)
    return bool((raw == (255 if tensor.element_size() == 1 else -1)).all())


def poisoned_outputs(graph: OpGraph, rows: int) -> dict[Any, Any]:
    """A poisoned buffer for every graph output, by uid."""
    bindings = {s.name: rows for s in graph.symbols}
    return {
        t.uid: poison(torch.empty(t.shape(bindings), dtype=getattr(torch, t.data_type.info.torch_name)))
        for t in graph.graph_outputs
    }


@pytest.fixture(scope="session", autouse=True)
def stand_in_module() -> Any:
    """Makes the stand-ins importable under the name that their registry entries give."""
    module = types.ModuleType(MODULE)
    module.build = StandIn  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


@pytest.fixture(scope="session")
def tools() -> Any:
    """Everything above, for tests that cannot import their conftest by name."""
    return sys.modules[__name__] if __name__ in sys.modules else types.SimpleNamespace(**globals())
