"""A region of an FX graph (aten ops, after AOTAutograd) as an operation graph.

Rounding. Eager PyTorch rounds every intermediate to its dtype, and so does the graph by default: a virtual tensor has
the data type that aten gives it, and a rule that would not round there declines with that reason. `fuse_rounding`
imports values that only pointwise ops and reductions of the region read as FLOAT instead, as Inductor's own fused
pointwise kernels keep them: fewer roundings than eager, never more. It is the user's choice, never a default.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...builder import Tensor
from ...graph import Graph
from ...ir.dims import Dim
from ...ir.dtypes import DATA_TYPES, DataType
from ...ir.errors import GraphNotSupportedError, SourceLocation
from ...ir.graph import OpGraph
from ...ir.layouts import GluLayout

aten, prims = torch.ops.aten, torch.ops.prims

DTYPES = {getattr(torch, info.torch_name): data_type for data_type, info in DATA_TYPES.items() if info.packed == 1}
FLOATING = (torch.bfloat16, torch.float16, torch.float32)

GROUPED_MM = aten._grouped_mm.default
SLICE, GETITEM = aten.slice.Tensor, operator.getitem
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
CONVERSIONS = (prims.convert_element_type.default, aten._to_copy.default)
COPIES = (aten.clone.default, aten.alias.default)

Operand = Tensor | float


class NotImportable(GraphNotSupportedError):
    """An FX node that the operation graph cannot express; its region is left to the rest of the compiler."""


def decline(node: fx.Node, why: str, required: str = "an op that the operation graph has") -> NotImportable:
    return NotImportable("FX_IMPORT", asked=f"{node.name} [{node.target}]", seen=why, required=required)


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or number) that tracing left on a node."""
    return node.meta.get("val")


def location_of(node: fx.Node) -> SourceLocation | None:
    """The innermost line of the user's code that the node was traced from."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return SourceLocation(found[-1][0], int(found[-1][1])) if found else None


def dims_of(node: fx.Node) -> tuple[Any, ...]:
    """The node's shape, () for what is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def half_of_slice(node: fx.Node) -> tuple[GluLayout, str] | None:
    """("concatenated" or "interleaved(1)", "gate" or "up") of a slice of half the columns of (M, 2I); None for any
    other slice or node."""
    if node.target is GETITEM:
        source, place = node.args
        if not isinstance(source, fx.Node) or source.target not in SPLITS or place not in (0, 1):
            return None
        (base, size), axis = source.args[:2], source.args[2] if len(source.args) > 2 else 0
        assert isinstance(base, fx.Node)
        shape = dims_of(base)
        halves = len(shape) == 2 and isinstance(shape[1], int) and size in (shape[1] / 2, [shape[1] / 2] * 2)
        if not halves or axis not in (1, -1):
            return None
        return GluLayout.concatenated(), ("gate", "up")[int(place)]  # type: ignore[arg-type]
    if node.target is not SLICE:
        return None
    base, axis, start, end, step = _padded(node.args, 1)
    assert isinstance(base, fx.Node)
    shape = dims_of(base)
    if len(shape) != 2 or axis not in (1, -1) or not isinstance(shape[1], int):
        return None
    return half_of_range(shape[1], start, end, step)


def _padded(arguments: Sequence[Any], given: int) -> tuple[Any, ...]:
    """Arguments of a slice with the defaults of axis, start, end and step, after `given` that have none."""
    defaults = (0, None, None, 1)
    return (*arguments, *defaults[len(arguments) - given :])


def half_of_range(columns: int, start: Any, end: Any, step: Any) -> tuple[GluLayout, str] | None:
    """Which half of `columns` columns `start:end:step` is, if it is one."""
    if not all(value is None or isinstance(value, int) for value in (start, end, step)):
        return None
    chosen = range(*slice(start, end, step).indices(columns))
    half = columns // 2
    for layout, which, wanted in (
        (GluLayout.concatenated(), "gate", range(half)),
        (GluLayout.concatenated(), "up", range(half, columns)),
        (GluLayout.interleaved(1), "gate", range(0, columns, 2)),
        (GluLayout.interleaved(1), "up", range(1, columns, 2)),
    ):
        if columns % 2 == 0 and chosen == wanted:
            return layout, which
    return None


def cut_by(node: fx.Node) -> fx.Node:
    """What the halves are of, for a node of which `half_of_slice` says that it is one."""
    base = node.all_input_nodes[0]
    return base.all_input_nodes[0] if node.target is GETITEM else base


def widened_from(node: fx.Node) -> fx.Node:
    """What `node` is a float32 copy of, if it is one: the halves of both hold the same values."""
    if node.target in CONVERSIONS and value_of(node).dtype is torch.float32:
        return node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """A view that the importer looks through: half the columns of a tensor."""
    return node.target in SPLITS or half_of_slice(node) is not None


@dataclass(frozen=True)
class Half:
    """One half of the columns of (M, 2I), the other half zero: what a slice's derivative is before both are added."""

    value: fx.Node
    layout: GluLayout
    which: str


