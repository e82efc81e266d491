"""GraphBuilder: tensors and operations as a user declares them, with cuDNN's names; frozen into an OpGraph."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from .ir.dims import Dim, Expression, symbol
from .ir.dtypes import DATA_TYPES, DataType
from .ir.errors import GraphError, SourceLocation, StateError
from .ir.graph import Node, OpGraph
from .ir.layouts import GluLayout, ScaleLayout
from .ir.nodes.glu import ACTIVATION_PARAMETERS
from .ir.op import InferenceInput
from .ir.ops import OPS
from .ir.tensor import TensorSpec, contiguous_stride
from .pointwise import PointwiseVerbs

if TYPE_CHECKING:
    import torch

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_GRAPHS_OF_OPS = os.path.join(_PACKAGE, "torch", "graphs.py")
"""Declares graphs once for calls from anywhere: no line of the user's made them."""

Operand = Union["Tensor", float]


def caller_location() -> SourceLocation | None:
    """The first frame outside this package: the user's line. None in a graph that serves calls from many lines."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (name := frame.f_code.co_filename).startswith(_PACKAGE):
        if name == _GRAPHS_OF_OPS:
            return None
        frame = frame.f_back
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)


class Tensor:
    """A tensor of a graph under construction. Setters return the tensor, so that they chain; getters mirror them.

    The output of an op is virtual until `set_output(True)`. `data_type` left alone is the graph's
    intermediate type for a virtual tensor, its io type otherwise, unless the op fixes it.
    """

    def __init__(self, graph: GraphBuilder, uid: int, name: str, dim: tuple[Dim, ...], *, produced: bool) -> None:
        self._graph, self._uid, self._name, self._dim = graph, uid, name, dim
        self._user_dim = not produced
        self._produced = produced
        self._output = False
        self._stride: tuple[Dim, ...] | None = None
        self._data_type: DataType | None = None
        self._fixed_type: DataType | None = None
        self._glu_layout: GluLayout | None = None
        self._scale_layout: ScaleLayout | None = None
        self._alignment = 16
        self._discrete = False
        self._multiple_of = 1
        self._value: float | None = None
        self._location = caller_location()

    name = property(lambda self: self._name, doc="Label; duplicates are legal.")
    uid = property(lambda self: self._uid, doc="Unique id within the graph.")
    dim = property(lambda self: self._dim, doc="Extents; ints or expressions over symbols.")
    is_output = property(lambda self: self._output, doc="Whether it is written to the caller's buffer.")
    glu_layout = property(lambda self: self._glu_layout, doc="Gate/up order of the last axis, None where it has none.")
    scale_layout = property(lambda self: self._scale_layout, doc="Block-scale order, on scales and codes.")

    @property
    def is_virtual(self) -> bool:
        """Produced by a node and not an output."""
        return self._produced and not self._output

    @property
    def stride(self) -> tuple[Dim, ...]:
        """Strides in elements; row-major unless set."""
        return contiguous_stride(self._dim) if self._stride is None else self._stride

    @property
    def data_type(self) -> DataType:
        """Where the value rounds: as set, or the default described above."""
        default = self._graph.intermediate_data_type if self.is_virtual else self._graph.io_data_type
        return self._data_type or self._fixed_type or default

    def set_output(self, output: bool = True) -> Tensor:
        """Marks the tensor as written to the caller's buffer. Raises GraphError for a graph input."""
        self._graph._require_open("set_output")
        if not self._produced:
            raise GraphError("OUTPUT_UNPRODUCED", asked=f"set_output on {self._name}", seen="a graph input",
                             required="the output of an op", where=caller_location())  # fmt: skip
        self._output = bool(output)
        return self

    def set_name(self, name: str) -> Tensor:
        self._graph._require_open("set_name")
        self._name = name
        return self

    def set_uid(self, uid: int) -> Tensor:
        """Gives the tensor a uid of the user's choice; an automatic holder moves away, a user's does not."""
        self._graph._require_open("set_uid")
        self._graph._assign_uid(self, uid)
        return self

    def set_dim(self, dim: Sequence[Dim]) -> Tensor:
        self._graph._require_open("set_dim")
        self._dim, self._user_dim = tuple(dim), True
        return self

    def set_stride(self, stride: Sequence[Dim]) -> Tensor:
        self._graph._require_open("set_stride")
        self._stride = tuple(stride)
        return self

    def set_data_type(self, data_type: DataType) -> Tensor:
        self._graph._require_open("set_data_type")
        self._data_type = DataType(data_type)
        return self

    def set_alignment_value(self, alignment: int) -> Tensor:
        """Promised byte alignment of the data pointer."""
        self._graph._require_open("set_alignment_value")
        self._alignment = alignment
        return self

    def get_name(self) -> str:
        return self._name

    def get_uid(self) -> int:
        return self._uid

    def get_dim(self) -> tuple[Dim, ...]:
        return self._dim

    def get_stride(self) -> tuple[Dim, ...]:
        return self.stride

    def get_data_type(self) -> DataType:
        return self.data_type

    def get_alignment_value(self) -> int:
        return self._alignment

    def spec(self) -> TensorSpec:
        """The frozen description of the tensor as it stands."""
        return TensorSpec(
            uid=self._uid, name=self._name, dim=self._dim, stride=self.stride, data_type=self.data_type,
            is_virtual=self.is_virtual, is_output=self._output, glu_layout=self._glu_layout,
            scale_layout=self._scale_layout, alignment=self._alignment, discrete=self._discrete,
            multiple_of=self._multiple_of, value=self._value, location=self._location,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Tensor {self._uid} {self.spec()}>"


class _PendingNode:
    """A node whose output shapes may still change with its inputs' dims."""

    def __init__(self, op: str, name: str, inputs: dict[str, Tensor], attributes: dict[str, Any]) -> None:
        self.op, self.name, self.inputs, self.attributes = op, name, inputs, attributes
        self.outputs: dict[str, Tensor] = {}
        self.location = caller_location()


class GraphBuilder(PointwiseVerbs):
    """Declares tensors and operations. `io_data_type` and `intermediate_data_type` are the defaults of tensors that
    are and are not in the caller's memory; arithmetic is always float32 (`compute_data_type`)."""

    def __init__(
        self,
        *,
        name: str = "graph",
        io_data_type: DataType = DataType.BFLOAT16,
        intermediate_data_type: DataType = DataType.FLOAT,
        compute_data_type: DataType = DataType.FLOAT,
        deterministic: bool = False,
    ) -> None:
        if compute_data_type is not DataType.FLOAT:
            raise GraphError(
                "COMPUTE_DATA_TYPE", asked="compute_data_type", seen=compute_data_type, required=DataType.FLOAT
            )
        self.name = name
        self.io_data_type = DataType(io_data_type)
        self.intermediate_data_type = DataType(intermediate_data_type)
        self.deterministic = deterministic
        self._tensors: dict[int, Tensor] = {}
        self._user_uids: set[int] = set()
        self._pending: list[_PendingNode] = []
        self._symbols: dict[str, Expression] = {}
        self._counts: dict[str, int] = {}
        self._frozen = False

    # ------------------------------------------------------------------ tensors

    def symbol(self, name: str, multiple_of: int = 1, max: int | None = None) -> Expression:
        """A dim bound by the buffers of each execute. A name declared twice in different ways is a GraphError."""
        fresh = symbol(name, multiple_of, max)
        known = self._symbols.setdefault(name, fresh)
        if known != fresh:
            raise GraphError("SYMBOL_CLASH", asked=f"symbol {name}", seen=f"multiple_of={multiple_of}, max={max}",
                             required="the same multiple_of and max as before", where=caller_location())  # fmt: skip
        return known

    def tensor(
        self,
        name: str = "",
        dim: Sequence[Dim] = (),
        stride: Sequence[Dim] | None = None,
        data_type: DataType | None = None,
        *,
        glu_layout: GluLayout | None = None,
        scale_layout: ScaleLayout | None = None,
        alignment: int = 16,
        discrete: bool = False,
        multiple_of: int = 1,
        uid: int | None = None,
    ) -> Tensor:
        """A graph input.

        `dim`, `stride`: extents and strides in elements (row-major by default). `glu_layout`: gate/up order of the last
        axis. `scale_layout`: for block scales. `alignment`: promised bytes. `discrete`: weights (L, K, N) as L separate
        (K, N) buffers or an int64 array of addresses. `multiple_of`: promise that every value of an integer tensor (end
        offsets) is a multiple of it. Raises GraphError for a uid that another tensor was given.
        """
        self._require_open("tensor")
        made = self._new_tensor(name or f"tensor.{self._count('tensor')}", tuple(dim), produced=False)
        made._stride = None if stride is None else tuple(stride)
        made._data_type = None if data_type is None else DataType(data_type)
        made._glu_layout, made._scale_layout = glu_layout, scale_layout
        made._alignment, made._discrete, made._multiple_of = alignment, discrete, multiple_of
        return made if uid is None else made.set_uid(uid)

    def tensor_like(self, template: torch.Tensor | Tensor, name: str = "", **changes: Any) -> Tensor:
        """A graph input with the shape, strides and data type of a torch tensor or of another graph tensor."""
        if isinstance(template, Tensor):
            like = template.spec()
            given = {"dim": like.dim, "stride": like.stride, "data_type": like.data_type, "glu_layout": like.glu_layout,
                     "scale_layout": like.scale_layout, "alignment": like.alignment, "discrete": like.discrete,
                     "multiple_of": like.multiple_of}  # fmt: skip
        else:
            wanted = str(template.dtype).removeprefix("torch.")
            found = [t for t, info in DATA_TYPES.items() if info.torch_name == wanted and info.packed == 1]
            if not found:
                raise GraphError("DATA_TYPE", asked="tensor_like", seen=template.dtype, required="a type of DataType",
                                 where=caller_location())  # fmt: skip
            given = {"dim": tuple(template.shape), "stride": tuple(template.stride()), "data_type": found[0]}
        return self.tensor(name, **{**given, **changes})

    def tensor_scalar(self, value: float, data_type: DataType = DataType.FLOAT, name: str = "") -> Tensor:
        """A compile-time scalar: its value is part of the graph."""
        self._require_open("tensor_scalar")
        made = self._new_tensor(name or f"scalar.{self._count('scalar')}", (), produced=False)
        made._data_type, made._value = DataType(data_type), float(value)
        return made

    # ------------------------------------------------------------------ grouped matmuls and GLU

    def grouped_matmul(
        self,
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        *,
        alpha: Tensor | None = None,
        alpha_exponent: int = 1,
        bias: Tensor | None = None,
        name: str | None = None,
    ) -> Tensor:
        """(M, K) x (L, K, N) -> (M, N); rows `[offsets[g-1], offsets[g])` use expert g.

        `y = alpha[g]**alpha_exponent * a @ b[g] + bias[g]`. `b` has any strides, dense or discrete.
        """
        return self._one("grouped_matmul", name, dict(a=a, b=b, offsets=offsets, alpha=alpha, bias=bias),
                         alpha_exponent=alpha_exponent)  # fmt: skip

    def grouped_matmul_wgrad(self, a: Tensor, dy: Tensor, offsets: Tensor, *, accumulate: bool = False,
                             name: str | None = None) -> Tensor:  # fmt: skip
        """(M, K), (M, N) -> (L, K, N): weight gradients; an empty expert's is zero, or its accumulator unchanged."""
        return self._one("grouped_matmul_wgrad", name, dict(a=a, dy=dy, offsets=offsets), accumulate=accumulate)

    def glu(
        self, x: Tensor, *, act: str, prob: Tensor | None = None, name: str | None = None, **parameters: Any
    ) -> Tensor:
        """(M, 2I) -> (M, I): gated activation `act` ("swiglu", "geglu", "situglu"), times `prob` (M,).

        `parameters`: geglu_alpha, clamp_min, clamp_max, linear_offset (geglu); situ_beta1, situ_beta2 (situglu).
        """
        self._check_activation(act, parameters)
        return self._one("glu", name, dict(x=x, prob=prob), act=act, **parameters)

    def glu_backward(self, dy: Tensor, x: Tensor, *, act: str, prob: Tensor | None = None, beta: Tensor | None = None,
                     offsets: Tensor | None = None, recompute: bool = False, name: str | None = None,
                     **parameters: Any) -> tuple[Tensor, ...]:  # fmt: skip
        """(M, I), (M, 2I) -> dx (M, 2I), dprob (M,), and with `recompute` the forward's activation (M, I).

        `beta` (L,) scales x per expert and needs `offsets`. Parameters as for `glu`; formulas in numerics.
        """
        self._check_activation(act, parameters)
        outputs = self._apply("glu_backward", name, dict(dy=dy, x=x, prob=prob, beta=beta, offsets=offsets),
                              act=act, recompute=recompute, **parameters)  # fmt: skip
        return tuple(outputs.values())

    def convert_glu_layout(self, x: Tensor, to: GluLayout, *, name: str | None = None) -> Tensor:
        """Reorders gate and up columns of the last axis into layout `to`."""
        return self._one("convert_glu_layout", name, dict(x=x), to=str(to))

    def split_glu(self, x: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
        """(M, 2I) -> gate (M, I), up (M, I)."""
        outputs = self._apply("split_glu", name, dict(x=x))
        return outputs["gate"], outputs["up"]

    def join_glu(self, gate: Tensor, up: Tensor, layout: GluLayout, *, name: str | None = None) -> Tensor:
        """gate (M, I), up (M, I) -> (M, 2I) in `layout`."""
        return self._one("join_glu", name, dict(gate=gate, up=up), layout=str(layout))

    def group_sum(self, x: Tensor, offsets: Tensor, *, name: str | None = None) -> Tensor:
        """(M, N) -> (L, N): sum of each expert's rows, in float32."""
        return self._one("group_sum", name, dict(x=x, offsets=offsets))

    def group_amax(self, x: Tensor, offsets: Tensor, *, split_glu: bool = False, name: str | None = None) -> Tensor:
        """(M, N) -> (L,), or (L, 2) with gate and up apart: largest magnitude of each expert's rows."""
        return self._one("group_amax", name, dict(x=x, offsets=offsets), split_glu=split_glu)

    # ------------------------------------------------------------------ block scales

    def block_scale_quantize(self, x: Tensor, *, block_size: int, axis: int, data_type: DataType,
                             scale_type: DataType = DataType.FP8_E8M0, norm_const: Tensor | None = None,
                             swizzled: bool = True, name: str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(M, N) -> codes (M, N), scales (one per block of `block_size` along `axis`; stored as ScaleLayout says)."""
        outputs = self._apply("block_scale_quantize", name, dict(x=x, norm_const=norm_const), block_size=block_size,
                              axis=axis, data_type=DataType(data_type).value, scale_type=DataType(scale_type).value,
                              swizzled=swizzled)  # fmt: skip
        return outputs["y"], outputs["scale"]

    def block_scale_dequantize(self, x: Tensor, scale: Tensor, *, norm_const: Tensor | None = None,
                               name: str | None = None) -> Tensor:  # fmt: skip
        """Codes (M, N) and their scales -> values (M, N); weights (L, K, N) matrix by matrix, with scales (L, ...).

        Weights may be discrete, and then their scales are as well. FP4 weights pack along their contiguous axis.
        """
        return self._one("block_scale_dequantize", name, dict(x=x, scale=scale, norm_const=norm_const))

    # ------------------------------------------------------------------ freezing

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors.values())

    def find_tensor(self, name: str) -> Tensor:
        """The tensor of that name. Raises GraphError where there is none or more than one."""
        found = [t for t in self._tensors.values() if t.name == name]
        if len(found) != 1:
            raise GraphError("TENSOR_NAME", asked=f"tensor {name!r}", seen=f"{len(found)} of that name",
                             required="exactly one", hint="use the Tensor or its uid" if found else None)  # fmt: skip
        return found[0]

    def operation_graph(self) -> OpGraph:
        """The graph as it stands, frozen. Shapes are inferred again, since inputs' dims may have been set late."""
        for pending in self._pending:
            try:
                self._infer(pending)
            except GraphError as error:
                error.where = error.where or f"{pending.name} [{pending.op}] at {pending.location}"
                raise
        nodes = tuple(
            Node(
                index=index,
                op=pending.op,
                name=pending.name,
                inputs=tuple((port, t.uid) for port, t in pending.inputs.items()),
                outputs=tuple((port, t.uid) for port, t in pending.outputs.items()),
                attributes=tuple(pending.attributes.items()),
                location=pending.location,
            )
            for index, pending in enumerate(self._pending)
        )
        return OpGraph(
            name=self.name,
            tensors={t.uid: t.spec() for t in self._tensors.values()},
            nodes=nodes,
            io_data_type=self.io_data_type,
            intermediate_data_type=self.intermediate_data_type,
            deterministic=self.deterministic,
        )

    # ------------------------------------------------------------------ the machinery

    def _require_open(self, what: str) -> None:
        if self._frozen:
            raise StateError("GRAPH_FROZEN", asked=what, seen="a graph that is already planned", required="a new graph",
                             where=caller_location())  # fmt: skip

    def _count(self, kind: str) -> int:
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return self._counts[kind]

    def _new_tensor(self, name: str, dim: tuple[Dim, ...], *, produced: bool) -> Tensor:
        uid = self._free_uid()
        made = Tensor(self, uid, name, dim, produced=produced)
        self._tensors[uid] = made
        return made

    def _free_uid(self) -> int:
        uid = self._counts.get("uid", 0) + 1
        while uid in self._tensors:
            uid += 1
        self._counts["uid"] = uid
        return uid

    def _assign_uid(self, tensor: Tensor, uid: int) -> None:
        holder = self._tensors.get(uid)
        if holder is not None and holder is not tensor:
            if uid in self._user_uids:
                raise GraphError("UID_TAKEN", asked=f"uid {uid} for {tensor.name}", seen=f"given to {holder.name}",
                                 required="a uid that no other tensor was given", where=caller_location())  # fmt: skip
            holder._uid = self._free_uid()
            self._tensors[holder._uid] = holder
        self._tensors = {(uid if t is tensor else k): t for k, t in self._tensors.items() if t is tensor or k != uid}
        self._user_uids.discard(tensor._uid)
        self._user_uids.add(uid)
        tensor._uid = uid

    def _check_activation(self, act: str, parameters: Mapping[str, Any]) -> None:
        known = ACTIVATION_PARAMETERS.get(act)
        if known is not None and (unused := sorted(set(parameters) - set(known))):
            raise GraphError(
                "ARGUMENT_UNUSED",
                asked=f"{act} with {unused}",
                required=f"parameters of {act}: {list(known)}",
                where=caller_location(),
            )

    def _one(self, op: str, name: str | None, inputs: Mapping[str, Any], **attributes: Any) -> Tensor:
        return next(iter(self._apply(op, name, inputs, **attributes).values()))

    def _apply(self, op: str, name: str | None, inputs: Mapping[str, Any], **attributes: Any) -> dict[str, Tensor]:
        self._require_open(op)
        location = caller_location()
        present = {port: self._operand(op, port, value) for port, value in inputs.items() if value is not None}
        for port in OPS[op].inputs:
            if port.name not in present and not port.optional:
                raise GraphError(
                    "PORT_MISSING", asked=f"{op} {port.name}", seen="nothing", required=port.doc, where=location
                )
        try:
            pending = _PendingNode(op, name or f"{op}.{self._count(op)}", present, OPS[op].complete(attributes))
            self._infer(pending)
        except GraphError as error:
            error.where = error.where or location
            raise
        self._pending.append(pending)
        return pending.outputs

    def _operand(self, op: str, port: str, value: Any) -> Tensor:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.tensor_scalar(float(value))
        if not isinstance(value, Tensor) or self._tensors.get(value.uid) is not value:
            raise GraphError(
                "OPERAND",
                asked=f"{op} {port}",
                seen=type(value).__name__,
                required="a Tensor of this graph",
                where=caller_location(),
            )
        return value

    def _infer(self, pending: _PendingNode) -> None:
        spec = OPS[pending.op]
        inferred = spec.infer(
            {
                port: InferenceInput(
                    t.name, t.dim, t.glu_layout, t.scale_layout, t._data_type or t._fixed_type, t._discrete
                )
                for port, t in pending.inputs.items()
            },
            pending.attributes,
        )
        for port, result in inferred.items():
            out = pending.outputs.get(port)
            if out is None:
                out = self._new_tensor(f"{pending.name}::{port}", result.dim, produced=True)
                pending.outputs[port] = out
            elif not out._user_dim:
                out._dim = result.dim
            out._glu_layout, out._scale_layout = result.glu_layout, result.scale_layout
            out._fixed_type = result.data_type or spec.output(port).default_type
