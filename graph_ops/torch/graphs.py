"""The graphs of an expert MLP, forward and backward, built once for each configuration; M is a symbol.

    h = x w1;  act = glu(h, prob);  y = act w2
    dact = dy w2^T;  dh, dprob = glu_backward(dact, h, prob);  dw2 = dy^T act;  dx = dh w1^T;  dw1 = dh^T x

A step without a recipe runs four of them, cut at act and at dh, so that h and act are gone when dx and dw1 are made. In
codes it runs two: dh itself is never stored.

Under recipe mxfp8 x, act, dy and dh pass through E4M3 codes with E8M0 scales on their way to every matmul: in blocks
along the row where a matmul sums over columns, in blocks along the column for weight gradients, which sum over rows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..builder import Tensor
from ..calls import Calls
from ..graph import Graph
from ..ir.dims import Dim
from ..ir.dtypes import DataType
from ..ir.errors import StateError
from ..ir.layouts import SCALE_ATOM_ROWS, ScaleLayout
from .configuration import MXFP8_BLOCK, MlpConfig


@dataclass(frozen=True)
class Forward:
    """A forward graph. `saves`: also write what the backward reads; `saves_act`: the activation among it. Without
    `has_fc2` it ends at the activation."""

    config: MlpConfig
    saves: bool
    saves_act: bool
    has_fc2: bool = True

    def declare(self) -> Graph:
        """The graph, not planned yet. Inputs x, w1, w2, offsets, prob; outputs y and what is saved."""
        c = self.config
        g, rows = _new_graph("grouped_mlp_forward", c)
        offsets, prob = _routing(g, rows, c)
        x = g.tensor("x", dim=(rows, c.hidden), alignment=c.alignment)  # (M, H)
        w1 = g.tensor("w1", dim=(c.experts, c.hidden, 2 * c.intermediate), stride=_transposed(c.w1_stride),
                      glu_layout=c.glu_layout, alignment=c.alignment)  # fmt: skip
        h = g.grouped_matmul(_operand(g, c, x, "x"), w1, offsets, name="fc1")  # (M, 2I)
        h.set_name("h").set_data_type(c.data_type).set_output(self.saves)
        act = g.glu(h, act=c.act, prob=prob, name="activation", **c.activation).set_name("act")  # (M, I)
        if not c.is_quantized:
            act.set_data_type(c.data_type).set_output(self.saves_act)
        if self.has_fc2:
            _fc2(g, c, act, offsets)
        if c.is_quantized and self.saves:
            for tensor, name in ((x, "x"), *(((act, "act"),) if self.saves_act else ())):
                codes, scales = _quantize(g, c, tensor, axis=0, name=name)
                codes.set_name(f"{name}_codes").set_output(True)
                scales.set_name(f"{name}_scales").set_output(True)
        return g


@dataclass(frozen=True)
class Fc2:
    """The rest of a forward that ended at the activation."""

    config: MlpConfig

    def declare(self) -> Graph:
        """The graph, not planned yet. Inputs act, w2, offsets; output y."""
        g, rows = _new_graph("grouped_mlp_fc2", self.config)
        offsets = _offsets(g, self.config)
        act = g.tensor("act", dim=(rows, self.config.intermediate), alignment=self.config.alignment)  # (M, I)
        _fc2(g, self.config, act, offsets)
        return g


@dataclass(frozen=True)
class Backward:
    """A backward graph that gives the gradients asked for. `has_act`: the forward saved its activation. `dh`: also that
    of the pre-activation, from which Fc1Backward goes on."""

    config: MlpConfig
    dx: bool
    dw1: bool
    dw2: bool
    dprob: bool
    has_act: bool
    dh: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether the activation is computed again, for the gradient of w2."""
        return self.dw2 and not self.has_act

    def declare(self) -> Graph:
        """The graph, not planned yet. Inputs as the forward's, dy and what was saved; outputs as asked for."""
        c = self.config
        g, rows = _new_graph("grouped_mlp_backward", c)
        offsets, prob = _routing(g, rows, c)
        dy = g.tensor("dy", dim=(rows, c.hidden), alignment=c.alignment)  # (M, H)
        act = self._act(g, rows) if self.dw2 and self.has_act else None
        if self.dh or self.dx or self.dw1 or self.dprob or self.recomputes:
            h = g.tensor("h", dim=(rows, 2 * c.intermediate), glu_layout=c.glu_layout, alignment=c.alignment)
            w2 = g.tensor("w2", dim=(c.experts, c.hidden, c.intermediate), stride=c.w2_stride, alignment=c.alignment)
            dact = g.grouped_matmul(_operand(g, c, dy, "dy"), w2, offsets, name="fc2_dgrad")  # (M, I) float32
            dh, dprob, *more = g.glu_backward(dact, h, act=c.act, prob=prob, recompute=self.recomputes,
                                              name="activation_backward", **c.activation)  # fmt: skip
            dh.set_name("dh").set_output(self.dh)
            if not c.is_quantized:
                dh.set_data_type(c.data_type)
            if self.dprob:
                dprob.set_name("dprob").set_output(True)
            for recomputed in more:
                act = recomputed if c.is_quantized else recomputed.set_data_type(c.data_type)
                act = _column_operand(g, c, act, "act")
            _fc1_gradients(g, c, rows, offsets, dh, self.dx, self.dw1)
        if act is not None:
            dw2 = g.grouped_matmul_wgrad(*_ordered(_column_operand(g, c, dy, "dy"), act, c.w2_stride), offsets,
                                         name="fc2_wgrad")  # fmt: skip
            dw2.set_name("dw2").set_output(True)
        return g

    def _act(self, g: Graph, rows: Dim) -> Tensor:
        """The saved activation as dw2's operand."""
        c = self.config
        if c.is_quantized:
            return _saved_codes(g, c, rows, c.intermediate, "act")
        return g.tensor("act", dim=(rows, c.intermediate), alignment=c.alignment)


