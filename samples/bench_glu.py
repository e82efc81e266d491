"""Grouped GEMM + GLU on the GPU of this host: opfuse's fused Hopper kernel against what else computes the same.

    python samples/bench_glu.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Arms, unit-scale random data, each in its own native layout, beside those of kernel_benchmark.py, which says how all are
measured. gmm writes the pre-activation h, and computes no activation:

    compiled     grouped_mm, which writes h, then SwiGLU and prob as one torch.compile'd kernel
    fused        opfuse: h, which a backward needs, and the activation        fused_no_h   the activation alone
    fused_q      h, and the activation in MXFP8 codes along rows and columns, not as bf16
    unfused      opfuse's plan without fusion
    quack        QuACK's gemm_gated where it is installed: h and the activation, without prob
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kernel_benchmark import Call, KernelBenchmark, Shape, Tensors, main, quack_configs, randn
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.kernels.hopper import grouped_glu
from opfuse.kernels.sm90 import glu_host, glu_tune
from opfuse.kernels.sm90.glu_config import GluConfig, scale_bytes

FUSED = GluConfig(product_dtype="bf16", h_dtype="bf16", has_prob=True)


def swiglu(h: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    """h (M, 2I) in 32-wide gate and up blocks -> activation (M, I)."""
    m, i2 = h.shape
    blocks = h.view(m, i2 // 64, 2, 32)
    gate, up = blocks[:, :, 0].float(), blocks[:, :, 1].float()
    return (gate * torch.sigmoid(gate) * up * prob.view(m, 1, 1)).view(m, i2 // 2).to(h.dtype)


class GluBenchmark(KernelBenchmark):  # type: ignore[misc]
    """x (M, H) x b (L, H, 2I), with prob (M,) -> h (M, 2I), d (M, I)."""

    title = "Grouped GEMM + SwiGLU"
    operand = "x"
    configs = {
        "fused": FUSED,
        "fused_no_h": replace(FUSED, h_dtype=None),
        "fused_q": replace(FUSED, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3"),
    }
    rivals = {"compiled": swiglu}
    beside = ("prob",)
    ratios = (
        ("fused", "gmm"), ("fused", "floor"), ("fused_no_h", "fused"), ("fused_q", "fused"),
        ("compiled", "fused"), ("quack", "fused"), ("unfused", "fused"),
    )  # fmt: skip

    def inputs(self, shape: Shape) -> Tensors:
        _, L, M, H, I = shape
        return {
            "x": randn(M, H),
            "b": (randn(L, 2 * I, H) / H**0.5).transpose(1, 2),  # logical (L, K, 2N), K-major
            "prob": torch.rand(M, device="cuda") + 0.25,
        }

    def product_columns(self, shape: Shape) -> int:
        return 2 * shape.I

    def work(self, shape: Shape, experts: int) -> tuple[int, int]:
        _, _, M, H, I = shape
        read, written = M * H + 2 * experts * I * H, 3 * M * I
        return 4 * M * I * H, 2 * (read + written)

    def scheduled(self, config: GluConfig, shape: Shape) -> GluConfig:
        return glu_tune.schedule_for(config, n=shape.I, k=shape.H)

    def compiled(self, config: GluConfig) -> Any:
        return grouped_glu.compiled(config, grouped_glu.kernel_cache())

    def launcher(self, config: GluConfig, inputs: Tensors, shape: Shape) -> Call:
        glu_host.FUNCTIONS.install(config, self.compiled(config))
        stored = {"h": config.h_dtype, "d": config.d_dtype}
        given: dict[str, Any] = {**inputs, **{name: t for name, t in self.outputs(shape).items() if stored[name]}}
        for side, size in scale_bytes(config, shape.M, shape.I).items():
            given[f"q_{side}"] = torch.empty(shape.M, shape.I, device="cuda", dtype=torch.uint8)
            given[f"sf_{side}"] = torch.zeros(size, device="cuda", dtype=torch.uint8)
        return lambda offsets: glu_host.launch(config, offsets=offsets, **given)

    def declare(self, graph: Graph, shape: Shape) -> None:
        _, L, M, H, I = shape
        x = graph.tensor("x", dim=(M, H))
        w = graph.tensor("b", dim=(L, H, 2 * I), stride=(2 * I * H, 1, H), glu_layout=GluLayout.interleaved(32))
        offsets = graph.tensor("offsets", dim=(L,), data_type=DataType.INT32)
        prob = graph.tensor("prob", dim=(M,), data_type=DataType.FLOAT)
        h = graph.grouped_matmul(x, w, offsets)
        h.set_name("h").set_output(True).set_data_type(DataType.BFLOAT16)
        d = graph.glu(h, prob=prob, act="swiglu")
        d.set_name("d").set_output(True).set_data_type(DataType.BFLOAT16)

    def outputs(self, shape: Shape) -> Tensors:
        return {
            "h": torch.empty(shape.M, 2 * shape.I, device="cuda", dtype=torch.bfloat16),
            "d": torch.empty(shape.M, shape.I, device="cuda", dtype=torch.bfloat16),
        }

    def quack(self, inputs: Tensors) -> dict[str, Call]:
        configs = quack_configs([(128, 128, True, 1), (128, 128, True, 2), (128, 256, False, 2)])
        if not configs:
            return {}
        from quack.epilogue.library import linear_act_mod  # type: ignore[import-not-found]

        mod = linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)
        cu = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), inputs["offsets"]])

        def arm(config: Any) -> Call:
            return lambda: mod(
                inputs["x"], inputs["b"], config=config, tuned=False, dynamic_scheduler=True, cu_seqlens_m=cu
            )

        return {name: arm(config) for name, config in configs.items()}


if __name__ == "__main__":
    main(GluBenchmark(), str(__doc__))
