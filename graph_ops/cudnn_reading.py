"""What a `cudnn.pygraph` says, before anything is built of it: roles of tensors, halves of GLUs, what is unreadable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..kernels.condition import Reason
from .cudnn_pointwise import POINTWISE
from .ir.dtypes import DataType
from .ir.layouts import GluLayout

SWIZZLED = "F8_128x4"
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "BLOCK_SCALE_DEQUANTIZE": ("block_size",),
    "BLOCK_SCALE_QUANTIZE": ("block_size", "axis"),
    "REDUCTION": ("mode",),
    "SLICE": ("slices",),
    "CONCATENATE": ("axis",),
    "pointwise relu": ("lower_clip", "upper_clip"),
    "pointwise swish": ("swish_beta",),
    "pointwise swish_backward": ("swish_beta",),
}
"""The attributes that are read, by type of node or pointwise mode; any other that is set is unsupported."""

REQUIRED_VALUES = {("MOE_GROUPED_MATMUL", "mode"): ("NONE",), ("MOE_GROUPED_MATMUL", "top_k"): ("1",)}
"""The values that an attribute may have where it is not read, by type of node and name."""

UNREAD_INPUTS = ("token_index", "token_ks", "top_k_scores")


def name_of(value: Any) -> str:
    """The name of one of cuDNN's enum values, of a torch dtype, or of None."""
    return str(getattr(value, "name", value)).removeprefix("torch.")


TORCH_TYPES = {t.info.torch_name: t for t in DataType if t.info.packed == 1}


def _row_major(dim: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(dim[axis + 1 :]) for axis in range(len(dim)))