def padded_half(node: fx.Node) -> Half | None:
    """The Half that a slice_backward, or a slice_scatter into zeros, is; None for any other node."""
    if node.target is aten.slice_backward.default:
        value, shape, axis, start, end, step = node.args
        columns = shape[1] if len(shape) == 2 else None  # type: ignore[arg-type,index]
    elif node.target is aten.slice_scatter.default:
        zeros, value, axis, start, end, step = _padded(node.args, 2)
        if not isinstance(zeros, fx.Node) or not _is_zero(zeros):
            return None
        shape = dims_of(node)
        columns = shape[1] if len(shape) == 2 else None
    else:
        return None
    found = half_of_range(columns, start, end, step) if axis in (1, -1) and isinstance(columns, int) else None
    return Half(value, *found) if found is not None and isinstance(value, fx.Node) else None


def _is_zero(node: fx.Node) -> bool:
    full = node.target is aten.full.default and node.args[1] == 0
    return bool(full or node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default))


def joined_halves(node: fx.Node) -> tuple[fx.Node, fx.Node, GluLayout] | None:
    """(gate, up, layout) where `node` puts two halves side by side: cat, or the sum of two padded halves."""
    if node.target is aten.cat.default:
        parts = node.args[0]
        axis = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or axis not in (1, -1):
            return None
        gate, up = parts
        if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or len(dims_of(gate)) != 2:
            return None
        return (gate, up, GluLayout.concatenated()) if dims_of(gate)[1] == dims_of(up)[1] else None
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        found = [padded_half(a) for a in node.args]  # type: ignore[arg-type]
        one, other = found if len(found) == 2 else (None, None)
        if one and other and one.layout == other.layout and {one.which, other.which} == {"gate", "up"}:
            first, second = (one, other) if one.which == "gate" else (other, one)
            return first.value, second.value, one.layout
    return None


def swish_argument(node: fx.Node) -> fx.Node | None:
    """x where `node` is x / (1 + exp(-x)), as Inductor spells silu."""
    if node.target is not aten.div.Tensor:
        return None
    x, below = node.args
    if not isinstance(below, fx.Node) or below.target is not aten.add.Tensor or below.args[1] != 1:
        return None
    exp = below.args[0]
    if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default:
        return None
    neg = exp.args[0]
    matches = isinstance(neg, fx.Node) and neg.target is aten.neg.default and neg.args[0] is x
    return x if matches and isinstance(x, fx.Node) else None


@dataclass(frozen=True)
class Join:
    """Gate and up that are two tensors, to be taken as the halves of one; `dgate`, `dup` likewise for the gradients."""

    gate: fx.Node
    up: fx.Node
    dgate: fx.Node | None = None
    dup: fx.Node | None = None


@dataclass(frozen=True)
class Imported:
    """A region as an operation graph: `inputs` and `outputs` are the FX nodes of its inputs "in<i>" and outputs."""

    graph: OpGraph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


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
        return Imported(self.graph.operation_graph(), tuple(self._inputs), self.outputs)

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
        before = set(self.graph._tensors)
        parts = joined_halves(node)
        if parts is not None:
            gate, up, layout = parts
            made = self.graph.join_glu(self.value(gate), self.value(up), layout, name=node.name)
        elif (x := swish_argument(node)) is not None:
            made = self.graph.swish(self.value(x), name=node.name)
        elif node.target is GROUPED_MM:
            made = self._grouped_mm(node)
        elif node.target in HANDLERS:
            made = HANDLERS[node.target](self, node)  # type: ignore[index]
        else:
            raise decline(node, "an op without a counterpart")
        if made.dim != tuple(self._dim(d) for d in dims_of(node)):
            raise decline(node, f"shape {made.dim}", f"shape {dims_of(node)}, as traced")
        return made if made.uid in before else made.set_data_type(self._type(node))

    def _grouped_mm(self, node: fx.Node) -> Tensor:
        a, b, offsets, *rest = node.args
        if rest or node.kwargs.get("bias") is not None or len(dims_of(a)) != 2 or len(dims_of(b)) != 3:  # type: ignore[arg-type]
            raise decline(node, "another form of grouped matmul", "(M, K) x (L, K, N) with offsets and without bias")
        assert isinstance(b, fx.Node)
        weight = self._input(b, self._layouts.get(node)) if b not in self.region else self.value(b)
        return self.graph.grouped_matmul(self.value(a), weight, self.value(offsets), name=node.name)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ types, shapes, layouts

    def _type(self, node: fx.Node) -> DataType:
        """Where the value rounds: as traced, but for inner floating values under fuse_rounding."""
        traced = self._data_type(node)
        inner = self.fuse_rounding and traced.info.is_floating and node not in self._kept
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
        return self.graph.symbol("e_" + re.sub(r"\W", "_", text))

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
    mask, yes, no = (importer.operand(a, node) for a in node.args)
    if not isinstance(mask, Tensor):
        raise decline(node, f"mask {mask}", "a tensor")
    return importer.graph.select(mask, yes, no, name=node.name)


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
