"""Builds cudnn-frontend's kernels for a GPU that is not here, from graphs, and prints the outcome as JSON.

A program of its own, since the DSL reads its target from the environment when it is imported.
Usage: DUMP_FOLDER ARCH [CASE ...]; a case is a name of CASES. Each is declared as a graph, fused by the one kernel that
it names, and built through the registry. Torch's questions about the device get the answers of that GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from opfuse.fusion_rules import fuse
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.graph import OpGraph
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.graph_ops.ir.verify import verify
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import knobs
from opfuse.kernels.registry import KERNELS

K, N, EXPERTS, ROWS = 256, 128, 3, 768
BF16, F32 = DataType.BFLOAT16, DataType.FLOAT
LAYOUT = GluLayout.interleaved(32)
CAPABILITIES = {"sm_100a": (10, 0), "sm_103a": (10, 3), "sm_107a": (10, 7)}
# name: codes, block, scale of the operands, and the type of D (None: MXFP8 codes)
FAMILIES: dict[str, tuple[DataType, int, DataType, DataType | None]] = {
    "bf16": (BF16, 0, BF16, BF16),
    "mxfp8": (DataType.FP8_E4M3, 32, DataType.FP8_E8M0, None),
    "mxfp8_e5m2": (DataType.FP8_E5M2, 32, DataType.FP8_E8M0, None),
    "mxfp8_bf16": (DataType.FP8_E4M3, 32, DataType.FP8_E8M0, BF16),
    "nvfp4": (DataType.FP4_E2M1, 16, DataType.FP8_E4M3, BF16),
    "mxfp4": (DataType.FP4_E2M1, 32, DataType.FP8_E8M0, F32),
}
DGLU = "cudnn.grouped_gemm_dglu.block_scaled"
GLU, GLU_BF16 = "cudnn.grouped_gemm_glu.block_scaled", "cudnn.grouped_gemm_glu.bf16"
DISCRETE = "cudnn.discrete_grouped_gemm_swiglu"
QUANT = "cudnn.grouped_gemm_quant.block_scaled"
WGRAD, WGRAD_BF16 = "cudnn.grouped_gemm_wgrad.block_scaled", "cudnn.grouped_gemm_wgrad.bf16"


def _cases() -> dict[str, dict[str, Any]]:
    """Every kernel with each activation, family and weight mode that it has, and each output once."""
    made: dict[str, dict[str, Any]] = {}

    def add(
        kernel: str, families: tuple[str, ...], acts: tuple[str, ...], modes: tuple[bool, ...], **more: Any
    ) -> None:
        for family, act, discrete in itertools.product(families, acts, modes):
            name = "-".join((kernel.removeprefix("cudnn."), family, act or "none",
                             "discrete" if discrete else "dense", *more.pop("tag", ())))  # fmt: skip
            made[name] = {"kernel": kernel, "family": family, "act": act, "discrete": discrete, **more}

    acts, both = ("swiglu", "geglu", "situglu"), (False, True)
    add(DGLU, ("mxfp8", "nvfp4"), acts, both)
    add(DGLU, ("mxfp8",), ("swiglu",), (False,), tag=("dbias_amax",), extras=("dbias", "amax"))
    add(DGLU, ("nvfp4",), ("swiglu",), (False,), tag=("deterministic",), deterministic=True, n=512)
    add(DGLU, ("mxfp8_e5m2",), ("geglu",), (True,), tag=("n_major",), major="n")
    add(DGLU, ("mxfp4",), ("swiglu",), (False,))
    add(GLU_BF16, ("bf16",), ("swiglu", "geglu"), both)
    add(GLU_BF16, ("bf16",), ("swiglu",), (False,), tag=("bias_c",), extras=("bias", "c"))
    add(GLU, ("mxfp8", "nvfp4"), acts, both)
    add(GLU, ("mxfp8_bf16",), ("swiglu",), (False,), tag=("bias_c_amax",), extras=("bias", "c", "amax"))
    add(GLU, ("mxfp4",), ("geglu",), (False,))
    add(DISCRETE, ("mxfp8", "nvfp4", "mxfp8_bf16"), ("swiglu", "geglu"), (True,))
    add(DISCRETE, ("mxfp8_e5m2",), ("swiglu",), (True,), tag=("n_major_bias_c",), major="n", extras=("bias", "c"))
    add(QUANT, ("mxfp8",), ("",), both)
    add(QUANT, ("mxfp8",), ("",), (False,), tag=("bias_amax",), extras=("bias", "amax"))
    add(WGRAD_BF16, ("bf16",), ("",), (False,))
    add(WGRAD, ("mxfp8", "mxfp8_e5m2"), ("",), (False,))
    for kernel, family, act, discrete, table in (
        (DGLU, "mxfp8", "swiglu", False, knobs.BLOCK_SCALED),
        (GLU_BF16, "bf16", "swiglu", False, knobs.BF16),
        (GLU, "mxfp8", "swiglu", False, knobs.BLOCK_SCALED),
        (DISCRETE, "mxfp8", "swiglu", True, knobs.BLOCK_SCALED),
        (QUANT, "mxfp8", "", False, knobs.BLOCK_SCALED),
        (WGRAD_BF16, "bf16", "", False, knobs.WGRAD),
        (WGRAD, "mxfp8", "", False, knobs.WGRAD),
    ):
        for variant in (k.name for k in table):
            add(kernel, (family,), (act,), (discrete,), tag=(variant,), variant=variant)
    return made


CASES = _cases()


def _operand(g: GraphBuilder, name: str, dim: tuple[Any, ...], family: str, axis: int, **options: Any) -> Any:
    """A float operand, or codes and scales behind a virtual BFLOAT16 dequantize."""
    codes, block, scale, _ = FAMILIES[family]
    made = g.tensor(name, dim, data_type=codes, **options)
    if not block:
        return made
    layout = ScaleLayout(block, axis)
    *experts, rows, columns = dim
    scales = g.tensor(f"sf_{name}", (*experts, *layout.storage((rows, columns))), data_type=scale, scale_layout=layout,
                      discrete=options.get("discrete", False))  # fmt: skip
    values = g.block_scale_dequantize(made, scales).set_data_type(BF16)
    return values.set_stride(options["stride"]) if options.get("stride") else values


def declare(case: dict[str, Any]) -> OpGraph:
    """The graph of one case, with M free."""
    kernel, family, extras = case["kernel"], case["family"], case.get("extras", ())
    g = GraphBuilder(deterministic=case.get("deterministic", False))
    m, n = g.symbol("M", multiple_of=256), case.get("n", N)
    offsets = g.tensor("offsets", (EXPERTS,), data_type=DataType.INT32, multiple_of=256)
    if "wgrad" in kernel:
        a, dy = _operand(g, "a", (m, K), family, 0), _operand(g, "dy", (m, n), family, 0)
        g.grouped_matmul_wgrad(a, dy, offsets).set_data_type(BF16).set_output(True)
        return finished(g)
    _, block, scale, d_type = FAMILIES[family]
    stride = (K * n, 1, K) if case.get("major", "k") == "k" else (K * n, n, 1)
    layout: dict[str, Any] = {"glu_layout": LAYOUT} if "glu" in kernel and "dglu" not in kernel else {}
    a = _operand(g, "a", (m, K), family, 1)
    b = _operand(g, "b", (EXPERTS, K, n), family, 0, stride=stride, discrete=case["discrete"], **layout)
    forward = "dglu" not in kernel
    bias = g.tensor("bias", (EXPERTS, n), data_type=BF16, **layout) if "bias" in extras else None
    alpha = g.tensor("alpha", (EXPERTS,), data_type=F32)
    product = g.grouped_matmul(a, b, offsets, alpha=alpha, alpha_exponent=1 if forward else 2, bias=bias)
    prob = g.tensor("prob", (m, 1) if kernel == QUANT else (m,), data_type=F32)
    if kernel == QUANT:
        value = g.mul(product, prob)
    elif forward:
        value = g.glu(product, act=case["act"], prob=prob)
        if "c" in extras:
            g.identity(product).set_data_type(BF16).set_output(True)
    else:
        c = g.tensor("c", (m, 2 * n), data_type=BF16, glu_layout=LAYOUT)
        value, dprob = g.glu_backward(product, c, act=case["act"], prob=prob)
        dprob.set_output(True)
    if d_type is None:
        norm = g.tensor("norm_const", (1,), data_type=F32)
        for axis in (1, 0):
            made = g.block_scale_quantize(value, block_size=block, axis=axis, data_type=DataType.FP8_E4M3,
                                          scale_type=scale, norm_const=norm)  # fmt: skip
            for t in made:
                t.set_output(True)
    elif "amax" in extras:
        g.identity(value).set_data_type(d_type).set_output(True)
    else:
        value.set_data_type(d_type).set_output(True)
    if "dbias" in extras:
        g.group_sum(value, offsets).set_data_type(BF16).set_output(True)
    if "amax" in extras:
        g.group_amax(value, offsets, split_glu=not forward).set_output(True)
    return finished(g)


def finished(g: GraphBuilder) -> OpGraph:
    graph = g.operation_graph()
    verify(graph)
    return graph


class GlobalMemory:
    """The classes' own scratch as a pointer to global memory, which memory of this machine is not."""

    element_type: Any = None

    def __init__(self, memory: torch.Tensor, align: int) -> None:
        self._memory, self._align = memory, align

    @staticmethod
    def of(memory: torch.Tensor, assumed_align: int = 16, enable_tvm_ffi: bool = False, **_: Any) -> Any:
        import cutlass
        from cutlass import cute

        if not enable_tvm_ffi:
            return GlobalMemory(memory, assumed_align)
        return cute.runtime.make_fake_tensor(cutlass.Uint8, (memory.numel(),), (1,), assumed_align=assumed_align)

    @property
    def iterator(self) -> Any:
        import cutlass
        from cutlass import cute

        where = self._memory.data_ptr() // self._align * self._align
        return cute.runtime.make_ptr(self.element_type or cutlass.Uint8, where, cute.AddressSpace.gmem,
                                     assumed_align=self._align)  # fmt: skip