def stride_of(t: Any, dim: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a node's result: as the user set them, else row-major (what cuDNN infers is provisional)."""
    return tuple(t.stride) if t.stride and t.stride_assigned else _row_major(dim)


class Reading:
    """A cuDNN graph as it stands: who reads and gives what, which tensors are weights, what can be said in other words.

    `reasons` collects what cannot be read."""

    def __init__(self, pygraph: Any) -> None:
        context = pygraph.context
        self.nodes = pygraph.nodes
        self.name = str(getattr(pygraph, "_cpp_graph_kwargs", {}).get("name", "cudnn"))
        self.reasons: list[Reason] = []
        self.io = self._context_type(context.io_data_type, DataType.BFLOAT16)
        self.intermediate = self._context_type(context.intermediate_data_type, DataType.FLOAT)
        self.readers: dict[int, list[tuple[Any, str]]] = {}
        self.producers: dict[int, Any] = {}
        for node in self.nodes:
            for port, t in self._ports(node.inputs):
                self.readers.setdefault(t.uid, []).append((node, port))
            for _, t in self._ports(node.outputs):
                self.producers[t.uid] = node
        self.roles = self._find_roles()
        self.layouts = self._find_layouts()
        self.joined = self._find_joined()

    # ------------------------------------------------------------------ reading

    @staticmethod
    def _ports(ports: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(port, t) for port, t in ports.items() if t is not None]

    def _fail(self, code: str, where: Any, observed: object, required: str, hint: str = "") -> None:
        self.reasons.append(Reason(code, observed, required, hint,
                                   where=f"node {where.name}" if hasattr(where, "node_type")
                                   else f"tensor {where.name} (uid {where.uid})"))  # fmt: skip

    def _context_type(self, value: Any, default: DataType) -> DataType:
        name = name_of(value)
        if value is None or name == "NOT_SET":
            return default
        found = TORCH_TYPES.get(name) or (DataType(name) if name in DataType.__members__ else None)
        if found is None:
            self.reasons.append(Reason("DATA_TYPE", name, f"one of {[t.name for t in DataType]}", where="the graph"))
        return found or default

    def type_of(self, t: Any) -> DataType:
        """The data type of a tensor: as set, or the graph's default for its kind."""
        name = name_of(t.data_type)
        if t.data_type is None or name == "NOT_SET":
            return self.intermediate if t.is_virtual else self.io
        found = TORCH_TYPES.get(name) or (DataType(name) if name in DataType.__members__ else None)
        if found is None:
            self._fail("DATA_TYPE", t, name, f"one of {[x.name for x in DataType]}")
        return found or DataType.FLOAT

    def _find_roles(self) -> dict[int, str]:
        """Tensors that are no rows: "weights" (their codes and scales too), which keep three axes, and "offsets"."""
        roles: dict[int, str] = {}
        for node in self.nodes:
            for port, role in (("weight", "weights"), ("first_token_offset", "offsets"), ("group_offset", "offsets")):
                if (t := node.inputs.get(port)) is not None:
                    roles[t.uid] = role
            if (dweight := node.outputs.get("dweight")) is not None:
                roles[dweight.uid] = "weights"
        for node in reversed(self.nodes):
            if node.node_type.name == "BLOCK_SCALE_DEQUANTIZE" and roles.get(node.outputs["OUT_0"].uid) == "weights":
                roles[node.inputs["input"].uid] = roles[node.inputs["descale"].uid] = "weights"
        return roles

    def _find_layouts(self) -> dict[int, GluLayout]:
        """The GLU layout of each tensor that is cut into halves, and of those that it takes its columns from."""
        layouts: dict[int, GluLayout] = {}
        wanted: list[tuple[Any, GluLayout]] = []
        for node in self.nodes:
            if node.node_type.name == "SLICE" and (cut := self._halves(node)) is not None:
                wanted.append((node.inputs["input"], cut[0]))
        while wanted:
            t, layout = wanted.pop()
            if layouts.setdefault(t.uid, layout) != layout or (node := self.producers.get(t.uid)) is None:
                continue
            port = {"MOE_GROUPED_MATMUL": "weight", "BLOCK_SCALE_DEQUANTIZE": "input"}.get(node.node_type.name)
            if port is not None:
                wanted.append((node.inputs[port], layout))
            elif node.node_type.name == "POINTWISE":
                wanted += [(i, layout) for _, i in self._ports(node.inputs) if self._columns(i) == self._columns(t)]
        return layouts

    def _columns(self, t: Any) -> int | None:
        if t.dim:
            return int(t.dim[-1])
        node = self.producers.get(t.uid)
        if node is None:
            return None
        name = node.node_type.name
        if name == "MOE_GROUPED_MATMUL":
            return self._columns(node.inputs["weight"])
        return max((c for _, i in self._ports(node.inputs) if (c := self._columns(i)) is not None), default=None)

    def _halves(self, node: Any) -> tuple[GluLayout, str] | None:
        """The layout that one slice is a half of, and which half ("gate" first); None for any other slice."""
        x, slices = node.inputs["input"], list(node.params.get("slices") or ())
        columns = self._columns(x)
        if columns is None or not slices or columns % 2 or len(slices) != 3:
            return None
        dims = list(x.dim) if x.dim else None
        for axis, cut in enumerate(slices[:-1]):
            extent = dims[axis] if dims else cut.stop
            if cut.indices(extent) != (0, extent, 1):
                return None
        last = slices[-1].indices(columns)
        half = columns // 2
        return {
            (0, half, 1): (GluLayout.concatenated(), "gate"),
            (half, columns, 1): (GluLayout.concatenated(), "up"),
            (0, columns, 2): (GluLayout.interleaved(1), "gate"),
            (1, columns, 2): (GluLayout.interleaved(1), "up"),
        }.get(last)

    def _find_joined(self) -> dict[int, tuple[Any, str]]:
        """Pointwise nodes that a grouped matmul takes over, by `id` of the node: (operand, "alpha" or "bias")."""
        joined: dict[int, tuple[Any, str]] = {}
        for node in self.nodes:
            inputs = [t for _, t in self._ports(node.inputs)]
            if node.node_type.name != "POINTWISE" or len(inputs) != 2:
                continue
            for value, operand in (inputs, inputs[::-1]):
                source = self.producers.get(value.uid)
                if source is None or not self._per_expert(operand, source):
                    continue
                if source.node_type.name != "MOE_GROUPED_MATMUL" and id(source) not in joined:
                    continue  # something else stands between
                kind = {"mul": "alpha", "scale": "alpha", "add": "bias", "bias": "bias"}.get(
                    node.params.get("mode", "")
                )
                alone = value.is_virtual and len(self.readers[value.uid]) == 1
                before = joined[id(source)][1] if id(source) in joined else ""
                first = not before or (before, kind) == ("alpha", "bias")
                fits = operand.dim[2] == 1 if kind == "alpha" else True
                if kind and alone and first and fits and self.type_of(value) is DataType.FLOAT:
                    joined[id(node)] = (operand, kind)
        return joined

    def _per_expert(self, operand: Any, source: Any) -> bool:
        """[E, 1, X] beside the product of E experts, or beside what already took one over."""
        while source is not None and source.node_type.name == "POINTWISE":
            inputs = [t for _, t in self._ports(source.inputs)]
            source = next((p for t in inputs if (p := self.producers.get(t.uid)) is not None), None)
        if source is None or source.node_type.name != "MOE_GROUPED_MATMUL" or operand.uid in self.producers:
            return False
        experts = source.inputs["weight"].dim[0]
        return len(operand.dim or ()) == 3 and experts > 1 and tuple(operand.dim[:2]) == (experts, 1)

    def _check_node(self, node: Any) -> None:
        """Everything that a node alone says and that is not read: reported also where its inputs are unreadable."""
        self._check_attributes(node)
        for port, _ in self._ports(node.inputs):
            if port in UNREAD_INPUTS:
                self._fail("INPUT", node, f"input {port}", "rows that are already in the order of the experts")
        compute = node.compute_data_type
        if compute is not None and name_of(compute) not in ("FLOAT", "NOT_SET", "float32"):
            self._fail("COMPUTE_DATA_TYPE", node, name_of(compute), "FLOAT: all arithmetic is float32")
        for _, t in (*self._ports(node.inputs), *self._ports(node.outputs)):
            self.type_of(t)
            if t.ragged_offset is not None:
                self._fail("RAGGED_OFFSET", t, "a ragged offset", "none: rows are grouped by first_token_offset")
            swizzled = t.reordering_type is not None and name_of(t.reordering_type) != "NONE"
            is_scale = any(p == "descale" for _, p in self.readers.get(t.uid, ())) or t is node.outputs.get("scale")
            if swizzled and not (is_scale and name_of(t.reordering_type) == SWIZZLED):
                self._fail("REORDERING", t, name_of(t.reordering_type), f"none, or {SWIZZLED} on block scales")

    def _check_attributes(self, node: Any) -> None:
        kind = node.node_type.name
        mode = node.params.get("mode")
        if kind == "POINTWISE" and mode not in POINTWISE:
            self._fail("POINTWISE", node, f"mode {mode}", f"one of {sorted(POINTWISE)}")
            return
        read = ("mode", *ATTRIBUTES.get(f"pointwise {mode}", ())) if kind == "POINTWISE" else ATTRIBUTES.get(kind, ())
        for name, value in node.params.items():
            required = REQUIRED_VALUES.get((kind, name))
            if required is not None and value is not None and name_of(value) not in required:
                self._fail("ATTRIBUTE", node, f"{name} = {name_of(value)}", " or ".join(required))
            elif required is None and value not in (None, False) and name not in read and not name.startswith("_"):
                self._fail("ATTRIBUTE", node, f"{name} = {name_of(value)}", "not set")
