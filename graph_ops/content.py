"""What a graph is, apart from its labels: the content key. And a graph together with its chosen plan, as bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .ir.errors import GraphError
from .ir.graph import OpGraph
from .ir.serialize import to_dict

MAGIC = b"OPFUSE-PLAN\n"
VERSION = 1
FIELDS = ("graph", "arch", "fused", "strict", "disable", "selected", "winners")

IRRELEVANT = {
    "graph": ("name",),
    "tensor": ("name", "location", "uid"),
    "node": ("name", "location"),
}
"""Fields that the key leaves out: labels, source lines, and uids, which are replaced by the order of the tensors."""


def content_key(graph: OpGraph) -> str:
    """A SHA-256 over everything that a plan or its results depend on; IRRELEVANT names what it leaves out."""
    data = to_dict(graph)
    place = {tensor["uid"]: position for position, tensor in enumerate(data["tensors"])}
    content = {
        **_without(data, IRRELEVANT["graph"]),
        "tensors": [_without(t, IRRELEVANT["tensor"]) for t in data["tensors"]],
        "nodes": [
            {
                **_without(n, IRRELEVANT["node"]),
                "inputs": {port: place[uid] for port, uid in n["inputs"].items()},
                "outputs": {port: place[uid] for port, uid in n["outputs"].items()},
            }
            for n in data["nodes"]
        ],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def pack(payload: Mapping[str, Any]) -> bytes:
    """Magic, version and JSON."""
    return MAGIC + json.dumps({"version": VERSION, **payload}, allow_nan=False).encode()


def unpack(data: bytes) -> dict[str, Any]:
    """The payload of `pack`. Raises GraphError for other bytes or another version."""
    if not isinstance(data, (bytes, bytearray, memoryview)) or not bytes(data).startswith(MAGIC):
        raise _unreadable(f"{type(data).__name__} without the magic {MAGIC!r}")
    try:
        payload = json.loads(bytes(data)[len(MAGIC) :])
    except json.JSONDecodeError as error:
        raise _unreadable(str(error)) from error
    if not isinstance(payload, dict):
        raise _unreadable(f"JSON of a {type(payload).__name__}")
    if payload.get("version") != VERSION:
        raise GraphError("PLAN_VERSION", asked="deserialize", seen=payload.get("version"),
                         required=f"version {VERSION}", hint="build the graph again and serialize it anew")  # fmt: skip
    if missing := [field for field in FIELDS if field not in payload]:
        raise _unreadable(f"no {', '.join(missing)}")
    return payload


def _unreadable(seen: str) -> GraphError:
    return GraphError("PLAN_FORMAT", asked="deserialize", seen=seen, required="bytes that serialize() wrote")


def _without(data: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in fields}
