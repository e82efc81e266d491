"""The oracle's two doors: one op, or a whole graph with its roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.graph import OpGraph
from ...graph_ops.ir.tensor import TensorSpec
from . import glu, groups, matmul, pointwise, quantize
from .rounding import ROUNDING, round_to, torch_type

Value = torch.Tensor | Sequence[torch.Tensor] | float
Evaluate = Callable[[Mapping[str, torch.Tensor], Mapping[str, Any], Mapping[str, TensorSpec]], dict[str, torch.Tensor]]

EVALUATE: dict[str, Evaluate] = {
    name: function
    for family in (matmul, glu, groups, quantize, pointwise)
    for name, function in family.EVALUATE.items()
}
"""The definition of every op by name."""


def evaluate(
    op: str,
    inputs: Mapping[str, Value],
    attributes: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    *,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """What `op` computes, by output port, in `dtype` arithmetic.

    `inputs`: port -> tensor, number, or for discrete weights the sequence of L matrices; each is first what its
    tensor's data type holds. A port whose old contents are read (accumulate) is given as an input of that name.
    `specs`: port -> TensorSpec of inputs and outputs. Results are not rounded to the output's data type, except codes
    and scales, which are exact bytes, and comparisons, which are booleans. Raises KeyError for an unknown op.
    """
    prepared = {port: _prepare(value, specs[port].data_type, dtype) for port, value in inputs.items()}
    return EVALUATE[op](prepared, attributes, specs)


def _prepare(value: Value, data_type: DataType, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_prepare(v, data_type, dtype) for v in value]
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    return round_to(tensor.to(dtype), data_type) if data_type in ROUNDING else tensor


def evaluate_graph(
    graph: OpGraph, values: Mapping[int, Value], *, dtype: torch.dtype = torch.float64
) -> dict[int, torch.Tensor]:
    """Every tensor that the graph's nodes produce, by uid, each stored in its own data type.

    `values`: graph inputs by uid, and the old contents of outputs that are accumulated into. Rounding happens where a
    tensor's data type says so, virtual or not, and nowhere else. Rows of no expert are zero in what follows a grouped
    matmul (OpGraph.row_groups). Raises KeyError for a missing input.
    """
    known: dict[int, Value] = {uid: t.value for uid, t in graph.tensors.items() if t.value is not None}
    known.update({uid: value for uid, value in values.items() if uid not in graph.producers})
    produced: dict[int, torch.Tensor] = {}
    for node in graph.topological_order:
        inputs = {port: known[uid] for port, uid in node.inputs}
        inputs.update({port: values[node.output_uids[port]] for port in node.reads_output})
        specs = {**graph.inputs_of(node), **graph.outputs_of(node)}
        results = evaluate(node.op, inputs, node.attribute, specs, dtype=dtype)
        groups = graph.row_groups(node)
        if groups is not None:
            results = {port: _clear_unowned(t, known[groups]) for port, t in results.items()}
        stored = {uid: store(results[port], graph.tensors[uid].data_type) for port, uid in node.outputs}
        produced.update(stored)
        known.update(stored)
    return produced


def _clear_unowned(result: torch.Tensor, offsets: Any) -> torch.Tensor:
    """`result` (M, ...) with zero in the rows past the last offset."""
    end = int(offsets[-1]) if len(offsets) else 0
    return torch.cat([result[:end], torch.zeros_like(result[end:])])


def store(result: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """`result` rounded once and stored in the torch dtype of `data_type`."""
    return round_to(result, data_type).to(torch_type(data_type))
