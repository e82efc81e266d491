"""Grouped weight gradient on the GPU of this host: opfuse's Hopper kernel against torch._grouped_mm.

    python samples/bench_wgrad.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Of each shape the two weight gradients of an expert MLP: `dw1`, of the pre-activation's gradient and x, and `dw2`, of dy
and the activation, each as the weight lies. Arms beside those of kernel_benchmark.py, which says how all are measured:

    fused        opfuse's kernel          fused_add    the same, added to a float32 gradient in place
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
from opfuse.kernels.hopper import grouped_wgrad
from opfuse.kernels.sm90 import wgrad_host, wgrad_tune
from opfuse.kernels.sm90.wgrad_config import WgradConfig

FUSED = WgradConfig()


class WgradBenchmark(KernelBenchmark):  # type: ignore[misc]
    """a (M, K), dy (M, N) -> dw (L, K, N), where a shape's H is K and its I is N, see `problems`."""

    title = "Grouped weight gradient"
    operand = "a"
    configs = {"fused": FUSED, "fused_add": replace(FUSED, dw_dtype="fp32", accumulate=True)}
    rivals: Mapping[str, Call] = {}
    beside = ()
    ratios = (("fused", "gmm"), ("fused", "floor"), ("fused_add", "fused"), ("quack", "fused"),
              ("unfused", "fused"))  # fmt: skip

    def problems(self, shapes: Sequence[Shape]) -> list[Shape]:
        """dw1 and dw2 of each shape, named so, with H as the gradient's rows and I as its columns."""
        return [
            s._replace(name=f"{s.name} {task}", H=rows, I=columns)
            for s in shapes
            for task, rows, columns in (("dw1", 2 * s.I, s.H), ("dw2", s.H, s.I))
        ]

    def inputs(self, shape: Shape) -> Tensors:
        _, _, M, K, N = shape
        return {"a": randn(M, K), "dy": randn(M, N)}

    def product(self, inputs: Tensors, offsets: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(inputs["a"].t(), inputs["dy"], offs=offsets, out_dtype=torch.bfloat16)

    def product_columns(self, shape: Shape) -> int:
        return shape.I

    def work(self, shape: Shape, experts: int) -> tuple[int, int]:
        """Experts without rows are written too, with zeros."""
        _, L, M, K, N = shape
        return 2 * M * K * N, 2 * (M * K + M * N + L * K * N)

    def scheduled(self, config: WgradConfig, shape: Shape) -> WgradConfig:
        return wgrad_tune.schedule_for(config, n=shape.I, k=shape.H, experts=shape.L)

    def compiled(self, config: WgradConfig) -> Any:
        return grouped_wgrad.compiled(config, grouped_wgrad.kernel_cache())

    def launcher(self, config: WgradConfig, inputs: Tensors, shape: Shape) -> Call:
        wgrad_host.FUNCTIONS.install(config, self.compiled(config))
        given: dict[str, Any] = {**inputs, **self.outputs(shape)}
        if config.accumulate:
            given["dw"] = torch.zeros(given["dw"].shape, device="cuda")
        return lambda offsets: wgrad_host.launch(config, offsets=offsets, **given)

    def declare(self, graph: Graph, shape: Shape) -> None:
        _, L, M, K, N = shape
        a, dy = graph.tensor("a", dim=(M, K)), graph.tensor("dy", dim=(M, N))
        offsets = graph.tensor("offsets", dim=(L,), data_type=DataType.INT32)
        dw = graph.grouped_matmul_wgrad(a, dy, offsets)
        dw.set_name("dw").set_output(True).set_data_type(DataType.BFLOAT16)

    def outputs(self, shape: Shape) -> Tensors:
        return {"dw": torch.empty(shape.L, shape.H, shape.I, device="cuda", dtype=torch.bfloat16)}

    def quack(self, inputs: Tensors) -> dict[str, Call]:
        a, dy, offsets = inputs["a"], inputs["dy"], inputs["offsets"]
        dw = torch.empty(len(offsets), a.shape[1], dy.shape[1], device="cuda", dtype=torch.bfloat16)
        return quack_gemms(a.t(), dy, dw, offsets, "k")


if __name__ == "__main__":
    main(WgradBenchmark(), str(__doc__))
