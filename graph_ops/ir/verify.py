"""The rules of a well-formed operation graph, as a table.

Each rule yields every violation that it finds; `verify` collects those of all rules, in table order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .dims import known_divisor
from .dtypes import DataType
from .errors import GraphError, VerificationError
from .graph import Node, OpGraph
from .layouts import GluLayout
from .op import InferenceInput
from .ops import OPS
from .tensor import TensorSpec

Check = Callable[[OpGraph], Iterator[GraphError]]
NodeCheck = Callable[[OpGraph, Node], Iterator[GraphError]]
TensorCheck = Callable[[TensorSpec], Iterator[GraphError]]


@dataclass(frozen=True)
class VerifierRule:
    """One rule: the code of its violations, what must hold, and the check."""

    code: str
    requirement: str
    check: Check


def _each_node(check: NodeCheck) -> Check:
    """`check` at every node. Nodes that are alike pass alike: one of each kind is asked first."""

    def checked(graph: OpGraph) -> Iterator[GraphError]:
        if any(True for node in graph.structure.nodes for _ in check(graph, node)):
            for node in graph.nodes:
                yield from check(graph, node)

    return checked


def _each_tensor(check: TensorCheck) -> Check:
    """`check` of every tensor, likewise."""

    def checked(graph: OpGraph) -> Iterator[GraphError]:
        if any(True for tensor in graph.structure.tensors for _ in check(tensor)):
            for tensor in graph.tensors.values():
                yield from check(tensor)

    return checked


def _error(
    code: str, where: Node | TensorSpec, asked: object, seen: object, required: object, hint: str | None = None
) -> GraphError:
    place = (
        where.path
        if isinstance(where, Node)
        else f"tensor {where.name}" + (f" at {where.location}" if where.location else "")
    )
    return GraphError(code, asked=asked, seen=seen, required=required, hint=hint, where=place)


def _not_empty(graph: OpGraph) -> Iterator[GraphError]:
    if not graph.nodes:
        yield GraphError("GRAPH_EMPTY", asked=f"graph {graph.name}", seen="no node", required="at least one node")
    elif not any(t.is_output for t in graph.structure.tensors):
        yield GraphError(
            "NO_OUTPUT",
            asked=f"graph {graph.name}",
            seen="no output tensor",
            required="at least one",
            hint="call .set_output(True) on the tensors you want written",
        )


@_each_node
def _known_ops(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op not in OPS:
        yield _error("OP_UNKNOWN", node, node.op, "no such op", f"one of {sorted(OPS)}")


@_each_node
def _ports(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op not in OPS:
        return
    spec = node.spec
    for kind, ports, given in (("input", spec.inputs, node.inputs), ("output", spec.outputs, node.outputs)):
        names = Counter(p for p, _ in given)
        for port in ports:
            count = names.pop(port.name, 0)
            if count > 1 or (count == 0 and not port.optional):
                yield _error("PORT_MISSING", node, f"{kind} {port.name}", f"there {count} times", "there once")
        for name in names:
            yield _error("PORT_UNKNOWN", node, f"{kind} {name}", "no such port", f"one of {[p.name for p in ports]}")
    for _, uid in (*node.inputs, *node.outputs):
        if uid not in graph.tensors:
            yield _error("TENSOR_UNKNOWN", node, f"tensor uid {uid}", "not in the graph", "a tensor of this graph")


def _single_writer(graph: OpGraph) -> Iterator[GraphError]:
    written = [uid for node in graph.nodes for _, uid in node.outputs]
    if len(written) == len(graph.written_by) and not any(t.is_constant for t in graph.structure.tensors):
        return
    writers = Counter(written)
    for uid, count in writers.items():
        if count > 1 and uid in graph.tensors:
            yield _error("WRITERS", graph.tensors[uid], "tensor", f"{count} nodes write it", "one writer")
        if uid in graph.tensors and graph.tensors[uid].is_constant:
            yield _error("CONSTANT_WRITTEN", graph.tensors[uid], "compile-time scalar", "a node writes it", "no writer")


def _acyclic(graph: OpGraph) -> Iterator[GraphError]:
    if len(order := graph.topological_order) < len(graph.nodes):
        left = sorted({n.index for n in graph.nodes} - {n.index for n in order})
        names = [n.name for n in graph.nodes if n.index in left]
        yield GraphError("CYCLE", asked=f"graph {graph.name}", seen=f"a cycle through {names}", required="no cycle")


def _virtual_is_produced(graph: OpGraph) -> Iterator[GraphError]:
    structure, written_by = graph.structure, graph.written_by
    made = {kind for kind, t in enumerate(structure.tensors) if t.is_virtual or t.is_output}
    if not any(t.is_virtual and t.is_output for t in structure.tensors) and all(
        uid in written_by for uid, kind in structure.tensor_kind.items() if kind in made
    ):
        return
    for uid, tensor in graph.tensors.items():
        produced = uid in written_by
        if tensor.is_virtual and not produced:
            yield _error(
                "VIRTUAL_INPUT", tensor, "virtual tensor", "no node writes it", "a producer, or a buffer of the caller"
            )
        if tensor.is_output and not produced:
            yield _error("OUTPUT_UNPRODUCED", tensor, "output tensor", "no node writes it", "a producer")
        if tensor.is_output and tensor.is_virtual:
            yield _error("OUTPUT_VIRTUAL", tensor, "output tensor", "virtual", "an output is not virtual")


@_each_tensor
def _tensor_shape(tensor: TensorSpec) -> Iterator[GraphError]:
    negative = [d for d in tensor.dim if isinstance(d, int) and d < 0]
    if negative:
        yield _error("DIM", tensor, "dim", tensor.dim, "extents >= 0")
    if len(tensor.stride) != len(tensor.dim):
        yield _error("STRIDE", tensor, "stride", tensor.stride, f"{len(tensor.dim)} strides, as dim {tensor.dim}")
    elif any(isinstance(s, int) and s < 0 for s in tensor.stride):
        yield _error("STRIDE", tensor, "stride", tensor.stride, "strides >= 0")
    if tensor.alignment < 1 or tensor.alignment & (tensor.alignment - 1):
        yield _error("ALIGNMENT", tensor, "alignment", tensor.alignment, "a power of two, in bytes")
    if tensor.data_type.info.packed > 1 and tensor.rank == 3 and len(tensor.stride) == 3:
        yield from _packed_weights(tensor)
    if tensor.discrete and tensor.rank != 3:
        yield _error("DISCRETE", tensor, "discrete weights", f"dim {tensor.dim}", "(L, K, N)")
    if (tensor.is_output or tensor.is_virtual) and any(
        s == 0 and d != 1 for s, d in zip(tensor.stride, tensor.dim, strict=False)
    ):
        yield _error(
            "STRIDE_OVERLAP", tensor, "written tensor", f"stride {tensor.stride}", "no stride 0 on an extent over 1"
        )


def _packed_weights(tensor: TensorSpec) -> Iterator[GraphError]:
    packed, axis = tensor.data_type.info.packed, tensor.packed_axis
    apart = (*tensor.stride[:axis], *tensor.stride[axis + 1 :])
    if (
        tensor.stride[axis] != 1
        or known_divisor(tensor.dim[axis]) % packed
        or any(known_divisor(s) % packed for s in apart)
    ):
        yield _error("PACKING", tensor, f"dim {tensor.dim}", f"stride {tensor.stride}",
                     f"an axis of stride 1; its extent and every other stride multiples of {packed}")  # fmt: skip


@_each_tensor
def _layout_fits(tensor: TensorSpec) -> Iterator[GraphError]:
    layout = tensor.glu_layout
    if layout is not None and (not tensor.dim or known_divisor(tensor.dim[-1]) % (2 * (layout.width or 1))):
        yield _error("GLU_COLUMNS", tensor, f"GLU layout {layout}", f"dim {tensor.dim}",
                     f"a last extent in multiples of {2 * (layout.width or 1)}")  # fmt: skip


DISCRETE_PORTS = {("grouped_matmul", "b"), ("block_scale_dequantize", "x"), ("block_scale_dequantize", "scale")}


def _discrete_use(graph: OpGraph) -> Iterator[GraphError]:
    if not any(t.discrete for t in graph.structure.tensors):
        return
    for uid, tensor in graph.tensors.items():
        if not tensor.discrete:
            continue
        for use in graph.uses[uid]:
            if (use.node.op, use.port) not in DISCRETE_PORTS:
                yield _error("DISCRETE", use.node, f"input {use.port} = {tensor.name}", "discrete weights",
                             "b of grouped_matmul, or x and scale of block_scale_dequantize")  # fmt: skip


@_each_node
def _inference(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op not in OPS or any(uid not in graph.tensors for _, uid in (*node.inputs, *node.outputs)):
        return
    if any(not port.optional and port.name not in node.input_uids for port in node.spec.inputs):
        return  # PORT_MISSING says so
    try:
        inferred = node.spec.infer(
            {p: InferenceInput.of(t) for p, t in graph.inputs_of(node).items()}, node.spec.complete(node.attribute)
        )
    except GraphError as error:
        yield _error(error.code, node, error.asked, error.seen, error.required, error.hint)
        return
    outputs = graph.outputs_of(node)
    for port in inferred:
        if port not in outputs and node.spec.output(port).optional:
            yield _error("PORT_MISSING", node, f"output {port}", "there 0 times", "there once, with these attributes")
    for port, tensor in outputs.items():
        if (wanted := inferred.get(port)) is None:
            yield _error(
                "PORT_ABSENT",
                node,
                f"output {port}",
                "not produced with these attributes",
                f"one of {list(inferred)}",
            )
        elif tensor.dim != wanted.dim:
            yield _error("OUTPUT_SHAPE", node, f"output {port} = {tensor.name}", tensor.dim, wanted.dim)
        elif tensor.glu_layout != wanted.glu_layout:
            yield _error(
                "OUTPUT_GLU_LAYOUT",
                node,
                f"output {port} = {tensor.name}",
                _layout_text(tensor.glu_layout),
                _layout_text(wanted.glu_layout),
                "convert_glu_layout gives another layout",
            )
        elif tensor.scale_layout != wanted.scale_layout:
            yield _error(
                "OUTPUT_SCALE_LAYOUT",
                node,
                f"output {port} = {tensor.name}",
                tensor.scale_layout,
                wanted.scale_layout,
            )
        elif wanted.data_type not in (None, tensor.data_type):
            yield _error("OUTPUT_DATA_TYPE", node, f"output {port} = {tensor.name}", tensor.data_type, wanted.data_type)


def _layout_text(layout: GluLayout | None) -> str:
    return "no GLU layout" if layout is None else str(layout)


@_each_node
def _data_types(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op not in OPS:
        return
    for kind, ports, given in (
        ("input", node.spec.inputs, node.inputs),
        ("output", node.spec.outputs, node.outputs),
    ):
        accepted = {p.name: p.data_types for p in ports}
        for port, uid in given:
            tensor = graph.tensors.get(uid)
            if tensor is not None and port in accepted and tensor.data_type not in accepted[port]:
                yield _error(
                    "DATA_TYPE",
                    node,
                    f"{kind} {port} = {tensor.name}",
                    tensor.data_type,
                    f"one of {list(accepted[port])}",
                )


MATMUL_OPERANDS = {"grouped_matmul": ("a", "b"), "grouped_matmul_wgrad": ("a", "dy")}


@_each_node
def _matmul_operands_agree(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op in MATMUL_OPERANDS:
        inputs = graph.inputs_of(node)
        types = {port: inputs[port].data_type for port in MATMUL_OPERANDS[node.op] if port in inputs}
        if len(set(types.values())) > 1:
            yield _error("OPERAND_TYPES", node, "operands", types, "one data type for both")


def _no_double_inputs(graph: OpGraph) -> Iterator[GraphError]:
    if any(t.data_type is DataType.DOUBLE for t in graph.structure.tensors):
        names = [t.name for t in graph.tensors.values() if t.data_type is DataType.DOUBLE]
        yield GraphError("DATA_TYPE_DOUBLE", asked=f"tensors {names}", seen=DataType.DOUBLE,
                         required="FLOAT or narrower: arithmetic is float32")  # fmt: skip


def _symbols_agree(graph: OpGraph) -> Iterator[GraphError]:
    by_name: dict[str, set[object]] = {}
    for atom in graph.symbols:
        by_name.setdefault(atom.name, set()).add(atom)
    for name, atoms in by_name.items():
        if len(atoms) > 1:
            yield GraphError("SYMBOL_CLASH", asked=f"symbol {name}", seen=f"{len(atoms)} declarations that differ",
                             required="one declaration of multiple_of and maximum")  # fmt: skip


@_each_tensor
def _value_promises(tensor: TensorSpec) -> Iterator[GraphError]:
    if tensor.multiple_of == 1:
        return
    if tensor.multiple_of < 1:
        yield _error("MULTIPLE_OF", tensor, "multiple_of", tensor.multiple_of, "at least 1")
    elif tensor.data_type.info.kind != "int" or tensor.is_virtual or tensor.is_output:
        yield _error("MULTIPLE_OF", tensor, f"multiple_of={tensor.multiple_of}", f"{tensor.data_type!r}, "
                     + ("produced by a node" if tensor.is_virtual or tensor.is_output else "a graph input"),
                     "an integer graph input, whose values the caller knows")  # fmt: skip


@_each_node
def _in_place_outputs(graph: OpGraph, node: Node) -> Iterator[GraphError]:
    if node.op not in OPS:
        return
    for port in node.reads_output:
        tensor = graph.tensors.get(node.output_uids.get(port, -1))
        if tensor is not None and not tensor.is_output:
            yield _error(
                "ACCUMULATE_VIRTUAL",
                node,
                f"output {port}, accumulated in place",
                "a virtual tensor",
                "an output, whose buffer the caller fills first",
                "call .set_output(True) on it",
            )


RULES: tuple[VerifierRule, ...] = (
    VerifierRule("GRAPH_EMPTY", "a graph has a node and an output", _not_empty),
    VerifierRule("OP_UNKNOWN", "every op is in the table of ops", _known_ops),
    VerifierRule("PORT_MISSING", "every port that must be there is, once, and no other", _ports),
    VerifierRule("WRITERS", "each tensor has one writer; a compile-time scalar has none", _single_writer),
    VerifierRule("CYCLE", "nodes form no cycle", _acyclic),
    VerifierRule("VIRTUAL_INPUT", "a virtual or output tensor has a producer, and is not both", _virtual_is_produced),
    VerifierRule(
        "STRIDE", "dims, strides and alignment make sense; written tensors do not overlap themselves", _tensor_shape
    ),
    VerifierRule("GLU_COLUMNS", "a GLU layout fits the columns it describes", _layout_fits),
    VerifierRule("DISCRETE", "discrete weights feed b of grouped_matmul or block_scale_dequantize", _discrete_use),
    VerifierRule("OUTPUT_SHAPE", "shapes and layouts are those that inference gives", _inference),
    VerifierRule("DATA_TYPE", "each port accepts the data type of its tensor", _data_types),
    VerifierRule("OPERAND_TYPES", "both operands of a matmul have one data type", _matmul_operands_agree),
    VerifierRule("DATA_TYPE_DOUBLE", "no tensor is DOUBLE: arithmetic is float32", _no_double_inputs),
    VerifierRule("SYMBOL_CLASH", "a symbol is declared one way", _symbols_agree),
    VerifierRule("MULTIPLE_OF", "only integer graph inputs promise what their values divide by", _value_promises),
    VerifierRule(
        "ACCUMULATE_VIRTUAL", "an output that is accumulated into is an output of the graph", _in_place_outputs
    ),
)


def violations(graph: OpGraph) -> tuple[GraphError, ...]:
    """Every violation of every rule, in table order."""
    return tuple(v for rule in RULES for v in rule.check(graph))


def verify(graph: OpGraph) -> None:
    """Raises VerificationError with every violation, if there is any."""
    if found := violations(graph):
        raise VerificationError(found)