def build(name: str, arch: str) -> dict[str, Any]:
    """Fuses and compiles one case: the nodes left out, the time and the workspace of 768 rows."""
    case, start = CASES[name], time.perf_counter()
    entry = next(k for k in KERNELS if k.id == case["kernel"])
    graph = declare(case)
    report = fuse(graph, ARCHES[arch.replace("_", "").rstrip("a")], kernels=(entry,))
    if not report.matches:
        return {"reasons": [str(r) for v in report.verdicts for r in v.reasons]}
    (match,) = report.matches
    kernel = entry.build(match.problem, "cpu", case.get("variant"))
    return {
        "reasons": [],
        "left": len(graph.nodes) - len(match.nodes),
        "seconds": time.perf_counter() - start,
        "workspace": kernel.workspace_bytes({"M": ROWS}),
    }


def main(folder: str, arch: str, cases: list[str]) -> None:
    os.environ |= {"CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": folder}
    import cutlass

    info = mock.Mock()
    info.return_value.get_max_active_clusters.return_value = 74
    empty = torch.empty

    def as_on_a_gpu(*shape: Any, **options: Any) -> torch.Tensor:
        """Memory for the classes' own scratch: some ask for "cuda", and all count on a GPU's alignment."""
        made = empty(*shape, **{**options, "device": "cpu"})
        if made.dtype is not torch.uint8 or made.ndim != 1:
            return made
        larger = empty(made.numel() + 512, dtype=torch.uint8)
        return larger[-larger.data_ptr() % 128 :][: made.numel()]

    results = {}
    families = "cudnn.gemm.cutedsl"
    with contextlib.ExitStack() as patches:
        for module in (f"{families}.grouped.glu._bf16_api", f"{families}.grouped.glu._blockscaled_api",
                       f"{families}.grouped.quant.api", f"{families}.grouped.wgrad._bf16_api",
                       f"{families}.grouped.wgrad._blockscaled_api", "cutlass.cute.runtime"):  # fmt: skip
            patches.enter_context(mock.patch.object(importlib.import_module(module), "from_dlpack", GlobalMemory.of))
        for target, name, value in (
            (cutlass.utils, "HardwareInfo", info),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *_: CAPABILITIES[arch]),
            (torch, "empty", as_on_a_gpu),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        for name in cases or CASES:
            for old in Path(folder).glob("*.ptx"):
                old.unlink()
            results[name] = build(name, arch)
            text = "".join(f.read_text() for f in Path(folder).glob("*.ptx"))
            results[name]["ptx"] = {mark: mark in text for mark in (f".target {arch}", "tcgen05.mma")}
    print(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
