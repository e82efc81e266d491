"""The usual graphs of a mixture-of-experts layer in training, declared once for the samples, the tests and the CLI.

Axis letters: M rows (one per token and chosen expert, grouped by expert), H hidden, I intermediate, L experts.
M is a symbol: one build serves every token count. The default sizes are those of Qwen3-30B-A3B on 8 ranks.

    opfuse explain samples/graphs/dglu_bf16.json --arch sm90

`python samples/usual_graphs.py` writes `samples/graphs/*.json` again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from opfuse.graph_ops import DataType, GluLayout, Graph, Tensor
from opfuse.graph_ops.ir.dims import Expression
from opfuse.graph_ops.ir.serialize import to_json

GLU_LAYOUT = GluLayout.interleaved(32)
"""32 gate columns, then their 32 up columns, and so on: the layout of cuDNN's kernels."""


@dataclass(frozen=True)
class Sizes:
    """What a layer's graphs are built for. Each expert's rows are padded to a multiple of `rows`; cuDNN's kernels and
    swizzled scales ask for 256."""

    H: int = 2048
    I: int = 768
    L: int = 16
    rows: int = 256
    act: str = "swiglu"
    data_type: DataType = DataType.BFLOAT16


DEFAULT = Sizes()


def expert_mlp_forward(s: Sizes = DEFAULT) -> Graph:
    """y = glu(x w1 + b1, prob) w2. Saves what the backward reads: h before the activation, and act after it."""
    g, M = _new_graph("expert_mlp_forward", s)
    offsets, prob = _routing(g, M, s)
    x = g.tensor("x", dim=(M, s.H))
    w1 = g.tensor("w1", dim=(s.L, s.H, 2 * s.I), glu_layout=GLU_LAYOUT)
    b1 = g.tensor("b1", dim=(s.L, 2 * s.I), glu_layout=GLU_LAYOUT)
    w2 = g.tensor("w2", dim=(s.L, s.I, s.H))

    h = g.grouped_matmul(x, w1, offsets, bias=b1, name="fc1").set_name("h").set_output(True)  # (M, 2I)
    act = g.glu(h, act=s.act, prob=prob, name="activation").set_name("act").set_output(True)  # (M, I)
    g.grouped_matmul(act, w2, offsets, name="fc2").set_name("y").set_output(True)  # (M, H)
    return g


def expert_mlp_backward(s: Sizes = DEFAULT) -> Graph:
    """Every gradient of the expert MLP: dx, dw1, db1, dw2 and dprob, from dy and what the forward saved.

    The gradient dh of the pre-activation stays in the plan, in the layer's data type, for the two products that read
    it. The bias gradient sums its float32 values, before they round: those a fused kernel has at hand.
    """
    g, M = _new_graph("expert_mlp_backward", s)
    offsets, prob = _routing(g, M, s)
    dy = g.tensor("dy", dim=(M, s.H))
    x = g.tensor("x", dim=(M, s.H))
    h = g.tensor("h", dim=(M, 2 * s.I), glu_layout=GLU_LAYOUT)
    act = g.tensor("act", dim=(M, s.I))
    w1_t = g.tensor("w1_t", dim=(s.L, 2 * s.I, s.H), stride=(s.H * 2 * s.I, 1, 2 * s.I))  # w1's memory, transposed
    w2_t = g.tensor("w2_t", dim=(s.L, s.H, s.I), stride=(s.I * s.H, 1, s.H))  # w2's memory, transposed

    dact = g.grouped_matmul(dy, w2_t, offsets, name="fc2_dgrad")  # (M, I) float32
    wide, dprob = g.glu_backward(dact, h, act=s.act, prob=prob, name="activation_backward")  # (M, 2I) float32, (M,)
    db1 = g.group_sum(wide, offsets, name="bias_grad")  # (L, 2I)
    dh = g.identity(wide, name="round_dh").set_name("dh").set_data_type(s.data_type)  # (M, 2I)
    dx = g.grouped_matmul(dh, w1_t, offsets, name="fc1_dgrad")  # (M, H)
    dw1 = g.grouped_matmul_wgrad(x, dh, offsets, name="fc1_wgrad")  # (L, H, 2I)
    dw2 = g.grouped_matmul_wgrad(act, dy, offsets, name="fc2_wgrad")  # (L, I, H)
    _outputs(dprob=dprob, db1=db1, dx=dx, dw1=dw1, dw2=dw2)
    return g


def dglu_bf16(s: Sizes = DEFAULT) -> Graph:
    """FC2's dgrad and the GLU's derivative alone: dh and dprob."""
    g, M = _new_graph("dglu_bf16", s)
    dh, dprob, _ = _dglu(g, M, s)
    _outputs(dh=dh, dprob=dprob)
    return g


