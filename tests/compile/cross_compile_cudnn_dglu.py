"""Builds the BF16 dGLU adapter for sm_100a or sm_103a on a machine without a GPU, and prints the outcome as JSON.

A program of its own, since the DSL reads its target from the environment when it is imported.
Usage: DUMP_FOLDER ARCH [CASE ...].
Torch's questions about the device get a B200's answers; the rest is the code that runs on one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.cudnn import knobs
from opfuse.kernels.problem import Problem

K, N, EXPERTS, ROWS = 128, 96, 3, 768
CASES: dict[str, dict[str, Any]] = {
    "dense_swiglu": {},
    "dense_geglu_dbias": {"act": "geglu", "dbias": True},
    "discrete_swiglu": {"discrete": True},
    "discrete_n_major_geglu": {"act": "geglu", "discrete": True, "major": "n"},
    **{f"dense_swiglu_{k.name}": {"variant": k.name} for k in knobs.BF16},
    "dense_n_major_activation_rounded": {"act": "geglu", "major": "n", "activation": True, "rounded": True},
}


def problem(*, act="swiglu", dbias=False, discrete=False, major="k", activation=False, rounded=False) -> Problem:
    """A problem of the BF16 contract with M free; alpha, beta and prob are there when dbias is, else the adapter's."""
    g = GraphBuilder()
    m, bf16, f32 = g.symbol("M", multiple_of=256), DataType.BFLOAT16, DataType.FLOAT
    layout = GluLayout.interleaved(32)
    tensors = {
        "a": g.tensor("a", (m, K), data_type=bf16),
        "b": g.tensor("b", (EXPERTS, K, N), (K * N, 1, K) if major == "k" else None, bf16, discrete=discrete),
        "offsets": g.tensor("offsets", (EXPERTS,), data_type=DataType.INT32, multiple_of=256),
        "c": g.tensor("c", (m, 2 * N), data_type=bf16, glu_layout=layout),
        "d": g.tensor("d", (m, 2 * N), data_type=f32 if dbias else bf16, glu_layout=layout),
        "dprob": g.tensor("dprob", (m,), data_type=f32),
    }
    if dbias:
        tensors["alpha"] = g.tensor("alpha", (EXPERTS,), data_type=f32)
        tensors["beta"] = g.tensor("beta", (EXPERTS,), data_type=f32)
        tensors["prob"] = g.tensor("prob", (m,), data_type=f32)
        tensors["dbias"] = g.tensor("dbias", (EXPERTS, 2 * N), data_type=bf16)
    if activation:
        tensors["activation"] = g.tensor("activation", (m, N), data_type=bf16, alignment=32)
    attributes = {"act": act, "alpha_exponent": 2, "geglu_alpha": 1.702, "clamp_min": -7.0, "clamp_max": 7.0,
                  "linear_offset": 1.0, "recompute": activation}  # fmt: skip
    rounding = {"r": bf16 if rounded else f32}
    return Problem("grouped_gemm_dglu", {role: t.spec() for role, t in tensors.items()}, attributes, rounding)


def build(name: str) -> dict:
    """Compiles one case and reports the reasons against it, the time and the workspace of 768 rows."""
    from opfuse.kernels.arch import ARCHES
    from opfuse.kernels.registry import KERNELS

    entry = next(k for k in KERNELS if k.id == "cudnn.grouped_gemm_dglu.bf16")
    case = dict(CASES[name])
    variant = case.pop("variant", None)
    asked, start = problem(**case), time.perf_counter()
    reasons = [str(r) for r in entry.supports(asked, ARCHES["sm100"])]
    kernel = entry.build(asked, "cpu", variant)
    return {
        "reasons": reasons,
        "seconds": time.perf_counter() - start,
        "workspace": kernel.workspace_bytes({"M": ROWS}),
    }


def main(folder: str, arch: str, cases: list[str]) -> None:
    os.environ |= {"CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": folder}
    import cutlass

    info = mock.Mock()
    info.return_value.get_max_active_clusters.return_value = 74
    results = {}
    with (
        mock.patch.object(cutlass.utils, "HardwareInfo", info),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (10, 0)),
    ):
        for name in cases or CASES:
            for old in Path(folder).glob("*.ptx"):
                old.unlink()
            results[name] = build(name)
            text = "".join(f.read_text() for f in Path(folder).glob("*.ptx"))
            marks = (f".target {arch}", "tcgen05.mma", "red.global.add.noftz.bf16x2")
            results[name]["ptx"] = {mark: mark in text for mark in marks}
    print(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
