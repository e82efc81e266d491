"""Operation graphs as JSON: `to_json(graph)` and back, equal after the round trip."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from .dims import Dim, Symbol, parse, symbol
from .dtypes import DataType
from .errors import GraphError, SourceLocation
from .graph import Node, OpGraph
from .layouts import GluLayout, ScaleLayout
from .tensor import TensorSpec

FORMAT = "opfuse.graph"
VERSION = 1


def to_dict(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "io_data_type": graph.io_data_type.value,
        "intermediate_data_type": graph.intermediate_data_type.value,
        "deterministic": graph.deterministic,
        "symbols": [_symbol(s) for s in graph.symbols],
        "tensors": [_tensor(t) for t in graph.tensors.values()],
        "nodes": [_node(n) for n in graph.nodes],
    }


def to_json(graph: OpGraph, indent: int | None = 1) -> str:
    """The graph as JSON text. Numbers that JSON lacks are written as "inf", "-inf" and "nan"."""
    return json.dumps(to_dict(graph), indent=indent, allow_nan=False)


def from_json(text: str) -> OpGraph:
    """The graph that `to_json` wrote. Raises GraphError for other text; the graph is not verified yet."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise GraphError("JSON", asked="an operation graph", seen=str(error), required="JSON text") from error
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> OpGraph:
    """The graph of `to_dict`. Raises GraphError for another format or version, or for missing fields."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise GraphError(
            "JSON_FORMAT",
            asked="an operation graph",
            seen=data.get("format") if isinstance(data, Mapping) else type(data),
            required=f"format {FORMAT!r}",
        )
    if data.get("version") != VERSION:
        raise GraphError(
            "JSON_VERSION",
            asked="an operation graph",
            seen=data.get("version"),
            required=f"version {VERSION}",
            hint="write it again with this version of opfuse",
        )
    try:
        table = {s["name"]: symbol(s["name"], s["multiple_of"], s["maximum"]) for s in data["symbols"]}
        tensors = [_read_tensor(t, table) for t in data["tensors"]]
        if len({t.uid for t in tensors}) < len(tensors):
            raise GraphError(
                "JSON_FIELD", asked="an operation graph", seen="one uid on two tensors", required="unique uids"
            )
        return OpGraph(
            name=data["name"],
            tensors={t.uid: t for t in tensors},
            nodes=tuple(_read_node(i, n) for i, n in enumerate(data["nodes"])),
            io_data_type=DataType(data["io_data_type"]),
            intermediate_data_type=DataType(data["intermediate_data_type"]),
            deterministic=data["deterministic"],
        )
    except GraphError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GraphError("JSON_FIELD", asked="an operation graph", seen=f"{type(error).__name__}: {error}",
                         required="the fields that to_json writes") from error  # fmt: skip


def _symbol(atom: Symbol) -> dict[str, Any]:
    return {"name": atom.name, "multiple_of": atom.multiple_of, "maximum": atom.maximum}


def _dims(dims: tuple[Dim, ...]) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in dims]


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {
        "uid": tensor.uid,
        "name": tensor.name,
        "dim": _dims(tensor.dim),
        "stride": _dims(tensor.stride),
        "data_type": tensor.data_type.value,
        "virtual": tensor.is_virtual,
        "output": tensor.is_output,
        "glu_layout": None if tensor.glu_layout is None else str(tensor.glu_layout),
        "scale_layout": None if (s := tensor.scale_layout) is None
        else {"block_size": s.block_size, "axis": s.axis, "swizzled": s.swizzled},
        "alignment": tensor.alignment,
        "discrete": tensor.discrete,
        "multiple_of": tensor.multiple_of,
        "value": None if tensor.value is None else _number(tensor.value),
        "location": _location(tensor.location),
    }  # fmt: skip


def _read_tensor(data: Mapping[str, Any], table: Mapping[str, Any]) -> TensorSpec:
    scale = data["scale_layout"]
    return TensorSpec(
        uid=data["uid"],
        name=data["name"],
        dim=tuple(parse(d, table) for d in data["dim"]),
        stride=tuple(parse(d, table) for d in data["stride"]),
        data_type=DataType(data["data_type"]),
        is_virtual=data["virtual"],
        is_output=data["output"],
        glu_layout=None if data["glu_layout"] is None else GluLayout.parse(data["glu_layout"]),
        scale_layout=None if scale is None else ScaleLayout(**scale),
        alignment=data["alignment"],
        discrete=data["discrete"],
        multiple_of=data["multiple_of"],
        value=None if data["value"] is None else float(data["value"]),
        location=_read_location(data["location"]),
    )


def _node(node: Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "name": node.name,
        "inputs": dict(node.inputs),
        "outputs": dict(node.outputs),
        "attributes": {k: _value(v) for k, v in node.attributes},
        "location": _location(node.location),
    }


def _read_node(index: int, data: Mapping[str, Any]) -> Node:
    return Node(
        index=index,
        op=data["op"],
        name=data["name"],
        inputs=tuple(data["inputs"].items()),
        outputs=tuple(data["outputs"].items()),
        attributes=tuple((k, _read_value(v)) for k, v in data["attributes"].items()),
        location=_read_location(data["location"]),
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return _number(value) if isinstance(value, float) else value


def _read_value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if value in ("inf", "-inf", "nan") else value


def _location(location: SourceLocation | None) -> list[Any] | None:
    return None if location is None else [location.file, location.line]


def _read_location(data: list[Any] | None) -> SourceLocation | None:
    return None if data is None else SourceLocation(*data)
