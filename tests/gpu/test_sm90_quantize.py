"""The Hopper quantize kernel on a GPU: codes and scales are the reference's, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from opfuse.graph_ops import DataType, Graph
from opfuse.kernels.sm90.quantize_config import QuantizeConfig
from quantize_cases import BASE, CASES, SHAPES, buffers, check, launch, values, wrong  # type: ignore[import-not-found]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

GRAPHS = {
    "bf16": (DataType.BFLOAT16, (1, 0), False),
    "float rows": (DataType.FLOAT, (1,), False),
    "half columns": (DataType.HALF, (0,), False),
    "norm_const": (DataType.BFLOAT16, (1, 0), True),
}
NAMES = {DataType.BFLOAT16: "bf16", DataType.FLOAT: "fp32", DataType.HALF: "fp16"}


def graph_configuration(name: str) -> QuantizeConfig:
    x_type, axes, norm = GRAPHS[name]
    row, col = ("e4m3" if axis in axes else None for axis in (1, 0))
    return QuantizeConfig(NAMES[x_type], row, col, has_norm_row=norm and row is not None,
                          has_norm_col=norm and col is not None)  # fmt: skip


def kernels_of(item: pytest.Item) -> list[QuantizeConfig]:
    """What a test launches."""
    given = getattr(item, "callspec", None)
    name = given.params.get("name") if given else None
    if name in CASES and "graph" not in item.name:
        return [CASES[name]]
    return [graph_configuration(name)] if name in GRAPHS else [BASE]


@pytest.mark.parametrize("name", CASES)
def test_every_option_to_the_bit(name: str) -> None:
    """Special values and odd sizes, x and codes with a pitch."""
    seed = random.randrange(2**31)
    for i, (rows, columns) in enumerate(SHAPES):
        check(CASES[name], rows, columns, seed + i, pitch=24 * (i % 2))


def test_replays_follow_x() -> None:
    x = values(300, 1024, "bf16", 0)
    t = buffers(BASE, x)
    launch(BASE, t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(BASE, t)
    for seed in (1, 2):
        x.copy_(values(300, 1024, "bf16", seed))
        for name in ("q_row", "sf_row", "q_col", "sf_col"):
            t[name].fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        assert not wrong(BASE, t)


def test_past_two_to_the_31_elements() -> None:
    """The last rows of 2.4e9 codes."""
    M, N = 1_200_001, 2048
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    t = buffers(BASE, x)
    launch(BASE, t)
    torch.cuda.synchronize()
    first = M // 128 * 128 - 128  # an atom of row scales, and a partial one behind it
    last = {"x": x[first:]} | {name: t[name][first:] for name in ("q_row", "q_col")}
    blocks = -(-M // 128)
    last["sf_row"] = torch.cat([t["sf_row"][:-64].view(blocks, -1)[-2:].flatten(), t["sf_row"][-64:]])
    last["sf_col"] = torch.cat([t["sf_col"][:-64].view(N // 128, blocks, 512)[:, -2:].flatten(), t["sf_col"][-64:]])
    assert not wrong(BASE, last)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_runs_it_and_gives_what_is_unfused(name: str) -> None:
    x_type, axes, norm = GRAPHS[name]

    def run(fused: bool) -> list[torch.Tensor]:
        g = Graph(io_data_type=x_type, intermediate_data_type=DataType.FLOAT)
        x = g.tensor("x", (g.symbol("M"), 200))
        factor = g.tensor("factor", (1,), data_type=DataType.FLOAT) if norm else None
        outputs = [t.set_output(True) for axis in axes for t in g.block_scale_quantize(
            x, block_size=32, axis=axis, data_type=DataType.FP8_E4M3, norm_const=factor)]  # fmt: skip
        g.build(device="cuda", fused=fused)
        kernels = [step.kernel for step in g.plan.fused_steps]
        assert kernels == (["sm90.quantize_row_col" if len(axes) == 2 else "sm90.quantize"] if fused else [])
        given = {"x": values(333, 200, NAMES[x_type], 7)} | (
            {"factor": torch.tensor([-0.3], device="cuda")} if norm else {})  # fmt: skip
        found = g(given)
        return [found[t].view(torch.uint8) for t in outputs]

    for fused, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(fused, plain)
