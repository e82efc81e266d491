"""`opfuse::run_graph`: an operation graph as one op of an FX graph, so that Inductor and its caches can carry it.

The graph travels as JSON inside the op's arguments: a compiled artefact that is loaded in another process needs
nothing from the process that made it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...buffers import storage_stride, torch_dtype
from ...graph import Graph
from ...ir.dims import Dim, Expression, Symbol, evaluate
from ...ir.graph import OpGraph
from ...ir.serialize import from_json
from ...ir.tensor import TensorSpec
from ..graphs import GRAPHS, BuiltGraph
from ..registration import register

SCHEMA = "(Tensor[] inputs, str definition, str[] disable) -> Tensor[]"


@functools.lru_cache(maxsize=256)
def _parse(definition: str) -> tuple[OpGraph, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The graph, its inputs "in<i>" in order and its outputs "out<i>" in order."""
    graph = from_json(definition)
    inputs = sorted(graph.graph_inputs, key=lambda t: int(t.name.removeprefix("in")))
    outputs = sorted(graph.graph_outputs, key=lambda t: int(t.name.removeprefix("out")))
    return graph, tuple(inputs), tuple(outputs)


def _built(definition: str, device: torch.device, disable: tuple[str, ...]) -> BuiltGraph:
    def build() -> BuiltGraph:
        graph, inputs, outputs = _parse(definition)
        made = Graph.from_operation_graph(graph, device=device, disable=disable).build()
        return BuiltGraph(made, [s.name for s in inputs], [s.name for s in outputs])

    return GRAPHS.get((definition, device, disable), build)


def _bindings(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Every symbol, from an extent or stride that is a multiple of it alone; extents may be symbolic themselves."""
    found: dict[str, Any] = {}

    def bind(dims: Sequence[Dim], extents: Sequence[Any]) -> None:
        for dim, extent in zip(dims, extents, strict=True):
            if isinstance(dim, Expression) and len(dim.terms) == 1:
                (monomial, coefficient), *_ = dim.terms
                if len(monomial) == 1 and isinstance(monomial[0], Symbol) and monomial[0].name not in found:
                    found[monomial[0].name] = extent // coefficient

    for spec, tensor in zip(specs, tensors, strict=True):
        bind(spec.dim, tensor.shape)
        bind(spec.stride, tensor.stride())
    return found


def _as_declared(tensor: torch.Tensor, spec: TensorSpec, bindings: Mapping[str, int]) -> torch.Tensor:
    """`tensor`, copied where a compiler laid it out, or placed it, otherwise than it was traced."""
    wanted = storage_stride(spec, bindings)
    same = all(d <= 1 or s == w for d, s, w in zip(tensor.shape, tensor.stride(), wanted, strict=True))
    if (same and tensor.data_ptr() % spec.alignment == 0) or not tensor.numel():
        return tensor
    return torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _run_graph(inputs: Sequence[torch.Tensor], definition: str, disable: Sequence[str]) -> list[torch.Tensor]:
    calls = _built(definition, inputs[0].device, tuple(disable)).calls
    made = calls.again(inputs)
    if made is None:
        _, specs, _ = _parse(definition)
        bindings = _bindings(specs, inputs)
        made = calls(*[_as_declared(t, s, bindings) for s, t in zip(specs, inputs, strict=True)])
    return list(made)


def _fake_graph(inputs: Sequence[torch.Tensor], definition: str, disable: Sequence[str]) -> list[torch.Tensor]:
    _, specs, outputs = _parse(definition)
    bindings = _bindings(specs, inputs)
    return [
        torch.empty_strided(
            [evaluate(d, bindings) for d in s.dim], [evaluate(d, bindings) for d in s.stride],
            dtype=torch_dtype(s.data_type), device=inputs[0].device,
        )
        for s in outputs
    ]  # fmt: skip


run_graph = register("run_graph", SCHEMA, _run_graph, _fake_graph)