@dataclass(frozen=True)
class Fc1Backward:
    """The rest of a backward that ended at dh."""

    config: MlpConfig
    dx: bool
    dw1: bool

    def declare(self) -> Graph:
        """The graph, not planned yet. Inputs dh, offsets, w1 for dx and x for dw1; outputs as asked for."""
        c = self.config
        g, rows = _new_graph("grouped_mlp_fc1_backward", c)
        offsets = _offsets(g, c)
        dh = g.tensor("dh", dim=(rows, 2 * c.intermediate), alignment=c.alignment)  # (M, 2I)
        _fc1_gradients(g, c, rows, offsets, dh, self.dx, self.dw1)
        return g


Key = Forward | Fc2 | Backward | Fc1Backward
"""What a graph of an expert MLP is built from."""


def inputs_first(stride: tuple[int, ...]) -> bool:
    """Whether a weight (L, out, in) lies in memory with `in` before `out`, so that its gradient should too."""
    return stride[1] == 1 and stride[2] != 1


def _ordered(outputs: Tensor, inputs: Tensor, stride: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The operands of a weight gradient, (M, out) and (M, in), in the order that writes it as the weight lies."""
    return (inputs, outputs) if inputs_first(stride) else (outputs, inputs)


def _fc2(g: Graph, c: MlpConfig, act: Tensor, offsets: Tensor) -> None:
    w2 = g.tensor("w2", dim=(c.experts, c.intermediate, c.hidden), stride=_transposed(c.w2_stride),
                  alignment=c.alignment)  # fmt: skip
    y = g.grouped_matmul(_operand(g, c, act, "act"), w2, offsets, name="fc2")  # (M, H)
    y.set_name("y").set_output(True)


def _fc1_gradients(g: Graph, c: MlpConfig, rows: Dim, offsets: Tensor, dh: Tensor, wants_dx: bool, wants_dw1: bool
                   ) -> None:  # fmt: skip
    if wants_dx:
        w1 = g.tensor("w1", dim=(c.experts, 2 * c.intermediate, c.hidden), stride=c.w1_stride, alignment=c.alignment)
        dx = g.grouped_matmul(_operand(g, c, dh, "dh"), w1, offsets, name="fc1_dgrad")  # (M, H)
        dx.set_name("dx").set_output(True)
    if wants_dw1:
        x = _saved_codes(g, c, rows, c.hidden, "x") if c.is_quantized else (
            g.tensor("x", dim=(rows, c.hidden), alignment=c.alignment))  # fmt: skip
        dw1 = g.grouped_matmul_wgrad(*_ordered(_column_operand(g, c, dh, "dh"), x, c.w1_stride), offsets,
                                     name="fc1_wgrad")  # fmt: skip
        dw1.set_name("dw1").set_output(True)


def _new_graph(name: str, c: MlpConfig) -> tuple[Graph, Dim]:
    g = Graph(name=name, io_data_type=c.data_type, intermediate_data_type=DataType.FLOAT, device=c.device)
    return g, g.symbol("M", multiple_of=c.multiple_of)


def _offsets(g: Graph, c: MlpConfig) -> Tensor:
    """offsets (L,)."""
    return g.tensor("offsets", dim=(c.experts,), data_type=c.offsets_type, multiple_of=c.multiple_of,
                    alignment=c.alignment)  # fmt: skip


def _routing(g: Graph, rows: Dim, c: MlpConfig) -> tuple[Tensor, Tensor | None]:
    """offsets (L,) and prob (M,)."""
    offsets = _offsets(g, c)
    if not c.has_prob:
        return offsets, None
    return offsets, g.tensor("prob", dim=(rows,), data_type=DataType.FLOAT, alignment=c.alignment)


def _transposed(stride: tuple[int, ...]) -> tuple[int, ...]:
    return stride[0], stride[2], stride[1]


def _swizzled(c: MlpConfig) -> bool:
    """Whether experts begin at whole 128x4 atoms, so that scales can lie as block-scaled kernels read them."""
    return c.multiple_of % SCALE_ATOM_ROWS == 0


def _value_type(c: MlpConfig) -> DataType:
    """A type in which codes times scales are exact."""
    return c.data_type if c.data_type is DataType.BFLOAT16 else DataType.FLOAT


def _quantize(g: Graph, c: MlpConfig, x: Tensor, *, axis: int, name: str) -> tuple[Tensor, Tensor]:
    side = "rows" if axis == 1 else "columns"
    return g.block_scale_quantize(x, block_size=MXFP8_BLOCK, axis=axis, data_type=DataType.FP8_E4M3,
                                  swizzled=_swizzled(c), name=f"quantize_{name}_{side}")  # fmt: skip


def _through_codes(g: Graph, c: MlpConfig, x: Tensor, axis: int, name: str) -> Tensor:
    if not c.is_quantized:
        return x
    codes, scales = _quantize(g, c, x, axis=axis, name=name)
    return g.block_scale_dequantize(codes, scales).set_data_type(_value_type(c))


def _operand(g: Graph, c: MlpConfig, x: Tensor, name: str) -> Tensor:
    """`x` as an operand of a matmul that sums over its columns."""
    return _through_codes(g, c, x, 1, name)


def _column_operand(g: Graph, c: MlpConfig, x: Tensor, name: str) -> Tensor:
    """`x` as an operand of a weight gradient, which sums over its rows."""
    return _through_codes(g, c, x, 0, name)


def _saved_codes(g: Graph, c: MlpConfig, rows: Dim, columns: int, name: str) -> Tensor:
    """What the forward saved of a tensor (M, columns) in codes, as an operand of a weight gradient."""
    layout = ScaleLayout(MXFP8_BLOCK, 0, _swizzled(c))
    codes = g.tensor(f"{name}_codes", dim=(rows, columns), data_type=DataType.FP8_E4M3, scale_layout=layout)
    scales = g.tensor(f"{name}_scales", dim=layout.storage((rows, columns)), data_type=DataType.FP8_E8M0,
                      scale_layout=layout)  # fmt: skip
    return g.block_scale_dequantize(codes, scales).set_data_type(_value_type(c))


_CLOCK = itertools.count()


class BuiltGraph:
    """A built graph as a function of the inputs that it reads.

    `used`: when it was called last, later is more. `dropped`: no cache has it any more, so that nobody should take it.
    """

    def __init__(self, graph: Graph, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
        self.graph = graph
        declared = graph.operation_graph()
        self.inputs = tuple(inputs) or tuple(t.name for t in declared.graph_inputs)
        self.outputs = tuple(outputs) or tuple(t.name for t in declared.graph_outputs)
        self.calls = Calls(graph, self.inputs, self.outputs)
        self.used, self.dropped = next(_CLOCK), False

    def __call__(self, given: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Runs the graph on those of `given` that it reads; its outputs by name."""
        self.used = next(_CLOCK)
        made = self.calls(*[given[name] for name in self.inputs])  # type: ignore[arg-type]
        return dict(zip(self.outputs, made, strict=True))


class GraphCache:
    """Built graphs by what they were built from: the least recently used go when there are more than `limit`.

    Threads may share it; a graph is built under the lock, once.
    """

    def __init__(self, limit: int = 128) -> None:
        self.limit = limit
        self._graphs: dict[object, BuiltGraph] = {}
        self._lock = threading.RLock()

    def get(self, key: object, build: Callable[[], BuiltGraph]) -> BuiltGraph:
        """The graph of `key`; `build` makes it where there is none."""
        found = self._graphs.get(key)
        if found is None:
            with self._lock:
                found = self._graphs.get(key)
                if found is None:
                    made = build()
                    while len(self._graphs) >= self.limit:
                        oldest = min(self._graphs, key=lambda held: self._graphs[held].used)
                        self._graphs.pop(oldest).dropped = True
                    found = self._graphs[key] = made
        found.used = next(_CLOCK)
        return found

    def graphs(self) -> list[BuiltGraph]:
        """Those that are held, the most recently used last."""
        with self._lock:
            return sorted(self._graphs.values(), key=lambda held: held.used)

    def clear(self) -> None:
        """Forgets every graph."""
        with self._lock:
            for graph in self._graphs.values():
                graph.dropped = True
            self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)


GRAPHS = GraphCache()
"""The graphs of every expert MLP and compiled region of this process."""


def graph_of(key: Key) -> BuiltGraph:
    """The built graph of `key`. The first build for a configuration logs what stays unfused.

    Raises StateError("BUILD_IN_CAPTURE") where that would be inside CUDA graph capture.
    """

    def build() -> BuiltGraph:
        if key.config.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "BUILD_IN_CAPTURE",
                asked="an expert MLP in CUDA graph capture",
                seen=f"its graph {key.declare().name} is not built for these types, strides and alignments",
                required="one call, forward and backward, with the same buffers before the capture",
                hint="torch.cuda.make_graphed_callables warms up by itself; torch.cuda.graph does not",
            )
        return BuiltGraph(key.declare().build())

    return GRAPHS.get(key, build)