def dglu_mxfp8(s: Sizes = DEFAULT) -> Graph:
    """As dglu_bf16, with dh in MXFP8 twice, in blocks along rows for FC1's dgrad and along columns for its wgrad.

    Here dh never rounds to the layer's data type: the codes and the bias gradient db1 are made of float32 values.
    """
    g, M = _new_graph("dglu_mxfp8", s)
    dh, dprob, offsets = _dglu(g, M, s)
    db1 = g.group_sum(dh, offsets, name="bias_grad")  # (L, 2I)
    e4m3 = DataType.FP8_E4M3
    q_row, sf_row = g.block_scale_quantize(dh, block_size=32, axis=1, data_type=e4m3, name="quantize_rows")
    q_col, sf_col = g.block_scale_quantize(dh, block_size=32, axis=0, data_type=e4m3, name="quantize_columns")
    _outputs(q_row=q_row, sf_row=sf_row, q_col=q_col, sf_col=sf_col, dprob=dprob, db1=db1)  # codes (M, 2I)
    return g


def glu_forward(s: Sizes = DEFAULT) -> Graph:
    """FC1 and the GLU alone: act, and h for the backward."""
    g, M = _new_graph("glu_forward", s)
    offsets, prob = _routing(g, M, s)
    x = g.tensor("x", dim=(M, s.H))
    w1 = g.tensor("w1", dim=(s.L, s.H, 2 * s.I), glu_layout=GLU_LAYOUT)

    h = g.grouped_matmul(x, w1, offsets, name="fc1")  # (M, 2I)
    act = g.glu(h, act=s.act, prob=prob, name="activation")  # (M, I)
    _outputs(h=h, act=act)
    return g


def three_matmul_swiglu(s: Sizes = DEFAULT) -> Graph:
    """A SwiGLU MLP as many models spell it: two up-projections, silu(gate) * up from primitives, a down-projection."""
    g, M = _new_graph("three_matmul_swiglu", replace(s, act="swiglu"))
    offsets = g.tensor("offsets", dim=(s.L,), data_type=DataType.INT32, multiple_of=s.rows)
    x = g.tensor("x", dim=(M, s.H))
    w_gate = g.tensor("w_gate", dim=(s.L, s.H, s.I))
    w_up = g.tensor("w_up", dim=(s.L, s.H, s.I))
    w_down = g.tensor("w_down", dim=(s.L, s.I, s.H))

    gate = g.grouped_matmul(x, w_gate, offsets, name="gate_proj")  # (M, I)
    up = g.grouped_matmul(x, w_up, offsets, name="up_proj")  # (M, I)
    act = g.mul(g.swish(gate, name="silu"), up, name="gate_times_up").set_data_type(s.data_type)  # (M, I)
    _outputs(y=g.grouped_matmul(act, w_down, offsets, name="down_proj"))  # (M, H)
    return g


GRAPHS: dict[str, Callable[[], Graph]] = {
    "dglu_bf16": dglu_bf16,
    "dglu_mxfp8": dglu_mxfp8,
    "glu_forward": glu_forward,
    "expert_mlp_forward": expert_mlp_forward,
    "expert_mlp_backward": expert_mlp_backward,
    "three_matmul_swiglu": three_matmul_swiglu,
}
"""The graphs whose JSON lies in `samples/graphs/`."""


def graph_json(name: str) -> str:
    """The graph's JSON, without the places of declaration: those are paths on one machine."""
    graph = GRAPHS[name]().operation_graph()
    tensors = {uid: replace(tensor, location=None) for uid, tensor in graph.tensors.items()}
    nodes = tuple(replace(node, location=None) for node in graph.nodes)
    return to_json(replace(graph, tensors=tensors, nodes=nodes)) + "\n"


def write_graphs(folder: Path) -> None:
    """Writes every graph of GRAPHS as `<name>.json`."""
    for name in GRAPHS:
        (folder / f"{name}.json").write_text(graph_json(name))


def _new_graph(name: str, s: Sizes) -> tuple[Graph, Expression]:
    """A graph whose inputs and outputs have the layer's data type and whose virtual tensors are float32, and its M."""
    g = Graph(name=name, io_data_type=s.data_type, intermediate_data_type=DataType.FLOAT)
    return g, g.symbol("M", multiple_of=s.rows)


def _routing(g: Graph, M: Expression, s: Sizes) -> tuple[Tensor, Tensor]:
    """offsets (L,): the end of each expert's rows; prob (M,): the router's weight of each row."""
    offsets = g.tensor("offsets", dim=(s.L,), data_type=DataType.INT32, multiple_of=s.rows)
    return offsets, g.tensor("prob", dim=(M,), data_type=DataType.FLOAT)


def _dglu(g: Graph, M: Expression, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """dh (M, 2I), float32 as long as it is virtual; dprob (M,); offsets (L,)."""
    offsets, prob = _routing(g, M, s)
    dy = g.tensor("dy", dim=(M, s.H))
    h = g.tensor("h", dim=(M, 2 * s.I), glu_layout=GLU_LAYOUT)
    w2_t = g.tensor("w2_t", dim=(s.L, s.H, s.I), stride=(s.I * s.H, 1, s.H))  # w2's memory, transposed

    dact = g.grouped_matmul(dy, w2_t, offsets, name="fc2_dgrad")  # (M, I) float32
    dh, dprob = g.glu_backward(dact, h, act=s.act, prob=prob, name="activation_backward")
    return dh, dprob, offsets


def _outputs(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        tensor.set_name(name).set_output(True)


if __name__ == "__main__":
    write_graphs(Path(__file__).parent / "graphs")
