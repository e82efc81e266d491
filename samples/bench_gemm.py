"""Plain grouped GEMM on the GPU of this host: opfuse's Hopper kernel against torch._grouped_mm.

    python samples/bench_gemm.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Of each shape the two products of an expert MLP that no GLU follows: `fc2`, the activation by K-major weights, as models
hold them, and `dx`, the pre-activation's gradient by N-major ones. Arms beside those of kernel_benchmark.py, which says
how all are measured:

    fused        opfuse's kernel          fused_bias   the same with a bias, which torch's does not take
    unfused      opfuse's plan of one node by torch
    quack        QuACK's gemm where it is installed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from kernel_benchmark import Call, KernelBenchmark, Shape, Tensors, main, quack_gemms, randn
from opfuse.graph_ops import DataType, Graph
from opfuse.kernels.hopper import grouped_gemm
from opfuse.kernels.sm90 import gemm_host, gemm_tune
from opfuse.kernels.sm90.gemm_config import GemmConfig

FUSED = GemmConfig()


class GemmBenchmark(KernelBenchmark):  # type: ignore[misc]
    """a (M, K) x b (L, K, N) -> y (M, N), where a shape's H is K and its I is N, see `problems`."""

    title = "Grouped GEMM"
    operand = "a"
    configs = {"fused": FUSED, "fused_bias": replace(FUSED, bias_dtype="bf16")}
    rivals: Mapping[str, Call] = {}
    beside = ()
    ratios = (("fused", "gmm"), ("fused", "floor"), ("fused_bias", "fused"), ("quack", "fused"),
              ("unfused", "fused"))  # fmt: skip

    def problems(self, shapes: Sequence[Shape]) -> list[Shape]:
        """fc2 and dx of each shape, named so, with H as depth and I as columns."""
        return [
            s._replace(name=f"{s.name} {task}", H=depth, I=s.H)
            for s in shapes
            for task, depth in (("fc2", s.I), ("dx", 2 * s.I))
        ]

    def inputs(self, shape: Shape) -> Tensors:
        name, L, M, K, N = shape
        b = randn(L, K, N) if name.endswith(" dx") else randn(L, N, K).transpose(1, 2)
        return {"a": randn(M, K), "b": b.div_(K**0.5)}

    def product_columns(self, shape: Shape) -> int:
        return shape.I

    def work(self, shape: Shape, experts: int) -> tuple[int, int]:
        _, _, M, K, N = shape
        return 2 * M * K * N, 2 * (M * K + experts * K * N + M * N)

    def scheduled(self, config: GemmConfig, shape: Shape) -> GemmConfig:
        config = replace(config, b_major="n" if shape.name.endswith(" dx") else "k")
        return gemm_tune.schedule_for(config, n=shape.I, k=shape.H)

    def compiled(self, config: GemmConfig) -> Any:
        return grouped_gemm.compiled(config, grouped_gemm.kernel_cache())

    def launcher(self, config: GemmConfig, inputs: Tensors, shape: Shape) -> Call:
        gemm_host.FUNCTIONS.install(config, self.compiled(config))
        given: dict[str, Any] = {**inputs, **self.outputs(shape)}
        if config.bias_dtype:
            given["bias"] = randn(shape.L, shape.I)
        return lambda offsets: gemm_host.launch(config, offsets=offsets, **given)

    def declare(self, graph: Graph, shape: Shape) -> None:
        name, L, M, K, N = shape
        a = graph.tensor("a", dim=(M, K))
        b = graph.tensor("b", dim=(L, K, N), stride=(K * N, N, 1) if name.endswith(" dx") else (K * N, 1, K))
        offsets = graph.tensor("offsets", dim=(L,), data_type=DataType.INT32)
        y = graph.grouped_matmul(a, b, offsets)
        y.set_name("y").set_output(True).set_data_type(DataType.BFLOAT16)

    def outputs(self, shape: Shape) -> Tensors:
        return {"y": torch.empty(shape.M, shape.I, device="cuda", dtype=torch.bfloat16)}

    def quack(self, inputs: Tensors) -> dict[str, Call]:
        a, b = inputs["a"], inputs["b"]
        y = torch.empty(a.shape[0], b.shape[2], device="cuda", dtype=torch.bfloat16)
        return quack_gemms(a, b, y, inputs["offsets"], "m")


if __name__ == "__main__":
    main(GemmBenchmark(), str(__doc__))
