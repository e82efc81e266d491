"""Reads a `cudnn.pygraph`: its nodes and tensors are plain Python, so neither cudnn nor libcudnn is imported.

    moe_grouped_matmul -> grouped_matmul (alpha [E,1,1] and bias [E,1,N] beside it join it)
    moe_grouped_matmul_bwd -> grouped_matmul_wgrad        block_scale_(de)quantize -> the same
    reduction -> reduction; with group_offset -> group_sum, group_amax
    pointwise -> the same, some composed               slice, concatenate of halves -> split_glu, join_glu

Leading unit extents are dropped; `first_token_offset` (boundaries) becomes end offsets. What cannot be read is listed,
all of it, in one UnsupportedCudnnGraph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..kernels.condition import Reason
from .builder import Tensor
from .cudnn_graph import BufferView, CudnnGraph, PackByExpert
from .cudnn_pointwise import COMPARISONS, POINTWISE
from .cudnn_reading import SWIZZLED, Reading, name_of, stride_of
from .ir.dtypes import DataType
from .ir.errors import GraphError, GraphNotSupportedError
from .ir.layouts import GluLayout, ScaleLayout
from .ir.tensor import contiguous_stride

REDUCTIONS = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2")
GROUP_REDUCTIONS = {"ADD": "group_sum", "AMAX": "group_amax"}


class UnsupportedCudnnGraph(GraphNotSupportedError):
    """A cuDNN graph has something that this project has no node for; `reasons` lists all of it."""

    def __init__(self, name: str, reasons: tuple[Reason, ...]) -> None:
        self.reasons = reasons
        lines = "".join(f"\n  {reason}" for reason in reasons)
        super().__init__("CUDNN_GRAPH", asked=f"cuDNN graph {name}",
                         seen=f"{len(reasons)} that cannot be read:{lines}\n",
                         required="nodes and attributes that have a meaning here")  # fmt: skip


def import_graph(pygraph: Any, **options: Any) -> CudnnGraph:
    """The graph of a `cudnn.pygraph`; `options` as Graph's. Raises UnsupportedCudnnGraph with everything unreadable."""
    return _Importer(pygraph, options).run()


