"""A region of an FX graph (aten ops, after AOTAutograd) as an operation graph.

Rounding. Eager PyTorch rounds every value to its dtype. A compiler that fuses keeps values in registers: Inductor's
pointwise kernels compute a chain in float32 and round what they store, and its GEMM templates hand the float32
accumulator to their epilogue. `fuse_rounding` imports regions in that way: a value that only pointwise ops and
reductions of the region read is FLOAT, a pointwise result and a grouped matmul's product alike. What keeps its
rounding in any case: outputs of the region, operands of matmuls, and a tensor that is cut into gate and up, so the
pre-activation. So beside Inductor without this library one rounding more may go: that of dy W2^T, which aten's grouped
matmul stores. Roundings are only ever dropped, never moved or added.

Without `fuse_rounding` a virtual tensor has the data type that aten gives it, and a rule that would not round there
declines with that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...builder import Tensor
from ...graph import Graph
from ...ir.dims import Dim
from ...ir.dtypes import DataType
from ...ir.graph import OpGraph
from ...ir.layouts import GluLayout
from .spellings import (
    CONVERSIONS,
    COPIES,
    DTYPES,
    FLOATING,
    GROUPED_MM,
    aten,
    constant_of,
    cut_by,
    decline,
    dims_of,
    half_of_slice,
    is_view,
    joined_halves,
    location_of,
    padded_half,
    sigmoid_argument,
    swish_argument,
    untransposed,
    value_of,
    widened_from,
)

Operand = Tensor | float


@dataclass(frozen=True)
class Join:
    """Gate and up that are two tensors, to be taken as the halves of one; `dgate`, `dup` likewise for the gradients."""

    gate: fx.Node
    up: fx.Node
    dgate: fx.Node | None = None
    dup: fx.Node | None = None


@dataclass(frozen=True)
class Imported:
    """A region as an operation graph: `inputs` and `outputs` are the FX nodes of its inputs "in<i>" and outputs.

    `unrounded` names what aten rounds and the graph does not, with the dtype and the place in the user's code."""

    graph: OpGraph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    unrounded: tuple[str, ...] = ()


