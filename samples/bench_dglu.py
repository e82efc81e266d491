"""Grouped GEMM + dGLU on the GPU of this host: opfuse's fused Hopper kernel against what else computes the same.

    python samples/bench_dglu.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Arms, unit-scale random data, each in its own native layout, beside those of kernel_benchmark.py, which says how all are
measured:

    compiled     grouped_mm, then dSwiGLU + dprob as one torch.compile'd kernel
    compiled_q   the same with MXFP8 row and column quantization (and the bf16 gradient) in the compiled graph
    fused        opfuse: bf16 gradient and dprob          fused_dbias   and the per-expert bias gradient
    fused_q      opfuse: MXFP8 row and column codes and scales, and dprob
    unfused      opfuse's plan without fusion
    quack        QuACK's gemm_dgated where it is installed: bf16 gradient, recomputed activation, dprob
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kernel_benchmark import Call, KernelBenchmark, Shape, Tensors, main, quack_configs, randn
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.kernels.hopper import grouped_dglu
from opfuse.kernels.sm90 import dglu_host, dglu_tune
from opfuse.kernels.sm90.dglu_config import DgluConfig

FUSED = DgluConfig(has_prob=True, has_dprob=True)


def dswiglu(r: torch.Tensor, c: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """r (M, I), c (M, 2I) in 32-wide gate and up blocks -> gradient (M, 2I), dprob (M,)."""
    m, i2 = c.shape
    blocks = c.view(m, i2 // 64, 2, 32)
    gate, up, r = blocks[:, :, 0].float(), blocks[:, :, 1].float(), r.view(m, i2 // 64, 32).float()
    s = torch.sigmoid(gate)
    silu = gate * s
    rp = r * prob.view(m, 1, 1)
    grads = torch.stack((rp * up * s * (1 + gate * (1 - s)), rp * silu), 2)
    return grads.view(m, i2).to(c.dtype), (r * silu * up).sum((1, 2))


def mxfp8(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and E8M0 scales of 32-blocks along a dimension, exponent rounded up."""
    m, n = x.shape
    blocks = x.float().view(m, n // 32, 32) if dim == 1 else x.float().view(m // 32, 32, n)
    amax = blocks.abs().amax(2 if dim == 1 else 1, keepdim=True)
    exponent = torch.ceil(torch.log2(amax.clamp_min(1e-30) / 448.0))
    codes = (blocks * torch.exp2(-exponent)).to(torch.float8_e4m3fn).view(m, n)
    return codes, (exponent + 127).to(torch.uint8)


def dswiglu_quantized(r: torch.Tensor, c: torch.Tensor, prob: torch.Tensor) -> tuple:
    d, dprob = dswiglu(r, c, prob)
    return d, dprob, mxfp8(d, 1), mxfp8(d, 0)


class DgluBenchmark(KernelBenchmark):  # type: ignore[misc]
    """dy (M, H) x b (L, H, I), with the pre-activation c (M, 2I) and prob (M,) -> d (M, 2I), dprob (M,)."""

    title = "Grouped GEMM + dSwiGLU"
    operand = "dy"
    configs = {
        "fused": FUSED,
        "fused_dbias": replace(FUSED, dbias_dtype="bf16"),
        "fused_q": replace(FUSED, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3"),
    }
    rivals = {"compiled": dswiglu, "compiled_q": dswiglu_quantized}
    beside = ("c", "prob")
    ratios = (
        ("fused", "gmm"), ("fused", "floor"), ("fused_dbias", "fused"), ("fused_q", "fused"), ("compiled", "fused"),
        ("compiled_q", "fused_q"), ("quack", "fused"), ("unfused", "fused"),
    )  # fmt: skip

    def inputs(self, shape: Shape) -> Tensors:
        _, L, M, H, I = shape
        return {
            "dy": randn(M, H),
            "b": (randn(L, I, H) / H**0.5).transpose(1, 2),  # logical (L, K, N), K-major
            "c": randn(M, 2 * I),
            "prob": torch.rand(M, device="cuda") + 0.25,
        }

    def product_columns(self, shape: Shape) -> int:
        return shape.I

    def work(self, shape: Shape, experts: int) -> tuple[int, int]:
        _, _, M, H, I = shape
        read, written = M * H + experts * I * H + 2 * M * I, 2 * M * I
        return 2 * M * I * H, 2 * (read + written)

    def scheduled(self, config: DgluConfig, shape: Shape) -> DgluConfig:
        return dglu_tune.schedule_for(config, n=shape.I, k=shape.H)

    def compiled(self, config: DgluConfig) -> Any:
        return grouped_dglu.compiled(config, grouped_dglu.kernel_cache())

    def launcher(self, config: DgluConfig, inputs: Tensors, shape: Shape) -> Call:
        _, L, M, _, I = shape
        dglu_host.FUNCTIONS.install(config, self.compiled(config))
        out = {"dprob": torch.empty(M, device="cuda")}
        if config.d_dtype:
            out["d"] = torch.empty(M, 2 * I, device="cuda", dtype=torch.bfloat16)
        if config.dbias_dtype:
            out["dbias"] = torch.empty(L, 2 * I, device="cuda", dtype=torch.bfloat16)
        for side, size in dglu_host.scale_bytes(config, M, I).items():
            if getattr(config, f"q_{side}_dtype"):
                out[f"q_{side}"] = torch.empty(M, 2 * I, device="cuda", dtype=torch.uint8)
                out[f"sf_{side}"] = torch.zeros(size, device="cuda", dtype=torch.uint8)
        out["workspace"] = torch.empty(dglu_host.workspace_bytes(config, L, M, I), device="cuda", dtype=torch.uint8)
        given: dict[str, Any] = {**inputs, **out}
        return lambda offsets: dglu_host.launch(config, offsets=offsets, **given)

    def declare(self, graph: Graph, shape: Shape) -> None:
        _, L, M, H, I = shape
        dy = graph.tensor("dy", dim=(M, H))
        w = graph.tensor("b", dim=(L, H, I), stride=(I * H, 1, H))
        h = graph.tensor("c", dim=(M, 2 * I), glu_layout=GluLayout.interleaved(32))
        offsets = graph.tensor("offsets", dim=(L,), data_type=DataType.INT32)
        prob = graph.tensor("prob", dim=(M,), data_type=DataType.FLOAT)
        dh, dprob = graph.glu_backward(graph.grouped_matmul(dy, w, offsets), h, prob=prob, act="swiglu")
        dh.set_name("d").set_output(True).set_data_type(DataType.BFLOAT16)
        dprob.set_name("dprob").set_output(True)

    def outputs(self, shape: Shape) -> Tensors:
        return {"d": torch.empty(shape.M, 2 * shape.I, device="cuda", dtype=torch.bfloat16),
                "dprob": torch.empty(shape.M, device="cuda")}  # fmt: skip

    def quack(self, inputs: Tensors) -> dict[str, Call]:
        # Its fastest configurations on these shapes, of those that do not spill.
        configs = quack_configs([(128, 128, True, 1), (128, 128, True, 2)])
        if not configs:
            return {}
        from quack.epilogue.library import dgated_mod  # type: ignore[import-not-found]

        mod = dgated_mod("swiglu", has_scale=True, has_reduce=True)
        cu = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), inputs["offsets"]])

        def arm(config: Any) -> Call:
            return lambda: mod(
                inputs["dy"], inputs["b"], inputs["c"], config=config, tuned=False, dynamic_scheduler=True,
                cu_seqlens_m=cu, mColVecBroadcast=inputs["prob"],
            )  # fmt: skip

        return {name: arm(config) for name, config in configs.items()}


if __name__ == "__main__":
    main(DgluBenchmark(), str(__doc__))