class _Importer(Reading):
    """One import: the reading, and the graph under construction."""

    def __init__(self, pygraph: Any, options: Mapping[str, Any]) -> None:
        super().__init__(pygraph)
        self.graph = CudnnGraph(
            name=self.name, io_data_type=self.io, intermediate_data_type=self.intermediate, **options
        )
        self.made: dict[int, Tensor] = {}  # by uid
        self.masks: dict[int, Tensor] = {}  # comparison results as booleans, by uid
        self.views: dict[int, BufferView] = {}
        self.packings: list[PackByExpert] = []
        self.splits: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self) -> CudnnGraph:
        for node in self.nodes:
            read = IMPORTERS.get(node.node_type.name)
            if read is None:
                self._fail("NODE", node, node.node_type.name, f"one of {sorted(IMPORTERS)}")
                continue
            self._check_node(node)
            if any(t.uid in self.producers and t.uid not in self.made for _, t in self._ports(node.inputs)):
                continue  # the node that gives it is unreadable, and has its reason
            try:
                read(self, node)
            except GraphError as error:
                self._fail(error.code, node, error.seen, f"{error.asked}: {error.required}", error.hint or "")
        for t in {t.uid: t for node in self.nodes for _, t in self._ports(node.inputs)}.values():
            if t.is_virtual and t.uid not in self.producers:
                self._fail("VIRTUAL_INPUT", t, "virtual, and no node gives it", "a tensor that the caller gives")
        if self.reasons:
            raise UnsupportedCudnnGraph(self.name, tuple(dict.fromkeys(self.reasons)))
        self.graph.views, self.graph.packings = self.views, tuple(self.packings)
        self.graph.notes = tuple(self._notes())
        return self.graph

    def _kept(self, t: Any, dim: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a cuDNN tensor that remain: all of weights, else without leading unit extents down to two."""
        if self.roles.get(t.uid) == "weights":
            return tuple(range(len(dim)))
        first = 0
        while first < len(dim) - 2 and dim[first] == 1:
            first += 1
        return tuple(range(first, len(dim)))

    def input(self, t: Any) -> Tensor:
        """The graph's tensor of one of cuDNN's, declared on first use."""
        if t.uid in self.made:
            return self.made[t.uid]
        if t.is_pass_by_value:
            return self._scalar(t)
        dim, stride = tuple(t.dim), tuple(t.stride or contiguous_stride(tuple(t.dim)))
        kept = self._kept(t, dim)
        if self.roles.get(t.uid) == "offsets":
            return self._offsets(t, dim, stride)
        if len(kept) > 2 and self.roles.get(t.uid) != "weights":
            self._fail("BATCH", t, f"dim {dim}", "[1, M, N], or an operand [E, 1, N] right beside a grouped matmul")
            kept = kept[-2:]
        layout = self.layouts.get(t.uid)
        return self._declare(t, "matrix", dim, stride, kept, glu_layout=layout)

    def _declare(
        self, t: Any, kind: str, dim: Any, stride: Any, kept: Any, *, inner: Any = None, **given: Any
    ) -> Tensor:
        data_type = self.type_of(t)
        made = self.graph.tensor(
            t.name,
            dim=tuple(dim[a] for a in kept) if inner is None else inner,
            stride=tuple(stride[a] for a in kept) if inner is None else None,
            data_type=data_type,
            uid=t.uid,
            **given,
        )
        self.made[t.uid] = made
        self.views[t.uid] = BufferView(t.name, kind, tuple(dim), tuple(stride), tuple(kept), data_type)
        return made

    def _scalar(self, t: Any) -> Tensor:
        data_type = self.type_of(t) if t.data_type is not None else DataType.FLOAT
        fixed = t.pass_by_value is not None and name_of(t.scalar_type) != "RUNTIME_PARAM"
        if fixed:
            made = self.graph.tensor_scalar(float(t.pass_by_value), data_type, t.name).set_uid(t.uid)
        else:
            made = self.graph.tensor(t.name, dim=(1, 1), data_type=data_type, uid=t.uid)
        self.made[t.uid] = made
        default = None if fixed or t.pass_by_value is None else float(t.pass_by_value)
        self.views[t.uid] = BufferView(t.name, "scalar", tuple(t.dim), tuple(t.stride), (), data_type, default)
        return made

    def _offsets(self, t: Any, dim: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        inner = (dim[0] - 1,)
        return self._declare(t, "offsets", dim, stride, (), inner=inner, multiple_of=t.alignment_value)

    def boundaries(self, node: Any, experts: int, port: str) -> Tensor | None:
        """End offsets for `experts` experts; None, with a reason, where the tensor is no boundary of each."""
        t = node.inputs[port]
        if t.dim[0] != experts + 1 or any(d != 1 for d in t.dim[1:]):
            self._fail("OFFSETS", t, f"dim {list(t.dim)} for {experts} experts",
                       f"{experts + 1} boundaries, [{experts + 1}, 1, 1]",
                       "starts alone do not say where the last expert ends")  # fmt: skip
            return None
        return self.input(t)

    def output(
        self, t: Any, made: Tensor, *, natural: tuple[int, ...] | None = None, kept: tuple[int, ...] | None = None,
        kind: str = "matrix",
    ) -> None:  # fmt: skip
        """Gives a tensor the identity of one of cuDNN's. `natural`: its shape there, unless it says one. `kept`: the
        axes of that shape which it has here, where they are others than usual."""
        inner = tuple(made.dim)
        dim = tuple(t.dim) or natural or (1,) * (3 - len(inner)) + inner
        stride = stride_of(t, dim)
        if kept is None:
            kept = self._kept(t, dim) if len(inner) > 1 else (0,)[: len(inner)]
        made.set_name(t.name).set_uid(t.uid).set_output(not t.is_virtual)
        if kind == "matrix":
            if tuple(dim[a] for a in kept) != inner:
                self._fail("OUTPUT_SHAPE", t, f"dim {list(dim)}", f"{list(inner)}, after leading extents of 1")
            elif not t.is_virtual:
                made.set_stride(tuple(stride[a] for a in kept))
        self.made[t.uid] = made
        self.views[t.uid] = BufferView(t.name, kind, dim, stride, kept, made.data_type)

    # ------------------------------------------------------------------ nodes

    def grouped_matmul(self, node: Any) -> None:
        offsets = self.boundaries(node, node.inputs["weight"].dim[0], "first_token_offset")
        if offsets is None:
            return
        alpha, bias, last = None, None, node
        while (next_node := self._taken_over(last)) is not None:
            operand, kind = self.joined[id(next_node)]
            inner = tuple(operand.dim[:1]) if kind == "alpha" else (operand.dim[0], operand.dim[2])
            kept = (0,) if kind == "alpha" else (0, 2)
            made = self.made.get(operand.uid) or self._declare(operand, "matrix", operand.dim, operand.stride, kept)
            assert tuple(made.dim) == inner
            alpha, bias, last = (made, bias, next_node) if kind == "alpha" else (alpha, made, next_node)
        y = self.graph.grouped_matmul(self.input(node.inputs["token"]), self.input(node.inputs["weight"]), offsets,
                                      alpha=alpha, bias=bias, name=node.name)  # fmt: skip
        self.finish(last.outputs["OUT_0"], y)
        for t in (node.outputs["OUT_0"], *(n.outputs["OUT_0"] for n in self._chain(node))):
            self.made.setdefault(t.uid, y)

    def _taken_over(self, node: Any) -> Any | None:
        """The node that joins the grouped matmul after `node`."""
        readers = self.readers.get(node.outputs["OUT_0"].uid, [])
        return next((n for n, _ in readers if id(n) in self.joined), None)

    def _chain(self, node: Any) -> list[Any]:
        found: list[Any] = []
        while (following := self._taken_over(found[-1] if found else node)) is not None:
            found.append(following)
        return found

    def finish(self, t: Any, made: Tensor, **how: Any) -> None:
        """The data type of a node's result, then its identity."""
        made.set_data_type(self.type_of(t))
        self.output(t, made, **how)

    def wgrad(self, node: Any) -> None:
        dweight = node.outputs["dweight"]
        experts = dweight.dim[0] if dweight.dim else node.inputs["first_token_offset"].dim[0]
        offsets = self.boundaries(node, experts, "first_token_offset")
        if offsets is None:
            return
        token, doutput = self.input(node.inputs["token"]), self.input(node.inputs["doutput"])
        dw = self.graph.grouped_matmul_wgrad(token, doutput, offsets, name=node.name)
        self.finish(dweight, dw)

    def dequantize(self, node: Any) -> None:
        x, descale, y = node.inputs["input"], node.inputs["descale"], node.outputs["OUT_0"]
        weights = self.roles.get(x.uid) == "weights"
        given = node.params["block_size"]
        sizes = [int(b) for b in (given if isinstance(given, (list, tuple)) else [given])]
        block = max(sizes)
        codes = self.input(x)
        columns = codes.dim[-2:]
        along_rows = sizes[-1] == 1 if len(sizes) > 1 else weights  # [32, 1]; one number: along what a product sums
        axis = 0 if along_rows else 1
        scale = self._scale_input(descale, ScaleLayout(block, axis, self._is_swizzled(descale)), columns, weights)
        self.finish(y, self.graph.block_scale_dequantize(codes, scale, name=node.name))

    @staticmethod
    def _is_swizzled(t: Any) -> bool:
        return t.reordering_type is not None and name_of(t.reordering_type) == SWIZZLED

    def _scale_input(self, t: Any, layout: ScaleLayout, columns: Any, weights: bool) -> Tensor:
        if t.uid in self.made:
            return self.made[t.uid]
        inner = ((t.dim[0],) if weights else ()) + tuple(layout.storage((columns[0], columns[1])))
        dim, stride = tuple(t.dim), tuple(t.stride or contiguous_stride(tuple(t.dim)))
        if layout.swizzled:
            return self._declare(t, "scales", dim, stride, (), inner=inner, scale_layout=layout)
        kept = tuple(range(len(dim) - len(inner), len(dim)))
        return self._declare(t, "matrix", dim, stride, kept, scale_layout=layout)

    def quantize(self, node: Any) -> None:
        x, y, scale = node.inputs["input"], node.outputs["Y"], node.outputs["scale"]
        given = node.params["block_size"]
        block = int(max(given) if isinstance(given, (list, tuple)) else given)
        value = self.input(x)
        rank = len(x.dim) or 3
        at = node.params.get("axis")
        axis = {rank - 1: 1, -1: 1, None: 1, rank - 2: 0, -2: 0}.get(at)
        if axis is None:
            self._fail("ATTRIBUTE", node, f"axis = {at}", f"{rank - 1} (along a row) or {rank - 2} (along a column)")
            return
        swizzled = self._is_swizzled(scale)
        grouped = node.inputs.get("group_offset")
        if grouped is not None and not self._grouped_scales(node, grouped, axis, block, swizzled):
            return
        codes, scales = self.graph.block_scale_quantize(
            value, block_size=block, axis=axis, data_type=self.type_of(y), scale_type=self.type_of(scale),
            swizzled=swizzled, name=node.name,
        )  # fmt: skip
        self.output(y, codes)
        natural = (1, *scales.dim)
        self.output(scale, scales, natural=natural, kind="scales" if swizzled else "matrix")
        if grouped is not None and axis == 0:
            if self.readers.get(scale.uid) or scale.is_virtual:
                self._fail("GROUP_OFFSET", node, "scales by expert that a node reads", "scales that are outputs")
            self.input(grouped)
            self.packings.append(PackByExpert(scale.uid, grouped.uid, block))

    def _grouped_scales(self, node: Any, offsets: Any, axis: int, block: int, swizzled: bool) -> bool:
        """Whether scales by expert lie as those of the whole matrix do, or can be packed so afterwards."""
        multiple = 128 if axis == 1 else 4 * block
        if not swizzled or offsets.alignment_value % multiple:
            self._fail("GROUP_OFFSET", node,
                       f"{'swizzled' if swizzled else 'plain'} scales by expert, boundaries in multiples "
                       f"of {offsets.alignment_value}",
                       f"{SWIZZLED} scales and set_alignment_value({multiple}) on the boundaries",
                       "an atom of scales would have two experts' rows")  # fmt: skip
            return False
        return True

    def reduction(self, node: Any) -> None:
        mode = name_of(node.params.get("mode"))
        x, y, grouped = node.inputs["input"], node.outputs["OUT_0"], node.inputs.get("group_offset")
        value = self.input(x)
        known = GROUP_REDUCTIONS if grouped is not None else REDUCTIONS
        if mode not in known:
            self._fail(
                "REDUCTION", node, f"mode {mode}{' by expert' if grouped is not None else ''}", f"one of {list(known)}"
            )
            return
        if grouped is not None:
            self._group_reduction(node, value, y, grouped, mode)
            return
        if not y.dim:
            self._fail("REDUCTION", node, "no dim on the output", "set_dim on it: it says which axes are reduced")
            return
        dims = tuple(y.dim)[-len(value.dim) :]
        axes = tuple(i for i, (a, b) in enumerate(zip(value.dim, dims, strict=True)) if a != b)
        if not axes or any(dims[a] != 1 for a in axes):
            self._fail("REDUCTION", node, f"{list(value.dim)} to {list(y.dim)}", "at least one axis reduced to 1")
            return
        if axes == (1,) and not self.readers.get(y.uid):
            # One value a row that nothing reads is (M,), as the dprob of a glu_backward is: so they can be one.
            made = self.graph.reduction(value, mode, axes, name=node.name)
            self.finish(y, made, kept=(len(y.dim) - 2,))
        else:
            self.finish(y, self.graph.reduction(value, mode, axes, keep_dim=True, name=node.name))

    def _group_reduction(self, node: Any, value: Tensor, y: Any, grouped: Any, mode: str) -> None:
        experts = grouped.dim[0] - 1
        offsets = self.boundaries(node, experts, "group_offset")
        wanted = (experts, 1, value.dim[1]) if mode == "ADD" else (experts, 1, 1)
        if y.dim and tuple(y.dim) != wanted:
            self._fail("REDUCTION", node, f"{mode} by expert to {list(y.dim)}", f"{list(wanted)}")
            return
        assert offsets is not None
        if mode == "ADD":
            made = self.graph.group_sum(value, offsets, name=node.name)
        else:
            made = self.graph.group_amax(value, offsets, name=node.name)
        made.set_data_type(self.type_of(y)).set_name(y.name).set_uid(y.uid).set_output(not y.is_virtual)
        stride = stride_of(y, wanted)
        self.made[y.uid] = made
        self.views[y.uid] = BufferView(
            y.name, "matrix", wanted, stride, (0, 2) if mode == "ADD" else (0,), made.data_type
        )

    def pointwise(self, node: Any) -> None:
        mode = node.params.get("mode")
        compose = POINTWISE.get(mode)
        if compose is None:
            return  # it has its reason
        y = node.outputs["OUT_0"]
        if id(node) in self.joined:
            return  # the grouped matmul before it has done it
        inputs = [t for _, t in self._ports(node.inputs)]
        operands = [self.input(t) for t in inputs]
        if mode == "binary_select":
            operands[2] = self._mask(inputs[2])
        made = compose(self.graph, operands, node.params)
        if mode in COMPARISONS:
            self._comparison(y, made)
        else:
            self.finish(y, made)

    def _mask(self, t: Any) -> Tensor:
        """A tensor as booleans: the comparison that it is, or where it is not zero."""
        if t.uid in self.masks:
            return self.masks[t.uid]
        value = self.input(t)
        return value if value.data_type is DataType.BOOLEAN else self.graph.cmp_neq(value, 0.0)

    def _comparison(self, y: Any, mask: Tensor) -> None:
        """A comparison is boolean here; where cuDNN's is a number, or is read as one, that is 1 or 0."""
        self.masks[y.uid] = mask
        boolean = self.type_of(y) is DataType.BOOLEAN
        only_masks = all(
            n.params.get("mode") == "binary_select" and p == "IN_2" for n, p in self.readers.get(y.uid, [])
        )
        if boolean or (y.is_virtual and only_masks):
            self.output(y, mask)
        else:
            self.finish(y, self.graph.select(mask, 1.0, 0.0))

    def slice(self, node: Any) -> None:
        cut = self._halves(node)
        x = node.inputs["input"]
        if cut is None or self.layouts.get(x.uid) != cut[0]:
            self._fail("SLICE", node, f"slices {node.params.get('slices')}",
                       "one half of the last axis, the same cut throughout",
                       "a slice is read where it is the gate or the up columns of a GLU")  # fmt: skip
            return
        if x.uid not in self.splits:
            self.splits[x.uid] = self.graph.split_glu(self.input(x))
        gate, up = self.splits[x.uid]
        made = gate if cut[1] == "gate" else up
        y = node.outputs["OUT_0"]
        same = y.data_type is None or self.type_of(y) is self.type_of(x)
        # Half of x rounds nowhere, so a virtual one may as well be FLOAT, which a GLU node computes in.
        made.set_data_type(DataType.FLOAT if same and y.is_virtual else self.type_of(x) if same else self.type_of(y))
        if made in self.made.values():
            self.made[y.uid] = made  # cut twice
        else:
            self.output(y, made)

    def concatenate(self, node: Any) -> None:
        inputs = [t for _, t in self._ports(node.inputs)]
        axis = node.params.get("axis")
        if len(inputs) != 2 or axis not in (2, -1):
            self._fail(
                "CONCATENATE", node, f"{len(inputs)} tensors along axis {axis}", "gate and up along the last axis"
            )
            return
        gate, up = (self.input(t) for t in inputs)
        self.finish(node.outputs["OUT_0"], self.graph.join_glu(gate, up, GluLayout.concatenated(), name=node.name))

    # ------------------------------------------------------------------ notes

    def _notes(self) -> Iterable[Reason]:
        """What a GLU's rule would need and the cuDNN graph does not show."""
        for node in self.nodes:
            mode = node.params.get("mode") if node.node_type.name == "POINTWISE" else None
            if mode not in ("swish", "swish_backward"):
                continue
            gate = node.inputs["IN_0" if mode == "swish" else "IN_1"]
            source = self.producers.get(gate.uid)
            if source is None or source.node_type.name != "SLICE":
                where = "its own buffer" if source is None else f"the result of {source.name}"
                yield Reason("GLU_HALVES", f"gate {gate.name} is {where}",
                             "gate and up as slices of one tensor (M, 2I)",
                             "slice(x, [..., 0:I]) and slice(x, [..., I:2I]) show the split; then the GLU is one node",
                             where=f"node {node.name}")  # fmt: skip


IMPORTERS: Mapping[str, Callable[[_Importer, Any], None]] = {
    "MOE_GROUPED_MATMUL": _Importer.grouped_matmul,
    "MOE_GROUPED_MATMUL_BWD": _Importer.wgrad,
    "BLOCK_SCALE_DEQUANTIZE": _Importer.dequantize,
    "BLOCK_SCALE_QUANTIZE": _Importer.quantize,
    "REDUCTION": _Importer.reduction,
    "POINTWISE": _Importer.pointwise,
    "SLICE": _Importer.slice,
    "CONCATENATE": _Importer.concatenate,
}
"""How each type of cuDNN node is read, by its name."""

__all__ = ["UnsupportedCudnnGraph", "import_graph"]