class Importer:
    """Imports one region. Nodes are visited from the outputs upwards, so what no output needs is left out."""

    def __init__(
        self,
        region: Collection[fx.Node],
        outputs: Sequence[fx.Node],
        *,
        fuse_rounding: bool,
        join: Join | None = None,
        name: str = "region",
    ) -> None:
        self.region, self.outputs, self.join = frozenset(region), tuple(outputs), join
        self.fuse_rounding = fuse_rounding
        self.graph = Graph(name=name, intermediate_data_type=DataType.FLOAT)
        self._located = 0
        self._unrounded: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._known: dict[fx.Node, Tensor] = {}
        self._inputs: dict[fx.Node, Tensor] = {}
        self._halves: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        self._joined: dict[fx.Node, Tensor] = {}
        self._layouts = self._find_layouts()
        self._kept = self._find_kept()

    def build(self) -> Imported:
        """Imports every output. Raises OpfuseError where the graph cannot express the region."""
        if self.join is not None:
            gate, up = self._value(self.join.gate), self._value(self.join.up)
            self._joined.update(self._side_by_side(self.join.gate, self.join.up, gate, up))
            if self.join.dgate is not None and self.join.dup is not None:
                dgate, dup = self.value(self.join.dgate), self.value(self.join.dup)
                self._joined.update(self._side_by_side(self.join.dgate, self.join.dup, dgate, dup))
        source = () if self.join is None else (self.join.gate, self.join.up)
        written: set[int] = set()
        for number, node in enumerate(self.outputs):
            out = self._value(node) if node in source else self.value(node)
            if not out._produced or out.uid in written:
                out = self.graph.identity(out).set_data_type(out.data_type)
            written.add(out.uid)
            out.set_name(f"out{number}").set_output(True).set_data_type(self._data_type(node))
            out.set_stride(self._stride(node))
        return Imported(self.graph.operation_graph(), tuple(self._inputs), self.outputs, tuple(self._unrounded))

    # ------------------------------------------------------------------ values

    def value(self, node: fx.Node) -> Tensor:
        """The graph tensor of an FX node, as its readers see it."""
        return self._joined[node] if node in self._joined else self._value(node)

    def _value(self, node: fx.Node) -> Tensor:
        if node not in self._known:
            if node not in self.region:
                self._known[node] = self._input(node)
            elif (half := half_of_slice(node)) is not None:
                self._known[node] = self._half(node, *half)
            else:
                self._known[node] = self._compute(node)
            self._locate(node)
        return self._known[node]

    def _locate(self, node: fx.Node) -> None:
        """Gives what was declared for `node` the place in the user's model that it was traced from."""
        place = location_of(node)
        for pending in self.graph._pending[self._located :]:
            pending.location = place  # type: ignore[assignment]
            for tensor in pending.outputs.values():
                tensor._location = place  # type: ignore[assignment]
        self._located = len(self.graph._pending)

    def operand(self, value: Any, reader: fx.Node) -> Operand:
        """An argument of `reader`: a node's tensor, or a number."""
        if isinstance(value, fx.Node):
            if (number := constant_of(value)) is not None:
                return number
            if not isinstance(value_of(value), torch.Tensor):
                raise decline(reader, f"operand {value.name} is a symbolic number", "tensors and numbers")
            return self.value(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise decline(reader, f"operand {value!r}", "tensors and numbers")

    def _input(self, node: fx.Node, layout: GluLayout | None = None) -> Tensor:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or value.dim() == 0 or value.layout is not (
            torch.strided
        ):  # fmt: skip
            raise decline(node, f"an operand {value}", "dense tensors of a known type and of rank 1 or more")
        layout = layout or self._layouts.get(node)
        if (made := self._inputs.get(node)) is None:
            made = self._inputs[node] = self.graph.tensor(
                f"in{len(self._inputs)}",
                dim=[self._dim(d) for d in value.shape],
                stride=[self._dim(s) for s in value.stride()],
                data_type=DTYPES[value.dtype],
                glu_layout=layout,
            )
        elif made.glu_layout != layout:
            raise decline(node, f"read as {made.glu_layout} and as {layout}", "one GLU layout a tensor")
        return made

    def _half(self, node: fx.Node, layout: GluLayout, which: str) -> Tensor:
        base = cut_by(node)
        if base not in self._halves:
            halves = self.graph.split_glu(self.value(widened_from(base)), name=f"{base.name}_halves")
            for half in halves:
                half.set_data_type(self._data_type(base))
            self._halves[base] = halves
        return self._halves[base][("gate", "up").index(which)]

    def _side_by_side(self, gate: fx.Node, up: fx.Node, one: Tensor, other: Tensor) -> dict[fx.Node, Tensor]:
        joined = self.graph.join_glu(one, other, GluLayout.concatenated(), name=f"{gate.name}_{up.name}")
        halves = self.graph.split_glu(joined.set_data_type(self._data_type(gate)), name=f"{gate.name}_{up.name}_halves")
        for half in halves:
            half.set_data_type(self._data_type(gate))
        return {gate: halves[0], up: halves[1]}

    def _compute(self, node: fx.Node) -> Tensor:
        parts = joined_halves(node)
        if parts is not None:
            gate, up, layout = parts
            made = self.graph.join_glu(self.value(gate), self.value(up), layout, name=node.name)
        elif (x := swish_argument(node)) is not None:
            made = self.graph.swish(self.value(x), name=node.name)
        elif (x := sigmoid_argument(node)) is not None:
            made = self.graph.sigmoid(self.value(x), name=node.name)
        elif node.target is GROUPED_MM:
            made = self._grouped_mm(node)
        elif node.target in HANDLERS:
            made = HANDLERS[node.target](self, node)  # type: ignore[index]
        else:
            raise decline(node, "an op without a counterpart")
        if made.dim != tuple(self._dim(d) for d in dims_of(node)):
            raise decline(node, f"shape {made.dim}", f"shape {dims_of(node)}, as traced")
        if any(made is value for n in node.all_input_nodes for value in (self._known.get(n), self._joined.get(n))):
            return made  # the operand itself, which rounds where it is made
        return made.set_data_type(self._type(node))

    def _grouped_mm(self, node: fx.Node) -> Tensor:
        (a, b, offsets, *rest), ranks = (*node.args, None), [len(dims_of(t)) for t in node.args[:2]]  # type: ignore[arg-type]
        if any(rest) or any(node.kwargs.values()) or not all(isinstance(t, fx.Node) for t in (a, b, offsets)):
            raise decline(node, "another form of grouped matmul", "offsets, no bias, and the operands' own type")
        if ranks == [2, 2]:
            rows, turned = untransposed(a)
            if not turned:
                raise decline(node, "a first operand that is no transpose", "(M, K)^T x (M, N)")
            return self.graph.grouped_matmul_wgrad(
                self.value(rows), self.value(b), self.value(offsets), name=node.name  # type: ignore[arg-type]
            )  # fmt: skip
        if ranks != [2, 3]:
            raise decline(node, "another form of grouped matmul", "(M, K) x (L, K, N), or (M, K)^T x (M, N)")
        weight = self._input(b, self._layouts.get(node)) if b not in self.region else self.value(b)  # type: ignore[arg-type]
        return self.graph.grouped_matmul(self.value(a), weight, self.value(offsets), name=node.name)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ types, shapes, layouts

    def _type(self, node: fx.Node) -> DataType:
        """Where the value rounds: as traced, but for inner floating values under fuse_rounding."""
        traced = self._data_type(node)
        inner = self.fuse_rounding and traced.info.is_floating and node not in self._kept
        if inner and traced is not DataType.FLOAT:
            place = location_of(node)
            where = f" at {place}" if place is not None else ""
            self._unrounded[f"{node.name} ({traced.name}){where}"] = None
        return DataType.FLOAT if inner else traced

    def _data_type(self, node: fx.Node) -> DataType:
        found = DTYPES.get(value_of(node).dtype)
        if found is None:
            raise decline(node, f"dtype {value_of(node).dtype}", "a type of DataType")
        return found

    def _stride(self, node: fx.Node) -> list[Dim]:
        return [self._dim(s) for s in value_of(node).stride()]

    def _dim(self, extent: Any) -> Dim:
        if isinstance(extent, int):
            return extent
        expression = extent.node.expr
        if expression.is_Integer:
            return int(expression)
        text = str(expression)
        if expression.is_Symbol and text.isidentifier():
            return self.graph.symbol(text)
        coefficient, rest = expression.as_coeff_Mul()
        if coefficient.is_Integer and rest.is_Symbol and str(rest).isidentifier():  # strides like 128*s0
            return self.graph.symbol(str(rest)) * int(coefficient)
        return self.graph.symbol(self._names.setdefault(text, f"expression_{len(self._names)}"))

    def _find_layouts(self) -> dict[fx.Node, GluLayout]:
        """The GLU layout of each tensor that is cut into halves. Raises NotImportable where it is cut in two ways."""
        found: dict[fx.Node, GluLayout] = {}
        for node in self.region:
            half = half_of_slice(node)
            if half is None:
                continue
            base = widened_from(cut_by(node))
            if found.setdefault(base, half[0]) != half[0]:
                raise decline(node, f"{base.name} is cut as {found[base]} and as {half[0]}", "one GLU layout a tensor")
        return found

    def _find_kept(self) -> frozenset[fx.Node]:
        """Nodes whose rounding stays in any case: outputs, operands of matmuls, and what is cut into halves."""
        kept = set(self.outputs) | set(self._layouts)
        for node in self.region:
            if node.target is GROUPED_MM:
                kept.update(a for a in node.args if isinstance(a, fx.Node))
        return frozenset(kept)


# ---------------------------------------------------------------------- aten ops

CONJUNCTIONS = (aten.logical_and.default, aten.bitwise_and.Tensor)

Handler = Callable[[Importer, fx.Node], Tensor]


def _unary(verb: str) -> Handler:
    def handle(importer: Importer, node: fx.Node) -> Tensor:
        made: Tensor = getattr(importer.graph, verb)(importer.operand(node.args[0], node), name=node.name)
        return made

    return handle


def _binary(verb: str, *, swapped: bool = False) -> Handler:
    def handle(importer: Importer, node: fx.Node) -> Tensor:
        if any(node.kwargs.get(name, 1) not in (1, None) for name in ("alpha", "rounding_mode")) or len(node.args) != 2:
            raise decline(node, f"arguments {node.kwargs}", "two operands and nothing else")
        left, right = (importer.operand(a, node) for a in node.args)
        pair = (right, left) if swapped else (left, right)
        made: Tensor = getattr(importer.graph, verb)(*pair, name=node.name)
        return made

    return handle


def _swish_backward(importer: Importer, node: fx.Node) -> Tensor:
    dy, x = (importer.value(a) for a in node.args)  # type: ignore[arg-type]
    return importer.graph.swish_backward(dy, x, name=node.name)


def _reciprocal(importer: Importer, node: fx.Node) -> Tensor:
    return importer.graph.div(1.0, importer.operand(node.args[0], node), name=node.name)


def _clamp(low: int | None, high: int | None) -> Handler:
    def handle(importer: Importer, node: fx.Node) -> Tensor:
        made = importer.operand(node.args[0], node)
        for place, verb in ((low, "max"), (high, "min")):
            bound = node.args[place] if place is not None and len(node.args) > place else None
            if bound is not None:
                made = getattr(importer.graph, verb)(made, importer.operand(bound, node), name=f"{node.name}_{verb}")
        if not isinstance(made, Tensor) or not made._produced:
            raise decline(node, "no bound", "a lower or an upper bound")
        return made

    return handle


def _select(importer: Importer, node: fx.Node) -> Tensor:
    mask, yes, no = node.args
    return _selected(importer, node, mask, importer.operand(yes, node), importer.operand(no, node))


def _selected(importer: Importer, node: fx.Node, mask: Any, yes: Operand, no: Operand) -> Tensor:
    """where(a and b, yes, no) is where(a, where(b, yes, no), no)."""
    if isinstance(mask, fx.Node) and mask in importer.region and mask.target in CONJUNCTIONS:
        inner = _selected(importer, node, mask.args[1], yes, no).set_data_type(importer._type(node))
        return _selected(importer, node, mask.args[0], inner, no)
    held = importer.operand(mask, node)
    if not isinstance(held, Tensor):
        raise decline(node, f"mask {held}", "a tensor")
    return importer.graph.select(held, yes, no, name=node.name)


def _conjunction(importer: Importer, node: fx.Node) -> Tensor:
    raise decline(node, "a conjunction that is no mask of a selection")


def _sigmoid_backward(importer: Importer, node: fx.Node) -> Tensor:
    """dy * (s * (1 - s)); only the product rounds, as in aten."""
    g = importer.graph
    dy, s = (importer.value(a) for a in node.args)  # type: ignore[arg-type]
    rest = g.sub(1.0, s, name=f"{node.name}_rest").set_data_type(DataType.FLOAT)
    slope = g.mul(s, rest, name=f"{node.name}_slope").set_data_type(DataType.FLOAT)
    return g.mul(dy, slope, name=node.name)


def _sum(importer: Importer, node: fx.Node) -> Tensor:
    x, axes = node.args[0], node.args[1]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if not isinstance(axes, (list, tuple)) or not isinstance(x, fx.Node):
        raise decline(node, f"axes {axes}", "a list of axes")
    return importer.graph.reduction(importer.value(x), "ADD", [int(a) for a in axes], keep_dim=keep, name=node.name)  # type: ignore[arg-type]


def _convert(importer: Importer, node: fx.Node) -> Tensor:
    (source,) = node.all_input_nodes
    if value_of(source).device != value_of(node).device or node.kwargs.get("pin_memory"):
        raise decline(node, f"arguments {node.kwargs}", "a change of dtype alone")
    parts = joined_halves(source) if source in importer.region and len(source.users) == 1 else None
    if parts is not None:  # joining moves values, so the one rounding may as well happen there
        gate, up, layout = parts
        return importer.graph.join_glu(importer.value(gate), importer.value(up), layout, name=node.name)
    value = importer.value(source)
    if value_of(node).dtype is torch.float32 and node not in importer.outputs:
        return value  # its readers compute in float32 anyway, so widening is no step of its own
    return importer.graph.identity(value, name=node.name)


def _same(importer: Importer, node: fx.Node) -> Tensor:
    return importer.value(node.args[0])  # type: ignore[arg-type]


HANDLERS: dict[Any, Handler] = {
    **{getattr(aten, name).default: _unary(verb) for name, verb in (
        ("silu", "swish"), ("sigmoid", "sigmoid"), ("neg", "neg"), ("exp", "exp"), ("tanh", "tanh"), ("relu", "relu"))},
    **{getattr(getattr(aten, name), form): _binary(verb) for name, verb in (
        ("mul", "mul"), ("add", "add"), ("sub", "sub"), ("div", "div")) for form in ("Tensor", "Scalar")},
    **{getattr(getattr(aten, name), form): _binary(verb) for name, verb in (
        ("le", "cmp_le"), ("ge", "cmp_ge"), ("lt", "cmp_lt"), ("gt", "cmp_gt")) for form in ("Tensor", "Scalar")},
    aten.rsub.Scalar: _binary("sub", swapped=True),
    aten.maximum.default: _binary("max"),
    aten.minimum.default: _binary("min"),
    aten.silu_backward.default: _swish_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    **dict.fromkeys(CONJUNCTIONS, _conjunction),
    aten.reciprocal.default: _reciprocal,
    aten.clamp.default: _clamp(1, 2),
    aten.clamp_min.default: _clamp(1, None),
    aten.clamp_max.default: _clamp(None, 1),
    aten.where.self: _select,
    aten.sum.dim_IntList: _sum,
    **dict.fromkeys(CONVERSIONS, _convert),
    **dict.fromkeys(COPIES, _same),
}  # fmt: skip
"""How each aten op is written in the operation graph. Anything else is left to the rest of the compiler."""


def importable(node: fx.Node) -> bool:
    """Whether a node is a pointwise op, a view or a reduction that a region may hold, on (M, C) floating tensors."""
    if node.op != "call_function":
        return False
    if is_view(node):
        return True
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dtype not in (*FLOATING, torch.bool) or value.dim() > 2:
        return False
    known = node.target in HANDLERS or joined_halves(node) is not None or padded_half(node) is not None
    return known and value.dim() >= 1
