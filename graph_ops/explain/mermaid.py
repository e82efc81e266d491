"""An Explanation as a Mermaid flowchart, in the subset that GitHub renders."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.graph import Node, OpGraph
from ..ir.tensor import TensorSpec
from .model import ExplainedStep, Explanation

CLASSES = (
    "classDef fused fill:#d9f2d9,stroke:#2e7d32,color:#111",
    "classDef unfused fill:#f6f6f6,stroke:#888,color:#111",
    "classDef declined fill:#fff3d6,stroke:#b26a00,color:#111,stroke-dasharray:4 3",
    "classDef buffer fill:#e3ecfb,stroke:#3b5b92,color:#111",
)
"""Colours: fused, unfused, unfused although a rule came near, and the caller's buffers."""


def render(explanation: Explanation) -> str:
    """Nodes as boxes, buffers of the caller as rounded boxes, tensors as labels; one subgraph for each fused step."""
    return "\n".join(_lines(explanation)) + "\n"


def _lines(e: Explanation) -> Iterator[str]:
    graph = e.graph
    yield "flowchart TD"
    for tensor in graph.graph_inputs:
        yield f"  t{tensor.uid}([{_quoted(_tensor(tensor))}]):::buffer"
    near = {left.node.index for left in e.left_alone if left.verdicts or left.told_at}
    for number, step in enumerate(e.steps, 1):
        yield from _step(number, step, near)
    for tensor in graph.graph_outputs:
        yield f"  t{tensor.uid}([{_quoted(_tensor(tensor))}]):::buffer"
    yield from _edges(graph)
    yield from (f"  {line}" for line in CLASSES)


def _step(number: int, step: ExplainedStep, near: set[int]) -> Iterator[str]:
    if step.rule is None:
        for node in step.nodes:
            yield f"  n{node.index}[{_quoted(_node(node, number))}]:::{'declined' if node.index in near else 'unfused'}"
        return
    yield f"  subgraph s{number}[{_quoted(f'step {number}: {step.title}')}]"
    for node in step.nodes:
        yield f"    n{node.index}[{_quoted(_node(node, None))}]:::fused"
    yield "  end"


def _edges(graph: OpGraph) -> Iterator[str]:
    for node in graph.nodes:
        for port, uid in node.inputs:
            tensor = graph.tensors[uid]
            if tensor.is_constant:
                continue
            made = graph.producers.get(uid)
            if made is None:
                yield f"  t{uid} -->|{_quoted(port)}| n{node.index}"
            else:
                yield f"  n{made.node.index} -->|{_quoted(_tensor(tensor))}| n{node.index}"
        for _, uid in node.outputs:
            if graph.tensors[uid].is_output:
                yield f"  n{node.index} --> t{uid}"


def _node(node: Node, number: int | None) -> str:
    # No label may begin with "1. ": Mermaid would take it for a Markdown list and refuse it.
    return f"{node.name}<br/>{node.op}" + ("" if number is None else f", step {number}")


def _tensor(tensor: TensorSpec) -> str:
    return f"{tensor.name} ({', '.join(map(str, tensor.dim))}) {tensor.data_type!r}"


def _quoted(text: str) -> str:
    """A label: quotes and what Mermaid would read as markup as entities."""
    escaped = text.replace("#", "#35;").replace('"', "#quot;")
    return '"' + escaped.replace("<br/>", "\0").replace("<", "#lt;").replace(">", "#gt;").replace("\0", "<br/>") + '"'
