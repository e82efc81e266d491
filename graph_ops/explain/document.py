"""An Explanation as JSON, for machines: the same facts as the text, versioned."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ...kernels.condition import Reason
from ..ir.graph import Node
from .model import ExplainedStep, ExplainedVerdict, Explanation, LeftAlone

FORMAT = "opfuse.explanation"
VERSION = 1


def to_dict(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain JSON values. Times are seconds; `observed` is text."""
    e = explanation
    return {
        "format": FORMAT,
        "version": VERSION,
        "graph": e.graph.name,
        "arch": e.arch,
        "may_fuse": e.may_fuse,
        "bindings": dict(e.bindings),
        "nodes": len(e.graph.nodes),
        "fused_nodes": e.fused_nodes,
        "fused_kernels": len(e.fused_steps),
        "lone_kernels": len(e.lone_kernels),
        "estimate": {**asdict(e.estimate), "workspace_bytes": e.workspace_bytes},
        "unfused_estimate": {**asdict(e.unfused_estimate), "workspace_bytes": e.unfused_workspace_bytes},
        "steps": [_step(s) for s in e.steps],
        "raisings": [{"rule": r.rule, "declared_nodes": list(r.nodes), "into": r.into} for r in e.raisings],
        "left_unfused": [_left(left) for left in e.left_alone],
        "alternatives": [_verdict(v) for v in e.alternatives],
    }


def to_json(explanation: Explanation, indent: int | None = 1) -> str:
    """`to_dict` as JSON text."""
    return json.dumps(to_dict(explanation), indent=indent, allow_nan=False)


def _node(node: Node) -> dict[str, Any]:
    place = None if node.location is None else {"file": node.location.file, "line": node.location.line}
    return {"index": node.index, "name": node.name, "op": node.op, "location": place}


def _step(step: ExplainedStep) -> dict[str, Any]:
    return {
        "kernel": step.kernel,
        **({"title": step.title} if step.title != step.kernel else {}),
        "rule": step.rule,
        "nodes": [_node(n) for n in step.nodes],
        "reads": dict(step.reads),
        "writes": dict(step.writes),
        "estimate": asdict(step.estimate),
        "capturable": step.capturable,
        "capture_reason": step.capture_reason,
    }


def _left(left: LeftAlone) -> dict[str, Any]:
    return {
        "node": _node(left.node),
        **({"kernel": left.kernel} if left.kernel else {}),
        "verdicts": [_verdict(v) for v in left.verdicts],
        "told_at": list(left.told_at),
    }


def _verdict(verdict: ExplainedVerdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.name,
        "rule": verdict.rule,
        "kernel": verdict.kernel,
        "anchor": verdict.anchor,
        "nodes": list(verdict.with_nodes),
        "reasons": [_reason(r) for r in verdict.reasons],
    }


def _reason(reason: Reason) -> dict[str, str]:
    return {
        "code": reason.code,
        "observed": str(reason.observed),
        "required": reason.required,
        "hint": reason.hint,
        "where": reason.where,
    }
